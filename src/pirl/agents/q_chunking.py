"""Algorithms with Q-chunking's critic, without the actor's loss: `ACRLPD` is one.

A subclass says that: `actor_loss`, and where it needs them, more targets, other candidates, numbers that it adapts. The
prefix of each observation is encoded once per step; its features serve the critic, its keys and values the N candidates
and the actor's loss.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from pirl.agents import corrections
from pirl.agents.agent import Metrics, Parts, TrainState
from pirl.agents.chunk_critic import ChunkCritic, copied
from pirl.agents.learner import Learner, accumulated, in_parts
from pirl.agents.q_chunking_config import QChunkingConfig
from pirl.models import flow
from pirl.models.critic import CriticInputs
from pirl.models.observation import Observation
from pirl.models.params import Params


class ActorPart(NamedTuple):
    """One part of a batch, as the actor's loss takes it; everything random is drawn beforehand."""

    observation: Observation
    actions: Float[Array, "B H A"]
    critic_actions: Float[Array, "B h A"]
    valid: Float[Array, "B H"]
    draws: flow.Draws
    candidate_noise: Float[Array, "B N H A"]
    acted_by: Int[Array, "B H"] | None = None
    """Who chose each step, if the actor uses it."""


class Compared(NamedTuple):
    """The critic's values of the data's chunks and of the policy's, batch first."""

    members: Float[Array, "B E"]
    """A = Q(s, a) - V(s), by each critic; V is learned, or mean_n Q(s, a^n)."""
    values: Float[Array, "B N"]
    """Q(s, a^n), by the mean of the ensemble."""

    @property
    def advantage(self) -> Float[Array, "B"]:
        """A, by the mean of the ensemble."""
        return self.members.mean(1)


class ActorAux(NamedTuple):
    """What the actor's pass leaves for the critic and for the log; the batch is in front."""

    inputs: CriticInputs
    candidates: Float[Array, "B N H A"]
    members: Float[Array, "B E"]
    """The advantage by each critic."""
    advantage: Float[Array, "B"]
    """The one that the actor uses."""
    spread: Float[Array, "B"]
    """Standard deviation of the candidates' values."""
    weight: Float[Array, "B"]
    flow_loss: Float[Array, "B"]
    logged: Metrics = {}  # noqa: RUF012 - nobody changes it
    """Other numbers of each row, by the names that their means are logged under."""


