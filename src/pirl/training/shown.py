"""Visual output of an evaluation during training: videos and a table of solved initial states."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pirl.records import Context

FOLDER = "films"
"""Folder of the films in a run, one subfolder per step."""
_OURS = re.compile(r"(success|failure)-\d+\.mp4|filmstrip\.png|\..*")
"""Names of files that pirl writes into a step's film folder; hidden files are unfinished ones."""


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """Outcome of one initial state in the previous and the current evaluation."""

    task: str
    init: int
    before: bool | None
    """Solved in the previous evaluation; None if there was none in this process, or the episode was lost."""
    now: bool
    """Solved in this evaluation."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Media for sinks that take them."""

    films: tuple[Path, ...] = ()
    """Videos: successes, then failures."""
    strip: Path | None = None
    """All films as one image."""
    states: tuple[InitialState, ...] = ()
    """Every evaluated initial state."""


def states(before: dict[Context, bool], now: dict[Context, bool]) -> tuple[InitialState, ...]:
    """Pair two evaluations by initial state."""
    return tuple(InitialState(task=c.task, init=c.init, before=before.get(c), now=solved) for c, solved in now.items())


def thin_out(folder: Path, keep: int) -> None:
    """Keep only the films of the first evaluation and of the last `keep` - 1, to bound disk use.

    The latest always stay, because sinks are about to read them, as do step folders that hold other files.
    """
    steps = [child for child in folder.iterdir() if child.name.isdecimal() and child.is_dir()]
    steps.sort(key=lambda child: int(child.name))
    for step in steps[1 : -max(keep - 1, 1)]:
        if all(_OURS.fullmatch(file.name) for file in step.iterdir()):
            shutil.rmtree(step, ignore_errors=True)
