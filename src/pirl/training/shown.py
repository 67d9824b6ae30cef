"""Visual output of an evaluation during training: videos, and which initial states are newly solved."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pirl.records import Context

FOLDER = "films"
"""In a run's folder: films by step."""
_OURS = re.compile(r"(success|failure)-\d+\.mp4|filmstrip\.png|\..*")
"""Files in the folder of a step that were filmed; hidden ones are unfinished."""


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """An initial state, by the evaluation before and by this one."""

    task: str
    init: int
    before: bool | None
    """Solved then? None: there was none since the run was started, or the episode was lost."""
    now: bool
    """Solved now?"""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """For services that take media."""

    films: tuple[Path, ...] = ()
    """Videos: successes, then failures."""
    strip: Path | None = None
    """All of them in one picture."""
    states: tuple[InitialState, ...] = ()
    """Every evaluated initial state."""


def states(before: dict[Context, bool], now: dict[Context, bool]) -> tuple[InitialState, ...]:
    """Pair two evaluations by initial state."""
    return tuple(InitialState(task=c.task, init=c.init, before=before.get(c), now=solved) for c, solved in now.items())


def thin_out(folder: Path, keep: int) -> None:
    """Delete films but those of the first evaluation and of the last `keep` - 1: a long run must not fill the disk.

    The latest always stay: services are about to read them. So does a step's folder that holds anything else.
    """
    steps = [child for child in folder.iterdir() if child.name.isdecimal() and child.is_dir()]
    steps.sort(key=lambda child: int(child.name))
    for step in steps[1 : -max(keep - 1, 1)]:
        if all(_OURS.fullmatch(file.name) for file in step.iterdir()):
            shutil.rmtree(step, ignore_errors=True)
