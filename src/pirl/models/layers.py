"""Building blocks of transformers: norms, rotary positions, projections with adapters, gated feed-forward."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pirl.kernels import gated
from pirl.kernels.remat import kept
from pirl.models.config import LoRAConfig
from pirl.models.params import Params
from pirl.parallel.placement import by_sample


def rms_norm(
    params: Params, x: Float[Array, "... T W"], cond: Float[Array, "... W"] | None
) -> tuple[Float[Array, "... T W"], Float[Array, "... W"] | None]:
    """RMS norm with float32 statistics. With a condition: adaptive scale and shift, and a gate for the residual.

    The condition has one vector per sequence, or one per token.
    """
    if cond is None:
        # Frozen scales are stored in bfloat16; compute 1 + scale in float32.
        return (_normed(x) * (1 + params["scale"].astype(jnp.float32))).astype(x.dtype), None
    dense = params["Dense_0"]
    return modulated(x, cond.astype(x.dtype) @ dense["kernel"].astype(x.dtype) + dense["bias"].astype(x.dtype))


def modulated(
    x: Float[Array, "... T W"], modulation: Float[Array, "... W3"]
) -> tuple[Float[Array, "... T W"], Float[Array, "... W"]]:
    """The adaptive norm for a given modulation, the concatenated scale, shift and gate. Returns (normed, gate)."""
    each = modulation if modulation.ndim == x.ndim else modulation[..., None, :]
    scale, shift, gate = jnp.split(each, 3, axis=-1)
    return (_normed(x) * (1 + scale.astype(jnp.float32)) + shift).astype(x.dtype), gate


def _normed(x: Float[Array, "... T W"]) -> Float[Array, "... T W"]:
    wide = x.astype(jnp.float32)
    return wide * jnp.reciprocal(jnp.sqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6))


def residual(x: Array, branch: Array, gate: Array | None) -> Array:
    return x + branch if gate is None else x + branch * gate


class Rotation(NamedTuple):
    """Rotary embedding of a sequence's positions, shared by all layers."""

    sin: Float[Array, "... T 1 half"]
    cos: Float[Array, "... T 1 half"]


def rotation(positions: Int[Array, "... T"], head_dim: int, limit: int) -> Rotation:
    """Sine and cosine of every position's rotary angles, looked up in a NumPy table of `limit` positions.

    Wavelengths reach 10,000; angles are rounded to float32 as in OpenPI. In jax, XLA would turn the division into a
    multiplication by the reciprocal, which at position 500 changes the fifth digit of a key.
    """
    half = head_dim // 2
    wavelengths = (10_000 ** (np.arange(half) / half)).astype(np.float32)
    angles = np.arange(limit, dtype=np.float32)[:, None] / wavelengths
    sin, cos = (jnp.asarray(f(angles.astype(np.float64)), jnp.float32) for f in (np.sin, np.cos))
    return Rotation(sin[positions][..., None, :], cos[positions][..., None, :])


def rope(x: Float[Array, "... T n h"], rotation: Rotation) -> Float[Array, "... T n h"]:
    """Apply rotary positions: rotate the two halves of a head (not neighbouring pairs), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = rotation
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def einsum(equation: str, x: Array, params: Params, lora: LoRAConfig | None) -> Array:
    """A projection plus its low-rank adapter: `lora_a` replaces w's last axis by the rank, `lora_b` the one before."""
    out = jnp.einsum(equation, x, params["w"].astype(x.dtype))
    if lora is None:
        return out
    left, out_axes = equation.split("->")
    x_axes, w_axes = left.split(",")
    rows, columns = w_axes[-2], w_axes[-1]
    low_axes = out_axes.replace(columns, "r")
    low = jnp.einsum(f"{x_axes},{w_axes.replace(columns, 'r')}->{low_axes}", x, params["lora_a"].astype(x.dtype))
    up = jnp.einsum(f"{low_axes},{w_axes.replace(rows, 'r')}->{out_axes}", low, params["lora_b"].astype(x.dtype))
    return out + up * lora.scaling


def feed_forward(params: Params, x: Float[Array, "... T W"], whole: bool) -> Float[Array, "... T W"]:
    """GELU-gated feed-forward. Its adapters are added unscaled, as in OpenPI."""

    def dot(x: Array, name: str, index: int | None = None) -> Array:
        def weight(key: str) -> Array:
            w = params[key] if index is None else params[key][index]
            return w.astype(x.dtype)

        out = by_sample(x @ weight(name))
        return out + (x @ weight(f"{name}_lora_a")) @ weight(f"{name}_lora_b") if f"{name}_lora_a" in params else out

    weights = [w.astype(x.dtype) for w in params["gating_einsum"]]
    if whole and "gating_einsum_lora_a" not in params and gated.fits(x, *weights):
        return dot(gated.product(x, *weights), "linear")
    gate = kept(dot(x, "gating_einsum", 0), "gate")
    up = kept(dot(x, "gating_einsum", 1), "up")
    return dot(gated.activated(gate, up), "linear")
