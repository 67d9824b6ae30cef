"""OGBench: exact starts, its own pictures and rewards, oracles that solve cube tasks, play labelled as its datasets."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pirl.data.robots import get_robot
from pirl.envs.checker import check
from pirl.envs.config import OGBenchConfig
from pirl.envs.env import RobotEnv
from pirl.envs.mujoco_render import load
from pirl.errors import EnvError, MissingExtraError
from pirl.records import Context

pytestmark = pytest.mark.sims

Make = Callable[..., RobotEnv]

SINGLE = "cube-single-play-singletask-task1-v0"
SINGLE_ID = "cube-single-singletask-task1-v0"


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes environments, and closes them; skips where there is no simulator or nothing to render with."""
    try:
        load("ogbench.manipspace", extra="ogbench", why="this test")
    except (MissingExtraError, EnvError) as error:
        pytest.skip(str(error))
    from pirl.envs.ogbench import OGBenchEnv

    made: list[RobotEnv] = []

    def build(task: str = SINGLE, **fields: object) -> OGBenchEnv:
        made.append(OGBenchEnv(OGBenchConfig(task=task, **fields)))  # type: ignore[arg-type]
        return made[-1]  # type: ignore[return-value]

    yield build
    for env in made:
        env.close()


@pytest.mark.parametrize(
    ("task", "robot"),
    [
        (SINGLE, "ogbench_cube_single"),
        ("puzzle-3x3-singletask-v0", "ogbench_puzzle_3x3"),
        ("scene-play-singletask-task2-v0", "ogbench_scene"),
        ("visual-cube-single-play-singletask-v0", "ogbench_visual"),
    ],
)
def test_keeps_the_contract_and_feeds_its_robot(make: Make, task: str, robot: str) -> None:
    env = make(task, render_size=32)
    assert env.robot == robot
    assert check(env, steps=8).notes == ()
    seen = env.observe()
    assert get_robot(robot).find_state(seen).shape == (get_robot(robot).state_dim,)
    found = get_robot(robot).find_cameras(seen)
    assert found == ({"base_0_rgb": "image"} if "visual" in task else {})


def test_an_episode_is_decided_by_its_context_and_actions(make: Make) -> None:
    env = make("cube-double-singletask-task5-v0")

    def run(init: int) -> np.ndarray:
        rng = np.random.default_rng(0)
        env.begin(Context(env.tasks[0], init))
        states = []
        for _ in range(40):
            env.act(rng.uniform(-1, 1, 5).astype(np.float32))
            states.append(env.simulator.data.qpos.copy())
        return np.stack(states)

    first = run(7)
    run(8)
    np.testing.assert_array_equal(first, run(7))


def test_states_rewards_and_pictures_are_ogbenchs(make: Make) -> None:
    import gymnasium

    name = "visual-cube-single-singletask-task2-v0"
    stock = gymnasium.make(name, disable_env_checker=True)
    reference, _ = stock.reset(seed=3)
    env = make(name, fast_render=False)
    env.begin(Context(name, 3))
    np.testing.assert_array_equal(env.observe()["image"], reference)
    plain = gymnasium.make("cube-single-singletask-task2-v0", disable_env_checker=True)
    state, _ = plain.reset(seed=3)
    np.testing.assert_array_equal(env.observe()["state"], state[:19].astype(np.float32))
    action = np.array([0.5, -0.5, -1.0, 0.2, 1.0], np.float32)
    for _ in range(5):
        state, reward, *_ = plain.step(action)
        assert env.act(action).reward == reward == -1.0
    np.testing.assert_array_equal(env.observe(pictures=False)["state"], state[:19].astype(np.float32))
    fast = make(name)
    fast.begin(Context(name, 3))
    difference = np.abs(fast.observe()["image"].astype(int) - reference)
    assert 0 < difference.mean() < 25
    stock.close()


