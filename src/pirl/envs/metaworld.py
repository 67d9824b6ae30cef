"""Meta-World: a Sawyer arm at a table and fifty tasks, each with an instruction (extra `metaworld`).

Physics, tasks, rewards and success are Meta-World's. Its own rendering and its vector environments are not used: a
picture with shadows costs ten times as much, and every renderer holds the meshes of a scene, 100 MB. So the
environments of a process share one renderer per task, and borrow simulators from each other.
"""

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
"""The key of the picture that the gripper's camera takes."""
CAMERA, WRIST_CAMERA = "corner2", "gripperPOV"
"""Meta-World's names of the cameras."""
NEAR = (0.75, 0.075, 0.7)
"""Position of `corner2` in published visual results (masked world models, arXiv 2206.14244) and LeRobot."""
PROPRIOCEPTION = 4
"""Proprioceptive dimensions of the observation, which come first: position of the hand, opening of the gripper."""
_BEST_REWARD = 10.0


class MetaWorldEnv(RobotEnv):
    """Actions are steps of the hand (x, y, z; 1 is one centimetre) and the gripper's force (1 closes, -1 opens).

    Beyond -1 to 1 they are clipped, as in Meta-World. The reward is 1 for success and 0 before.
    """

    fps = 80
    action_dim = 4

    def __init__(self, config: MetaWorldConfig, worlds: "Worlds | None" = None) -> None:
        """Choose the tasks; a simulator is built when an episode begins. `worlds` are shared with other slots."""
        self.config = config
        names = task_names(config)
        self.names = {INSTRUCTIONS[name]: name for name in names}
        """Meta-World's name of each task."""
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
        """Hand, gripper and the pictures; or Meta-World's whole observation."""
        simulator = self.simulator
        state = simulator.seen if self.config.full_state else simulator.seen[:PROPRIOCEPTION]
        if self.config.one_hot:
            state = np.concatenate([state, [task == self._task for task in self._suite]])
        seen: dict[str, Any] = {STATE: state.astype(np.float32), PROMPT: self._task}
        if pictures and not self.config.full_state:
            # The camera hangs upside down: turning its picture by half a turn puts the table below the arm.
            turned = self._worlds.picture(simulator, CAMERA)[::-1, ::-1]
            seen[IMAGE] = np.ascontiguousarray(turned)
            if self.config.wrist_camera:
                seen[WRIST_IMAGE] = self._worlds.picture(simulator, WRIST_CAMERA)
        return seen

    def close(self) -> None:
        """Free simulators and renderers, also those of environments that share them."""
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
        self.inner.seeded_rand_vec = True  # places are drawn by the environment's own generator, not by NumPy's global
        self.inner._partially_observable = False  # as in the multi-task suites: the goal is part of the observation
        del self.inner.sawyer_observation_space  # cached with the goal hidden
        if near_camera:
            self.inner.model.camera(CAMERA).pos[:] = NEAR
        self.seen = np.zeros(39)
        """Meta-World's observation: hand, gripper and objects, the same one step ago, and the goal."""

    def restart(self, seed: int) -> None:
        """Put everything where the seed says.

        Meta-World moves the goal and the furniture in the model and looks before it computes where that puts them, so
        the first observation and picture would show the last episode's: compute it, and look again. Places alone: a
        whole `mj_forward` would also warm up the solver, and the episode would not be Meta-World's to the bit.
        """
        import mujoco

        self.inner.np_random = np.random.default_rng(seed)
        self.inner._freeze_rand_vec = False
        self.inner.reset_model()  # draws places until they suit the task
        self.inner._freeze_rand_vec = True  # a reset sets up the scene twice, and some tasks look at the first one
        self.inner.reset()
        mujoco.mj_kinematics(self.inner.model, self.inner.data)
        mujoco.mj_camlight(self.inner.model, self.inner.data)
        now = self.inner._get_curr_obs_combined_no_goal()
        self.inner._prev_obs = now
        self.seen = np.hstack([now, now, self.inner._get_pos_goal()])

    def step(self, action: Float[Array, "4"]) -> Step:
        """One control step; its own limit of 500 steps does not apply."""
        self.inner.curr_path_length = 0
        self.seen, reward, _, _, info = self.inner.step(np.clip(action, -1.0, 1.0))
        return Step(float(reward), bool(info["success"]))


class Worlds:
    """The simulators of one process, lent to its environments, and one renderer per task."""

    def __init__(self, config: MetaWorldConfig) -> None:
        self._config = config
        self._kinds = load("metaworld.env_dict", extra="metaworld", why="the Meta-World simulator").ALL_V3_ENVIRONMENTS
        self._spare: list[Simulator] = []
        self._pictures: dict[str, Pictures] = {}

    def borrow(self, name: str) -> Simulator:
        """An idle simulator of a task; a new one if there is none."""
        for simulator in self._spare:
            if simulator.name == name:
                self._spare.remove(simulator)
                return simulator
        return Simulator(name, self._kinds[name], near_camera=self._config.near_camera)

    def give_back(self, simulator: Simulator) -> None:
        """Keep a simulator for later; of too many, the one that was not needed longest goes."""
        self._spare.append(simulator)
        del self._spare[: -self._config.spare_simulators]

    def picture(self, simulator: Simulator, camera: str) -> Array:
        """What a camera sees now.

        The renderer belongs to another simulator of the same task: its meshes and colours are the same, and places
        are computed in the data.
        """
        if simulator.name not in self._pictures:
            size = (self._config.render_size, self._config.render_size)
            self._pictures[simulator.name] = Pictures(simulator.inner.model, size, fast=self._config.fast_render)
        return self._pictures[simulator.name].take(simulator.inner.data, camera)

    def close(self) -> None:
        """Free everything that is not lent."""
        for pictures in self._pictures.values():
            pictures.close()
        self._pictures.clear()
        self._spare.clear()


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
    """Meta-World's names of the tasks that a configuration chooses."""
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
