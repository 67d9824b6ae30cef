"""Base of algorithms with Q-chunking's critic and a flow policy as actor, such as `ACRLPD`.

A subclass defines `actor_loss` and, where needed, further targets, weights, candidates and adaptive scalars. The prefix
of each observation is encoded once per step: its features serve the critic, its keys and values the N candidates and
the actor's loss.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from pirl.agents import corrections
from pirl.agents.agent import Agent, Metrics, Parts, TrainState
from pirl.agents.chunk_critic import ChunkCritic, copied
from pirl.agents.learner import Learner, accumulated, in_parts
from pirl.agents.q_chunking_config import QChunkingConfig
from pirl.models import flow
from pirl.models.critic import CriticInputs
from pirl.models.observation import Observation
from pirl.models.params import Params


class ActorPart(NamedTuple):
    """Inputs of the actor's loss for one part of a batch; all random numbers are drawn beforehand."""

    observation: Observation
    actions: Float[Array, "B H A"]
    critic_actions: Float[Array, "B h A"]
    valid: Float[Array, "B H"]
    draws: flow.Draws
    candidate_noise: Float[Array, "B N H A"]
    acted_by: Int[Array, "B H"] | None = None
    """Who chose each step (`acted_by`), if the actor uses it."""


class Compared(NamedTuple):
    """Advantages of the data's chunks and values of the policy's; batch-first."""

    members: Float[Array, "B E"]
    """A = Q(s, a) - V(s) by each critic; V is learned, or mean_n Q(s, a^n)."""
    values: Float[Array, "B N"]
    """Q(s, a^n), ensemble mean."""

    @property
    def advantage(self) -> Float[Array, "B"]:
        """A, ensemble mean."""
        return self.members.mean(1)


class ActorAux(NamedTuple):
    """Outputs of the actor's forward pass for the critic update and the logs; batch-first."""

    inputs: CriticInputs
    candidates: Float[Array, "B N H A"]
    members: Float[Array, "B E"]
    """Advantage by each critic."""
    advantage: Float[Array, "B"]
    """Advantage that the actor uses."""
    spread: Float[Array, "B"]
    """Standard deviation of the candidates' values."""
    weight: Float[Array, "B"]
    flow_loss: Float[Array, "B"]
    logged: Metrics = {}  # noqa: RUF012 - nobody changes it
    """Further per-row numbers by metric name; their means are logged."""


