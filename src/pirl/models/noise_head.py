"""The noise scale of Flow-Noise: a small network that only training uses, not the served policy.

It reads what the policy saw (the mean of its prefix tokens, the proprioception), the noisy chunk and the time, and
gives a standard deviation for every number of the chunk, between two bounds. It starts in the middle of them,
everywhere alike. No gradient leaves towards the policy.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.errors import ConfigError
from pirl.models.critic import CriticInputs
from pirl.models.params import Leaf, Params, initialize, lecun_normal, zeros


@dataclass(frozen=True, kw_only=True)
class NoiseHead:
    """One hidden layer."""

    horizon: int
    """Actions per chunk."""
    action_dim: int
    """Size of an action, as the policy sees it."""
    state_dim: int
    """Real dimensions of the state: the first ones."""
    feature_width: int | None
    """Size of a prefix token; None for policies without a prefix."""
    low: float
    """Smallest standard deviation."""
    high: float
    """Largest standard deviation."""
    width: int = 128
    """Size of the hidden layer."""

    def declare(self) -> dict[str, Leaf]:
        """Every parameter. All sources start equally loud, however wide."""
        chunk = self.horizon * self.action_dim
        sources = {"state": self.state_dim, "chunk": chunk, "time": 3}
        if self.feature_width is not None:
            sources["features"] = self.feature_width
        leaves = {name: Leaf((fan, self.width), lecun_normal(fan * len(sources))) for name, fan in sources.items()}
        return leaves | {
            "bias": Leaf((self.width,), zeros),
            "out/kernel": Leaf((self.width, chunk), zeros),
            "out/bias": Leaf((chunk,), zeros),
        }

    def init(self, key: Array) -> Params:
        """Fresh parameters."""
        return initialize(self.declare(), key)

    @jax.named_scope("noise_head")
    def std(
        self, params: Params, inputs: CriticInputs, x: Float[Array, "B N H A"], t: Float[Array, "B N"]
    ) -> Float[Array, "B N H A"]:
        """Standard deviations of the steps that begin at x and t: log σ is squashed between its bounds."""
        inputs, x = jax.lax.stop_gradient((inputs, x))
        hidden = inputs.state[:, : self.state_dim].astype(jnp.float32) @ params["state"] + params["bias"]
        if self.feature_width is not None:
            if inputs.features is None or inputs.mask is None:
                raise ConfigError("a noise head on the prefix was given no prefix features")
            real = inputs.mask[..., None].astype(jnp.float32)
            mean = (inputs.features.astype(jnp.float32) * real).sum(1) / jnp.maximum(real.sum(1), 1)
            mean = mean - mean.mean(-1, keepdims=True)
            mean = mean * jax.lax.rsqrt(jnp.square(mean).mean(-1, keepdims=True) + 1e-6)
            hidden = hidden + mean @ params["features"]
        waves = jnp.stack([t, jnp.sin(jnp.pi * t), jnp.cos(jnp.pi * t)], -1)
        hidden = hidden[:, None] + x.reshape(*t.shape, -1) @ params["chunk"] + waves @ params["time"]
        out = jax.nn.gelu(hidden) @ params["out"]["kernel"] + params["out"]["bias"]
        low, high = jnp.log(self.low), jnp.log(self.high)
        return jnp.exp((low + high) / 2 + (high - low) / 2 * jnp.tanh(out)).reshape(x.shape)