def test_success_is_reported_one_step_late(make: Make) -> None:
    env = make(SINGLE)
    env.begin(Context(SINGLE_ID, 0))
    still = np.zeros(5, np.float32)
    assert env.act(still).reward == -1.0
    cube = env.simulator.data.joint("object_joint_0")
    cube.qpos[:3] = env.simulator.data.mocap_pos[0]
    before, after = env.act(still), env.act(still)
    assert (before.reward, before.success, before.terminated) == (0.0, False, False)  # the reward sees the state
    assert (after.reward, after.success, after.terminated) == (0.0, True, True)


@pytest.mark.parametrize("oracle", ["markov", "plan"])
def test_oracles_solve_cubes(make: Make, oracle: str) -> None:
    make()
    from pirl.envs.ogbench_expert import OGBenchDials, demonstrate

    contexts = [Context(SINGLE_ID, init) for init in (100, 101)]
    before = np.random.get_state()[1].copy()
    rollouts = demonstrate(OGBenchConfig(task=SINGLE), contexts, dials=OGBenchDials(oracle=oracle), seed=1)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # the oracles draw from NumPy's global generator
    for rollout in rollouts:
        episode = rollout.episode
        assert episode.success
        assert episode.terminated[-1]
        assert not episode.terminated[:-1].any()
        assert episode.rewards[-1] == 0.0
        assert set(episode.rewards[:-1]) == {-1.0}
        assert np.abs(episode.actions).max() <= 1.0
    again = demonstrate(OGBenchConfig(task=SINGLE), contexts[:1], dials=OGBenchDials(oracle=oracle), seed=1)
    np.testing.assert_array_equal(again[0].episode.state, rollouts[0].episode.state)


def test_sparse_reward_ignores_what_is_half_done(make: Make) -> None:
    make()
    from pirl.envs.ogbench_expert import demonstrate

    name = "cube-double-singletask-task2-v0"
    dense, bare = (
        demonstrate(OGBenchConfig(task=name, sparse=sparse), [Context(name, 0)])[0].episode for sparse in (False, True)
    )
    assert set(dense.rewards) == {-2.0, -1.0, 0.0}
    np.testing.assert_array_equal(bare.rewards, np.where(dense.rewards == 0, 0, -1))


def test_play_is_labelled_with_the_tasks_reward(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    monkeypatch.setattr("pirl.envs.ogbench_expert._PLAY_STEPS", 200)
    from pirl.envs.ogbench_expert import play_data

    config = OGBenchConfig(task="cube-single-singletask-task2-v0")
    long, rest = play_data(config, 260, seed=7)
    assert (len(long.episode), len(rest.episode)) == (200, 60)
    assert long.episode.terminated.any()  # by chance of the seed, the cube passes the task's goal
    for rollout in (long, rest):
        episode = rollout.episode
        cube = episode.state[:, 19:22] / 10 + [0.425, 0, 0]
        solved = np.linalg.norm(cube - [0.5, 0.0, 0.02], axis=1) <= 0.04
        np.testing.assert_array_equal(episode.terminated, solved)
        np.testing.assert_array_equal(episode.rewards, np.where(solved, 0.0, -1.0))
        assert episode.truncated[-1] == (not solved[-1])
        assert not episode.truncated[:-1].any()
        assert episode.success is None
    assert np.ptp(long.episode.state[:, 19:21]) > 1.0  # the cube was carried about
    np.testing.assert_array_equal(play_data(config, 30, seed=7)[0].episode.state, long.episode.state[:30])


def test_refuses_what_it_cannot_do(make: Make) -> None:
    env = make()
    with pytest.raises(EnvError, match="before the first episode"):
        env.act(np.zeros(5, np.float32))
    for name in ("pointmaze-medium-navigate-singletask-v0", "cube-single-play-v0"):
        with pytest.raises(EnvError, match="unknown OGBench task"):
            make(name)
    with pytest.raises(EnvError, match="has no environment") as error:
        make("cube-single-play-singletask-task9-v0")
    assert "cube-single-singletask-task1-v0" in str(error.value)
    from pirl.envs.ogbench_expert import demonstrate

    with pytest.raises(EnvError, match="no expert"):
        demonstrate(OGBenchConfig(task="scene-singletask-v0"), [])
