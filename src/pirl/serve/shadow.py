"""Shadow mode: send a recorded dataset through the policy as requests would come, and compare with what was done.

Nothing is sent to a robot. Close to the data is not the same as good, but a policy that is far off where it should not
be (another robot, wrong statistics, swapped cameras) shows here and not on the robot.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.data import lerobot, rows, video
from pirl.data.create import find_columns
from pirl.data.dataset import read_tasks, read_vectors
from pirl.errors import DataError, PirlError
from pirl.serve.planner import Planner


@dataclass(frozen=True, kw_only=True, eq=False)
class Shadow:
    """How far a policy's chunks are from what was done."""

    error: Float[np.ndarray, "H A"]
    """Mean absolute difference by step of the chunk and action dimension, in the robot's units."""
    hold: Float[np.ndarray, "H A"]
    """The same for doing what was done at the chunk's first step all along: what any policy should beat."""
    spread: Float[np.ndarray, "A"]
    """Standard deviation of the recorded actions."""
    chunks: int
    """Chunks compared."""
    episodes: int
    """Episodes they are from."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        arrays = {name: getattr(self, name).tolist() for name in ("error", "hold", "spread")}
        return {"chunks": self.chunks, "episodes": self.episodes, **arrays}


def shadow(
    planner: Planner,
    dataset: str | Path,
    *,
    episodes: int | None = None,
    stride: int = 1,
    on_episode: Callable[[int], None] = lambda done: None,
) -> Shadow:
    """Compare a chunk at every `stride`-th step of the first `episodes` of a LeRobot dataset."""
    recorded = _Recorded(planner, dataset)
    horizon, dim = planner.config.horizon, planner.robot.action_dim
    total, held, counts = np.zeros((horizon, dim)), np.zeros((horizon, dim)), np.zeros(horizon)
    size = planner.batch_sizes[-1]
    chosen = recorded.meta.episodes[:episodes]
    for done, episode in enumerate(chosen, 1):
        taken = list(recorded.rows(episode, stride))
        actions = recorded.actions[episode.start : episode.start + episode.length]
        for first in range(0, len(taken), size):
            part = taken[first : first + size]
            for (step, _), plan in zip(part, planner.plan([row for _, row in part]), strict=True):
                if isinstance(plan, PirlError):
                    raise plan
                was = actions[step : step + horizon]
                steps = len(was)
                total[:steps] += np.abs(plan.chunk[:steps] - was)
                held[:steps] += np.abs(was[:1] - was)
                counts[:steps] += 1
        on_episode(done)
    if not counts.any():
        raise DataError(f"{recorded.meta.root} has no steps to compare with", hint="name a dataset with episodes")
    with np.errstate(invalid="ignore"):  # steps that no episode is long enough for are NaN
        mean = total / counts[:, None], held / counts[:, None]
    end = chosen[-1].start + chosen[-1].length
    spread = recorded.actions[chosen[0].start : end].std(0)
    return Shadow(error=mean[0], hold=mean[1], spread=spread, chunks=int(counts[0]), episodes=len(chosen))


class _Recorded:
    """A dataset, read as a robot would have sent it."""

    def __init__(self, planner: Planner, dataset: str | Path) -> None:
        self._planner, robot = planner, planner.robot
        self.meta, columns = rows.read_dataset(lerobot.resolve(dataset))
        state_keys, action_key = find_columns(robot, self.meta.features)
        self.state = read_vectors(self.meta, columns, state_keys)
        self.actions = robot.check(read_vectors(self.meta, columns, action_key), action_key, robot.action_dim)
        self._tasks = read_tasks(self.meta, columns)
        self._cameras = robot.find_cameras(self.meta.features, self.meta.cameras) if robot.cameras else {}

    def rows(self, episode: lerobot.EpisodeMeta, stride: int) -> Iterator[tuple[int, Any]]:
        """(step, row for the device) along one episode."""
        robot, place = self._planner.robot, self.meta.episodes.index(episode)
        size = self._planner.transform.image_size[0]
        films = {
            robot.cameras[slot][0]: video.read_frames(self.meta, episode, key, size=size, method="exact")
            for slot, key in self._cameras.items()
        }
        for step in range(0, episode.length, stride):
            seen = {key: film[step] for key, film in films.items()}
            seen[robot.state_keys[-1][0]] = self.state[episode.start + step]
            seen[robot.prompt_keys[0]] = self._tasks[place]
            yield step, self._planner.row(seen, number=(episode.index, step))
