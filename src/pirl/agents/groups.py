"""Base of the algorithms that learn from groups of their own rollouts: `RIPT` and `FlowPPO`.

Their batches are rows of rollouts, plus demonstrations with `bc_weight`. The state keeps the rollout weights for an
iteration: its first minibatch (`fresh`) copies them from the acting weights before the update.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.agents.agent import Agent, Metrics
from pirl.agents.rollout_config import OwnRolloutsConfig
from pirl.errors import ConfigError
from pirl.models import flow
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy
from pirl.records import BatchSizes, BatchSpec, Spec, chunk_spec

LARGE = 2**22
"""Leaves of the rollout weights with at least this many elements are kept in the model's compute dtype. Norms and heads
are smaller: they compute in float32 and need little memory."""


class Demos(NamedTuple):
    """Demonstrated chunks and the points of the flow to evaluate them at."""

    observation: Observation
    actions: Float[Array, "B H A"]
    valid: Float[Array, "B H"]
    draws: flow.Draws


@dataclass(frozen=True, kw_only=True)
class OwnRollouts(Agent):
    """Everything but the loss. Random numbers are drawn for the whole batch, so splitting it changes nothing."""

    policy: FlowPolicy
    config: OwnRolloutsConfig
    real_action_dim: int
    """Action dimensions the robot has; the rest is padding."""
    flow_steps: int = 10
    """Euler steps when acting."""
    encoder_frozen: bool = False
    """Whether all weights that `policy.encode` uses are frozen; the rollout weights then share the prefix."""
    compute_dtype: str = "float32"
    """The dtype of the model's matrix products, in which large rollout weights are kept."""

    def columns(self, sizes: BatchSizes) -> BatchSpec:
        """Specs of the columns that this algorithm adds to a row."""
        raise NotImplementedError(f"{type(self).__name__}.columns")

    def batch_spec(self, sizes: BatchSizes) -> BatchSpec:
        """Rows of rollouts and, with `bc_weight`, demonstrations: see `update`."""
        chunks = chunk_spec(sizes, next_observations=False)
        number = Spec((sizes.batch,), "float32")
        rows = {
            "observations": chunks["observations"],
            "actions": chunks["actions"],
            "executed": chunks["valid"],
            **self.columns(sizes),
            **dict.fromkeys(("advantage", "weight", "fresh"), number),
        }
        demos = {name: chunks[name] for name in ("observations", "actions", "valid")}
        return rows | ({"demos": demos} if self.config.bc_weight else {})

    def prepared(self, batch: Any, key: Array) -> Observation:
        """The batch's observations, prepared for the policy (augmented if configured)."""
        observation = Observation.from_dict(batch["observations"])
        return self.policy.prepare(observation, key if self.config.augment else None)

    def drawn(self, batch: Any, key: Array) -> tuple[Observation, flow.Draws]:
        """(prepared observations, points of the flow) for a batch."""
        augment_key, noise_key, time_key = jax.random.split(key, 3)
        draws = flow.draw(noise_key, time_key, batch["actions"], self.config.flow_draws)
        return self.prepared(batch, augment_key), draws

    def demos(self, batch: Any, key: Array) -> Demos | None:
        """The batch's demonstrations; None without `bc_weight`."""
        if not self.config.bc_weight:
            return None
        if "demos" not in batch:
            raise ConfigError(
                f"bc_weight is {self.config.bc_weight}, and the batch has no `demos`",
                hint="name a dataset of demonstrations, or set bc_weight to 0",
            )
        shown = batch["demos"]
        observation, draws = self.drawn(shown, key)
        return Demos(observation, shown["actions"], shown["valid"], draws)

    def demo_losses(self, policy: Params, acting: Params, demos: Demos) -> Float[Array, "B"]:
        """Flow-matching loss of the weights `acting` on each demonstrated chunk; `policy` encodes the prefix."""
        context = self.policy.encode(policy, demos.observation)
        error = flow.squared_error(self.policy, acting, context, demos.actions, demos.draws)
        return flow.chunk_loss(error, valid=demos.valid, dims=self.real_action_dim)

    def copied_small(self, weights: Any) -> Any:
        """A copy of the acting weights to keep for an iteration, large leaves in `compute_dtype`."""

        def copy(leaf: Array) -> Array:
            return jnp.array(leaf, jnp.dtype(self.compute_dtype) if leaf.size >= LARGE else leaf.dtype, copy=True)

        return jax.tree.map(copy, weights)

    def that_rolled_out(self, kept: Any, acting: Any, batch: Any) -> Any:
        """The rollout weights: the acting weights in the first batch of an iteration, the kept ones afterwards."""
        fresh = jnp.max(batch["fresh"]) > 0
        return jax.tree.map(lambda old, now: jnp.where(fresh, now.astype(old.dtype), old), kept, acting)

    def share(self, batch: Any) -> Float[Array, "B"]:
        """Row weights with mean 1; padding rows have 0."""
        counted = jnp.asarray(batch["weight"])
        return counted / jnp.maximum(counted.mean(), jnp.finfo(jnp.float32).tiny)

    def means(self, logged: Metrics, share: Float[Array, "B"]) -> Metrics:
        """Weighted mean of each metric over rows; for demonstrations the plain mean."""
        return {name: x.mean() if name == "bc/loss" else (share * x).mean() for name, x in logged.items()}
