"""Features of the end of an episode: the mean over its last frames; one row per episode."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.data.recorded import Recorded
from pirl.training.acting import Acting
from pirl.training.features import Features

LAST = 3
"""Number of last frames used per episode."""


class EpisodeFeatures:
    """End-of-episode features from one checkpoint, for any number of datasets; compiled once."""

    def __init__(self, acting: Acting) -> None:
        """Datasets are read with the checkpoint's robot."""
        self._features = Features(acting)

    def of(self, dataset: str | Path) -> tuple[tuple[int, ...], Float[np.ndarray, "E D"]]:
        """(episode indices, one feature row per episode)."""
        transform = self._features.transform
        recorded = Recorded(transform.robot, dataset, size=transform.image_size[0])
        episodes = recorded.meta.episodes

        def ends() -> Iterator[dict[str, Any]]:
            for episode in episodes:
                yield from recorded.observations(episode, range(max(0, episode.length - LAST), episode.length))

        rows = self._features.of(ends()).astype(np.float64)
        counts = np.array([min(LAST, episode.length) for episode in episodes])
        each = np.add.reduceat(rows, np.append(0, counts.cumsum()[:-1])) / counts[:, None]
        return tuple(one.index for one in episodes), each
