"""The loop's state: finished generations, and files that mark finished parts of the current one."""

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
    """Number, from 1."""
    policy: str
    """Checkpoint of the robot's policy during it, which collected."""
    candidate: str
    """Checkpoint of the trained candidate."""
    collected: dict[str, Any]
    """Numbers of collected episodes, successes and corrected episodes."""
    held_out: dict[str, Any] | None
    """The candidate's success in `pirl eval`, if configured."""
    comparison: dict[str, Any] | None
    """Result of the blind comparison; None if the held-out check already failed."""
    decision: Decision
    """The outcome."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The loop between two generations."""

    policy: str
    """Checkpoint of the robot's policy."""
    base: str
    """The checkpoint the next candidate is trained from."""
    finished: tuple[Generation, ...] = field(default=())
    """Finished generations, in order."""

    @property
    def number(self) -> int:
        """Number of the next generation."""
        return len(self.finished) + 1


def read(folder: Path, *, start: str) -> State:
    """Read the state; without a file, the initial state with the policy `start`."""
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
    """Write the state atomically."""
    write_text(folder / STATE_FILE, json_text(asdict(state)))


def read_part(folder: Path, name: str) -> Any:
    """The stored result of a generation's part; None if the part is not done."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def write_part(folder: Path, name: str, content: Any) -> Any:
    """Store a part's result, which marks it as done; returns it as read back from JSON."""
    write_text(folder / f"{name}.json", json_text(content))
    return read_part(folder, name)
