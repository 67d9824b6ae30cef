"""Q-chunking's critic (arXiv 2507.07969): values of action chunks, learned by temporal differences.

    y = Σ_{l<L} γ^l r_l + γ^L · mask · Q̄(s_{t+L}, a*)      a* = argmax_n Q(s_{t+L}, a^n),  a^n ~ π

The online critic chooses among candidates, the target critic values the choice. For the first `mc_steps`, y is the
observed return where it is known. No gradient flows into the policy. Two options add a head to the critic, which
regresses the τ-expectile, over the data, of the values by a head with a longer horizon:

    y = Σ_{l<L} γ^l r_l + γ^L · mask · V(s_{t+L}),   V(s) ≈ expectile_τ of Q̄(s, a)            (IQL, arXiv 2110.06169)
    Q_P(s, a_0 … a_{k-1}) ≈ expectile_τ of Q̄(s, a_0 … a_{h-1}): it chooses, y counts on it     (DQC, arXiv 2512.10926)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Key

from pirl.agents import objectives as ob
from pirl.agents.agent import Agent, Choice, Metrics, TrainState
from pirl.agents.ensemble import halves
from pirl.agents.gate import final_word, said, stays_open
from pirl.agents.learner import Learner, divided
from pirl.agents.q_chunking_config import ChunkCriticConfig
from pirl.models import flow
from pirl.models.critic import Critic, CriticInputs
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy

READ = ("critic_actions", "reward_sum", "length", "next_terminal", "sequence_mask", "mc_return")
"""Columns of the batch that the critic uses, besides observations."""


class Successor(NamedTuple):
    """What the target needs at s_{t+L}: the critic's inputs and the policy's candidates."""

    inputs: CriticInputs
    candidates: Float[Array, "B N H A"]


@dataclass(frozen=True, kw_only=True)
class ChunkCritic(Agent):
    """Base of algorithms with a chunk critic: values, targets, critic updates and best-of-N acting."""

    policy: FlowPolicy
    critic: Critic
    config: ChunkCriticConfig
    critic_learner: Learner
    """Optimizer and EMA of the critic's weights."""

    @property
    def value_range(self) -> tuple[float, float]:
        """Smallest and largest discounted return that the reward range allows."""
        c = self.config
        return ob.value_range(c.reward_low, c.reward_high, c.discount, once=c.reward_once)

    @property
    def support(self) -> ob.HLGauss:
        """The support of the critics' histograms."""
        sizes = self.critic.config
        return ob.HLGauss(*self.value_range, sizes.bins, sizes.sigma_ratio)

    def values(self, params: Params, embedding: Array, chunks: Float[Array, "B N H A"]) -> Float[Array, "E B N"]:
        """Each member's values of N chunks, by the head that chooses: the partial critic if there is one."""
        return self.valued(params, embedding, chunks, self.config.partial_horizon)

    def state_values(self, params: Params, embedding: Array) -> Float[Array, "E B"]:
        """V(s) by each member."""
        nothing = jnp.zeros((embedding.shape[1], 1, 0, self.critic.real_action_dim))
        return self.valued(params, embedding, nothing, 0)[..., 0]

    def valued(self, params: Params, embedding: Array, chunks: Array, steps: int | None) -> Float[Array, "E B N"]:
        """Each member's values of the chunks' first `steps` steps; None: of the critic's whole horizon."""
        out = self.critic.score(params, embedding, chunks, steps=steps)
        return ob.critic_value(self.critic.config.loss, out, self.support)

    def successor(self, params: Params, observation: Observation, noise: Float[Array, "B N H A"]) -> Successor:
        """Encode s_{t+L} once and sample the policy's N candidates there."""
        context = self.policy.encode(params, observation)
        return Successor(jax.lax.stop_gradient(CriticInputs.of(context)), self.sampled(params, context, noise))

    def target(
        self, online: Params, target: Params, successor: Successor, batch: Any, key: Array
    ) -> tuple[Float[Array, "*E B"], Metrics]:
        """(y, metrics): bootstraps from V, or from the online critic's best of N, valued by the target critic."""
        inputs, candidates = successor
        embedding, info = self.critic.embed(online, inputs), {}
        if self.config.value == "expectile":
            value = self.state_values(online, embedding)
            value = value if self.config.halved else value.mean(0)
        else:
            choice = self.values(online, embedding, candidates).mean(0)
            best = ob.take_candidate(candidates, ob.select_best(choice))
            value = self.values(target, self.critic.embed(target, inputs), best[:, None])[..., 0]
            value = self.joined(value, key)
            info["critic/candidate_gain"] = (choice.max(1) - choice.mean(1)).mean()
        bootstrap = 1 - batch["next_terminal"]
        bounds = self.value_range if self.config.clip_targets else (-math.inf, math.inf)
        y = ob.td_target(batch["reward_sum"], self.config.discount, batch["length"], bootstrap, value, *bounds)
        return y, info

    def longer(self, target: Params, inputs: CriticInputs, batch: Any, key: Array) -> dict[int, Float[Array, "*E B"]]:
        """Targets of each head's expectile regression: the next longer head's target value of the data's chunk."""
        embedding, found = self.critic.embed(target, inputs), {}
        looks: tuple[int | None, ...] = (None, *self.config.heads)
        for steps, look in zip(self.config.heads, looks[:-1], strict=True):
            value = self.valued(target, embedding, batch["critic_actions"][:, None], look)[..., 0]
            found[steps] = self.joined(value, key)
        return jax.lax.stop_gradient(found)

    def joined(self, values: Float[Array, "E B"], key: Array) -> Float[Array, "*E B"]:
        """The ensemble's values as targets: aggregated, or with `halves` each member's own."""
        return values if self.config.halved else ob.aggregate(values, self.config.q_aggregation, key)

    def learns(self, batch: Any) -> Float[Array, "*E B"]:
        """Mask of the rows that the critics train on; with `halves`, per member."""
        if not self.config.halved:
            return batch["sequence_mask"]
        return batch["sequence_mask"] * halves(batch["episode"], self.critic.config.num_critics)

    def taught(self, state: TrainState, batch: Any, y: Float[Array, "*E B"]) -> Float[Array, "*E B"]:
        """Y, replaced by the observed return, where known, during the first `mc_steps`."""
        return jnp.where(state.step < self.config.mc_steps, ob.known_return(batch["mc_return"], y), y)

    def critic_loss(
        self,
        params: Params,
        inputs: CriticInputs,
        candidates: Array,
        batch: Any,
        y: Float[Array, "*E B"],
        key: Array,
        longer: Mapping[int, Float[Array, "*E B"]],
    ) -> tuple[Float[Array, ""], Metrics]:
        """(loss, metrics): Q(s, a) against y over the rows of `learns`, plus each head's expectile loss against
        `longer`, plus Cal-QL's penalty if configured.
        """
        sizes, mask = self.critic.config, self.learns(batch)
        embedding = self.critic.embed(params, inputs)

        def told(steps: int | None, y: Float[Array, "*E B"]) -> tuple[Float[Array, "E B"], Float[Array, "E B"]]:
            out = self.critic.score(params, embedding, batch["critic_actions"][:, None], steps=steps, key=key)[:, :, 0]
            error = ob.critic_loss(sizes.loss, out, y, support=self.support, delta=sizes.huber_delta)
            return ob.critic_value(sizes.loss, out, self.support), error

        q, error = told(None, y)
        loss = ob.masked_mean(error, mask)
        info = {"critic/loss": loss, "critic/q_mean": q.mean(), "critic/q_std": q.std(1).mean(), "critic/y": y.mean()}
        for steps, higher in longer.items():
            v, error = told(steps, higher)
            share = ob.masked_mean(ob.expectile_weights(higher - v, self.config.expectile) * error, mask)
            if steps:
                info |= {"critic/partial_loss": share, "critic/partial_mean": v.mean()}
            else:
                info |= {"critic/value_loss": share, "critic/value_mean": v.mean()}
            loss = loss + share
        if self.config.calql_weight:
            # The penalty compares values, so it is computed without dropout.
            pushed = ob.calql_penalty(
                self.valued(params, embedding, candidates, None),
                self.valued(params, embedding, batch["critic_actions"][:, None], None)[..., 0],
                batch["mc_return"],
            )
            penalty = ob.masked_mean(pushed, mask)
            info["critic/calql"] = penalty
            loss = loss + self.config.calql_weight * penalty
        return loss, info

    def sampled(self, params: Params, context: Any, noise: Float[Array, "B N H A"]) -> Float[Array, "B N H A"]:
        """The policy's chunks from the given noise, without gradients."""
        if not noise.size:
            return noise
        steps = self.config.flow_steps
        return jax.lax.stop_gradient(flow.sample(self.policy, params, context, noise, num_steps=steps))

    def update_critic(
        self, state: TrainState, here: CriticInputs, candidates: Array, successor: Successor, batch: Any, key: Array
    ) -> tuple[Params, Params, Any, Metrics]:
        """Make `critic_updates` steps on the same features; the target critic follows after each.

        Returns (critic, target critic, optimizer state, metrics of the last step).
        """
        c, read = self.config, (*READ, *(("episode",) if self.config.halved else ()))
        rows = (here, candidates, successor, {name: batch[name] for name in read})
        leaves, structure = jax.tree.flatten(rows)
        shares = [divided(x, c.critic_updates) for x in leaves] if c.critic_rows == "shares" else None

        def once(carry: tuple[Params, Params, Any], x: Any) -> tuple[tuple[Params, Params, Any], Metrics]:
            (critic, target, opt), (key, share) = carry, x
            here, candidates, successor, batch = rows if share is None else jax.tree.unflatten(structure, share)
            pair_key, dropout_key = jax.random.split(key)
            y, chosen = self.target(critic, target, successor, batch, pair_key)
            y, longer = self.taught(state, batch, y), self.longer(target, here, batch, pair_key)

            def loss(critic: Params) -> tuple[Array, Metrics]:
                return self.critic_loss(critic, here, candidates, batch, y, dropout_key, longer)

            (_, info), grads = jax.value_and_grad(loss, has_aux=True)(critic)
            critic, opt = self.critic_learner.step(critic, grads, opt)
            target = ob.soft_update(target, critic, c.target_update_rate)
            return (critic, target, opt), info | chosen | {"critic/grad_norm": optax.tree.norm(grads)}

        start = (state.params["critic"], state.target["critic"], state.opt["critic"])
        (critic, target, opt), infos = jax.lax.scan(once, start, (jax.random.split(key, c.critic_updates), shares))
        return critic, target, opt, jax.tree.map(lambda x: x[-1], infos)

    def q_values(
        self, state: TrainState, observation: Observation, chunks: Float[Array, "B N H A"]
    ) -> Float[Array, "E B N"]:
        """Each critic's values of N chunks per observation, by the acting weights."""
        critic = state.ema.get("critic", state.params["critic"])
        inputs = CriticInputs.of(self.policy.encode(state.policy, observation))
        return self.values(critic, self.critic.embed(critic, inputs), chunks)

    # Acting

    def plan(
        self, state: TrainState, context: Any, keys: Key[Array, "B"], count: int, steer: flow.Steer | None
    ) -> Float[Array, "B N H A"]:
        """Sample `count` chunks per observation."""
        raise NotImplementedError(f"{type(self).__name__}.plan")

    def candidates_to_act(self, best_of: int | None) -> int:
        """Number of candidates when acting. Defaults to 1: the improvement is in the policy's weights."""
        return best_of or 1

    def act(
        self,
        state: TrainState,
        observation: Observation,
        keys: Key[Array, "B"],
        *,
        best_of: int | None = None,
        steer: flow.Steer | None = None,
    ) -> Float[Array, "B H A"]:
        """One chunk per observation: the critic's best of the candidates."""
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
        """Like `act`, with the critic's values if there are several candidates."""
        context, count = self.policy.encode(state.policy, observation), self.candidates_to_act(best_of)
        chunks = self.plan(state, context, keys, count, steer)
        if count == 1:
            return Choice(chunks[:, 0])
        critic = state.ema.get("critic", state.params["critic"])
        values = self.values(critic, self.critic.embed(critic, CriticInputs.of(context)), chunks).mean(0)
        return Choice(ob.take_candidate(chunks, ob.select_best(values)), values.max(1), values.std(1))

    # Metrics

    def value_metrics(self, state: TrainState, inputs: CriticInputs, batch: Any) -> Metrics:
        """The critic's values of the data's chunks, compared with observed returns."""
        critic, chunks = state.params["critic"], batch["critic_actions"][:, None]
        embedding = self.critic.embed(critic, inputs)

        def total(chunks: Array) -> tuple[Array, Array]:
            q = self.values(critic, embedding, chunks).mean(0)[:, 0]
            return q.sum(), q

        slope, q = jax.grad(total, has_aux=True)(chunks)
        known = jnp.isfinite(batch["mc_return"]).astype(jnp.float32)
        gap = jnp.where(known > 0, q - batch["mc_return"], 0.0)
        gate = {} if self.config.gate is None else {"actor/gate": jnp.maximum(state.scalars["gate"], 0.0)}
        return gate | {
            "critic/action_slope": jnp.sqrt(jnp.square(slope).sum((1, 2, 3))).mean(),
            "critic/mc_gap": ob.masked_mean(gap, known),
            "critic/mc_correlation": ob.correlation(q, batch["mc_return"], known),
            "data/valid_fraction": batch["valid"].mean(),
            "data/critic_fraction": batch["sequence_mask"].mean(),
        }

    # When the actor starts

    def scalars(self) -> dict[str, Array]:
        """The numbers that the algorithm adapts, to begin with. The gate is 1 where it is open, 0 where it never was,
        -1 where it was.
        """
        return {} if self.config.gate is None else {"gate": jnp.float32(0.0)}

    def actor_open(self, state: TrainState) -> Bool[Array, ""]:
        """Whether the actor uses the critic: after the warm-up, and while the gate is open."""
        return (state.step >= self.config.actor_warmup_steps) & (state.scalars.get("gate", 1.0) > 0)

    def heard(self, state: TrainState, measured: Mapping[str, float], say: Callable[[str], None]) -> TrainState:
        """Open or shut the gate by the critic's metrics on held-out episodes."""
        gate = self.config.gate
        if gate is None or (measured and not any(name.startswith("held_out/") for name in measured)):
            return state
        before = float(state.scalars["gate"])
        is_open = stays_open(measured, gate, was_open=before > 0)
        if is_open != (before > 0):
            say(said(measured, is_open=is_open))
        now = 1.0 if is_open else -1.0 if before else 0.0
        value = jax.device_put(np.float32(now), state.scalars["gate"].sharding)
        return replace(state, scalars=state.scalars | {"gate": value})

    def verdict(self, state: TrainState, measured: Mapping[str, float]) -> str | None:
        """That the gate is shut, if it is."""
        if self.config.gate is None or float(state.scalars["gate"]) > 0:
            return None
        did = "left the policy as it was" if self.config.freezes_policy else "imitated"
        return final_word(measured, self.config.gate, was_open=float(state.scalars["gate"]) < 0, did=did)


def copied(tree: Params) -> Params:
    """A copy of every leaf, because aliased leaves of the state cannot be donated."""
    return jax.tree.map(jnp.copy, tree)
