"""Meta-World: a Sawyer arm at a table and fifty tasks, each with an instruction (extra `metaworld`).

Physics, tasks, rewards and success are Meta-World's. Its rendering and vector environments are not used: shadows make
an image ten times as expensive, and every renderer holds a scene's meshes, 100 MB. So the environments of a process
share one renderer per task and a pool of simulators.
"""

from copy import copy
from typing import Any, NamedTuple, cast

import gymnasium
import numpy as np
from jaxtyping import Float

from pirl.envs.config import MetaWorldConfig
from pirl.envs.env import Outcome, RobotEnv
from pirl.envs.metaworld_tasks import INSTRUCTIONS, MT10
from pirl.envs.mujoco_render import Pictures, load
from pirl.errors import EnvError, did_you_mean
from pirl.names import IMAGE, PROMPT, STATE
from pirl.records import Array, Context

WRIST_IMAGE = "wrist_image"
"""Observation key of the gripper camera's image."""
CAMERA, WRIST_CAMERA = "corner2", "gripperPOV"
"""Meta-World's names of the cameras."""
NEAR = (0.75, 0.075, 0.7)
"""Position of `corner2` in published visual results (masked world models, arXiv 2206.14244) and LeRobot."""
PROPRIOCEPTION = 4
"""Proprioceptive dimensions of the observation, which come first: position of the hand, opening of the gripper."""
_BEST_REWARD = 10.0


class MetaWorldEnv(RobotEnv):
    """Actions are steps of the hand (x, y, z; 1 is one centimetre) and the gripper's force (1 closes, -1 opens).

    They are clipped to [-1, 1], as in Meta-World. The reward is 1 at the first success and 0 otherwise.
    """

    fps = 80
    action_dim = 4

    def __init__(self, config: MetaWorldConfig, worlds: "Worlds | None" = None) -> None:
        """Choose the tasks. Simulators are built when an episode begins; pass `worlds` to share them between slots."""
        self.config = config
        names = task_names(config)
        self.names = {INSTRUCTIONS[name]: name for name in names}
        """Instruction -> Meta-World's name."""
        self.tasks = tuple(self.names)
        self.robot = _robot(config)
        self._suite = [INSTRUCTIONS[name] for name in _suite(config)]
        self.max_steps = config.max_steps
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (self.action_dim,), np.float32)
        self.observation_space = cast(gymnasium.spaces.Space[dict[str, Any]], _observation_space(config))
        self._worlds = worlds or Worlds(config)
        self._simulator: Simulator | None = None
        self._task, self._steps, self._solved = "", 0, False

    @property
    def simulator(self) -> "Simulator":
        """Simulator of the current episode."""
        if self._simulator is None:
            raise EnvError("an action or a look before the first episode", hint="begin an episode with a context first")
        return self._simulator

    def begin(self, context: Context) -> None:
        """Start an episode; the context's `init` is the seed that places objects and goal."""
        name = self.names[context.task]
        if self._simulator is None or self._simulator.name != name:
            self._give_back()
            self._simulator = self._worlds.borrow(name)
        self._simulator.restart(context.init)
        self._task, self._steps, self._solved = context.task, 0, False

    def act(self, action: Float[Array, "4"]) -> Outcome:
        """One control step of 12.5 ms."""
        reward, success = self.simulator.step(action)
        self._steps += 1
        first = success and not self._solved
        self._solved |= success
        terminated = self._solved and self.config.end_at_success
        truncated = self._steps >= self.max_steps and not terminated
        value = reward / _BEST_REWARD if self.config.dense_reward else float(first)
        return Outcome(value, terminated, truncated, self._solved)

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        """Hand, gripper and images; or Meta-World's full observation (`full_state`)."""
        simulator = self.simulator
        state = simulator.seen if self.config.full_state else simulator.seen[:PROPRIOCEPTION]
        if self.config.one_hot:
            state = np.concatenate([state, [task == self._task for task in self._suite]])
        seen: dict[str, Any] = {STATE: state.astype(np.float32), PROMPT: self._task}
        if pictures and not self.config.full_state:
            # The camera hangs upside down: rotate its image by 180 degrees.
            turned = self._worlds.picture(simulator, CAMERA)[::-1, ::-1]
            seen[IMAGE] = np.ascontiguousarray(turned)
            if self.config.wrist_camera:
                seen[WRIST_IMAGE] = self._worlds.picture(simulator, WRIST_CAMERA)
        return seen

    def close(self) -> None:
        """Free simulators and renderers, including those shared with other environments."""
        self._give_back()
        self._worlds.close()

    def _give_back(self) -> None:
        if self._simulator is not None:
            self._worlds.give_back(self._simulator)
            self._simulator = None


class Step(NamedTuple):
    """Meta-World's result of one action."""

    reward: float
    success: bool


