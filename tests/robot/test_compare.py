"""The comparison's promises: blind balanced order, few wrong decisions however often one looks, and some power."""

import itertools

import numpy as np
import pytest

from pirl.errors import ConfigError
from pirl.robot.compare import Assignment, compare, first_decision, interval, log_wealth

RUNS = 10_000


def simulated(
    a: float | np.ndarray, b: float | np.ndarray, *, pairs: int, runs: int = RUNS, seed: int = 0
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    solved = [rng.random((runs, pairs)) < rate for rate in (a, b)]
    return solved[1].astype(np.int64) - solved[0]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_equal_policies_are_told_apart_in_at_most_alpha_of_the_comparisons(rate: float, alpha: float) -> None:
    """Looked at after each of 100 pairs. Five standard errors of slack for the simulation itself."""
    first, _ = first_decision(simulated(rate, rate, pairs=100), alpha=alpha)
    assert (first >= 0).mean() <= alpha + 5 * np.sqrt(alpha * (1 - alpha) / RUNS)


def test_a_worse_policy_is_called_better_in_at_most_half_of_alpha() -> None:
    first, better = first_decision(simulated(0.55, 0.5, pairs=100), alpha=0.05)
    assert (first >= 0).any()
    assert better.mean() <= 0.025


def test_initial_states_of_different_difficulty_do_no_harm() -> None:
    """Both policies succeed with the same probability in each state, drawn anew for each pair."""
    difficulty = np.random.default_rng(3).beta(0.5, 0.5, (RUNS, 100))
    first, _ = first_decision(simulated(difficulty, difficulty, pairs=100), alpha=0.05)
    assert (first >= 0).mean() <= 0.05 + 5 * np.sqrt(0.05 * 0.95 / RUNS)


def test_stopping_a_fixed_size_test_early_would_be_wrong() -> None:
    """What the sequential test is for: looking at a p-value of 0.05 after every pair is wrong far more often."""
    differences = simulated(0.5, 0.5, pairs=250, runs=2000)
    net, discordant = differences.cumsum(1), np.abs(differences).cumsum(1)
    significant = (np.abs(net) > 1.96 * np.sqrt(np.maximum(discordant, 1))) & (discordant >= 10)
    assert significant.any(axis=1).mean() > 0.2


@pytest.mark.parametrize(("a", "b", "share"), [(0.5, 0.9, 0.99), (0.5, 0.7, 0.69), (0.3, 0.9, 0.999)])
def test_a_better_policy_is_found(a: float, b: float, share: float) -> None:
    """Within 100 pairs, 200 episodes. docs/robot.md has the whole table."""
    _, better = first_decision(simulated(a, b, pairs=100), alpha=0.05)
    assert better.mean() > share


def test_the_interval_contains_the_difference_at_all_times() -> None:
    """Its edge at the true difference, which is not 0 here: ever crossed in at most alpha of the runs."""
    differences = simulated(0.4, 0.7, pairs=120)
    wins, losses = (differences > 0).cumsum(1), (differences < 0).cumsum(1)
    ties = np.arange(1, 121) - wins - losses
    _, first, where = np.unique((wins * 121 + losses) * 121 + ties, return_index=True, return_inverse=True)
    counts = [column.ravel()[first].astype(np.float64) for column in (wins, losses, ties)]
    crossed = log_wealth(np.full(len(first), 0.3), *counts) >= -np.log(0.05)
    share = crossed[where].reshape(wins.shape).any(axis=1).mean()
    assert 0.0 < share <= 0.05 + 5 * np.sqrt(0.05 * 0.95 / RUNS)


def test_the_interval_is_where_the_bettor_has_not_won_and_shrinks() -> None:
    for wins, losses, ties in [(9, 0, 3), (6, 0, 0), (20, 4, 30), (5, 5, 5), (0, 12, 1), (0, 0, 0)]:
        low, high = interval(wins, losses, ties, alpha=0.05)
        won = bool(log_wealth(np.zeros(1), *np.array([[wins], [losses], [ties]], np.float64))[0] >= np.log(20))
        assert (low >= 0 or high <= 0) == won, (wins, losses, ties)
        assert -1 <= low <= high <= 1
    widths = [np.subtract(*interval(6 * n, 2 * n, 4 * n, alpha=0.05)[::-1]) for n in (1, 4, 16)]
    assert widths[0] > widths[1] > widths[2]


def test_the_sign_test_spends_its_errors_exactly_as_stated() -> None:
    """All 2^12 ways that 12 discordant pairs of equal policies can go, with two ties among them.

    After each pair as many are decided as the budget allows: one more, or a bound lower by one step, would be too much.
    """
    signs = np.array(list(itertools.product([-1, 1], repeat=12)))
    pairs = np.insert(signs, [3, 8], 0, axis=1)
    first, better = first_decision(pairs, alpha=0.2)
    net = pairs.cumsum(axis=1)
    for pair in range(14):
        budget = 0.2 * (pair + 1) / 14
        decided = (first >= 0) & (first <= pair)
        assert decided.mean() <= budget
        assert better[decided].mean() == 0.5 if decided.any() else True
        undecided = ~decided
        if undecided.any():  # the farthest of those that go on would not fit
            farthest = undecided & (np.abs(net[:, pair]) == np.abs(net[undecided, pair]).max())
            assert decided.mean() + farthest.mean() > budget


def test_the_verdict_stays_as_it_was_first_decided() -> None:
    wins, losses = np.ones((1, 20), np.int64), -np.ones((1, 60), np.int64)
    first, better = first_decision(np.concatenate([wins, losses], axis=1), alpha=0.05)
    assert 0 <= first[0] < 20
    assert better[0]


def test_a_shorter_plan_decides_earlier_and_later_episodes_do_not_count() -> None:
    wins = np.ones((1, 40), np.int64)
    places = [int(first_decision(wins, alpha=0.05, most=most)[0][0]) for most in (10, 40, 400)]
    assert places == sorted(places)
    assert places[0] < places[2]
    assignment = Assignment(seed=2, block=4, episodes=24)
    outcomes = [assignment.arm(episode) == 1 for episode in range(24)]
    assert compare([*outcomes, *[True] * 40], assignment) == compare(outcomes, assignment)


@pytest.mark.parametrize("seed", range(20))
def test_the_interval_never_contradicts_the_verdict(seed: int) -> None:
    rng, assignment = np.random.default_rng(seed), Assignment(seed=seed, block=4, episodes=48)
    outcomes = [bool(rng.random() < (0.3, 0.75)[assignment.arm(episode)]) for episode in range(48)]
    for have in range(49):
        found = compare(outcomes[:have], assignment)
        side = "better" if found.low >= 0 else "worse" if found.high <= 0 else "undecided"
        assert found.verdict == side or (found.verdict == "undecided" and found.low * found.high == 0)


def test_every_block_runs_both_policies_equally_often_in_random_order() -> None:
    assignment = Assignment(seed=5, block=4)
    arms = np.array([assignment.arm(episode) for episode in range(400)]).reshape(100, 4)
    assert (arms.sum(axis=1) == 2).all()
    assert len({tuple(block) for block in arms.tolist()}) == 6  # all orders occur
    assert [Assignment(seed=5, block=4).arm(episode) for episode in range(400)] == arms.ravel().tolist()
    other = [Assignment(seed=6, block=4).arm(episode) for episode in range(400)]
    assert other != arms.ravel().tolist()


def test_a_pair_has_one_episode_of_each_policy() -> None:
    assignment = Assignment(seed=1, block=6)
    members: dict[int, list[int]] = {}
    for episode in range(60):
        members.setdefault(assignment.pair(episode), []).append(assignment.arm(episode))
    assert sorted(members) == list(range(30))
    assert all(sorted(arms) == [0, 1] for arms in members.values())


def test_outcomes_are_counted_by_policy_and_by_pair() -> None:
    assignment = Assignment(seed=2, block=4)
    outcomes = [assignment.arm(episode) == 1 for episode in range(41)]  # B always succeeds, A never
    found = compare(outcomes, assignment)
    assert found.episodes[0] + found.episodes[1] == 41
    assert found.successes == (0, found.episodes[1])
    assert (found.wins, found.losses, found.ties) == (20, 0, 0)  # the last episode has no partner yet
    assert found.verdict == "better"
    assert "B is better" in str(found)
    assert compare([not success for success in outcomes], assignment).verdict == "worse"
    assert compare([], assignment).verdict == "undecided"


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 3"):
        Assignment(seed=0, block=3)
    with pytest.raises(ConfigError, match="alpha"):
        compare([], Assignment(seed=0), alpha=0.5)
    with pytest.raises(ConfigError, match="at most 1 episodes"):
        Assignment(seed=0, episodes=1)
