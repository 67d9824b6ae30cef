"""Chooses training contexts: those the policy sometimes solves.

A group of rollouts teaches only if its outcomes differ, and E|advantage|² is largest at a success rate of ½. Each
context has a Beta posterior over its success rate p; it is drawn with weight E[p]^{2τ} (1 - E[p])^{2(1-τ)}, which is
p(1 - p) for the target τ = ½ and has its maximum at p = τ. Old evidence decays, because the policy changes; solved and
hopeless contexts keep a minimum weight, so that forgetting and late progress are noticed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.errors import ConfigError
from pirl.records import Array, Context
from pirl.rollout.config import CurriculumConfig
from pirl.rollout.contexts import distinct_contexts, random_contexts
from pirl.rollout.pool import EnvInfo


def _to_train_on(info: EnvInfo, held_out: int) -> EnvInfo:
    """The facts without the last `held_out` listed initial states of each task."""
    if info.num_inits is None or not held_out:
        return info
    if held_out >= info.num_inits:
        raise ConfigError(
            f"curriculum.held_out is {held_out}, and a task has {info.num_inits} initial states",
            hint="leave some to train on",
        )
    return replace(info, num_inits=info.num_inits - held_out)


class Curriculum:
    """Counts successes and failures and draws contexts; deterministic given seed and history."""

    def __init__(self, config: CurriculumConfig, info: EnvInfo, seed: int) -> None:
        self.config, self._info, self._seed = config, _to_train_on(info, config.held_out), seed
        info = self._info
        rng = np.random.default_rng([seed, 0])
        self._arms: list[Context] = (
            [Context(task, -1) for task in info.tasks]  # one arm per task: -1 stands for a fresh initial state
            if config.contexts is None
            else distinct_contexts(info, config.contexts, rng)
        )
        self._counts = np.zeros((len(self._arms), 2))

    @property
    def success(self) -> Float[Array, "n"]:
        """Posterior mean of each arm's success rate, from a uniform prior."""
        return (self._counts[:, 0] + 1) / (self._counts.sum(1) + 2)

    @property
    def weights(self) -> Float[Array, "n"]:
        """Probability of each arm."""
        p, target = self.success, self.config.target
        weights = p ** (2 * target) * (1 - p) ** (2 * (1 - target)) if self.config.enabled else np.ones_like(p)
        weights = np.maximum(weights, self.config.floor * weights.max())
        return weights / weights.sum()

    def draw(self, count: int, iteration: int, already: int = 0) -> list[Context]:
        """Contexts for groups `already`, `already + 1`, ... of an iteration."""
        rng = np.random.default_rng([self._seed, 1, iteration, already])
        chosen = [self._arms[i] for i in rng.choice(len(self._arms), size=count, p=self.weights)]
        fresh = random_contexts(self._info, count, rng)
        return [Context(arm.task, new.init) if arm.init < 0 else arm for arm, new in zip(chosen, fresh, strict=True)]

    def update(self, outcomes: Sequence[tuple[Context, int, int]]) -> None:
        """Fade old evidence and add (context, successes, failures)."""
        places = {arm: i for i, arm in enumerate(self._arms)}
        self._counts *= self.config.fade
        for context, successes, failures in outcomes:
            place = places.get(context if self.config.contexts is not None else Context(context.task, -1))
            if place is not None:
                self._counts[place] += successes, failures

    def metrics(self) -> dict[str, float]:
        """Statistics of the posterior."""
        p = self.success
        return {
            "curriculum/success_mean": float(p.mean()),
            "curriculum/solved_share": float((p > 0.9).mean()),
            "curriculum/hopeless_share": float((p < 0.1).mean()),
            "curriculum/entropy": float(-(self.weights * np.log(self.weights)).sum() / max(np.log(len(p)), 1e-9)),
        }

    def state(self) -> dict[str, Any]:
        """The counts, for the checkpoint; the arms follow from the seed."""
        return {"counts": self._counts.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore saved counts."""
        counts = np.array(state["counts"], float).reshape(-1, 2)
        if len(counts) != len(self._arms):
            raise ConfigError(
                f"the checkpoint's curriculum has {len(counts)} arms, this one {len(self._arms)}",
                hint="resume with the environment and curriculum.contexts the run began with",
            )
        self._counts = counts
