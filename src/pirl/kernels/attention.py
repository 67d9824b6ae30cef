"""Fused attention without materialised logits (in the backward pass of large heads: one layer's at a time). Each model
keeps the plain form as reference.

A kernel takes a number of keys per sample, not a mask, so real keys must come first (`real_first`). This is exact:
attention does not depend on the order of keys once positions are applied to them.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from pirl.errors import ConfigError
from pirl.kernels.remat import kept
from pirl.models.config import Pi0Config

Kernel = Literal["xla", "cudnn"]


class Partial(NamedTuple):
    """Attention over a part of the keys."""

    out: Float[Array, "... h"]
    """Softmax-weighted average of the subset's values."""
    norm: Float[Array, "..."]
    """Log-sum-exp of the subset's logits, in float32."""


LARGE = 128
"""Above this head size, use our own backward pass instead of cuDNN's (see `_backward`)."""
HOPPER = (9, 0)
OLDEST = (8, 0)
"""First compute capability with bfloat16 kernels."""


def kernel(config: Pi0Config, head_dim: int, tokens: int = 0) -> Kernel | None:
    """The fused kernel for this head size and number of tokens, or None for plain attention."""
    if config.attention in ("plain", "xla"):
        return "xla" if config.attention == "xla" else None
    obstacle = _obstacle(config.dtype, head_dim, tokens, cuda_capability())
    if obstacle is None:
        return "cudnn"
    if config.attention == "cudnn":
        raise ConfigError(f"attention 'cudnn' is not possible here: {obstacle}", hint="`auto` uses it where it is")
    return None


def cuda_capability() -> tuple[int, int] | None:
    """Compute capability of the local NVIDIA GPU; None without one."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    # AMD GPUs report another format ("gfx942").
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _obstacle(dtype: str, head_dim: int, tokens: int, capability: tuple[int, int] | None) -> str | None:
    if capability is None or capability < OLDEST:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    if dtype != "bfloat16":
        return f"it computes in bfloat16, and the model's dtype is {dtype}"
    largest = 256 if capability >= HOPPER else 128
    if head_dim % 8 or head_dim > largest:
        return f"a head has {head_dim} dimensions; it takes multiples of 8 up to {largest} on this GPU"
    if tokens % 2:
        return f"its backward pass takes an even number of tokens, and there are {tokens}"
    return None


def fused(
    how: Kernel,
    q: Float[Array, "B T n h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    *,
    scale: float = 1.0,
    lengths: Int[Array, "B"] | None = None,
) -> Float[Array, "B T n h"]:
    """Grouped-query attention to each sample's first `lengths` keys, or to all of them."""
    if how == "cudnn" and q.shape[-1] <= LARGE:
        return jax.nn.dot_product_attention(q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation=how)
    return _attended(how, scale, q, k, v, lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(how: Kernel, scale: float, q: Array, k: Array, v: Array, lengths: Array | None) -> Array:
    return partial(how, q, k, v, lengths, scale=scale).out


def _forward(how: Kernel, scale: float, q: Array, k: Array, v: Array, lengths: Array | None) -> tuple[Array, Any]:
    part = partial(how, q, k, v, lengths, scale=scale)
    keep = checkpoint_name if how == "cudnn" else kept  # XLA cannot duplicate a kernel's output as it does a matmul's
    part = Partial(*(keep(x, "attention") for x in part))
    return part.out, (q, k, v, lengths, part)


def _backward(how: Kernel, scale: float, seen: Any, d_out: Array) -> tuple[Array, Array, Array, None]:
    """Backward pass as matmuls with one layer's logits in memory. For large heads cuDNN's own is slower, and it sums
    query gradients in nondeterministic order.
    """
    q, k, v, lengths, part = seen
    q, d_out, out = (grouped(x, k) for x in (q, d_out, part.out))
    logits = jnp.einsum("btkgh,bskh->bktgs", q, k, preferred_element_type=jnp.float32) * scale
    norm = part.norm.reshape(q.shape[:-1]).swapaxes(1, 2)[..., None]
    probs = jnp.exp(logits - norm)
    if lengths is not None:
        probs = jnp.where(_real(k, lengths)[:, None, None, None], probs, 0)
    d_probs = jnp.einsum("btkgh,bskh->bktgs", d_out, v, preferred_element_type=jnp.float32)
    mean = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)[..., None]
    d_logits = (probs * (d_probs - mean) * scale).astype(q.dtype)
    # Ask for the axis order a matmul produces and transpose after; otherwise XLA transposes the operands.
    d_q = jnp.einsum("bktgs,bskh->bktgh", d_logits, k).swapaxes(1, 2)
    d_k = jnp.einsum("bktgs,btkgh->bksh", d_logits, q).swapaxes(1, 2)
    d_v = jnp.einsum("bktgs,btkgh->bksh", probs.astype(v.dtype), d_out).swapaxes(1, 2)
    return d_q.reshape(part.out.shape), d_k, d_v, None


