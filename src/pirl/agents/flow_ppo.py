"""PPO and GRPO on a flow policy, with exact likelihood ratios of the denoising path (πRL, arXiv 2510.25889).

A flow has no tractable likelihood of its samples. So during collection the sampler takes Gaussian steps (`denoising`),
and rollouts keep the path of each plan (`explore`). PPO's ratio is that of the path's densities under the current and
the rollout weights. The state keeps the rollout weights, as in RIPT (`groups.py`): one program computes both densities,
so the ratio is exactly 1 for equal weights, and the divergence is exact.

`ppo` assigns credit per plan, by GAE with a value of the policy's features; `grpo` per rollout, relative to its group.
Evaluation and the served policy follow the ODE, without exploration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Key

from pirl.agents import denoising
from pirl.agents import flow_objectives as fo
from pirl.agents import objectives as ob
from pirl.agents import ppo_objectives as po
from pirl.agents.agent import Choice, Lesson, Metrics, Parts, TrainState, parts_of
from pirl.agents.config import FlowPPOConfig
from pirl.agents.groups import Demos, OwnRollouts
from pirl.agents.learner import Learner, accumulated
from pirl.agents.state_value import StateValue
from pirl.errors import EnvError
from pirl.models.critic import Critic, CriticInputs, PrefixCritic
from pirl.models.noise_head import NoiseHead
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.records import BatchSizes, BatchSpec, Rollout, Spec


class Rows(NamedTuple):
    """Inputs of the loss: plans of rollouts."""

    observation: Observation
    path: denoising.Path
    counted: Float[Array, "B H 1"]
    """1 for executed steps of the chunk."""
    advantage: Float[Array, "B"]
    share: Float[Array, "B"]
    """Row weights: mean 1 over the batch, 0 for padding rows."""


@dataclass(frozen=True, kw_only=True)
class FlowPPO(OwnRollouts):
    """The algorithm. Its update is deterministic, except for augmentation and the flow draws of demonstrations."""

    critic: Critic
    """V(s) is its value of an all-zero chunk, as in RECAP."""
    head: NoiseHead
    """The noise scale of `flow_noise`."""
    config: FlowPPOConfig
    policy_learner: Learner
    critic_learner: Learner
    """Optimizer of the value and of the noise head."""

    @classmethod
    def build(cls, config: FlowPPOConfig, parts: Parts) -> "FlowPPO":
        """Build the algorithm from its settings and parts."""
        critic = parts.critic
        head = NoiseHead(
            horizon=parts.policy.horizon,
            action_dim=parts.policy.action_dim,
            state_dim=critic.state_dim,
            feature_width=critic.feature_width if isinstance(critic, PrefixCritic) else None,
            low=config.noise_low,
            high=config.noise_high,
        )
        return cls(config=config, head=head, **parts_of(cls, parts))

    @property
    def sampler(self) -> denoising.Sampler:
        """The sampler used during collection."""
        head = self.head if self.config.exploration == "flow_noise" else None
        return denoising.Sampler(
            policy=self.policy, flow_steps=self.flow_steps, level=self.config.noise_level, head=head
        )

    @property
    def value(self) -> StateValue | None:
        """V(s) for `ppo`; None for `grpo`."""
        c = self.config
        if c.algorithm != "ppo":
            return None
        low, high = ob.value_range(c.reward_low, c.reward_high, c.discount, once=c.reward_once)
        return StateValue(critic=self.critic, low=low, high=high, clip=c.value_clip)

    @property
    def notes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the noted path, the index of its first random step and, with `ppo`, the value."""
        chunk = (self.policy.horizon, self.policy.action_dim)
        shapes: dict[str, tuple[int, ...]] = {"path": (self.sampler.random_steps + 1, *chunk), "step": ()}
        return shapes | ({} if self.value is None else {"value": ()})

    def columns(self, sizes: BatchSizes) -> BatchSpec:
        """The notes of `explore` and, with `ppo`, the return."""
        notes = {name: Spec((sizes.batch, *shape), "float32") for name, shape in self.notes.items()}
        return {"notes": notes} | ({} if self.value is None else {"return": Spec((sizes.batch,), "float32")})

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, with the given policy weights or freshly initialised ones."""
        policy_key, critic_key, noise_key = jax.random.split(key, 3)
        policy, policy_opt = self.policy_learner.init(
            self.policy.init(policy_key) if policy_params is None else policy_params
        )
        params, opt = {"policy": policy}, {"policy": policy_opt}
        if self.config.exploration == "flow_noise":
            params["noise"], opt["noise"] = self.critic_learner.init(self.head.init(noise_key))
        target = self.copied_small(self._of_policy(params))
        if self.value is not None:
            params["critic"], opt["critic"] = self.critic_learner.init(self.critic.init(critic_key))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            target=target,
            opt=opt,
            scalars={"held": jnp.zeros(())},
            frozen=self.policy_learner.frozen(policy),
        )

    # Exploring

    def explore(
        self, state: TrainState, observation: Observation, keys: Key[Array, "B"], *, best_of: int | None = None
    ) -> Choice:
        """One chunk per observation, sampled along a random path, with that path (and the value) as notes."""
        context = self.policy.encode(state.params["policy"], observation)
        chunks, path = self.sampler.sample(state.params, context, keys)
        notes = {"path": path.points, "step": path.first.astype(jnp.float32)}
        if self.value is not None:
            notes["value"] = self.value.of(state.params["critic"], CriticInputs.of(context)).mean(0)
        return Choice(chunks, notes=notes)

    # An iteration

    def prepare(self, rewards: Float[np.ndarray, "G K"]) -> Lesson:
        """`grpo`: advantages in the groups with mixed outcomes; other groups have only zeros and are left out."""
        chosen = np.flatnonzero(fo.accepted(rewards))[: self.config.groups_per_iteration]
        advantage = fo.group_advantages(rewards[chosen], self.config.advantage)
        return Lesson(groups=chosen, columns={"advantage": advantage}, constants={})

    def lesson(self, groups: Sequence[Sequence[Rollout]]) -> Lesson:
        """`ppo`: advantage and return of every plan."""
        if self.value is None:
            return super().lesson(groups)
        rollouts = [rollout for group in groups for rollout in group]
        advantages = [self._advantages(rollout, bounded=self.value.bounded) for rollout in rollouts]
        values = [rollout.notes["value"][: len(rollout.starts)] for rollout in rollouts]
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        if self.config.standardise:
            advantages = po.standardised(advantages)
        plans = {"advantage": advantages, "return": returns}
        return Lesson(groups=np.arange(len(groups)), columns={}, constants={}, of_plans=plans)

    def _advantages(self, rollout: Rollout, *, bounded: bool) -> Float[np.ndarray, "k"]:
        c, episode = self.config, rollout.episode
        if bounded and not (np.all(episode.rewards >= c.reward_low) and np.all(episode.rewards <= c.reward_high)):
            raise EnvError(
                f"rewards from {episode.rewards.min()} to {episode.rewards.max()}, and the values are bounded by "
                f"rewards in [{c.reward_low}, {c.reward_high}]",
                hint="set agent.reward_low and agent.reward_high to what the environment pays, or critic.loss to huber",
            )
        rewards, lengths = po.plan_rewards(episode.rewards, rollout.starts, c.discount)
        values = rollout.notes["value"].astype(np.float64)
        last_looked = len(values) > len(rollout.starts)
        after = float(values[-1]) if last_looked and not episode.terminated[-1] else 0.0
        return po.gae(rewards, values[: len(rewards)], after, lengths, c.discount, c.gae_lambda)

    def moved_far(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the KL limit has stopped the policy and there is no value to train on."""
        return self.value is None and float(metrics["ppo/held"]) > 0

    # One step

    def losses(
        self, params: Mapping[str, Params], old: Mapping[str, Params], rows: Rows
    ) -> tuple[Metrics, CriticInputs]:
        """(per-row metrics, among them `ppo/loss`; critic inputs). `params` and `old` are whole trees by group."""
        c, sampler, ends = self.config, self.sampler, rows.path.points[:, 1:]
        context = self.policy.encode(params["policy"], rows.observation)
        fixed = jax.lax.stop_gradient(context)
        past = fixed if self.encoder_frozen else self.policy.encode(old["policy"], rows.observation)
        new = sampler.steps(params, context, rows.path)
        before = jax.lax.stop_gradient(sampler.steps(old, past, rows.path))

        def reduced(x: Array) -> Float[Array, "B"]:
            """Sum or mean over denoising steps, executed steps and real dimensions."""
            x = jnp.broadcast_to(x, ends.shape)[..., : self.real_action_dim]
            numbers = rows.counted.sum((1, 2)) * sampler.random_steps * self.real_action_dim
            total = (x * rows.counted[:, None]).sum((1, 2, 3))
            return total / jnp.maximum(numbers, 1) if c.reduce == "mean" else total

        log_ratio = reduced(
            denoising.log_density(ends, new.mean, new.std) - denoising.log_density(ends, before.mean, before.std)
        )
        loss, ratio = po.clipped_surrogate(log_ratio, rows.advantage, c.clip)
        logged = {
            "ppo/ratio": ratio,
            "ppo/ratio_clipped": (jnp.abs(ratio - 1) > c.clip).astype(jnp.float32),
            "ppo/kl": reduced(denoising.divergence(new.mean, new.std, before.mean, before.std)),
        }
        if c.exploration == "flow_noise":
            entropy = denoising.entropy(new.std).mean((1, 2, 3))
            loss = loss - c.entropy_weight * entropy
            logged |= {"ppo/entropy": entropy, "ppo/noise": new.std.mean((1, 2, 3))}
        return logged | {"ppo/loss": loss}, CriticInputs.of(fixed)

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """One minibatch of rollout rows and, with `bc_weight`, demonstrations.

        A batch has `observations`, `executed` (1 for executed steps of a plan), `notes` (from `explore`), `advantage`,
        `weight` (row weight, 0 for padding), `fresh` (1 in the first minibatch of an iteration), with `ppo` also
        `return`, the value's target, and optionally `demos`.
        """
        c, learner = self.config, self.policy_learner
        target = self.that_rolled_out(state.target, self._of_policy(state.params), batch)
        of_rows, of_demos = jax.random.split(key)
        rows, demos = self._rows(batch, of_rows), self.demos(batch, of_demos)
        trainable, frozen = learner.split(state.params["policy"])
        old = target | {"policy": learner.join(target["policy"], frozen)}

        def loss(groups: dict[str, Params], parts: tuple[Rows, Demos | None]) -> tuple[Array, Any]:
            params = groups | {"policy": learner.join(groups["policy"], frozen)}
            logged, inputs = self.losses(params, old, parts[0])
            total = (parts[0].share * logged["ppo/loss"]).mean()
            if parts[1] is not None:
                logged["bc/loss"] = self.demo_losses(params["policy"], params["policy"], parts[1])
                total = total + c.bc_weight * logged["bc/loss"].mean()
            return total, (logged, None if self.value is None else inputs)

        groups = self._of_policy(state.params) | {"policy": trainable}
        _, (logged, inputs), grads = accumulated(loss, groups, (rows, demos), c.parts)
        metrics = self._metrics(logged, rows) | {"ppo/grad_norm": optax.tree.norm(grads)}
        # Beyond the KL limit the policy is frozen until the next iteration; the value keeps training.
        far = metrics["ppo/kl"] > (jnp.inf if c.kl_limit is None else c.kl_limit)
        held = jnp.where(jnp.max(batch["fresh"]) > 0, far, far | (state.scalars["held"] > 0)).astype(jnp.float32)
        metrics["ppo/held"] = held
        learns = (state.step >= (0 if self.value is None else c.value_warmup_steps)) & (held == 0)
        params, opt = dict(state.params), dict(state.opt)
        for name in groups:
            its = learner if name == "policy" else self.critic_learner
            moved = its.step(params[name], grads[name], opt[name])
            params[name], opt[name] = _if(learns, moved, (params[name], opt[name]), its)
        if self.value is not None:
            known = (batch["return"], batch["notes"]["value"], rows.share)
            gradient, found = self.value.gradient(params["critic"], inputs, *known)
            params["critic"], opt["critic"] = self.critic_learner.step(params["critic"], gradient, opt["critic"])
            metrics |= found
        new = replace(
            state, step=state.step + 1, params=params, target=target, opt=opt, scalars=state.scalars | {"held": held}
        )
        return new, metrics

    def _rows(self, batch: Any, key: Array) -> Rows:
        notes, kept = batch["notes"], jnp.asarray(batch["weight"]) > 0  # padding rows may hold anything
        return Rows(
            observation=self.prepared(batch, key),
            path=denoising.Path(
                points=jnp.where(kept[:, None, None, None], notes["path"], 0.0),
                first=jnp.where(kept, notes["step"], 0).astype(jnp.int32),
            ),
            counted=batch["executed"][..., None],
            advantage=jnp.where(kept, batch["advantage"], 0.0),
            share=self.share(batch),
        )

    def _metrics(self, logged: Metrics, rows: Rows) -> Metrics:
        return self.means(logged, rows.share) | {"ppo/rows": (rows.share > 0).astype(jnp.float32).sum()}

    def _of_policy(self, params: Mapping[str, Params]) -> dict[str, Params]:
        """The weights that a path's density depends on: the policy's trainable ones and the noise head."""
        head = {name: params[name] for name in ("noise",) if name in params}
        return {"policy": self.policy_learner.split(params["policy"])[0]} | head

    def q_values(
        self, state: TrainState, observation: Observation, chunks: Float[Array, "B N H A"]
    ) -> Float[Array, "E B N"]:
        """V(s) for every chunk: the value does not depend on chunks."""
        if self.value is None:
            return super().q_values(state, observation, chunks)
        inputs = CriticInputs.of(self.policy.encode(state.policy, observation))
        value = self.value.of(state.params["critic"], inputs)
        return jnp.broadcast_to(value[..., None], (*value.shape, chunks.shape[1]))


def _if(
    learns: Bool[Array, ""], new: tuple[Params, Any], old: tuple[Params, Any], learner: Learner
) -> tuple[Params, Any]:
    """(weights, optimizer state): `new` if `learns`, else `old`. Frozen leaves are the same arrays in both."""
    chosen, frozen = learner.split(new[0])
    before = learner.split(old[0])[0]
    weights, opt = jax.tree.map(lambda a, b: jnp.where(learns, a, b), (chosen, new[1]), (before, old[1]))
    return learner.join(weights, frozen), opt
