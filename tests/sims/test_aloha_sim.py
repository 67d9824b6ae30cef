"""ALOHA: exact starts, gym-aloha's own pictures and stages, and experts that solve both tasks."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pirl.data.robots import get_robot
from pirl.envs.checker import check
from pirl.envs.config import AlohaConfig
from pirl.envs.env import RobotEnv
from pirl.envs.mujoco_render import choose_gl, load
from pirl.errors import ConfigError, EnvError, MissingExtraError
from pirl.records import Context

pytestmark = pytest.mark.sims

TRANSFER, INSERTION = "Transfer cube", "Insert the peg"
STILL = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.1] * 2, np.float32)

Make = Callable[..., RobotEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes environments, and closes them; skips where there is no simulator or nothing to render with."""
    try:
        load("gym_aloha.tasks.sim", extra="aloha", why="this test")
    except (MissingExtraError, EnvError) as error:
        pytest.skip(str(error))
    from pirl.envs.aloha import AlohaEnv

    made: list[RobotEnv] = []

    def build(**fields: object) -> AlohaEnv:
        made.append(AlohaEnv(AlohaConfig(**fields)))  # type: ignore[arg-type]
        return made[-1]  # type: ignore[return-value]

    yield build
    for env in made:
        env.close()


def test_keeps_the_contract_and_feeds_its_robot(make: Make) -> None:
    env = make(cameras=("top", "left_wrist", "right_wrist", "front_close"), render_size=(24, 32), fast_render=True)
    report = check(env, steps=8)
    assert report.notes == ()
    robot, seen = get_robot(env.robot), env.observe()
    pictures = {key for key in seen if key.startswith("images/")}
    assert robot.find_cameras(seen, pictures) == {
        "base_0_rgb": "images/cam_high",
        "left_wrist_0_rgb": "images/cam_left_wrist",
        "right_wrist_0_rgb": "images/cam_right_wrist",
    }
    assert robot.find_state(seen).shape == (14,)
    assert seen["images/cam_high"].shape == (24, 32, 3)


@pytest.mark.parametrize(("task", "dim"), [("transfer", 21), ("insertion", 28)])
def test_the_full_state_holds_the_objects_and_renders_nothing(make: Make, task: str, dim: int) -> None:
    env = make(task=task, full_state=True)
    assert check(env, steps=4).notes == ()
    env.begin(Context(env.tasks[0], 3))
    seen = env.observe()
    assert set(seen) == {"state", "prompt"}
    state = get_robot(env.robot).find_state(seen)
    assert state.shape == (dim,)
    np.testing.assert_array_equal(state[14:], env.objects.ravel().astype(np.float32))
    plain = make(task=task)
    plain.begin(Context(env.tasks[0], 3))
    np.testing.assert_array_equal(state[:14], plain.observe(pictures=False)["state"])
    assert env._pictures is None


def test_starts_do_not_depend_on_what_another_environment_did(make: Make) -> None:
    """gym-aloha keeps the objects' place in a global of the process."""
    one, other = make(), make(task="insertion")

    def run(disturb: bool) -> tuple[np.ndarray, np.ndarray]:
        one.begin(Context(TRANSFER, 3))
        if disturb:
            other.begin(Context(INSERTION, 9))
        states = []
        for step in range(30):
            one.act(STILL + np.float32(0.01 * step))
            states.append(one.observe(pictures=False)["state"])
        return np.stack(states), one.objects

    quiet, disturbed = run(False), run(True)
    np.testing.assert_array_equal(quiet[0], disturbed[0])
    np.testing.assert_array_equal(quiet[1], disturbed[1])
    one.begin(Context(TRANSFER, 4))
    assert np.abs(one.objects[0, :2] - quiet[1][0, :2]).max() > 0.01