_attended.defvjp(_forward, _backward)


def partial(
    how: Kernel,
    q: Float[Array, "B T n h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    lengths: Int[Array, "B"] | None = None,
    *,
    scale: float = 1.0,
) -> Partial:
    """Attention over a subset of the keys (its first `lengths`, or all), to be `merged` with others. No gradients."""
    if how == "cudnn":
        # jax.nn's own function rounds the log-sum-exp to bfloat16: up to 3 % off after the exponential.
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        masked: dict[str, Any] = {}
        if lengths is not None:
            rows = jnp.full(len(q), q.shape[1], jnp.int32)
            masked = {"q_seqlen": rows, "kv_seqlen": lengths, "mask_type": cudnn.MaskType.PADDING}
        out, norm = cudnn.dot_product_attention(q, k, v, **masked, scale=scale, return_residual=True)
        return Partial(out, norm.swapaxes(1, 2))
    logits = jnp.einsum("btkgh,bskh->btkgs", grouped(q, k), k, preferred_element_type=jnp.float32) * scale
    if lengths is not None:
        logits = jnp.where(_real(k, lengths)[:, None, None, None], logits, -jnp.inf)
    out = jnp.einsum("btkgs,bskh->btkgh", jax.nn.softmax(logits, axis=-1).astype(v.dtype), v)
    return Partial(out.reshape(q.shape), jax.nn.logsumexp(logits, axis=-1).reshape(q.shape[:-1]))


def grouped(q: Float[Array, "... T n h"], k: Float[Array, "... S K h"]) -> Float[Array, "... T K g h"]:
    """Query heads arranged by the key/value head they share."""
    return q.reshape(*q.shape[:-2], k.shape[-2], -1, q.shape[-1])


def _real(k: Float[Array, "B S K h"], lengths: Int[Array, "B"]) -> Bool[Array, "B S"]:
    return jnp.arange(k.shape[1]) < lengths[:, None]


def merged(first: Partial, second: Partial) -> Float[Array, "... h"]:
    """Attention over the union of both parts' keys."""
    share = jax.nn.sigmoid(first.norm - second.norm)[..., None]
    out = share * first.out.astype(jnp.float32) + (1 - share) * second.out.astype(jnp.float32)
    return out.astype(first.out.dtype)


def lengths(mask: Bool[Array, "B P"]) -> Int[Array, "B"]:
    """Number of real keys per sample; at least 1, because a softmax over no keys is undefined."""
    return jnp.maximum(mask.sum(-1), 1).astype(jnp.int32)


def real_first(x: Float[Array, "B P W"], mask: Bool[Array, "B P"]) -> tuple[Array, Array]:
    """Tokens and mask, stably sorted so that real ones come first."""
    order = jnp.argsort(~mask, axis=1, stable=True)

    def taken(row: Array, order: Array) -> Array:
        # Indices are a permutation; saying so lets the backward pass do without atomic additions.
        return row.at[order].get(unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(taken)(x, order), jax.vmap(taken)(mask, order)
