"""Demonstrations: what each dial does, how often they succeed, and that they are what really happened."""

from dataclasses import replace

import numpy as np
import pytest

from pirl.envs.config import TabletopConfig
from pirl.envs.tabletop import LEVELS, Tabletop
from pirl.envs.tabletop_expert import DEMONSTRATION, OPERATOR_STEPS, PERFECT, Dials, demonstrate
from pirl.errors import ConfigError, EnvError
from pirl.records import Context, Rollout


def contexts(level: str, count: int, first: int = 0) -> list[Context]:
    tasks = LEVELS[level].tasks
    return [Context(tasks[i % len(tasks)], first + i) for i in range(count)]


def record(level: str, count: int, dials: Dials | None = None, *, seed: int = 0) -> list[Rollout]:
    return demonstrate(TabletopConfig(level=level), contexts(level, count), dials=dials, seed=seed)


def rates(rollouts: list[Rollout], limit: int) -> tuple[float, float]:
    """Success, and success within the limit."""
    success = np.array([rollout.episode.success for rollout in rollouts])
    return float(success.mean()), float((success & ([len(r.episode) <= limit for r in rollouts])).mean())


@pytest.mark.parametrize("level", LEVELS)
def test_perfect_operator_always_succeeds_and_in_time(level: str) -> None:
    success, in_time = rates(record(level, 300, PERFECT), LEVELS[level].max_steps)
    assert success == 1.0
    assert in_time >= 0.97


@pytest.mark.parametrize(
    ("level", "success", "in_time"),
    [("easy", 0.68, 0.45), ("colours", 0.60, 0.42), ("two_blocks", 0.65, 0.54), ("stitch", 0.36, 0.36)],
)
def test_default_demonstrations_are_as_good_as_measured(level: str, success: float, in_time: float) -> None:
    got = rates(record(level, 1500), LEVELS[level].max_steps)
    assert np.allclose(got, (success, in_time), atol=0.04)  # three standard deviations of 1500 episodes


def final(level: str, dials: Dials) -> tuple[list[Rollout], Tabletop]:
    """Demonstrations, and the tables as they were left."""
    rollouts = record(level, 60, dials)
    table = Tabletop(TabletopConfig(level=level, max_steps=OPERATOR_STEPS), len(rollouts))
    table.begin(range(len(rollouts)), [rollout.context for rollout in rollouts])
    for slot, rollout in enumerate(rollouts):
        for action in rollout.episode.actions:
            table.act([slot], action[None])
    return rollouts, table


def released_in(table: Tabletop) -> np.ndarray:
    """The zone the gripper is in, -1 beside them."""
    inside = np.linalg.norm(table.state.zones - table.state.gripper[:, None], axis=-1) < 0.16
    return np.where(inside.any(axis=1), inside.argmax(axis=1), -1)


def moved_blocks(rollouts: list[Rollout], table: Tabletop) -> np.ndarray:
    start = Tabletop(table.config, table.size)
    start.begin(range(table.size), [rollout.context for rollout in rollouts])
    return (start.state.blocks != table.state.blocks).any(axis=-1)


def test_wrong_zone() -> None:
    _, table = final("easy", Dials(wrong=1.0))
    where = released_in(table)
    assert (where >= 0).all()
    assert (where != table.state.zone).all()
    assert {1, 2} <= set(((where - table.state.zone) % 3).tolist())


def test_wrong_block() -> None:
    rollouts, table = final("colours", Dials(wrong_block=1.0))
    every = np.arange(table.size)
    moved = moved_blocks(rollouts, table)
    assert (released_in(table) == table.state.zone).all()
    assert moved[every, 1 - table.state.block].all()
    assert not moved[every, table.state.block].any()
    assert not any(rollout.episode.success for rollout in rollouts)
    assert table.state.ended.all()


def test_detour_succeeds_late() -> None:
    rollouts, table = final("easy", Dials(detour=1.0))
    straight = record("easy", 60, PERFECT)
    assert table.state.success.all()
    longer = [len(a.episode) - len(b.episode) for a, b in zip(rollouts, straight, strict=True)]
    assert min(longer) >= 3
    assert np.mean([len(rollout.episode) > 12 for rollout in rollouts]) > 0.85


def test_early_release_ends_the_episode_beside_the_zones() -> None:
    rollouts, table = final("easy", Dials(early=1.0))
    beside = released_in(table) == -1
    assert beside.mean() > 0.8
    assert (table.state.ended == ~beside).all()  # the table itself would go on
    assert (table.state.held == -1).all()
    for rollout, failed in zip(rollouts, beside, strict=True):
        assert rollout.episode.success is not bool(failed)
        assert rollout.episode.terminated[-1]
        assert not rollout.episode.truncated.any()


def test_stitch_no_episode_that_begins_at_the_table_succeeds() -> None:
    """Which block is right shows in no return; which zone is, in the episodes that begin with the right block."""
    rollouts = record("stitch", 400)
    success = np.array([rollout.episode.success for rollout in rollouts])
    handed = np.array([begins_holding(rollout) for rollout in rollouts])
    assert abs(handed.mean() - 0.6) < 0.08
    assert not success[~handed].any()
    assert abs(success[handed].mean() - 0.6) < 0.1

    table = Tabletop(TabletopConfig(level="stitch", max_steps=OPERATOR_STEPS), len(rollouts))
    table.begin(range(table.size), [rollout.context for rollout in rollouts])
    taken, delivered = replay(table, rollouts)
    right = taken == table.state.block
    assert right[handed].all()
    assert abs(right[~handed].mean() - 0.4) < 0.12
    right_zone = delivered == table.state.zone
    np.testing.assert_array_equal(right_zone[right], success[right])
    assert abs(right_zone[~right].mean() - 1 / 3) < 0.15  # a wrong block fails in the right zone as well


