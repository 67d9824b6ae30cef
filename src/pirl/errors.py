"""Errors a user can act on: what was found, what was expected, what to do.

The command line prints them without a traceback (`PIRL_DEBUG=1` shows it) and exits with 1.
"""

import difflib
from collections.abc import Iterable, Sequence


class PirlError(Exception):
    """Base class of pirl's errors; `hint` says what to do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint


class ConfigError(PirlError):
    """An invalid configuration value, preset or recipe."""


class CheckpointError(PirlError):
    """Weights or a checkpoint directory that cannot be read, do not fit, or would be overwritten."""


class DataError(PirlError):
    """A dataset that is unreadable or contradicts its metadata; names the file and the episode."""


class EnvError(PirlError):
    """An environment that cannot be made, misbehaves, or lacks what is asked of it."""


class WireError(PirlError):
    """A message between robot and server that violates the wire format."""


class MissingExtraError(PirlError):
    """An optional dependency that is needed but not installed."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(
            f"{why} needs the package {package!r}, which is not installed",
            hint=f"pip install 'pirl[{extra}]'",
        )


class PirlWarning(UserWarning):
    """Something that works but is probably unintended."""


def did_you_mean(name: str, known: Iterable[str], *, kind: str) -> ConfigError:
    """The error for an unknown name; suggests the nearest known ones."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    listed = ", ".join(near or known)
    return ConfigError(f"unknown {kind} {name!r}", hint=f"{'did you mean' if near else 'known are'}: {listed}")


def numbered(problems: Sequence[tuple[str, str]]) -> str:
    """A numbered list of (problem, hint) pairs."""
    return "\n".join(
        f"{number}. {message}" + (f"\n   hint: {hint}" if hint else "")
        for number, (message, hint) in enumerate(problems, 1)
    )


def listing(items: Sequence[str], limit: int = 10) -> str:
    """The first `limit` items, one per line, and the number of further ones."""
    lines = [f"    {item}" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"    ... and {len(items) - limit} more")
    return "\n".join(lines)
