"""The tabletop: its rules against a table of one's own, exact starts, exact snapshots, gymnasium's contract."""

import json
import math
from dataclasses import fields

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from pirl.envs.config import TabletopConfig
from pirl.envs.env import EnvBatch, Outcome
from pirl.envs.make import make_batch, make_env
from pirl.envs.tabletop import LEVELS, State, Tabletop, TabletopEnv
from pirl.errors import ConfigError, EnvError
from pirl.records import Context


def begun(level: str = "easy", size: int = 1, **options: object) -> Tabletop:
    table = Tabletop(TabletopConfig(level=level, **options), size)
    table.begin(range(size), [Context(table.tasks[i % len(table.tasks)], i) for i in range(size)])
    return table


class PlainTable:
    """One table, by the rules as they are written, number by number."""

    def __init__(self, start: dict, limit: int) -> None:
        self.s, self.limit = json.loads(json.dumps(start)), limit
        self.reach = 0.15 if start["level"] == "stitch" else 0.10

    def act(self, action: list[float]) -> tuple[float, bool, bool, bool]:
        s = self.s
        if s["ended"] or s["steps"] >= self.limit:
            return 0.0, s["ended"], not s["ended"], s["success"]
        moves = [np.float32(min(max(a, -1), 1)) for a in action]
        for axis in (0, 1):
            moved = np.float32(s["gripper"][axis]) + np.float32(0.12) * moves[axis]
            s["gripper"][axis] = float(min(max(moved, 0), 1))
        close, held, reward = action[2] > 0, s["held"], 0.0
        if held >= 0:
            s["blocks"][held] = list(s["gripper"])
        if held >= 0 and not close:
            s["held"] = -1
            zones = [i for i, zone in enumerate(s["zones"]) if math.dist(zone, s["gripper"]) < 0.16]
            s["ended"] = bool(zones)
            s["success"] = held == s["block"] and s["zone"] in zones
            reward = float(s["success"])
        elif held < 0 and close:
            distances = [math.dist(block, s["gripper"]) for block in s["blocks"]]
            if min(distances) < self.reach:
                s["held"] = distances.index(min(distances))
                s["blocks"][s["held"]] = list(s["gripper"])
        s["closed"] = close
        s["steps"] += 1
        return reward, s["ended"], not s["ended"] and s["steps"] >= self.limit, s["success"]


def busy_actions(table: Tabletop, rng: np.random.Generator) -> np.ndarray:
    """Mostly towards blocks and zones, right and wrong ones, so that everything happens; sometimes anything."""
    state, n = table.state, table.size
    any_zone = state.zones[np.arange(n), rng.integers(state.zones.shape[1], size=n)]
    any_block = state.blocks[np.arange(n), rng.integers(state.blocks.shape[1], size=n)]
    goal = np.where((state.held >= 0)[:, None], any_zone, any_block)
    goal = np.where(rng.random((n, 1)) < 0.7, np.where((state.held >= 0)[:, None], state.zones[:, 0], goal), goal)
    grip = np.where((state.held >= 0) & (rng.random(n) < 0.2), -1.0, 1.0)
    actions = np.concatenate([(goal - state.gripper) / 0.12, grip[:, None]], axis=1)
    return np.where(rng.random((n, 1)) < 0.1, rng.uniform(-2, 2, (n, 3)), actions).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_rules_are_those_of_a_plain_table(level: str) -> None:
    table, rng = begun(level, 120), np.random.default_rng(5)
    plain = [PlainTable(table.snapshot(slot), table.max_steps) for slot in range(table.size)]
    for _ in range(table.max_steps + 2):
        actions = busy_actions(table, rng)
        outcomes = table.act(range(table.size), actions)
        wanted = [one.act(action) for one, action in zip(plain, actions.tolist(), strict=True)]
        assert [tuple(column[i] for column in outcomes) for i in range(table.size)] == wanted
    assert [table.snapshot(slot) for slot in range(table.size)] == [one.s for one in plain]
    state = table.state
    kinds = [state.success, state.ended & ~state.success, ~state.ended & (state.held >= 0), ~state.ended]
    assert all(kind.sum() >= 3 for kind in kinds)  # every way to end was taken


