"""The noise scale of Flow-Noise: a small network for training only; the served policy does without it.

It reads the observation (the mean prefix token, the proprioception), the noisy chunk and the time, and outputs a
standard deviation between two bounds for every number of the chunk. It starts at their geometric mean everywhere. No
gradient flows into the policy.
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
    """An MLP with one hidden layer."""

    horizon: int
    """Actions per chunk."""
    action_dim: int
    """Size of an action at the policy's input (padded)."""
    state_dim: int
    """Number of real (leading) dimensions of the state."""
    feature_width: int | None
    """Size of a prefix token; None for policies without a prefix."""
    low: float
    """Smallest standard deviation."""
    high: float
    """Largest standard deviation."""
    width: int = 128
    """Size of the hidden layer."""

    def declare(self) -> dict[str, Leaf]:
        """Every parameter. All sources start with equal variance, whatever their width."""
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
        """Standard deviations σ of the Euler steps from x at t; tanh squashes log σ between its bounds."""
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
