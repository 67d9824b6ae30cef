"""Filtered behaviour cloning: imitate the chunks with the highest discounted returns. No value is learned.

    w = 1[G ≥ q] / share          q: the (1 - share) quantile of the returns G, from t to the end of the episode

The baseline for every algorithm that learns values: its gains need no value. Chunks whose return is unknown (truncated,
unlabelled) are never selected. With a discount below 1, slow successes have lower returns than fast ones, and early
steps lower returns than late ones: the filter depends on time.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.agents.advantage_config import FilteredConfig
from pirl.agents.agent import TrainState
from pirl.agents.bc import BC, Counts
from pirl.agents.objectives import moving_quantile
from pirl.models.params import Params

RATE = 0.05
"""Rate at which the quantile follows the latest batch."""


@dataclass(frozen=True, kw_only=True)
class Filtered(BC):
    """min E[w ‖v(x_t, t | s) - (ε - a)‖²] over the data's chunks a."""

    config: FilteredConfig

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, with the given policy weights or freshly initialised ones."""
        state = super().init(key, policy_params)
        return replace(state, scalars={"quantile": jnp.float32(0.0)})

    def weights(self, returns: Float[Array, "B"], quantile: Float[Array, ""]) -> Float[Array, "B"]:
        """Chunk weights: 1/share from the quantile on, else 0; unknown returns (NaN) have 0."""
        return (jnp.nan_to_num(returns, nan=-jnp.inf) >= quantile) / self.config.share

    def counts(self, state: TrainState, batch: Any) -> Counts:
        """Weights by the running quantile of returns, including this batch's."""
        returns, first = batch["mc_return"], state.step == 0
        quantile = moving_quantile(state.scalars["quantile"], returns, 1 - self.config.share, RATE, first=first)
        weight = self.weights(returns, quantile)
        logged = {"filter/quantile": quantile, "filter/share": jnp.mean(weight > 0)}
        return super().counts(state, batch)._replace(weight=weight, scalars={"quantile": quantile}, logged=logged)
