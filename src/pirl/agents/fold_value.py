"""A value of observations that judges no episode whose end it has seen: V(s) ≈ E[G | s] by observed returns.

Each member of an ensemble leaves out a fold of the episodes, and an episode is valued by those that left it out. Values
are learned as shares of what their task can return, so that a histogram is as fine for short tasks as for long ones.
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
    """V(s). `rows` are columns of the batch: `episode` and, where tasks are judged apart, `task_steps`."""

    critic: Critic
    config: RECAPConfig

    @property
    def support(self) -> ob.HLGauss:
        """The histogram that shares are read from."""
        return ob.HLGauss(0.0, 1.0, self.critic.config.bins, self.critic.config.sigma_ratio)

    def possible(self, steps: Int[Array, "B"] | None) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
        """The lowest and the highest return of an episode of at most so many steps; None: of any number."""
        c = self.config
        low, high = map(jnp.float32, ob.value_range(c.reward_low, c.reward_high, c.discount, once=c.reward_once))
        if steps is not None and not c.reward_once:
            pays = (1 - c.discount**steps) / (1 - c.discount)
            low, high = jnp.minimum(c.reward_low, c.reward_low * pays), jnp.maximum(c.reward_high, c.reward_high * pays)
        return low + min(c.failure_reward, 0.0), high + max(c.failure_reward, 0.0)

    def of(self, params: Params, inputs: CriticInputs, steps: Int[Array, "B"] | None = None) -> Float[Array, "E B"]:
        """Every member's V(s), for tasks of at most so many steps."""
        low, high = self.possible(steps)
        share = ob.critic_value(self.critic.config.loss, outputs(self.critic, params, inputs), self.support)
        return low + (high - low) * share

    def unseen(self, params: Params, inputs: CriticInputs, rows: Mapping[str, Array]) -> Float[Array, "B"]:
        """V(s) by the members that do not learn from the row's episode."""
        return ensemble.unseen(self.of(params, inputs, rows.get("task_steps")), rows["episode"], self.config.folds)

    def loss(
        self, params: Params, inputs: CriticInputs, returns: Float[Array, "B"], rows: Mapping[str, Array]
    ) -> Float[Array, ""]:
        """How far each member is from the returns of its episodes; where nobody knows one (NaN) there is no loss."""
        (low, high), sizes = self.possible(rows.get("task_steps")), self.critic.config
        share = (jnp.nan_to_num(returns) - low) / (high - low)
        out = outputs(self.critic, params, inputs)
        error = ob.critic_loss(sizes.loss, out, share, support=self.support, delta=sizes.huber_delta)
        mine = jnp.isfinite(returns) & ensemble.learns(rows["episode"], len(error), self.config.folds)
        # The mean of each by itself: in a common one, a member would feel how many rows the others have.
        return jax.vmap(ob.masked_mean)(error, mine).mean()
