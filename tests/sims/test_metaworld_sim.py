"""Meta-World: exact starts, its own physics and rewards, upright pictures, and experts that solve its tasks or err."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pirl.data.robots import get_robot
from pirl.envs.checker import check
from pirl.envs.config import MetaWorldConfig
from pirl.envs.env import EnvBatch
from pirl.envs.make import make_batch
from pirl.envs.metaworld_tasks import INSTRUCTIONS, MT10
from pirl.envs.mujoco_render import load
from pirl.errors import ConfigError, EnvError, MissingExtraError
from pirl.records import Context

pytestmark = pytest.mark.sims

REACH, PLACE, DRAWER = (INSTRUCTIONS[name] for name in ("reach-v3", "pick-place-v3", "drawer-open-v3"))

Make = Callable[..., EnvBatch]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes environments, and closes them; skips where there is no simulator or nothing to render with."""
    try:
        load("metaworld.env_dict", extra="metaworld", why="this test")
    except (MissingExtraError, EnvError) as error:
        pytest.skip(str(error))
    made: list[EnvBatch] = []

    def build(size: int = 1, **fields: object) -> EnvBatch:
        made.append(make_batch(MetaWorldConfig(**fields), size))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for batch in made:
        batch.close()


def wander(batch: EnvBatch, context: Context, steps: int = 25) -> tuple[np.ndarray, np.ndarray]:
    """All joints along an episode of random actions in the first slot, and its last picture."""
    batch.begin([0], [context])
    env, rng, joints = batch.envs[0], np.random.default_rng(0), []  # type: ignore[attr-defined]
    for _ in range(steps):
        batch.act([0], rng.uniform(-1.5, 1.5, (1, 4)).astype(np.float32))
        joints.append(env.simulator.inner.data.qpos.copy())
    return np.stack(joints), batch.observe([0])[0]["image"]


@pytest.mark.parametrize("full", [False, True])
def test_keeps_the_contract_and_feeds_its_robot(make: Make, full: bool) -> None:
    batch = make(tasks=("reach-v3", "drawer-open-v3"), render_size=40, full_state=full, wrist_camera=True)
    (env,) = batch.envs  # type: ignore[attr-defined]
    assert check(env, steps=8).notes == ()
    robot, seen = get_robot(env.robot), env.observe()
    pictures = {"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"}
    assert robot.find_cameras(seen) == ({} if full else pictures)
    assert robot.find_state(seen).shape == (robot.state_dim,) == ((39,) if full else (4,))
    assert [seen[key].shape for key in pictures.values() if key in seen] == ([] if full else [(40, 40, 3)] * 2)


def test_the_full_state_may_say_which_task_of_the_suite_it_is(make: Make) -> None:
    names = ("drawer-open-v3", "reach-v3")
    (env,) = make(tasks=names, full_state=True, one_hot=True).envs  # type: ignore[attr-defined]
    assert check(env, steps=4).notes == ()
    for name, number in zip(names, (4, 0), strict=True):  # of MT10, whichever are chosen
        env.begin(Context(INSTRUCTIONS[name], 1))
        state = get_robot(env.robot).find_state(env.observe())
        assert state.shape == (49,)
        np.testing.assert_array_equal(state[39:], np.eye(10)[number])
    with pytest.raises(ConfigError, match="full_state is not"):
        MetaWorldConfig(one_hot=True)
    with pytest.raises(EnvError, match="not in MT10"):
        make(tasks=("hammer-v3",), full_state=True, one_hot=True)


def test_passes_gymnasiums_own_check(make: Make) -> None:
    from gymnasium.utils.env_checker import check_env

    (env,) = make(tasks=("window-open-v3",), render_size=32).envs  # type: ignore[attr-defined]
    check_env(env, skip_render_check=True)


