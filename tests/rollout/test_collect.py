"""An episode depends on its context, its number and the policy alone, and says exactly what was seen and meant."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.agents.agent import Choice
from pirl.data.chunks import chunk_actions, known_steps, tabulate
from pirl.data.robots import make_robot
from pirl.data.transforms import Transform
from pirl.envs.env import EnvBatch, SeparateEnvs
from pirl.errors import EnvError, PirlWarning
from pirl.names import BASE_CAMERA
from pirl.records import Context, Rollout
from pirl.rollout.collect import CollectionStoppedError, CollectStats, Job, collect, numbered
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import LocalPool
from rollout_envs import CountingEnv, counting

HORIZON, EXECUTE = 4, 3
ROBOT = make_robot(name="counting", state_dim=4, action_dim=2, cameras={BASE_CAMERA: "camera 0"})


def act(weights: Any, observation: Any, keys: Any) -> Any:
    """Plans that tell weights, states and keys apart."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (HORIZON, 2)))(keys)
    return weights + noise + 0.1 * observation.state[:, None, :2]


def policy(batch_size: int, weights: float = 0.5, seed: int = 0) -> ChunkPolicy:
    transform = Transform(robot=ROBOT, norm_stats=None, tokenizer=None, action_dim=2, state_dim=4)
    made = ChunkPolicy(act, transform, batch_size=batch_size, execute=EXECUTE, cameras=())
    return made.use(jnp.float32(weights), jax.random.key(seed))


