"""Checks that an algorithm's value settings fit its data. Reads all numeric columns but decodes no frame."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from pirl.data.dataset import LeRobotSource
from pirl.data.normalize import NormStats, normalize
from pirl.data.outcomes import EpisodeOutcome
from pirl.data.robots import Robot
from pirl.errors import DataError, PirlError, PirlWarning
from pirl.records import Array

FAINT = 0.1
"""Warn that the discount is too small if a success is worth less than this at the start of an episode."""
FAR = 10.0
"""Warn that the horizon 1 / (1 - γ) is too long if it exceeds this many median episodes."""
CLIPPED = 0.01
"""Warn that the critic's clip is too small if it affects more than this share of action entries."""
_ROWS = 4096  # rows per dataset that the clip is measured on
_KEPT = 0.999  # share of entries inside a suggested clip


@dataclass(frozen=True, kw_only=True)
class Expected:
    """An algorithm's assumptions about its data."""

    discount: float
    """γ per step."""
    rewards: tuple[float, float] | None
    """Smallest and largest reward of a step; None if the algorithm does not clip values to a range."""
    once: bool
    """Whether at most one step of an episode has a reward."""
    ahead: int | None = None
    """Steps after which targets bootstrap; None: not checked."""


def fit_problems(sources: Sequence[LeRobotSource], expected: Expected) -> Iterator[PirlError | PirlWarning]:
    """Yield rewards outside the critic's value range and discounts that do not fit the episodes' lengths."""
    for source in sources:
        yield from _reward_problems(source, expected)
        yield from _observed_problems(source, expected)
    if sources:
        lengths = np.concatenate([source.lengths for source in sources])
        success = [outcome.success for source in sources for outcome in source.outcomes]
        yield from discount_warnings(expected.discount, median_length(lengths, success))


def median_length(lengths: Int[Array, "E"], success: Sequence[bool | None]) -> float:
    """Median length of successful episodes; of all episodes if none is known to have succeeded."""
    won = np.array([outcome is True for outcome in success])
    return float(np.median(lengths[won] if won.any() else lengths))


def fitting_discount(steps: float) -> float:
    """1 - 1/N for N steps: a success at the end is worth about 1/e at the start."""
    return 1 - 1 / max(steps, 2.0)


def discount_warnings(discount: float, steps: float) -> Iterator[PirlWarning]:
    """Warn if a success after `steps` is worth almost nothing at the start, or if 1 / (1 - γ) far exceeds `steps`."""
    worth, ahead, fits = discount**steps, 1 / (1 - discount), fitting_discount(steps)
    advice = f"Try --agent.discount {fits:.4g}, which leaves {fits**steps:.2f} of it"
    if worth < FAINT:
        yield PirlWarning(
            f"discount {discount:g}: a success is worth {worth:.1g} at the start of a median episode of {steps:.0f} "
            f"steps, and early decisions look alike to the critic. {advice}"
        )
    if ahead > FAR * steps:
        yield PirlWarning(
            f"discount {discount:g} looks {ahead:.0f} steps ahead, {ahead / steps:.0f} times a median episode of "
            f"{steps:.0f} steps: sooner and later successes are worth the same ({worth:.3f} and 1 of one), and errors "
            f"of the critic add up over as many steps. {advice}"
        )


