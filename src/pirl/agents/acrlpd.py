"""ACRLPD: Q-chunking (arXiv 2507.07969) on a flow policy, which trains the policy's weights towards higher values.

    critic   y = Σ_{l<L} γ^l r_l + γ^L · mask · Q̄(s_{t+L}, a*)      a* = argmax_n Q(s_{t+L}, a^n),  a^n ~ π
    actor    min E[ w · ‖v(x_t, t | s) - u‖² ]      w = min(exp(A/β), cap) / mean,  A = Q(s, a) - mean_n Q(s, a^n)
             or with a learned V:                   A = Q(s, a) - V(s)

The prefix of each observation is encoded once per step: its features serve the critic (without gradient into the
policy), its keys and values the N candidates and the flow loss. The online critic chooses among candidates, the target
critic values the choice. β adapts so that the weights keep the configured effective sample size.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.agents import objectives as ob
from pirl.agents.agent import Metrics, TrainState
from pirl.agents.q_chunking import ActorAux, ActorPart, QChunking
from pirl.agents.q_chunking_config import ACRLPDConfig
from pirl.models import flow
from pirl.models.critic import CriticInputs
from pirl.models.params import Params

BETA_RATE = 0.1
"""Rate at which log β, the mean weight and the typical spread follow the latest batch."""


@dataclass(frozen=True, kw_only=True)
class ACRLPD(QChunking):
    """`QChunking` with the actor losses `awr`, `distill` and `best_of_n`."""

    config: ACRLPDConfig

    @property
    def compares(self) -> bool:
        """True unless the actor is plain imitation (`best_of_n`) without Cal-QL."""
        return self.config.actor != "best_of_n" or self.config.calql_weight > 0

    @property
    def samples(self) -> bool:
        """Also for `distill`, which picks the best, and `scale_by_state`, which needs their spread."""
        return super().samples or self.config.actor == "distill" or self.config.scale_by_state

    @property
    def holds(self) -> bool:
        """The policy, where it is better than its data."""
        return self.config.actor_warmup == "hold"

    def more_targets(self, policy: Params) -> dict[str, Params]:
        """For `distill`, the initial policy, which samples the candidates.

        Training a policy on its own candidates amplifies the critic's errors (measured: success falls to zero within
        400 steps); candidates of the initial policy stay near the data.
        """
        if self.config.actor != "distill":
            return {}
        return {"policy": jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy)}

    def scalars(self) -> dict[str, Array]:
        """Initial temperature, mean weight and, with `scale_by_state`, typical spread of the candidates' values."""
        (low, high), start = self.value_range, self.config.beta_init
        numbers = {"beta": jnp.float32(start * (high - low)), "mean_weight": jnp.float32(1.0)}
        return super().scalars() | numbers | ({"spread": numbers["beta"]} if self.config.scale_by_state else {})

    def actor_loss(self, params: Params, state: TrainState, part: ActorPart) -> tuple[Float[Array, ""], ActorAux]:
        """The weighted flow-matching loss. One prefix pass serves candidates, advantages, imitation and the critic."""
        c = self.config
        context = self.policy.encode(params, part.observation)
        fixed = jax.lax.stop_gradient(context)
        candidates, inputs = self._candidates(params, state, fixed, part), CriticInputs.of(fixed)
        found = self.compared(state, inputs, part.critic_actions, candidates)
        advantage, spread = found.advantage, found.values.std(1)
        if c.scale_by_state:
            advantage = ob.scaled_by_state(advantage, spread, state.scalars["spread"])
        warm = self.actor_open(state)
        raw = ob.awr_weights(advantage, state.scalars["beta"], c.weight_cap)

        def cloned(chunks: Array, valid: Array | None) -> Array:
            """Flow-matching loss per sample towards given chunks."""
            error = flow.squared_error(self.policy, params, context, chunks, part.draws)
            return flow.chunk_loss(error, valid=valid, dims=self.critic.real_action_dim)

        imitation = cloned(part.actions, self.imitated(part))
        if c.actor == "awr":
            weight = jnp.where(warm, ob.floored(raw, state.scalars["mean_weight"], c.bc_loss_weight), 1.0)
            loss = imitation * self.raised(weight, part)
        elif c.actor == "distill":
            best = ob.take_candidate(candidates, ob.select_best(found.values))
            share = jnp.where(warm, c.bc_loss_weight, 1.0)
            loss = self.raised(share, part) * imitation + (1 - share) * cloned(best, None)
        else:
            loss = self.raised(jnp.ones(()), part) * imitation
        aux = ActorAux(inputs, candidates, found.members, advantage, spread, raw, imitation)
        return loss.mean(), jax.lax.stop_gradient(aux)

    def _candidates(self, params: Params, state: TrainState, context: Any, part: ActorPart) -> Float[Array, "B N H A"]:
        """N chunks of the policy at s; for `distill`, of the initial policy."""
        if "policy" in state.target:
            params = state.target["policy"]
            context = context if self.encoder_frozen else self.policy.encode(params, part.observation)
        return self.sampled(params, context, part.candidate_noise)

    def adapted(self, state: TrainState, aux: ActorAux) -> dict[str, Array]:
        """Update β, mean weight and spread from this batch's imitated rows, for the next step."""
        if not self.compares:
            return state.scalars
        c, (low, high) = self.config, self.value_range
        beta, mean = state.scalars["beta"], state.scalars["mean_weight"]
        seen = aux.flow_loss > 0  # rows with nothing to imitate have loss 0
        # If the ensemble's advantages are only noise, the target ESS is 1: uniform weights.
        ess = 1 - (1 - c.target_ess) * self.agreement(aux) if c.heed_agreement else c.target_ess
        fitted = jnp.clip(ob.fit_beta(aux.advantage, ess, c.weight_cap, seen), 1e-4 * (high - low), high - low)
        new_beta = jnp.exp((1 - BETA_RATE) * jnp.log(beta) + BETA_RATE * jnp.log(fitted))
        latest = jnp.where(seen.any(), ob.masked_mean(ob.awr_weights(aux.advantage, beta, c.weight_cap), seen), mean)
        new = {"beta": new_beta, "mean_weight": (1 - BETA_RATE) * mean + BETA_RATE * latest}
        if c.scale_by_state:
            typical = jnp.sqrt(jnp.square(aux.spread).mean())
            new["spread"] = (1 - BETA_RATE) * state.scalars["spread"] + BETA_RATE * typical
        return state.scalars | new

    def agreement(self, aux: ActorAux) -> Float[Array, ""]:
        """The share of the advantages' variance that is not noise."""
        return ob.agreement(aux.members.T, halved=self.config.halved)

    def actor_metrics(self, state: TrainState, aux: ActorAux) -> Metrics:
        """Mean advantage, ESS of the weights, β and agreement."""
        if not self.compares:
            return {}
        return {
            "actor/advantage": aux.advantage.mean(),
            "actor/ess": ob.effective_sample_size(aux.weight, aux.flow_loss > 0),
            "actor/beta": state.scalars["beta"],
            "actor/agreement": self.agreement(aux),
        }

    def candidates_to_act(self, best_of: int | None) -> int:
        """Defaults to N for `best_of_n`, and to 1 for `awr` and `distill`, which improve the weights."""
        return best_of or (self.config.num_action_samples if self.config.actor == "best_of_n" else 1)
