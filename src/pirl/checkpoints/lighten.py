"""Reduces old steps to the policy's weights: several times smaller, not resumable."""

import os
from pathlib import Path

from pirl.checkpoints.checksums import IN_STEP, read_checksums, write_checksums
from pirl.checkpoints.ownership import foreign_in_step
from pirl.names import TRAIN_STATE_ITEM


def can_be_resumed(folder: Path) -> bool:
    """Whether a step has a training state."""
    return (folder / TRAIN_STATE_ITEM).is_dir()


def drop_train_state(folder: Path) -> None:
    """Move a step's training state out of it, to be deleted later. Crash-safe: until the move the step is complete."""
    if not can_be_resumed(folder) or foreign_in_step(folder):
        return
    sums = read_checksums(folder)
    if kept := {name: text for name, text in sums.items() if not name.startswith(f"{TRAIN_STATE_ITEM}/")}:
        write_checksums(folder / IN_STEP, kept)
    os.rename(folder / TRAIN_STATE_ITEM, folder.parent / f".{folder.name}.{TRAIN_STATE_ITEM}.deleted")