def _reward_problems(source: LeRobotSource, expected: Expected) -> Iterator[DataError]:
    """Yield an error for the first episode with a reward or return outside the critic's value range."""
    if expected.rewards is None:
        return
    low, high = expected.rewards
    room = 1e-5 * (high - low)
    found = [outcome.rewards for outcome in source.outcomes]
    wrong = [index for index, rewards in enumerate(found) if rewards.min() < low - room or rewards.max() > high + room]
    if wrong:
        first = found[wrong[0]]
        least, most = (float(best([best(found[index]) for index in wrong])) for best in (np.min, np.max))
        step = int(np.argmax(np.maximum(low - first, first - high)))
        yield DataError(
            f"{_named(source, wrong[0])}: the reward of frame {step} is {first[step]:g}, the agent expects "
            f"{low:g} to {high:g} ({len(wrong)} such episodes of {len(found)}); the targets would be clipped",
            hint=f"--agent.reward-low {min(low, least):g} --agent.reward-high {max(high, most):g}",
        )
        return
    if not expected.once:
        return
    bounds = min(low, 0.0) - room, max(high, 0.0) + room
    for index, rewards in enumerate(found):
        if np.count_nonzero(rewards) < 2:
            continue
        returns = _returns(source.outcomes[index], expected.discount)
        if returns.min() < bounds[0] or returns.max() > bounds[1]:
            beyond = returns[int(np.argmax(np.maximum(bounds[0] - returns, returns - bounds[1])))]
            yield DataError(
                f"{_named(source, index)}: {np.count_nonzero(rewards)} steps pay, with returns up to {beyond:g}, and "
                f"agent.reward_once says that one step pays, {low:g} to {high:g}; the targets would be clipped",
                hint="--agent.no-reward-once",
            )
            return


def _observed_problems(source: LeRobotSource, expected: Expected) -> Iterator[DataError]:
    """Yield an error for a server recording whose observations are further apart than targets bootstrap."""
    if expected.ahead is None or (flags := source.observed) is None:
        return
    starts = np.cumsum(source.lengths) - source.lengths
    gaps = np.diff(np.append(np.union1d(np.flatnonzero(flags), starts), len(flags)))
    if (gap := int(gaps.max())) > expected.ahead:
        yield DataError(
            f"{source.meta.root}: up to {gap} steps between two observations, and targets bootstrap after "
            f"{expected.ahead}: the critic would learn nothing from them",
            hint=f"--data.critic-horizon {gap}",
        )


def _returns(outcome: EpisodeOutcome, discount: float) -> Float[Array, "T"]:
    """The recorded discounted return from each step to the end of the task or recording."""
    found, over, after = np.zeros(len(outcome.rewards)), outcome.terminated | outcome.truncated, 0.0
    for step in reversed(range(len(found))):
        found[step] = after = float(outcome.rewards[step]) + (0.0 if over[step] else discount * after)
    return found


def _named(source: LeRobotSource, index: int) -> str:
    episode = source.meta.episodes[index]
    return f"{episode.data.path}: episode {episode.index}"


def clip_warnings(
    sources: Sequence[LeRobotSource], robot: Robot, stats: NormStats, *, clip: float, steps: int, quantile: bool
) -> Iterator[PirlWarning]:
    """Warn if the critic's clip affects many of the normalised actions."""
    if not sources or math.isinf(clip):
        return
    sizes = np.abs(np.concatenate([_normalised(source, robot, stats, steps, quantile) for source in sources]))
    beyond = (sizes > clip).mean(0)
    if (share := float(beyond.mean())) <= CLIPPED:
        return
    worst = int(np.argmax(beyond))
    fits = math.ceil(2 * float(np.quantile(sizes, _KEPT))) / 2
    yield PirlWarning(
        f"{share:.1%} of the normalised actions are beyond ±{clip:g}, where the critic cannot tell them apart "
        f"(dimension {worst}: {beyond[worst]:.0%}); ±{fits:g} holds {(sizes <= fits).mean():.2%}: "
        f"--critic.action-clip {fits:g}"
    )


def _normalised(
    source: LeRobotSource, robot: Robot, stats: NormStats, steps: int, quantile: bool
) -> Float[Array, "n A"]:
    """Chunks as a critic reads them, before its clip; they start evenly over the dataset."""
    every = max(1, int(source.lengths.sum()) // _ROWS)
    parts = []
    for index, meta in enumerate(source.meta.episodes):
        starts = np.arange(-meta.start % every, meta.length, every)
        if len(starts):
            episode, chunk = source.episode(index), np.minimum(starts[:, None] + np.arange(steps), meta.length - 1)
            encoded = robot.encode_state(episode.state[starts])
            parts.append(normalize(robot.encode_actions(episode.actions[chunk], encoded), stats, quantile=quantile))
    return np.concatenate(parts).reshape(-1, robot.action_dim)
