"""The rows RIPT learns from are what the policy saw and planned; a pass goes over all of them once."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pirl.data.normalize import NormStats
from pirl.data.robots import get_robot
from pirl.data.tokenizer import ByteTokenizer
from pirl.data.transforms import Transform
from pirl.envs.config import TabletopConfig
from pirl.names import BASE_CAMERA, IMAGE
from pirl.records import Rollout
from pirl.rollout.collect import collect, numbered
from pirl.rollout.contexts import fixed_contexts
from pirl.rollout.policy import ChunkPolicy, model_inputs
from pirl.rollout.pool import LocalPool, Started
from pirl.rollout.rows import PlanRows, first_rows, minibatches, plan_rows

HORIZON, EXECUTE, SIZE = 5, 3, 28
TABLE = TabletopConfig(max_steps=7)


def stats(dim: int) -> NormStats:
    mean = np.linspace(-0.2, 0.3, dim)
    return NormStats(mean=mean, std=np.linspace(0.5, 2, dim), q01=mean - 1, q99=mean + 1)


TRANSFORM = Transform(
    robot=get_robot("tabletop"),
    norm_stats={"state": stats(4), "actions": stats(3)},
    tokenizer=ByteTokenizer(),
    action_dim=8,
    token_len=32,
    image_size=(SIZE, SIZE),
)


def act(weights: Any, observation: Any, keys: Any) -> Any:
    return jax.vmap(lambda key: jax.random.normal(key, (HORIZON, 8)))(keys)


@pytest.fixture(scope="module")
def policy() -> ChunkPolicy:
    made = ChunkPolicy(act, TRANSFORM, batch_size=3, execute=EXECUTE, cameras=(BASE_CAMERA,))
    return made.use(None, jax.random.key(0))


@pytest.fixture(scope="module", params=[False, True])
def rollouts(request: pytest.FixtureRequest, policy: ChunkPolicy) -> list[Rollout]:
    with LocalPool(TABLE, 3) as pool:
        jobs = numbered(fixed_contexts(pool.info, 4, "train"))
        return list(collect(pool, policy, jobs, every_picture=request.param))


@pytest.fixture
def rows(rollouts: list[Rollout]) -> PlanRows:
    columns = {"advantage": np.array([0.5, -0.25, 1.0, 0.0])}
    return plan_rows(TRANSFORM, rollouts, columns, (BASE_CAMERA,), {"acceptance": 0.5})


def places(rollouts: list[Rollout]) -> list[tuple[int, int, int]]:
    """(rollout, start, end) of every row."""
    found = []
    for number, rollout in enumerate(rollouts):
        starts = rollout.starts.tolist()
        found += [(number, a, b) for a, b in zip(starts, [*starts[1:], len(rollout.episode)], strict=True)]
    return found


def test_rows_are_what_was_planned_and_done(rows: PlanRows, rollouts: list[Rollout]) -> None:
    where = places(rollouts)
    assert len(rows) == len(where) == rows.executed.shape[0] == len(rows.actions)
    assert {end - start for _, start, end in where} == {EXECUTE, 1}  # seven steps: the last plan was cut
    for row, (number, start, end) in enumerate(where):
        episode = rollouts[number].episode
        assert rows.executed[row].tolist() == [1.0] * (end - start) + [0.0] * (HORIZON - end + start)
        state = episode.state[start : start + 1]
        plan = TRANSFORM.robot_actions(rows.actions[row : row + 1], state)[0]
        assert episode.intended is not None
        np.testing.assert_allclose(plan, episode.intended[start], atol=1e-5)
        np.testing.assert_allclose(plan[: end - start], episode.actions[start:end], atol=1e-5)
        assert rows.columns["advantage"][row] == np.float32([0.5, -0.25, 1.0, 0.0][number])
    assert rows.executed.sum() == sum(len(rollout.episode) for rollout in rollouts)
    assert np.isfinite(rows.actions).all()


def test_rows_show_what_the_policy_saw(rows: PlanRows, rollouts: list[Rollout], policy: ChunkPolicy) -> None:
    for row, (number, start, _) in enumerate(places(rollouts)):
        rollout = rollouts[number]
        picture = rollout.frames["observation/image"][rollout.frame_steps.tolist().index(start)]
        seen = {
            "observation/state": rollout.episode.state[start],
            "observation/image": picture,
            "prompt": rollout.context.task,
        }
        _, expected = model_inputs(TRANSFORM, [seen], policy.cameras)
        batch = rows.batch(np.array([row]), np.ones(1, np.float32), fresh=False)["observations"]
        assert jax.tree.structure(batch) == jax.tree.structure(expected)
        for found, wanted in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_batch_takes_rows_and_weights(rows: PlanRows) -> None:
    chosen, weight = np.array([2, 0, 2]), np.array([1, 1, 0], np.float32)
    batch = rows.batch(chosen, weight, fresh=True)
    np.testing.assert_array_equal(batch["actions"], rows.actions[chosen])
    np.testing.assert_array_equal(batch["advantage"], rows.columns["advantage"][chosen])
    np.testing.assert_array_equal(batch["weight"], weight)
    assert batch["fresh"].tolist() == [1, 1, 1]
    assert batch["acceptance"].tolist() == [0.5] * 3
    assert rows.batch(chosen, weight, fresh=False)["fresh"].tolist() == [0, 0, 0]


def test_plans_bring_numbers_and_notes_of_their_own(rollouts: list[Rollout], policy: ChunkPolicy) -> None:
    """One entry of notes more than plans is of the last observation, and belongs to no row."""
    counts = [len(rollout.starts) for rollout in rollouts]
    noted = [
        replace(rollout, notes={"value": np.arange(count + number % 2, dtype=np.float32) + 10 * number})
        for number, (rollout, count) in enumerate(zip(rollouts, counts, strict=True))
    ]
    gains = [np.arange(count) - 100.0 * number for number, count in enumerate(counts)]
    rows = plan_rows(TRANSFORM, noted, {}, (BASE_CAMERA,), of_plans={"gain": gains}, notes=["value"])
    expected = [[10 * number + i, i - 100 * number] for number, count in enumerate(counts) for i in range(count)]
    assert np.stack([rows.notes["value"], rows.columns["gain"]], 1).tolist() == expected
    batch = rows.batch(np.array([3, 0]), np.ones(2, np.float32), fresh=False)
    assert batch["notes"]["value"].tolist() == [expected[3][0], expected[0][0]]
    assert batch["gain"].dtype == np.float32
    assert "notes" not in plan_rows(TRANSFORM, noted, {}, (BASE_CAMERA,)).batch(
        np.array([0]), np.ones(1, np.float32), fresh=False
    )


def test_rollouts_may_count_the_same(rollouts: list[Rollout]) -> None:
    """However many chunks each has; the mean over rows stays 1, and rows that fill up a batch stay 0."""
    shorter = [rollouts[0], cut(rollouts[1], plans=1)]
    given = ({"advantage": np.zeros(2)}, ())
    plain, even = (plan_rows(TRANSFORM, shorter, *given, even=even) for even in (False, True))
    counts = [len(rollout.starts) for rollout in shorter]
    assert counts[0] > counts[1] == 1
    assert plain.weight.tolist() == [1.0] * sum(counts)
    sums = [even.weight[: counts[0]].sum(), even.weight[counts[0] :].sum()]
    np.testing.assert_allclose(sums, [sum(counts) / 2] * 2, rtol=1e-6)
    assert len(set(even.weight[: counts[0]].tolist())) == 1
    batch = even.batch(np.array([0, counts[0], 0]), np.float32([1, 1, 0]), fresh=True)
    np.testing.assert_allclose(batch["weight"], [even.weight[0], even.weight[-1], 0])


def cut(rollout: Rollout, *, plans: int) -> Rollout:
    """Its first plans alone."""
    steps = int(rollout.starts[plans])
    columns = {name: getattr(rollout.episode, name)[:steps] for name in ("state", "actions", "rewards", "terminated")}
    episode = replace(
        rollout.episode,
        **columns,
        truncated=rollout.episode.truncated[:steps],
        intended=rollout.episode.intended[:steps],  # type: ignore[index]
    )
    kept = rollout.frame_steps < steps
    frames = {key: pixels[kept] for key, pixels in rollout.frames.items()}
    return replace(
        rollout, episode=episode, starts=rollout.starts[:plans], frames=frames, frame_steps=rollout.frame_steps[kept]
    )


def test_without_cameras_there_are_no_pictures(rollouts: list[Rollout]) -> None:
    rows = plan_rows(TRANSFORM, rollouts, {"advantage": np.zeros(4)}, ())
    assert rows.batch(np.array([0]), np.ones(1, np.float32), fresh=True)["observations"][IMAGE] == {}


def test_the_first_row_has_the_shapes_of_the_others(rows: PlanRows, policy: ChunkPolicy) -> None:
    """A dry run compiles for it."""
    with LocalPool(TABLE, 1) as pool:
        begun = pool.start({0: fixed_contexts(pool.info, 1, "train")[0]})[0]
    assert isinstance(begun, Started)
    chosen, weight = np.zeros(2, np.int64), np.ones(2, np.float32)
    made = first_rows(policy, begun.observation, HORIZON, list(rows.columns)).batch(chosen, weight, fresh=True)
    like = rows.batch(chosen, weight, fresh=True)
    shapes = [jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree) for tree in (made, like)]
    assert shapes[0] == shapes[1]
    noted = first_rows(policy, begun.observation, HORIZON, [], {"path": (3, 2), "step": ()})
    assert {name: values.shape for name, values in noted.notes.items()} == {"path": (1, 3, 2), "step": (1,)}


@given(count=st.integers(1, 200), batch_size=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_pass_goes_over_all_rows_once(count: int, batch_size: int, seed: int) -> None:
    passed = minibatches(count, batch_size, np.random.default_rng(seed))
    assert all(len(rows) == len(weight) == batch_size for rows, weight in passed)
    counted = [row for rows, weight in passed for row in rows[weight > 0].tolist()]
    assert len(set(counted)) == len(counted)
    assert set(counted) <= set(range(count))
    if count >= batch_size:  # what does not fill a batch waits for another pass
        assert len(counted) == count - count % batch_size
        assert all(weight.all() for _, weight in passed)
    elif 4 * count >= batch_size:
        assert sorted(counted) == list(range(count))
        assert len(passed) == 1
    else:
        assert passed == []


def test_every_row_gets_its_turn() -> None:
    """Ten rows in batches of four: two are left out of each pass, others each time."""
    rng = np.random.default_rng(0)
    passes = [{row for rows, _ in minibatches(10, 4, rng) for row in rows.tolist()} for _ in range(8)]
    assert set().union(*passes) == set(range(10))
    assert len({frozenset(one) for one in passes}) > 4
