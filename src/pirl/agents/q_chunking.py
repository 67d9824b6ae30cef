"""Q-chunking's critic (arXiv 2507.07969) over a flow policy, without an actor's loss of its own.

    critic   y = Σ_{l<L} γ^l r_l + γ^L · mask · Q̄(s_{t+L}, a*)      a* = argmax_n Q(s_{t+L}, a^n),  a^n ~ π

An algorithm with such a critic is a subclass that says what the actor learns: `actor_loss`, and where it needs them,
more targets, other candidates, numbers it adapts. The prefix of each observation is encoded once per step; its features
serve the critic (which sends no gradient back), its keys and values the N candidates and the actor's loss. Candidates
are chosen by the online critic and valued by the target critic.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from pirl.agents import objectives as ob
from pirl.agents.agent import Agent, Choice, Metrics, Parts, TrainState
from pirl.agents.learner import Learner, accumulated, in_parts
from pirl.agents.q_chunking_config import QChunkingConfig
from pirl.models import flow
from pirl.models.critic import Critic, CriticInputs
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy


class Successor(NamedTuple):
    """What the target needs of s_{t+L}: what the critic reads, and the policy's candidates."""

    inputs: CriticInputs
    candidates: Float[Array, "B N H A"]


class ActorPart(NamedTuple):
    """One part of a batch, as the actor's loss takes it; everything random is drawn beforehand."""

    observation: Observation
    actions: Float[Array, "B H A"]
    critic_actions: Float[Array, "B h A"]
    valid: Float[Array, "B H"]
    draws: flow.Draws
    candidate_noise: Float[Array, "B N H A"]


class ActorAux(NamedTuple):
    """What the actor's pass leaves for the critic and for the log; the batch is in front."""

    inputs: CriticInputs
    candidates: Float[Array, "B N H A"]
    advantage: Float[Array, "B"]
    weight: Float[Array, "B"]
    flow_loss: Float[Array, "B"]


