"""The numbers of held-out episodes, re-derived the slow way."""

import itertools
import math

import numpy as np
import pytest

from pirl.training.held_out_metrics import (
    auc,
    auc_by_chance,
    calibration,
    calibration_gap,
    masked_means,
    paired_difference,
    rank_correlation,
    rank_correlation_by_chance,
    ranks,
    returns_to_go,
)

RNG = np.random.default_rng(0)


def flags(length: int, *places: int) -> np.ndarray:
    return np.isin(np.arange(length), places)


def test_a_return_is_the_discounted_sum_to_the_end_of_the_task() -> None:
    rewards = RNG.normal(size=6)
    found = returns_to_go(rewards, flags(6, 5), flags(6), True, 0.9)
    expected = [sum(0.9 ** (k - t) * rewards[k] for k in range(t, 6)) for t in range(6)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_after_a_success_in_mid_episode_nothing_counts() -> None:
    found = returns_to_go(np.array([0.0, 1.0, 5.0]), flags(3, 1), flags(3, 2), None, 0.5)
    assert found[:2].tolist() == [0.5, 1.0]
    assert math.isnan(found[2])


def test_a_cut_recording_is_unknown_unless_it_failed() -> None:
    rewards = np.array([0.0, 0.0, 0.0])
    assert np.isnan(returns_to_go(rewards, flags(3), flags(3, 2), None, 0.9)).all()
    assert returns_to_go(rewards, flags(3), flags(3, 2), False, 0.9).tolist() == [0, 0, 0]


def test_a_time_out_that_costs_at_every_step_ranks_below_every_success() -> None:
    penalty = -np.ones(5)
    failed = returns_to_go(penalty, flags(5), flags(5, 4), False, 0.9)
    np.testing.assert_allclose(failed, -10.0)
    paid = penalty + flags(5, 4)
    assert returns_to_go(paid, flags(5, 4), flags(5), True, 0.9).min() > failed.max()


def test_rank_correlation_is_pearsons_of_ranks_counted_pair_by_pair() -> None:
    x, y = RNG.integers(0, 5, 40).astype(float), RNG.normal(size=40)
    slow = [sum(1.0 * (b < a) + 0.5 * (b == a) for b in x) - 0.5 for a in x]
    np.testing.assert_allclose(ranks(x), slow)
    np.testing.assert_allclose(rank_correlation(x, y), np.corrcoef(ranks(x), ranks(y))[0, 1])
    assert rank_correlation(y, np.exp(y)) == pytest.approx(1.0)
    assert math.isnan(rank_correlation(np.ones(4), y[:4]))


def test_auc_counts_pairs_of_the_same_phase_only() -> None:
    n, phases = 60, 3
    q, success = RNG.integers(0, 8, n).astype(float), RNG.random(n) < 0.6
    phase, episode = RNG.integers(0, phases, n), np.arange(n) // 4
    won, pairs = [0.0] * phases, [0] * phases
    for i, j in itertools.product(range(n), range(n)):
        if success[i] and not success[j] and phase[i] == phase[j]:
            won[phase[i]] += 1.0 if q[i] > q[j] else 0.5 if q[i] == q[j] else 0.0
            pairs[phase[i]] += 1
    found = auc(q, success, episode, phase, phases)
    assert found.value == pytest.approx(sum(won) / sum(pairs))
    assert found.by_phase == pytest.approx([w / p for w, p in zip(won, pairs, strict=True)])


def test_a_critic_that_knows_the_time_alone_gets_one_half() -> None:
    """Over all pairs it would look good: failures are shorter here, and values rise with the phase."""
    phase = np.tile(np.arange(5), 8)
    episode = np.repeat(np.arange(8), 5)
    found = auc(phase.astype(float), episode < 4, episode, phase, 5)
    assert found.value == 0.5
    assert found.by_phase == (0.5,) * 5


def test_auc_without_failures_is_unknown() -> None:
    found = auc(np.ones(3), np.ones(3, bool), np.arange(3), np.zeros(3, int), 2)
    assert math.isnan(found.value)
    assert found.by_chance == 1.0


def test_chance_stays_below_its_bound_in_95_of_100_data_sets() -> None:
    successes, failures, trials = 9, 6, 4000
    labels = flags(15, *range(successes))
    for bound, statistic in (
        (auc_by_chance(successes, failures), lambda q: auc(q, labels, np.arange(15), np.zeros(15, int), 1).value),
        (rank_correlation_by_chance(15), lambda q: rank_correlation(q, np.arange(15.0))),
    ):
        found = np.array([statistic(q) for q in RNG.normal(size=(trials, 15))])
        assert 0.93 < (found < bound).mean() < 0.975


def test_calibration_bins_rows_by_value() -> None:
    q, returns = RNG.normal(size=100), RNG.normal(size=100)
    bins = calibration(q, returns, 4)
    order = np.argsort(q)
    for k, one in enumerate(bins):
        rows = order[25 * k : 25 * (k + 1)]
        assert (one.predicted, one.returned, one.count) == pytest.approx((q[rows].mean(), returns[rows].mean(), 25))
    expected = np.mean([abs(one.predicted - one.returned) for one in bins])
    assert calibration_gap(bins) == pytest.approx(expected)
    assert calibration_gap(calibration(returns, returns)) == 0
    assert math.isnan(calibration_gap(calibration(np.zeros(0), np.zeros(0))))


def test_errors_count_steps_inside_their_episodes() -> None:
    error, valid = RNG.random((5, 3, 2)), (np.arange(3) < np.array([3, 1, 2, 3, 2])[:, None]).astype(float)
    mean, by_dimension, by_step = masked_means(error, valid)
    inside = [error[i, t] for i in range(5) for t in range(3) if valid[i, t]]
    np.testing.assert_allclose(by_dimension, np.mean(inside, axis=0))
    np.testing.assert_allclose(mean, np.mean(inside))
    np.testing.assert_allclose(
        by_step, [np.mean([error[i, t].mean() for i in range(5) if valid[i, t]]) for t in range(3)]
    )


def test_differences_are_paired_by_episode() -> None:
    this, other = RNG.normal(size=12), RNG.normal(size=12)
    episode = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
    each = [np.mean((this - other)[episode == e]) for e in range(4)]
    found = paired_difference(this, other, episode)
    half = 1.96 * np.std(each, ddof=1) / 2
    np.testing.assert_allclose(
        (found.mean, found.low, found.high), (np.mean(each), np.mean(each) - half, np.mean(each) + half), rtol=1e-3
    )
    assert found.episodes == 4
