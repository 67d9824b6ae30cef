"""Success classifier: logistic regression, with thresholds from held-out scores.

    p(x) = 1 / (1 + exp(-(w·z + b))),  z = (x - mean)/std      min Σ_i log(1 + exp(-y_i (w·z_i + b))) + λ/2 ‖w‖²

Labelled episodes are scored by K-fold cross-validation. On these held-out scores the thresholds are chosen, above
(below) which the required share of episodes are successes (failures).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from pirl.errors import DataError

STRENGTH = 1.0
"""λ, for standardised features. There are more features than episodes, so the fit must be regularised."""
FOLDS = 5
LEAST = 5
"""Fewest episodes on one side of a threshold for an estimate of precision."""


class Logistic(NamedTuple):
    """A fitted logistic regression."""

    mean: Float[np.ndarray, "D"]
    std: Float[np.ndarray, "D"]
    weight: Float[np.ndarray, "D"]
    bias: float

    def scores(self, x: Float[np.ndarray, "E D"]) -> Float[np.ndarray, "E"]:
        """Probability of success per episode."""
        return _sigmoid((x - self.mean) / self.std @ self.weight + self.bias)


class Thresholds(NamedTuple):
    """Scores from which an episode is labelled success or failure; None if no threshold reaches the precision."""

    success: float | None
    failure: float | None

    def call(self, score: float) -> bool | None:
        """The label for a score; None leaves the episode to a person."""
        if self.success is not None and score >= self.success:
            return True
        return False if self.failure is not None and score <= self.failure else None


def fit(x: Float[np.ndarray, "E D"], y: Bool[np.ndarray, "E"], strength: float = STRENGTH) -> Logistic:
    """The unique optimum, by Newton's method in the span of the episodes' features."""
    mean, std = x.mean(0), x.std(0)
    std = np.where(std > 1e-6 * np.maximum(np.abs(mean), 1.0), std, np.inf)  # constant features get weight 0
    z = (x - mean) / std
    left, size, right = np.linalg.svd(z, full_matrices=False)
    rows = np.concatenate([left * size, np.ones((len(z), 1))], axis=1)
    penalty = np.append(np.full(len(size), strength), 1e-6)
    found = np.zeros(len(penalty))
    for _ in range(100):
        p = _sigmoid(rows @ found)
        gradient = rows.T @ (p - y) + penalty * found
        curvature = (rows * (p * (1 - p))[:, None]).T @ rows + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        found = found - step / max(1.0, float(np.linalg.norm(step)) / 10)  # limit the first steps
        if np.abs(step).max() < 1e-9:
            break
    return Logistic(mean, std, right.T @ found[:-1], float(found[-1]))


def folds(y: Bool[np.ndarray, "E"], count: int, seed: int = 0) -> Int[np.ndarray, "E"]:
    """The fold of each episode: random, stratified by outcome."""
    rng, found = np.random.default_rng(seed), np.zeros(len(y), int)
    dealt = np.concatenate([rng.permutation(np.flatnonzero(y == kind)) for kind in (True, False)])
    found[dealt] = np.arange(len(y)) % count
    return found


def held_out_scores(
    x: Float[np.ndarray, "E D"], y: Bool[np.ndarray, "E"], *, count: int = FOLDS, strength: float = STRENGTH
) -> Float[np.ndarray, "E"]:
    """Each episode's score by a model fitted on the other folds."""
    if min(y.sum(), (~y).sum()) < 2:
        raise DataError(
            f"{int(y.sum())} successes and {int((~y).sum())} failures are known: a classifier needs both",
            hint="label some episodes of each kind first: pirl label DATASET",
        )
    fold = folds(y, min(count, int(y.sum()), int((~y).sum())))
    found = np.zeros(len(y))
    for number in range(fold.max() + 1):
        out = fold == number
        found[out] = fit(x[~out], y[~out], strength).scores(x[out])
    return found


def threshold(scores: Float[np.ndarray, "E"], y: Bool[np.ndarray, "E"], precision: float, floor: float) -> float | None:
    """The lowest score, at least `floor`, from which on the share of true `y` is at least `precision`; else None."""
    order = np.argsort(-scores, kind="stable")
    right, called = np.cumsum(y[order]), np.arange(1, len(y) + 1)
    whole = np.append(np.diff(scores[order]) != 0, True)  # equal scores get equal labels
    good = np.flatnonzero((right >= precision * called) & (called >= LEAST) & (scores[order] >= floor) & whole)
    return float(scores[order][good[-1]]) if len(good) else None


def thresholds(scores: Float[np.ndarray, "E"], y: Bool[np.ndarray, "E"], precision: float) -> Thresholds:
    """Thresholds for both outcomes: successes score at least 0.5, failures below 0.5."""
    failure = threshold(-scores, ~y, precision, float(np.nextafter(-0.5, 0)))
    return Thresholds(threshold(scores, y, precision, 0.5), None if failure is None else -failure)


def auc(scores: Float[np.ndarray, "E"], y: Bool[np.ndarray, "E"]) -> float:
    """Share of (success, failure) pairs in which the success has the higher score; ties count one half."""
    above = scores[y][:, None] - scores[~y]
    return float((above > 0).mean() + (above == 0).mean() / 2)


def _sigmoid(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))