POLICY = policy(5)
JOBS = numbered([Context("count" if i % 3 else "count forever", 10 + i // 2) for i in range(8)], 40)


def collected(
    jobs: list[Job],
    *,
    size: int = 5,
    act: ChunkPolicy = POLICY,
    build: Callable[[int], EnvBatch] = counting,
    **options: Any,
) -> dict[int, Rollout]:
    with LocalPool(build, size) as pool:
        return {rollout.number: rollout for rollout in collect(pool, act, jobs, **options)}


@pytest.fixture(scope="module")
def rollouts() -> dict[int, Rollout]:
    return collected(JOBS)


def assert_same(found: Rollout, expected: Rollout) -> None:
    assert (found.context, found.number) == (expected.context, expected.number)
    assert (found.episode.task, found.episode.success) == (expected.episode.task, expected.episode.success)
    for name in ("state", "actions", "rewards", "terminated", "truncated", "intended"):
        left, right = getattr(found.episode, name), getattr(expected.episode, name)
        assert (left.dtype, left.tobytes()) == (right.dtype, right.tobytes()), name
    np.testing.assert_array_equal(found.starts, expected.starts)
    np.testing.assert_array_equal(found.frame_steps, expected.frame_steps)
    assert found.frames.keys() == expected.frames.keys()
    for key, pictures in expected.frames.items():
        np.testing.assert_array_equal(found.frames[key], pictures)


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(JOBS), size=st.integers(1, 5), part=st.integers(1, 8))
def test_order_neighbours_and_slots_do_not_matter(
    order: list[Job], size: int, part: int, rollouts: dict[int, Rollout]
) -> None:
    found = collected(order[:part], size=size)
    assert found.keys() == {job.number for job in order[:part]}
    for number, rollout in found.items():
        assert_same(rollout, rollouts[number])


def test_number_context_weights_and_key_do_matter(rollouts: dict[int, Rollout]) -> None:
    job, plain = JOBS[1], rollouts[JOBS[1].number].episode.actions
    others = [
        collected([Job(99, job.context)])[99],
        collected([Job(job.number, Context("count", 77))])[job.number],
        collected([job], act=policy(5, weights=0.6))[job.number],
        collected([job], act=policy(5, seed=1))[job.number],
    ]
    for other in others:
        assert not np.array_equal(other.episode.actions, plain)
    assert_same(collected([job], act=policy(7))[job.number], rollouts[job.number])  # the batch's size does not


def test_an_episode_says_what_happened(rollouts: dict[int, Rollout]) -> None:
    """Acted out again by hand, it goes as it says."""
    for job in JOBS:
        env, episode = CountingEnv(), rollouts[job.number].episode
        env.begin(job.context)
        ends = (7, True) if job.context.task == "count" else (12, False)
        assert (len(episode), episode.success) == ends
        for step, action in enumerate(episode.actions):
            np.testing.assert_array_equal(episode.state[step], env.observe()["state"])
            outcome = env.act(action)
            assert episode.rewards[step] == np.float32(outcome.reward)
            last = step == len(episode) - 1
            assert (episode.terminated[step], episode.truncated[step]) == (last and ends[1], last and not ends[1])
        assert episode.task == job.context.task


def test_plans_are_what_was_meant_and_end_in_nan(rollouts: dict[int, Rollout]) -> None:
    for job in JOBS:
        rollout = rollouts[job.number]
        episode, plans = rollout.episode, rollout.episode.intended
        assert plans is not None
        assert rollout.starts.tolist() == list(range(0, len(episode), EXECUTE))
        seen = {0: {"state": episode.state[0]}}
        for start in rollout.starts.tolist():
            seen[0]["state"] = episode.state[start]
            plan = POLICY.plan(seen, {0: (job.number, start)})[0]
            for late in range(min(EXECUTE, len(episode) - start)):
                np.testing.assert_array_equal(plans[start + late, : HORIZON - late], plan[late:])
                assert np.isnan(plans[start + late, HORIZON - late :]).all()
                np.testing.assert_array_equal(episode.actions[start + late], plan[late])


def test_chunks_read_the_plans_as_they_are_meant(rollouts: dict[int, Rollout]) -> None:
    """At the end of an episode the rest of the plan is known, and nothing behind it."""
    rollout = rollouts[JOBS[1].number]  # 7 steps: plans begin at 0, 3 and 6
    table = tabulate([rollout.episode], discount=0.9)
    rows, plans = np.arange(7), rollout.episode.intended
    assert plans is not None
    assert table.plan_length.tolist() == [4, 3, 2, 4, 3, 2, 4]
    assert known_steps(table, rows, critic_horizon=HORIZON).tolist() == [4, 4, 4, 4, 3, 2, 4]
    actions = chunk_actions(table, rows, horizon=HORIZON)
    np.testing.assert_array_equal(actions[6], plans[6])
    np.testing.assert_array_equal(actions[2], rollout.episode.actions[2:6])  # what was done goes before what was meant
    np.testing.assert_array_equal(actions[5], [*rollout.episode.actions[5:], *[rollout.episode.actions[6]] * 2])


def exploring(weights: Any, observation: Any, keys: Any) -> Choice:
    """The same plans, with what they were made of noted down."""
    chunk = act(weights, observation, keys)
    return Choice(chunk, notes={"noise": chunk - 0.1 * observation.state[:, None, :2], "seen": observation.state[:, 0]})


@pytest.mark.parametrize("last_look", [False, True])
def test_rollouts_keep_what_was_noted(last_look: bool, rollouts: dict[int, Rollout]) -> None:
    """Of every plan; and of the last observation, where an episode was cut off and the policy looks at it."""
    transform = POLICY.transform
    noting = ChunkPolicy(exploring, transform, batch_size=5, execute=EXECUTE, cameras=())
    found = collected(JOBS, act=noting.use(jnp.float32(0.5), jax.random.key(0)), last_look=last_look)
    cut = 0
    for number, rollout in found.items():
        plain, plans = rollouts[number], len(rollout.starts)
        assert plain.notes == {}
        np.testing.assert_allclose(rollout.episode.actions, plain.episode.actions, atol=1e-6)
        looked = last_look and bool(rollout.episode.truncated[-1])
        cut += looked
        assert {name: len(values) for name, values in rollout.notes.items()} == dict.fromkeys(
            ("noise", "seen"), plans + looked
        )
        np.testing.assert_array_equal(rollout.notes["seen"][:plans], rollout.episode.state[rollout.starts, 0])
        chunks = rollout.notes["noise"][:plans] + 0.1 * rollout.episode.state[rollout.starts][:, None, :2]
        assert rollout.episode.intended is not None
        np.testing.assert_allclose(chunks, rollout.episode.intended[rollout.starts], atol=1e-6)
        if looked:
            env = CountingEnv()
            env.begin(rollout.context)
            for action in rollout.episode.actions:
                env.act(action)
            np.testing.assert_array_equal(rollout.notes["seen"][-1], env.observe()["state"][0])
    assert (cut > 0) == last_look
    assert cut < len(found)


@pytest.mark.parametrize("every", [False, True])
def test_pictures(every: bool) -> None:
    job = JOBS[1]
    rollout = collected([job], every_picture=every)[job.number]
    steps = list(range(7)) if every else [0, 3, 6]
    assert rollout.frame_steps.tolist() == steps
    assert rollout.frames.keys() == {"camera 0", "camera 1"}
    for camera, key in enumerate(sorted(rollout.frames)):
        assert rollout.frames[key].shape == (len(steps), 2, 3, 3)
        assert rollout.frames[key][:, 0, 0, 0].tolist() == [10 * step + camera for step in steps]


class Fickle(CountingEnv):
    """Fails in as many episodes as there are failures left, at the third step or at once."""

    failures = 0
    at_once = False

    def begin(self, context: Context) -> None:
        super().begin(context)
        if self.at_once:
            self.fail()

    def act(self, action: np.ndarray) -> Any:
        if self.steps == 2:
            self.fail()
        return super().act(action)

    def fail(self) -> None:
        if type(self).failures > 0:
            type(self).failures -= 1
            raise OSError("the robot fell asleep")


def fickle(size: int) -> EnvBatch:
    return SeparateEnvs([Fickle() for _ in range(size)])


@pytest.mark.parametrize("at_once", [False, True])
def test_lost_episodes_are_repeated_and_nobody_could_tell(
    at_once: bool, rollouts: dict[int, Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fickle, "failures", 4)
    monkeypatch.setattr(Fickle, "at_once", at_once)
    stats = CollectStats()
    with pytest.warns(PirlWarning, match=r"was lost: OSError: the robot fell asleep; it is repeated") as warned:
        found = collected(JOBS, size=3, build=fickle, stats=stats)
    assert len(warned) == 4
    assert found.keys() == rollouts.keys()
    for number, rollout in found.items():
        assert_same(rollout, rollouts[number])
    assert (stats.episodes, stats.lost, Fickle.failures) == (8, [], 0)
    assert stats.env_steps == sum(len(rollout.episode) for rollout in rollouts.values())


def test_what_is_lost_too_often_is_given_up(rollouts: dict[int, Rollout]) -> None:
    jobs = [*JOBS[:3], Job(90, Context("raise", 2)), Job(91, Context("nan state", 1))]
    stats = CollectStats()
    with pytest.warns(PirlWarning, match=r"episode 90 .*the cup broke at step 2; tried 2 times, continuing without it"):
        found = collected(jobs, size=2, retries=1, stats=stats)
    assert found.keys() == {job.number for job in JOBS[:3]}
    assert {job.number: reason for job, reason in stats.lost} == {
        90: "the cup broke at step 2",
        91: "observation 'state' of shape (4,) is not finite",
    }


@pytest.mark.parametrize("count", [1, 3, 9])
def test_where_nothing_works_it_says_so(count: int) -> None:
    """Also where there are fewer episodes than slots; and not where an earlier part of the collection did work."""
    jobs = numbered([Context("raise", 1)] * count)
    with pytest.warns(PirlWarning), pytest.raises(EnvError, match="the cup broke at step 1"):
        collected(jobs, retries=1)
    with pytest.warns(PirlWarning):
        assert collected(jobs, retries=1, stats=CollectStats(episodes=1)) == {}


def test_asked_to_stop_it_gives_up_what_is_under_way() -> None:
    """Those of seven steps are over when the first of them is seen; those of twelve are not."""
    found: list[Rollout] = []
    with LocalPool(counting, 8) as pool, pytest.raises(CollectionStoppedError):
        found.extend(collect(pool, policy(8), JOBS, stop=lambda: bool(found)))
    assert sorted(rollout.number for rollout in found) == [job.number for job in JOBS if job.context.task == "count"]


def test_costs_are_counted() -> None:
    stats = CollectStats()
    found = collected(JOBS, size=3, stats=stats)
    assert stats.episodes == 8
    assert stats.rows_used == sum(len(rollout.starts) for rollout in found.values())
    before = stats.policy_calls
    collected(JOBS[:1], stats=stats)
    assert (stats.episodes, stats.policy_calls) == (9, before + len(found[JOBS[0].number].starts))
    metrics = stats.metrics(5)
    assert metrics["time/occupancy"] == pytest.approx(stats.rows_used / (5 * stats.policy_calls))
    assert metrics["time/env_share"] + metrics["time/policy_share"] <= 1
    assert metrics["time/env_steps_per_second"] == pytest.approx(stats.env_steps / stats.total_seconds)
    assert all(name.startswith("time/") for name in metrics)
