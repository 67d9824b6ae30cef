"""LIBERO: OpenPI's first episode bit by bit, exact starts, several simulators side by side, an expert that succeeds.

Needs LIBERO and its assets: `PIRL_LIBERO_ASSETS` names the folder if they are not where the package looks.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pirl.envs.config import LiberoConfig
from pirl.envs.libero import CAMERAS, LiberoEnv
from pirl.envs.libero_setup import find_assets, load_tasks, prepare
from pirl.errors import EnvError
from pirl.records import Context

pytestmark = pytest.mark.sims

SMALL = LiberoConfig(task_ids=(8,), render_size=64, fast_render=True)
BOWL = "put the bowl on the plate"

Make = Callable[[LiberoConfig], LiberoEnv]


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    try:
        prepare(None)
    except EnvError as error:
        pytest.skip(str(error))


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[LiberoEnv] = []

    def build(config: LiberoConfig) -> LiberoEnv:
        made.append(LiberoEnv(config))
        return made[-1]

    yield build
    for env in made:
        env.close()


def physics(env: LiberoEnv) -> np.ndarray:
    """All that the simulation goes on from, and where the fixtures stand."""
    simulator = env.simulator
    arrays = (simulator.data.qpos, simulator.data.qvel, simulator.data.qacc_warmstart, simulator.model.body_pos)
    return np.concatenate([array.ravel() for array in arrays])


def shake(env: LiberoEnv, steps: int = 3) -> None:
    for action in np.random.default_rng(0).uniform(-1, 1, (steps, 7)).astype(np.float32):
        env.act(action)


def test_suites() -> None:
    for suite, count in (("spatial", 10), ("object", 10), ("goal", 10), ("10", 10), ("90", 90)):
        tasks = load_tasks(f"libero_{suite}")
        assert len(tasks) == len({task.name for task in tasks}) == count
        assert all(task.name.startswith(task.prompt) for task in tasks)
    stoves = [task.name for task in tasks if task.prompt == "turn on the stove"]
    assert len(stoves) == 2
    assert "turn on the stove (KITCHEN_SCENE9)" in stoves
    assert "torch" not in sys.modules or hasattr(sys.modules["torch"], "Tensor")


def test_is_openpis_first_episode(make: Make) -> None:
    """The same numbers and the same pixels as LIBERO's own environment, used as OpenPI's evaluation does."""
    from libero.libero.envs import OffScreenRenderEnv

    config = replace(SMALL, fast_render=False, wait_steps=0)
    env = make(config)
    task = load_tasks("libero_goal")[8]
    theirs = OffScreenRenderEnv(bddl_file_name=str(task.bddl), camera_heights=64, camera_widths=64)
    theirs.seed(7)
    theirs.reset()
    theirs.set_init_state(env._init_states[BOWL][0])
    env.begin(Context(BOWL, 3))
    shake(env)
    env.begin(Context(BOWL, 0))
    actions = np.concatenate([np.tile([0.0] * 6 + [-1.0], (3, 1)), np.random.default_rng(1).uniform(-1, 1, (4, 7))])
    for action in actions.astype(np.float32):
        seen, _, done, _ = theirs.step(action.astype(np.float64))
        assert env.act(action).success == done
        ours = env.observe()
        np.testing.assert_array_equal(theirs.get_sim_state()[1:], physics(env)[: len(theirs.get_sim_state()) - 1])
        np.testing.assert_array_equal(ours["observation/state"][:3], seen["robot0_eef_pos"])
        np.testing.assert_array_equal(ours["observation/state"][6:], seen["robot0_gripper_qpos"])
        for key, camera in CAMERAS.items():
            theirs.env.sim._render_context_offscreen.gl_ctx.make_current()
            np.testing.assert_array_equal(ours[key], seen[f"{camera}_image"][::-1, ::-1])
        theirs.env.sim._render_context_offscreen.gl_ctx.make_current()  # which it takes for granted
    theirs.close()


def test_keeps_the_contract(make: Make) -> None:
    check = pytest.importorskip("pirl.rollout.check", reason="needs the packages of pirl itself")
    report = check.check_env(make(SMALL), steps=8)
    assert report.notes == ()
    assert report.observation["observation/state"] == "float64 of shape (8,)"


def test_the_same_start_whatever_happened_before(make: Make) -> None:
    env = make(replace(SMALL, task_ids=(8, 0), keep_tasks=1))
    env.begin(Context(BOWL, 5))
    first, shown = physics(env), env.observe()
    shake(env)
    later = physics(env)
    env.begin(Context(env.tasks[1], 0))  # another task: the simulator of the first is gone
    np.random.rand(7)
    env.begin(Context(BOWL, 6))
    assert not np.array_equal(physics(env), first)
    env.begin(Context(BOWL, 5))
    np.testing.assert_array_equal(physics(env), first)
    for key, picture in env.observe().items():
        np.testing.assert_array_equal(picture, shown[key])
    shake(env)
    np.testing.assert_array_equal(physics(env), later)
    np.random.seed(0)
    after = np.random.get_state()[1].copy()
    env.begin(Context(BOWL, 5))
    np.testing.assert_array_equal(np.random.get_state()[1], after)


def test_looking_changes_nothing(make: Make) -> None:
    blind, looking = make(SMALL), make(SMALL)
    for env in (blind, looking):
        env.begin(Context(BOWL, 2))
        for action in np.random.default_rng(2).uniform(-1, 1, (4, 7)).astype(np.float32):
            env.act(action)
            if env is looking:
                env.observe()
    np.testing.assert_array_equal(physics(blind), physics(looking))


def test_simulators_side_by_side(make: Make) -> None:
    """Each draws its own scene, also after another was built, drawn and freed."""
    bowl, drawer = make(SMALL), make(replace(SMALL, task_ids=(0,)))
    bowl.begin(Context(BOWL, 0))
    first = bowl.observe()["observation/image"]
    drawer.begin(Context(drawer.tasks[0], 0))
    drawer.observe()
    np.testing.assert_array_equal(bowl.observe()["observation/image"], first)
    drawer.close()  # while the context of the other is current
    np.testing.assert_array_equal(bowl.observe()["observation/image"], first)
    assert np.ptp(first) > 100


def test_time_is_over_after_the_wait(make: Make) -> None:
    env = make(replace(SMALL, max_steps=3))
    env.begin(Context(BOWL, 0))
    assert [env.act(np.zeros(7, np.float32)).truncated for _ in range(3)] == [False, False, True]
    assert make(SMALL).max_steps == 300
    with pytest.raises(EnvError, match="before the first episode"):
        make(SMALL).observe()
    with pytest.raises(EnvError, match="libero_goal has no task 10"):
        make(replace(SMALL, task_ids=(3, 10)))


def test_a_missing_file_is_named(make: Make, tmp_path: Path) -> None:
    """It ends with an error: LIBERO's own reset would try again for ever."""
    assets, absent = find_assets(None), "plate"
    for folder, _, files in os.walk(assets):
        (tmp_path / Path(folder).relative_to(assets)).mkdir(exist_ok=True)
        for file in files:
            if absent not in folder:
                (tmp_path / Path(folder).relative_to(assets) / file).symlink_to(Path(folder) / file)
    env = make(replace(SMALL, assets=str(tmp_path)))
    try:
        with pytest.raises(EnvError, match=r"cannot be built: [\s\S]*plate[\s\S]*--env.assets"):
            env.begin(Context(BOWL, 0))
    finally:
        prepare(None)  # the folder is a setting of the whole process


