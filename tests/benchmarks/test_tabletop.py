"""The README's table: commands that pirl takes, every row filled, nothing done twice, controls that know nothing."""

import json
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pirl.agents.agent import Agent
from pirl.cli.app import main
from pirl.data.config import DataConfig
from pirl.data.create import create_source
from pirl.data.robots import get_robot
from pirl.recipes import cli

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tabletop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tabletop

    return tabletop


@pytest.fixture
def called(tabletop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each leaves behind what the real one does."""
    commands: list[list[str]] = []
    monkeypatch.setattr(tabletop, "shuffled", lambda dataset, seed: dataset.with_name("others"))
    monkeypatch.setattr(tabletop, "num_recorded", lambda dataset: 3000 if dataset.is_dir() else 0)

    def leave_result(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rate = {"rate": len(commands) / 100, "low": 0.0, "high": 1.0}
        (folder / "eval.json").write_text(json.dumps({"result": {"success": rate}}))

    def run(words: list[str]) -> int:
        commands.append([*words, Agent.lesson.__module__])
        if words[0] in ("record", "norm-stats"):
            Path(words[words.index("--root" if words[0] == "record" else "--out") + 1]).mkdir(parents=True)
        elif words[0] == "train":
            config = cli(words[1:])
            assert config.init_weights is None or Path(config.init_weights).is_dir()
            (config.run_dir / str(config.num_train_steps)).mkdir(parents=True)
        else:
            assert Path(words[1]).is_dir()
            leave_result(Path(words[words.index("--out") + 1]))
        return 0

    monkeypatch.setattr(tabletop, "pirl", run)
    return commands


@pytest.mark.parametrize("level", ["easy", "stitch"])
def test_every_row_is_filled_and_nothing_done_twice(
    tabletop: ModuleType, called: list[list[str]], tmp_path: Path, level: str
) -> None:
    seed = tabletop.Seed(tmp_path / "seed0", 0, level)
    for name in seed.rows:
        seed.run(name)
    trained = {words[3]: words for words in called if words[0] == "train"}
    assert list(trained) == [name for name, row in seed.rows.items() if row.recipe]
    assert sum(words[0] == "eval" for words in called) == len(seed.rows)
    recorded = {row.data for row in seed.rows.values()} - {"shuffled"}
    assert sum(words[0] == "record" for words in called) == len(recorded)
    for name, words in trained.items():
        row = seed.rows[name]
        assert Path(words[words.index("--data-path") + 1]).name == row.data.replace("shuffled", "others")
        if row.after is None:
            assert "--init-weights" not in words
        else:
            assert Path(words[words.index("--init-weights") + 1]).parts[-2] == row.after
    assert [name for name, words in trained.items() if words[-1] == "tabletop"] == (
        ["RIPT_shuffled"] if level == "easy" else []
    ), "only one run tosses coins"
    levels = [words[words.index("--env.level") + 1] for words in called if "--env.level" in words]
    assert levels == ([] if level == "easy" else ["stitch"] * (len(recorded) + len(trained)))
    assert None not in [seed.success(name) for name in seed.rows]
    done = len(called)
    for name in seed.rows:
        seed.run(name)
    assert len(called) == done


def test_a_row_brings_what_it_needs(tabletop: ModuleType, called: list[list[str]], tmp_path: Path) -> None:
    tabletop.Seed(tmp_path / "seed0", 0).run("slips")
    assert [words[0] for words in called] == ["record", "norm-stats", "train", "train", "eval"]
    assert all(words[words.index("--env.slip") + 1] == "0.3" for words in called if words[0] in ("record", "train"))
    called.clear()
    tabletop.Seed(tmp_path / "seed1", 1, quick=True).run("ACRLPD,_best_of_8")
    assert [words[0] for words in called] == ["record", "norm-stats", "train", "train", "eval"]
    assert [words[words.index("--max-steps") + 1] for words in called if words[0] == "train"] == ["240", "160"]


def test_the_table_has_every_seed_that_is_there(
    tabletop: ModuleType,
    called: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tabletop.jax.config, "update", lambda *_: None)  # these programs are not worth keeping
    for seed in ("0", "3"):
        words = ["tabletop.py", "--folder", str(tmp_path), "--seeds", seed, "--rows", "imitation"]
        monkeypatch.setattr("sys.argv", words)
        tabletop.main()
    assert "| method | seed 0 | seed 3 | mean (95 %) |\n" in capsys.readouterr().out
    folder = tmp_path / "easy/whole"
    found = json.loads((folder / "results.json").read_text())
    first, second = found["imitation"].values()
    assert found["ACRLPD"] == {"0": None, "3": None}
    reach = 12.7062 * abs(second - first) / 2  # Student's t with one degree of freedom
    mean = (first + second) / 2
    line = f"| BC | {first:.3f} | {second:.3f} | {mean:.3f} ({mean - reach:.2f} to {mean + reach:.2f}) |\n"
    assert line in (folder / "table.md").read_text()
    assert "| **ACRLPD** | – | – | – |\n" in (folder / "table.md").read_text()
    monkeypatch.setattr("sys.argv", ["tabletop.py", "--rows", "nothing"])
    with pytest.raises(SystemExit):
        tabletop.main()


def test_what_was_begun_is_resumed(tabletop: ModuleType, called: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "seed0/runs/bc_tabletop/imitation").mkdir(parents=True)
    with pytest.raises(SystemExit, match="2"):  # the command itself knows --resume, not a recipe's flags
        tabletop.Seed(tmp_path / "seed0", 0).run("imitation")
    assert called[-1][:4] == ["train", "bc_tabletop", "--exp-name", "imitation"]
    assert "--resume" in called[-1]


def test_a_copy_ends_as_others_did(tabletop: ModuleType, tmp_path: Path) -> None:
    words = ["record", "bc_tabletop", "--episodes", "40", "--repo-id", "me/demos", "--root", str(tmp_path / "data")]
    assert main(words) == 0
    copy = tabletop.shuffled(tmp_path / "data", 0)
    assert copy == tabletop.shuffled(tmp_path / "data", 0)
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["data", "data_shuffled"]
    robot = get_robot("tabletop")
    true, told = (create_source(DataConfig(repo_ids=(str(path),)), robot) for path in (tmp_path / "data", copy))

    def ends(source: Any) -> list[tuple[Any, ...]]:
        episodes = [source.episode(index) for index in range(len(source))]
        return [(e.success, bool(e.terminated[-1]), bool(e.truncated[-1]), float(e.rewards[-1])) for e in episodes]

    assert Counter(ends(true)) == Counter(ends(told))
    assert len(set(ends(true))) > 1
    assert sum(a != b for a, b in zip(ends(true), ends(told), strict=True)) > 5
    for index in range(len(true)):
        one, other = true.episode(index), told.episode(index)
        np.testing.assert_array_equal(one.actions, other.actions)
        assert not one.rewards[:-1].any()
        assert not other.rewards[:-1].any()


def test_a_coin_falls_the_same_for_the_same_group_and_knows_nothing(tabletop: ModuleType) -> None:
    draw = np.random.default_rng(0)
    groups = [[SimpleNamespace(episode=SimpleNamespace(actions=draw.random(3))) for _ in range(8)] for _ in range(200)]
    agent = SimpleNamespace(prepare=lambda rewards: rewards)
    tossed = tabletop.dealt(0)(agent, groups)
    np.testing.assert_array_equal(tossed, tabletop.dealt(0)(agent, groups))
    assert not np.array_equal(tossed, tabletop.dealt(1)(agent, groups))
    assert 0.45 < np.mean(tossed) < 0.55
