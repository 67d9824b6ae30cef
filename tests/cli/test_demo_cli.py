"""`pirl demo`: its commands are pirl's own, what is there is not done again, and an interruption is gone on from."""

import json
from pathlib import Path
from typing import Any

import pytest

from pirl.cli import app, demo, improve
from pirl.recipes import cli


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each leaves its product behind, as the real ones do."""
    commands: list[list[str]] = []
    real = app.main

    def run(argv: list[str]) -> int:
        if argv[0] == "demo":
            return real(argv)
        commands.append(list(argv))
        leave_product(argv)
        return 0

    monkeypatch.setattr(app, "main", run)
    monkeypatch.setattr("pirl.rollout.record.num_recorded", lambda root: int((root / "count").read_text()))
    return commands


def leave_product(argv: list[str]) -> None:
    def value(flag: str) -> str:
        return argv[argv.index(flag) + 1]

    match argv[0]:
        case "record":
            Path(value("--root")).mkdir(parents=True)
            (Path(value("--root")) / "count").write_text(value("--episodes"))
        case "norm-stats":
            Path(value("--out")).mkdir(parents=True)
            (Path(value("--out")) / "norm_stats.json").write_text("{}")
        case "train":
            run = Path(value("--checkpoint.base-dir")) / argv[1] / value("--exp-name")
            (run / value("--max-steps")).mkdir(parents=True)
        case "eval":
            Path(value("--out")).mkdir(parents=True)
            rate = {"rate": 0.5, "low": 0.4, "high": 0.6}
            (Path(value("--out")) / "eval.json").write_text(json.dumps({"result": {"success": rate}}))
        case "report":
            Path(value("--out")).write_text("<html>")


def test_every_stage_runs_once_and_the_table_names_all_policies(
    tmp_path: Path, done: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["demo", "--folder", str(tmp_path / "demo")]) == 0
    verbs = [command[0] for command in done]
    assert verbs == ["record", "norm-stats", *["train"] * 4, *["eval"] * 5, "report"]
    shown = capsys.readouterr().out
    for name in ("imitation", "imitation of successes", "ACRLPD", "best of 8", "ACRLPD then RIPT", "report.html"):
        assert name in shown
    assert app.main(["demo", "--folder", str(tmp_path / "demo")]) == 0
    assert len(done) == len(verbs), "the second time there is nothing to do"
    assert "done already" in capsys.readouterr().out


def test_its_commands_are_understood_and_start_from_one_another(tmp_path: Path, done: list[list[str]]) -> None:
    assert app.main(["demo", "--folder", str(tmp_path)]) == 0
    trained = {}
    for command in done:
        if command[0] == "train":
            assert command[-2:] == ["--resume", "auto"]
            config = cli(command[1:-2])
            trained[config.run_dir / str(config.num_train_steps)] = config
        else:
            app.build_parser(command).parse_args(command)
    bc, filtered, acrlpd, ript = trained.values()
    assert filtered.data.successes_only
    assert not bc.data.successes_only
    first, _, third, _ = map(str, trained)
    assert [config.init_weights for config in (bc, filtered, acrlpd)] == [None, first, first]
    assert ript.init_weights == third
    evaluated = [command[1] for command in done if command[0] == "eval"]
    assert set(evaluated) == {str(folder) for folder in trained}


def test_what_was_interrupted_goes_on(
    tmp_path: Path, done: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = app.main

    def interrupted(argv: list[str]) -> int:
        if argv[0] == "train":
            (tmp_path / "runs" / argv[1] / "imitation").mkdir(parents=True)
            return 130
        return complete(argv)

    monkeypatch.setattr(app, "main", interrupted)
    assert demo.run(arguments(tmp_path)) == 130
    assert "the same command continues" in capsys.readouterr().out
    (tmp_path / "data" / "tabletop" / "count").write_text("1400")  # and the recording lacks some episodes
    monkeypatch.setattr(app, "main", complete)
    stages, _ = demo.plan(tmp_path, quick=False, seed=0)
    record, statistics, first, *_ = stages
    assert "--append" in record.command
    assert record.command[record.command.index("--episodes") + 1] == "100"
    assert statistics.done
    assert not first.done
    assert first.resumable


def test_a_quick_demo_keeps_to_its_own_folder(tmp_path: Path, done: list[list[str]]) -> None:
    assert app.main(["demo", "--folder", str(tmp_path / "demo"), "--quick"]) == 0
    assert not (tmp_path / "demo").exists()
    assert (tmp_path / "demo_quick" / "report.html").exists()
    steps = [int(command[command.index("--max-steps") + 1]) for command in done if command[0] == "train"]
    assert steps == [240, 120, 160, 1]


def arguments(folder: Path) -> Any:
    return app.build_parser(["demo"]).parse_args(["demo", "--folder", str(folder)])


def test_the_loop_at_the_robot_begins_where_the_demo_does(
    tmp_path: Path, done: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its stages are the demo's first three and the loop, whose settings `pirl improve` understands."""
    found = {"number": 1, "decision": "promote", "collected": {"corrected": 3, "episodes": 12}, "comparison": None}
    found["held_out"] = {"rate": 0.9, "low": 0.8, "high": 0.95}
    state = tmp_path / "loop" / "state.json"
    assert app.main(["demo", "--folder", str(tmp_path)]) == 0
    first = len(done)
    state.parent.mkdir()
    state.write_text(json.dumps({"finished": [found]}))
    assert app.main(["demo", "--robot", "--folder", str(tmp_path)]) == 0
    assert done[first:] == [["improve", str(tmp_path / "loop.yaml")]]
    shown = capsys.readouterr().out
    assert "generation 1: promote; 90.0% of held-out episodes succeed" in shown
    assert "loop.html" in shown
    state.write_text(json.dumps({"finished": [found, found]}))
    assert app.main(["demo", "--robot", "--folder", str(tmp_path)]) == 0
    assert len(done) == first + 1  # two generations are there
    args = app.build_parser(["improve"]).parse_args(["improve", str(tmp_path / "loop.yaml"), "--show"])
    assert improve.run(args) == 0
    assert "--purpose {purpose} --supervise 0.5" in capsys.readouterr().out