@dataclass(frozen=True, kw_only=True)
class QChunking(ChunkCritic):
    """All random draws are made for the whole batch, so splitting it changes nothing."""

    config: QChunkingConfig
    policy_learner: Learner
    """How the policy's weights learn."""
    encoder_frozen: bool = False
    """Does nothing that `policy.encode` reads train? Then one prefix serves a fixed copy of the policy as well."""
    flow_steps: int | None = None
    """Euler steps when acting; None: as many as for candidates in training."""

    @classmethod
    def build(cls, config: Any, parts: Parts) -> "QChunking":
        """The algorithm with these settings."""
        return cls(
            policy=parts.policy,
            critic=replace(parts.critic, heads=config.heads),
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
        """Does anything compare the chunks in the data with what their states are worth?"""
        return True

    def more_weights(self, policy: Params) -> dict[str, Params]:
        """Weights that train beside the policy's, in the same way, to begin with: trainable leaves alone."""
        return {}

    @property
    def samples(self) -> bool:
        """Does anything need the policy's own chunks at s?"""
        return self.compares and (self.config.value == "best_of_n" or self.config.calql_weight > 0)

    @property
    def holds(self) -> bool:
        """Does everything but the critic keep its weights until the actor may use it?"""
        return False

    def more_targets(self, policy: Params) -> dict[str, Params]:
        """Slowly following copies beside the critic's, to begin with."""
        return {}

    def followed(self, state: TrainState, policy: Params) -> dict[str, Params]:
        """Those copies, after a step that made this policy of the state's."""
        return state.target

    def adapted(self, state: TrainState, aux: ActorAux) -> dict[str, Array]:
        """The numbers that the algorithm adapts, for the next step."""
        return state.scalars

    def actor_metrics(self, state: TrainState, aux: ActorAux) -> Metrics:
        """What to log of the actor."""
        return {}

    @property
    def acting_steps(self) -> int:
        """Euler steps when acting."""
        return self.flow_steps or self.config.flow_steps

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, around given policy weights where there are some."""
        policy_key, critic_key = jax.random.split(key)
        policy = self.policy.init(policy_key) if policy_params is None else policy_params
        policy, policy_opt = self.policy_learner.init(policy)
        critic, critic_opt = self.critic_learner.init(self.critic.init(critic_key))
        more = self.more_weights(policy)
        learners = {"policy": (self.policy_learner, policy), "critic": (self.critic_learner, critic)}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params={"policy": policy, "critic": critic} | more,
            target={"critic": copied(critic)} | self.more_targets(policy),
            ema={name: copied(params) for name, (learner, params) in learners.items() if learner.ema_decay is not None},
            opt={"policy": policy_opt, "critic": critic_opt}
            | {name: self.policy_learner.tx.init(weights) for name, weights in more.items()},
            scalars=self.scalars(),
            frozen=self.policy_learner.frozen(policy),
        )

    # For actors

    def compared(
        self,
        state: TrainState,
        inputs: CriticInputs,
        chunks: Float[Array, "B h A"],
        candidates: Float[Array, "B N H A"],
    ) -> Compared:
        """The data's chunks against V(s), or the policy's own at s. Where there is neither, against themselves."""
        critic = state.params["critic"]
        embedding = self.critic.embed(critic, inputs)
        of_data = self.values(critic, embedding, chunks[:, None])[..., 0]
        of_candidates = self.values(critic, embedding, candidates) if candidates.shape[1] else of_data[..., None]
        learned = self.config.value == "expectile"
        baseline = self.state_values(critic, embedding) if learned else of_candidates.mean(2)
        return Compared((of_data - baseline).swapaxes(0, 1), of_candidates.mean(0))

    def raised(self, weight: Array, part: ActorPart) -> Array:
        """The weight of imitation, one or one per sample; of a person's chunks it is at least `correction_weight`."""
        floor = self.config.correction_weight
        if floor is None or part.acted_by is None:
            return weight
        return corrections.raised(jnp.broadcast_to(weight, len(part.actions)), part.acted_by, floor)

    def imitated(self, part: ActorPart) -> Float[Array, "B H"]:
        """The steps to imitate: of a person's chunks not what the policy did after it got the robot back."""
        return part.valid if part.acted_by is None else corrections.persons_own(part.valid, part.acted_by)

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
        successor = in_parts(lambda x: self.successor(ahead, *x), successor_inputs, c.parts)

        trainable, frozen = self.policy_learner.split(state.params["policy"])
        more = {name: weights for name, weights in state.params.items() if name not in ("policy", "critic")}

        def actor_loss(weights: dict[str, Params], part: ActorPart) -> tuple[Array, ActorAux]:
            beside = {name: weights[name] for name in more}
            policy = self.policy_learner.join(weights["policy"], frozen)
            return self.actor_loss(policy, replace(state, params=state.params | beside), part)

        loss, aux, grads = accumulated(actor_loss, {"policy": trainable} | more, part, c.parts)
        critic, target, critic_opt, info = self.update_critic(
            state, aux.inputs, aux.candidates, successor, batch, keys["critic"]
        )
        params, opt = self.stepped(state, grads)
        trained = params | {"critic": critic}
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
            params=trained,
            target=self.followed(state, params["policy"]) | {"critic": target},
            ema={name: learners[name].average(average, trained[name]) for name, average in state.ema.items()},
            opt=opt | {"critic": critic_opt},
            scalars=self.adapted(state, aux),
        )
        return new, metrics

    def stepped(self, state: TrainState, grads: dict[str, Params]) -> tuple[dict[str, Params], dict[str, Any]]:
        """(weights, optimizer states) of every group but the critic; a policy that holds waits for the critic."""
        params, opt, is_open = {}, {}, self.actor_open(state)
        for name, gradient in grads.items():
            learner, old = self.policy_learner, state.params[name]
            learner = learner if name == "policy" else replace(learner, mask=None)
            if self.holds:  # nothing for the moments to remember; schedules go on
                gradient = jax.tree.map(lambda g: jnp.where(is_open, g, 0), gradient)
            new, opt[name] = learner.step(old, gradient, state.opt[name])
            params[name] = jax.tree.map(partial(_once, is_open), new, old) if self.holds else new
        return params, opt

    def total_loss(self, state: TrainState, batch: Any, key: Array) -> tuple[Float[Array, ""], Metrics]:
        """What `update` with the same key descends on first, as one number with its parts: total = critic + actor.

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
        y = self.taught(state, batch, y)
        longer = self.longer(state.target["critic"], aux.inputs, batch, pair_key)
        temporal, _ = self.critic_loss(critic, aux.inputs, aux.candidates, batch, y, dropout_key, longer)
        total = temporal + actor
        return total, {"critic": temporal, "actor": actor, "bc": aux.flow_loss.mean(), "total": total}

    def _inputs(self, batch: Any, keys: dict[str, Array]) -> tuple[ActorPart, tuple[Observation, Array]]:
        """Observations augmented alike at s and s', and every random number of the step."""
        c = self.config
        key = keys["augment"] if c.augment else None
        here, there = (
            self.policy.prepare(Observation.from_dict(batch[name]), key)
            for name in ("observations", "next_observations")
        )
        actions, num = batch["actions"], c.num_action_samples
        here_num = num if self.samples else 0
        there_num = num if c.value == "best_of_n" else 0
        part = ActorPart(
            observation=here,
            actions=actions,
            critic_actions=batch["critic_actions"],
            valid=batch["valid"],
            draws=flow.draw(keys["flow"], keys["time"], actions, c.flow_draws, c.flow_times, c.real_time_delay),
            candidate_noise=jax.random.normal(keys["here"], (len(actions), here_num, *actions.shape[1:])),
            acted_by=batch["acted_by"] if c.heeds_corrections else None,
        )
        return part, (there, jax.random.normal(keys["there"], (len(actions), there_num, *actions.shape[1:])))

    def _metrics(self, state: TrainState, aux: ActorAux, batch: Any) -> Metrics:
        return {
            **self.actor_metrics(state, aux),
            **{name: numbers.mean() for name, numbers in aux.logged.items()},
            "actor/flow_loss": aux.flow_loss.mean(),
            **self.value_metrics(state, aux.inputs, batch),
        }

    # Acting

    def acting_groups(self, best_of: int | None = None) -> frozenset[str]:
        """The critic, where it chooses."""
        return frozenset({"critic"} if self.candidates_to_act(best_of) > 1 else ())

    def plan(
        self, state: TrainState, context: Any, keys: Key[Array, "B"], count: int, steer: flow.Steer | None
    ) -> Float[Array, "B N H A"]:
        """Plain samples."""
        noise = flow.noise(keys, count, self.policy.horizon, self.policy.action_dim)
        return flow.sample(self.policy, state.policy, context, noise, num_steps=self.acting_steps, steer=steer)


def _once(is_open: Bool[Array, ""], new: Array, old: Array) -> Array:
    """The new one when open; what is frozen is the same array in both, and stays that."""
    return new if new is old else jnp.where(is_open, new, old)


def _named(key: Array) -> dict[str, Array]:
    """One key for each kind of randomness in a step."""
    return dict(zip(("augment", "flow", "time", "here", "there", "critic"), jax.random.split(key, 6), strict=True))
