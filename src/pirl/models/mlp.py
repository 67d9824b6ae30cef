"""A flow policy over the state alone: Q-chunking's network (4 × 512, GELU), behind the same contract as π₀.

    predicts velocity   v = f(s, x_t, t)                           Q-chunking
    predicts chunk      v = (x_t - f(s, x_t, t)) / max(t, t_min)   JiT (arXiv 2511.13720)

The velocity ε - a holds all the noise, so a network that predicts it must carry H·A noisy numbers from end to end.
Where hidden layers are not much wider than that, samples stay noisy. The clean chunk is a function of few numbers,
those of the state; the noise passes by the network. Sampling ends at f itself: the last of F Euler steps is from
t = 1/F. The loss of f is (f - a)²/t²; t_min bounds its weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.models.config import MLPFlowConfig
from pirl.models.observation import Observation
from pirl.models.params import Leaf, Params, initialize, shapes_of, zeros

MIN_TIME = 0.1
"""t_min: sampling in at most 10 steps never goes below. JiT takes 0.05. Here that trains more slowly, as the few points
next to the data then outweigh all others (test_mlp.py's narrow network: an error of 0.17, at 0.15 one of 0.04)."""


def _dense(fan_in: int, fan_out: int) -> Leaf:
    """Q-chunking's initialisation: uniform of variance 1/mean(fan_in, fan_out)."""
    return Leaf((fan_in, fan_out), jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"))


@dataclass(frozen=True)
class MLPFlow:
    """v(s, x_t, t) by one multi-layer perceptron f over their concatenation."""

    config: MLPFlowConfig

    @property
    def horizon(self) -> int:
        """Actions per chunk."""
        return self.config.horizon

    @property
    def action_dim(self) -> int:
        """Size of an action."""
        return self.config.action_dim

    @property
    def condition_path(self) -> str:
        """The bias of the layer that reads the noisy chunk."""
        return "dense_0/bias"

    @property
    def quick(self) -> bool:
        """Is `velocity` so quick that a loop around it is felt? On a GPU, where each turn is launched by itself."""
        return jax.default_backend() == "gpu"

    def declare(self) -> dict[str, Leaf]:
        """Every parameter."""
        c = self.config
        chunk = c.horizon * c.action_dim
        widths = (c.state_dim + chunk + 1, *c.hidden, chunk)
        leaves: dict[str, Leaf] = {}
        for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
            leaves[f"dense_{i}/kernel"] = _dense(fan_in, fan_out)
            leaves[f"dense_{i}/bias"] = Leaf((fan_out,), zeros)
        return leaves

    def param_shapes(self) -> Params:
        """The tree of shapes."""
        return shapes_of(self.declare())

    def init(self, key: Array) -> Params:
        """Fresh parameters."""
        return initialize(self.declare(), key)

    def prepare(self, observation: Observation, key: Array | None = None) -> Observation:
        """A state needs no preparation."""
        return observation

    def encode(self, params: Params, observation: Observation) -> Float[Array, "B S"]:
        """There is nothing to compute: the state is the context."""
        return jnp.asarray(observation.state)

    def velocity(
        self, params: Params, context: Float[Array, "B S"], x_t: Float[Array, "B N H A"], t: Float[Array, "B N"]
    ) -> Float[Array, "B N H A"]:
        """dx/dt at N noisy chunks per state."""
        return self.field(params, context)(x_t, t)

    def for_inference(self, params: Params) -> Params:
        """There is nothing to prepare: they are small."""
        return params

    def field(self, params: Params, context: Float[Array, "B S"]) -> Callable[[Array, Array], Array]:
        """`velocity` at this context: weights cast, and the state multiplied, once."""
        dtype, depth = jnp.dtype(self.config.dtype), len(self.config.hidden) + 1
        kernels, biases = ([params[f"dense_{i}"][x].astype(dtype) for i in range(depth)] for x in ("kernel", "bias"))
        # The first matrix on [state, chunk, time], in parts: all candidates share the state's.
        of_state, of_chunk, of_time = jnp.split(kernels[0], [context.shape[-1], len(kernels[0]) - 1])
        start = (context.astype(dtype) @ of_state + biases[0])[:, None]

        def velocity(x_t: Float[Array, "B N H A"], t: Float[Array, "B N"]) -> Float[Array, "B N H A"]:
            h = start + x_t.reshape(*t.shape, -1).astype(dtype) @ of_chunk + t[..., None].astype(dtype) * of_time
            for kernel, bias in zip(kernels[1:], biases[1:], strict=True):
                h = jax.nn.gelu(h) @ kernel + bias
            out = h.reshape(x_t.shape).astype(x_t.dtype)
            if self.config.predicts == "velocity":
                return out
            return (x_t - out) / jnp.maximum(t, MIN_TIME)[..., None, None]

        return velocity
