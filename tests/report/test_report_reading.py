"""A damaged run is still a run: what can be read is read, what cannot is named, nothing raises."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pirl.errors import CheckpointError
from pirl.report.page import build_page
from pirl.report.run import read_run

MakeRun = Callable[..., Path]


def test_a_run_is_read(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert (run.recipe, run.exp_name, run.algorithm) == ("debug", "first", "ACRLPD")
    assert (run.last_step, run.total_steps, run.episodes, run.notes) == (60, 60, 384, ())
    assert run.series["critic/loss"].steps.tolist() == [10, 20, 30, 40, 50, 60]
    assert run.series["critic/loss"].values[-1] == 2.0
    first, last = run.success(0), run.success(-1)
    assert first is not None
    assert last is not None
    assert (first[0], first[1].value) == (0, 0.2)
    assert (last[0], last[1].value, last[1].low) == (60, pytest.approx(0.9), pytest.approx(0.8))
    # Started 20 s before the first record's clock of 22:13:20, which has step 0; the last has step 60.
    assert run.seconds == 80


def test_a_cut_last_line_is_ignored_and_noted(make_run: MakeRun) -> None:
    folder = make_run()
    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-25])
    run = read_run(folder)
    assert run.notes == ("metrics.jsonl: the last line is cut off and was ignored",)
    assert run.series["critic/loss"].steps.tolist() == [10, 20, 30, 40, 50]


def test_lines_that_are_no_records_are_counted(make_run: MakeRun) -> None:
    folder = make_run()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    bad = ['{"step": "x", "time": 0, "values": {}}', "[]", '{"step": 1e999, "time": 0, "values": {}}', "\x00\xff"]
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:3], *bad, *lines[3:]]) + "\n")
    run = read_run(folder)
    assert run.notes == (f"metrics.jsonl: 4 of {len(lines) + 4} lines are not records and were ignored (first: 4)",)
    assert run.last_step == 60


def test_null_is_a_gap(make_run: MakeRun) -> None:
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "time": 5, "values": {"critic/loss": null, "x": 1e400}, "non_finite": []}\n')
    run = read_run(folder)
    assert math.isnan(run.series["critic/loss"].values[-1])
    assert math.isnan(run.series["x"].values[0])


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("config.yaml", "agent: [", "config.yaml: not YAML"),
        ("config.yaml", "a: 1\na: 2\n", "'a' is set twice"),
        ("metadata.json", "[1]", "metadata.json cannot be read: a list where an object was expected"),
        ("60/extra/metadata.json", "{", "60/extra/metadata.json cannot be read"),
        ("60/extra/extra.json", "\xff", "60/extra/extra.json cannot be read"),
        ("evaluations/a/eval.json", "{}", "evaluations/a/eval.json is not what `pirl eval` writes"),
        ("evaluations/a/eval.json", "[" * 100_000, "evaluations/a/eval.json is not what"),
        ("eval.json", '{"evaluation": {}, "result": {"success": {"rate": "x"}}}', "eval.json is not what"),
    ],
)
def test_what_cannot_be_read_is_named_in_the_page(make_run: MakeRun, name: str, content: str, note: str) -> None:
    folder = make_run()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content, encoding="latin-1")
    run = read_run(folder)
    assert len(run.notes) == 1
    assert note in run.notes[0]
    page = build_page([run], {})
    assert '<section id="notes">' in page
    assert '<section id="losses">' in page


def test_a_folder_in_the_place_of_a_file(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    run = read_run(folder)
    assert run.notes == ("metrics.jsonl cannot be read: Is a directory",)
    assert build_page([run], {}).count("<figure") == 0


def test_without_its_own_file_the_configuration_is_that_of_the_checkpoint(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "config.yaml").unlink()
    (folder / "60" / "extra" / "metadata.json").write_text(json.dumps({"config": {"name": "saved", "exp_name": "e"}}))
    assert read_run(folder).recipe == "saved"
    (folder / "60" / "extra" / "metadata.json").write_text("{}")
    assert (read_run(folder).recipe, read_run(folder).exp_name) == ("debug", "first")


def test_folders_that_are_no_runs_are_refused_with_a_way_on(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run()
    with pytest.raises(CheckpointError, match="is not a folder") as error:
        read_run(tmp_path / "nowhere")
    assert error.value.hint == "name the folder of a run: checkpoints/RECIPE/EXP_NAME"
    with pytest.raises(CheckpointError) as error:
        read_run(folder.parent)
    assert error.value.hint == f"name the runs in it: {folder}"
    with pytest.raises(CheckpointError) as error:
        read_run(folder / "60")
    assert error.value.hint == f"name the run, not one of its steps: {folder}"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["metrics.jsonl", "config.yaml", "metadata.json", "60/extra/extra.json", "eval.json"]),
    st.binary(max_size=60)
    | st.text(alphabet='{}[]":,.e1-null stepvaluesirng\n', max_size=80).map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["step", "time", "values", "name", "agent", "evaluation", "result", "stream"]), inner
            )
        ),
    ).map(lambda value: json.dumps(value).encode()),
)
def test_no_content_of_a_file_is_a_reason_to_fail(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "run" / "config.yaml").write_text("name: debug\n")
    file.write_bytes(content)
    assert build_page([read_run(tmp_path / "run")], {"debug": {}}).startswith("<!doctype html>")