class Simulator:
    """Meta-World's environment of one task, without its wrappers."""

    def __init__(self, name: str, kind: Any, *, near_camera: bool) -> None:
        self.name = name
        self.inner: Any = kind()
        self.inner._set_task_called = True
        self.inner.seeded_rand_vec = True  # draw positions from the environment's generator, not NumPy's global one
        self.inner._partially_observable = False  # the goal is part of the observation, as in the multi-task suites
        del self.inner.sawyer_observation_space  # cached with the goal hidden
        if near_camera:
            self.inner.model.camera(CAMERA).pos[:] = NEAR
        self.seen = np.zeros(39)
        """Meta-World's observation: hand, gripper and objects, the same of the previous step, and the goal."""

    def restart(self, seed: int) -> None:
        """Reset to the initial state of a seed.

        Meta-World moves goal and furniture in the model and observes before it updates the kinematics, so the first
        observation and image would show the previous episode's positions. Update them and observe again. Kinematics
        only: a full `mj_forward` would also warm-start the solver, and episodes would differ from Meta-World's.
        """
        import mujoco

        self.inner.np_random = np.random.default_rng(seed)
        self.inner._freeze_rand_vec = False
        self.inner.reset_model()  # draws positions until they are valid for the task
        self.inner._freeze_rand_vec = True  # a reset sets up the scene twice, and some tasks use the first one
        self.inner.reset()
        mujoco.mj_kinematics(self.inner.model, self.inner.data)
        mujoco.mj_camlight(self.inner.model, self.inner.data)
        now = self.inner._get_curr_obs_combined_no_goal()
        self.inner._prev_obs = now
        self.seen = np.hstack([now, now, self.inner._get_pos_goal()])

    def step(self, action: Float[Array, "4"]) -> Step:
        """Execute one control step; disables Meta-World's own limit of 500 steps."""
        self.inner.curr_path_length = 0
        self.seen, reward, _, _, info = self.inner.step(np.clip(action, -1.0, 1.0))
        return Step(float(reward), bool(info["success"]))


class Worlds:
    """A process's pool of simulators for its environments, and one renderer per task."""

    def __init__(self, config: MetaWorldConfig) -> None:
        self._config = config
        kinds = load("metaworld.env_dict", extra="metaworld", why="the Meta-World simulator").ALL_V3_ENVIRONMENTS
        self._kinds = {name: _quick(kinds[name]) for name in task_names(config)}
        self._spare: list[Simulator] = []
        self._pictures: dict[str, Pictures] = {}

    def borrow(self, name: str) -> Simulator:
        """An idle simulator of a task, or a new one."""
        for simulator in self._spare:
            if simulator.name == name:
                self._spare.remove(simulator)
                return simulator
        return Simulator(name, self._kinds[name], near_camera=self._config.near_camera)

    def give_back(self, simulator: Simulator) -> None:
        """Return a simulator to the pool; evicts the one idle longest beyond `spare_simulators`."""
        self._spare.append(simulator)
        del self._spare[: -self._config.spare_simulators]

    def picture(self, simulator: Simulator, camera: str) -> Array:
        """Render a camera.

        The renderer may use the model of another simulator of the task: meshes and colours are the same, and poses come
        from `simulator`'s data.
        """
        if simulator.name not in self._pictures:
            size = (self._config.render_size, self._config.render_size)
            self._pictures[simulator.name] = Pictures(simulator.inner.model, size, fast=self._config.fast_render)
        return self._pictures[simulator.name].take(simulator.inner.data, camera)

    def close(self) -> None:
        """Free renderers and idle simulators."""
        for pictures in self._pictures.values():
            pictures.close()
        self._pictures.clear()
        self._spare.clear()


def _quick(kind: Any) -> Any:
    """The same environment to the bit, without what is slow for no reason.

    Instances copy one compiled model: 10 ms instead of 100 to 500. Contacts are searched as arrays: in push and
    pick-place the search took half of a step.
    """
    compiled: list[Any] = []

    def initialize(env: Any) -> tuple[Any, Any]:
        import mujoco

        if not compiled:
            compiled.append(kind._initialize_simulation(env)[0])
        model = copy(compiled[0])
        return model, mujoco.MjData(model)

    return type(kind.__name__, (kind,), {"_initialize_simulation": initialize, "touching_object": _touching})


def _touching(env: Any, geom: int) -> bool:
    """Whether both fingers press on an object."""
    contact, force = env.data.contact, env.data.efc_force
    on_object = (contact.geom == geom).any(1)
    fingers = (env.data.geom(name).id for name in ("leftpad_geom", "rightpad_geom"))
    touches = (on_object & (contact.geom == finger).any(1) for finger in fingers)
    return all(force[contact.efc_address[touch]].sum() > 0 for touch in touches)


def _observation_space(config: MetaWorldConfig) -> gymnasium.Space:
    dim, spaces = 39 if config.full_state else PROPRIOCEPTION, gymnasium.spaces
    dim += len(_suite(config)) if config.one_hot else 0
    picture = spaces.Box(0, 255, (config.render_size, config.render_size, 3), np.uint8)
    pictures = dict.fromkeys((IMAGE, WRIST_IMAGE)[: 1 + config.wrist_camera] if not config.full_state else (), picture)
    letters = frozenset("".join(INSTRUCTIONS.values()))
    return spaces.Dict(
        {STATE: spaces.Box(-np.inf, np.inf, (dim,), np.float32), PROMPT: spaces.Text(80, charset=letters), **pictures}
    )


def task_names(config: MetaWorldConfig) -> tuple[str, ...]:
    """Meta-World's names of the configured tasks."""
    if config.tasks is None:
        return _suite(config)
    for name in config.tasks:
        if name not in INSTRUCTIONS:
            raise did_you_mean(name, INSTRUCTIONS, kind="Meta-World task")
    if not config.tasks or len(set(config.tasks)) < len(config.tasks):
        raise EnvError(f"Meta-World tasks {config.tasks}", hint="name at least one, and each once")
    if config.one_hot and (strange := set(config.tasks) - set(_suite(config))):
        raise EnvError(f"{min(strange)} is not in {config.suite}, and has no number there", hint="env.suite MT50")
    return config.tasks


def _suite(config: MetaWorldConfig) -> tuple[str, ...]:
    return MT10 if config.suite == "MT10" else tuple(INSTRUCTIONS)


def _robot(config: MetaWorldConfig) -> str:
    if config.one_hot:
        return f"metaworld_{config.suite.lower()}"
    return "metaworld_full" if config.full_state else "metaworld"
