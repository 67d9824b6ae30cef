"""ACRLPD: Q-chunking (arXiv 2507.07969) on a flow policy, with the improvement distilled into the policy's weights.

    critic   y = Σ_{l<L} γ^l r_l + γ^L · mask · Q̄(s_{t+L}, a*)      a* = argmax_n Q(s_{t+L}, a^n),  a^n ~ π
    actor    min E[ w · ‖v(x_t, t | s) - u‖² ]      w = min(exp(A/β), cap) / mean,  A = Q(s, a) - mean_n Q(s, a^n)
             or with a learned V:                   A = Q(s, a) - V(s)

The prefix of each observation is encoded once per step; its features serve the critic (which sends no gradient back),
its keys and values the N candidates and the flow loss. Candidates are chosen by the online critic and valued by the
target critic. β follows the advantages so that the weights keep a given effective sample size.
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
"""How far log β, the mean weight and the typical spread move towards those of the latest batch."""


@dataclass(frozen=True, kw_only=True)
class ACRLPD(QChunking):
    """The critic and everything but the actor is `QChunking`."""

    config: ACRLPDConfig

    @property
    def compares(self) -> bool:
        """Plain Q-chunking imitates all alike."""
        return self.config.actor != "best_of_n" or self.config.calql_weight > 0

    @property
    def samples(self) -> bool:
        """`distill` chooses among them, and their spread is the scale of advantages."""
        return super().samples or self.config.actor == "distill" or self.config.scale_by_state

    @property
    def holds(self) -> bool:
        """The policy, where it is better than its data."""
        return self.config.actor_warmup == "hold"

    def more_targets(self, policy: Params) -> dict[str, Params]:
        """For `distill`, the policy that training started from.

        Candidates of a policy that is trained on them feed on the critic's errors (measured: success falls to zero
        within 400 steps); those of the policy it started from stay where the data are.
        """
        if self.config.actor != "distill":
            return {}
        return {"policy": jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy)}

    def scalars(self) -> dict[str, Array]:
        """The temperature, the mean of the weights, and how far candidates' values typically lie apart."""
        (low, high), start = self.value_range, self.config.beta_init
        numbers = {"beta": jnp.float32(start * (high - low)), "mean_weight": jnp.float32(1.0)}
        return super().scalars() | numbers | ({"spread": numbers["beta"]} if self.config.scale_by_state else {})

    def actor_loss(self, params: Params, state: TrainState, part: ActorPart) -> tuple[Float[Array, ""], ActorAux]:
        """The weighted flow-matching loss. One prefix pass serves candidates, advantages, cloning and the critic."""
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
            """Flow-matching loss of each sample towards given chunks."""
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
        """N chunks of the policy at s; for `distill`, of the policy it started from."""
        if "policy" in state.target:
            params = state.target["policy"]
            context = context if self.encoder_frozen else self.policy.encode(params, part.observation)
        return self.sampled(params, context, part.candidate_noise)

    def adapted(self, state: TrainState, aux: ActorAux) -> dict[str, Array]:
        """Move these numbers towards those of this batch's imitated rows; the next step uses them."""
        if not self.compares:
            return state.scalars
        c, (low, high) = self.config, self.value_range
        beta, mean = state.scalars["beta"], state.scalars["mean_weight"]
        seen = aux.flow_loss > 0  # a row that the actor may not imitate costs nothing
        # Where the ensemble only differs by chance, no advantage is to be believed: all count the same.
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
        """The share of the advantages that is not noise."""
        return ob.agreement(aux.members.T, halved=self.config.halved)

    def actor_metrics(self, state: TrainState, aux: ActorAux) -> Metrics:
        """Advantages and their weights."""
        if not self.compares:
            return {}
        return {
            "actor/advantage": aux.advantage.mean(),
            "actor/ess": ob.effective_sample_size(aux.weight, aux.flow_loss > 0),
            "actor/beta": state.scalars["beta"],
            "actor/agreement": self.agreement(aux),
        }

    def candidates_to_act(self, best_of: int | None) -> int:
        """By default `best_of_n` chooses among N, while `awr` and `distill` sample: they improve the weights."""
        return best_of or (self.config.num_action_samples if self.config.actor == "best_of_n" else 1)