def test_pictures_are_gym_alohas_unless_they_are_fast(make: Make) -> None:
    import gym_aloha.env

    stock = gym_aloha.env.AlohaEnv("transfer_cube", obs_type="pixels_agent_pos")
    reference, _ = stock.reset(seed=5)
    faithful = make(render_size=(480, 640))
    faithful.begin(Context(TRANSFER, 5))
    seen = faithful.observe()
    np.testing.assert_array_equal(seen["images/cam_high"], reference["pixels"]["top"])
    np.testing.assert_array_equal(seen["state"], reference["agent_pos"].astype(np.float32))
    fast = make(render_size=(480, 640), fast_render=True)
    fast.begin(Context(TRANSFER, 5))
    difference = np.abs(fast.observe()["images/cam_high"].astype(int) - seen["images/cam_high"])
    assert 0 < difference.mean() < 25  # the same scene, without its shadows


@pytest.mark.parametrize("task", [TRANSFER, INSERTION])
def test_experts_do_not_flip_their_wrists(make: Make, task: str) -> None:
    """Past its straight pose a wrist could turn half a circle to either side, and a policy cannot imitate both."""
    make()
    from pirl.envs.aloha_expert import AlohaDials, demonstrate

    config = AlohaConfig(task="transfer" if task == TRANSFER else "insertion")
    contexts, dials = [Context(task, init) for init in range(4)], AlohaDials(grasp_error=0.006, action_noise=0.005)
    for rollout in demonstrate(config, contexts, dials=dials, pictures=False):
        assert np.abs(rollout.episode.actions[:, [3, 5, 10, 12]]).max() < 2.2


def test_wrong_choices_fail_and_leave_the_noise_as_it_is(make: Make) -> None:
    make()
    from pirl.envs.aloha_expert import AlohaDials, demonstrate

    contexts = [Context(TRANSFER, init) for init in range(4)]

    def acted(**dials: float) -> list[Any]:
        made = AlohaDials(time_scale=0.7, action_noise=0.005, **dials)
        return [one.episode for one in demonstrate(AlohaConfig(max_steps=200), contexts, dials=made, pictures=False)]

    well, misses, drops = acted(), acted(miss=1.0), acted(let_go=1.0)
    assert [episode.success for episode in well] == [True] * 4
    assert not any(episode.success for episode in (*misses, *drops))
    begin = slice(0, 100)  # until the script's step 150, at 0.7 of its duration, the one that lets go does as well
    for one, other in zip(well, drops, strict=True):
        np.testing.assert_array_equal(one.actions[begin], other.actions[begin])


def test_a_second_attempt_is_a_late_success(make: Make) -> None:
    make()
    from pirl.envs.aloha_expert import AlohaDials, AlohaExpert, demonstrate

    contexts = [Context(TRANSFER, init) for init in range(4)]

    def acted(**dials: float) -> list[Any]:
        made = AlohaDials(time_scale=0.5, **dials)
        return [one.episode for one in demonstrate(AlohaConfig(max_steps=200), contexts, dials=made, pictures=False)]

    at_once, later, dropped = acted(), acted(retry=1.0), acted(retry=1.0, let_go=1.0)
    assert [episode.success for episode in (*at_once, *later)] == [True] * 8
    assert not any(episode.success for episode in dropped)
    for one, other in zip(at_once, later, strict=True):
        assert 35 <= len(other) - len(one) <= 60  # 80 steps of the script, and more where the cube was touched
    with pytest.raises(ConfigError, match=r"miss is 0\.6 and retry 0\.6"):
        AlohaDials(miss=0.6, retry=0.6)
    with pytest.raises(ConfigError, match="only the transfer"):
        AlohaExpert(make(task="insertion"), AlohaDials(retry=0.5))  # type: ignore[arg-type]


