"""A frozen policy with a critic over its chunks and a small actor: shared by `DSRL` and `RLToken`.

A subclass says what the actor does: `draw` its random numbers, `ahead` and `propose` chunks at s_{t+L} and s, `learn`
from what the critic says of them, and `plan` to act. No gradient passes the policy; its prefix is encoded once per
observation.

With a gate (`config.gate`) that is shut, it acts as the policy does, without the actor; the group `gate` says so to
whoever acts with a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from pirl.agents import objectives as ob
from pirl.agents.agent import Choice, Metrics, Parts, TrainState, parts_of
from pirl.agents.chunk_critic import ChunkCritic, Successor, copied
from pirl.agents.frozen_policy_config import FrozenPolicyConfig
from pirl.agents.learner import Learner, in_parts
from pirl.models.chunk_actor import ChunkActor, read_token
from pirl.models.critic import CriticInputs
from pirl.models.observation import Observation
from pirl.models.params import Params, flatten


class Proposal(NamedTuple):
    """Chunks proposed at s; batch-first."""

    inputs: CriticInputs
    token: Float[Array, "B T"]
    chunks: Float[Array, "B N H A"]
    """The frozen policy's chunks."""
    noise: Float[Array, "B N H A"]
    """The flow's initial noise for each chunk."""


