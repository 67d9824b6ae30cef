"""Evaluates a policy: success over fixed initial states, with confidence intervals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pirl.errors import EnvError
from pirl.records import Context, Rollout
from pirl.rollout.collect import CollectStats, numbered
from pirl.rollout.hosts import collect_together
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import EnvPool

EVAL_METRICS = ("eval/success_rate", "eval/success_low", "eval/success_high", "eval/return", "eval/length")
"""Metrics that an evaluation logs."""
Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Successes out of trials, with a 95% interval."""

    successes: int
    trials: int

    @property
    def value(self) -> float:
        """successes / trials; NaN without trials."""
        return self.successes / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval, valid also near 0 and 1 and for few trials."""
        if not self.trials:
            return 0.0, 1.0
        n, p = self.trials, self.value
        centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
        return max(centre - half, 0.0), min(centre + half, 1.0)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One evaluated episode."""

    context: Context
    success: bool
    reward: float
    """Sum of its rewards."""
    length: int
    """Number of steps."""
    error: str | None = None
    """Why it was lost, else None. A lost episode counts as a failure, as in OpenPI's evaluation."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All episodes of an evaluation, in the order of their contexts."""

    trials: Sequence[Trial]

    @property
    def success(self) -> Rate:
        """Success rate over all tasks."""
        return _rate(self.trials)

    @property
    def by_task(self) -> dict[str, Rate]:
        """Success rate per task, in order of first appearance."""
        tasks = dict.fromkeys(trial.context.task for trial in self.trials)
        return {task: _rate([trial for trial in self.trials if trial.context.task == task]) for task in tasks}

    def metrics(self) -> dict[str, float]:
        """Metrics for the log; return and length exclude lost episodes."""
        low, high = self.success.interval
        done = [trial for trial in self.trials if trial.error is None]
        return {
            "eval/success_rate": self.success.value,
            "eval/success_low": low,
            "eval/success_high": high,
            "eval/return": float(np.mean([trial.reward for trial in done])) if done else 0.0,
            "eval/length": float(np.mean([trial.length for trial in done])) if done else 0.0,
        }

    def to_json(self) -> dict[str, Any]:
        """All results and episodes, as JSON."""
        return {
            "success": _json(self.success),
            "tasks": {task: _json(rate) for task, rate in self.by_task.items()},
            "metrics": self.metrics(),
            "episodes": [
                {
                    "task": trial.context.task,
                    "init": trial.context.init,
                    "success": trial.success,
                    "return": trial.reward,
                    "length": trial.length,
                    **({} if trial.error is None else {"error": trial.error}),
                }
                for trial in self.trials
            ],
        }


def evaluate(
    pool: EnvPool,
    policy: ChunkPolicy,
    contexts: Sequence[Context],
    *,
    retries: int = 2,
    every_picture: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_rollout: Callable[[Rollout], None] = lambda rollout: None,
    stats: CollectStats | None = None,
    folder: Path | None = None,
) -> Evaluation:
    """Run every context once. Deterministic given policy, key and contexts.

    Several processes split the contexts and exchange episodes through `folder`.
    """
    stats = CollectStats() if stats is None else stats
    jobs = numbered(contexts)
    trials: dict[int, Trial] = {}
    settings = {"every_picture": every_picture, "retries": retries}
    for rollout in collect_together(pool, policy, jobs, folder=folder, stop=stop, stats=stats, **settings):
        on_rollout(rollout)
        trials[rollout.number] = Trial(
            context=rollout.context,
            success=bool(rollout.episode.success),
            reward=float(rollout.episode.rewards.sum()),
            length=len(rollout.episode),
        )
    for job, reason in stats.lost:
        trials[job.number] = Trial(context=job.context, success=False, reward=0.0, length=0, error=reason)
    return Evaluation(trials=[trials[job.number] for job in jobs])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two policies on the same contexts, compared by McNemar's exact test."""

    both: int
    neither: int
    only_first: int
    only_second: int

    @property
    def p_value(self) -> float:
        """Two-sided probability of a difference at least this large if both were equally good."""
        n, k = self.only_first + self.only_second, min(self.only_first, self.only_second)
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)

    @property
    def difference(self) -> float:
        """Success rate of the second minus that of the first."""
        total = self.both + self.neither + self.only_first + self.only_second
        return (self.only_second - self.only_first) / max(total, 1)


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Pair two evaluations by context."""
    a = {trial.context: trial.success for trial in first.trials}
    b = {trial.context: trial.success for trial in second.trials}
    if a.keys() != b.keys() or len(a) != len(first.trials) or len(b) != len(second.trials):
        raise EnvError(
            f"evaluations of {len(first.trials)} and {len(second.trials)} episodes do not have the same contexts",
            hint="evaluate both with the same environment, --episodes and --split, each context once",
        )
    pairs = [(a[context], b[context]) for context in a]
    return Comparison(
        both=pairs.count((True, True)),
        neither=pairs.count((False, False)),
        only_first=pairs.count((True, False)),
        only_second=pairs.count((False, True)),
    )


def _rate(trials: Sequence[Trial]) -> Rate:
    return Rate(successes=sum(trial.success for trial in trials), trials=len(trials))


def _json(rate: Rate) -> dict[str, Any]:
    low, high = rate.interval
    return {"rate": rate.value, "low": low, "high": high, "successes": rate.successes, "trials": rate.trials}