def test_expert() -> None:
    from pirl.envs.libero_expert import LiberoDials, demonstrate

    start, brief = [Context(BOWL, 0)], replace(SMALL, max_steps=25)
    worse = LiberoDials(action_noise=0.3, grasp_error=0.05)
    [good] = demonstrate(SMALL, start, seed=3)
    [bad], [again] = (demonstrate(brief, start, dials=worse, seed=3, pictures=False) for _ in range(2))
    episode = good.episode
    assert episode.success
    assert episode.terminated[-1]
    assert episode.rewards.sum() == episode.rewards[-1] == 1
    assert 50 < len(episode) < 120
    assert good.frames["observation/wrist_image"].shape == (len(episode), 64, 64, 3)
    np.testing.assert_array_equal(good.frame_steps, np.arange(len(episode)))
    assert bad.frames == {}
    np.testing.assert_array_equal(bad.episode.state, again.episode.state)
    assert not np.array_equal(bad.episode.actions[:20], episode.actions[:20])


def test_expert_says_what_it_cannot_do() -> None:
    from pirl.envs.libero_expert import demonstrate

    with pytest.raises(EnvError, match="the expert cannot do 'turn on the stove'"):
        demonstrate(replace(SMALL, task_ids=(7,)), [Context("turn on the stove", 0)])
