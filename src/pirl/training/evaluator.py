"""Evaluation while a run trains: always the same initial states, acted out with the weights of the moment."""

import jax

from pirl.agents.agent import TrainState
from pirl.rollout.collector import Say
from pirl.rollout.config import EvalConfig
from pirl.rollout.contexts import fixed_contexts
from pirl.rollout.evaluate import evaluate
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import EnvPool


class Evaluator:
    """Calls return `eval/...` metrics. The same noise each time, so that differences are the policy's."""

    def __init__(
        self, pool: EnvPool, policy: ChunkPolicy, config: EvalConfig, *, key: jax.Array, retries: int = 2
    ) -> None:
        self._pool, self._policy, self._config, self._key, self._retries = pool, policy, config, key, retries
        self.contexts = fixed_contexts(pool.info, config.episodes, config.split)

    def due(self, step: int, total: int) -> bool:
        """Is it time? The last step always is."""
        return step == total or step % self._config.interval == 0

    def __call__(self, state: TrainState, say: Say = lambda _: None) -> dict[str, float]:
        """Success rate and more, for the log."""
        say(f"evaluating {self._config.episodes} episodes")
        try:
            policy = self._policy.use(state, self._key)
            metrics = evaluate(self._pool, policy, self.contexts, retries=self._retries).metrics()
        finally:
            self._policy.use(None, self._key)
        say(f"success {metrics['eval/success_rate']:.2f}")
        return metrics
