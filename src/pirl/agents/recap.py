"""RECAP (π*0.6, arXiv 2511.14759) on a flow policy: a value labels chunks by advantage, and the policy trains
conditioned on the label.

    value       V(s) ≈ E[G | s]           a histogram, by cross-entropy on the returns G that were observed
    advantage   A = Σ_{l<L} γ^l r_l + γ^L · mask · V(s_{t+L}) - V(s)
    indicator   I = 1[A > q]              q: the (1 - positive_share) quantile of the advantages
    policy      min E[(1 - p) ‖v(x_t, t | s, I) - u‖² + p ‖v(x_t, t | s) - u‖²]
    acting      v(· | s, I = 1), or with guidance g: v(· | s) + g (v(· | s, 1) - v(· | s))

Failures define what "not better" looks like; no loss has a negative weight. The indicator is a learned vector
(`condition.py`) instead of words in the prompt: the checkpoint holds the policy told "better", and OpenPI serves it
unchanged. The prefix of each observation is encoded once per step.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from pirl.agents import condition, corrections
from pirl.agents import objectives as ob
from pirl.agents.advantage_config import RECAPConfig
from pirl.agents.agent import Agent, Metrics, Parts, TrainState
from pirl.agents.learner import Learner, accumulated, in_parts
from pirl.models import flow
from pirl.models.critic import Critic, CriticInputs
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy

RATE = 0.05
"""How far the quantile of the advantages moves towards that of the latest batch."""


class Part(NamedTuple):
    """One part of a batch, as the policy's loss takes it; everything random is drawn beforehand."""

    observation: Observation
    actions: Float[Array, "B H A"]
    valid: Float[Array, "B H"]
    draws: flow.Draws
    ahead: Float[Array, "B"]
    """Σ γ^l r_l + γ^L · mask · V(s_{t+L})."""
    acted_by: Int[Array, "B H"] | None
    """Who chose each step, where that counts."""


class Aux(NamedTuple):
    """What the policy's pass leaves for the value and the log; the batch is in front."""

    inputs: CriticInputs
    advantage: Float[Array, "B"]
    better: Bool[Array, "B"]
    told: Float[Array, "B"]
    untold: Float[Array, "B"]


