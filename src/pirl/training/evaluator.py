"""What is measured while a run trains: success in the environment, held-out episodes, a function of the user's."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax

from pirl.agents.agent import TrainState
from pirl.rollout.collector import Say
from pirl.rollout.config import EvalConfig
from pirl.rollout.contexts import fixed_contexts
from pirl.rollout.evaluate import evaluate
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import EnvPool
from pirl.training.held_out import HeldOut


@runtime_checkable
class Measurement(Protocol):
    """Something that looks at the weights now and then."""

    @property
    def interval(self) -> int:
        """Steps between two looks."""

    def __call__(self, state: TrainState, step: int, say: Say) -> dict[str, float]:
        """Metrics by name. The state is only lent: the next update takes its memory."""


class Evaluations:
    """Every measurement of a run, each at its own interval."""

    def __init__(self, parts: Sequence[Measurement]) -> None:
        self.parts = tuple(parts)

    @property
    def hold_out(self) -> bool:
        """Are episodes kept apart to measure on?"""
        return any(isinstance(part, HeldOut) for part in self.parts)

    def due(self, step: int, total: int) -> bool:
        """Is it time for one of them? At the last step it is, for all."""
        return bool(self._due(step, total))

    def __call__(self, state: TrainState, step: int, total: int, say: Say = lambda _: None) -> dict[str, float]:
        """The metrics of those whose time it is."""
        metrics: dict[str, float] = {}
        for part in self._due(step, total):
            metrics |= part(state, step, say)
        return metrics

    def _due(self, step: int, total: int) -> list[Measurement]:
        return [part for part in self.parts if step == total or step % part.interval == 0]


class Evaluator:
    """Success from always the same initial states: `eval/...` metrics. The same noise each time, so that differences
    are the policy's.
    """

    def __init__(
        self, pool: EnvPool, policy: ChunkPolicy, config: EvalConfig, *, key: jax.Array, retries: int = 2
    ) -> None:
        self._pool, self._policy, self._config, self._key, self._retries = pool, policy, config, key, retries
        self.contexts = fixed_contexts(pool.info, config.episodes, config.split)

    @property
    def interval(self) -> int:
        """Steps between evaluations."""
        return self._config.interval

    def __call__(self, state: TrainState, step: int, say: Say = lambda _: None) -> dict[str, float]:
        """Success rate and more, for the log."""
        say(f"evaluating {self._config.episodes} episodes")
        try:
            policy = self._policy.use(state, self._key)
            metrics = evaluate(self._pool, policy, self.contexts, retries=self._retries).metrics()
        finally:
            self._policy.use(None, self._key)
        say(f"success {metrics['eval/success_rate']:.2f}")
        return metrics
