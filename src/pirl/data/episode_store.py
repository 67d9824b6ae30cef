"""Episodes as files beside a checkpoint: those of a replay buffer, and of a collection under way.

One `.npz` each, named by a number and a hash of its content. So it is written once, two histories of one run (resumed
from an older checkpoint) never collide, and a damaged file is refused.
"""

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pirl.errors import CheckpointError
from pirl.files import read_arrays, write_arrays
from pirl.names import EPISODE_FILE
from pirl.records import Array, Episode

_COLUMNS = ("state", "actions", "rewards", "terminated", "truncated", "intended", "intervention", "observed")
T = TypeVar("T")


def episode_arrays(episode: Episode) -> dict[str, Array]:
    """An episode as arrays, by name."""
    outcome = -1 if episode.success is None else int(episode.success)
    columns = {name: column for name in _COLUMNS if (column := getattr(episode, name)) is not None}
    return {"task": np.array(episode.task), "success": np.array(outcome, np.int8), **columns}


def episode_of(arrays: Mapping[str, Array]) -> Episode:
    """The inverse; other arrays are passed over."""
    outcome = int(arrays["success"])
    columns: dict[str, Any] = {name: arrays[name] for name in _COLUMNS if name in arrays}
    return Episode(task=str(arrays["task"]), success=None if outcome < 0 else bool(outcome), **columns)


def write(directory: Path, number: int, arrays: Mapping[str, Array]) -> str:
    """Write an episode if it is not there yet; returns the file's name."""
    name = f"{number:08d}-{_digest(arrays)}.npz"
    if not (directory / name).exists():
        write_arrays(directory / name, arrays)
    return name


def read(path: Path, make: Callable[[dict[str, Array]], T]) -> T:
    """The result of `make` on a file's arrays. A missing or damaged file is an error that names it."""
    try:
        arrays = read_arrays(path)
        if _digest(arrays) != path.stem.split("-")[-1]:
            raise ValueError("its content does not match the hash in its name")
        return make(arrays)
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read as an episode: {error}"
        hint = f"restore the run's {path.parent.name} folder, or resume from an earlier checkpoint"
        raise CheckpointError(f"{path} {problem}", hint=hint) from error


def keep_only(directory: Path, names: Iterable[str]) -> list[Path]:
    """Delete the episodes that are not named, and those that killed processes left unfinished; returns which."""
    kept = set(names)
    episodes = [path for path in sorted(directory.glob("*")) if EPISODE_FILE.fullmatch(path.name)]
    unused = [path for path in episodes if path.name not in kept]
    for path in unused:
        path.unlink(missing_ok=True)
    return unused


def _digest(arrays: Mapping[str, Array]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
