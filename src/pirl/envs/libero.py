"""LIBERO's suites with the conventions of OpenPI's evaluation.

That includes a detail of robosuite: `step` returns observations sampled some milliseconds before the end of the step.
So images must not show the simulator's current state. Instead, the poses of everything visible are recorded when
robosuite would render, which costs almost nothing, and rendered on demand. Images equal those of LIBERO's
`OffScreenRenderEnv`, but only requested ones cost time.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from pirl.envs.config import LiberoConfig
from pirl.envs.env import Outcome, RobotEnv
from pirl.envs.libero_setup import Task, load_tasks, prepare, read_init_states
from pirl.envs.mujoco_render import SYSTEM_PACKAGES, plain
from pirl.errors import EnvError
from pirl.names import PROMPT
from pirl.records import Array, Context

CAMERAS = {"observation/image": "agentview", "observation/wrist_image": "robot0_eye_in_hand"}
"""OpenPI's observation keys -> LIBERO's camera names."""
STATE_KEY = "observation/state"
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Time limit of each suite, from OpenPI's evaluation: a bit above its longest demonstration, without waiting steps."""
_WAIT = np.array([0.0] * 6 + [-1.0])
_CONTROL_HZ = 20
_PLACEMENT_TRIES = 100


class LiberoEnv(RobotEnv):
    """The tasks of a suite. Each has its own simulator; the most recently used `keep_tasks` stay in memory."""

    robot, fps, action_dim = "libero", _CONTROL_HZ, 7

    def __init__(self, config: LiberoConfig) -> None:
        prepare(config.assets)
        tasks = load_tasks(config.suite)
        chosen = range(len(tasks)) if config.task_ids is None else config.task_ids
        if wrong := [i for i in chosen if not 0 <= i < len(tasks)]:
            raise EnvError(f"{config.suite} has no task {wrong[0]}", hint=f"its tasks are 0 to {len(tasks) - 1}")
        self._tasks = {tasks[i].name: tasks[i] for i in chosen}
        self._init_states = {task.name: read_init_states(task.init_states) for task in self._tasks.values()}
        self.tasks = tuple(self._tasks)
        self.num_inits = min(map(len, self._init_states.values()))
        self.max_steps = config.max_steps or MAX_STEPS[config.suite]
        self._config = config
        self._simulators: OrderedDict[str, Simulator] = OrderedDict()
        self._steps = 0

    def begin(self, context: Context) -> None:
        """Reset to the context and let objects settle."""
        if context.task not in self._simulators:
            while len(self._simulators) >= self._config.keep_tasks:
                self._simulators.popitem(last=False)[1].close()
            self._simulators[context.task] = Simulator(self._tasks[context.task], self._config)
        self._simulators.move_to_end(context.task)
        self.simulator.restart(self._config.seed + context.init, self._init_states[context.task][context.init])
        for _ in range(self._config.wait_steps):
            self.simulator.step(_WAIT)
        self._steps = 0

    def act(self, action: Float[Array, "A"]) -> Outcome:
        """One control step. The episode terminates with reward 1 when LIBERO's goal predicate holds; 0 before."""
        solved = self.simulator.step(action)
        self._steps += 1
        return Outcome(float(solved), solved, self._steps >= self.max_steps and not solved, solved)

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        """The observation that OpenPI's LIBERO client sends to a policy, before resizing."""
        simulator = self.simulator
        seen = simulator.pictures() if pictures else {}
        return {STATE_KEY: simulator.state(), **seen, PROMPT: simulator.task.prompt}

    @property
    def simulator(self) -> "Simulator":
        """Simulator of the current task."""
        if not self._simulators:
            raise EnvError("an action or a look before the first episode", hint="call `begin` or `reset` first")
        return next(reversed(self._simulators.values()))

    def close(self) -> None:
        """Free all simulators."""
        for simulator in self._simulators.values():
            simulator.close()
        self._simulators.clear()