@dataclass(frozen=True, kw_only=True)
class RECAP(Agent):
    """The algorithm. All random draws are made for the whole batch, so splitting it changes nothing."""

    policy: FlowPolicy
    critic: Critic
    """Its value of an all-zero chunk is V(s): the same network, with an uninformative chunk."""
    config: RECAPConfig
    policy_learner: Learner
    critic_learner: Learner
    flow_steps: int = 10
    """Euler steps when acting."""

    @classmethod
    def build(cls, config: RECAPConfig, parts: Parts) -> "RECAP":
        """The algorithm with these settings."""
        return cls(
            policy=parts.policy,
            critic=parts.critic,
            config=config,
            policy_learner=parts.policy_learner,
            critic_learner=parts.critic_learner,
            flow_steps=parts.flow_steps,
        )

    @property
    def support(self) -> ob.HLGauss:
        """The histogram that values are read from."""
        c, sizes = self.config, self.critic.config
        low, high = ob.value_range(c.reward_low, c.reward_high, c.discount, once=c.reward_once)
        return ob.HLGauss(low, high, sizes.bins, sizes.sigma_ratio)

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, around given policy weights where there are some."""
        policy_key, critic_key = jax.random.split(key)
        policy, policy_opt = self.policy_learner.init(
            self.policy.init(policy_key) if policy_params is None else policy_params
        )
        critic, critic_opt = self.critic_learner.init(self.critic.init(critic_key))
        told = {name: condition.fresh(self.policy, policy) for name in ("better", "other")}
        params = {"policy": policy, "condition": told, "critic": critic}
        averaged = () if self.policy_learner.ema_decay is None else ("policy", "condition")
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            ema={name: jax.tree.map(jnp.copy, params[name]) for name in averaged},
            opt={"policy": policy_opt, "condition": self._condition_learner.init(told)[1], "critic": critic_opt},
            scalars={"quantile": jnp.float32(0.0)},
            frozen=self.policy_learner.frozen(policy),
        )

    # The value

    def value(self, critic: Params, inputs: CriticInputs) -> Float[Array, "E B"]:
        """Every member's V(s)."""
        return ob.critic_value(self.critic.config.loss, self._value_outputs(critic, inputs), self.support)

    def value_loss(self, critic: Params, inputs: CriticInputs, returns: Float[Array, "B"]) -> Float[Array, ""]:
        """Cross-entropy of V(s) and observed returns; unknown returns (NaN) have no loss."""
        known, sizes = jnp.isfinite(returns), self.critic.config
        targets = jnp.where(known, returns, 0.0)
        out = self._value_outputs(critic, inputs)
        error = ob.critic_loss(sizes.loss, out, targets, support=self.support, delta=sizes.huber_delta)
        return ob.masked_mean(error, known)

    def _value_outputs(self, critic: Params, inputs: CriticInputs) -> Float[Array, "E B *bins"]:
        sizes = self.critic
        nothing = jnp.zeros((len(inputs.state), 1, sizes.critic_horizon, sizes.real_action_dim))
        return sizes.score(critic, sizes.embed(critic, inputs), nothing)[:, :, 0]

    # The policy

    def policy_loss(
        self, groups: dict[str, Params], frozen: Params, critic: Params, state: TrainState, part: Part
    ) -> tuple[Float[Array, ""], Aux]:
        """The conditional and the unconditional flow loss, at the same draws."""
        c, policy = self.config, self.policy_learner.join(groups["policy"], frozen)
        context = self.policy.encode(policy, part.observation)
        inputs = CriticInputs.of(jax.lax.stop_gradient(context))
        advantage = part.ahead - self.value(critic, inputs).mean(0)
        better = self.better(advantage, state, part.acted_by)

        def flow_loss(weights: Params) -> Float[Array, "B"]:
            error = flow.squared_error(self.policy, weights, context, part.actions, part.draws)
            return flow.chunk_loss(error, valid=part.valid, dims=self.critic.real_action_dim)

        as_better, as_other = (
            flow_loss(condition.folded(self.policy, policy, groups["condition"][name])) for name in ("better", "other")
        )
        told, untold = jnp.where(better, as_better, as_other), flow_loss(policy)
        dropout = jnp.where(state.step >= c.value_warmup_steps, c.condition_dropout, 1.0)
        loss = (1 - dropout) * told + dropout * untold
        return loss.mean(), jax.lax.stop_gradient(Aux(inputs, advantage, better, told, untold))

    def better(
        self, advantage: Float[Array, "B"], state: TrainState, acted_by: Int[Array, "B H"] | None
    ) -> Bool[Array, "B"]:
        """The indicator: from the value, or from corrections and takeovers."""
        better = advantage > state.scalars["quantile"]
        return better if acted_by is None else corrections.judged(better, acted_by)

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """Values at s_{t+L}, the policy's pass at s, then the value's step on the features that pass left behind."""
        c, critic = self.config, state.params["critic"]
        augment_key, noise_key, time_key = jax.random.split(key, 3)
        here, there = (
            self.policy.prepare(Observation.from_dict(batch[name]), augment_key if c.augment else None)
            for name in ("observations", "next_observations")
        )
        following = in_parts(
            lambda seen: self.value(critic, CriticInputs.of(self.policy.encode(state.policy, seen))).mean(0),
            there,
            c.parts,
        )
        ahead = ob.td_target(batch["reward_sum"], c.discount, batch["length"], 1 - batch["next_terminal"], following)
        draws = flow.draw(noise_key, time_key, batch["actions"], c.flow_draws, delay=c.real_time_delay)
        acted_by = batch["acted_by"] if c.heed_corrections else None
        part = Part(here, batch["actions"], batch["valid"], draws, ahead, acted_by)
        trainable, frozen = self.policy_learner.split(state.params["policy"])

        def loss(groups: dict[str, Params], part: Part) -> tuple[Array, Aux]:
            return self.policy_loss(groups, frozen, critic, state, part)

        groups = {"policy": trainable, "condition": state.params["condition"]}
        value, aux, grads = accumulated(loss, groups, part, c.parts)
        returns = batch["mc_return"]
        value_loss, critic_grads = jax.value_and_grad(self.value_loss)(critic, aux.inputs, returns)
        learners = {
            "policy": self.policy_learner,
            "condition": self._condition_learner,
            "critic": self.critic_learner,
        }
        params, opt = {}, {}
        for name, gradient in {**grads, "critic": critic_grads}.items():
            params[name], opt[name] = learners[name].step(state.params[name], gradient, state.opt[name])
        quantile = ob.moving_quantile(
            state.scalars["quantile"], aux.advantage, 1 - c.positive_share, RATE, first=state.step == 0
        )
        guessed, known = self.value(critic, aux.inputs).mean(0), jnp.isfinite(returns)
        metrics = {
            "policy/loss": value,
            "policy/told_loss": aux.told.mean(),
            "policy/untold_loss": aux.untold.mean(),
            "policy/grad_norm": optax.tree.norm(grads),
            "value/loss": value_loss,
            "value/mean": guessed.mean(),
            "value/error": ob.masked_mean(jnp.abs(guessed - jnp.where(known, returns, 0.0)), known),
            "advantage/quantile": quantile,
            "advantage/positive_share": jnp.mean(aux.better),
            "data/valid_fraction": jnp.mean(batch["valid"]),
        }
        new = replace(
            state,
            step=state.step + 1,
            params=params,
            ema={name: self.policy_learner.average(average, params[name]) for name, average in state.ema.items()},
            opt=opt,
            scalars={"quantile": quantile},
        )
        return new, metrics

    # Acting

    def served(self, state: TrainState) -> Params:
        """The policy conditioned on "better than usual", as a plain one."""
        told = state.ema.get("condition", state.params.get("condition"))
        return state.policy if told is None else condition.folded(self.policy, state.policy, told["better"])

    def acting_groups(self, best_of: int | None = None) -> frozenset[str]:
        """Guidance mixes two branches; the served weights are only one of them."""
        return frozenset(() if self.config.guidance == 1 else ("policy", "condition"))

    def q_values(
        self, state: TrainState, observation: Observation, chunks: Float[Array, "B N H A"]
    ) -> Float[Array, "E B N"]:
        """V(s) for every chunk: it does not look at them."""
        inputs = CriticInputs.of(self.policy.encode(state.policy, observation))
        value = self.value(state.params["critic"], inputs)
        return jnp.broadcast_to(value[..., None], (*value.shape, chunks.shape[1]))

    def act(
        self,
        state: TrainState,
        observation: Observation,
        keys: Key[Array, "B"],
        *,
        best_of: int | None = None,
        steer: flow.Steer | None = None,
    ) -> Float[Array, "B H A"]:
        """One chunk per observation, conditioned on "better than usual"."""
        scale = self.config.guidance
        context = self.policy.encode(state.policy, observation)
        noise = flow.noise(keys, 1, self.policy.horizon, self.policy.action_dim)
        velocity = flow.field(self.policy, self.served(state), context)
        if scale != 1:
            velocity = flow.guided(velocity, flow.field(self.policy, state.policy, context), scale)
        return flow.euler(velocity if steer is None else steer(velocity), noise, self.flow_steps)[:, 0]

    @property
    def _condition_learner(self) -> Learner:
        faster = optax.chain(self.policy_learner.tx, optax.scale(self.config.condition_rate))
        return replace(self.policy_learner, mask=None, tx=faster)