@dataclass(frozen=True, kw_only=True)
class QChunking(ChunkCritic):
    """The base class. Random numbers are drawn for the whole batch, so splitting it into parts changes nothing."""

    config: QChunkingConfig
    policy_learner: Learner
    """Optimizer, mask and EMA of the policy's weights."""
    encoder_frozen: bool = False
    """Whether all weights that `policy.encode` uses are frozen; a fixed copy of the policy then shares the prefix."""
    flow_steps: int = 0
    """Euler steps when acting; 0: as many as for candidates in training."""

    @classmethod
    def build(cls, config: Any, parts: Parts) -> Agent:
        """Build the algorithm from its settings and parts."""
        return super().build(config, replace(parts, critic=replace(parts.critic, heads=config.heads)))

    # Defined by subclasses

    def actor_loss(self, params: Params, state: TrainState, part: ActorPart) -> tuple[Float[Array, ""], ActorAux]:
        """(loss, aux). The loss is a plain mean over samples; one prefix pass serves candidates, flow and critic."""
        raise NotImplementedError(f"{type(self).__name__}.actor_loss")

    @property
    def compares(self) -> bool:
        """Whether the update compares the data's chunks with the values of their states."""
        return True

    def more_weights(self, policy: Params) -> dict[str, Params]:
        """Initial weights of further groups (trainable leaves only), trained by `policy_learner`."""
        return {}

    @property
    def samples(self) -> bool:
        """Whether the update samples policy chunks at s."""
        return self.compares and (self.config.value == "best_of_n" or self.config.calql_weight > 0)

    @property
    def holds(self) -> bool:
        """Whether everything but the critic keeps its weights until the actor may use it."""
        return False

    def more_targets(self, policy: Params) -> dict[str, Params]:
        """Initial target networks besides the critic's."""
        return {}

    def followed(self, state: TrainState, policy: Params) -> dict[str, Params]:
        """The targets after a step that produced `policy`."""
        return state.target

    def adapted(self, state: TrainState, aux: ActorAux) -> dict[str, Array]:
        """The adaptive scalars for the next step."""
        return state.scalars

    def actor_metrics(self, state: TrainState, aux: ActorAux) -> Metrics:
        """The actor's metrics."""
        return {}

    @property
    def acting_steps(self) -> int:
        """Euler steps when acting."""
        return self.flow_steps or self.config.flow_steps

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, with the given policy weights or freshly initialised ones."""
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
        """Advantages of the data's chunks over V(s) or over the candidates' mean; zero if there is neither."""
        critic = state.params["critic"]
        embedding = self.critic.embed(critic, inputs)
        of_data = self.values(critic, embedding, chunks[:, None])[..., 0]
        of_candidates = self.values(critic, embedding, candidates) if candidates.shape[1] else of_data[..., None]
        learned = self.config.value == "expectile"
        baseline = self.state_values(critic, embedding) if learned else of_candidates.mean(2)
        return Compared((of_data - baseline).swapaxes(0, 1), of_candidates.mean(0))

    def raised(self, weight: Array, part: ActorPart) -> Array:
        """Imitation weights (scalar or per sample), at least `correction_weight` for an operator's chunks."""
        floor = self.config.correction_weight
        if floor is None or part.acted_by is None:
            return weight
        return corrections.raised(jnp.broadcast_to(weight, len(part.actions)), part.acted_by, floor)

    def imitated(self, part: ActorPart) -> Float[Array, "B H"]:
        """Mask of the steps to imitate; in an operator's chunks it ends when the policy takes over again."""
        return part.valid if part.acted_by is None else corrections.persons_own(part.valid, part.acted_by)

    def bc_loss(
        self, params: Params, observation: Observation, actions: Float[Array, "B H A"], valid: Any, draws: flow.Draws
    ) -> Float[Array, ""]:
        """Plain imitation loss on the data, for comparison."""
        error = flow.squared_error(self.policy, params, self.policy.encode(params, observation), actions, draws)
        return flow.chunk_loss(error, valid=valid, dims=self.critic.real_action_dim).mean()

    # One step

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """Candidates at s', the actor's gradient at s, then the critic's updates on the features of both passes."""
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
        """(weights, optimizer states) of all groups but the critic; a policy that holds waits for the critic."""
        params, opt, is_open = {}, {}, self.actor_open(state)
        for name, gradient in grads.items():
            learner, old = self.policy_learner, state.params[name]
            learner = learner if name == "policy" else replace(learner, mask=None)
            if self.holds:  # zero gradients leave the moments at zero, while schedules advance
                gradient = jax.tree.map(lambda g: jnp.where(is_open, g, 0), gradient)
            new, opt[name] = learner.step(old, gradient, state.opt[name])
            params[name] = jax.tree.map(partial(_once, is_open), new, old) if self.holds else new
        return params, opt

    def total_loss(self, state: TrainState, batch: Any, key: Array) -> tuple[Float[Array, ""], Metrics]:
        """The losses of the first step of `update` with the same key: total = critic + actor, and its parts.

        For inspection; `update` computes the two gradients separately. `bc` is plain imitation at the same draws; it is
        not part of the sum, because the actor's loss already contains its share.
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
        """Observations, augmented identically at s and s', and all random numbers of the step."""
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
        """The critic, if it chooses among candidates."""
        return frozenset({"critic"} if self.candidates_to_act(best_of) > 1 else ())

    def plan(
        self, state: TrainState, context: Any, keys: Key[Array, "B"], count: int, steer: flow.Steer | None
    ) -> Float[Array, "B N H A"]:
        """Plain samples of the policy."""
        noise = flow.noise(keys, count, self.policy.horizon, self.policy.action_dim)
        return flow.sample(self.policy, state.policy, context, noise, num_steps=self.acting_steps, steer=steer)


def _once(is_open: Bool[Array, ""], new: Array, old: Array) -> Array:
    """`new` if open, else `old`; an array that both share, such as a frozen leaf, stays shared."""
    return new if new is old else jnp.where(is_open, new, old)


def _named(key: Array) -> dict[str, Array]:
    """One key for each kind of randomness in a step."""
    return dict(zip(("augment", "flow", "time", "here", "there", "critic"), jax.random.split(key, 6), strict=True))