def test_release_ends_only_in_a_zone_and_succeeds_only_in_the_named_one() -> None:
    """Hand-set tables: carrying the named block just inside and outside of the zones, and the other block."""
    table = begun("colours", 5)
    state = table.state
    named, other = state.block, 1 - state.block
    state.held[:] = np.where(np.arange(5) == 4, other, named)
    state.blocks[np.arange(5), np.where(np.arange(5) == 4, named, other)] = (0.6, 0.1)
    state.zone[:] = 0
    state.gripper[:] = [(0.27, 0.5), (0.29, 0.5), (0.88, 0.65), (0.5, 0.5), (0.12, 0.5)]
    outcomes = table.act(range(5), np.tile(np.float32([0, 0, -1]), (5, 1)))
    assert outcomes.success.tolist() == [True, False, False, False, False]
    assert outcomes.terminated.tolist() == [True, False, True, False, True]
    assert outcomes.reward.tolist() == [1, 0, 0, 0, 0]
    assert not outcomes.truncated.any()
    # Released beside the zones: still there, and may be taken again; the ended ones stand still.
    before = table.snapshot(0)
    outcomes = table.act(range(5), np.tile(np.float32([0.5, 0, 1]), (5, 1)))
    assert (state.held[[1, 3]] == named[[1, 3]]).all()
    assert table.snapshot(0) == before
    assert outcomes.reward.tolist() == [0] * 5
    assert outcomes.success.tolist() == [True, False, False, False, False]
    assert outcomes.terminated.tolist() == [True, False, True, False, True]


def test_time_is_over_at_the_levels_limit_or_the_given_one() -> None:
    for options, limit in (({}, 12), ({"max_steps": 3}, 3)):
        env = TabletopEnv(TabletopConfig(**options))
        env.begin(Context(env.tasks[0], 0))
        outcomes = [env.act(np.zeros(3)) for _ in range(limit)]
        assert env.max_steps == limit
        assert outcomes[:-1] == [Outcome(0.0, False, False, False)] * (limit - 1)
        assert outcomes[-1] == Outcome(0.0, False, True, False)


@pytest.mark.parametrize("level", LEVELS)
def test_same_context_same_start(level: str) -> None:
    large = begun(level, 40)
    rng = np.random.default_rng(0)
    for _ in range(5):
        large.act(range(40), busy_actions(large, rng))
    contexts = [Context(large.tasks[-1], 7), Context(large.tasks[0], 7), Context(large.tasks[0], 8)]
    large.begin([31, 4, 17], contexts)
    starts = []
    for slot, context in zip([31, 4, 17], contexts, strict=True):
        env = make_env(TabletopConfig(level=level))
        observation, info = env.reset(seed=context.init, options={"task": context.task})
        assert info == {"task": context.task}
        seen = large.observe([slot])[0]
        assert env.table.snapshot(0) == large.snapshot(slot)
        assert set(seen) == set(observation)
        assert all(np.array_equal(seen[key], observation[key]) for key in seen)
        starts.append(large.snapshot(slot))
    assert starts[0]["blocks"] == starts[1]["blocks"]  # the task only says what is named
    assert starts[0]["gripper"] == starts[1]["gripper"] != starts[2]["gripper"]
    assert starts[1]["blocks"] != starts[2]["blocks"]


