"""The README's table: commands that pirl takes, every row filled, nothing done twice, controls that know nothing."""

import json
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pirl.agents.agent import Agent
from pirl.cli import demo
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
    monkeypatch.setattr(tabletop, "num_recorded", lambda dataset: 1500 if dataset.is_dir() else 0)

    def leave_result(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rate = {"rate": len(commands) / 100, "low": 0.0, "high": 1.0}
        (folder / "eval.json").write_text(json.dumps({"result": {"success": rate}}))

    def run(words: list[str]) -> int:
        commands.append([*words, Agent.lesson.__module__])
        if words[0] == "demo":
            stages, results = demo.plan(Path(words[2]), quick=False, seed=0)
            for stage in stages[2:6]:
                stage.product.mkdir(parents=True, exist_ok=True)
            for result in results:
                leave_result(result.evaluation.parent)
        elif words[0] in ("record", "norm-stats"):
            Path(words[words.index("--root" if words[0] == "record" else "--out") + 1]).mkdir(parents=True)
        elif words[0] == "train":
            config = cli(words[1:])
            assert (config.init_weights is None) == (words[3] in ("imitation", "perfect"))
            assert config.init_weights is None or Path(config.init_weights).is_dir()
            (config.run_dir / str(config.num_train_steps)).mkdir(parents=True)
        else:
            assert Path(words[1]).is_dir()
            leave_result(Path(words[words.index("--out") + 1]))
        return 0

    monkeypatch.setattr(tabletop, "pirl", run)
    return commands


def test_every_row_is_filled_and_nothing_done_twice(
    tabletop: ModuleType, called: list[list[str]], tmp_path: Path
) -> None:
    seed = tabletop.Seed(tmp_path / "seed0", 0, quick=False)
    seed.run()
    assert [words[0] for words in called] == ["demo", *["train", "eval"] * 5]
    assert [words[-1] == "tabletop" for words in called] == [False] * 9 + [True] * 2, "only one run tosses coins"
    told = [Path(words[words.index("--data-path") + 1]).name for words in called if "--data-path" in words]
    assert told == ["tabletop"] * 3 + ["others", "tabletop"], "only one is told how others ended"
    assert "–" not in [seed.cell(name) for name in tabletop.ROWS.values()]
    table = tabletop.markdown([seed])
    assert "| ACRLPD, `distill`, offline | 0.030 (0.00–1.00) |\n" in table
    seed.run()
    assert [words[0] for words in called[11:]] == ["demo"]


def test_stitch_has_rows_of_its_own(tabletop: ModuleType, called: list[list[str]], tmp_path: Path) -> None:
    seed = tabletop.Stitch(tmp_path / "seed0", 0, quick=False)
    seed.run()
    trained = [*["train", "eval"] * 5, "eval", "train", "eval"]
    assert [words[0] for words in called] == [*["record", "norm-stats"] * 2, *trained]
    assert all("stitch" in words for words in called if words[0] in ("record", "train"))
    told = {words[3]: Path(words[words.index("--data-path") + 1]).name for words in called if words[0] == "train"}
    assert told.pop("perfect") == "perfect"
    assert told.pop("ACRLPD_shuffled") == "others"
    assert set(told.values()) == {"tabletop"}
    assert tabletop.markdown([seed]).count("\n") == 2 + len(tabletop.STITCH_ROWS)
    assert "–" not in [seed.cell(name) for name in tabletop.STITCH_ROWS.values()]
    done = len(called)
    seed.run()
    assert len(called) == done, "nothing is done twice"


def test_what_was_begun_is_resumed(tabletop: ModuleType, called: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "seed0/runs/ript_tabletop/RIPT").mkdir(parents=True)
    with pytest.raises(SystemExit, match="2"):  # the command itself knows --resume, not a recipe's flags
        tabletop.Seed(tmp_path / "seed0", 0, quick=False).run()
    assert called[-1][:4] == ["train", "ript_tabletop", "--exp-name", "RIPT"]
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
