"""Human-readable numbers: axes with round ticks, a sensible number of digits."""

import math
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from jaxtyping import Float

LOG_DECADES = 3
"""A positive metric that spans more decades than this is drawn on a logarithmic axis."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values with ticks."""

    low: float
    high: float
    log: bool = False
    """Whether it is logarithmic; then both ends are positive."""
    ticks: tuple[float, ...]
    """Values to label, all within the range."""

    def place(self, values: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """Positions of values, 0 at the low end and 1 at the high end; NaN stays NaN."""
        if self.log:
            # Values at or below 0 become gaps instead of raising warnings.
            values = np.log10(np.where(values > 0, values, np.nan))
            low, high = math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        return (values - low) / (high - low)


def axis(values: Float[np.ndarray, "n"], *, count: int = 5) -> Axis:
    """An axis for these values with margins and round ticks; logarithmic if they span more than LOG_DECADES."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low > 0 and high / low > 10**LOG_DECADES:
        return _log_axis(low, high, count)
    if low == high:
        room = abs(low) * 0.1 or 1.0
    else:
        room = (high - low) * 0.06
    if low >= 0 > low - room:  # no negative range for non-negative values
        low, high = 0.0, high + room
    else:
        low, high = low - room, high + room
    return Axis(low=low, high=high, ticks=nice_ticks(low, high, count))


def span(low: float, high: float, *, count: int = 5) -> Axis:
    """An axis of exactly this range."""
    return Axis(low=low, high=high, ticks=nice_ticks(low, high, count))


def nice_ticks(low: int | float, high: int | float, count: int = 5) -> tuple[float, ...]:
    """At most `count` + 1 multiples of 1, 2, 2.5 or 5 times a power of ten, within the range."""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return (low,) if math.isfinite(low) else ()
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1))


def _log_axis(low: float, high: float, count: int) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, -(-(last - first) // count))
    ticks = tuple(float(f"1e{power}") for power in range(first, last + 1, every))
    return Axis(low=float(f"1e{first}"), high=float(f"1e{last}"), log=True, ticks=ticks)


def number(value: int | float, digits: int = 3) -> str:
    """Three significant digits; thousands are grouped, very small values get an exponent."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 10 ** max(digits, 3):
        return f"{value:,.0f}" if size < 1e7 else f"{value / 1e6:,.3g}M" if size < 1e9 else f"{value:.3g}"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_trim(mantissa)}e{int(exponent)}"
    return _trim(f"{value:.{max(0, digits - 1 - (math.floor(math.log10(size)) if size else 0))}f}")


def tick(value: int | float) -> str:
    """A short label for an axis, such as 20k."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{unit}"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{_trim(mantissa)}e{int(exponent)}"
    return f"{value:.4g}"


def percent(value: int | float) -> str:
    """A share in per cent, to one decimal."""
    return "–" if not math.isfinite(value) else f"{_trim(f'{100 * value:.1f}')} %"


def duration(seconds: int | float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    whole = timedelta(seconds=round(max(seconds, 0.0)))
    days, (hours, rest) = whole.days, divmod(whole.seconds, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {left:02d} s" if minutes else f"{left} s"


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