def test_an_episode_is_decided_by_its_context_and_actions(make: Make) -> None:
    """Not by what the simulator did before, nor by other slots, which borrow the same simulators and renderers."""
    crowd = make(2, render_size=40)
    for task in (PLACE, DRAWER):
        alone = make(render_size=40)
        wanted = wander(alone, Context(task, 7))
        crowd.begin([1], [Context(task, 3)])  # its renderer is the one that both use
        crowd.observe([1])
        assert not np.array_equal(wander(crowd, Context(task, 8))[1], wanted[1])
        wander(crowd, Context(REACH, 7))
        for found, expected in zip(wander(crowd, Context(task, 7)), wanted, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_physics_rewards_and_success_are_metaworlds(make: Make) -> None:
    """To the bit, also while the gripper holds something."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    (env,) = make(full_state=True, dense_reward=True, end_at_success=False).envs  # type: ignore[attr-defined]
    touched = set()
    for name in ("pick-place-v3", "peg-insert-side-v3", "door-open-v3"):
        env.begin(Context(INSTRUCTIONS[name], 5))
        stock = ALL_V3_ENVIRONMENTS[name]()
        stock._partially_observable, stock._set_task_called = False, True
        del stock.sawyer_observation_space
        stock._last_rand_vec = env.simulator.inner._last_rand_vec
        seen, _ = stock.reset()
        expert = ENV_POLICY_MAP[name]()
        for _ in range(50):
            action = np.clip(expert.get_action(seen), -1, 1).astype(np.float32)
            seen, reward, _, _, info = stock.step(action)
            outcome = env.act(action)
            assert outcome.reward == float(reward) / 10
            assert outcome.success == bool(info["success"])
            if name == "pick-place-v3":
                assert env.simulator.inner.touching_main_object == stock.touching_main_object
                touched.add(bool(stock.touching_main_object))
        np.testing.assert_array_equal(env.observe(pictures=False)["state"], seen.astype(np.float32))
    assert touched == {False, True}


def test_a_simulator_changes_no_other_of_its_task(make: Make) -> None:
    """They copy one compiled model, in which goal and furniture are moved."""
    first, second = make(2, full_state=True, tasks=("drawer-open-v3",)).envs  # type: ignore[attr-defined]
    first.begin(Context(DRAWER, 0))
    there = first.simulator.inner.model.body("drawer").pos.copy()
    second.begin(Context(DRAWER, 1))
    np.testing.assert_array_equal(first.simulator.inner.model.body("drawer").pos, there)
    assert not np.array_equal(second.simulator.inner.model.body("drawer").pos, there)


def test_the_first_look_shows_this_episode(make: Make) -> None:
    """Meta-World's own reset looks before it computes where the goal and the furniture are."""
    (env,) = make(full_state=True, tasks=("drawer-open-v3",)).envs  # type: ignore[attr-defined]
    env.begin(Context(DRAWER, 0))
    env.begin(Context(DRAWER, 1))
    inner = env.simulator.inner
    np.testing.assert_allclose(inner.data.body("drawer").xpos, inner.model.body("drawer").pos)
    np.testing.assert_array_equal(env.observe(pictures=False)["state"][:18], env.simulator.seen[18:36].astype("f4"))


def test_pictures_are_upright_and_not_mirrored(make: Make) -> None:
    """The goal, the only blue thing, is where the camera projects it to."""
    size = 224
    (env,) = make(render_size=size, tasks=("pick-place-v3",)).envs  # type: ignore[attr-defined]
    rows = []
    for init in range(6):
        env.begin(Context(PLACE, init))
        picture = env.observe()["image"].astype(int)
        inner = env.simulator.inner
        camera, centre = inner.data.camera("corner2"), (size - 1) / 2
        x, y, z = camera.xmat.reshape(3, 3).T @ (inner._target_pos - camera.xpos)
        focal = size / 2 / np.tan(np.radians(inner.model.camera("corner2").fovy[0]) / 2)
        projected = np.array([centre + focal * y / -z, centre - focal * x / -z])  # row, column, turned by half a turn
        blue = np.argwhere((picture[..., 2] > 120) & (picture[..., :2].max(-1) < 90))
        assert len(blue) > 5
        np.testing.assert_allclose(blue.mean(0), projected, atol=2.5)
        rows.append((inner._target_pos[2], projected[0]))
    high, low = max(rows), min(rows)
    assert high[0] > low[0] + 0.05
    assert high[1] < low[1]  # what is higher in the room is higher in the picture
    far = make(render_size=size, tasks=("pick-place-v3",), near_camera=False, fast_render=False)
    far.begin([0], [Context(PLACE, 5)])
    assert np.abs(far.observe([0])[0]["image"].astype(int) - picture).mean() > 10


def test_experts_solve_the_tasks_and_success_ends_the_episode(make: Make) -> None:
    make()
    from pirl.envs.metaworld_expert import demonstrate

    contexts = [Context(INSTRUCTIONS[name], init) for init in (100, 101, 102) for name in MT10]
    rollouts = demonstrate(MetaWorldConfig(), contexts, pictures=False)
    assert sum(bool(rollout.episode.success) for rollout in rollouts) >= 0.8 * len(contexts)
    for rollout in rollouts:
        episode = rollout.episode
        assert episode.task == rollout.context.task
        assert episode.terminated[-1] == episode.success == (not episode.truncated[-1])
        assert not (episode.terminated | episode.truncated)[:-1].any()
        assert episode.rewards.sum() == episode.rewards[-1] == float(bool(episode.success))
        assert np.abs(episode.actions).max() <= 1.0
        assert episode.state.shape[1] == 4


def test_dials_choose_the_wrong_place_or_correct_it_late(make: Make) -> None:
    make()
    from pirl.envs.metaworld_expert import MetaWorldDials, demonstrate

    contexts = [
        Context(INSTRUCTIONS[name], init) for init in (4, 5) for name in ("reach-v3", "button-press-topdown-v3")
    ]

    def run(seed: int = 0, **dials: float) -> list[np.ndarray]:
        found = demonstrate(
            MetaWorldConfig(max_steps=160), contexts, dials=MetaWorldDials(**dials), seed=seed, pictures=False
        )  # type: ignore[arg-type]
        solved.append([bool(rollout.episode.success) for rollout in found])
        return [rollout.episode.actions for rollout in found]

    solved: list[list[bool]] = []
    right, wrong, late = run(), run(wrong=1.0), run(detour=1.0)
    assert solved == [[True] * 4, [False] * 4, [True] * 4]
    assert all(len(one) < len(other) for one, other in zip(right, late, strict=True))
    assert all(len(one) == 160 for one in wrong)
    first, again, other = run(action_noise=0.2), run(action_noise=0.2), run(seed=1, action_noise=0.2)
    for one, same, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one[:20], different[:20])


