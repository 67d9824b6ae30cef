"""A cross-fitted state value, V(s) ≈ E[G | s] from observed returns: no episode is valued by a critic trained on it.

Each ensemble member leaves out one fold of the episodes, and an episode is valued by the members that left it out.
Values are learned as fractions of their task's return range, so histograms resolve short and long tasks equally well.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pirl.agents import ensemble
from pirl.agents import objectives as ob
from pirl.agents.advantage_config import RECAPConfig
from pirl.agents.state_value import outputs
from pirl.models.critic import Critic, CriticInputs
from pirl.models.params import Params


@dataclass(frozen=True, kw_only=True)
class FoldValue:
    """V(s). `rows` are columns of the batch: `episode` and, with `per_task`, `task_steps`."""

    critic: Critic
    config: RECAPConfig

    @property
    def support(self) -> ob.HLGauss:
        """The histogram's support: fractions of the return range."""
        return ob.HLGauss(0.0, 1.0, self.critic.config.bins, self.critic.config.sigma_ratio)

    def possible(self, steps: Int[Array, "B"] | None) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
        """(lowest, highest) return of an episode of at most `steps` steps; None: of any length."""
        c = self.config
        low, high = map(jnp.float32, ob.value_range(c.reward_low, c.reward_high, c.discount, once=c.reward_once))
        if steps is not None and not c.reward_once:
            pays = (1 - c.discount**steps) / (1 - c.discount)
            low, high = jnp.minimum(c.reward_low, c.reward_low * pays), jnp.maximum(c.reward_high, c.reward_high * pays)
        return low + min(c.failure_reward, 0.0), high + max(c.failure_reward, 0.0)

    def of(self, params: Params, inputs: CriticInputs, steps: Int[Array, "B"] | None = None) -> Float[Array, "E B"]:
        """V(s) by each member, for tasks of at most `steps` steps."""
        low, high = self.possible(steps)
        share = ob.critic_value(self.critic.config.loss, outputs(self.critic, params, inputs), self.support)
        return low + (high - low) * share

    def unseen(self, params: Params, inputs: CriticInputs, rows: Mapping[str, Array]) -> Float[Array, "B"]:
        """V(s) by the members that are not trained on the row's episode."""
        return ensemble.unseen(self.of(params, inputs, rows.get("task_steps")), rows["episode"], self.config.folds)

    def loss(
        self, params: Params, inputs: CriticInputs, returns: Float[Array, "B"], rows: Mapping[str, Array]
    ) -> Float[Array, ""]:
        """The members' loss on the returns of the episodes they are trained on; unknown returns (NaN) are masked."""
        (low, high), sizes = self.possible(rows.get("task_steps")), self.critic.config
        share = (jnp.nan_to_num(returns) - low) / (high - low)
        out = outputs(self.critic, params, inputs)
        error = ob.critic_loss(sizes.loss, out, share, support=self.support, delta=sizes.huber_delta)
        mine = jnp.isfinite(returns) & ensemble.learns(rows["episode"], len(error), self.config.folds)
        # Mean per member: in a joint mean, a member's gradient would depend on the other members' row counts.
        return jax.vmap(ob.masked_mean)(error, mine).mean()
