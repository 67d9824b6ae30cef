"""Replays a recorded dataset as observations in the robot's own keys, one at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pirl.data import lerobot, rows, video
from pirl.data.create import find_columns
from pirl.data.dataset import read_tasks, read_vectors
from pirl.data.robots import Robot


class Recorded:
    """One LeRobot dataset as observations of a robot."""

    def __init__(self, robot: Robot, dataset: str | Path, *, size: int) -> None:
        """Open the dataset; images are decoded to fit the model's `size`."""
        self._robot, self._size = robot, size
        self.meta, columns = rows.read_dataset(lerobot.resolve(dataset))
        state_keys, action_key = find_columns(robot, self.meta.features)
        self.state = read_vectors(self.meta, columns, state_keys)
        self.actions = robot.check(read_vectors(self.meta, columns, action_key), action_key, robot.action_dim)
        indices = (one.index for one in self.meta.episodes)
        self._tasks = dict(zip(indices, read_tasks(self.meta, columns), strict=True))
        self._cameras = robot.find_cameras(self.meta.features, self.meta.cameras) if robot.cameras else {}

    def observations(self, episode: lerobot.EpisodeMeta, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Observations at these steps of an episode."""
        robot = self._robot
        films = {
            robot.cameras[slot][0]: video.read_frames(self.meta, episode, key, size=self._size, method="exact")
            for slot, key in self._cameras.items()
        }
        for step in steps:
            seen: dict[str, Any] = {key: film[step] for key, film in films.items()}
            seen[robot.state_keys[-1][0]] = self.state[episode.start + step]
            seen[robot.prompt_keys[0]] = self._tasks[episode.index]
            yield seen
