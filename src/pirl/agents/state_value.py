"""A state value from a chunk critic: V(s) is its value of an all-zero chunk."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.agents import objectives as ob
from pirl.agents import ppo_objectives as po
from pirl.agents.agent import Metrics
from pirl.models.critic import Critic, CriticInputs
from pirl.models.params import Params


@dataclass(frozen=True, kw_only=True)
class StateValue:
    """V(s), trained on targets as in PPO."""

    critic: Critic
    low: float
    """Smallest possible return."""
    high: float
    """Largest possible return."""
    clip: float | None
    """Clip range of a regressed value around the rollout's; None does not clip."""

    @property
    def bounded(self) -> bool:
        """Whether values are limited to [low, high], as with a histogram."""
        return self.critic.config.loss == "hl_gauss"

    @property
    def support(self) -> ob.HLGauss | None:
        """The histogram's support; None for critics that regress."""
        sizes = self.critic.config
        return ob.HLGauss(self.low, self.high, sizes.bins, sizes.sigma_ratio) if self.bounded else None

    def of(self, params: Params, inputs: CriticInputs) -> Float[Array, "E B"]:
        """V(s) by each ensemble member."""
        return ob.critic_value(self.critic.config.loss, outputs(self.critic, params, inputs), self.support)

    def gradient(
        self,
        params: Params,
        inputs: CriticInputs,
        target: Float[Array, "B"],
        before: Float[Array, "B"],
        share: Float[Array, "B"],
    ) -> tuple[Params, Metrics]:
        """(gradient of the value loss, metrics). `before`: the values at rollout time; `share`: row weights, mean 1."""
        sizes = self.critic.config
        target, before = (jnp.where(share > 0, x, 0.0) for x in (target, before))

        def loss(params: Params) -> tuple[Array, Array]:
            out = outputs(self.critic, params, inputs)
            error = po.value_loss(
                sizes.loss, out, target, before, clip=self.clip, support=self.support, delta=sizes.huber_delta
            )
            return (share * error).mean(), ob.critic_value(sizes.loss, out, self.support).mean(0)

        (value, guessed), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return grads, {
            "value/loss": value,
            "value/mean": (share * guessed).mean(),
            "value/error": (share * jnp.abs(guessed - target)).mean(),
            "value/explained_variance": po.explained_variance(guessed, target, share),
        }


def outputs(critic: Critic, params: Params, inputs: CriticInputs) -> Float[Array, "E B *bins"]:
    """The critic's raw outputs for an all-zero chunk."""
    nothing = jnp.zeros((len(inputs.state), 1, critic.critic_horizon, critic.real_action_dim))
    return critic.score(params, critic.embed(params, inputs), nothing)[:, :, 0]
