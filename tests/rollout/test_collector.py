"""A round that is interrupted goes on where it was, and what it hands on is what it would have been."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collecting_runs import ENV, EVER, make_trouble
from pirl.data.config import DataConfig
from pirl.data.create import create_source
from pirl.data.robots import get_robot
from pirl.data.transforms import Transform
from pirl.errors import DataError, EnvError, PirlWarning
from pirl.records import Context, Rollout
from pirl.rollout.collect import CollectionStoppedError, numbered
from pirl.rollout.collector import Collector
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import LocalPool
from pirl.rollout.record import RolloutRecorder, num_recorded

KEY = jax.random.key(1)
JOBS = numbered([Context("go", init) for init in range(6)], 20)


def act(weights: Any, observation: Any, keys: Any) -> Any:
    return weights + 0.5 * jax.vmap(lambda key: jax.random.normal(key, (3, 2)))(keys)


POLICY = ChunkPolicy(
    act,
    Transform(robot=get_robot("synthetic"), norm_stats=None, tokenizer=None, action_dim=2),
    batch_size=2,
    execute=2,
    cameras=(),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(ENV, 2) as made:
        yield made


def collector(pool: LocalPool, folder: Path, **options: Any) -> Collector:
    return Collector(pool, POLICY, key=KEY, directory=folder / "rollouts", **options)


def never() -> bool:
    return False


def gather(made: Collector, stop: Any = never, said: list[str] | None = None) -> dict[int, Rollout]:
    return made.collect(JOBS, jnp.float32(0.2), stop, (said if said is not None else []).append)


def actions(found: dict[int, Rollout]) -> dict[int, list[Any]]:
    return {number: rollout.episode.actions.tolist() for number, rollout in found.items()}


def after(count: int) -> Any:
    """Says stop once it was asked so often."""
    asked = iter(range(count))
    return lambda: next(asked, None) is None


@pytest.fixture(scope="module")
def whole(pool: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return actions(gather(collector(pool, tmp_path_factory.mktemp("whole"))))


@pytest.mark.parametrize("asked", [0, 3, 5])
def test_interrupted_it_goes_on(asked: int, pool: LocalPool, tmp_path: Path, whole: dict[int, list[Any]]) -> None:
    first = collector(pool, tmp_path)
    with pytest.raises(CollectionStoppedError):
        gather(first, after(asked))
    state = json.loads(json.dumps(first.state()))
    kept = len(state["rollouts"])
    assert (kept > 0) == (asked > 0)
    assert kept < 6
    second, said = collector(pool, tmp_path), list[str]()
    second.restore(state)
    assert actions(gather(second, said=said)) == whole
    assert said == [f"collecting {number}/6" for number in range(kept + 1, 7)]  # nothing is acted out twice
    assert list(whole) == [job.number for job in JOBS]
    second.close_round()
    assert second.state()["rollouts"] == []


def test_files_stay_as_long_as_a_checkpoint_names_them(pool: LocalPool, tmp_path: Path) -> None:
    made = collector(pool, tmp_path)
    states = []
    for asked in (3, 3):
        with pytest.raises(CollectionStoppedError):
            gather(made, after(asked))
        states.append(made.state())
    names = [set(state["rollouts"]) for state in states]
    assert names[0] < names[1]
    made.prune(states)
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == names[1]
    made.prune([states[0]])
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == names[0]
    made.restore(states[0])
    made.prune([])
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_lost_episodes_stay_lost(
    pool: LocalPool, tmp_path: Path, whole: dict[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted, and not tried again by the run that goes on: it would be another one."""
    made = collector(pool, tmp_path, retries=0)
    make_trouble(monkeypatch, tmp_path, fail=1)
    with pytest.warns(PirlWarning, match="continuing without it"), pytest.raises(CollectionStoppedError):
        gather(made, after(4))
    state = made.state()
    assert len(state["lost"]) == 1
    monkeypatch.undo()
    again = collector(pool, tmp_path)
    again.restore(state)
    found = actions(gather(again))
    assert found == {number: plan for number, plan in whole.items() if number not in state["lost"]}
    assert again.close_round()["rollout/lost_episodes"] == 1


def test_a_broken_environment_is_tried_again_when_it_is_repaired(
    pool: LocalPool, tmp_path: Path, whole: dict[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = collector(pool, tmp_path, retries=0)
    make_trouble(monkeypatch, tmp_path, fail=EVER)
    with pytest.warns(PirlWarning), pytest.raises(EnvError, match="the cable was pulled"):
        gather(made)
    state = made.state()
    assert state["lost"] == []
    monkeypatch.undo()
    made.restore(state)
    assert actions(gather(made)) == whole


def test_one_that_is_left_and_lost_is_no_broken_environment(
    pool: LocalPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = collector(pool, tmp_path, retries=0)
    made.collect(JOBS[:5], jnp.float32(0.2), never, lambda _: None)
    again = collector(pool, tmp_path, retries=0)
    again.restore(made.state())
    make_trouble(monkeypatch, tmp_path, fail=EVER)
    with pytest.warns(PirlWarning, match="continuing without it"):
        assert len(gather(again)) == 5


def recorded(pool: LocalPool, folder: Path) -> RolloutRecorder:
    return RolloutRecorder(folder / "dataset", info=pool.info, existing="append")


def test_every_episode_is_recorded_once(pool: LocalPool, tmp_path: Path, whole: dict[int, list[Any]]) -> None:
    """Recorded, then killed before the next checkpoint: what is collected again is in the dataset already."""
    with recorded(pool, tmp_path) as recorder:
        made = collector(pool, tmp_path, every_picture=True, recorder=recorder)
        with pytest.raises(CollectionStoppedError):
            gather(made, after(4))
        state = made.state()
        assert num_recorded(tmp_path / "dataset") == 0  # a round that is not over may still be given up
        gather(made)
        made.close_round()
        later = made.state()
    assert (state["recorded"], later["recorded"], num_recorded(tmp_path / "dataset")) == (0, 6, 6)
    for position, expected in ((state, 6), (later, 12)):
        with recorded(pool, tmp_path) as recorder:
            made = collector(pool, tmp_path, every_picture=True, recorder=recorder)
            made.restore(position)
            gather(made)
            made.close_round()
            assert made.state()["recorded"] == expected
        assert num_recorded(tmp_path / "dataset") == expected
    config = DataConfig(repo_ids=(str(tmp_path / "dataset"),), robot="synthetic", cache="ram", outcome="columns")
    source = create_source(config, get_robot("synthetic"), image_size=8)
    for index in range(12):
        expected_actions = np.float32(whole[JOBS[index % 6].number])
        np.testing.assert_array_equal(source.episode(index).actions, expected_actions)


def test_a_dataset_that_lost_episodes_is_noticed(pool: LocalPool, tmp_path: Path) -> None:
    made = collector(pool, tmp_path, recorder=recorded(pool, tmp_path))
    with pytest.raises(DataError, match=r"holds 0 episodes; at the checkpoint there were 3"):
        made.restore({"rollouts": [], "lost": [], "recorded": 3})
