"""Shadow mode: run the policy on a recorded dataset as if its observations were requests, and compare the actions.

Nothing is sent to a robot. A small error does not make a policy good, but a large one reveals mistakes (another robot,
wrong statistics, swapped cameras) before they reach the robot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.data.recorded import Recorded
from pirl.errors import DataError, PirlError
from pirl.serve.planner import Planner


@dataclass(frozen=True, kw_only=True, eq=False)
class Shadow:
    """Differences between a policy's chunks and the recorded actions."""

    error: Float[np.ndarray, "H A"]
    """Mean absolute difference by step of the chunk and action dimension, in the robot's units."""
    hold: Float[np.ndarray, "H A"]
    """The same for holding the recorded action of the chunk's first step, a baseline any policy should beat."""
    spread: Float[np.ndarray, "A"]
    """Standard deviation of the recorded actions."""
    chunks: int
    """Number of compared chunks."""
    episodes: int
    """Number of episodes they are from."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values; steps beyond the longest episode are null."""
        named = {"error": self.error, "hold": self.hold, "spread": self.spread}
        arrays = {name: np.where(np.isnan(x), np.array(None), x).tolist() for name, x in named.items()}
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
    recorded = Recorded(planner.robot, dataset, size=planner.transform.image_size[0])
    horizon, dim = planner.config.horizon, planner.robot.action_dim
    total, held, counts = np.zeros((horizon, dim)), np.zeros((horizon, dim)), np.zeros(horizon)
    size = planner.batch_sizes[-1]
    chosen = recorded.meta.episodes[:episodes]
    for done, episode in enumerate(chosen, 1):
        steps = range(0, episode.length, stride)
        seen = zip(steps, recorded.observations(episode, steps), strict=True)
        taken = [(step, planner.row(one, number=(episode.index, step))) for step, one in seen]
        actions = recorded.actions[episode.start : episode.start + episode.length]
        for first in range(0, len(taken), size):
            part = taken[first : first + size]
            for (step, _), plan in zip(part, planner.plan([row for _, row in part]), strict=True):
                if isinstance(plan, PirlError):
                    raise plan
                was = actions[step : step + horizon]
                known = len(was)
                total[:known] += np.abs(plan.chunk[:known] - was)
                held[:known] += np.abs(was[:1] - was)
                counts[:known] += 1
        on_episode(done)
    if not counts.any():
        raise DataError(f"{recorded.meta.root} has no steps to compare with", hint="name a dataset with episodes")
    with np.errstate(invalid="ignore"):  # steps that no episode is long enough for are NaN
        mean = total / counts[:, None], held / counts[:, None]
    end = chosen[-1].start + chosen[-1].length
    spread = recorded.actions[chosen[0].start : end].std(0)
    return Shadow(error=mean[0], hold=mean[1], spread=spread, chunks=int(counts[0]), episodes=len(chosen))
