"""`pirl tune`: mistakes on its command line, its page, and one real search that is interrupted and goes on."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collecting_runs import ENV, ROLLOUT, VARIABLE, make_trouble
from pirl import recipes
from pirl.agents.config import BCConfig
from pirl.cli import app
from pirl.cli.tune import _without
from pirl.config_io import parse_yaml, write_yaml
from pirl.report.tuning import build_tuning_page
from pirl.rollout.config import EvalConfig
from pirl.tune.space import default_space, parse_space
from small_runs import compiled_once, records, small_run

PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    capsys.readouterr()
    assert app.main(["tune", *words]) == code
    return capsys.readouterr().err


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--trials is required" in refused(capsys, "bc_tabletop", code=2)
    assert "'0' is not a positive" in refused(capsys, "bc_tabletop", "--trials", "0", code=2)
    assert "'soon' is not a time" in refused(capsys, "bc_tabletop", "--trials", "2", "--timeout", "soon", code=2)
    assert "named with --study" in refused(capsys, "bc_tabletop", "--trials", "2", "--exp-name", "x", code=2)
    told = refused(capsys, "debug", "--trials", "2")
    assert "debug is not evaluated while it trains" in told
    assert "take a recipe that has an environment" in told
    assert "--evaluation.interval 75 --evaluation.episodes 50" in told
    told = refused(capsys, "bc_tabletop", "--trials", "2", "--variant", "benchmark")
    assert "hint: --evaluation.split validation" in told
    assert "did you mean: eval/success_rate" in refused(capsys, "bc_tabletop", "--trials", "2", "--metric", "success")
    assert "--study is 'a/b'" in refused(capsys, "bc_tabletop", "--trials", "2", "--study", "a/b")
    assert "space.yaml cannot be read" in refused(capsys, "bc_tabletop", "--trials", "2", "--space", "space.yaml")
    assert "did you mean: acrlpd_tabletop" in refused(capsys, "acrlpd_tabeltop", "--trials", "2")
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = refused(capsys, "bc_tabletop", "--trials", "2")
    assert "`pirl tune` needs the package 'optuna', which is not installed\n  hint: pip install 'pirl[tune]'" in told
    assert not list(tmp_path.iterdir())


def test_the_space_is_shown_to_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without jax and without optuna, as it stands and as it follows flags."""
    program = (
        "import sys; sys.modules.update(jax=None, optuna=None)\n"
        "from pirl.cli.app import main\nsys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "tune", "ript_tabletop", "--show-space", "--agent.loss", "awr"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    config = recipes.cli(["ript_tabletop", "--agent.loss", "awr"])
    assert parse_space(config, parse_yaml(done.stdout)) == default_space(config)
    (tmp_path / "mine.yaml").write_text("agent.epochs: [1, 3]\n")
    assert app.main(["tune", "ript_tabletop", "--show-space", "--space", str(tmp_path / "mine.yaml")]) == 0
    assert capsys.readouterr().out.endswith("agent.epochs: [1, 3]\n")


def test_commands_of_the_page_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also the settings in them, which `pirl tune` leaves to the recipe."""
    monkeypatch.chdir(tmp_path)
    Path("wide.yaml").write_text("agent.discount: [0.9, 0.95]\n")
    asked: list[Any] = []
    monkeypatch.setattr("pirl.cli.tune._search", lambda args, config, *_: asked.append((args, config)) or 0)
    blocks = "".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL))
    commands = [shlex.split(line, comments=True)[1:] for line in blocks.splitlines() if line.startswith("pirl tune")]
    assert len(commands) >= 4
    for words in commands:
        assert app.main(words) == 0
    assert all(args.trials > 1 for args, _ in asked)


def test_flags_that_were_searched_over_are_left_out() -> None:
    words = ["--agent.discount", "0.9", "--data-path", "a", "b", "--pi0-lr=1e-3", "--agent.no-augment", "--debug"]
    assert _without(words, {"agent.discount": 1, "pi0_lr": 1, "agent.augment": 1}) == [
        "--data-path",
        "a",
        "b",
        "--debug",
    ]
    assert _without(words, {}) == words


RESULTS: dict[str, Any] = {
    "recipe": "bc_<b>",
    "study": "tune",
    "metric": "eval/success_rate",
    "steps": 800,
    "episodes": 50,
    "seed": 3,
    "space": {
        "pi0_lr": {"low": 1e-4, "high": 1e-2, "log": True},
        "agent.target_ess": {"low": 0.1, "high": 0.9, "log": False},
        "agent.actor": {"values": ["awr", None, True, 1]},
    },
    "best": 1,
    "trials": [
        {
            "number": number,
            "state": state,
            "settings": {"pi0_lr": 10.0 ** (-4 + number), "agent.target_ess": 0.5, "agent.actor": actor},
            "evaluations": [{"step": 400, "value": value, "low": value - 0.1, "high": value + 0.1}] if value else [],
            "seconds": 60.0,
            "reason": "<script>" if state == "failed" else "",
            "run": "x",
        }
        for number, state, value, actor in (
            (0, "done", 0.5, "awr"),
            (1, "done", 0.75, None),
            (2, "pruned", 0.25, True),
            (3, "failed", 0.0, 1),
            (4, "open", 0.0, 1),
        )
    ],
}


def test_the_page() -> None:
    page = build_tuning_page(RESULTS, ["pirl train x --agent.actor awr"])
    assert page == build_tuning_page(RESULTS, ["pirl train x --agent.actor awr"])
    assert page.count("<figure") == 4
    # Three trials are drawn: in each chart a dot with an interval. What failed or runs is only in the table.
    assert page.count('class="dot c0"') == page.count('class="dot c1"') == page.count('class="dot c5"') == 4
    assert page.count('class="line thin') == 12
    # The best so far goes from 0.5 up to 0.75; the axis is from 0 to 1, down is more.
    assert '<path d="M100 500H300V250H1000" class="line c1"></path>' in page
    # On the logarithmic axis 1e-3 lies in the middle of 1e-4 and 1e-2.
    assert '<path d="M500 250h0" class="dot c1"><title>trial 1, done: 75 %' in page
    assert "1 done" not in page
    assert "5 trials of 800 steps: 2 done, 1 pruned, 1 failed, 1 open. Seed 3." in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "bc_&lt;b&gt;" in page
    assert not re.search(r"(https?:)?//|src=|url\(", page.replace("<!doctype html>", ""))


def test_a_page_without_results() -> None:
    empty = RESULTS | {"trials": [], "best": None, "metric": "eval/return"}
    assert "0 trials of 800 steps" in build_tuning_page(empty)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a run of six steps, three evaluations on the way; children find the environment, and compile once."""
    config = replace(
        small_run(tmp_path / "runs", BCConfig(augment=False)),
        name="walk",
        env=ENV,
        rollout=replace(ROLLOUT, num_workers=1),
        evaluation=EvalConfig(interval=2, episodes=6, films=0),
        num_train_steps=6,
        log_interval=1,
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    with compiled_once(tmp_path / "compiled") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield write_yaml(tmp_path / "walk.yaml", config)


def test_a_search_is_interrupted_and_goes_on(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real runs in real processes: the second one is stopped in its third evaluation, and resumes there."""
    (tmp_path / "space.yaml").write_text("pi0_lr: {low: 1e-4, high: 1e-1, log: true}\nagent.ema_decay: [null, 0.9]\n")
    words = ["tune", str(recipe), "--trials", "2", "--space", "space.yaml", "--agent.ema-decay", "0.9"]
    make_trouble(monkeypatch, tmp_path, terminate=24 + 15)
    assert app.main(words) == 130
    assert "interrupted in trial 1; the same command continues" in capsys.readouterr().out
    monkeypatch.delenv(VARIABLE)
    folder = tmp_path / "runs" / "walk"
    first = records(folder / "tune-trial-000")
    stopped = records(folder / "tune-trial-001")
    assert (first[-1]["step"], stopped[-1]["step"]) == (6, 4)
    assert app.main(words) == 0
    shown = capsys.readouterr().out

    # Nothing of the first was done again; the second went on from where it was.
    assert records(folder / "tune-trial-000") == first
    whole = records(folder / "tune-trial-001")
    assert whole[: len(stopped)] == stopped
    assert [record["step"] for record in whole] == [record["step"] for record in first]
    results = json.loads((folder / "tune" / "results.json").read_text())
    assert [trial["state"] for trial in results["trials"]] == ["done", "done"]
    rates = {}
    for trial in results["trials"]:
        run = Path(trial["run"])
        evaluated = [r for r in records(run) if "eval/success_rate" in r["values"] and r["step"]]
        assert [(e["step"], e["value"]) for e in trial["evaluations"]] == [
            (r["step"], r["values"]["eval/success_rate"]) for r in evaluated
        ]
        rates[trial["number"]] = trial["evaluations"][-1]["value"]
        assert recipes.load(str(run / "config.yaml")).agent.ema_decay == trial["settings"]["agent.ema_decay"]
    best = max(rates, key=lambda number: (rates[number], -number))
    assert results["best"] == best
    assert [(folder / f"tune-trial-{number:03d}" / "6").exists() for number in (0, 1)] == [best == 0, best == 1]
    assert (folder / "tune" / "tuning.html").read_text().startswith("<!doctype html>")

    # What is to be done next can be done as it stands; both ways lead to the same run.
    evaluate, by_flags, by_file = (shlex.split(line) for line in shown.splitlines()[-3:])
    assert evaluate[:3] == ["pirl", "eval", str(folder / f"tune-trial-{best:03d}")]
    assert by_flags.count("--agent.ema-decay") == 1
    assert recipes.cli(by_flags[2:]) == recipes.cli(by_file[2:])
    assert recipes.cli(by_file[2:]).run_dir == folder / "tune-best"

    # All trials are there: nothing is left to do. Another space is another search.
    assert app.main(words) == 0
    assert records(folder / "tune-trial-001") == whole
    (tmp_path / "space.yaml").write_text("agent.ema_decay: [null, 0.9]\n")
    assert "space of pi0_lr" in refused(capsys, *words[1:])
