"""User-defined evaluation during training: `train(config, eval_fn=...)` or `--eval-fn`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import numpy as np

from pirl import trust
from pirl.agents.agent import Agent, TrainState
from pirl.config import RLTrainConfig
from pirl.data.transforms import Transform
from pirl.errors import ConfigError
from pirl.parallel.distributed import Meeting
from pirl.rollout.collector import Say
from pirl.rollout.hosts import weights_to_act
from pirl.rollout.policy import ChunkPolicy, WithWeights

GROUP = "eval_fn"
"""Prefix of metrics whose names have no slash."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot(WithWeights):
    """A run at one step, passed to the user's function.

    `state` has all weights; with several hosts only the acting ones, on this process's devices. Do not keep it: the
    next update donates it.
    """

    step: int
    """Steps so far; 0 before training."""
    agent: Agent
    """The algorithm."""
    config: RLTrainConfig
    """The run's configuration."""


EvalFn = Callable[[Snapshot], Mapping[str, float]]
"""The user's function; returns numbers by name."""


class UserEvaluation:
    """Calls the function and checks its result."""

    def __init__(
        self, function: EvalFn, config: RLTrainConfig, agent: Agent, transform: Transform, policy: ChunkPolicy
    ) -> None:
        self._function, self._config, self._agent = function, config, agent
        self._transform, self._policy = transform, policy

    @property
    def interval(self) -> int:
        """`evaluation.interval`, or `held_out.interval` without evaluation."""
        return (self._config.evaluation or self._config.held_out).interval

    def __call__(self, state: TrainState, step: int, say: Say = lambda _: None) -> dict[str, float]:
        """Call the function; returns its numbers as metrics."""
        say(f"calling {_name(self._function)}")
        state = weights_to_act(state)
        policy = self._policy.use(state, jax.random.key(0))
        try:
            found = self._function(
                Snapshot(step=step, state=state, agent=self._agent, config=self._config, policy=policy)
            )
        finally:
            self._policy.use(None, jax.random.key(0))
        metrics = checked(found, _name(self._function))
        # Training may depend on the metrics and hosts may compute different ones: all use those of process 0.
        return metrics if jax.process_count() == 1 else Meeting("eval_fn").gather(metrics)[0]


def checked(found: Any, name: str) -> dict[str, float]:
    """The function's result as metrics, `eval_fn/` prefixed; non-finite values are dropped, other types raise."""
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"eval_fn {name} returned {type(found).__name__}, expected numbers by name",
            hint='return a dict such as {"reached": 0.8}',
        )
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, Real | np.ndarray | jax.Array) or np.shape(value):  # type: ignore[arg-type]
            raise ConfigError(
                f"eval_fn {name} returned {key!r}: {type(value).__name__}, expected a name and one number",
                hint="return means, not arrays, and only numbers",
            )
    metrics = {key if "/" in key else f"{GROUP}/{key}": float(value) for key, value in found.items()}
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def find_eval_fn(named: str) -> EvalFn:
    """Import the function named `module:function`, if the user has trusted that name.

    A configuration may come from someone else, and importing runs its code with the user's rights.
    """
    trust.check({"eval_fn": named}, source="the configuration")
    found = trust.load_object(named, what="eval_fn")
    if not callable(found):
        raise ConfigError(
            f"eval_fn {named}: that is a {type(found).__name__}", hint="define it: def name(snapshot): return {...}"
        )
    return found


def _name(function: EvalFn) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
