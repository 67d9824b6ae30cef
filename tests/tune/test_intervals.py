"""Student's t over seeds: the quantiles of the tables, and the coverage that is promised."""

import math

import numpy as np
import pytest

from pirl.tune.intervals import t_interval, t_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert t_quantile(freedom) == pytest.approx(expected, rel=1e-4)


def test_the_interval_of_three_seeds() -> None:
    mean, low, high = t_interval([0.5, 0.6, 0.7])
    assert mean == pytest.approx(0.6)
    assert high - mean == mean - low == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-4)


def test_one_seed_has_no_interval() -> None:
    mean, low, high = t_interval([0.5])
    assert mean == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def test_95_of_100_intervals_hold_the_truth() -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, (2000, 3))
    held = [low <= 3.0 <= high for _, low, high in map(t_interval, draws.tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=0.02)