class Simulator:
    """robosuite's simulator of one task, built once and restored for every episode.

    LIBERO's own reset is never called: it rebuilds the simulator, which takes seconds, and it swallows every exception
    and retries forever.
    """

    def __init__(self, task: Task, config: LiberoConfig) -> None:
        from libero.libero.envs.env_wrapper import ControlEnv
        from robosuite.utils.observables import Observable, sensor

        self.task = task
        self._config = config
        with _numpy_seed(config.seed):
            self._env = _retried(
                lambda: ControlEnv(
                    str(task.bddl),
                    use_camera_obs=False,
                    has_offscreen_renderer=False,
                    control_freq=_CONTROL_HZ,
                    ignore_done=True,
                ),
                task,
            )
        self.inner: Any = self._env.env
        self.model, self.data = self.inner.sim.model._model, self.inner.sim.data._data
        self._fixtures = _fixture_places(self.inner)
        # Reloading the model, as the reset in OpenPI's first episode does, adds these samplers a second time, and each
        # draws from the generator that places the fixtures.
        self.inner.object_property_initializers *= 2
        self._scene = _scene_arrays(self.model, self.data)
        look = sensor(modality="scene")(lambda _: np.concatenate([array.ravel() for array in self._scene]))
        self.inner.add_observable(Observable("scene", look, sampling_rate=_CONTROL_HZ))
        self._cameras: Cameras | None = None
        self._seen: dict[str, Any] = {}

    def restart(self, seed: int, init_state: Float[Array, "d"]) -> None:
        """Restore the state of a newly built simulator, then set the initial state.

        An initial state contains only joints. NumPy's global generator places the fixtures (cabinet, stove, rack), so
        it is seeded for every episode to make starts reproducible.
        """
        inner = self.inner
        with _numpy_seed(seed):
            _retried(self._place, self.task)
        inner.sim.forward()
        inner._obs_cache = {}
        inner.visualize(vis_settings=dict.fromkeys(inner._visualizations, False))
        inner._update_observables(force=True)
        if len(init_state) != 1 + self.model.nq + self.model.nv:
            raise EnvError(
                f"{self.task.init_states}: states of {len(init_state)} numbers for a scene of "
                f"{1 + self.model.nq + self.model.nv}",
                hint="LIBERO's files of tasks and initial states are not of the same version",
            )
        self._seen = self._env.set_init_state(init_state)

    def _place(self) -> None:
        for body, (place, rotation) in self._fixtures.items():
            self.model.body_pos[body], self.model.body_quat[body] = place, rotation
        self.inner.sim.reset()
        self.inner.sim.forward()  # the robot reads its base pose from the result
        for robot in self.inner.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        self.inner._reset_internal()

    def step(self, action: Float[Array, "A"]) -> bool:
        """Execute one control step; returns whether the goal is reached."""
        self._seen, _, solved, _ = self.inner.step(np.asarray(action, np.float64))
        return bool(solved)

    def state(self) -> Float[Array, "8"]:
        """Position and rotation (axis-angle) of the hand, and the two finger joints."""
        seen = self._seen
        rotation = axis_angle(seen["robot0_eef_quat"])
        return np.concatenate([seen["robot0_eef_pos"], rotation, seen["robot0_gripper_qpos"]])

    def pictures(self) -> dict[str, UInt8[Array, "h w 3"]]:
        """Images of both cameras, rotated by 180 degrees as in the datasets."""
        if self._cameras is None:
            self._cameras = Cameras(self.model, self._config.render_size, fast=self._config.fast_render)
        return self._cameras.draw(self._seen["scene"])

    def close(self) -> None:
        """Free memory and the graphics context."""
        if self._cameras is not None:
            self._cameras.close()
        # Drop references to the model first: robosuite collects garbage only when it closes.
        self._cameras = self.model = self.data = None
        self._scene = []
        self._env.close()


