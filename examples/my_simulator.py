"""A stand-in for your own simulator and robot, used by examples 03, 05, 06 and 09.

A point on a plane has 12 steps to come near a goal. Use any `gymnasium.Env` with a vector action in the same way:
register it, describe the robot of its observations (`POINT`), and refer to both by module and name (`REACH`). From the
command line, `PYTHONPATH=examples pirl eval ...` finds this module too.
"""

from typing import Any

import gymnasium
import numpy as np

import pirl


class Reach(gymnasium.Env):
    """State: positions of the point and of the goal. Action: displacement, at most 0.2 along each axis."""

    observation_space = gymnasium.spaces.Box(-3, 3, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (gymnasium's own)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        angle = self.np_random.uniform(0, 2 * np.pi)
        self.place, self.goal = self.np_random.uniform(-0.2, 0.2, 2), np.array([np.cos(angle), np.sin(angle)])
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place = self.place + 0.2 * np.clip(action, -1, 1)
        there = bool(np.linalg.norm(self.place - self.goal) < 0.3)
        return self._seen(), float(there), there, False, {"is_success": there}

    def render(self) -> np.ndarray:
        picture = np.zeros((32, 32, 3), np.uint8)
        for place, colour in ((self.goal, (0, 200, 0)), (self.place, (255, 255, 255))):
            row, column = np.clip((place * [-1, 1] + 1.5) / 3 * 32, 1, 30).astype(int)
            picture[row - 1 : row + 2, column - 1 : column + 2] = colour
        return picture

    def _seen(self) -> np.ndarray:
        return np.concatenate([self.place, self.goal]).astype(np.float32)


gymnasium.register("Reach-v0", entry_point=Reach, max_episode_steps=12)

POINT = pirl.make_robot(name="point", state_dim=4, action_dim=2)
REACH = pirl.GymConfig(id="my_simulator:Reach-v0", robot="my_simulator:POINT", prompt="reach the goal")
