"""HG-DAgger (arXiv 1810.02890) on a flow policy: imitate demonstrations and corrections, not the steps before
takeovers.

    min Σ_i w_i ℓ_i / Σ_i w_i        ℓ_i = mean_h ‖v(x_t, t | s_i) - u‖²_h   over the steps that count

    w        1 for demonstrations, `correction_weight` for a person's chunks, `policy_weight` for the policy's own,
             and 0 for those that begin in the `data.takeover_window` steps before a takeover
    steps    until the robot changes hands, without those that a takeover is blamed on

A correction shows what to do in states that the policy itself reached, where demonstrations say nothing; what led to a
takeover is not imitated. No value is learned. On a dataset without corrections this is behaviour cloning.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from pirl.agents import corrections
from pirl.agents.agent import Metrics, TrainState
from pirl.agents.bc import BC
from pirl.agents.config import DAggerConfig
from pirl.agents.learner import accumulated
from pirl.models import flow
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED


@dataclass(frozen=True, kw_only=True)
class DAgger(BC):
    """Behaviour cloning, weighted by who acted."""

    config: DAggerConfig

    def loss(
        self, params: Params, observation: Observation, actions: Float[Array, "B H A"], valid: Any, draws: flow.Draws
    ) -> Float[Array, "B"]:
        """Flow-matching loss of each sample over its `valid` steps, whatever these are."""
        error = flow.squared_error(self.policy, params, self.policy.encode(params, observation), actions, draws)
        return flow.chunk_loss(error, valid=valid, dims=self.real_action_dim if self.config.mask_padding else None)

    def weights(self, batch: Any) -> tuple[Float[Array, "B"], Float[Array, "B H"]]:
        """What each chunk counts for, 1 on average over the batch, and 1 for the steps of it that do."""
        c, acted_by = self.config, batch["acted_by"]
        steps = corrections.imitated_steps(acted_by)
        steps = steps * batch["valid"] if c.mask_padding else steps
        weight = corrections.chunk_weights(acted_by, correction=c.correction_weight, autonomous=c.policy_weight)
        return weight / jnp.maximum(weight.mean(), jnp.finfo(weight.dtype).tiny), steps

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """One step on a Q-chunk batch. A batch of nothing but weights 0 teaches nothing."""
        observation, actions, draws = self._inputs(batch, key)
        trainable, frozen = self.learner.split(state.params["policy"])
        weight, steps = self.weights(batch)

        def loss(trainable: Params, part: Any) -> tuple[Array, Array]:
            weight, *rest = part
            per_sample = self.loss(self.learner.join(trainable, frozen), *rest)
            return (weight * per_sample).mean(), per_sample

        parts = (weight, observation, actions, steps, draws)
        value, per_sample, grads = accumulated(loss, trainable, parts, self.config.parts)
        params, opt = self.learner.step(state.params["policy"], grads, state.opt["policy"])
        shares = {who: corrections.begun_by(batch["acted_by"], who).mean() for who in (AUTONOMOUS, BLAMED, CORRECTED)}
        metrics = {
            "policy/loss": value,
            "policy/flow_loss": per_sample.mean(),
            "policy/grad_norm": optax.tree.norm(grads),
            "data/autonomous": shares[AUTONOMOUS],
            "data/blamed": shares[BLAMED],
            "data/corrected": shares[CORRECTED],
            "data/imitated": jnp.mean(steps * (weight > 0)[:, None]),
            "data/valid_fraction": jnp.mean(batch["valid"]),
        }
        ema = {name: self.learner.average(average, params) for name, average in state.ema.items()}
        return replace(state, step=state.step + 1, params={"policy": params}, ema=ema, opt={"policy": opt}), metrics