class Cameras:
    """Renders a scene from recorded poses, in its own MjData, so that rendering does not change the simulator."""

    def __init__(self, model: Any, size: int, *, fast: bool) -> None:
        import mujoco

        self._mujoco, self._model, self._data = mujoco, model, mujoco.MjData(model)
        if fast:
            plain(model)
        buffer = model.vis.global_
        buffer.offwidth, buffer.offheight = max(buffer.offwidth, size), max(buffer.offheight, size)
        try:
            self._gl = mujoco.GLContext(buffer.offwidth, buffer.offheight)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        except Exception as error:  # every graphics library raises its own exceptions
            raise EnvError(
                f"no graphics context for the cameras: {type(error).__name__}: {error}",
                hint=f"apt-get install {SYSTEM_PACKAGES}; set MUJOCO_GL to osmesa (processor) or egl (graphics card) "
                "before Python starts",
            ) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision shapes; group 1 holds the visible ones
        self._rect = mujoco.MjrRect(0, 0, size, size)
        self._arrays = _scene_arrays(model, self._data)
        self._ids = {key: model.camera(name).id for key, name in CAMERAS.items()}

    def draw(self, scene: Float[Array, "n"]) -> dict[str, UInt8[Array, "h w 3"]]:
        """An image from each camera."""
        shown = self._model.site_rgba.copy()
        ends = np.cumsum([array.size for array in self._arrays])
        for array, values in zip(self._arrays, np.split(scene, ends[:-1]), strict=True):
            array[:] = values.reshape(array.shape)
        # A process has several simulators, and rendering uses the current context.
        self._gl.make_current()
        try:
            return {key: self._draw(camera) for key, camera in self._ids.items()}
        finally:
            self._model.site_rgba[:] = shown

    def _draw(self, camera: int) -> UInt8[Array, "h w 3"]:
        mujoco = self._mujoco
        view = mujoco.MjvCamera()
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera
        every = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, self._data, self._options, None, view, every, self._scene)
        mujoco.mjr_render(self._rect, self._scene, self._context)
        picture = np.empty((self._rect.height, self._rect.width, 3), np.uint8)
        mujoco.mjr_readPixels(picture, None, self._rect, self._context)
        # OpenGL's first row is the bottom one, so [::-1] is upright; the datasets also mirror images.
        return np.ascontiguousarray(picture[::-1, ::-1])

    def close(self) -> None:
        """Free the context while it is current, because its object ids are also valid in other contexts."""
        self._gl.make_current()
        self._context.free()
        self._gl.free()


def axis_angle(quat: Float[Array, "4"]) -> Float[Array, "3"]:
    """A rotation (x, y, z, w) as its axis times its angle; robosuite's formula, with its choice of sign."""
    w = float(np.clip(quat[3], -1.0, 1.0))
    norm = math.sqrt(1.0 - w * w)
    return np.zeros(3) if math.isclose(norm, 0.0) else quat[:3] * 2.0 * math.acos(w) / norm


def _scene_arrays(model: Any, data: Any) -> list[Array]:
    """The arrays that change and that an image depends on: poses, and visibility of sites (the stove's flame)."""
    places = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
    return [getattr(data, name) for name in places] + [model.site_rgba]


def _fixture_places(inner: Any) -> dict[int, tuple[Array, Array]]:
    """Fixtures' poses in the model's description, before random placement, by body id."""

    def numbers(element: Any, name: str, default: str) -> Array:
        return np.array([float(word) for word in element.get(name, default).split()])

    places = {}
    for fixture in inner.fixtures_dict.values():
        element = inner.model.worldbody.find(f".//body[@name='{fixture.root_body}']")
        body = inner.sim.model.body_name2id(fixture.root_body)
        places[body] = numbers(element, "pos", "0 0 0"), numbers(element, "quat", "1 0 0 0")
    return places


def _retried(attempt: Any, task: Task) -> Any:
    """Retry an attempt whose random placement of objects failed; other errors are not retried."""
    from robosuite.utils.errors import RandomizationError

    for _ in range(_PLACEMENT_TRIES):
        try:
            return attempt()
        except RandomizationError:
            continue
        except (OSError, ValueError) as error:
            raise EnvError(
                f"{task.bddl.name} cannot be built: {error}",
                hint="if this names a file, LIBERO's assets are incomplete: download them again, or name a folder that "
                "has them all with --env.assets",
            ) from error
    raise EnvError(f"{task.bddl.name}: no placement found in {_PLACEMENT_TRIES} tries", hint="take another env.seed")


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator in the block and restore its state afterwards."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