def test_an_episode_may_go_on_after_success(make: Make) -> None:
    from metaworld.policies import ENV_POLICY_MAP

    (env,) = make(tasks=("reach-v3",), end_at_success=False, max_steps=90).envs  # type: ignore[attr-defined]
    env.begin(Context(REACH, 0))
    policy = ENV_POLICY_MAP["reach-v3"]()
    outcomes = [env.act(np.asarray(policy.get_action(env.simulator.seen), np.float32)) for _ in range(90)]
    assert sum(outcome.reward for outcome in outcomes) == 1.0
    assert not any(outcome.terminated for outcome in outcomes)
    assert [outcome.truncated for outcome in outcomes] == [False] * 89 + [True]
    won = [outcome.success for outcome in outcomes]
    assert won == sorted(won)
    assert won[-1]


def test_simulators_to_spare_are_few(make: Make) -> None:
    batch = make(3, spare_simulators=2)
    tasks = list(batch.tasks)
    for turn in range(3):
        batch.begin([0, 1, 2], [Context(task, turn) for task in (tasks[turn], tasks[turn + 3], tasks[turn + 6])])
    worlds = batch.envs[0]._worlds  # type: ignore[attr-defined]
    assert all(env._worlds is worlds for env in batch.envs)  # type: ignore[attr-defined]
    assert len(worlds._spare) == 2


def test_refuses_what_it_cannot_do(make: Make) -> None:
    (env,) = make(max_steps=2).envs  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match="before the first episode"):
        env.act(np.zeros(4, np.float32))
    with pytest.raises(EnvError, match="unknown task"):
        env.check_context(Context(INSTRUCTIONS["hammer-v3"], 0))
    env.begin(Context(REACH, 0))
    assert [env.act(np.zeros(4, np.float32)).truncated for _ in range(2)] == [False, True]
