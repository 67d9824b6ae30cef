"""ALOHA's ladders: rows whose commands pirl takes, from pictures and from the simulator's state."""

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


@pytest.mark.parametrize("name", ["pictures", "state"])
def test_every_row_is_a_run_that_starts_from_an_earlier_one(ladder: ModuleType, name: str) -> None:
    task = ladder.TASKS[name]
    assert task.name in ladder.TITLES
    steps = set()
    seen: list[str] = []
    for row in task.rows:
        config = cli([row.recipe, *row.settings])
        assert isinstance(config.env, AlohaConfig)
        assert config.env.full_state == (name == "state")
        assert config.horizon == task.horizon
        assert config.data.robot == task.robot
        if row.of or row.start:
            assert (row.of or row.start) in seen
        if row.start and row.name not in ("ript", "acrlpd_ript"):
            steps.add((config.num_train_steps, config.batch_size))
        seen.append(row.name)
    assert len(steps) == 1  # what is compared makes as many updates of the same size
    words = list(task.record)
    dials = parse_dials(AlohaConfig(), [word for word in words if "=" in word])
    assert dials.miss > 0 < dials.let_go
    longer = cli([word for word in words if "=" not in word and word != "--dials"]).env
    assert isinstance(longer, AlohaConfig)
    assert longer.max_steps == 200
