"""RLT (RL tokens, arXiv 2604.23073): a small actor edits the chunk of a frozen policy.

    token      z(s): learned queries on the policy's prefix, taught by the critic's loss
    edit       a = ã + δ,  δ = limit · tanh(π(z, state, ã)),      ã ~ π₀(s)
    critic     Q(s, a) over chunks, from the data, with a' = ã' + δ̄(s', ã') + noise,  ã' ~ π₀(s'),  δ̄: target actor
    actor      min E[-Q(s, ã + δ) / range + β mean δ²]            TD3+BC (arXiv 2106.06860), towards the reference

In a share of the samples the actor sees zeros instead of ã, so that it must use the token and not just copy. It edits
what the critic scores: the first `critic_horizon` steps and the robot's real dimensions.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from pirl.agents.agent import Parts, TrainState
from pirl.agents.chunk_critic import copied
from pirl.agents.frozen_policy import FrozenPolicy, Learned, Proposal
from pirl.agents.frozen_policy_config import RLTokenConfig
from pirl.models import flow
from pirl.models.chunk_actor import ChunkActor
from pirl.models.critic import CriticInputs
from pirl.models.params import Params


class Draws(NamedTuple):
    """Random numbers for N chunks per observation."""

    flow: Float[Array, "B N H A"]
    """Initial noise of the policy's flow."""
    edit: Float[Array, "B N H A"]
    """Noise on the edits."""


@dataclass(frozen=True, kw_only=True)
class RLToken(FrozenPolicy):
    """Acts with an edited chunk of the frozen policy, or the critic's best of several."""

    config: RLTokenConfig
    flow_steps: int = 0
    """Euler steps when acting; 0: as in training."""

    @classmethod
    def build(cls, config: RLTokenConfig, parts: Parts) -> "RLToken":
        """Build the algorithm from its settings and parts."""
        critic = parts.critic
        return cls(
            **cls.shared(config, parts),
            actor=ChunkActor.reading(
                critic,
                hidden=config.actor_hidden,
                horizon=critic.critic_horizon,
                action_dim=critic.real_action_dim,
                reads_chunk=True,
            ),
        )

    def more_targets(self, actor: Params) -> dict[str, Params]:
        """The target actor δ̄."""
        return {"actor": copied(actor)}

    # The edit

    def edits(
        self,
        actor: Params,
        token: Float[Array, "B T"],
        state: Float[Array, "B S"],
        references: Float[Array, "B N H A"],
        dropped: Bool[Array, "B N"] | None = None,
    ) -> Float[Array, "B N h a"]:
        """δ for each reference chunk; the actor sees zeros instead of dropped ones."""
        shown = references if dropped is None else jnp.where(dropped[..., None, None], 0.0, references)
        return self.config.edit_limit * jnp.tanh(self.actor(actor, token, state, shown)[..., 0])

    def edited(self, references: Float[Array, "B N H A"], edits: Float[Array, "B N h a"]) -> Float[Array, "B N H A"]:
        """ã + δ."""
        return references.at[:, :, : edits.shape[2], : edits.shape[3]].add(edits)

    def noisy(self, edits: Float[Array, "B N h a"], noise: Float[Array, "B N H A"]) -> Float[Array, "B N h a"]:
        """Edits with exploration noise, clipped to the limit."""
        limit, cut = self.config.edit_limit, noise[:, :, : edits.shape[2], : edits.shape[3]]
        return jnp.clip(edits + self.config.exploration * cut, -limit, limit)

    # Proposals

    def draw(self, key: Array, shape: tuple[int, int, int, int]) -> Draws:
        """Initial noise of the flow, and noise of the edits."""
        flow_key, edit_key = jax.random.split(key)
        return Draws(jax.random.normal(flow_key, shape), jax.random.normal(edit_key, shape))

    def ahead(self, state: TrainState, context: Any, inputs: CriticInputs, draws: Draws) -> Float[Array, "B N H A"]:
        """The policy's chunks at s', edited by the target actor with noise."""
        references = self.sampled(state.policy, context, draws.flow)
        edits = self.edits(state.target["actor"], self.token(state, inputs), inputs.state, references)
        return self.acts(state, self.edited(references, self.noisy(edits, draws.edit)), references)

    def propose(self, state: TrainState, context: Any, inputs: CriticInputs, draws: Draws) -> Proposal:
        """The policy's chunks at s, unedited."""
        references = self.sampled(state.policy, context, draws.flow)
        return Proposal(inputs, self.token(state, inputs), references, draws.flow)

    def done(self, state: TrainState, proposal: Proposal) -> Float[Array, "B N H A"]:
        """The proposal's chunks, edited by the actor."""
        edits = self.edits(state.params["actor"], proposal.token, proposal.inputs.state, proposal.chunks)
        return jax.lax.stop_gradient(self.acts(state, self.edited(proposal.chunks, edits), proposal.chunks))

    # Learning

    def actor_loss(
        self, actor: Params, critic: Params, proposal: Proposal, dropped: Bool[Array, "B N"]
    ) -> tuple[Float[Array, ""], tuple[Array, Array]]:
        """(-Q(s, ã + δ) / range + β mean δ², (Q, mean δ²))."""
        low, high = self.value_range
        edits = self.edits(actor, proposal.token, proposal.inputs.state, proposal.chunks, dropped)
        embedding = self.critic.embed(critic, proposal.inputs)
        q = self.values(critic, embedding, self.edited(proposal.chunks, edits)).mean()
        size = jnp.square(edits).mean()
        return -q / (high - low) + self.config.edit_cost * size, (q, size)

    def learn(self, state: TrainState, critic: Params, proposal: Proposal, key: Array) -> Learned:
        """One step of the actor."""
        dropped = jax.random.bernoulli(key, self.config.reference_dropout, proposal.chunks.shape[:2])
        (loss, (q, size)), climb = jax.value_and_grad(self.actor_loss, has_aux=True)(
            state.params["actor"], critic, proposal, dropped
        )
        learned = self.stepped(state, {"actor": climb}, when_open=frozenset({"actor"}))
        of_policy = self.values(critic, self.critic.embed(critic, proposal.inputs), proposal.chunks).mean()
        metrics = {"actor/loss": loss, "actor/edit_gain": q - of_policy, "actor/edit_size": jnp.sqrt(size)}
        return learned._replace(metrics=learned.metrics | metrics)

    # Acting

    def plan(
        self, state: TrainState, context: Any, keys: Key[Array, "B"], count: int, steer: flow.Steer | None
    ) -> Float[Array, "B N H A"]:
        """The policy's chunks, edited by the actor."""
        inputs, sizes = CriticInputs.of(context), (count, self.policy.horizon, self.policy.action_dim)
        steps = self.flow_steps or self.config.flow_steps
        references = flow.sample(
            self.policy, state.policy, context, flow.noise(keys, *sizes), num_steps=steps, steer=steer
        )
        edits = self.edits(state.params["actor"], self.token(state, inputs), inputs.state, references)
        if self.exploring:
            edits = self.noisy(edits, flow.noise(jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys), *sizes))
        return self.acts(state, self.edited(references, edits), references)
