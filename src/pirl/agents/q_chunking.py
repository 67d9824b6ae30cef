"""An algorithm with Q-chunking's critic, but for what its actor learns: `ACRLPD` is one.

A subclass says that: `actor_loss`, and where it needs them, more targets, other candidates, numbers that it adapts. The
prefix of each observation is encoded once per step; its features serve the critic, its keys and values the N candidates
and the actor's loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Key

from pirl.agents import objectives as ob
from pirl.agents.agent import Choice, Metrics, Parts, TrainState
from pirl.agents.chunk_critic import ChunkCritic
from pirl.agents.gate import said, stays_open
from pirl.agents.learner import Learner, accumulated, in_parts
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


class Compared(NamedTuple):
    """What the critic says of the data's chunks and of the policy's; the batch is in front."""

    members: Float[Array, "B E"]
    """A = Q(s, a) - mean_n Q(s, a^n), by each critic."""
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


@dataclass(frozen=True, kw_only=True)
class QChunking(ChunkCritic):
    """All random draws are made for the whole batch, so splitting it changes nothing."""

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
        return {} if self.config.gate is None else {"gate": jnp.float32(0.0)}

    # When the actor starts

    def actor_open(self, state: TrainState) -> Bool[Array, ""]:
        """Does the actor listen to the critic?"""
        return (state.step >= self.config.actor_warmup_steps) & (state.scalars.get("gate", 1.0) > 0)

    def heard(self, state: TrainState, measured: Mapping[str, float], say: Callable[[str], None]) -> TrainState:
        """Open or shut the gate, by what the critic knows of held-out episodes."""
        gate = self.config.gate
        if gate is None or (measured and not any(name.startswith("held_out/") for name in measured)):
            return state
        was_open = bool(state.scalars["gate"] > 0)
        is_open = stays_open(measured, gate, was_open=was_open)
        if is_open != was_open:
            say(said(measured, is_open=is_open))
        value = jax.device_put(np.float32(is_open), state.scalars["gate"].sharding)
        return replace(state, scalars=state.scalars | {"gate": value})

    # For actors

    def compared(
        self,
        state: TrainState,
        inputs: CriticInputs,
        chunks: Float[Array, "B h A"],
        candidates: Float[Array, "B N H A"],
    ) -> Compared:
        """The data's chunks against the policy's own at s. Where there are none, against themselves."""
        critic = state.params["critic"]
        embedding = self.critic.embed(critic, inputs)
        of_data = self.values(critic, embedding, chunks[:, None])[..., 0]
        of_candidates = self.values(critic, embedding, candidates) if candidates.shape[1] else of_data[..., None]
        return Compared((of_data - of_candidates.mean(2)).swapaxes(0, 1), of_candidates.mean(0))

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
        critic, target, critic_opt, info = self.update_critic(
            state, aux.inputs, aux.candidates, successor, batch, keys["critic"]
        )
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
            draws=flow.draw(keys["flow"], keys["time"], actions, c.flow_draws, c.flow_times, c.real_time_delay),
            candidate_noise=jax.random.normal(keys["here"], (len(actions), here_num, *actions.shape[1:])),
        )
        return part, (there, jax.random.normal(keys["there"], (len(actions), num, *actions.shape[1:])))

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
        gate = {} if self.config.gate is None else {"actor/gate": state.scalars["gate"]}
        return (
            self.actor_metrics(state, aux)
            | gate
            | {
                "actor/flow_loss": aux.flow_loss.mean(),
                "critic/action_slope": jnp.sqrt(jnp.square(slope).sum((1, 2, 3))).mean(),
                "critic/mc_gap": ob.masked_mean(gap, known),
                "critic/mc_correlation": ob.correlation(q, batch["mc_return"], known),
                "data/valid_fraction": batch["valid"].mean(),
                "data/critic_fraction": batch["sequence_mask"].mean(),
            }
        )

    # Acting

    def acting_groups(self, best_of: int | None = None) -> frozenset[str]:
        """The critic, where it chooses."""
        return frozenset({"critic"} if self.candidates_to_act(best_of) > 1 else ())

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
