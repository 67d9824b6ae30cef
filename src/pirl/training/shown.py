"""What an evaluation during training shows beside its numbers: films, and which initial states are solved now."""

from dataclasses import dataclass
from pathlib import Path

from pirl.records import Context

FOLDER = "films"
"""In a run's folder: films by step."""


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