@pytest.mark.parametrize("level", LEVELS)
def test_starts_are_fair(level: str) -> None:
    """Everything is where the level says, nothing is too close, and the order of the blocks tells nothing."""
    rules, table = LEVELS[level], begun(level, 360)
    state = table.state
    assert len(table.tasks) == len(rules.names) * len(rules.zones) == len(set(table.tasks))
    low, high = np.array(rules.area, np.float32)
    assert (state.blocks >= low).all()
    assert (state.blocks <= high).all()
    assert np.allclose(state.blocks.min(axis=(0, 1)), low, atol=0.03)
    assert np.allclose(state.blocks.max(axis=(0, 1)), high, atol=0.03)
    to_zones = np.linalg.norm(state.blocks[:, :, None] - state.zones[:, None], axis=-1)
    assert to_zones.min() > 0.16
    zones = np.linalg.norm(state.zones[:, :, None] - state.zones[:, None], axis=-1) + 9 * np.eye(len(rules.zones))
    assert zones.min() > 0.32
    assert len({tuple(row) for row in state.zones[:, 0].tolist()}) == (360 if level == "two_blocks" else 1)
    if rules.blocks == 2:
        assert np.linalg.norm(state.blocks[:, 0] - state.blocks[:, 1], axis=1).min() > 0.2
        assert ((state.colours[:, 0] != state.colours[:, 1]) == (rules.places is None)).all()
        assert 0.4 < state.block.mean() < 0.6
    for slot, observation in enumerate(table.observe(range(table.size), pictures=False)):
        name, _, _, zone, _ = observation["prompt"].split()
        assert list(rules.zones)[state.zone[slot]] == zone
        if rules.places is not None:
            low, high = np.float32(rules.places[name])
            named = state.blocks[slot, state.block[slot]]
            assert ((low <= named) & (named <= high)).all()
            continue
        named = state.colours[slot, state.block[slot]]
        assert named == 1 + ["red", "blue", "green", "yellow"].index(name)


