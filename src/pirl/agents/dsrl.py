"""DSRL (arXiv 2506.15799): reinforcement learning over the noise that a frozen flow policy starts from.

    chunk       a = flow(s, w)                    the frozen policy's, by Euler steps: deterministic
    critic      Q^A(s, a)                         over chunks, from the data, with a' = flow(s', w'), w' ~ μ(s')
    distilled   min (Q^W(s, w) - Q^A(s, flow(s, w)))²,      w ~ N(0, I) or μ(s)
    actor       min E[α log μ(w | s) - Q^W(s, w)]           μ: w = m · tanh(u), u ~ N(mean(s), std(s))
    α           adapts so that the actor's entropy stays near `target_entropy`

The two critics are DSRL's noise-aliased variant: the data need not contain noise, so demonstrations serve as well as
the policy's own episodes. Each step of the chunk has its own noise. Log-densities are means over the noise's elements.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from pirl.agents import objectives as ob
from pirl.agents.agent import Parts, TrainState
from pirl.agents.frozen_policy import FrozenPolicy, Learned, Proposal
from pirl.agents.frozen_policy_config import DSRLConfig
from pirl.models import flow
from pirl.models.chunk_actor import ChunkActor
from pirl.models.critic import Critic, CriticInputs
from pirl.models.params import Params

LOG_STD = (-5.0, 1.0)
"""Range of the actor's log standard deviation, before tanh."""


class Draws(NamedTuple):
    """Random numbers for N noise samples per observation."""

    prior: Float[Array, "B N H A"]
    """Standard normal noise."""
    own: Float[Array, "B N H A"]
    """Standard normal numbers for sampling the actor."""
    coin: Float[Array, "B N"]
    """Uniform; below `prior_share` the prior noise is used, else the actor's."""


