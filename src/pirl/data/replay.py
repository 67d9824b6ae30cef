"""A replay buffer: the newest episodes of a run, bounded in number and in bytes, saved with the checkpoint.

Episodes are stored one file each (`episode_store`), so saving writes only what is new. A checkpoint remembers the small
dictionary that `save` returns.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from pirl.data import episode_store
from pirl.data.config import Imitated
from pirl.data.pool import Frames, Resident, make_resident
from pirl.data.takeovers import NO_MEANING, TakeoverRule
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.records import Array, Episode, EpisodeSource


class MemorySource(EpisodeSource):
    """Episodes and their images in memory. Immutable."""

    def __init__(self, *, cameras: tuple[str, ...], items: Sequence[tuple[Episode, Frames]]) -> None:
        """`items` are the episodes, oldest first; each has images of every camera."""
        self._cameras, self.items = cameras, items

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras of every episode."""
        return self._cameras

    @property
    def lengths(self) -> Int[Array, "E"]:
        """Number of steps of each episode."""
        return np.array([len(episode) for episode, _ in self.items], np.int64)

    def __len__(self) -> int:
        return len(self.items)

    def episode(self, index: int) -> Episode:
        """Low-dimensional data of one episode."""
        return self.items[index][0]

    def frames(self, index: int) -> Frames:
        """Images of one episode."""
        return self.items[index][1]


@dataclass(frozen=True)
class _Stored:
    number: int
    """Sequence number of the episode among all ever appended; part of the file name."""
    episode: Episode
    frames: Frames
    size: int
    """In bytes."""


