"""Evaluations during training: success in the environment, held-out metrics, the user's `eval_fn`."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from pirl.agents.agent import TrainState
from pirl.envs.env import RobotEnv
from pirl.errors import PirlWarning
from pirl.parallel.distributed import is_main
from pirl.records import Context, Rollout
from pirl.rollout.collector import Say
from pirl.rollout.config import EvalConfig
from pirl.rollout.contexts import fixed_contexts
from pirl.rollout.evaluate import evaluate
from pirl.rollout.files import ROLLOUTS
from pirl.rollout.films import STRIP, Highlights, write_films
from pirl.rollout.hosts import weights_to_act
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import EnvPool
from pirl.training.held_out import HeldOut
from pirl.training.shown import FOLDER, Shown, states, thin_out


@runtime_checkable
class Measurement(Protocol):
    """Measures the weights every `interval` steps."""

    @property
    def interval(self) -> int:
        """Steps between measurements."""

    def __call__(self, state: TrainState, step: int, say: Say) -> dict[str, float]:
        """Metrics by name. Do not keep the state: the next update donates it."""


class Evaluations:
    """Every measurement of a run, each at its own interval."""

    def __init__(self, parts: Sequence[Measurement]) -> None:
        self.parts = tuple(parts)
        self._last: list[Measurement] = []

    @property
    def hold_out(self) -> bool:
        """Whether the run measures on held-out episodes."""
        return any(isinstance(part, HeldOut) for part in self.parts)

    def due(self, step: int, total: int) -> bool:
        """Whether any measurement is due; at the last step all are."""
        return bool(self._due(step, total))

    @property
    def shown(self) -> Shown | None:
        """Films and solved states of the last call, if it evaluated in the environment."""
        return next((part.shown for part in self._last if isinstance(part, Evaluator)), None)

    def __call__(self, state: TrainState, step: int, total: int, say: Say = lambda _: None) -> dict[str, float]:
        """Metrics of all due measurements."""
        self._last = self._due(step, total)
        metrics: dict[str, float] = {}
        for part in self._last:
            metrics |= part(state, step, say)
        return metrics

    def _due(self, step: int, total: int) -> list[Measurement]:
        return [part for part in self.parts if step == total or step % part.interval == 0]


class Evaluator:
    """Success from fixed initial states: `eval/...` metrics. Noise is fixed too, so only the policy changes results."""

    def __init__(
        self,
        pool: EnvPool,
        policy: ChunkPolicy,
        config: EvalConfig,
        *,
        key: jax.Array,
        retries: int = 2,
        folder: Path | None = None,
        make: Callable[[], RobotEnv] | None = None,
    ) -> None:
        """Films go below `folder`, replayed in an environment from `make`; without it they show the policy's images."""
        self._pool, self._policy, self._config, self._key, self._retries = pool, policy, config, key, retries
        self._folder, self._make = folder, make
        self._solved: dict[Context, bool] = {}
        self.shown: Shown | None = None
        """Films and solved states of the last evaluation."""
        self.contexts = fixed_contexts(pool.info, config.episodes, config.split)

    @property
    def interval(self) -> int:
        """Steps between evaluations."""
        return self._config.interval

    def __call__(self, state: TrainState, step: int, say: Say = lambda _: None) -> dict[str, float]:
        """Evaluate; returns `eval/...` metrics."""
        say(f"evaluating {self._config.episodes} episodes")
        try:
            policy = self._policy.use(weights_to_act(state), self._key)
            seen = Highlights(self._config.films)
            found = evaluate(
                self._pool,
                policy,
                self.contexts,
                retries=self._retries,
                on_rollout=seen.add,
                folder=self._folder and self._folder / ROLLOUTS,
            )
        finally:
            self._policy.use(None, self._key)
        metrics = found.metrics()
        solved = {trial.context: trial.success for trial in found.trials if trial.error is None}
        self.shown = Shown(states=states(self._solved, solved))
        self._solved = solved
        if self._folder is not None and seen.rollouts and is_main():
            say("filming")
            self.shown = replace(self.shown, **self._film(seen.rollouts, self._folder / FOLDER / str(step)))
        say(f"success {metrics['eval/success_rate']:.2f}")
        return metrics

    def _film(self, rollouts: Sequence[Rollout], folder: Path) -> dict[str, Any]:
        """Write films and their strip; errors only warn, so that films never fail a run."""
        try:
            env = self._make() if self._make else None
            try:
                films = write_films(rollouts, env, folder, fps=self._pool.info.fps)
                thin_out(folder.parent, self._config.films_kept)
            finally:
                if env is not None:
                    env.close()
        except Exception as error:
            message = f"no films in {folder}: {type(error).__name__}: {error}"
            warnings.warn(PirlWarning(f"{message} (--evaluation.films 0 makes none)"), stacklevel=2)
            return {}
        return {"films": tuple(films), "strip": folder / STRIP if films else None}
