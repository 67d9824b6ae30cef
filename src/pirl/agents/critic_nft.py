"""NFT with a learned advantage: DiffusionNFT's signed flow loss (arXiv 2509.16117) on Q-chunking's critic.

    A    = clip((Q(s, a) - mean_n Q(s, a^n)) / scale, ±1) · ρ · κ       of a data chunk a,  a^n ~ π
    min    (1 - λ) E[r ‖v⁺ - u‖² + (1 - r) ‖v⁻ - u‖²] + λ E‖v - u‖²       r = (1 + A)/2
           v⁺ = (1 - β) v_old + β v,   v⁻ = (1 + β) v_old - β v          v_old follows v slowly

NFT was made for rollouts of v_old itself. Off-policy data contain chunks that v_old already avoids; every step pushes
it further away from them and v_old follows, so without a bound velocities grow exponentially. κ = min(1, L̄/L_old) for
A < 0 is that bound: it fades the repulsion of chunks whose flow loss under v_old, L_old, exceeds that of the preferred
chunks, L̄. With λ > 0 repulsion and imitation then balance at a finite distance, ‖v - u‖² = (1 - λ) β L̄/λ. ρ is the
share of the advantages that the ensemble agrees on. With `correction_weight`, chunks that an operator chose in place of
the policy have A = 1 regardless of the critic, and at least that loss weight.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.agents import corrections
from pirl.agents import flow_objectives as fo
from pirl.agents import objectives as ob
from pirl.agents.agent import Metrics, TrainState
from pirl.agents.critic_actor_config import CriticNFTConfig
from pirl.agents.q_chunking import ActorAux, ActorPart, QChunking
from pirl.models import flow
from pirl.models.critic import CriticInputs
from pirl.models.params import Params
from pirl.records import CORRECTED

RATE = 0.1
"""Rate at which the scale of advantages, ρ and L̄ follow the latest batch."""


@dataclass(frozen=True, kw_only=True)
class CriticNFT(QChunking):
    """`QChunking` with NFT's actor loss."""

    config: CriticNFTConfig

    def more_targets(self, policy: Params) -> dict[str, Params]:
        """v_old's trainable leaves; it shares the policy's frozen ones."""
        return {"old": jax.tree.map(jnp.copy, self.policy_learner.split(policy)[0])}

    def followed(self, state: TrainState, policy: Params) -> dict[str, Params]:
        """v_old equals the policy during imitation, then follows it at `old_rate`."""
        rate = jnp.where(self.actor_open(state), self.config.old_rate, 1.0)
        return state.target | {"old": ob.soft_update(state.target["old"], self.policy_learner.split(policy)[0], rate)}

    def scalars(self) -> dict[str, Array]:
        """Initial scale of the advantages, ρ and L̄."""
        low, high = self.value_range
        numbers = {"scale": 0.1 * (high - low), "agreement": 1.0, "error": 1.0}
        return super().scalars() | {name: jnp.float32(number) for name, number in numbers.items()}

    def actor_loss(self, params: Params, state: TrainState, part: ActorPart) -> tuple[Float[Array, ""], ActorAux]:
        """NFT and imitation at the same flow draws. One prefix pass serves both, the candidates and the critic."""
        c, dims = self.config, self.critic.real_action_dim
        context = self.policy.encode(params, part.observation)
        fixed = jax.lax.stop_gradient(context)
        candidates, inputs = self.sampled(params, fixed, part.candidate_noise), CriticInputs.of(fixed)
        found = self.compared(state, inputs, part.critic_actions, candidates)

        old = self.policy_learner.join(state.target["old"], self.policy_learner.split(params)[1])
        past = fixed if self.encoder_frozen else self.policy.encode(old, part.observation)
        x_t, u = flow.interpolate(part.actions, part.draws)
        v, v_old = (
            self.policy.velocity(weights, seen, x_t, part.draws.time).astype(jnp.float32)
            for weights, seen in ((params, context), (old, past))
        )
        valid = self.imitated(part)
        imitation, old_error = (flow.chunk_loss(jnp.square(field - u), valid=valid, dims=dims) for field in (v, v_old))
        signed = self.signed(found.advantage, old_error, state)
        if part.acted_by is not None:
            signed = jnp.where(corrections.begun_by(part.acted_by, CORRECTED), 1.0, signed)
        nft = flow.chunk_loss(fo.nft_loss(v, v_old, u, signed[:, None] * valid, c.nft_beta), dims=dims)
        share = jnp.where(self.actor_open(state), c.bc_loss_weight, 1.0)
        loss = self.raised(jnp.ones(()), part) * (share * imitation + (1 - share) * nft)
        logged = {"actor/drift": flow.chunk_loss(jnp.square(v - v_old), dims=dims), "actor/old_error": old_error}
        spread = found.values.std(1)
        aux = ActorAux(inputs, candidates, found.members, found.advantage, spread, signed, imitation, logged)
        return loss.mean(), jax.lax.stop_gradient(aux)

    def signed(
        self, advantage: Float[Array, "B"], old_error: Float[Array, "B"], state: TrainState
    ) -> Float[Array, "B"]:
        """Advantages scaled to [-1, 1] for NFT, times ρ and κ."""
        known = state.scalars
        signed = jnp.clip(advantage / known["scale"], -1.0, 1.0)
        if self.config.heed_agreement:
            signed = signed * known["agreement"]
        near = jnp.minimum(1.0, known["error"] / jnp.maximum(old_error, 1e-6))
        return jax.lax.stop_gradient(jnp.where(signed < 0, signed * near, signed))

    def adapted(self, state: TrainState, aux: ActorAux) -> dict[str, Array]:
        """Update scale, ρ and L̄ from this batch, for the next step."""
        (low, high), known = self.value_range, state.scalars
        level, first = self.config.advantage_quantile, state.step == 0
        scale = ob.moving_quantile(known["scale"], jnp.abs(aux.advantage), level, RATE, first=first)
        preferred = (aux.advantage > 0) & (aux.flow_loss > 0)  # rows with nothing to imitate have loss 0
        error = jnp.where(preferred.any(), ob.masked_mean(aux.logged["actor/old_error"], preferred), known["error"])
        return known | {
            "scale": jnp.maximum(scale, 1e-4 * (high - low)),
            "agreement": (1 - RATE) * known["agreement"]
            + RATE * ob.agreement(aux.members.T, halved=self.config.halved),
            "error": (1 - RATE) * known["error"] + RATE * error,
        }

    def actor_metrics(self, state: TrainState, aux: ActorAux) -> Metrics:
        """Statistics of the advantages before and after scaling."""
        return {
            "actor/advantage": aux.advantage.mean(),
            "actor/advantage_scale": state.scalars["scale"],
            "actor/agreement": state.scalars["agreement"],
            "actor/negative_share": fo.negative_share(aux.weight, (aux.flow_loss > 0).astype(jnp.float32)),
        }
