"""Names of the files that pirl writes. pirl deletes nothing else: unknown files are listed in an error and stay."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from pirl.errors import CheckpointError, listing
from pirl.names import ASSETS_ITEM, CHECKSUMS_FILE, HANDOVER_FILE, PARAMS_ITEM, SAFETENSORS_FILE, TRAIN_STATE_ITEM

RUN_FILES = (
    *("metadata.json", ".lock", "config.yaml", "metrics.jsonl", "metrics.csv", "first_batch.png"),
    *("report.html", "eval.json", "filmstrip.png", "held_out.json", "recoveries.json"),
)
RUN_FOLDERS = ("replay", "rollouts", "films", "evaluations", "compared_with", "tensorboard", "wandb")
STEP_NAMES = frozenset(
    (PARAMS_ITEM, TRAIN_STATE_ITEM, ASSETS_ITEM, "extra", "_CHECKPOINT_METADATA", "commit_success.txt")
)
EXPORT_NAMES = frozenset(
    (PARAMS_ITEM, ASSETS_ITEM, "_CHECKPOINT_METADATA", SAFETENSORS_FILE, "config.json", CHECKSUMS_FILE, HANDOVER_FILE)
)

_RUN = "|".join(map(re.escape, (*RUN_FILES, *RUN_FOLDERS)))
_IN_RUN = re.compile(
    rf"({_RUN})(\.partial)?|\.({_RUN})\.[0-9a-f]+(\.partial|\.tmp(\.\w+)?)?|(success|failure)-\d+\.mp4|\.(\d+(\.{TRAIN_STATE_ITEM})?|{_RUN})\.deleted"
    r"|\d+\.orbax-checkpoint-tmp.*|\d+\.diverged-\d+"
)
"""Files of a run besides its steps, including those that a killed process leaves."""


def foreign_in_run(directory: Path) -> list[str]:
    """Foreign files in a run's folder."""
    found = []
    for child in sorted(directory.iterdir()) if directory.is_dir() else []:
        if child.name.isdecimal() and child.is_dir():
            found += [f"{child.name}/{name}" for name in foreign_in_step(child)]
        elif not _IN_RUN.fullmatch(child.name):
            found.append(child.name)
    return found


def foreign_in_step(folder: Path) -> list[str]:
    """Foreign files in a step's folder."""
    return sorted(child.name for child in folder.iterdir() if child.name not in STEP_NAMES)


def check_only_ours(directory: Path, foreign: Iterable[str], *, doing: str = "deleted") -> None:
    """Raise if there are foreign entries: the folder must not be removed."""
    if names := list(foreign):
        raise CheckpointError(
            f"{directory} holds what pirl did not write and is not {doing}:\n{listing(names)}",
            hint="move that elsewhere, or choose another name",
        )


def is_export(folder: Path) -> bool:
    """Whether `pirl export` wrote this folder and nothing was added to it."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return {child.name for child in folder.iterdir()} <= EXPORT_NAMES and _writer(folder).startswith("pirl ")


def is_unfinished_export(folder: Path) -> bool:
    """Whether this can be the leftover of an interrupted export or replacement."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {child.name.split(".orbax-checkpoint-tmp")[0] for child in folder.iterdir()}
    return names <= EXPORT_NAMES | {"commit_success.txt"}


def _writer(folder: Path) -> str:
    """The program that wrote an export, by its own files."""
    try:
        if (file := folder / SAFETENSORS_FILE).is_file():
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                return str(json.loads(opened.read(min(size, 2**26)))["__metadata__"]["written_by"])
        return str(json.loads((folder / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]["written_by"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
