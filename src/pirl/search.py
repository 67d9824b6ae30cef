"""Search range of one setting: a list of values or an interval. No jax here."""

import json
from dataclasses import dataclass
from typing import Any

from pirl.training.config import ConstantSchedule, Schedule

Scalar = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of a list."""

    values: tuple[Scalar, ...]

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        """The values that must be valid: all."""
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
    """A number between two ends, both included."""

    low: int | float
    high: int | float
    log: bool = False
    """Sample its logarithm."""
    whole: bool = False
    """Whole numbers only."""

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        """The values that must be valid: both ends."""
        return (self.low, self.high)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{{low: {json.dumps(self.low)}, high: {json.dumps(self.high)}{', log: true' if self.log else ''}}}"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"low": self.low, "high": self.high, "log": self.log}

    def tidy(self, value: int | float) -> int | float:
        """Round a sample to four digits, within the range."""
        return int(value) if self.whole else min(max(float(f"{value:.4g}"), self.low), self.high)


Item = Choice | Range
"""The values to try for one setting."""


def around(schedule: Schedule, times: float = 4.0) -> Range:
    """Learning rates around the schedule's peak."""
    low, high = peak(schedule) / times, peak(schedule) * times
    return Range(low=float(f"{low:.2g}"), high=float(f"{high:.2g}"), log=True)


def peak(schedule: Schedule) -> float:
    """The schedule's highest learning rate."""
    return schedule.lr if isinstance(schedule, ConstantSchedule) else schedule.peak_lr
