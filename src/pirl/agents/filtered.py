"""Filtered behaviour cloning: imitate the chunks with the highest discounted returns. No value is learned.

    w = 1[G ≥ q] / share          q: the (1 - share) quantile of the returns G, from t to the end of the episode

The baseline for every algorithm that learns values: what it gains, no value was needed for. A chunk of an episode whose
return nobody knows (cut off, unlabelled) is never among the best. With a discount below 1 a slow success is worth less
than a fast one, and a late step more than an early one: the filter knows the time.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from pirl.agents.advantage_config import FilteredConfig
from pirl.agents.agent import Metrics, TrainState
from pirl.agents.bc import BC
from pirl.agents.learner import accumulated
from pirl.agents.objectives import moving_quantile
from pirl.models.params import Params

RATE = 0.05
"""How far the quantile moves towards that of the latest batch."""


@dataclass(frozen=True, kw_only=True)
class Filtered(BC):
    """min E[w ‖v(x_t, t | s) - (ε - a)‖²] over the data's chunks a."""

    config: FilteredConfig  # type: ignore[assignment]

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, around given policy weights where there are some."""
        state = super().init(key, policy_params)
        return replace(state, scalars={"quantile": jnp.float32(0.0)})

    def weights(self, returns: Float[Array, "B"], quantile: Float[Array, ""]) -> Float[Array, "B"]:
        """What each chunk counts for."""
        return (jnp.nan_to_num(returns, nan=-jnp.inf) >= quantile) / self.config.share

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """One step on a Q-chunk batch; the quantile is that of the batches so far, this one included."""
        observation, actions, draws = self._inputs(batch, key)
        trainable, frozen = self.learner.split(state.params["policy"])
        returns, c = batch["mc_return"], self.config
        quantile = moving_quantile(state.scalars["quantile"], returns, 1 - c.share, RATE, first=state.step == 0)
        weight = self.weights(returns, quantile)

        def loss(trainable: Params, part: Any) -> tuple[Array, Array]:
            weight, *rest = part
            per_sample = self.loss(self.learner.join(trainable, frozen), *rest)
            return (weight * per_sample).mean(), per_sample

        parts = (weight, observation, actions, batch["valid"], draws)
        value, per_sample, grads = accumulated(loss, trainable, parts, c.parts)
        params, opt = self.learner.step(state.params["policy"], grads, state.opt["policy"])
        metrics = {
            "policy/loss": value,
            "policy/flow_loss": per_sample.mean(),
            "policy/grad_norm": optax.tree.norm(grads),
            "filter/quantile": quantile,
            "filter/share": jnp.mean(weight > 0),
            "data/valid_fraction": jnp.mean(batch["valid"]),
        }
        ema = {name: self.learner.average(average, params) for name, average in state.ema.items()}
        new = replace(state, step=state.step + 1, params={"policy": params}, ema=ema, opt={"policy": opt})
        return replace(new, scalars={"quantile": jax.lax.stop_gradient(quantile)}), metrics