@dataclass(frozen=True, kw_only=True)
class DSRL(FrozenPolicy):
    """Acts with the actor's mean; with its samples during collection or when the critic chooses among several."""

    config: DSRLConfig
    noise_critic: Critic
    """Q^W: the critic's architecture, over noise."""

    @classmethod
    def build(cls, config: DSRLConfig, parts: Parts) -> "DSRL":
        """Build the algorithm from its settings and parts."""
        horizon, dim = parts.policy.horizon, parts.policy.action_dim
        sizes = replace(parts.critic.config, action_clip=config.noise_limit)
        return cls(
            **cls.shared(config, parts),
            noise_critic=replace(parts.critic, config=sizes, critic_horizon=horizon, real_action_dim=dim),
            # Initially u has the standard deviation 1/m, so for large m w is nearly standard normal.
            actor=ChunkActor.reading(
                parts.critic,
                hidden=config.actor_hidden,
                horizon=horizon,
                action_dim=dim,
                start=(0.0, -math.log(config.noise_limit)),
            ),
        )

    def more(self, key: Array) -> dict[str, Params]:
        """Initial Q^W and log α."""
        low, high = self.value_range
        log_alpha = jnp.log(jnp.float32(self.config.temperature_init * (high - low)))
        return {"noise_critic": self.noise_critic.init(key), "temperature": {"log_alpha": log_alpha}}

    # The actor

    def sample(
        self, actor: Params, token: Float[Array, "B T"], state: Float[Array, "B S"], own: Float[Array, "B N H A"]
    ) -> tuple[Float[Array, "B N H A"], Float[Array, "B N"]]:
        """(the actor's noise, its mean log density per element)."""
        mean, raw = jnp.moveaxis(self.actor(actor, token, state), -1, 0)
        log_std, limit = jnp.clip(raw, *LOG_STD), self.config.noise_limit
        u = mean + jnp.exp(log_std) * own
        normal = -0.5 * jnp.square(own) - log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh²(u)), in a form that is stable for large u.
        squash = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))
        return limit * jnp.tanh(u), (normal - squash - math.log(limit)).mean((2, 3))

    # Proposals

    def draw(self, key: Array, shape: tuple[int, int, int, int]) -> Draws:
        """Noise for the prior and the actor, and the coin that selects between them."""
        prior, own = (jax.random.normal(one, shape) for one in jax.random.split(key))
        return Draws(prior, own, jax.random.uniform(jax.random.fold_in(key, 2), shape[:2]))

    def ahead(self, state: TrainState, context: Any, inputs: CriticInputs, draws: Draws) -> Float[Array, "B N H A"]:
        """The flow from the actor's noise."""
        noise, _ = self.sample(state.params["actor"], self.token(state, inputs), inputs.state, draws.own)
        return self.sampled(state.policy, context, self.acts(state, noise, draws.prior))

    def propose(self, state: TrainState, context: Any, inputs: CriticInputs, draws: Draws) -> Proposal:
        """The flow from normal noise, or from the actor's."""
        token, limit = self.token(state, inputs), self.config.noise_limit
        own, _ = self.sample(state.params["actor"], token, inputs.state, draws.own)
        normal = draws.coin < self.config.prior_share
        noise = jnp.where(normal[..., None, None], jnp.clip(draws.prior, -limit, limit), own)
        return Proposal(inputs, token, self.sampled(state.policy, context, noise), noise)

    # Learning

    def noise_scores(
        self, params: Params, inputs: CriticInputs, noise: Float[Array, "B N H A"]
    ) -> Float[Array, "E B N *bins"]:
        """Raw outputs of each member of Q^W."""
        return self.noise_critic.score(params, self.noise_critic.embed(params, inputs), noise)

    def noise_value(self, params: Params, inputs: CriticInputs, noise: Float[Array, "B N H A"]) -> Float[Array, "B N"]:
        """Q^W, ensemble mean."""
        return ob.critic_value(self.critic.config.loss, self.noise_scores(params, inputs, noise), self.support).mean(0)

    def distil_loss(
        self, params: Params, inputs: CriticInputs, noise: Float[Array, "B N H A"], y: Float[Array, "B N"]
    ) -> Float[Array, ""]:
        """Loss of Q^W against the critic's values y of the chunks that the noise produces."""
        sizes, count = self.critic.config, y.size
        out = self.noise_scores(params, inputs, noise)
        out = out.reshape(len(out), count, *out.shape[3:])
        return ob.critic_loss(sizes.loss, out, y.reshape(count), support=self.support, delta=sizes.huber_delta).mean()

    def actor_loss(
        self, actor: Params, noise_critic: Params, alpha: Array, proposal: Proposal, own: Float[Array, "B N H A"]
    ) -> tuple[Float[Array, ""], tuple[Array, Array]]:
        """(α log μ(w | s) - Q^W(s, w), (entropy, Q^W))."""
        noise, log_density = self.sample(actor, proposal.token, proposal.inputs.state, own)
        q = self.noise_value(noise_critic, proposal.inputs, noise)
        return (alpha * log_density - q).mean(), (-log_density.mean(), q.mean())

    def learn(self, state: TrainState, critic: Params, proposal: Proposal, key: Array) -> Learned:
        """Q^W learns from the critic, the actor from Q^W, α from the actor's entropy."""
        pair_key, own_key = jax.random.split(key)
        of_chunks = self.values(critic, self.critic.embed(critic, proposal.inputs), proposal.chunks)
        y = ob.aggregate(of_chunks, self.config.q_aggregation, pair_key)
        before, alpha = state.params["noise_critic"], jnp.exp(state.params["temperature"]["log_alpha"])
        loss, distil = jax.value_and_grad(self.distil_loss)(before, proposal.inputs, proposal.noise, y)
        own = jax.random.normal(own_key, proposal.noise.shape)
        (actor_loss, (entropy, q)), climb = jax.value_and_grad(self.actor_loss, has_aux=True)(
            state.params["actor"], before, alpha, proposal, own
        )
        # Gradient of log α · (entropy - target): α grows while the entropy is too small.
        warm = {"log_alpha": entropy - self.config.target_entropy}
        grads = {"noise_critic": distil, "actor": climb, "temperature": warm}
        learned = self.stepped(state, grads, when_open=frozenset({"actor", "temperature"}))
        # Correlate within observations: only differences between noises matter to the actor, and they are smaller.
        guessed = self.noise_value(before, proposal.inputs, proposal.noise)
        guessed_apart, apart = ((x - x.mean(1, keepdims=True)).ravel() for x in (guessed, y))
        mean = self.actor(state.params["actor"], proposal.token, proposal.inputs.state)[..., 0]
        metrics = {
            "actor/loss": actor_loss,
            "actor/entropy": entropy,
            "actor/temperature": alpha,
            "actor/noise_gain": q - y.mean(),
            "actor/noise_size": jnp.sqrt(jnp.square(self.config.noise_limit * jnp.tanh(mean)).mean()),
            "critic/noise_loss": loss,
            "critic/noise_correlation": ob.correlation(guessed_apart, apart, jnp.ones(y.size)),
        }
        return learned._replace(metrics=learned.metrics | metrics)

    # Acting

    def plan(
        self, state: TrainState, context: Any, keys: Key[Array, "B"], count: int, steer: flow.Steer | None
    ) -> Float[Array, "B N H A"]:
        """The flow from the actor's noise: its mean, or samples."""
        inputs = CriticInputs.of(context)
        normal = flow.noise(keys, count, self.policy.horizon, self.policy.action_dim)
        own = normal if self.exploring or count > 1 else jnp.zeros_like(normal)
        noise, _ = self.sample(state.params["actor"], self.token(state, inputs), inputs.state, own)
        noise = self.acts(state, noise, normal)
        return flow.sample(self.policy, state.policy, context, noise, num_steps=self.config.flow_steps, steer=steer)