def test_easy_is_the_level_that_was_measured() -> None:
    table = begun("easy", 600)
    assert table.tasks[:2] == ("red block to left zone", "red block to right zone")
    assert (table.max_steps, table.level.blocks) == (12, 1)
    assert list(table.level.zones.items()) == [("left", (0.12, 0.5)), ("right", (0.88, 0.5)), ("top", (0.5, 0.88))]
    gripper, block = table.state.gripper, table.state.blocks[:, 0]
    for points, low, high in ((gripper, (0.3, 0.05), (0.7, 0.75)), (block, (0.32, 0.2), (0.68, 0.6))):
        middle, width = np.add(low, high) / 2, np.subtract(high, low)
        assert np.allclose(points.mean(axis=0), middle, atol=0.02)
        assert np.allclose(points.std(axis=0), width / np.sqrt(12), atol=0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_snapshot_in_mid_episode_is_exact(level: str) -> None:
    table, rng = begun(level, 8, wrist_camera=True), np.random.default_rng(1)
    for _ in range(6):
        table.act(range(8), busy_actions(table, rng))
    assert (table.state.held >= 0).any()
    stored = json.dumps([table.snapshot(slot) for slot in range(8)])
    other = Tabletop(TabletopConfig(level=level, wrist_camera=True), 10)
    for slot, snapshot in enumerate(json.loads(stored)):
        other.restore(9 - slot, snapshot)
    slots = [9 - slot for slot in range(8)]
    for _ in range(8):
        actions = busy_actions(table, rng)
        ours, theirs = table.act(range(8), actions), other.act(slots, actions)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for seen, again in zip(table.observe(range(8)), other.observe(slots), strict=True):
            assert seen.keys() == again.keys()
            assert all(np.array_equal(seen[key], again[key]) for key in seen)
    assert all(getattr(table.state, f.name).dtype == getattr(other.state, f.name).dtype for f in fields(State))


def test_foreign_snapshots_are_refused() -> None:
    table = begun("easy")
    good = table.snapshot(0)
    for change in (
        {"level": "colours"},
        {"task": "red block to moon zone"},
        {"gripper": 0.5},
        {"blocks": [[0, 0]] * 2},
    ):
        with pytest.raises(EnvError, match="expected level 'easy'"):
            table.restore(0, {**good, **change})
    with pytest.raises(EnvError, match="expected level 'easy'"):
        table.restore(0, {key: value for key, value in good.items() if key != "held"})
    assert table.snapshot(0) == good


def test_bad_input_is_refused() -> None:
    table = Tabletop(TabletopConfig(), 2)
    with pytest.raises(EnvError, match="no episode was begun in slots"):
        table.observe([1])
    with pytest.raises(EnvError, match="unknown task 'green block to left zone'"):
        table.begin([0], [Context("green block to left zone", 0)])
    with pytest.raises(EnvError, match="no initial state -1"):
        table.begin([0], [Context(table.tasks[0], -1)])
    for slots in ([2], [-1], [0, 0]):
        with pytest.raises(EnvError, match="each is named once, and is 0 to 1"):
            table.begin(slots, [Context(table.tasks[0], 0)] * len(slots))
    table.begin([0, 1], [Context(table.tasks[0], 0)] * 2)
    before = table.snapshot(1)
    for actions in (np.zeros((2, 4)), np.zeros((1, 3)), np.full((2, 3), np.nan)):
        with pytest.raises(EnvError, match="expected 2 x 3 finite numbers"):
            table.act([0, 1], actions)
    assert table.snapshot(1) == before
    with pytest.raises(EnvError, match="a batch of 0 tables"):
        Tabletop(TabletopConfig(), 0)
    for options in ({"image_size": 4}, {"max_steps": 0}):
        with pytest.raises(ConfigError, match=f"TabletopConfig: {next(iter(options))} is"):
            TabletopConfig(**options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "config", [TabletopConfig(), TabletopConfig(level="two_blocks", wrist_camera=True, image_size=32)]
)
def test_gymnasium_contract(config: TabletopConfig) -> None:
    env = make_env(config)
    check_env(env, skip_render_check=True)
    observation, _ = env.reset(seed=3)
    assert observation in env.observation_space
    assert env.render().shape == (160, 160, 3)
    batch = make_batch(config, 3)
    assert isinstance(batch, EnvBatch)
    assert isinstance(batch, Tabletop)


def test_state_is_what_the_gripper_feels() -> None:
    table = begun("easy", 2)
    table.state.gripper[0] = table.state.blocks[0, 0] = (0.25, 1.0)
    table.act([0], np.float32([[0, 1, 1]]))
    first, second = table.observe([0, 1], pictures=False)
    assert first["observation/state"].tolist() == [-0.5, 1.0, 1.0, 1.0]
    assert second["observation/state"].tolist()[2:] == [0.0, 0.0]
    assert set(first) == {"observation/state", "prompt"}
    assert first["observation/state"].dtype == np.float32


def test_slips_belong_to_the_start_and_spread_as_they_are_told() -> None:
    """The same start slips alike, in any slot and after a snapshot; over many starts moves are off by `slip`."""
    config = TabletopConfig(slip=0.3)
    table, still = Tabletop(config, 300), Tabletop(TabletopConfig(), 300)
    contexts = [Context(table.tasks[0], i) for i in range(300)]
    for one in (table, still):
        one.begin(range(300), contexts)
    action = np.tile(np.float32([0.1, -0.1, -1]), (300, 1))
    for one in (table, still):
        one.act(range(300), action)
    off = (table.state.gripper - still.state.gripper) / 0.12
    assert abs(off.std() - 0.3) < 0.03
    assert abs(off.mean()) < 0.04
    alone = Tabletop(config, 2)
    alone.begin([0], [contexts[7]])
    alone.act([0], action[:1])
    alone.restore(1, alone.snapshot(0))
    for _ in range(3):
        alone.act([0, 1], action[:2])
        table.act([7], action[:1])
    assert alone.snapshot(0) == alone.snapshot(1) == table.snapshot(7)
