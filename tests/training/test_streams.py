"""What a round hands to the update: dataset and replay at the promised ratio, and groups that tell something."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from collecting_runs import ENV, ONLINE, online_run, ppo_run, ript_run
from pirl.agents.agent import TrainState
from pirl.agents.config import RIPTConfig
from pirl.agents.learner import Learner
from pirl.agents.ript import RIPT
from pirl.build import build_agent
from pirl.data.normalize import NormStats, save_norm_stats
from pirl.data.robots import get_robot
from pirl.data.transforms import Transform
from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.parallel.sharding import data_sharding, make_mesh
from pirl.records import Context, Episode, Rollout
from pirl.rollout.collect import Job
from pirl.rollout.collector import Collector
from pirl.rollout.config import CurriculumConfig, EvalConfig
from pirl.rollout.curriculum import Curriculum
from pirl.rollout.policy import ChunkPolicy, row_keys
from pirl.rollout.pool import LocalPool
from pirl.training.build import build_acting, build_transform
from pirl.training.evaluator import Evaluator
from pirl.training.streams import DatasetStream, GroupStream, OnlineStream, Stream

HORIZON, STEPS = 3, 4
MODEL = MLPFlowConfig(state_dim=2, action_dim=2, horizon=HORIZON)
TRANSFORM = Transform(robot=get_robot("synthetic"), norm_stats=None, tokenizer=None, action_dim=2)
EMPTY = TrainState(step=0, params={})
Outcome = Callable[[Context, int], bool | None]
"""Does the episode of this number succeed? None: it is lost."""


class Scripted(Collector):
    """Episodes whose outcomes are told; remembers what it was asked for."""

    def __init__(self, pool: LocalPool, folder: Path, outcome: Outcome) -> None:
        policy = ChunkPolicy(lambda *_: None, TRANSFORM, batch_size=2, execute=2, cameras=())  # type: ignore[arg-type, return-value]
        super().__init__(pool, policy, key=jax.random.key(0), directory=folder)
        self.outcome, self.asked = outcome, list[Job]()

    def collect(self, jobs: list[Job], weights: Any, stop: Any, say: Any) -> dict[int, Rollout]:
        known = {job.number for job in self.asked}
        self.asked += [job for job in jobs if job.number not in known]
        told = {job.number: (job, self.outcome(job.context, job.number)) for job in jobs}
        return {number: episode(job, success) for number, (job, success) in told.items() if success is not None}


def episode(job: Job, success: bool) -> Rollout:
    """Four steps in two plans; every number in it is that of the episode."""
    last = np.arange(STEPS) == STEPS - 1
    return Rollout(
        context=job.context,
        number=job.number,
        episode=Episode(
            task="go",
            state=np.full((STEPS, 2), job.number, np.float32),
            actions=np.full((STEPS, 2), job.number, np.float32),
            rewards=(last & success).astype(np.float32),
            terminated=last & success,
            truncated=last & (not success),
            success=success,
            intended=np.full((STEPS, HORIZON, 2), job.number, np.float32),
        ),
        starts=np.array([0, 2]),
        frames={},
        frame_steps=np.zeros(0, np.int64),
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(ENV, 2) as made:
        yield made


def groups(pool: LocalPool, folder: Path, outcome: Outcome, **settings: Any) -> tuple[GroupStream, Scripted]:
    config = RIPTConfig(**{"group_size": 4, "groups_per_iteration": 2, "max_attempts": 3.0, **settings})
    collector = Scripted(pool, folder, outcome)
    stream = GroupStream(
        collector,
        Curriculum(CurriculumConfig(), pool.info, 0),
        RIPT(policy=MLPFlow(MODEL), config=config, policy_learner=Learner(tx=optax.sgd(1.0)), real_action_dim=2),
        batch_size=8,
        horizon=HORIZON,
        seed=0,
        demonstrations=None,
        sharding=data_sharding(make_mesh()),
    )
    assert isinstance(stream, Stream)
    return stream, collector


def batches(stream: Stream, step: int = 1, state: TrainState = EMPTY) -> list[Any]:
    return [jax.device_get(batch) for batch in stream.round(step, state, lambda: False, lambda _: None)]


def every_other(context: Context, number: int) -> bool:
    return number % 2 == 0


def test_rows_of_groups_with_their_advantages(pool: LocalPool, tmp_path: Path) -> None:
    """Two groups of four, all of whose rows are given out in each pass."""
    stream, collector = groups(pool, tmp_path, every_other, epochs=2, drift_limit=None)
    found = batches(stream)
    assert [job.number for job in collector.asked] == list(range(8))
    assert [len({job.context for job in collector.asked[i : i + 4]}) for i in (0, 4)] == [1, 1]
    assert len(found) == 4  # 16 rows, twice
    for half in (found[:2], found[2:]):
        rows = np.concatenate([batch["observations"]["state"][:, 0] for batch in half])
        assert sorted(rows.tolist()) == sorted([*range(8)] * 2)
    for batch in found:
        number = batch["observations"]["state"][:, 0]
        np.testing.assert_allclose(batch["advantage"], np.where(number % 2 == 0, 2 / 3, -2 / 3), rtol=1e-6)
        assert batch["executed"].tolist() == [[1, 1, 0]] * 8
        assert batch["weight"].tolist() == [1] * 8
    assert [batch["fresh"].tolist() for batch in found] == [[1] * 8] + [[0] * 8] * 3
    assert stream.metrics()["ript/updates"] == 4
    batches(stream, 2)
    assert [job.number for job in collector.asked[8:]] == list(range(8, 16))


class Brief(Scripted):
    """Successes are over after one plan, failures take two."""

    def collect(self, jobs: list[Job], weights: Any, stop: Any, say: Any) -> dict[int, Rollout]:
        found = super().collect(jobs, weights, stop, say)
        return {number: _first_plan(one) if one.episode.success else one for number, one in found.items()}


def _first_plan(rollout: Rollout) -> Rollout:
    names = ("state", "actions", "rewards", "terminated", "truncated", "intended")
    columns = {name: getattr(rollout.episode, name)[2:] for name in names}  # the end is what makes it a success
    return replace(rollout, episode=replace(rollout.episode, **columns), starts=np.array([0]))


@pytest.mark.parametrize("weigh", ["rows", "rollouts"])
def test_long_failures_count_as_told(pool: LocalPool, tmp_path: Path, weigh: str) -> None:
    """Half of the rollouts fail and have two rows for each of the others': two thirds of the weight, or half of it."""
    stream, _ = groups(pool, tmp_path, every_other, epochs=1, drift_limit=None, weigh=weigh)
    stream._collector = Brief(pool, tmp_path, every_other)
    stream._batch_size = 4
    found = batches(stream)
    number = np.concatenate([batch["observations"]["state"][:, 0] for batch in found])
    weight = np.concatenate([batch["weight"] for batch in found])
    assert len(weight) == 12
    assert weight.sum() == pytest.approx(12)
    lost = weight[number % 2 == 1].sum() / weight.sum()
    assert lost == pytest.approx(2 / 3 if weigh == "rows" else 1 / 2)


