"""Behaviour cloning by flow matching: OpenPI's training step. Warm start and baseline for all other algorithms."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from pirl.agents.agent import Agent, Metrics, TrainState
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner, accumulated
from pirl.models import flow
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy


class Counts(NamedTuple):
    """Masks and weights of the imitation loss on a batch."""

    steps: Float[Array, "B H"] | None
    """1 for the steps of each chunk in the loss; None: all, as in OpenPI's loss."""
    weight: Float[Array, "B"] | None = None
    """Chunk weights, 1 on average; None: all equal."""
    scalars: Mapping[str, Array] = MappingProxyType({})
    """Updated adaptive scalars of the state."""
    logged: Mapping[str, Array] = MappingProxyType({})
    """Further metrics."""


@dataclass(frozen=True, kw_only=True)
class BC(Agent):
    """min E ‖v(x_t, t | s) - (ε - a)‖² over the data's chunks a."""

    policy: FlowPolicy
    config: BCConfig
    policy_learner: Learner
    """Optimizer, mask and EMA of the policy's weights."""
    real_action_dim: int
    """Action dimensions the robot has; the rest is padding."""
    flow_steps: int = 10
    """Euler steps when acting."""

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, with the given policy weights or freshly initialised ones."""
        params, opt = self.policy_learner.init(self.policy.init(key) if policy_params is None else policy_params)
        ema = {} if self.policy_learner.ema_decay is None else {"policy": jax.tree.map(jnp.copy, params)}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params={"policy": params},
            ema=ema,
            opt={"policy": opt},
            frozen=self.policy_learner.frozen(params),
        )

    def counts(self, state: TrainState, batch: Any) -> Counts:
        """Masks and weights for a batch: all chunks equal; `Filtered` and `DAgger` override it."""
        return Counts(batch["valid"] if self.config.mask_padding else None)

    def loss(
        self, params: Params, observation: Observation, actions: Float[Array, "B H A"], valid: Any, draws: flow.Draws
    ) -> Float[Array, "B"]:
        """Flow-matching loss of each sample, over its `valid` steps (None: all)."""
        error = flow.squared_error(self.policy, params, self.policy.encode(params, observation), actions, draws)
        return flow.chunk_loss(error, valid=valid, dims=self.real_action_dim if self.config.mask_padding else None)

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """One step on a Q-chunking batch. A batch with all weights 0 has zero gradient."""
        observation, actions, draws = self._inputs(batch, key)
        trainable, frozen = self.policy_learner.split(state.params["policy"])
        counts = self.counts(state, batch)

        def loss(trainable: Params, part: Any) -> tuple[Array, Array]:
            weight, *rest = part
            per_sample = self.loss(self.policy_learner.join(trainable, frozen), *rest)
            return (per_sample if weight is None else weight * per_sample).mean(), per_sample

        parts = (counts.weight, observation, actions, counts.steps, draws)
        value, per_sample, grads = accumulated(loss, trainable, parts, self.config.parts)
        params, opt = self.policy_learner.step(state.params["policy"], grads, state.opt["policy"])
        alike = counts.weight is None
        spread = {"policy/loss_std": per_sample.std()} if alike else {"policy/flow_loss": per_sample.mean()}
        metrics = {
            "policy/loss": value,
            **spread,
            "policy/grad_norm": optax.tree.norm(grads),
            "data/valid_fraction": jnp.mean(batch["valid"]),
            **counts.logged,
        }
        new = replace(
            state,
            step=state.step + 1,
            params={"policy": params},
            ema={name: self.policy_learner.average(average, params) for name, average in state.ema.items()},
            opt={"policy": opt},
            scalars=state.scalars | dict(counts.scalars),
        )
        return new, metrics

    def _inputs(self, batch: Any, key: Array) -> tuple[Observation, Array, flow.Draws]:
        # OpenPI's order of keys: the same key gives the same augmentation and noise, but other times (`flow.draw`).
        augment_key, noise_key, time_key = jax.random.split(key, 3)
        observation = Observation.from_dict(batch["observations"])
        observation = self.policy.prepare(observation, augment_key if self.config.augment else None)
        c, actions = self.config, batch["actions"]
        draws = flow.draw(noise_key, time_key, actions, c.flow_draws, delay=c.real_time_delay)
        return observation, actions, draws
