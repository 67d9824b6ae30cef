"""Feature vectors of observations: the policy's prefix features pooled over tokens, and the state."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pirl.agents.agent import Agent, TrainState
from pirl.build import build_agent
from pirl.models.critic import CriticInputs
from pirl.models.observation import Observation
from pirl.rollout.policy import model_inputs
from pirl.training import compiler
from pirl.training.acting import Acting

_BATCH = 16


def features(agent: Agent, state: TrainState, observation: Observation) -> Float[Array, "B D"]:
    """Mean and maximum over the unmasked tokens' features, concatenated with the state."""
    return pooled(CriticInputs.of(agent.policy.encode(state.policy, observation)))


def pooled(inputs: CriticInputs) -> Float[Array, "B D"]:
    """`features` of an encoded observation; the state alone without token features."""
    if inputs.features is None or inputs.mask is None:
        return inputs.state
    tokens, real = inputs.features.astype(jnp.float32), inputs.mask[..., None]
    mean = (tokens * real).sum(1) / jnp.maximum(real.sum(1), 1)
    largest = jnp.where(real, tokens, -jnp.inf).max(1)
    return jnp.concatenate([mean, largest, inputs.state], axis=-1)


class Features:
    """Features from one checkpoint for any number of observations; compiled once, in batches of 16."""

    def __init__(self, acting: Acting) -> None:
        self.transform = acting.policy.transform
        self._cameras, self._state = acting.found.config.cameras, acting.state
        agent = build_agent(acting.found.config)

        def program(state: TrainState, inputs: dict[str, Any]) -> Array:
            return features(agent, state, Observation.from_dict(inputs))

        self._program = jax.jit(program, compiler_options=compiler.for_acting() or None)

    def of(self, seen: Iterable[dict[str, Any]]) -> Float[np.ndarray, "N D"]:
        """One row per observation; observations have the robot's own keys."""
        rest = iter(seen)
        return np.concatenate([self._run(part) for part in iter(lambda: list(islice(rest, _BATCH)), [])])

    def _run(self, seen: list[dict[str, Any]]) -> Float[np.ndarray, "n D"]:
        _, inputs = model_inputs(self.transform, [*seen, *[seen[-1]] * (_BATCH - len(seen))], self._cameras)
        rows = np.asarray(jax.device_get(self._program(self._state, inputs)), np.float32)
        return rows[: len(seen)]
