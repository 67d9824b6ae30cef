"""The loop's state: finished generations, and files that mark the finished parts of the running one."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pirl.errors import DataError
from pirl.files import json_text, write_text

STATE_FILE = "state.json"
Decision = Literal["promote", "keep", "roll back"]
"""promote: the candidate is better and becomes the robot's policy. roll back: it is worse, and training continues from
the robot's policy. keep: undecided, the robot keeps its policy."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished generation."""

    number: int
    """From 1."""
    policy: str
    """The robot's policy during it, which collected."""
    candidate: str
    """The trained checkpoint."""
    collected: dict[str, Any]
    """Episodes, successes, and interventions of the collection."""
    held_out: dict[str, Any] | None
    """Success of the candidate in `pirl eval`."""
    comparison: dict[str, Any] | None
    """Result of the blind comparison; None if the held-out check made it unnecessary."""
    decision: Decision
    """The decision."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The loop between two generations."""

    policy: str
    """The robot's policy."""
    base: str
    """The checkpoint the next candidate is trained from."""
    finished: tuple[Generation, ...] = field(default=())
    """In order."""

    @property
    def number(self) -> int:
        """The generation that runs next."""
        return len(self.finished) + 1


def read(folder: Path, *, start: str) -> State:
    """The state, or that of a loop that begins."""
    file = folder / STATE_FILE
    if not file.exists():
        return State(policy=start, base=start)
    try:
        content = json.loads(file.read_text("utf-8"))
        finished = tuple(Generation(**one) for one in content.pop("finished"))
        return State(**content, finished=finished)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} cannot be read ({error})", hint="restore it, or begin a loop in another folder"
        ) from error


def write(folder: Path, state: State) -> None:
    """Replace the state, all or nothing."""
    write_text(folder / STATE_FILE, json_text(asdict(state)))


def read_part(folder: Path, name: str) -> Any:
    """The result of a finished part of a generation; None if it is not finished."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def write_part(folder: Path, name: str, content: Any) -> Any:
    """Mark a part as done; returns its result as a later call will read it."""
    write_text(folder / f"{name}.json", json_text(content))
    return read_part(folder, name)
