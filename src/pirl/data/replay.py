"""A replay buffer: the newest episodes of a run, bounded in number and in bytes, saved with the checkpoint.

Episodes are stored one file each, named after their number and a hash of their content, so saving writes only what is
new, restoring can tell a damaged file, and two histories of one run (resumed from an older checkpoint) never collide.
What a checkpoint has to remember is the small dictionary `save` returns.
"""

import hashlib
import threading
import zipfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from pirl.data.config import Imitated
from pirl.data.pool import Frames, Resident, low_dim_digest, make_resident
from pirl.data.takeovers import NO_MEANING, TakeoverRule
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.files import read_arrays, write_arrays
from pirl.names import EPISODE_FILE
from pirl.records import Array, Episode, EpisodeSource


class MemorySource(EpisodeSource):
    """Episodes with their pictures, held in memory. They never change."""

    def __init__(self, *, cameras: tuple[str, ...], items: Sequence[tuple[Episode, Frames]]) -> None:
        """`items` are the episodes, oldest first; each has pictures of every camera."""
        self._cameras, self.items = cameras, items

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras every episode has pictures of."""
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
        """Pictures of one episode."""
        return self.items[index][1]


@dataclass(frozen=True)
class _Stored:
    number: int
    """Counts the episodes ever appended; the file's name."""
    episode: Episode
    frames: Frames
    size: int
    """In bytes."""


class ReplayBuffer(EpisodeSource):
    """A ring of episodes; the oldest leave first.

    Only whole episodes enter, so no chunk can straddle the write position. Appending and reading may happen on
    different threads: readers work on a `snapshot`, which later appends and evictions leave alone.
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
        self._files: dict[int, str] = {}  # names of the episodes that have been hashed
        self._contents = MemorySource(cameras=cameras, items=())
        self._lock = threading.Lock()

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras every episode has pictures of."""
        return self._cameras

    @property
    def appended(self) -> int:
        """How many episodes were ever appended."""
        return self._appended

    @property
    def nbytes(self) -> int:
        """Bytes the episodes take now."""
        return self._bytes

    @property
    def lengths(self) -> Int[Array, "E"]:
        """Number of steps of each episode."""
        return self._contents.lengths

    def __len__(self) -> int:
        return len(self._ring)

    def episode(self, index: int) -> Episode:
        """Low-dimensional data of one episode, the oldest being number 0."""
        return self._contents.episode(index)

    def frames(self, index: int) -> Frames:
        """Pictures of one episode."""
        return self._contents.frames(index)

    def snapshot(self) -> MemorySource:
        """The contents at this moment: the same object as long as they are the same."""
        return self._contents

    def append(self, episode: Episode, frames: Frames) -> None:
        """Add an episode; the oldest are forgotten until it fits. The arrays are kept, not copied."""
        _check_frames(episode, frames, self.cameras)
        size = sum(array.nbytes for array in _columns(episode, frames).values())
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
        """Write the episodes that are not there yet; returns what `restore` needs (plain JSON).

        Files of forgotten episodes stay, because an older checkpoint may still name them: see `prune`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        with self._lock:
            ring, appended = tuple(self._ring), self._appended
        for stored in ring:
            if stored.number not in self._files:
                name = f"{stored.number:08d}-{_digest(stored.episode, stored.frames)}.npz"
                self._files[stored.number] = name
            if not (path := directory / self._files[stored.number]).exists():
                write_arrays(path, _columns(stored.episode, stored.frames))
        return {"appended": appended, "episodes": [self._files[stored.number] for stored in ring]}

    def restore(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Replace the contents by what `save` wrote; refuses missing or damaged files."""
        ring: deque[_Stored] = deque()
        for name in state["episodes"]:
            episode, frames = _read(directory / name, self.cameras)
            size = sum(array.nbytes for array in _columns(episode, frames).values())
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

    def _publish(self) -> None:
        items = tuple((replace(stored.episode, number=stored.number), stored.frames) for stored in self._ring)
        self._contents = MemorySource(cameras=self.cameras, items=items)


def prune(directory: Path, keep: Iterable[Mapping[str, Any]]) -> list[Path]:
    """Delete the episode files which none of these saved states names, and those of killed processes; returns which."""
    named = {name for state in keep for name in state["episodes"]}
    episodes = [path for path in sorted(directory.glob("*")) if EPISODE_FILE.fullmatch(path.name)]
    unused = [path for path in episodes if path.name not in named]
    for path in unused:
        path.unlink(missing_ok=True)
    return unused


class ReplayStream:
    """Draws from a replay buffer as it is when asked; the table is rebuilt only after it changed."""

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
        """What batch `step` is drawn from; None while the buffer is empty."""
        contents = self.replay.snapshot()
        if contents is not self._built[0]:
            self._built = (contents, self._build(contents))
        return self._built[1]

    def _build(self, contents: MemorySource) -> Resident | None:
        if len(contents) == 0:
            return None
        indices = np.arange(len(contents))
        return make_resident(contents, indices, frames=contents.frames, **self._rules)


def _columns(episode: Episode, frames: Frames) -> dict[str, Array]:
    """An episode and its pictures as arrays, ready for a file."""
    outcome = -1 if episode.success is None else int(episode.success)
    columns = {
        "task": np.array(episode.task),
        "success": np.array(outcome, np.int8),
        "state": episode.state,
        "actions": episode.actions,
        "rewards": episode.rewards,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
    }
    optional = {"intended": episode.intended, "intervention": episode.intervention, "observed": episode.observed}
    optional |= {f"frames.{camera}": pixels for camera, pixels in frames.items()}
    return columns | {name: column for name, column in optional.items() if column is not None}


def _digest(episode: Episode, frames: Frames) -> str:
    digest = hashlib.blake2b(low_dim_digest(episode), digest_size=8)
    for camera in sorted(frames):
        digest.update(f"{camera}{frames[camera].shape}".encode())
        digest.update(np.ascontiguousarray(frames[camera]).data.cast("B"))
    return digest.hexdigest()


def _read(path: Path, cameras: tuple[str, ...]) -> tuple[Episode, Frames]:
    """Read one file and check it against the hash in its name."""
    try:
        arrays = read_arrays(path)
        frames = {camera: arrays[f"frames.{camera}"] for camera in cameras}
        outcome = int(arrays["success"])
        names = ("state", "actions", "rewards", "terminated", "truncated")
        low_dim: dict[str, Any] = {name: arrays[name] for name in names}
        episode = Episode(
            task=str(arrays["task"]),
            success=None if outcome < 0 else bool(outcome),
            intended=arrays.get("intended"),
            intervention=arrays.get("intervention"),
            observed=arrays.get("observed"),
            **low_dim,
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", hint="restore the replay folder that belongs to it") from error
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} cannot be read as an episode of the cameras {cameras}: {error}",
            hint="the file is damaged, or the run had other cameras; restore the replay folder that belongs to it",
        ) from error
    if (found := _digest(episode, frames)) != path.stem.split("-")[-1]:
        raise CheckpointError(
            f"{path} holds other content than its name says (hash {found})",
            hint="the file was changed or damaged; restore the replay folder that belongs to the checkpoint",
        )
    return episode, frames


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