def test_experts_solve_both_tasks_and_success_ends_the_episode(make: Make) -> None:
    make()
    from pirl.envs.aloha_expert import AlohaDials, demonstrate

    contexts = [Context(TRANSFER, init) for init in range(40, 43)]
    quick = demonstrate(AlohaConfig(), contexts, dials=AlohaDials(time_scale=0.5), pictures=False)
    inserted = demonstrate(AlohaConfig(task="insertion"), [Context(INSERTION, 40)], pictures=False)
    for rollout in quick + inserted:
        episode = rollout.episode
        assert episode.success
        assert episode.terminated.tolist() == [False] * (len(episode) - 1) + [True]
        assert not episode.truncated.any()
        assert episode.rewards.sum() == episode.rewards[-1] == 1.0
        assert np.abs(episode.actions).max() > 1.0  # the declared action space would have clipped these
        assert not rollout.frames


def test_dials_decide_with_the_seed_and_a_missed_grasp_fails(make: Make) -> None:
    make()
    from pirl.envs.aloha_expert import AlohaDials, demonstrate

    def run(seed: int) -> np.ndarray:
        dials = AlohaDials(time_scale=0.5, grasp_error=0.2, action_noise=0.01)
        config = AlohaConfig(max_steps=60, staged_reward=True, render_size=(12, 16), fast_render=True)
        (rollout,) = demonstrate(config, [Context(TRANSFER, 1)], dials=dials, seed=seed)
        assert rollout.episode.success is False
        assert rollout.episode.truncated[-1]
        assert set(rollout.episode.rewards) == {0.0}  # nothing was even touched
        assert rollout.frames["images/cam_high"].shape == (60, 12, 16, 3)
        return rollout.episode.actions

    first = run(0)
    np.testing.assert_array_equal(first, run(0))
    assert np.abs(first - run(1)).max() > 0.05


def test_staged_reward_counts_the_way(make: Make) -> None:
    make()
    from pirl.envs.aloha_expert import AlohaDials, demonstrate

    (rollout,) = demonstrate(
        AlohaConfig(staged_reward=True), [Context(TRANSFER, 0)], dials=AlohaDials(time_scale=0.5), pictures=False
    )
    assert {0.0, 0.25, 0.5, 1.0} <= set(rollout.episode.rewards.tolist())
    assert rollout.episode.rewards[-1] == 1.0


def test_physics_that_diverges_is_a_failure_and_leaves_no_trace(make: Make) -> None:
    env, fresh = make(), make()
    env.begin(Context(TRANSFER, 2))
    draw = np.random.default_rng(2)
    for _ in range(100):
        before = env.observe(pictures=False)["state"]
        outcome = env.act(3 * draw.normal(size=14).astype(np.float32))
        if outcome.terminated:
            break
    assert outcome == (0.0, True, False, False)
    np.testing.assert_array_equal(env.observe(pictures=False)["state"], before)
    states = []
    for one in (env, fresh):
        one.begin(Context(TRANSFER, 5))
        one.act(STILL)
        states.append(one.observe(pictures=False)["state"])
    np.testing.assert_array_equal(*states)


def test_refuses_what_it_cannot_do(make: Make) -> None:
    env = make(max_steps=2)
    with pytest.raises(EnvError, match="before the first episode"):
        env.act(STILL)
    with pytest.raises(EnvError, match="unknown task"):
        env.check_context(Context(INSERTION, 0))
    env.begin(Context(TRANSFER, 0))
    assert [env.act(STILL).truncated for _ in range(2)] == [False, True]
    with pytest.raises(ConfigError, match="is 0"):
        AlohaConfig(max_steps=0)


def test_rendering_is_chosen_by_what_the_machine_has() -> None:
    assert choose_gl({}, platform="linux", gpu=False) == "osmesa"
    assert choose_gl({}, platform="linux", gpu=True) == "egl"
    assert choose_gl({"DISPLAY": ":0"}, platform="linux", gpu=False) is None
    assert choose_gl({"MUJOCO_GL": "glfw"}, platform="linux", gpu=False) is None
    assert choose_gl({}, platform="darwin", gpu=False) is None


def test_a_simulator_that_is_not_installed_names_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"no_such_simulator(.|\n)*pirl\[aloha\]"):
        load("no_such_simulator.tasks", extra="aloha", why="this test")
