"""What algorithms share that learn from groups of their own rollouts: `RIPT` and `FlowPPO`.

Their batches are rows of rollouts, and demonstrations where these are imitated too. The weights that rolled out stay in
the state for an iteration: its first minibatch (`fresh`) takes them from the acting weights before the update.
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
"""Values from which on a leaf of the weights that rolled out is kept in the model's compute type. Norms and heads are
below: they compute in float32, and are next to nothing in memory."""


class Demos(NamedTuple):
    """Chunks of demonstrations."""

    observation: Observation
    actions: Float[Array, "B H A"]
    valid: Float[Array, "B H"]
    draws: flow.Draws


@dataclass(frozen=True, kw_only=True)
class OwnRollouts(Agent):
    """The half of an algorithm that is not its loss. Random draws are made for the whole batch."""

    policy: FlowPolicy
    config: OwnRolloutsConfig
    real_action_dim: int
    """Action dimensions the robot has; the rest is padding."""
    flow_steps: int = 10
    """Euler steps when acting."""
    encoder_frozen: bool = False
    """Does nothing that `policy.encode` reads train? Then one prefix serves the weights that rolled out as well."""
    compute_dtype: str = "float32"
    """The type the model casts its weights to before it multiplies: those that rolled out are kept in it."""

    def columns(self, sizes: BatchSizes) -> BatchSpec:
        """Additional columns of the rows."""
        raise NotImplementedError(f"{type(self).__name__}.columns")

    def batch_spec(self, sizes: BatchSizes) -> BatchSpec:
        """Rows of rollouts, and demonstrations where they are imitated too: see `update`."""
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
        """The observations as the policy sees them."""
        observation = Observation.from_dict(batch["observations"])
        return self.policy.prepare(observation, key if self.config.augment else None)

    def drawn(self, batch: Any, key: Array) -> tuple[Observation, flow.Draws]:
        """Observations and points of the flow for these chunks."""
        augment_key, noise_key, time_key = jax.random.split(key, 3)
        draws = flow.draw(noise_key, time_key, batch["actions"], self.config.flow_draws)
        return self.prepared(batch, augment_key), draws

    def demos(self, batch: Any, key: Array) -> Demos | None:
        """The demonstrations of a batch, where they are imitated."""
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
        """Flow-matching loss on each demonstrated chunk, of the weights that act; `policy` encodes."""
        context = self.policy.encode(policy, demos.observation)
        error = flow.squared_error(self.policy, acting, context, demos.actions, demos.draws)
        return flow.chunk_loss(error, valid=demos.valid, dims=self.real_action_dim)

    def copied_small(self, weights: Any) -> Any:
        """A copy of the weights that act, as it is kept for an iteration."""

        def copy(leaf: Array) -> Array:
            return jnp.array(leaf, jnp.dtype(self.compute_dtype) if leaf.size >= LARGE else leaf.dtype, copy=True)

        return jax.tree.map(copy, weights)

    def that_rolled_out(self, kept: Any, acting: Any, batch: Any) -> Any:
        """The weights that act now if the batch is the first of an iteration, else those that are kept."""
        fresh = jnp.max(batch["fresh"]) > 0
        return jax.tree.map(lambda old, now: jnp.where(fresh, now.astype(old.dtype), old), kept, acting)

    def share(self, batch: Any) -> Float[Array, "B"]:
        """How much each row counts, 1 on average; 0 for rows that only fill up the batch."""
        counted = jnp.asarray(batch["weight"])
        return counted / jnp.maximum(counted.mean(), jnp.finfo(jnp.float32).tiny)

    def means(self, logged: Metrics, share: Float[Array, "B"]) -> Metrics:
        """Weighted means over the rows that count; for demonstrations over all rows."""
        return {name: x.mean() if name == "bc/loss" else (share * x).mean() for name, x in logged.items()}
