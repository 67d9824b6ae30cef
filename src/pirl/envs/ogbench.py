"""OGBench's manipulation tasks: a UR5e arm moves cubes, presses buttons, opens a drawer and a window (extra `ogbench`).

Reward and success come one step late, by OGBench's design (`success_timing="pre"`): a step reports on the state before
its action. So an episode continues for one action after the task is solved, and a task solved by the last action counts
as failed. OGBench's datasets are labelled this way, so it is kept.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import Float

from pirl.envs.config import OGBenchConfig
from pirl.envs.env import Outcome, RobotEnv
from pirl.envs.mujoco_render import Pictures, load
from pirl.errors import EnvError
from pirl.names import IMAGE, PROMPT, STATE
from pirl.records import Array, Context

_DATASETS = ("play", "noisy")
"""Kinds of OGBench's datasets. Task names contain one; the environment is the same for all."""
_FAMILIES = ("cube", "scene", "puzzle")
"""Prefixes of this robot's environments; OGBench also has mazes and others."""
_PROPRIOCEPTION = 19
"""Proprioceptive dimensions of the state, which come first; the others are positions of objects."""


class OGBenchEnv(RobotEnv):
    """Actions are steps of the gripper (x, y, z, yaw) and of its opening, clipped to [-1, 1].

    The state holds arm and objects; in a visual task (`visual-...`) only the arm, together with one image.
    """

    fps = 20
    action_dim = 5

    def __init__(self, config: OGBenchConfig) -> None:
        """Load the scene; the renderer starts with the first image."""
        self.config = config
        self.visual = config.task.startswith("visual-")
        self.tasks = (env_id(config.task),)
        self.robot = f"ogbench_{'visual' if self.visual else family(config.task).replace('-', '_')}"
        self.simulator, self.max_steps = make_simulator(self.tasks[0], config)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (self.action_dim,), np.float32)
        self.info: Mapping[str, Any] = {}
        """OGBench's `info` of the last step: places of arm and objects, for the oracles."""
        self._pictures: Pictures | None = None
        self._steps: int | None = None

    def begin(self, context: Context) -> None:
        """Start an episode; the context's `init` is OGBench's seed."""
        with warnings.catch_warnings():  # gymnasium's, at every reset, about the precision of OGBench's action space
            warnings.filterwarnings("ignore", message=".*precision lowered by casting")
            self.simulator.reset(seed=context.init)
        self.info = settle(self.simulator)
        self._steps = 0

    def act(self, action: Float[Array, "5"]) -> Outcome:
        """One control step of 50 ms."""
        if self._steps is None:
            raise EnvError("an action before the first episode", hint="begin an episode with a context first")
        _, reward, terminated, _, self.info = self.simulator.step(np.clip(action, -1.0, 1.0))
        self._steps += 1
        truncated = self._steps >= self.max_steps and not terminated
        return Outcome(
            sparse(reward) if self.config.sparse else reward, bool(terminated), truncated, bool(self.info["success"])
        )

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        """The state, and the image of a visual task."""
        seen: dict[str, Any] = {STATE: state_of(self.simulator, visual=self.visual), PROMPT: self.tasks[0]}
        if pictures and self.visual:
            seen[IMAGE] = self.picture()
        return seen

    def picture(self) -> Array:
        """Picture of the visual tasks' camera; the other tasks have it too, but look less clear."""
        if self._pictures is None:
            size = (self.config.render_size, self.config.render_size)
            self._pictures = Pictures(self.simulator.model, size, fast=self.config.fast_render)
        return self._pictures.take(self.simulator.data, "front_pixels")

    def close(self) -> None:
        """Free the renderer."""
        if self._pictures is not None:
            self._pictures.close()
            self._pictures = None


def env_id(task: str) -> str:
    """gymnasium's id of a task: its name without the kind of dataset."""
    parts = [part for part in task.split("-") if part not in _DATASETS]
    if "singletask" not in parts or parts[parts[0] == "visual"] not in _FAMILIES:
        raise EnvError(
            f"unknown OGBench task {task!r}",
            hint=f"name a singletask environment of {', '.join(_FAMILIES)}, such as {OGBenchConfig.task}",
        )
    return "-".join(parts)


def family(task: str) -> str:
    """Family of a task, such as `cube-single`."""
    return env_id(task).removeprefix("visual-").partition("-singletask")[0]


def make_simulator(name: str, config: OGBenchConfig, **options: Any) -> tuple[Any, int]:
    """(OGBench's environment without wrappers, its time limit in steps).

    In a visual task it would render at every step. The scene's appearance is decided when it is built, so build it
    first and then switch observations to states.
    """
    load("ogbench.manipspace", extra="ogbench", why="the OGBench simulator")
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error:
        known = [key for key in gymnasium.registry if key.startswith(name.partition("-singletask")[0])]
        raise EnvError(
            f"OGBench has no environment {name!r}", hint=f"it has {', '.join(known) or 'none like it'}"
        ) from None
    size = config.render_size
    made = gymnasium.make(name, disable_env_checker=True, width=size, height=size, **options).unwrapped
    simulator: Any = made
    simulator._mjcf_model = simulator.build_mjcf_model()
    simulator._ob_type = "states"
    return simulator, int(spec.max_episode_steps or 0)


def settle(simulator: Any) -> dict[str, Any]:
    """Make a reset deterministic; returns its info.

    To render its goal, OGBench's reset takes two steps with actions from an unseeded generator. It restores joints and
    objects, but not the state of solver and sensors. We have not seen that change an episode, but nothing rules it out,
    and a context must always start identically.
    """
    import mujoco

    model, data = simulator.model, simulator.data
    kept = {name: getattr(data, name).copy() for name in ("qpos", "qvel", "mocap_pos", "mocap_quat")}
    mujoco.mj_resetData(model, data)
    for name, value in kept.items():
        getattr(data, name)[:] = value
    mujoco.mj_forward(model, data)
    simulator.pre_step()
    simulator.post_step()
    simulator._success = False
    return simulator.get_reset_info()


def state_of(simulator: Any, *, visual: bool) -> Float[Array, "S"]:
    """The state; in a visual task only proprioception."""
    state = simulator.compute_observation().astype(np.float32)
    return state[:_PROPRIOCEPTION] if visual else state


def sparse(reward: Any) -> Any:
    """Q-chunking's reward for sparse tasks: -1 until everything is solved."""
    return (reward != 0) * -1.0
