"""Stores the finished episodes of an unfinished collection, so that an interrupted run loses only running ones.

One `.npz` per episode, named by its number and a hash of its content: written once, distinct from another history of
the run, and refused if damaged.
"""

import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pirl.errors import CheckpointError
from pirl.files import read_arrays, write_arrays
from pirl.names import EPISODE_FILE
from pirl.records import Array, Context, Episode, Rollout

ROLLOUTS = "rollouts"
"""In a run's folder: episodes of collections and evaluations under way."""
_EPISODE = ("state", "actions", "rewards", "terminated", "truncated", "intended")


def save_rollouts(directory: Path, rollouts: Iterable[Rollout]) -> list[str]:
    """Write missing episodes; return the names for `load_rollouts`."""
    names = []
    for rollout in rollouts:
        arrays = _arrays(rollout)
        name = f"{rollout.number:08d}-{_digest(arrays)}.npz"
        if not (directory / name).exists():
            write_arrays(directory / name, arrays)
        names.append(name)
    return names


def load_rollouts(directory: Path, names: Iterable[str]) -> list[Rollout]:
    """Read episodes; a missing or damaged file raises an error that names it."""
    return [_read(directory / name) for name in names]


def delete_rollouts(directory: Path, keep: Iterable[str] = ()) -> None:
    """Remove all episodes but those named, and what killed processes left of some."""
    kept = set(keep)
    for path in directory.glob("*"):
        if EPISODE_FILE.fullmatch(path.name) and path.name not in kept:
            path.unlink(missing_ok=True)


def _arrays(rollout: Rollout) -> dict[str, Array]:
    episode = rollout.episode
    return {
        "context_task": np.array(rollout.context.task),
        "context_init": np.array(rollout.context.init, np.int64),
        "number": np.array(rollout.number, np.int64),
        "starts": rollout.starts,
        "frame_steps": rollout.frame_steps,
        "task": np.array(episode.task),
        "success": np.array(-1 if episode.success is None else int(episode.success), np.int8),
        **{name: value for name in _EPISODE if (value := getattr(episode, name)) is not None},
        **{f"frames.{key}": pixels for key, pixels in rollout.frames.items()},
        **{f"notes.{name}": values for name, values in rollout.notes.items()},
    }


def _digest(arrays: Mapping[str, Array]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _read(path: Path) -> Rollout:
    try:
        arrays = read_arrays(path)
        if _digest(arrays) != path.stem.split("-")[-1]:
            raise ValueError("its content does not match the hash in its name")
        outcome = int(arrays["success"])
        low_dim: dict[str, Any] = {name: arrays[name] for name in _EPISODE if name in arrays}
        return Rollout(
            context=Context(str(arrays["context_task"]), int(arrays["context_init"])),
            number=int(arrays["number"]),
            episode=Episode(
                task=str(arrays["task"]),
                success=None if outcome < 0 else bool(outcome),
                **low_dim,
            ),
            starts=arrays["starts"],
            frame_steps=arrays["frame_steps"],
            frames=_under("frames.", arrays),
            notes=_under("notes.", arrays),
        )
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} cannot be read as an episode: {error}",
            hint="restore the run's rollouts folder, or resume from an earlier checkpoint",
        ) from error


def _under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
