"""Blind comparison of two policies on a robot, valid at any stopping time.

Episodes come in blocks. Each block runs both policies equally often, in random order, and its k-th episodes of A and
B are a pair (they can share an initial state). A pair that only B solves is a win, one that only A solves a loss; ties
carry no information about which is better. So the difference in success rates, δ = P(B succeeds) - P(A succeeds), is
the mean of D = +1, -1 or 0 over pairs.

The verdict is an exact sequential sign test, valid at any stopping time up to N pairs, which are fixed beforehand. If
neither policy is better, every pair that is not a tie is a fair coin flip, so wins minus losses is a symmetric random
walk. The test rejects once the walk leaves bounds that it leaves by pair t with probability at most α·t/N under the
null hypothesis (error spending, Lan and DeMets 1983). The bounds are the narrowest possible, computed from the exact
distribution of the walk given the ties, so they also hold for few pairs. Difficulty may vary between initial states;
pairs must be independent of the outcomes of earlier ones.

The interval is a confidence sequence (Waudby-Smith and Ramdas, arXiv 2010.09686), which bets against every candidate
δ = m. A bettor who starts with 1 and stakes λ on "above" has wealth Π(1 + λ(D - m)): if the mean of D is at most m,
this is a fair or losing game; likewise for stakes on "below". The stakes are mixtures over fixed λ, half on each side.
The wealth in such a game ever reaches 1/α with probability at most α (Ville), so the m with less wealth form an
interval that contains δ at all times with probability 1 - α. It needs no N and is wider than the sign test, so it is
clipped at 0 to agree with the verdict, which makes its confidence 1 - 2α.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from pirl.errors import ConfigError

Array = np.ndarray
Verdict = Literal["better", "worse", "undecided"]
"""B compared to A."""
STAKES = (np.arange(32) + 0.5) / 32
"""λ as a share of the largest stake that cannot make the wealth negative."""
_GRID = np.linspace(-1, 1, 2001)[1:-1]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which policy runs which episode. Deterministic in the seed, so nothing has to be stored while it runs."""

    seed: int
    """Seed of the random order; the operator must not know it."""
    block: int = 4
    """Episodes per block; even. In blocks of 2 the operator knows that the second episode is the other policy."""
    episodes: int = 100
    """Most episodes of the comparison, of both policies together. Fixed beforehand: the test's bounds depend on it."""

    def __post_init__(self) -> None:
        if self.episodes < 2:
            raise ConfigError(f"compare: at most {self.episodes} episodes", hint="at least one of each policy, 2")
        if self.block < 2 or self.block % 2:
            raise ConfigError(f"compare: blocks of {self.block} episodes", hint="an even number, such as 4")

    def arm(self, episode: int) -> int:
        """The policy that runs this episode: 0 is A, 1 is B."""
        return int(self._order(episode // self.block)[episode % self.block])

    def pair(self, episode: int) -> int:
        """Number of the episode's pair, which consists of one episode of A and one of B."""
        block, place = divmod(episode, self.block)
        order = self._order(block)
        return block * (self.block // 2) + int((order[:place] == order[place]).sum())

    def _order(self, block: int) -> Int[Array, "n"]:
        rng = np.random.default_rng(np.random.SeedSequence((self.seed, block)))
        return rng.permutation(np.arange(self.block) % 2)


@dataclass(frozen=True, kw_only=True)
class BlindComparison:
    """Result of a comparison after a number of episodes."""

    successes: tuple[int, int]
    """Successes of A and of B."""
    episodes: tuple[int, int]
    """Episodes of A and of B."""
    wins: int
    """Pairs that only B solved."""
    losses: int
    """Pairs that only A solved."""
    ties: int
    """Pairs that both or neither solved."""
    verdict: Verdict
    """The test's verdict about B; final once decided."""
    low: float
    """Lower end of the interval of the difference."""
    high: float
    """Upper end of the interval of the difference."""
    alpha: float
    """Accepted probability of a wrong verdict; the interval's confidence is 1 - 2 alpha."""

    def __str__(self) -> str:
        (a, b), (n, m) = self.successes, self.episodes
        return (
            f"A {a}/{n}, B {b}/{m}: B is {self.verdict}; the difference is in [{self.low:+.2f}, {self.high:+.2f}] "
            f"with {1 - 2 * self.alpha:.0%} confidence ({self.wins} wins, {self.losses} losses, {self.ties} ties)"
        )


def compare(outcomes: Sequence[bool], assignment: Assignment, *, alpha: float = 0.05) -> BlindComparison:
    """The comparison after these outcomes, in episode order; ignores those beyond `assignment.episodes`.

    A pair counts once both of its episodes are finished.
    """
    if not 0 < alpha < 0.5:
        raise ConfigError(f"compare: alpha is {alpha}", hint="the share of wrong decisions to accept, such as 0.05")
    outcomes = outcomes[: assignment.episodes]
    arms = [assignment.arm(episode) for episode in range(len(outcomes))]
    open_pairs: dict[int, int] = {}
    differences: list[int] = []
    for episode, (arm, success) in enumerate(zip(arms, outcomes, strict=True)):
        share = int(success) if arm else -int(success)
        pair = assignment.pair(episode)
        if pair in open_pairs:
            differences.append(open_pairs.pop(pair) + share)
        else:
            open_pairs[pair] = share
    wins, losses = differences.count(1), differences.count(-1)
    verdict = _verdict(differences, most=assignment.episodes // 2, alpha=alpha)
    low, high = interval(wins, losses, differences.count(0), alpha=alpha)
    solved = [sum(bool(s) for a, s in zip(arms, outcomes, strict=True) if a == arm) for arm in (0, 1)]
    return BlindComparison(
        successes=(solved[0], solved[1]),
        episodes=(arms.count(0), arms.count(1)),
        wins=wins,
        losses=losses,
        ties=differences.count(0),
        verdict=verdict,
        low=max(low, 0.0) if verdict == "better" else min(low, 0.0) if verdict == "undecided" else low,
        high=min(high, 0.0) if verdict == "worse" else max(high, 0.0) if verdict == "undecided" else high,
        alpha=alpha,
    )


def _verdict(differences: Sequence[int], *, most: int, alpha: float) -> Verdict:
    if not differences:
        return "undecided"
    first, better = first_decision(np.array([differences]), most=most, alpha=alpha)
    return "undecided" if first[0] < 0 else "better" if better[0] else "worse"


def first_decision(
    differences: Int[Array, "runs pairs"], *, alpha: float, most: int | None = None
) -> tuple[Int[Array, "runs"], Bool[Array, "runs"]]:
    """The sign test of several comparisons: (the deciding pair of each, or -1; whether B is better).

    `most`: the number of planned pairs, N. None: the number of given pairs.
    """
    runs, pairs = differences.shape
    most = pairs if most is None else most
    chance = np.ones((runs, 1))  # P(distance from 0, not yet decided) under the null hypothesis
    net, spent = np.zeros(runs, np.int64), np.zeros(runs)
    first, better = np.full(runs, -1), np.zeros(runs, bool)
    for pair in range(min(pairs, most)):
        fair = (differences[:, pair] != 0)[:, None]
        chance = np.where(fair, _fair_step(chance), np.pad(chance, ((0, 0), (0, 1))))
        net += differences[:, pair]
        beyond = np.pad(chance[:, ::-1].cumsum(axis=1)[:, ::-1], ((0, 0), (0, 1)))
        allowed = beyond <= (alpha * (pair + 1) / most - spent)[:, None]
        allowed[:, 0] = False
        bound = allowed.argmax(axis=1)  # smallest allowed bound; the last is always allowed, with probability 0
        spent += beyond[np.arange(runs), bound]
        chance = np.where(np.arange(bound.max()) < bound[:, None], chance[:, : bound.max()], 0)
        now = (np.abs(net) >= bound) & (first < 0)
        first[now], better[now] = pair, net[now] > 0
    return first, better


def _fair_step(chance: Float[Array, "runs n"]) -> Float[Array, "runs m"]:
    """The distribution of a fair walk's distance from 0, one step later; m = n + 1."""
    after = np.pad(chance / 2, ((0, 0), (1, 0)))
    after[:, : chance.shape[1] - 1] += chance[:, 1:] / 2
    after[:, 1] += chance[:, 0] / 2  # from 0 both ways lead to 1
    return after


def interval(wins: int, losses: int, ties: int, *, alpha: float) -> tuple[float, float]:
    """(low, high) of the differences m at which the bettor's wealth is below 1/α.

    The wealth is smallest near the observed mean and grows on both sides, so these form an interval.
    """
    kept = _GRID[log_wealth(_GRID, *np.array([[wins], [losses], [ties]], np.float64)) < -np.log(alpha)]
    if not len(kept):  # the interval lies between two grid points
        mean = (wins - losses) / (wins + losses + ties)
        return mean, mean
    step = _GRID[1] - _GRID[0]
    low, high = float(kept[0] - step), float(kept[-1] + step)  # conservative: the first excluded grid points
    exact = [value if abs(value) > 1e-9 else 0.0 for value in (low, high)]
    return max(exact[0], -1.0), min(exact[1], 1.0)


def log_wealth(
    m: Float[Array, "*#b"], wins: Float[Array, "*#b"], losses: Float[Array, "*#b"], ties: Float[Array, "*#b"]
) -> Float[Array, "*#b"]:
    """Log-wealth of the bettor against a mean of m after these wins, losses and ties."""
    m, wins, losses, ties = (np.asarray(x, np.float64)[..., None] for x in (m, wins, losses, ties))
    above, below = STAKES / (1 + m), STAKES / (1 - m)
    up = wins * np.log1p(above * (1 - m)) + losses * np.log1p(above * (-1 - m)) + ties * np.log1p(-above * m)
    down = wins * np.log1p(-below * (1 - m)) + losses * np.log1p(below * (1 + m)) + ties * np.log1p(below * m)
    both = np.concatenate([up, down], axis=-1)
    largest = both.max(axis=-1, keepdims=True)
    return np.log(np.exp(both - largest).mean(axis=-1)) + largest[..., 0]