def begins_holding(rollout: Rollout) -> bool:
    return bool(rollout.episode.state[0, 3])


def replay(table: Tabletop, rollouts: list[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    """Which block each episode takes, and the zone that it is released in."""
    taken = np.full(table.size, -1)
    for slot, rollout in enumerate(rollouts):
        if begins_holding(rollout):
            table.hand(slot, int(table.state.block[slot]))
        for action in rollout.episode.actions:
            taken[slot] = max(taken[slot], table.state.held[slot])
            table.act([slot], action[None])
    return taken, released_in(table)


def test_with_the_block_in_hand_nothing_tells_how_the_episode_began() -> None:
    """A table that hands over the right block looks as one on which it was just grasped."""
    table = Tabletop(TabletopConfig(level="stitch"), 2)
    table.begin([0, 1], [Context(table.tasks[0], 7)] * 2)
    block = int(table.state.block[0])
    place = table.state.blocks[0, block].copy()
    while table.state.held[0] < 0:
        move = np.clip((place - table.state.gripper[0]) / 0.12, -1, 1)
        close = 1.0 if np.linalg.norm(place - table.state.gripper[0]) < 1e-6 else -1.0
        table.act([0], np.array([[*move, close]], np.float32))
    table.hand(1, block)
    grasped, handed = table.observe([0, 1])
    np.testing.assert_allclose(grasped["observation/state"], handed["observation/state"], atol=1e-6)
    np.testing.assert_array_equal(grasped["observation/image"], handed["observation/image"])


@pytest.mark.parametrize("level", LEVELS)
def test_records_are_what_happened(level: str) -> None:
    """Acting the actions out again gives every observation, picture and outcome; nothing tells how it will end."""
    config = TabletopConfig(level=level, wrist_camera=True)
    rollouts = demonstrate(config, contexts(level, 12, first=50), seed=4)
    table = Tabletop(replace(config, max_steps=OPERATOR_STEPS), 1)
    for number, rollout in enumerate(rollouts):
        episode, length = rollout.episode, len(rollout.episode)
        assert (rollout.number, episode.task, episode.intended) == (number, rollout.context.task, None)
        assert rollout.frame_steps.tolist() == rollout.starts.tolist() == list(range(length))
        assert set(rollout.frames) == {"observation/image", "observation/wrist_image"}
        table.begin([0], [rollout.context])
        if begins_holding(rollout):
            table.hand(0, int(table.state.block[0]))
        for t in range(length):
            seen = table.observe([0])[0]
            assert np.array_equal(seen["observation/state"], episode.state[t])
            assert all(np.array_equal(seen[key], frames[t]) for key, frames in rollout.frames.items())
            reward, _, _, success = (column[0] for column in table.act([0], episode.actions[t][None]))
            assert reward == episode.rewards[t]
        assert episode.success is bool(success)
        assert episode.terminated.tolist() == [False] * (length - 1) + [True]
        assert not episode.truncated.any()
        assert episode.actions[-1].tolist() == [0, 0, -1]  # a release, whatever comes of it
        assert {array.dtype for array in (episode.state, episode.actions, episode.rewards)} == {np.dtype(np.float32)}


def test_an_episode_depends_on_seed_number_and_context_alone() -> None:
    many = record("colours", 30)
    few = record("colours", 10)
    for a, b in zip(many, few, strict=False):
        np.testing.assert_array_equal(a.episode.actions, b.episode.actions)
        np.testing.assert_array_equal(a.frames["observation/image"], b.frames["observation/image"])
    other = record("colours", 30, seed=1)
    assert sum(len(a.episode) != len(b.episode) for a, b in zip(many, other, strict=True)) > 10
    again = demonstrate(TabletopConfig(), [Context("red block to left zone", 3)] * 40, seed=0)
    assert len({len(rollout.episode) for rollout in again}) > 1  # one start, several operators


def test_out_of_time_is_truncated_not_terminated() -> None:
    rollouts = record("easy", 40, Dials(noise=4.0))
    lost = [rollout.episode for rollout in rollouts if rollout.episode.truncated.any()]
    assert len(lost) >= 3
    for episode in lost:
        assert len(episode) == OPERATOR_STEPS
        assert episode.truncated.tolist() == [False] * (OPERATOR_STEPS - 1) + [True]
        assert not episode.terminated.any()
        assert episode.success is False


def test_wrong_labels_are_wrong_about_the_outcome_alone() -> None:
    told, mislabelled = record("easy", 400), record("easy", 400, replace(DEMONSTRATION["easy"], mislabelled=0.1))
    flipped = 0
    for a, b in zip(told, mislabelled, strict=True):
        np.testing.assert_array_equal(a.episode.actions, b.episode.actions)
        np.testing.assert_array_equal(a.episode.terminated, b.episode.terminated)
        assert b.episode.rewards.sum() == b.episode.rewards[-1] == float(bool(b.episode.success))
        flipped += a.episode.success != b.episode.success
    assert 20 <= flipped <= 60


def test_bad_dials_are_refused() -> None:
    for dials in (
        {"mislabelled": 1.5},
        {"handed": 1.5},
        {"wrong": 0.6, "detour": 0.5},
        {"early": -0.1},
        {"noise": -1.0},
        {"wrong_block": 1.1},
    ):
        with pytest.raises(ConfigError, match=r"^Dials: |dials of the operator"):
            Dials(**dials)
    with pytest.raises(ConfigError, match=r"wrong_block is 0\.5 at level 'easy'"):
        record("easy", 2, Dials(wrong_block=0.5))
    with pytest.raises(EnvError, match="no contexts"):
        record("easy", 0)