class Learned(NamedTuple):
    """Updated weights and optimizer states by group, and metrics."""

    params: dict[str, Params]
    opt: dict[str, Any]
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class FrozenPolicy(ChunkCritic):
    """The base class. Random numbers are drawn for the whole batch, so splitting it into parts changes nothing."""

    config: FrozenPolicyConfig
    actor: ChunkActor
    """The trained network beside the frozen policy."""
    actor_learner: Learner
    """The actor's optimizer."""
    exploring: bool = False
    """Whether the actor adds exploration noise."""

    @classmethod
    def shared(cls, config: Any, parts: Parts) -> dict[str, Any]:
        """The arguments a subclass needs, except the actor."""
        return parts_of(cls, parts) | {"config": config, "actor_learner": Learner(tx=parts.policy_learner.tx)}

    # Defined by subclasses

    def draw(self, key: Array, shape: tuple[int, int, int, int]) -> Any:
        """Random numbers for chunks of `shape` (B, N, H, A); batch-first."""
        raise NotImplementedError(f"{type(self).__name__}.draw")

    def ahead(self, state: TrainState, context: Any, inputs: CriticInputs, draws: Any) -> Float[Array, "B N H A"]:
        """Chunks at s_{t+L} as the agent would execute them, for targets."""
        raise NotImplementedError(f"{type(self).__name__}.ahead")

    def propose(self, state: TrainState, context: Any, inputs: CriticInputs, draws: Any) -> Proposal:
        """Chunks to learn from at s."""
        raise NotImplementedError(f"{type(self).__name__}.propose")

    def done(self, state: TrainState, proposal: Proposal) -> Float[Array, "B N H A"]:
        """The chunks that the agent would execute for a proposal; Cal-QL lowers their values."""
        return proposal.chunks

    def learn(self, state: TrainState, critic: Params, proposal: Proposal, key: Array) -> Learned:
        """One step of everything but the critic, which is updated already."""
        raise NotImplementedError(f"{type(self).__name__}.learn")

    def more(self, key: Array) -> dict[str, Params]:
        """Initial weights of further groups, trained by the critic's learner."""
        return {}

    def more_targets(self, actor: Params) -> dict[str, Params]:
        """Initial target networks besides the critic's."""
        return {}

    # The rest

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, with the given policy weights or freshly initialised ones, kept in bfloat16."""
        policy_key, critic_key, actor_key, more_key = jax.random.split(key, 4)
        policy = self.policy.init(policy_key) if policy_params is None else policy_params
        policy = jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy)
        critic, critic_opt = self.critic_learner.init(self.critic.init(critic_key))
        actor, actor_opt = self.actor_learner.init(self.actor.init(actor_key))
        more = {name: self.critic_learner.init(params) for name, params in self.more(more_key).items()}
        averaged = {} if self.critic_learner.ema_decay is None else {"critic": copied(critic)}
        params = {"policy": policy, "critic": critic, "actor": actor} | {name: p for name, (p, _) in more.items()}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params | ({} if self.config.gate is None else {"gate": {"open": jnp.zeros(())}}),
            target={"critic": copied(critic)} | self.more_targets(actor),
            ema=averaged,
            opt={"critic": critic_opt, "actor": actor_opt} | {name: opt for name, (_, opt) in more.items()},
            scalars=self.scalars(),
            frozen=frozenset(f"policy/{path}" for path in flatten(policy)),
        )

    def acts(self, state: TrainState, own: Array, plain: Array) -> Array:
        """The actor's noise or chunks; while the gate is shut, those of the policy by itself."""
        gate = state.params.get("gate")
        return own if gate is None else jnp.where(gate["open"] > 0, own, plain)

    def token(self, state: TrainState, inputs: CriticInputs) -> Float[Array, "B T"]:
        """The acting critic's readout of the prefix."""
        return read_token(self.critic, state.ema.get("critic", state.params["critic"]), inputs)

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """Chunks at s' and s, the critic's updates on the features of both passes, then the actor's step."""
        c, names = self.config, ("augment", "here", "there", "critic", "actor")
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        here, there = (
            self.policy.prepare(Observation.from_dict(batch[name]), keys["augment"] if c.augment else None)
            for name in ("observations", "next_observations")
        )
        size, *chunk = batch["actions"].shape
        shape = (size, c.num_action_samples, *chunk)

        def seen(observation: Observation) -> tuple[Any, CriticInputs]:
            context = jax.lax.stop_gradient(self.policy.encode(state.policy, observation))
            return context, CriticInputs.of(context)

        def succeeded(part: tuple[Observation, Any]) -> Successor:
            context, inputs = seen(part[0])
            return Successor(inputs, self.ahead(state, context, inputs, part[1]))

        def proposed(part: tuple[Observation, Any]) -> Proposal:
            return self.propose(state, *seen(part[0]), part[1])

        successor = in_parts(succeeded, (there, self.draw(keys["there"], shape)), c.parts)
        proposal = in_parts(proposed, (here, self.draw(keys["here"], shape)), c.parts)
        critic, target, critic_opt, info = self.update_critic(
            state, proposal.inputs, self.done(state, proposal), successor, batch, keys["critic"]
        )
        learned = self.learn(state, critic, proposal, keys["actor"])
        actor = learned.params["actor"]
        followed = {
            name: ob.soft_update(target, actor, c.target_update_rate)
            for name, target in state.target.items()
            if name == "actor"
        }
        new = replace(
            state,
            step=state.step + 1,
            params={"policy": state.params["policy"], "critic": critic, **self._gate(state), **learned.params},
            target={"critic": target, **followed},
            ema={name: self.critic_learner.average(average, critic) for name, average in state.ema.items()},
            opt={"critic": critic_opt, **learned.opt},
        )
        return new, {**learned.metrics, **info, **self.value_metrics(state, proposal.inputs, batch)}

    def _gate(self, state: TrainState) -> dict[str, Params]:
        """The group `gate`, of what the actor does from this step on."""
        return {"gate": {"open": jnp.float32(self.actor_open(state))}} if "gate" in state.params else {}

    def stepped(self, state: TrainState, grads: Mapping[str, Params], *, when_open: frozenset[str]) -> Learned:
        """One optimizer step of each group; groups in `when_open` only change while the actor may use the critic."""
        params, opt, is_open = {}, {}, self.actor_open(state)
        for name, gradient in grads.items():
            learner = self.actor_learner if name == "actor" else self.critic_learner
            before = state.params[name], state.opt[name]
            after = learner.step(*(before[0], gradient, before[1]))
            if name in when_open:
                after = jax.tree.map(lambda new, old: jnp.where(is_open, new, old), after, before)
            params[name], opt[name] = after
        return Learned(params, opt, {"actor/grad_norm": optax.tree.norm(grads["actor"])})

    # Acting

    def explore(
        self, state: TrainState, observation: Observation, keys: Key[Array, "B"], *, best_of: int | None = None
    ) -> Choice:
        """Like `act`, with exploration noise in the actor."""
        return Choice(replace(self, exploring=True).act(state, observation, keys, best_of=best_of))

    def acting_groups(self, best_of: int | None = None) -> frozenset[str]:
        """The actor, and the critic that reads for it; and whether it may."""
        return frozenset({"actor", "critic", "gate"})
