"""RIPT (arXiv 2505.17016) on a flow policy: several rollouts of one initial state, each compared with the others.

The loop collects the groups; `prepare` selects the useful ones and computes each rollout's advantage; `update` trains
on one minibatch. A row is one chunk that the policy planned in a rollout, with that rollout's advantage. The losses are
in `flow_objectives`, selected by `config.loss`. Most need v_old, the velocity field of the rollout policy: the first
minibatch of an iteration (`fresh`) copies it from the acting weights before the update, and the state keeps it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key

from pirl.agents import condition
from pirl.agents import flow_objectives as fo
from pirl.agents import objectives as ob
from pirl.agents.agent import Lesson, Metrics, TrainState
from pirl.agents.config import RIPTConfig
from pirl.agents.groups import Demos, OwnRollouts
from pirl.agents.learner import Learner, accumulated
from pirl.errors import ConfigError
from pirl.models import flow
from pirl.models.observation import Observation
from pirl.models.params import Params
from pirl.models.policy import Conditionable
from pirl.records import BatchSizes, BatchSpec, Spec


class Rows(NamedTuple):
    """Inputs of the loss: chunks of rollouts; all random numbers are drawn beforehand."""

    observation: Observation
    actions: Float[Array, "B H A"]
    executed: Float[Array, "B H"]
    advantage: Float[Array, "B"]
    """The advantage after `flow_objectives.row_weights`."""
    share: Float[Array, "B"]
    """Row weights: mean 1 over the batch, 0 for padding rows."""
    draws: flow.Draws


@dataclass(frozen=True, kw_only=True)
class RIPT(OwnRollouts):
    """The algorithm. Random numbers are drawn for the whole batch, so splitting it into parts changes nothing."""

    config: RIPTConfig
    policy_learner: Learner
    """Optimizer, mask and EMA of the policy's weights, and of `cfg`'s condition (without the mask)."""

    def __post_init__(self) -> None:
        if self.config.loss == "cfg" and not isinstance(self.policy, Conditionable):
            raise ConfigError(
                f"loss 'cfg' with a {type(self.policy).__name__}, which has no place for a condition",
                hint="give it a `condition_path` (pirl.models.policy.Conditionable), or take another loss",
            )

    def columns(self, sizes: BatchSizes) -> BatchSpec:
        """`acceptance`: the share of groups with unequal rewards."""
        return {"acceptance": Spec((sizes.batch,), "float32")}

    # An iteration

    def prepare(self, rewards: Float[np.ndarray, "G K"]) -> Lesson:
        """Advantages of the groups with mixed outcomes (or of all groups, by `accept`)."""
        telling = fo.accepted(rewards)
        learned = np.ones_like(telling) if self.config.accept == "all" else telling
        chosen = np.flatnonzero(learned)[: self.config.groups_per_iteration]
        return Lesson(
            groups=chosen,
            columns={"advantage": fo.group_advantages(rewards[chosen], self.config.advantage)},
            constants={"acceptance": float(telling.mean()) if len(telling) else 0.0},
        )

    def moved_far(self, metrics: Mapping[str, Any]) -> bool:
        """Whether `ript/drift`, the distance of the velocities to the rollout policy's, exceeds `drift_limit`."""
        return self.config.drift_limit is not None and float(metrics["ript/drift"]) > self.config.drift_limit

    def init(self, key: Array, policy_params: Params | None = None) -> TrainState:
        """A fresh state, with the given policy weights or freshly initialised ones."""
        policy, policy_opt = self.policy_learner.init(self.policy.init(key) if policy_params is None else policy_params)
        params, opt = {"policy": policy}, {"policy": policy_opt}
        if self.config.loss == "cfg":
            params["condition"] = {"embedding": condition.fresh(self.policy, policy)}
            opt["condition"] = self._condition_learner.init(params["condition"])[1]
        ema = {} if self.policy_learner.ema_decay is None else jax.tree.map(jnp.copy, params)
        old = {name: self.policy_learner.split(x)[0] if name == "policy" else x for name, x in params.items()}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            target=self.copied_small(old),
            ema=ema,
            opt=opt,
            frozen=self.policy_learner.frozen(policy),
        )

    def served(self, state: TrainState) -> Params | None:
        """With `cfg`, the conditional policy as plain weights, which OpenPI serves with guidance 1."""
        return self.inference_params(state) if self.config.loss == "cfg" else None

    def acting_groups(self, best_of: int | None = None) -> frozenset[str]:
        """Policy and condition if guidance mixes two branches, because the served weights hold only one."""
        return frozenset(() if self.config.guidance == 1 else ("policy", "condition"))

    def inference_params(self, state: TrainState) -> Params:
        """The acting weights as a plain policy, with `cfg`'s condition folded into its bias."""
        return self._folded({name: state.ema.get(name, params) for name, params in state.params.items()})

    # One step

    def losses(self, params: dict[str, Params], old: dict[str, Params], rows: Rows) -> Metrics:
        """Per-row metrics, among them the loss `ript/loss`. `params` and `old` are whole trees by group."""
        c, dims = self.config, self.real_action_dim
        context = self.policy.encode(params["policy"], rows.observation)
        fixed = jax.lax.stop_gradient(context)
        past = fixed if self.encoder_frozen else self.policy.encode(old["policy"], rows.observation)
        x_t, u = flow.interpolate(rows.actions, rows.draws)

        def field(weights: Params, context: Any) -> Array:
            return self.policy.velocity(weights, context, x_t, rows.draws.time).astype(jnp.float32)

        def flow_loss(v: Array) -> Float[Array, "B"]:
            return flow.chunk_loss(jnp.square(v - u), valid=rows.executed, dims=dims)

        v, v_old = field(self._folded(params), context), field(self._folded(old), past)
        imitation = flow_loss(v)
        drift = flow.chunk_loss(jnp.square(jax.lax.stop_gradient(v) - v_old), dims=dims)
        logged = {"ript/flow_loss": imitation, "ript/drift": drift}
        if c.loss == "nft":
            # Sums over steps divided by a constant, not by the executed steps: every step has the same weight in every
            # chunk, and its two terms keep their proportion.
            per_step = rows.advantage[:, None] * rows.executed
            loss = flow.chunk_loss(fo.nft_loss(v, v_old, u, per_step, c.nft_beta), dims=dims)
        elif c.loss == "fpo":
            loss, logged["ript/ratio"] = fo.fpo_loss(imitation, flow_loss(v_old), rows.advantage, c.fpo_clip)
            logged["ript/ratio_clipped"] = (jnp.abs(logged["ript/ratio"] - 1) > c.fpo_clip).astype(jnp.float32)
        elif c.loss == "cfg":
            # Label dropout in expectation, at the same draws: every sample trains both branches.
            unconditional = flow_loss(field(params["policy"], context))
            loss = (1 - c.condition_dropout) * rows.advantage * imitation + c.condition_dropout * unconditional
        else:
            loss = rows.advantage * imitation
        return logged | {"ript/loss": loss}

    def update(self, state: TrainState, batch: Any, key: Array) -> tuple[TrainState, Metrics]:
        """One minibatch of rollout rows and, with `bc_weight`, demonstrations.

        A batch has `observations`, `actions` (planned chunks), `executed` (1 for executed steps), `advantage`, `weight`
        (row weight, 0 for padding) and `fresh` (1 in the first minibatch of an iteration; a scalar or one per row).
        Optional: `acceptance`, the share of groups with unequal rewards (scalar or per row), and `demos` with
        `observations`, `actions` and `valid`.
        """
        acting = {name: state.ema.get(name, params) for name, params in state.params.items()}
        acting["policy"] = self.policy_learner.split(acting["policy"])[0]
        target = self.that_rolled_out(state.target, acting, batch)
        of_rows, of_demos = jax.random.split(key)
        rows, demos = self._rows(batch, of_rows), self.demos(batch, of_demos)
        trainable, frozen = self.policy_learner.split(state.params["policy"])
        old = target | {"policy": self.policy_learner.join(target["policy"], frozen)}

        def loss(groups: dict[str, Params], parts: tuple[Rows, Demos | None]) -> tuple[Array, Metrics]:
            params = groups | {"policy": self.policy_learner.join(groups["policy"], frozen)}
            logged = self.losses(params, old, parts[0])
            total = (parts[0].share * logged["ript/loss"]).mean()
            if parts[1] is not None:
                logged["bc/loss"] = self.demo_losses(params["policy"], self._folded(params), parts[1])
                total = total + self.config.bc_weight * logged["bc/loss"].mean()
            return total, logged

        groups = state.params | {"policy": trainable}
        _, logged, grads = accumulated(loss, groups, (rows, demos), self.config.parts)
        params, opt = dict(state.params), dict(state.opt)
        for name in params:
            learner = self.policy_learner if name == "policy" else self._condition_learner
            params[name], opt[name] = learner.step(params[name], grads[name], opt[name])
        ema = {name: self.policy_learner.average(average, params[name]) for name, average in state.ema.items()}
        new = replace(state, step=state.step + 1, params=params, target=target, ema=ema, opt=opt)
        return new, self._metrics(logged, rows) | {"ript/grad_norm": optax.tree.norm(grads)}

    def _rows(self, batch: Any, key: Array) -> Rows:
        """The losses' inputs, with all random numbers of the step."""
        c, counted = self.config, jnp.asarray(batch["weight"])
        # Padding rows may hold anything as their advantage.
        advantage = jnp.where(counted > 0, batch["advantage"], 0.0)
        observation, draws = self.drawn(batch, key)
        return Rows(
            observation=observation,
            actions=batch["actions"],
            executed=batch["executed"],
            advantage=fo.row_weights(
                c.loss,
                advantage,
                counted,
                beta=c.awr_beta,
                cap=c.weight_cap,
                acceptance=jnp.max(batch.get("acceptance", 1.0)),
                largest=fo.largest_advantage(c.group_size, c.advantage) if c.nft_scale == "largest" else 1.0,
            ),
            share=self.share(batch),
            draws=draws,
        )

    def _metrics(self, logged: Metrics, rows: Rows) -> Metrics:
        counted = (rows.share > 0).astype(jnp.float32)
        found = self.means(logged, rows.share)
        if self.config.loss in ("awr", "filter"):
            found["ript/ess"] = ob.effective_sample_size(rows.advantage, rows.share > 0)
        return found | {
            "ript/negative_share": fo.negative_share(rows.advantage, counted),
            "ript/rows": counted.sum(),
        }

    # Acting

    def act(
        self,
        state: TrainState,
        observation: Observation,
        keys: Key[Array, "B"],
        *,
        best_of: int | None = None,
        steer: flow.Steer | None = None,
        guidance: float | None = None,
    ) -> Float[Array, "B H A"]:
        """One chunk per observation by plain sampling; with `cfg`, `guidance` overrides the configured scale."""
        scale = self.config.guidance if guidance is None else guidance
        if scale != 1 and self.config.loss != "cfg":
            raise ConfigError(f"guidance {scale} with loss {self.config.loss!r}", hint="only `cfg` has two branches")
        context = self.policy.encode(state.policy, observation)
        noise = flow.noise(keys, 1, self.policy.horizon, self.policy.action_dim)
        velocity = flow.field(self.policy, self.inference_params(state), context)
        if scale != 1:
            velocity = flow.guided(velocity, flow.field(self.policy, state.policy, context), scale)
        return flow.euler(velocity if steer is None else steer(velocity), noise, self.flow_steps)[:, 0]

    # The condition of `cfg`

    @property
    def _condition_learner(self) -> Learner:
        return replace(self.policy_learner, mask=None)

    def _folded(self, params: dict[str, Params]) -> Params:
        """The policy's weights, with the condition (if any) added to its bias."""
        if "condition" not in params:
            return params["policy"]
        return condition.folded(self.policy, params["policy"], params["condition"]["embedding"])
