"""RECAP (π*0.6, arXiv 2511.14759) on a flow policy: a value labels chunks by advantage, and the policy trains
conditioned on the label.

    value       V(s) ≈ E[G | s]           a histogram, by cross-entropy on the returns G that were observed
    advantage   A = Σ_{l<L} γ^l r_l + γ^L · mask · V(s_{t+L}) - V(s)      V: by critics that left the episode out
    indicator   I = 1[A > q_task]         q: the (1 - positive_share) quantile of the task's latest advantages
    policy      min E[(1 - p) ‖v(x_t, t | s, I) - u‖² + p ‖v(x_t, t | s) - u‖²]
    acting      v(· | s, I = 1), or with guidance g: v(· | s) + g (v(· | s, 1) - v(· | s))

Failures define what "not better" looks like; no loss has a negative weight. The indicator is a learned vector, which is
folded into the served weights as "better" (`condition.py`), or words in the prompt, as in the paper. OpenPI serves both
unchanged. The prefix of each observation is encoded once per step; with words twice, because values read the
instruction without the label.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Key

from pirl.agents import by_task, condition, corrections
from pirl.agents import objectives as ob
from pirl.agents.advantage_config import RECAPConfig
from pirl.agents.agent import Agent, Metrics, TrainState
from pirl.agents.ensemble import apart
from pirl.agents.fold_value import FoldValue
from pirl.agents.learner import Learner, accumulated, in_parts
from pirl.models import flow
from pirl.models.critic import Critic, CriticInputs
from pirl.models.observation import Observation, with_prompt
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy


class Part(NamedTuple):
    """Inputs of the policy's loss for one part of a batch; all random numbers are drawn beforehand."""

    observation: Observation
    actions: Float[Array, "B H A"]
    valid: Float[Array, "B H"]
    draws: flow.Draws
    ahead: Float[Array, "B"]
    """Σ γ^l r_l + γ^L · mask · V(s_{t+L})."""
    quantile: Float[Array, "B"]
    """q of each row's task."""
    rows: dict[str, Any]
    """Further columns of the batch: `episode` and, as configured, `task_steps`, `acted_by` and `suffixed_prompts`
    ("positive" first).
    """


class Aux(NamedTuple):
    """Outputs of the policy's forward pass for the value update and the logs; batch-first."""

    inputs: CriticInputs
    advantage: Float[Array, "B"]
    better: Bool[Array, "B"]
    told: Float[Array, "B"]
    untold: Float[Array, "B"]


