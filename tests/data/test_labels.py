"""Labels of people: kept through crashes, several people at once, used in training, and written as next.success."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pirl.cli.app import main
from pirl.data import labels, lerobot
from pirl.data.config import DataConfig
from pirl.data.create import create_source
from pirl.data.dataset import LeRobotSource
from pirl.data.inspection import inspect_dataset
from pirl.data.label_columns import write_success
from pirl.data.labels import LABELS_FILE, Label
from pirl.data.outcomes import OutcomeRule
from pirl.data.robots import get_robot
from pirl.data.rows import read_columns
from pirl.data.writer import LeRobotWriter
from pirl.errors import ConfigError, DataError
from pirl.names import NEXT_SUCCESS

pytestmark = pytest.mark.usefixtures("own_home")
Copy = Callable[[str], Path]
LENGTHS = {0: 37, 1: 80, 2: 52, 3: 45, 4: 63}


def give(root: Path, index: int, outcome: Any, by: str = "ann", **more: Any) -> None:
    labels.append(root, Label(episode_index=index, by=by, outcome=outcome, **more))


def verdicts(root: Path) -> dict[int, labels.Verdict]:
    return labels.newest(labels.read(root, LENGTHS))


def read(root: Path, rule: str = "auto", **settings: Any) -> LeRobotSource:
    return LeRobotSource(root, cameras={}, outcome=OutcomeRule(rule=rule, **settings))


def unlabelled(root: Path) -> Path:
    """Without the columns that say how an episode ended."""
    info = json.loads((root / "meta/info.json").read_text())
    info["features"] = {key: one for key, one in info["features"].items() if not key.startswith("next.")}
    (root / "meta/info.json").write_text(json.dumps(info))
    for path in (root / "data").rglob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.drop_columns([name for name in table.column_names if name.startswith("next.")]), path)
    return root


def test_the_newest_of_each_person_counts(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    give(root, 0, "failure")
    give(root, 0, "success", moment=12)
    give(root, 1, "success")
    give(root, 1, "failure", by="bob")
    give(root, 2, "unsure")
    give(root, 3, "success")
    give(root, 3, None)
    found = verdicts(root)
    assert {index: verdict.success for index, verdict in found.items()} == {0: True, 1: None, 2: None}
    assert [index for index, verdict in found.items() if verdict.conflict] == [1]
    assert found[0].moment == 12


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_crash_in_the_middle_of_a_line(dataset_copy: Copy, cut: int) -> None:
    """The torn line was never acknowledged; those before it stay, and the next one is whole."""
    root = dataset_copy("v21_video")
    give(root, 0, "success")
    give(root, 1, "failure")
    path = root / LABELS_FILE
    os.truncate(path, path.stat().st_size - cut)
    assert set(verdicts(root)) >= {0}
    give(root, 2, "success")
    assert set(verdicts(root)) == ({0, 1, 2} if cut == 1 else {0, 2})  # without its newline alone a line is whole
    assert len(path.read_text().splitlines()) == len(verdicts(root))


def test_a_damaged_line_is_named(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    give(root, 0, "success")
    path = root / LABELS_FILE
    path.write_text("{broken\n" + path.read_text())
    with pytest.raises(DataError, match="line 1"):
        labels.read(root, LENGTHS)
    path.write_text('{"episode_index": 9, "by": "ann", "outcome": "success"}\n')
    with pytest.raises(DataError, match="episode 9 is not in the dataset"):
        read(root)


def test_a_full_disk_keeps_what_was_there(dataset_copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    root = dataset_copy("v21_video")
    give(root, 0, "success")
    written = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return written(file, data[: len(data) - 5])

    monkeypatch.setattr(labels.os, "write", full)
    with pytest.raises(DataError, match="not stored"):
        give(root, 1, "failure")
    monkeypatch.undo()
    assert list(verdicts(root)) == [0]
    assert (root / LABELS_FILE).read_bytes().endswith(b"\n")


def test_processes_that_are_killed_while_labelling(dataset_copy: Copy) -> None:
    """Two writers, one killed at any moment: what either was told is stored is there."""
    root = dataset_copy("v21_video")
    script = (
        "import sys; from pathlib import Path; from pirl.data import labels\n"
        "for n in range(10**6):\n"
        "    labels.append(Path(sys.argv[1]), labels.Label(episode_index=n % 5, by=sys.argv[2], outcome='success',"
        " quality=n % 6))\n"
        "    print(n, flush=True)\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script, str(root), by], stdout=subprocess.PIPE) for by in ("ann", "bob")
    ]
    told = []
    for run in runs:
        assert run.stdout is not None
        for _ in range(12):
            run.stdout.readline()
        run.kill()
        told.append(12 + len([line for line in run.stdout.read().split(b"\n") if line]))
        run.wait()
    found = labels.read(root, LENGTHS)
    for by, count in zip(("ann", "bob"), told, strict=True):
        assert sum(one.by == by for one in found) >= count - 1  # the last print may be cut off


def test_training_finds_the_labels(dataset_copy: Copy) -> None:
    root = unlabelled(dataset_copy("v30_video"))
    with pytest.raises(DataError, match="pirl label"):
        read(root)
    give(root, 0, "success", moment=30)
    give(root, 1, "failure")
    give(root, 2, "unsure")
    source = read(root)
    assert [one.success for one in source.outcomes] == [True, False, None, None, None]
    assert source.outcomes[0].rewards.tolist() == [0.0] * 30 + [1.0] * 7
    assert source.outcomes[0].terminated.tolist() == [False] * 30 + [True] * 7
    assert source.outcomes[1].terminated[-1]
    assert source.outcomes[2].truncated[-1]
    assert source.rule.success_file == LABELS_FILE


def test_people_are_believed_before_the_column_and_a_file_before_both(dataset_copy: Copy, tmp_path: Path) -> None:
    root = dataset_copy("v30_video")
    recorded = [one.success for one in read(root).outcomes]
    assert len(set(recorded)) > 1
    give(root, 0, "failure" if recorded[0] else "success")
    assert [one.success for one in read(root).outcomes] == [not recorded[0], *recorded[1:]]
    assert [one.success for one in read(root, "columns").outcomes] == recorded
    (tmp_path / "file.json").write_text('{"1": true}')
    assert [one.success for one in read(root, success_file=str(tmp_path / "file.json")).outcomes] == [
        None, True, None, None, None,
    ]  # fmt: skip


def test_each_dataset_has_a_success_file_of_its_own(dataset_copy: Copy, tmp_path: Path) -> None:
    root = dataset_copy("v30_video")
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text('{"0": true, "1": true}')
    paths[1].write_text('{"0": false}')

    def success(*files: str) -> list[bool | None]:
        config = DataConfig(repo_ids=(str(root), str(root)), outcome="sparse_success", success_file=files)
        source = create_source(config, get_robot("aloha"))
        return [source.episode(index).success for index in range(len(source))]

    recorded = [one.success for one in read(root, "sparse_success").outcomes]
    assert success(*map(str, paths)) == [True, True, None, None, None, False, None, None, None, None]
    assert success(str(paths[0]), "none") == [True, True, None, None, None, *recorded]
    with pytest.raises(ConfigError, match="3 success_file for 2 datasets"):
        success("a", "b", "c")


def test_inspect_shows_labels_conflicts_and_pictures(
    dataset_copy: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = dataset_copy("v21_video")
    assert inspect_dataset(root).labels == ""
    for index, outcome in enumerate(("success", "failure", "unsure")):
        give(root, index, outcome)
    give(root, 1, "success", by="bob")
    picture = tmp_path / "ends.png"
    assert main(["inspect", "data", str(root), "--pictures", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "ann (3), bob (1): 1 successes, 0 failures, 1 unsure, 1 conflicts, 2 episodes without a label" in said
    assert "episode 1: ann failure, bob success" in said
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("name", ["v21_video", "v21_image", "v30_video", "v30_image", "v30_video_multifile"])
def test_written_labels_are_a_column(dataset_copy: Copy, name: str) -> None:
    """The dataset before and after differs in next.success alone, and can be continued."""
    root = dataset_copy(name)
    before = read(root)
    files = {path: pq.read_table(path) for path in (root / "data").rglob("*.parquet")}
    schemas = {path: pq.read_schema(path) for path in files}
    groups = {path: pq.ParquetFile(path).num_row_groups for path in files}
    give(root, 0, "success", moment=20)
    give(root, 1, "failure")
    for index in (2, 3, 4):
        give(root, index, "success")
    assert main(["label", str(root), "--write"]) == 0
    meta = lerobot.read_meta(root)
    after = read_columns(meta)
    flags = [after[NEXT_SUCCESS][one.start : one.start + one.length] for one in meta.episodes]
    assert flags[0].tolist() == [False] * 20 + [True] * 17
    assert not flags[1].any()
    assert [flag.sum() for flag in flags[2:]] == [1, 1, 1]
    for path, table in files.items():
        found = pq.read_table(path)
        assert found.drop_columns([NEXT_SUCCESS]).equals(table.drop_columns([NEXT_SUCCESS]))
        assert pq.read_schema(path).equals(schemas[path])
        described = [json.loads(one.metadata[b"huggingface"]) for one in (pq.read_schema(path), schemas[path])]
        assert described[0] == described[1]
        assert pq.ParquetFile(path).num_row_groups == groups[path]
    assert not (root / ".writing").exists()
    (root / LABELS_FILE).unlink()
    assert [one.success for one in read(root, "sparse_success").outcomes] == [True, False, True, True, True]
    assert set(before.columns) == set(after)
    _check_stats(root, meta.version, flags)
    _continue(root)


def _check_stats(root: Path, version: str, flags: list[np.ndarray]) -> None:
    if version == "v2.1":
        lines = [json.loads(line)["stats"][NEXT_SUCCESS] for line in (root / "meta/episodes_stats.jsonl").open()]
    else:
        table = pq.read_table(next((root / "meta/episodes").rglob("*.parquet"))).to_pylist()
        lines = [{name: row[f"stats/{NEXT_SUCCESS}/{name}"] for name in ("mean", "count", "max")} for row in table]
        total = json.loads((root / "meta/stats.json").read_text())[NEXT_SUCCESS]
        assert total["mean"][0] == pytest.approx(np.concatenate(flags).mean())
        assert total["count"] == [sum(map(len, flags))]
    for line, flag in zip(lines, flags, strict=True):
        assert line["mean"][0] == pytest.approx(flag.mean())
        assert line["max"][0] == flag.max()


def _continue(root: Path) -> None:
    """An episode more, as a recorder would add it."""
    info = json.loads((root / "meta/info.json").read_text())
    rng = np.random.default_rng(0)
    rows: dict[str, Any] = {}
    for key, one in info["features"].items():
        if key in ("timestamp", "frame_index", "episode_index", "index", "task_index"):
            continue
        shape = (3, *([] if one["shape"] == [1] else one["shape"]))
        if one["dtype"] in ("video", "image"):
            rows[key] = rng.integers(0, 255, shape, np.uint8)
        elif one["dtype"] == "string":
            rows[key] = ["a"] * 3
        else:
            rows[key] = rng.random(shape).astype(one["dtype"])
    options = dict(fps=info["fps"], features=info["features"], version=info["codebase_version"], codec="h264")
    with LeRobotWriter(root, **options) as writer:
        writer.add_episode(rows, task="one more")
    assert len(lerobot.read_meta(root).episodes) == len(LENGTHS) + 1


def test_a_new_column_where_there_was_none(dataset_copy: Copy) -> None:
    root = unlabelled(dataset_copy("v30_video"))
    for index in LENGTHS:
        give(root, index, "success" if index % 2 else "failure")
    assert write_success(root) == 5
    assert lerobot.read_meta(root).features[NEXT_SUCCESS].dtype == "bool"
    described = json.loads(pq.read_schema(next((root / "data").rglob("*.parquet"))).metadata[b"huggingface"])
    assert described["info"]["features"][NEXT_SUCCESS] == {"dtype": "bool", "_type": "Value"}
    (root / LABELS_FILE).unlink()
    assert [one.success for one in read(root).outcomes] == [False, True, False, True, False]


def test_nothing_is_written_where_a_verdict_is_missing(dataset_copy: Copy) -> None:
    root = unlabelled(dataset_copy("v21_video"))
    with pytest.raises(DataError, match="has no labels"):
        write_success(root)
    give(root, 0, "success")
    give(root, 1, "unsure")
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match=r"4 episodes are neither") as caught:
        write_success(root)
    assert "episode 1: ann unsure" in caught.value.message
    assert files == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("at", range(1, 12, 2))
def test_writing_is_all_or_nothing(dataset_copy: Copy, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Interrupted at any file: the dataset is the old one, or, once begun to move, the next writer ends the move."""
    from pirl.data import episode_files

    root = unlabelled(dataset_copy("v21_video"))
    for index in LENGTHS:
        give(root, index, "success")
    replace, calls = os.replace, []

    def dying(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == at:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(episode_files.os, "replace", dying)
    try:
        write_success(root)
    except KeyboardInterrupt:
        monkeypatch.undo()
        write_success(root)
    monkeypatch.undo()
    columns = read_columns(lerobot.read_meta(root))
    assert columns[NEXT_SUCCESS].sum() == 5
