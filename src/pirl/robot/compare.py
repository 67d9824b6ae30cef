"""Blind comparison of two policies on a robot, valid at any stopping time.

Episodes come in blocks. Each block runs both policies equally often, in random order, and its k-th episodes of A and B
are a pair (they can share an initial state). A pair that only B solves is a win, a pair that only A solves a loss; ties
say nothing about which is better. So the difference in success rates, δ = P(B succeeds) - P(A succeeds), is the mean of
D = +1, -1 or 0 over pairs.

The test bets against every candidate δ = m. A bettor who starts with 1 and stakes λ on "above" has Π(1 + λ(D - m)): if
the mean of D is m (or less) whatever happened before, this is a fair (or losing) game, and a stake on "below" likewise.
The stakes here are mixtures over fixed λ, half on each side. A game that is not winning multiplies its stake by 1/α at
any time with probability at most α (Ville), so all m against which the bettor has not won 1/α form an interval that
contains δ at all times with probability 1 - α: a confidence sequence (Waudby-Smith and Ramdas, arXiv 2010.09686). Look
as often as you like and stop when it leaves out 0. Initial states may differ in difficulty, and policies may have any
success rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from pirl.errors import ConfigError

Array = np.ndarray
Verdict = Literal["better", "worse", "undecided"]
"""What B is, compared to A."""
STAKES = (np.arange(32) + 0.5) / 32
"""λ as a share of the largest stake that cannot lose more than everything."""
_GRID = np.linspace(-1, 1, 2001)[1:-1]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which policy runs which episode. A function of the seed alone: nothing has to be stored while it runs."""

    seed: int
    """Of the random order; the operator must not know it."""
    block: int = 4
    """Episodes per block, even. In blocks of 2 an operator knows that the second episode is the other policy."""

    def __post_init__(self) -> None:
        if self.block < 2 or self.block % 2:
            raise ConfigError(f"compare: blocks of {self.block} episodes", hint="an even number, such as 4")

    def arm(self, episode: int) -> int:
        """0: A runs this episode, 1: B does."""
        return int(self._order(episode // self.block)[episode % self.block])

    def pair(self, episode: int) -> int:
        """Number of the pair the episode belongs to: two episodes have it, one of A and one of B."""
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
    """Of A and of B."""
    episodes: tuple[int, int]
    """Of A and of B."""
    wins: int
    """Pairs that only B solved."""
    losses: int
    """Pairs that only A solved."""
    ties: int
    """Pairs that both solved, or neither."""
    low: float
    """Lower end of the interval of the difference."""
    high: float
    """Upper end."""
    alpha: float
    """One minus its confidence."""

    @property
    def verdict(self) -> Verdict:
        """The interval's verdict about B."""
        return "better" if self.low >= 0 else "worse" if self.high <= 0 else "undecided"

    def __str__(self) -> str:
        (a, b), (n, m) = self.successes, self.episodes
        return (
            f"A {a}/{n}, B {b}/{m}: B is {self.verdict}; the difference is in [{self.low:+.2f}, {self.high:+.2f}] "
            f"with {1 - self.alpha:.0%} confidence ({self.wins} wins, {self.losses} losses, {self.ties} ties)"
        )


def compare(outcomes: Sequence[bool], assignment: Assignment, *, alpha: float = 0.05) -> BlindComparison:
    """The comparison after these episodes, in their order. A pair counts once both of its episodes are there."""
    if not 0 < alpha < 1:
        raise ConfigError(f"compare: alpha is {alpha}", hint="the share of wrong decisions to accept, such as 0.05")
    arms = [assignment.arm(episode) for episode in range(len(outcomes))]
    pairs: dict[int, dict[int, bool]] = {}
    for episode, (arm, success) in enumerate(zip(arms, outcomes, strict=True)):
        pairs.setdefault(assignment.pair(episode), {})[arm] = bool(success)
    whole = [pair for pair in pairs.values() if len(pair) == 2]
    wins, losses = sum(p[1] > p[0] for p in whole), sum(p[1] < p[0] for p in whole)
    ties = len(whole) - wins - losses
    low, high = interval(wins, losses, ties, alpha=alpha)
    solved = [sum(bool(s) for a, s in zip(arms, outcomes, strict=True) if a == arm) for arm in (0, 1)]
    return BlindComparison(
        successes=(solved[0], solved[1]),
        episodes=(arms.count(0), arms.count(1)),
        wins=wins,
        losses=losses,
        ties=ties,
        low=low,
        high=high,
        alpha=alpha,
    )


def interval(wins: int, losses: int, ties: int, *, alpha: float) -> tuple[float, float]:
    """The differences against which the bettor has not won yet, as (low, high).

    The wealth is smallest near the observed mean and grows on both sides, so they form an interval.
    """
    kept = _GRID[log_wealth(_GRID, *np.array([[wins], [losses], [ties]], np.float64)) < -np.log(alpha)]
    if not len(kept):  # between two points of the grid
        mean = (wins - losses) / (wins + losses + ties)
        return mean, mean
    step = _GRID[1] - _GRID[0]
    low, high = float(kept[0] - step), float(kept[-1] + step)  # outwards, to the first points that are left out
    exact = [value if abs(value) > 1e-9 else 0.0 for value in (low, high)]
    return max(exact[0], -1.0), min(exact[1], 1.0)


def log_wealth(
    m: Float[Array, "*#b"], wins: Float[Array, "*#b"], losses: Float[Array, "*#b"], ties: Float[Array, "*#b"]
) -> Float[Array, "*#b"]:
    """What the bettor against a mean of m has, as a logarithm, after so many wins, losses and ties."""
    m, wins, losses, ties = (np.asarray(x, np.float64)[..., None] for x in (m, wins, losses, ties))
    above, below = STAKES / (1 + m), STAKES / (1 - m)
    up = wins * np.log1p(above * (1 - m)) + losses * np.log1p(above * (-1 - m)) + ties * np.log1p(-above * m)
    down = wins * np.log1p(-below * (1 - m)) + losses * np.log1p(below * (1 + m)) + ties * np.log1p(below * m)
    both = np.concatenate([up, down], axis=-1)
    largest = both.max(axis=-1, keepdims=True)
    return np.log(np.exp(both - largest).mean(axis=-1)) + largest[..., 0]


def first_decision(
    differences: Int[Array, "runs pairs"], *, alpha: float
) -> tuple[Int[Array, "runs"], Bool[Array, "runs"]]:
    """For simulated comparisons: (the pair after which 0 is left out, or -1; whether B was called better)."""
    wins, losses = (differences > 0).cumsum(axis=1), (differences < 0).cumsum(axis=1)
    table = int(max(wins.max(), losses.max())) + 1
    counts = np.arange(table, dtype=np.float64)
    wealth = log_wealth(np.zeros((table, table)), counts[:, None], counts[None], np.zeros((table, table)))
    decided = wealth[wins, losses] >= -np.log(alpha)
    first = np.where(decided.any(axis=1), decided.argmax(axis=1), -1)
    rows = np.arange(len(differences))
    return first, (first >= 0) & (wins > losses)[rows, first]
