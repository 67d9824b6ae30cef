"""Metrics of a critic and a policy on held-out episodes. Pure functions of NumPy arrays.

    R_t   = r_t + γ·R_{t+1}                              return to go; after a failed cut, min(r_last, 0) / (1 - γ)
    AUC   = P(Q(success) > Q(failure))                   over pairs at the same phase of their episodes, ties one half
    ρ     = corr(rank Q, rank R)                         Spearman, ties share their mean rank
    ECE   = Σ_b n_b/n |mean_b Q - mean_b R|              over bins b of equally many rows, by Q

Rows of one episode are correlated, so chance levels depend on the number of episodes, not of rows.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

Array = np.ndarray
_ONE_SIDED_95 = 1.6448536269514722
_Z95 = 1.959963984540054


def returns_to_go(
    rewards: Float[Array, "T"],
    terminated: Bool[Array, "T"],
    truncated: Bool[Array, "T"],
    success: bool | None,
    discount: float,
) -> Float[Array, "T"]:
    """The discounted return from each step on; NaN if the recording was cut and its outcome is unknown.

    A failed episode that was cut earns nothing more and pays its last step's cost forever. So a time-out ranks below a
    success, both with sparse rewards and with step penalties.
    """
    found = np.empty(len(rewards), np.float64)
    after_cut = min(float(rewards[-1]), 0.0) / (1 - discount) if success is False else math.nan
    after = after_cut
    for t in reversed(range(len(rewards))):
        after = 0.0 if terminated[t] else after_cut if truncated[t] else after
        found[t] = after = rewards[t] + discount * after
    return found


def ranks(x: Float[Array, "n"]) -> Float[Array, "n"]:
    """Ranks from 0; ties share their mean rank."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    first = np.cumsum(counts) - counts
    found: Array = (first + (counts - 1) / 2)[which]
    return found


def rank_correlation(x: Float[Array, "n"], y: Float[Array, "n"]) -> float:
    """Spearman's ρ; NaN if x or y is constant."""
    if len(x) < 2:
        return math.nan
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 0 else math.nan


def rank_correlation_by_chance(episodes: int) -> float:
    """95th percentile of an uninformed critic's rank correlation over this many episodes."""
    return min(_ONE_SIDED_95 / math.sqrt(episodes - 1), 1.0) if episodes > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class AUC:
    """Probability that a success's value exceeds a failure's at the same phase."""

    value: float
    """Over all pairs that share a phase; NaN without any."""
    by_phase: tuple[float, ...]
    """Within each phase."""
    by_chance: float
    """95th percentile of an uninformed critic's AUC over this many episodes."""


def auc(
    q: Float[Array, "n"],
    success: Bool[Array, "n"],
    episode: Int[Array, "n"],
    phase: Int[Array, "n"],
    phases: int,
) -> AUC:
    """Compare rows of successes with rows of failures within each phase (0 to `phases` - 1)."""
    won, pairs = np.zeros(phases), np.zeros(phases)
    for number in range(phases):
        good, bad = (q[(phase == number) & kind] for kind in (success, ~success))
        above = (good[:, None] > bad).sum() + 0.5 * (good[:, None] == bad).sum()
        won[number], pairs[number] = above, len(good) * len(bad)
    shares = np.divide(won, pairs, out=np.full(phases, math.nan), where=pairs > 0)
    good_episodes, bad_episodes = len(np.unique(episode[success])), len(np.unique(episode[~success]))
    return AUC(
        value=float(won.sum() / pairs.sum()) if pairs.sum() else math.nan,
        by_phase=tuple(shares.tolist()),
        by_chance=auc_by_chance(good_episodes, bad_episodes),
    )


def auc_by_chance(successes: int, failures: int) -> float:
    """0.5 + 1.64 standard deviations of the rank-sum statistic (Mann-Whitney), at most 1."""
    if not successes or not failures:
        return 1.0
    return min(0.5 + _ONE_SIDED_95 * math.sqrt((successes + failures + 1) / (12 * successes * failures)), 1.0)


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Rows of similar predicted value."""

    predicted: float
    """Mean value."""
    returned: float
    """Mean return."""
    count: int


def calibration(q: Float[Array, "n"], returns: Float[Array, "n"], bins: int = 10) -> tuple[Bin, ...]:
    """Bins of equally many rows, sorted by value."""
    parts = np.array_split(np.argsort(q, kind="stable"), min(bins, max(len(q), 1)))
    return tuple(
        Bin(predicted=float(q[part].mean()), returned=float(returns[part].mean()), count=len(part))
        for part in parts
        if len(part)
    )


def calibration_gap(bins: tuple[Bin, ...]) -> float:
    """Mean |value - return| over the bins, weighted by rows (ECE); NaN without any."""
    total = sum(one.count for one in bins)
    return sum(one.count * abs(one.predicted - one.returned) for one in bins) / total if total else math.nan


def masked_means(
    error: Float[Array, "n H A"], valid: Float[Array, "n H"]
) -> tuple[float, Float[Array, "A"], Float[Array, "H"]]:
    """(overall mean, mean per dimension, mean per step) of the error over valid steps; NaN without any."""
    weight = valid[..., None]
    total = (error * weight).sum((0, 1))
    steps = (error.mean(-1) * valid).sum(0)
    count, per_step = valid.sum(), valid.sum(0)
    by_dimension = total / count if count else np.full(error.shape[2], math.nan)
    by_step = np.divide(steps, per_step, out=np.full(len(steps), math.nan), where=per_step > 0)
    return float(by_dimension.mean()), by_dimension, by_step


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """One checkpoint minus another on the same rows."""

    mean: float
    low: float
    """Lower end of its 95 % interval."""
    high: float
    episodes: int


def paired_difference(this: Float[Array, "n"], other: Float[Array, "n"], episode: Int[Array, "n"]) -> PairedDifference:
    """Mean over episodes of each episode's mean difference; the interval treats episodes, not rows, as independent."""
    apart = this - other
    each = np.array([apart[episode == number].mean() for number in np.unique(episode)])
    mean = float(each.mean()) if len(each) else math.nan
    half = _Z95 * float(each.std(ddof=1)) / math.sqrt(len(each)) if len(each) > 1 else math.inf
    return PairedDifference(mean=mean, low=mean - half, high=mean + half, episodes=len(each))
