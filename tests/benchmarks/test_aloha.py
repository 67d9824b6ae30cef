"""ALOHA's ladder: rows whose commands pirl takes."""

from pathlib import Path
from types import ModuleType

import pytest

from pirl.envs.config import AlohaConfig
from pirl.recipes import cli
from pirl.rollout.record import parse_dials

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RESULTS))
    import aloha

    return aloha


def test_every_row_is_a_run_that_starts_from_an_earlier_one(ladder: ModuleType) -> None:
    task = ladder.TRANSFER
    seen: list[str] = []
    for row in task.rows:
        config = cli([row.recipe, *row.settings])
        assert isinstance(config.env, AlohaConfig)
        assert config.horizon == task.horizon
        assert config.data.robot == task.robot
        if row.name != "bc":
            assert (row.of or row.start) in seen
        seen.append(row.name)
    dials = parse_dials(AlohaConfig(), [word for word in task.record if "=" in word])
    assert dials.miss > 0 < dials.let_go
