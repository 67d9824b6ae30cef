"""The 95 % interval of a mean over seeds, by Student's t."""

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
_POINTS = 200_001


def t_quantile(freedom: int, confidence: int | float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t: |t| stays below it with probability `confidence`.

    With t = sqrt(n) tan(θ) the density becomes cos(θ)^(n-1) on a finite range, which is integrated numerically.
    """
    angles = np.linspace(0.0, math.pi / 2, _POINTS)
    density = np.cos(angles) ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(confidence, share / share[-1], angles)))


def t_interval(values: Sequence[int | float]) -> tuple[float, float, float]:
    """Mean of the values and the ends of its interval; NaN for the ends if there is only one value."""
    found = np.asarray(values, np.float64)
    mean = float(found.mean())
    if len(found) < 2:
        return mean, math.nan, math.nan
    reach = t_quantile(len(found) - 1) * float(found.std(ddof=1)) / math.sqrt(len(found))
    return mean, mean - reach, mean + reach