@dataclass(frozen=True, kw_only=True)
class RECAP(Agent):
    """The algorithm. Random numbers are drawn for the whole batch, so splitting it into parts changes nothing."""

    policy: FlowPolicy
    critic: Critic
    """V(s) is its value of an all-zero chunk."""
    config: RECAPConfig
    policy_learner: Learner
    critic_learner: Learner
    flow_steps: int = 10
    """Euler steps when acting."""

    @property
    def value(self) -> FoldValue:
        """V(s)."""
        return FoldValue(critic=self.critic, config=self.config)

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, with the given policy weights or freshly initialised ones."""
        policy_key, critic_key = jax.random.split(key)
        policy, policy_opt = self.policy_learner.init(
            self.policy.init(policy_key) if policy_params is None else policy_params
        )
        critic, critic_opt = self._learners["critic"].init(self.critic.init(critic_key))
        params, opt = {"policy": policy, "critic": critic}, {"policy": policy_opt, "critic": critic_opt}
        if self.config.condition == "vector":
            params["condition"] = {name: condition.fresh(self.policy, policy) for name in ("better", "other")}
            opt["condition"] = self._learners["condition"].init(params["condition"])[1]
        averaged = () if self.policy_learner.ema_decay is None else ("policy", "condition")
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            ema={name: jax.tree.map(jnp.copy, params[name]) for name in averaged if name in params},
            opt=opt,
            scalars={"advantages": by_task.fresh()},
            frozen=self.policy_learner.frozen(policy),
        )

    # The policy

    def policy_loss(
        self, groups: dict[str, Params], frozen: Params, critic: Params, state: TrainState, part: Part
    ) -> tuple[Float[Array, ""], Aux]:
        """(loss, aux): the conditional and the unconditional flow loss, at the same draws."""
        c, policy = self.config, self.policy_learner.join(groups["policy"], frozen)
        context = self.policy.encode(policy, part.observation)
        inputs = CriticInputs.of(jax.lax.stop_gradient(context))
        advantage = part.ahead - self.value.unseen(critic, inputs, part.rows)
        better = self.better(advantage, part)

        def flow_loss(weights: Params, context: Any) -> Float[Array, "B"]:
            error = flow.squared_error(self.policy, weights, context, part.actions, part.draws)
            return flow.chunk_loss(error, valid=part.valid, dims=self.critic.real_action_dim)

        untold = flow_loss(policy, context)
        if c.condition == "text":
            words = with_prompt(part.observation, part.rows["suffixed_prompts"], jnp.where(better, 0, 1))
            told = flow_loss(policy, self.policy.encode(policy, words))
        else:
            as_better, as_other = (
                flow_loss(condition.folded(self.policy, policy, groups["condition"][name]), context)
                for name in ("better", "other")
            )
            told = jnp.where(better, as_better, as_other)
        dropout = jnp.where(state.step >= c.value_warmup_steps, c.condition_dropout, 1.0)
        loss = (1 - dropout) * told + dropout * untold
        return loss.mean(), jax.lax.stop_gradient(Aux(inputs, advantage, better, told, untold))

    def better(self, advantage: Float[Array, "B"], part: Part) -> Bool[Array, "B"]:
        """The indicator: A > q, overridden by corrections and takeovers."""
        better, acted_by = advantage > part.quantile, part.rows.get("acted_by")
        return better if acted_by is None else corrections.judged(better, acted_by)

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """Values at s_{t+L}, the policy's gradient at s, then the value's step on the features of that pass."""
        c, critic = self.config, state.params["critic"]
        augment_key, noise_key, time_key = jax.random.split(key, 3)
        here, there = (
            self.policy.prepare(Observation.from_dict(batch[name]), augment_key if c.augment else None)
            for name in ("observations", "next_observations")
        )
        rows = {name: batch[name] for name in self._read}

        def promised(seen: tuple[Observation, dict[str, Any]]) -> Float[Array, "B"]:
            return self.value.unseen(critic, CriticInputs.of(self.policy.encode(state.policy, seen[0])), seen[1])

        following = in_parts(promised, (there, rows), c.parts)
        ahead = ob.td_target(batch["reward_sum"], c.discount, batch["length"], 1 - batch["next_terminal"], following)
        draws = flow.draw(noise_key, time_key, batch["actions"], c.flow_draws, delay=c.real_time_delay)
        task = batch["task"] if c.per_task else jnp.zeros_like(batch["episode"])
        quantile = by_task.quantiles(state.scalars["advantages"], task, 1 - c.positive_share)
        part = Part(here, batch["actions"], batch["valid"], draws, ahead, quantile, rows)
        trainable, frozen = self.policy_learner.split(state.params["policy"])

        def loss(groups: dict[str, Params], part: Part) -> tuple[Array, Aux]:
            return self.policy_loss(groups, frozen, critic, state, part)

        groups = {"policy": trainable} | {name: state.params[name] for name in ("condition",) if name in state.params}
        value, aux, grads = accumulated(loss, groups, part, c.parts)
        returns = batch["mc_return"]
        value_loss, critic_grads = jax.value_and_grad(self.value.loss)(critic, aux.inputs, returns, rows)
        params, opt = {}, {}
        for name, gradient in {**grads, "critic": critic_grads}.items():
            params[name], opt[name] = self._learners[name].step(state.params[name], gradient, state.opt[name])
        guessed, known = self.value.unseen(critic, aux.inputs, rows), jnp.isfinite(returns)
        metrics = {
            "policy/loss": value,
            "policy/told_loss": aux.told.mean(),
            "policy/untold_loss": aux.untold.mean(),
            "policy/grad_norm": optax.tree.norm(grads),
            "value/loss": value_loss,
            "value/mean": guessed.mean(),
            "value/error": ob.masked_mean(jnp.abs(guessed - jnp.where(known, returns, 0.0)), known),
            "advantage/quantile": quantile.mean(),
            "advantage/positive_share": jnp.mean(aux.better),
            "data/valid_fraction": jnp.mean(batch["valid"]),
        }
        new = replace(
            state,
            step=state.step + 1,
            params=params,
            ema={name: self.policy_learner.average(average, params[name]) for name, average in state.ema.items()},
            opt=opt,
            scalars={"advantages": by_task.added(state.scalars["advantages"], task, aux.advantage)},
        )
        return new, metrics

    # Acting

    def served(self, state: TrainState) -> Params:
        """The policy conditioned on "better than usual", as plain weights; with text the policy itself."""
        told = state.ema.get("condition", state.params.get("condition"))
        return state.policy if told is None else condition.folded(self.policy, state.policy, told["better"])

    def acting_groups(self, best_of: int | None = None) -> frozenset[str]:
        """Policy and condition if guidance mixes two branches, because the served weights hold only one."""
        return frozenset(() if self.config.guidance == 1 else ("policy", "condition"))

    def q_values(
        self, state: TrainState, observation: Observation, chunks: Float[Array, "B N H A"]
    ) -> Float[Array, "E B N"]:
        """V(s) for every chunk: the value does not depend on chunks."""
        inputs = CriticInputs.of(self.policy.encode(state.policy, observation))
        value = self.value.of(state.params["critic"], inputs)
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
    def _read(self) -> tuple[str, ...]:
        """Names of the columns in `Part.rows`."""
        c = self.config
        asked = {"task_steps": c.per_task, "acted_by": c.heed_corrections, "suffixed_prompts": c.condition == "text"}
        return ("episode", *(name for name, wanted in asked.items() if wanted))

    @property
    def _learners(self) -> dict[str, Learner]:
        """The learner of each group."""
        c, critics = self.config, self.critic_learner
        faster = optax.chain(self.policy_learner.tx, optax.scale(c.condition_rate))
        return {
            "policy": self.policy_learner,
            "condition": replace(self.policy_learner, mask=None, tx=faster),
            "critic": critics if c.folds == 1 else replace(critics, tx=apart(critics.tx)),
        }