class ReplayBuffer(EpisodeSource):
    """A FIFO ring of episodes.

    Holds whole episodes only, so no chunk can straddle the write position. Different threads may append and read:
    readers use a `snapshot`, which later appends and evictions do not change.
    """

    def __init__(self, *, cameras: tuple[str, ...], max_episodes: int, max_bytes: int) -> None:
        if max_episodes < 1 or max_bytes < 1:
            raise ConfigError(
                f"a replay buffer of {max_episodes} episodes and {max_bytes} bytes can hold nothing",
                hint="both limits must be at least 1",
            )
        self._cameras = cameras
        self.max_episodes = max_episodes
        self.max_bytes = max_bytes
        self._ring: deque[_Stored] = deque()
        self._appended = 0
        self._bytes = 0
        self._files: dict[int, str] = {}  # file names by number, of episodes that have been hashed
        self._contents = MemorySource(cameras=cameras, items=())
        self._lock = threading.Lock()

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras of every episode."""
        return self._cameras

    @property
    def appended(self) -> int:
        """Number of episodes ever appended."""
        return self._appended

    @property
    def nbytes(self) -> int:
        """Current size in bytes."""
        return self._bytes

    @property
    def lengths(self) -> Int[Array, "E"]:
        """Number of steps of each episode."""
        return self._contents.lengths

    def __len__(self) -> int:
        return len(self._ring)

    def episode(self, index: int) -> Episode:
        """Low-dimensional data of one episode; 0 is the oldest."""
        return self._contents.episode(index)

    def frames(self, index: int) -> Frames:
        """Images of one episode."""
        return self._contents.frames(index)

    def snapshot(self) -> MemorySource:
        """The current contents; the same object until they change."""
        return self._contents

    def append(self, episode: Episode, frames: Frames) -> None:
        """Add an episode, evicting the oldest until it fits. Keeps the arrays without copying them."""
        _check_frames(episode, frames, self.cameras)
        size = sum(array.nbytes for array in _arrays(episode, frames).values())
        if size > self.max_bytes:
            raise DataError(
                f"an episode of {len(episode)} steps takes {size} bytes, the replay buffer holds {self.max_bytes}",
                hint="raise the replay buffer's max_bytes, or store smaller pictures",
            )
        with self._lock:
            while self._ring and (len(self._ring) >= self.max_episodes or self._bytes + size > self.max_bytes):
                gone = self._ring.popleft()
                self._bytes -= gone.size
                self._files.pop(gone.number, None)
            self._ring.append(_Stored(self._appended, episode, {name: frames[name] for name in self.cameras}, size))
            self._appended += 1
            self._bytes += size
            self._publish()

    def save(self, directory: Path) -> dict[str, Any]:
        """Write the episodes that have no file yet; returns the state for `restore` (plain JSON).

        Files of forgotten episodes stay, because an older checkpoint may still name them.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with self._lock:
            ring, appended = tuple(self._ring), self._appended
        for stored in ring:
            name = self._files.get(stored.number)
            if name is None or not (directory / name).exists():
                arrays = _arrays(stored.episode, stored.frames)
                self._files[stored.number] = episode_store.write(directory, stored.number, arrays)
        return {"appended": appended, "episodes": [self._files[stored.number] for stored in ring]}

    def restore(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Replace the contents with those `save` wrote; raises for missing or damaged files."""
        ring: deque[_Stored] = deque()
        for name in state["episodes"]:
            episode, frames = episode_store.read(directory / name, self._of)
            size = sum(array.nbytes for array in _arrays(episode, frames).values())
            ring.append(_Stored(int(name.split("-")[0]), episode, frames, size))
        total = sum(stored.size for stored in ring)
        if len(ring) > self.max_episodes or total > self.max_bytes:
            raise CheckpointError(
                f"{directory}: {len(ring)} episodes of {total} bytes do not fit the replay buffer's limits of "
                f"{self.max_episodes} episodes and {self.max_bytes} bytes",
                hint="resume with the limits the run began with, or larger ones",
            )
        with self._lock:
            self._ring, self._bytes, self._appended = ring, total, int(state["appended"])
            self._files = {stored.number: name for stored, name in zip(ring, state["episodes"], strict=True)}
            self._publish()

    def _of(self, arrays: Mapping[str, Array]) -> tuple[Episode, Frames]:
        return episode_store.episode_of(arrays), {camera: arrays[f"frames.{camera}"] for camera in self.cameras}

    def _publish(self) -> None:
        items = tuple((replace(stored.episode, number=stored.number), stored.frames) for stored in self._ring)
        self._contents = MemorySource(cameras=self.cameras, items=items)


class ReplayStream:
    """The replay buffer's current contents as a `Resident`, rebuilt only after they changed."""

    def __init__(
        self,
        replay: ReplayBuffer,
        *,
        discount: float,
        balance: bool = False,
        imitated: Imitated = "all",
        takeovers: TakeoverRule = NO_MEANING,
    ) -> None:
        self.replay = replay
        self._rules: dict[str, Any] = {"discount": discount, "balance": balance, "imitated": imitated}
        self._rules["takeovers"] = takeovers
        self._built: tuple[MemorySource | None, Resident | None] = (None, None)

    def resident(self, step: int) -> Resident | None:
        """The rows that batch `step` is drawn from; None while the buffer is empty."""
        contents = self.replay.snapshot()
        if contents is not self._built[0]:
            self._built = (contents, self._build(contents))
        return self._built[1]

    def _build(self, contents: MemorySource) -> Resident | None:
        if len(contents) == 0:
            return None
        indices = np.arange(len(contents))
        return make_resident(contents, indices, frames=contents.frames, **self._rules)


def _arrays(episode: Episode, frames: Frames) -> dict[str, Array]:
    pictures = {f"frames.{camera}": pixels for camera, pixels in frames.items()}
    return episode_store.episode_arrays(episode) | pictures


def _check_frames(episode: Episode, frames: Frames, cameras: tuple[str, ...]) -> None:
    missing = [camera for camera in cameras if camera not in frames]
    wrong = [f"{camera} {frames[camera].dtype}{list(frames[camera].shape)}" for camera in cameras if camera in frames]
    if missing or any(
        frames[camera].dtype != np.uint8 or frames[camera].ndim != 4 or len(frames[camera]) != len(episode)
        for camera in cameras
    ):
        raise DataError(
            f"an episode of {len(episode)} steps ({episode.task!r}) came with the pictures {wrong}",
            hint=f"expected uint8 [{len(episode)}, h, w, 3] of each of {list(cameras)}",
        )