def test_groups_that_tell_nothing_are_replaced(pool: LocalPool, tmp_path: Path) -> None:
    """The first is all success, the second all failure, the third is incomplete; two more are enough."""
    told = {0: [True] * 4, 1: [False] * 4, 2: [True, None, False, True]}
    stream, collector = groups(pool, tmp_path, lambda _, n: told.get(n // 4, [True, False, True, True])[n % 4])
    found = batches(stream)
    metrics = stream.metrics()
    assert metrics["ript/attempted_groups"] == 5
    assert metrics["ript/accepted_groups"] == 2
    assert metrics["ript/collected_rows"] == 16
    assert metrics["ript/success_rate"] == pytest.approx(12 / 19)
    assert metrics["ript/env_steps"] == stream.state()["env_steps"] == 19 * 4
    assert {int(n) // 4 for batch in found for n in batch["observations"]["state"][:, 0]} == {3, 4}
    assert len(collector.asked) == 20
    state = stream.state()
    assert state["curriculum"]["counts"] == [[12.0, 7.0]]
    assert (state["episodes"], state["attempted"]) == (20, [])


@pytest.mark.parametrize("outcome", [True, False])
def test_attempts_are_limited(pool: LocalPool, tmp_path: Path, outcome: bool) -> None:
    stream, collector = groups(pool, tmp_path, lambda *_: outcome)
    assert batches(stream) == []
    assert stream.metrics()["ript/attempted_groups"] == 6
    assert stream.metrics()["ript/updates"] == 0
    assert len(collector.asked) == 24


def test_a_round_ends_where_the_policy_has_moved_far(pool: LocalPool, tmp_path: Path) -> None:
    stream, _ = groups(pool, tmp_path, every_other, epochs=3, drift_limit=0.5)
    drifts, taken = iter([0.1, 0.4, 0.6, 0.1]), 0
    for _ in stream.round(1, EMPTY, lambda: False, lambda _: None):
        stream.notice({"ript/drift": jnp.float32(next(drifts))})
        taken += 1
    assert taken == 3
    assert stream.metrics()["ript/updates"] == 3
    assert len(batches(stream, 2)) == 6  # what the last round said is over


@pytest.fixture(scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OnlineStream, TrainState]]:
    config = online_run(tmp_path_factory.mktemp("runs"))
    agent, transform = build_agent(config), build_transform(config)
    with build_acting(config, agent, transform, make_mesh()) as (stream, evaluations):
        assert isinstance(stream, OnlineStream)
        assert evaluations.parts == ()
        yield stream, agent.init(jax.random.key(0))


def test_online_keeps_the_ratio_and_mixes_half_and_half(acting: tuple[OnlineStream, TrainState]) -> None:
    """Episodes are collected as soon as the ones before have been trained on, and not before."""
    stream, state = acting
    walked, origin = 0, list[int]()
    for step in range(1, 13):
        before = len(stream._replay)
        (batch,) = batches(stream, step, state)
        due = step > ONLINE.start_step and step - 1 - ONLINE.start_step >= ONLINE.updates_per_step * walked
        assert len(stream._replay) - before == (ONLINE.episodes if due else 0), step
        walked = int(stream._replay.lengths.sum())
        policy = stream._collector.policy
        states = [stream._replay.episode(i).state for i in range(len(stream._replay))]
        known = {tuple(row) for rows in states for row in policy.transform.low_dim(rows, None, [])["state"].tolist()}
        origin.append(sum(tuple(row) in known for row in batch["observations"]["state"].tolist()))
        metrics = stream.metrics()
        assert ("online/episodes" in metrics) == due
        assert stream.metrics().keys() == {"time/stall_fraction"}  # of a collection once
    assert origin == [0] * 2 + [4] * 10


def test_exploration_is_for_collecting_alone(tmp_path: Path) -> None:
    """The same noise, the same observation: who collects departs from the ODE, who evaluates follows it."""
    config = ppo_run(tmp_path, evaluation=EvalConfig(interval=1, episodes=1))
    agent, transform = build_agent(config), build_transform(config)
    state, seen = agent.init(jax.random.key(0)), {0: {"state": np.float32([0.1, 0.2])}}
    with build_acting(config, agent, transform, make_mesh()) as (stream, evaluations):
        assert isinstance(stream, GroupStream)
        (evaluator,) = evaluations.parts
        assert isinstance(evaluator, Evaluator)
        policies = stream._collector.policy, evaluator._policy
        explored, acted = (one.use(state, jax.random.key(1)).choose(seen, {0: (4, 0)})[0] for one in policies)
        assert explored.notes.keys() == agent.notes.keys()
        assert {name: values.shape for name, values in explored.notes.items()} == dict(agent.notes)
        assert acted.notes == {}
        observation = Observation(
            images={}, image_masks={}, state=jnp.asarray(transform.low_dim(seen[0]["state"][None], None, [])["state"])
        )
        keys = row_keys(jax.random.key(1), np.array([[4, 0]], np.uint32))
        found = transform.robot_actions(np.asarray(agent.act(state, observation, keys)), seen[0]["state"][None])[0]
        np.testing.assert_allclose(acted.chunk, found, rtol=1e-5, atol=1e-5)
        assert np.abs(explored.chunk - acted.chunk).max() > 1e-3
        batch = stream.example()
        wanted = agent.batch_spec(config.batch_sizes)
        assert jax.tree.map(lambda x: x.shape, batch["notes"]) == {n: s.shape for n, s in wanted["notes"].items()}
        assert batch.keys() == wanted.keys()


def test_episodes_may_be_collected_by_the_best_of_several_chunks(tmp_path: Path) -> None:
    """From the same first states, what the critic says of the plans is higher than that of plain samples."""
    said = {}
    for best_of in (1, 8):
        config = online_run(tmp_path / str(best_of))
        config = replace(config, rollout=replace(config.rollout, best_of=best_of))
        agent, transform = build_agent(config), build_transform(config)
        state = agent.init(jax.random.key(0))
        with build_acting(config, agent, transform, make_mesh()) as (stream, _):
            assert isinstance(stream, OnlineStream)
            batches(stream, ONLINE.start_step + 1, state)
            replay = stream._replay
            first = [replay.episode(index) for index in range(len(replay))]
            states = np.stack([one.state[0] for one in first])
            plans = np.stack([one.intended[0] for one in first if one.intended is not None])
            seen = transform.low_dim(states, plans, [""] * len(states))
            observation = Observation(images={}, image_masks={}, state=jnp.asarray(seen["state"]))
            values = agent.q_values(state, observation, jnp.asarray(seen["actions"])[:, None]).mean(0)[:, 0]
            said[best_of] = {tuple(one): float(value) for one, value in zip(states.tolist(), values, strict=True)}
    assert said[1].keys() == said[8].keys()
    assert len(said[1]) == ONLINE.episodes
    higher = [said[8][one] > said[1][one] for one in said[1]]
    assert np.mean(higher) > 0.5
    assert np.mean(list(said[8].values())) > np.mean(list(said[1].values()))


def test_a_dry_run_needs_no_episode(acting: tuple[OnlineStream, TrainState], tmp_path: Path) -> None:
    """What it compiles for has the shapes of a real batch, also where there is no dataset."""
    stream, state = acting
    expected = shapes(batches(stream, 1, state)[0])
    given = online_run(tmp_path / "runs", online=replace(ONLINE, start_step=0))
    own = {"state": STATS, "actions": STATS}
    save_norm_stats(tmp_path / "assets" / "walk", own)
    scratch = replace(given.data, repo_ids=(), asset_id="walk", assets_dir=str(tmp_path / "assets"))
    for data in (given.data, scratch):
        config = replace(given, data=data)
        with build_acting(config, build_agent(config), build_transform(config), make_mesh()) as (other, _):
            assert shapes(jax.device_get(other.example())) == expected
    config = ript_run(tmp_path / "runs")
    with build_acting(config, build_agent(config), build_transform(config), make_mesh()) as (other, _):
        rows = shapes(jax.device_get(other.example()))
    assert rows["actions"] == expected["actions"]
    assert rows["demos"]["observations"] == rows["observations"] == expected["observations"]
    assert not (tmp_path / "runs").exists()


STATS = NormStats(mean=np.zeros(2), std=np.ones(2), q01=-np.ones(2), q99=np.ones(2))


def shapes(batch: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), batch)


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    config = online_run(tmp_path)
    with pytest.raises(ConfigError, match=r"online.start_step is 2 without a dataset"):
        replace(config, data=replace(config.data, repo_ids=(), asset_id="walk"))


def test_a_dataset_has_nothing_to_prune(acting: tuple[OnlineStream, TrainState]) -> None:
    def unread() -> Iterator[dict[str, Any]]:
        pytest.fail("positions were read for nothing")
        yield {}

    DatasetStream(acting[0].loader).prune(unread())
