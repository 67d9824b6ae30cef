"""Records of recoveries: the step a run went back to, why, the changed settings, the skipped batches.

They are stored in the run folder, not in checkpoints, so that a resumed run keeps the changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pirl.checkpoints.ocdbt import read_json
from pirl.config import RLTrainConfig
from pirl.config_io import Change, diff, to_dict, with_settings
from pirl.errors import CheckpointError
from pirl.files import json_text, write_text
from pirl.nested import flatten

FILE = "recoveries.json"
METRIC = "recovery/times"
"""Number of recoveries so far; logged from the first one on."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One recovery."""

    kind: Literal["diverged", "memory"]
    """The cause."""
    reason: str
    """The error."""
    back_to: int
    """The step it went back to."""
    changes: Mapping[str, tuple[Any, Any]]
    """Setting (dotted) -> (old value, new value)."""
    skipped: tuple[int, int] = (0, 0)
    """Skipped dataset batches: [first, end)."""

    def __str__(self) -> str:
        first, end = self.skipped
        given_up = [f"{path} {old} -> {new}" for path, (old, new) in self.changes.items()]
        given_up += [f"{end - first} batch(es) left out"] if end > first else []
        return f"back to step {self.back_to} ({self.reason}): {', '.join(given_up)}"


def read(folder: Path) -> tuple[Recovery, ...]:
    """All recoveries of a run, oldest first."""
    file = folder / FILE
    if not file.is_file():
        return ()
    try:
        return tuple(_recovery(**one) for one in read_json(file)["recoveries"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {type(error).__name__}: {error}",
            hint="without it the run continues with its given settings and all batches",
        ) from error


def write(folder: Path, recoveries: Sequence[Recovery]) -> None:
    """Write recoveries to the run folder; no file for none."""
    if recoveries:
        write_text(folder / FILE, json_text({"recoveries": [asdict(one) for one in recoveries]}))


def remembered(config: RLTrainConfig, recoveries: Sequence[Recovery]) -> RLTrainConfig:
    """The configuration with the recoveries' changes reapplied, except to settings that the user has changed since."""
    for one in recoveries:
        now = flatten(to_dict(config), ".")
        config = with_settings(config, {path: new for path, (old, new) in one.changes.items() if now.get(path) == old})
    return config


def changes_between(before: RLTrainConfig, after: RLTrainConfig) -> dict[str, tuple[Any, Any]]:
    """The differences, as in `Recovery.changes`."""
    found: list[Change] = diff(before, after)
    return {path: (old, new) for path, old, new in found}


def beyond(position: Mapping[str, Any], recoveries: Sequence[Recovery]) -> dict[str, Any]:
    """A stream's position, moved past skipped batches."""
    if "data" not in position:
        return dict(position)
    step = int(position["data"]["step"])
    while ends := [end for first, end in (one.skipped for one in recoveries) if first <= step < end]:
        step = max(ends)
    return {**position, "data": {**position["data"], "step": step}}


def _recovery(*, changes: Mapping[str, Sequence[Any]], skipped: Sequence[int], **rest: Any) -> Recovery:
    """From JSON, where pairs are lists."""
    pairs = {path: (old, new) for path, (old, new) in changes.items()}
    first, end = skipped
    return Recovery(changes=pairs, skipped=(int(first), int(end)), **rest)
