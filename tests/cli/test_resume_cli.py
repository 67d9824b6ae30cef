"""`pirl train RUN_FOLDER` and `--resume`: a run goes on with its own settings, and flags are changes that are shown."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from pirl import recipes
from pirl.cli import app
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml

Calls = list[tuple[RLTrainConfig, dict[str, bool]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What `pirl.training.recovery.train` was called with."""
    made: Calls = []
    recovery = ModuleType("pirl.training.recovery")
    vars(recovery).update(train=lambda config, **modes: made.append((config, modes)) or 0)
    monkeypatch.setitem(sys.modules, "pirl.training.recovery", recovery)
    return made


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RLTrainConfig:
    """A run that was begun with flags, with a checkpoint of step 40."""
    monkeypatch.chdir(tmp_path)
    begun = replace(recipes.cli(["debug_bc", "--batch-size", "4", "--agent.ema-decay", "0.5"]), exp_name="mine")
    write_yaml(begun.run_dir / "config.yaml", begun)
    (begun.run_dir / "40" / "params").mkdir(parents=True)
    (begun.run_dir / "40" / "params" / "_METADATA").touch()
    return begun


RESUMED = {"resume": True, "overwrite": False, "dry_run": False}


@pytest.mark.parametrize("words", [["checkpoints/debug_bc/mine"], ["debug_bc", "--exp-name", "mine", "--resume"]])
def test_a_run_goes_on_with_its_own_settings(
    words: list[str], run: RLTrainConfig, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["train", *words]) == 0
    assert calls == [(run, RESUMED)]
    said = capsys.readouterr().out
    assert said == "resuming checkpoints/debug_bc/mine from step 40, with its own settings\n"


def test_flags_are_changes_and_are_shown(run: RLTrainConfig, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoints/debug_bc/mine", "--max-steps", "500", "--agent.flow-draws", "2"]
    assert app.main(["train", *words]) == 0
    assert calls == [(replace(run, num_train_steps=500, agent=replace(run.agent, flow_draws=2)), RESUMED)]
    said = capsys.readouterr().out
    assert "with its own settings except\n" in said
    assert "  num_train_steps: 300 -> 500\n" in said
    assert "  agent.flow_draws: 1 -> 2\n" in said


def test_debug_and_variant_shaped_the_run_when_it_began(run: RLTrainConfig, calls: Calls) -> None:
    words = ["debug_bc", "--exp-name", "mine", "--resume", "--debug", "--variant", "quick", "--seed", "7"]
    assert app.main(["train", *words]) == 0
    assert calls[0][0] == replace(run, seed=7)


@pytest.mark.parametrize(
    "words", [["debug_bc", "--resume", "auto"], ["--resume", "auto", "debug_bc"], ["debug_bc", "--resume=auto"]]
)
def test_auto_starts_or_goes_on(words: list[str], run: RLTrainConfig, calls: Calls) -> None:
    modes = {"resume": True, "fresh_if_missing": True, "dry_run": False}
    assert app.main(["train", *words, "--exp-name", "mine"]) == 0
    assert app.main(["train", *words, "--exp-name", "new", "--batch-size", "8"]) == 0
    assert calls == [
        (run, modes),
        (replace(recipes.get_config("debug_bc"), exp_name="new", batch_size=8), modes),
    ]


def test_a_file_that_says_something_else_is_told(
    run: RLTrainConfig, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_yaml(Path("mine.yaml"), replace(run, seed=3))
    assert app.main(["train", str(file), "--resume", "--max-steps", "9"]) == 0
    assert calls == [(replace(run, num_train_steps=9), RESUMED)]
    assert "ignored from mine.yaml: seed 3" in capsys.readouterr().out


def test_a_run_that_was_moved_stays_where_it_is(run: RLTrainConfig, calls: Calls, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "box" / "two"
    moved.parent.mkdir(parents=True)
    run.run_dir.rename(moved)
    assert app.main(["train", str(moved)]) == 0
    ((config, _),) = calls
    assert (config.run_dir, config.batch_size) == (moved, 4)


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("checkpoints/debug_bc/mine/40", "is a step of a run"),
        ("checkpoints/debug_bc", "is a folder without config.yaml"),
        ("checkpoints/debug_bc/other", "there is no checkpoints/debug_bc/other"),
    ],
)
def test_other_folders_are_refused_with_the_command_to_type(
    source: str, answer: str, run: RLTrainConfig, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["train", source]) == 1
    said = capsys.readouterr().err
    assert answer in said
    assert "hint: " in said
    assert calls == []


def test_settings_of_a_run_that_cannot_be_read_are_named(
    run: RLTrainConfig, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.run_dir / "config.yaml").write_text("name: debug_bc\nbatch: 3\n")
    assert app.main(["train", "checkpoints/debug_bc/mine"]) == 1
    assert "mine/config.yaml: unknown setting 'batch'" in capsys.readouterr().err
