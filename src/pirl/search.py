"""Search range of one setting: a list of values or an interval. Does not import jax."""

import json
from dataclasses import dataclass
from typing import Any

from pirl.training.config import ConstantSchedule, Schedule

Scalar = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of a list of values."""

    values: tuple[Scalar, ...]

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        """Values that must all be valid for the whole range to be valid."""
        return self.values

    def __contains__(self, value: object) -> bool:
        return any(value == one and type(value) is type(one) for one in self.values)

    def __str__(self) -> str:
        return f"[{', '.join(map(json.dumps, self.values))}]"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"values": list(self.values)}


@dataclass(frozen=True, kw_only=True)
class Range:
    """A number in the closed interval [low, high]."""

    low: int | float
    high: int | float
    log: bool = False
    """Sample log-uniformly."""
    whole: bool = False
    """Integers only."""

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        """Values that must all be valid for the whole range to be valid."""
        return (self.low, self.high)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{{low: {json.dumps(self.low)}, high: {json.dumps(self.high)}{', log: true' if self.log else ''}}}"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"low": self.low, "high": self.high, "log": self.log}

    def tidy(self, value: int | float) -> int | float:
        """Round a sample to four significant digits (or an integer), within the range."""
        return int(value) if self.whole else min(max(float(f"{value:.4g}"), self.low), self.high)


Item = Choice | Range
"""The search range of one setting."""


def around(schedule: Schedule, times: float = 4.0) -> Range:
    """A log range from peak / times to peak · times."""
    low, high = peak(schedule) / times, peak(schedule) * times
    return Range(low=float(f"{low:.2g}"), high=float(f"{high:.2g}"), log=True)


def peak(schedule: Schedule) -> float:
    """The schedule's highest learning rate."""
    return schedule.lr if isinstance(schedule, ConstantSchedule) else schedule.peak_lr
