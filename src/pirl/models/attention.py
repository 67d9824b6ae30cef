"""Attention by a fused kernel: no logits in memory. The plain form stays beside each model, for it is the reference.

A kernel takes a number of keys per sample, not a mask: real keys come first (`real_first`). That loses nothing, since
attention does not depend on the order of keys once positions are applied to them.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pirl.errors import ConfigError
from pirl.models.config import Pi0Config
from pirl.models.remat import kept

Kernel = Literal["xla", "cudnn"]


class Part(NamedTuple):
    """What attention over some of the keys gives."""

    out: Float[Array, "... h"]
    """The average of their values."""
    norm: Float[Array, "..."]
    """Logarithm of the sum that the average was divided by, in float32."""


HOPPER = (9, 0)
OLDEST = (8, 0)
"""First generation with bfloat16 kernels."""


def kernel(config: Pi0Config, head_dim: int, tokens: int = 0) -> Kernel | None:
    """The fused kernel to use for heads of this size and so many tokens, or None for plain attention."""
    if config.attention in ("plain", "xla"):
        return "xla" if config.attention == "xla" else None
    obstacle = _obstacle(config.dtype, head_dim, tokens, cuda_capability())
    if obstacle is None:
        return "cudnn"
    if config.attention == "cudnn":
        raise ConfigError(f"attention 'cudnn' is not possible here: {obstacle}", hint="`auto` uses it where it is")
    return None


def cuda_capability() -> tuple[int, int] | None:
    """Generation of the NVIDIA GPU that programs run on; None without one."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    # AMD's name their generation otherwise ("gfx942").
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
    """Every query attends to its sample's first `lengths` keys, or to all; query heads share key heads in groups."""
    out = jax.nn.dot_product_attention(q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation=how)
    # What cuDNN leaves is kept by its primitive (`remat.py`); under a name as well it would be kept twice.
    return out if how == "cudnn" else kept(out, "attention")


def partial(
    how: Kernel,
    q: Float[Array, "B T n h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    lengths: Int[Array, "B"] | None = None,
) -> Part:
    """Attention over some of the keys (the first `lengths`, or all), to be `merged` with others. No gradients."""
    if how == "cudnn":
        # jax.nn's own function rounds the normaliser to bfloat16, which is off by up to 3 % after the exponential.
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        masked: dict[str, Any] = {}
        if lengths is not None:
            rows = jnp.full(len(q), q.shape[1], jnp.int32)
            masked = {"q_seqlen": rows, "kv_seqlen": lengths, "mask_type": cudnn.MaskType.PADDING}
        out, norm = cudnn.dot_product_attention(q, k, v, **masked, return_residual=True)
        return Part(out, norm.swapaxes(1, 2))
    by_key = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    logits = jnp.einsum("btkgh,bskh->btkgs", by_key, k, preferred_element_type=jnp.float32)
    if lengths is not None:
        real = jnp.arange(k.shape[1]) < lengths[:, None]
        logits = jnp.where(real[:, None, None, None], logits, -jnp.inf)
    out = jnp.einsum("btkgs,bskh->btkgh", jax.nn.softmax(logits, axis=-1).astype(v.dtype), v)
    return Part(out.reshape(q.shape), jax.nn.logsumexp(logits, axis=-1).reshape(q.shape[:-1]))


def merged(first: Part, second: Part) -> Float[Array, "... h"]:
    """Attention over the keys of both parts."""
    share = jax.nn.sigmoid(first.norm - second.norm)[..., None]
    out = share * first.out.astype(jnp.float32) + (1 - share) * second.out.astype(jnp.float32)
    return out.astype(first.out.dtype)


def lengths(mask: Bool[Array, "B P"]) -> Int[Array, "B"]:
    """Number of real keys. At least one: without any key a softmax has nothing to be taken over."""
    return jnp.maximum(mask.sum(-1), 1).astype(jnp.int32)


def real_first(x: Float[Array, "B P W"], mask: Bool[Array, "B P"]) -> tuple[Array, Array]:
    """Tokens and mask with the real ones in front, otherwise in their order."""
    order = jnp.argsort(~mask, axis=1, stable=True)

    def taken(row: Array, order: Array) -> Array:
        # A permutation: its backward pass is one too, and needs no atomic additions.
        return row.at[order].get(unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(taken)(x, order), jax.vmap(taken)(mask, order)
