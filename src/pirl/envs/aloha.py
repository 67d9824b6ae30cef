"""gym-aloha: two ViperX arms hand over a cube, or put a peg into a socket (extra `aloha`).

Physics, tasks and stages are gym-aloha's. Its environment is not used, because it renders three cameras of 480x640 at
every step, which takes a hundred times as long as the physics.
"""

from typing import Any

import gymnasium
import numpy as np
from jaxtyping import Float

from pirl.envs.config import AlohaConfig
from pirl.envs.env import Outcome, RobotEnv
from pirl.envs.mujoco_render import Pictures, load
from pirl.errors import EnvError
from pirl.names import PROMPT, STATE
from pirl.records import Array, Context

PROMPTS = {"transfer": "Transfer cube", "insertion": "Insert the peg"}
"""The instruction of each task; OpenPI's checkpoint was trained with that of `transfer`."""
FULL_STATE = {"transfer": "aloha_sim_full", "insertion": "aloha_sim_full_insertion"}
"""The robot of each task with `full_state`."""
PICTURE_KEYS = {
    "top": "cam_high",
    "front_close": "cam_low",
    "left_wrist": "cam_left_wrist",
    "right_wrist": "cam_right_wrist",
}
"""OpenPI's names of the cameras; others keep gym-aloha's, such as `cam_angle`."""

_SUCCESS = 4
"""gym-aloha's last stage: the left finger touches the lifted cube; the peg touches the pin in the socket."""


class AlohaEnv(RobotEnv):
    """Actions are absolute joint targets: six joints and a gripper (0 closed, 1 open), left arm first.

    The reward is 1 for success, which terminates the episode, and 0 before. If actions make the physics diverge, the
    episode terminates as a failure. Actions are not clipped: good ones leave gym-aloha's declared range of -1 to 1 (an
    elbow starts at 1.16).
    """

    fps = 50
    action_dim = 14

    def __init__(self, config: AlohaConfig) -> None:
        """Load the scene; the renderer starts with the first image."""
        modules = ("gym_aloha.tasks.sim", "gym_aloha.constants", "gym_aloha.utils", "dm_control.mujoco")
        self._sim, constants, sampling, dm_mujoco, control = (
            load(module, extra="aloha", why="the ALOHA simulator") for module in (*modules, "dm_control.rl.control")
        )
        self._diverged: type[Exception] = control.PhysicsError
        self.config = config
        self.robot = FULL_STATE[config.task] if config.full_state else "aloha_sim"
        self.tasks = (PROMPTS[config.task],)
        self.max_steps = config.max_steps
        if config.task == "transfer":
            scene, self._task, self._sample = "transfer_cube", self._sim.TransferCubeTask(), sampling.sample_box_pose
        else:
            scene, self._task = "insertion", self._sim.InsertionTask()
            self._sample = lambda seed: np.concatenate(sampling.sample_insertion_pose(seed))
        self._physics = dm_mujoco.Physics.from_xml_path(str(constants.ASSETS_DIR / f"bimanual_viperx_{scene}.xml"))
        self._substeps = round(constants.DT / self._physics.timestep())
        self.action_space = _action_space(self.model)
        self._pictures: Pictures | None = None
        self._steps: int | None = None

    @property
    def model(self) -> Any:
        """MuJoCo's model, for planners."""
        return self._physics.model.ptr

    @property
    def objects(self) -> Float[Array, "k 7"]:
        """Position and quaternion of the cube, or of peg and socket. Observed only with `full_state`."""
        return self._physics.data.qpos[16:].reshape(-1, 7).copy()

    def begin(self, context: Context) -> None:
        """Start an episode; the context's `init` is gym-aloha's seed."""
        # gym-aloha passes the objects' poses in a global that all environments share: set it at every start.
        self._sim.BOX_POSE[0] = self._sample(context.init % 2**32)
        self._task.initialize_episode(self._physics)
        self._steps = 0

    def act(self, action: Float[Array, "14"]) -> Outcome:
        """One control step of 20 ms."""
        if self._steps is None:
            raise EnvError("an action before the first episode", hint="begin an episode with a context first")
        before = self._physics.get_state()
        self._task.before_step(action.astype(np.float64), self._physics)
        self._steps += 1
        try:
            self._physics.step(self._substeps)
        except self._diverged:  # caused by the policy's actions: a failure, observed in the last valid state
            with self._physics.reset_context():
                self._physics.set_state(before)
            return Outcome(0.0, True, False, False)
        stage = self._task.get_reward(self._physics)
        success = stage == _SUCCESS
        reward = stage / _SUCCESS if self.config.staged_reward else float(success)
        return Outcome(reward, success, self._steps >= self.max_steps and not success, success)

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        """Joints and grippers in the units of actions, and images or (with `full_state`) the objects."""
        full = self.config.full_state
        state = np.concatenate([self._task.get_qpos(self._physics), *(self.objects if full else ())])
        seen: dict[str, Any] = {STATE: state.astype(np.float32), PROMPT: self.tasks[0]}
        if pictures and not full:
            for camera in self.config.cameras:
                seen[picture_key(camera)] = self._picture(camera)
        return seen

    def _picture(self, camera: str) -> Array:
        if self._pictures is None:
            self._pictures = Pictures(self.model, self.config.render_size, fast=self.config.fast_render)
        return self._pictures.take(self._physics.data.ptr, camera)

    def close(self) -> None:
        """Free the renderer."""
        if self._pictures is not None:
            self._pictures.close()
            self._pictures = None


def picture_key(camera: str) -> str:
    """The observation key of a camera's image."""
    return f"images/{PICTURE_KEYS.get(camera, f'cam_{camera}')}"


def _action_space(model: Any) -> gymnasium.spaces.Box:
    """Range of the joints; for information, nothing is clipped to it."""
    arms = [*range(6), *range(8, 14)]
    ranges = np.insert(model.jnt_range[arms], [6, 12], [0.0, 1.0], axis=0).astype(np.float32)
    return gymnasium.spaces.Box(ranges[:, 0], ranges[:, 1])