@dataclass(frozen=True, kw_only=True)
class QChunking(Agent):
    """All random draws are made for the whole batch, so splitting it changes nothing."""

    policy: FlowPolicy
    critic: Critic
    config: QChunkingConfig
    policy_learner: Learner
    """How the policy's weights learn."""
    critic_learner: Learner
    """How the critic's weights learn."""
    encoder_frozen: bool = False
    """Does nothing that `policy.encode` reads train? Then one prefix serves a fixed copy of the policy as well."""
    flow_steps: int | None = None
    """Euler steps when acting; None: as many as for candidates in training."""

    @classmethod
    def build(cls, config: Any, parts: Parts) -> "QChunking":
        """The algorithm with these settings."""
        return cls(
            policy=parts.policy,
            critic=parts.critic,
            config=config,
            policy_learner=parts.policy_learner,
            critic_learner=parts.critic_learner,
            encoder_frozen=parts.encoder_frozen,
            flow_steps=parts.flow_steps,
        )

    # What an actor adds

    def actor_loss(self, params: Params, state: TrainState, part: ActorPart) -> tuple[Float[Array, ""], ActorAux]:
        """A plain mean over samples. One prefix pass is to serve candidates, advantages, the flow and the critic."""
        raise NotImplementedError(f"{type(self).__name__}.actor_loss")

    @property
    def compares(self) -> bool:
        """Does anything compare the data at s with the policy's own chunks?"""
        return True

    def more_targets(self, policy: Params) -> dict[str, Params]:
        """Slowly following copies beside the critic's, to begin with."""
        return {}

    def followed(self, target: dict[str, Params], policy: Params) -> dict[str, Params]:
        """Those copies, after a step of the policy."""
        return target

    def adapted(self, state: TrainState, aux: ActorAux) -> dict[str, Array]:
        """The numbers that the algorithm adapts, for the next step."""
        return state.scalars

    def actor_metrics(self, state: TrainState, aux: ActorAux) -> Metrics:
        """What to log of the actor."""
        return {}

    def candidates_to_act(self, best_of: int | None) -> int:
        """How many chunks are compared when acting."""
        return best_of or 1

    @property
    def value_range(self) -> tuple[float, float]:
        """The returns that the rewards allow."""
        c = self.config
        return ob.value_range(c.reward_low, c.reward_high, c.discount, once=c.reward_once)

    @property
    def support(self) -> ob.HLGauss:
        """The histogram critics predict."""
        sizes = self.critic.config
        return ob.HLGauss(*self.value_range, sizes.bins, sizes.sigma_ratio)

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, around given policy weights where there are some."""
        policy_key, critic_key = jax.random.split(key)
        policy = self.policy.init(policy_key) if policy_params is None else policy_params
        policy, policy_opt = self.policy_learner.init(policy)
        critic, critic_opt = self.critic_learner.init(self.critic.init(critic_key))
        learners = {"policy": (self.policy_learner, policy), "critic": (self.critic_learner, critic)}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params={"policy": policy, "critic": critic},
            target={"critic": _copy(critic)} | self.more_targets(policy),
            ema={name: _copy(params) for name, (learner, params) in learners.items() if learner.ema_decay is not None},
            opt={"policy": policy_opt, "critic": critic_opt},
            scalars=self.scalars(),
            frozen=self.policy_learner.frozen(policy),
        )

    def scalars(self) -> dict[str, Array]:
        """The numbers that the algorithm adapts, to begin with."""
        return {}

    # The critic

    def values(self, params: Params, embedding: Array, chunks: Float[Array, "B N H A"]) -> Float[Array, "E B N"]:
        """Every member's value of N chunks per observation."""
        return ob.critic_value(self.critic.config.loss, self.critic.score(params, embedding, chunks), self.support)

    def successor(self, params: Params, observation: Observation, noise: Float[Array, "B N H A"]) -> Successor:
        """Encode s_{t+L} once and draw the policy's N candidates there."""
        context = self.policy.encode(params, observation)
        return Successor(jax.lax.stop_gradient(CriticInputs.of(context)), self.sampled(params, context, noise))

    def target(
        self, online: Params, target: Params, successor: Successor, batch: Any, key: Array
    ) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
        """Y, by the best of N for the online critic, valued by the target critic; and what choosing it gains."""
        inputs, candidates = successor
        choice = self.values(online, self.critic.embed(online, inputs), candidates).mean(0)
        best = ob.take_candidate(candidates, ob.select_best(choice))
        value = self.values(target, self.critic.embed(target, inputs), best[:, None])[..., 0]
        value = ob.aggregate(value, self.config.q_aggregation, key)
        bootstrap = 1 - batch["next_terminal"]
        bounds = self.value_range if self.config.clip_targets else (-math.inf, math.inf)
        y = ob.td_target(batch["reward_sum"], self.config.discount, batch["length"], bootstrap, value, *bounds)
        return y, choice.max(1) - choice.mean(1)

    def critic_loss(
        self, params: Params, inputs: CriticInputs, candidates: Array, batch: Any, y: Float[Array, "B"], key: Array
    ) -> tuple[Float[Array, ""], Metrics]:
        """How far Q(s, a) is from y, over the samples that tell (`sequence_mask`); optionally Cal-QL on top."""
        sizes, mask = self.critic.config, batch["sequence_mask"]
        embedding = self.critic.embed(params, inputs)
        out = self.critic.score(params, embedding, batch["critic_actions"][:, None], key=key)[:, :, 0]
        error = ob.critic_loss(sizes.loss, out, y, support=self.support, delta=sizes.huber_delta)
        loss = ob.masked_mean(error, mask)
        q = ob.critic_value(sizes.loss, out, self.support)
        info = {"critic/loss": loss, "critic/q_mean": q.mean(), "critic/q_std": q.std(1).mean(), "critic/y": y.mean()}
        if self.config.calql_weight:
            # The penalty compares values under the same dropout, hence none.
            pushed = ob.calql_penalty(
                self.values(params, embedding, candidates),
                self.values(params, embedding, batch["critic_actions"][:, None])[..., 0],
                batch["mc_return"],
            )
            penalty = ob.masked_mean(pushed, mask)
            info["critic/calql"] = penalty
            loss = loss + self.config.calql_weight * penalty
        return loss, info

    # For actors

    def sampled(self, params: Params, context: Any, noise: Float[Array, "B N H A"]) -> Float[Array, "B N H A"]:
        """The policy's chunks from this noise, without gradients."""
        if not noise.size:
            return noise
        steps = self.config.flow_steps
        return jax.lax.stop_gradient(flow.sample(self.policy, params, context, noise, num_steps=steps))

    def compared(
        self,
        state: TrainState,
        inputs: CriticInputs,
        chunks: Float[Array, "B h A"],
        candidates: Float[Array, "B N H A"],
    ) -> tuple[Float[Array, "B"], Float[Array, "B N"]]:
        """(advantage of the data over the candidates, the candidates' values), by the mean of the ensemble."""
        critic = state.params["critic"]
        embedding = self.critic.embed(critic, inputs)
        of_data = self.values(critic, embedding, chunks[:, None]).mean(0)[:, 0]
        # Where nothing reads candidates at s, there are none, and the data are compared with themselves.
        of_candidates = self.values(critic, embedding, candidates).mean(0) if candidates.shape[1] else of_data[:, None]
        return of_data - of_candidates.mean(1), of_candidates

    def bc_loss(
        self, params: Params, observation: Observation, actions: Float[Array, "B H A"], valid: Any, draws: flow.Draws
    ) -> Float[Array, ""]:
        """Plain imitation of the data, for comparison and for monitoring."""
        error = flow.squared_error(self.policy, params, self.policy.encode(params, observation), actions, draws)
        return flow.chunk_loss(error, valid=valid, dims=self.critic.real_action_dim).mean()

    # One step

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """Targets at s', the actor's pass at s, then the critic's updates on the features both left behind."""
        c, keys = self.config, _named(key)
        part, successor_inputs = self._inputs(batch, keys)
        ahead = state.target.get("policy", state.policy)
        successor = in_parts(lambda x: self.successor(ahead, *x), successor_inputs, c.accumulate)

        trainable, frozen = self.policy_learner.split(state.params["policy"])

        def actor_loss(trainable: Params, part: ActorPart) -> tuple[Array, ActorAux]:
            return self.actor_loss(self.policy_learner.join(trainable, frozen), state, part)

        loss, aux, grads = accumulated(actor_loss, trainable, part, c.accumulate)
        policy, policy_opt = self.policy_learner.step(state.params["policy"], grads, state.opt["policy"])
        critic, target, critic_opt, info = self._update_critic(state, aux, successor, batch, keys["critic"])
        params = {"policy": policy, "critic": critic}
        learners = {"policy": self.policy_learner, "critic": self.critic_learner}
        metrics = {
            "actor/loss": loss,
            "actor/grad_norm": optax.tree.norm(grads),
            **info,
            **self._metrics(state, aux, batch),
        }
        new = replace(
            state,
            step=state.step + 1,
            params=params,
            target=self.followed(state.target, policy) | {"critic": target},
            ema={name: learners[name].average(average, params[name]) for name, average in state.ema.items()},
            opt={"policy": policy_opt, "critic": critic_opt},
            scalars=self.adapted(state, aux),
        )
        return new, metrics

    def total_loss(self, state: TrainState, batch: Any, key: Array) -> tuple[Float[Array, ""], Metrics]:
        """What `update` with the same key descends on, as one number with its parts: total = critic + actor.

        For inspection: `update` takes the two gradients apart. `bc` is plain imitation at the same draws; it is not
        added: the actor's loss holds its share of it already.
        """
        keys = _named(key)
        part, successor_inputs = self._inputs(batch, keys)
        successor = self.successor(state.target.get("policy", state.policy), *successor_inputs)
        policy, critic = state.params["policy"], state.params["critic"]
        actor, aux = self.actor_loss(policy, state, part)
        pair_key, dropout_key = jax.random.split(jax.random.split(keys["critic"], self.config.critic_updates)[0])
        y, _ = self.target(critic, state.target["critic"], successor, batch, pair_key)
        temporal, _ = self.critic_loss(critic, aux.inputs, aux.candidates, batch, y, dropout_key)
        imitation = self.bc_loss(policy, part.observation, part.actions, part.valid, part.draws)
        total = temporal + actor
        return total, {"critic": temporal, "actor": actor, "bc": imitation, "total": total}

    def _inputs(self, batch: Any, keys: dict[str, Array]) -> tuple[ActorPart, tuple[Observation, Array]]:
        """Observations augmented alike at s and s', and every random number of the step."""
        c = self.config
        key = keys["augment"] if c.augment else None
        here, there = (
            self.policy.prepare(Observation.from_dict(batch[name]), key)
            for name in ("observations", "next_observations")
        )
        actions, num = batch["actions"], c.num_action_samples
        here_num = num if self.compares else 0
        part = ActorPart(
            observation=here,
            actions=actions,
            critic_actions=batch["critic_actions"],
            valid=batch["valid"],
            draws=flow.draw(keys["flow"], keys["time"], actions, c.flow_draws, c.flow_times),
            candidate_noise=jax.random.normal(keys["here"], (len(actions), here_num, *actions.shape[1:])),
        )
        return part, (there, jax.random.normal(keys["there"], (len(actions), num, *actions.shape[1:])))

    def _update_critic(
        self, state: TrainState, aux: ActorAux, successor: Successor, batch: Any, key: Array
    ) -> tuple[Params, Params, Any, Metrics]:
        """`critic_updates` steps on the same features; targets follow the critic from step to step."""

        def once(carry: tuple[Params, Params, Any], key: Array) -> tuple[tuple[Params, Params, Any], Metrics]:
            critic, target, opt = carry
            pair_key, dropout_key = jax.random.split(key)
            y, gain = self.target(critic, target, successor, batch, pair_key)

            def loss(critic: Params) -> tuple[Array, Metrics]:
                return self.critic_loss(critic, aux.inputs, aux.candidates, batch, y, dropout_key)

            (_, info), grads = jax.value_and_grad(loss, has_aux=True)(critic)
            critic, opt = self.critic_learner.step(critic, grads, opt)
            target = ob.soft_update(target, critic, self.config.target_update_rate)
            info |= {"critic/candidate_gain": gain.mean(), "critic/grad_norm": optax.tree.norm(grads)}
            return (critic, target, opt), info

        start = (state.params["critic"], state.target["critic"], state.opt["critic"])
        (critic, target, opt), infos = jax.lax.scan(once, start, jax.random.split(key, self.config.critic_updates))
        return critic, target, opt, jax.tree.map(lambda x: x[-1], infos)

    def _metrics(self, state: TrainState, aux: ActorAux, batch: Any) -> Metrics:
        critic = state.params["critic"]
        embedding = self.critic.embed(critic, aux.inputs)
        chunks = batch["critic_actions"][:, None]

        def total(chunks: Array) -> tuple[Array, Array]:
            q = self.values(critic, embedding, chunks).mean(0)[:, 0]
            return q.sum(), q

        slope, q = jax.grad(total, has_aux=True)(chunks)
        known = jnp.isfinite(batch["mc_return"]).astype(jnp.float32)
        gap = jnp.where(known > 0, q - batch["mc_return"], 0.0)
        return self.actor_metrics(state, aux) | {
            "actor/flow_loss": aux.flow_loss.mean(),
            "critic/action_slope": jnp.sqrt(jnp.square(slope).sum((1, 2, 3))).mean(),
            "critic/mc_gap": ob.masked_mean(gap, known),
            "critic/mc_correlation": _correlation(q, batch["mc_return"], known),
            "data/valid_fraction": batch["valid"].mean(),
            "data/critic_fraction": batch["sequence_mask"].mean(),
        }

    # Acting

    def acting_groups(self, best_of: int | None = None) -> frozenset[str]:
        """The critic, where it chooses."""
        return frozenset({"critic"} if self.candidates_to_act(best_of) > 1 else ())

    def q_values(
        self, state: TrainState, observation: Observation, chunks: Float[Array, "B N H A"]
    ) -> Float[Array, "E B N"]:
        """Each critic's value of N chunks per observation, by the weights that act."""
        critic = state.ema.get("critic", state.params["critic"])
        inputs = CriticInputs.of(self.policy.encode(state.policy, observation))
        return self.values(critic, self.critic.embed(critic, inputs), chunks)

    def act(
        self,
        state: TrainState,
        observation: Observation,
        keys: Key[Array, "B"],
        *,
        best_of: int | None = None,
        steer: flow.Steer | None = None,
    ) -> Float[Array, "B H A"]:
        """One chunk per observation: the critic's choice among `best_of` candidates, or a plain sample of one."""
        return self.choose(state, observation, keys, best_of=best_of, steer=steer).chunk

    def choose(
        self,
        state: TrainState,
        observation: Observation,
        keys: Key[Array, "B"],
        *,
        best_of: int | None = None,
        steer: flow.Steer | None = None,
    ) -> Choice:
        """What `act` does, with the critic's values where there are several candidates.

        Where the improvement is in the weights, the default is a plain sample.
        """
        count = self.candidates_to_act(best_of)
        params = state.policy
        context = self.policy.encode(params, observation)
        noise = flow.noise(keys, count, self.policy.horizon, self.policy.action_dim)
        steps = self.flow_steps or self.config.flow_steps
        chunks = flow.sample(self.policy, params, context, noise, num_steps=steps, steer=steer)
        if count == 1:
            return Choice(chunks[:, 0])
        critic = state.ema.get("critic", state.params["critic"])
        embedding = self.critic.embed(critic, CriticInputs.of(context))
        values = self.values(critic, embedding, chunks).mean(0)
        return Choice(ob.take_candidate(chunks, ob.select_best(values)), values.max(1), values.std(1))


def _named(key: Array) -> dict[str, Array]:
    """One key for each kind of randomness in a step."""
    return dict(zip(("augment", "flow", "time", "here", "there", "critic"), jax.random.split(key, 6), strict=True))


def _copy(tree: Params) -> Params:
    """A copy, not a reference: every leaf of the state is donated on its own."""
    return jax.tree.map(jnp.copy, tree)


def _correlation(x: Float[Array, "B"], y: Float[Array, "B"], mask: Float[Array, "B"]) -> Float[Array, ""]:
    """Pearson correlation over the masked samples; 0 where either does not vary."""
    x, y = x - ob.masked_mean(x, mask), jnp.where(mask > 0, y, 0.0)
    y = y - ob.masked_mean(y, mask)
    cov, var_x, var_y = (ob.masked_mean(z, mask) for z in (x * y, x * x, y * y))
    return cov / jnp.sqrt(jnp.maximum(var_x * var_y, 1e-12))
