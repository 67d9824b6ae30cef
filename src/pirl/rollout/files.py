"""Stores the finished episodes of an unfinished collection, so that an interruption loses only running ones."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from pirl.data import episode_store
from pirl.records import Array, Context, Rollout

ROLLOUTS = "rollouts"
"""Subfolder of a run for episodes of unfinished collections and evaluations."""


def save_rollouts(directory: Path, rollouts: Iterable[Rollout]) -> list[str]:
    """Write the episodes that are not on disk yet; return all names, for `load_rollouts`."""
    return [episode_store.write(directory, rollout.number, _arrays(rollout)) for rollout in rollouts]


def load_rollouts(directory: Path, names: Iterable[str]) -> list[Rollout]:
    """Read episodes; a missing or damaged file raises an error that names it."""
    return [episode_store.read(directory / name, _rollout) for name in names]


def _arrays(rollout: Rollout) -> dict[str, Array]:
    return {
        **episode_store.episode_arrays(rollout.episode),
        "context_task": np.array(rollout.context.task),
        "context_init": np.array(rollout.context.init, np.int64),
        "number": np.array(rollout.number, np.int64),
        "starts": rollout.starts,
        "frame_steps": rollout.frame_steps,
        **{f"frames.{key}": pixels for key, pixels in rollout.frames.items()},
        **{f"notes.{name}": values for name, values in rollout.notes.items()},
    }


def _rollout(arrays: Mapping[str, Array]) -> Rollout:
    return Rollout(
        context=Context(str(arrays["context_task"]), int(arrays["context_init"])),
        number=int(arrays["number"]),
        episode=episode_store.episode_of(arrays),
        starts=arrays["starts"],
        frame_steps=arrays["frame_steps"],
        frames=_under("frames.", arrays),
        notes=_under("notes.", arrays),
    )


def _under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
