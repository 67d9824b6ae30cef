"""`pirl eval CHECKPOINT --data`: the numbers of training again, two checkpoints compared, and what it refuses."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pirl.agents.config import ACRLPDConfig, QCFQLConfig
from pirl.checkpoints.run_directory import complete_steps
from pirl.cli import app
from pirl.config import RLTrainConfig
from pirl.errors import ConfigError
from pirl.training.acting import find_checkpoint
from pirl.training.config import HeldOutConfig
from pirl.training.judging import check_comparable, judged_data
from pirl.training.loop import train
from small_runs import compiled_once, records, small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RLTrainConfig]:
    agent = ACRLPDConfig(discount=0.9, augment=False, flow_steps=2, policy_ema_decay=0.9)
    held_out = HeldOutConfig(interval=5, rows=48, candidates=3)
    config = small_run(tmp_path_factory.mktemp("runs"), agent, held_out=held_out, num_train_steps=10)
    config = replace(config, data=replace(config.data, held_out=0.03))
    with compiled_once(tmp_path_factory.mktemp("programs")):
        assert train(config) == 0
        yield config


def test_a_finished_checkpoint_has_the_numbers_that_training_logged(
    run: RLTrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["eval", str(run.run_dir), "--data"]) == 0
    shown = capsys.readouterr().out
    file = run.run_dir / "evaluations/10-held-out/held_out.json"
    found = json.loads(file.read_text())
    (logged,) = [one["values"] for one in records(run.run_dir) if one["step"] == 10 and "held_out/auc" in one["values"]]
    assert found["result"]["metrics"] == pytest.approx(logged, rel=1e-5)
    assert found["evaluation"]["episodes"] == "held out"
    assert "rank_correlation" in shown
    assert "40 rows of 6 episodes of synthetic (held out): 4 successes, 2 failures" in shown
    assert str(file) in shown
    lines = list(csv.DictReader(file.with_name("samples.csv").open()))
    assert len(lines) == found["result"]["rows"]
    loss = [float(line["flow_loss"]) for line in lines if line["outcome"] == "1"]
    assert sum(loss) / len(loss) == pytest.approx(logged["held_out/flow_loss"], rel=1e-5)
    worst = max(lines, key=lambda line: float(line["flow_loss"]))
    assert f"{float(worst['flow_loss']):.3g} (episode {worst['episode']}, step {worst['step']})" in shown
    assert app.main(["eval", str(run.run_dir), "--data", "--json"]) == 0  # the same again may be written again
    assert json.loads(capsys.readouterr().out) == found


def test_a_student_is_measured_without_the_flow_it_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flow's loss is known in training; a checkpoint that acts has one network, and the other numbers are its."""
    agent = QCFQLConfig(discount=0.9, augment=False, flow_steps=2, policy_ema_decay=0.9)
    held_out = HeldOutConfig(interval=5, rows=48, candidates=3)
    config = small_run(tmp_path, agent, held_out=held_out, num_train_steps=5)
    config = replace(config, data=replace(config.data, held_out=0.03))
    assert train(config) == 0
    *_, logged = [one["values"] for one in records(config.run_dir) if "held_out/auc" in one["values"]]
    capsys.readouterr()
    assert app.main(["eval", str(config.run_dir), "--data", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]["metrics"]
    of_flow = {name for name in logged if name.startswith("held_out/flow_loss")}
    assert of_flow == logged.keys() - found.keys()
    assert len(of_flow) == 2
    assert found == pytest.approx({name: value for name, value in logged.items() if name not in of_flow}, rel=1e-5)


def test_two_checkpoints_on_the_same_rows(run: RLTrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = (str(run.run_dir / str(step)) for step in complete_steps(run.run_dir))
    assert app.main(["eval", last, "--data", "--compare", first]) == 0
    shown = capsys.readouterr().out
    found = json.loads(next(run.run_dir.glob("evaluations/10-held-out-vs-*/held_out.json")).read_text())
    assert set(found["compared_with"]["comparison"]) == {
        f"{name}_{kind}" for name in ("action_error", "flow_loss") for kind in ("not_failed", "failures")
    }
    one = found["compared_with"]["comparison"]["flow_loss_not_failed"]
    a, b = (
        [row for e in r["episodes"] if e["success"] for row in [e]]
        for r in (found["result"], found["compared_with"]["result"])
    )
    means = [
        sum(x["flow_loss"]) / len(x["flow_loss"]) - sum(y["flow_loss"]) / len(y["flow_loss"])
        for x, y in zip(a, b, strict=True)
    ]
    assert one["mean"] == pytest.approx(sum(means) / len(means))
    assert one["episodes"] == 4
    assert one["low"] < one["mean"] < one["high"]
    assert "difference of flow loss, not failed:" in shown


def test_another_evaluation_is_not_replaced(
    run: RLTrainConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["eval", str(run.run_dir), "--data", "--out", str(tmp_path)]
    assert app.main(words) == 0
    assert app.main([*words, "--held-out.rows", "64"]) == 1
    assert "results of another evaluation" in capsys.readouterr().err


def test_other_chunks_are_not_compared(run: RLTrainConfig) -> None:
    found = find_checkpoint(run.run_dir)
    check_comparable(found, found)
    longer = replace(found, config=replace(run, model=replace(run.model, horizon=4)))
    with pytest.raises(ConfigError, match="not in the same units"):
        check_comparable(found, longer)


def test_a_film_of_recordings_is_refused(run: RLTrainConfig) -> None:
    assert app.main(["eval", str(run.run_dir), "--data", "--video"]) == 2


def test_datasets_of_training_keep_their_split_and_labels_and_others_are_taken_whole(run: RLTrainConfig) -> None:
    data = replace(
        run.data, repo_ids=("a", "b"), success_file=("a.json", "none"), outcome="auto", held_out=0.1, weights=(1.0, 2.0)
    )
    config = replace(run, data=data)
    own, trained = judged_data(config, [])
    assert (trained, own.repo_ids, own.success_files) == (True, ("a", "b"), ("a.json", None))
    one, trained = judged_data(config, ["b"])
    assert (trained, one.repo_ids, one.success_files) == (True, ("b",), (None,))
    other, trained = judged_data(config, ["c"])
    assert (trained, other.repo_ids, other.success_files) == (False, ("c",), (None,))


def test_a_run_without_held_out_episodes_says_that_it_knows_these(
    run: RLTrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.held-out", "0", "--seed", "5", "--out", str(tmp_path)]
    assert app.main(["eval", str(run.run_dir), "--data", *words]) == 0
    assert "held nothing out" in capsys.readouterr().err
    asked = json.loads((tmp_path / "held_out.json").read_text())["evaluation"]
    assert (asked["episodes"], asked["seed"]) == ("all", 5)
