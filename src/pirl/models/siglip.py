"""SigLIP, the vision transformer of PaliGemma, over OpenPI's parameters (`PaliGemma/img`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.kernels import attention
from pirl.kernels.remat import kept, over_layers
from pirl.models.config import Pi0Config, SigLIPConfig
from pirl.models.params import Leaf, Params, lecun_normal, normal, ones, prefixed, xavier_uniform, zeros
from pirl.parallel.placement import by_sample

MANY = 2**23
"""Activation size (elements) from which one projection fills a GPU: about 30 images."""


def declare(config: SigLIPConfig, *, num_patches: int, out_width: int) -> dict[str, Leaf]:
    """Every parameter with OpenPI's name, shape and initialisation."""
    width, heads, head_dim, mlp = config.width, config.num_heads, config.width // config.num_heads, config.mlp_dim
    block: dict[str, Leaf] = {}
    for norm in ("LayerNorm_0", "LayerNorm_1"):
        block |= {f"{norm}/scale": Leaf((width,), ones), f"{norm}/bias": Leaf((width,), zeros)}
    for name in ("query", "key", "value"):
        path = f"MultiHeadDotProductAttention_0/{name}"
        block[f"{path}/kernel"] = Leaf((width, heads, head_dim), xavier_uniform(width, width))
        block[f"{path}/bias"] = Leaf((heads, head_dim), zeros)
    out = "MultiHeadDotProductAttention_0/out"
    block[f"{out}/kernel"] = Leaf((heads, head_dim, width), xavier_uniform(width, width))
    block[f"{out}/bias"] = Leaf((width,), zeros)
    for name, fan_in, fan_out in (("Dense_0", width, mlp), ("Dense_1", mlp, width)):
        block[f"MlpBlock_0/{name}/kernel"] = Leaf((fan_in, fan_out), xavier_uniform(fan_in, fan_out))
        block[f"MlpBlock_0/{name}/bias"] = Leaf((fan_out,), normal(1e-6))
    patch = config.patch_size
    return {
        "embedding/kernel": Leaf((patch, patch, 3, width), lecun_normal(patch * patch * 3)),
        "embedding/bias": Leaf((width,), zeros),
        "pos_embedding": Leaf((1, num_patches, width), normal(width**-0.5)),
        **prefixed("Transformer/encoderblock", block, stack=config.depth),
        "Transformer/encoder_norm/scale": Leaf((width,), ones),
        "Transformer/encoder_norm/bias": Leaf((width,), zeros),
        # Zero as in OpenPI: a freshly initialised model ignores its images.
        "head/kernel": Leaf((width, out_width), zeros),
        "head/bias": Leaf((out_width,), zeros),
    }


@jax.named_scope("siglip")
def encode_images(params: Params, config: Pi0Config, images: Float[Array, "B h w 3"]) -> Float[Array, "B P W"]:
    """Encode images in [-1, 1] to one token per patch, in row-major order."""
    dtype = jnp.dtype(config.dtype)
    x = _patches(images, config.vision.patch_size)
    kernel = params["embedding"]["kernel"].astype(jnp.float32)
    x = x @ kernel.reshape(-1, kernel.shape[-1]) + params["embedding"]["bias"]
    x = (x + params["pos_embedding"]).astype(dtype)

    how = attention.kernel(config, config.vision.width // config.vision.num_heads, tokens=x.shape[1])

    def block(x: Array, w: Params, _: Any) -> tuple[Array, None]:
        x = by_sample(x)
        x = x + _attention(w["MultiHeadDotProductAttention_0"], _layer_norm(w["LayerNorm_0"], x), how)
        x = kept(x, "vision_attended")
        h = kept(_dense(w["MlpBlock_0"]["Dense_0"], _layer_norm(w["LayerNorm_1"], x)), "vision_up")
        return x + _dense(w["MlpBlock_0"]["Dense_1"], jax.nn.gelu(h, approximate=True)), None

    numbers = jnp.arange(config.vision.depth)
    x, _ = over_layers(block, x, params["Transformer"]["encoderblock"], numbers, config.remat, dtype)
    return by_sample(_dense(params["head"], _layer_norm(params["Transformer"]["encoder_norm"], by_sample(x))))


def _patches(images: Float[Array, "B h w 3"], patch: int) -> Float[Array, "B P K"]:
    """Flattened non-overlapping patches, as a strided convolution without padding reads them."""
    batch, height, width, channels = images.shape
    rows, columns = height // patch, width // patch
    x = images[:, : rows * patch, : columns * patch].astype(jnp.float32)
    x = x.reshape(batch, rows, patch, columns, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * columns, patch * patch * channels)


def _layer_norm(params: Params, x: Float[Array, "B P W"]) -> Float[Array, "B P W"]:
    return _normed(x, params["scale"], params["bias"])


@jax.custom_vjp
def _normed(x: Float[Array, "B P W"], scale: Float[Array, "W"], bias: Float[Array, "W"]) -> Float[Array, "B P W"]:
    # Two-pass variance: XLA fuses it into one kernel on a GPU.
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * scale
    return (centred * factor + bias).astype(x.dtype)


def _at_once(x: Float[Array, "B P W"], scale: Float[Array, "W"], bias: Float[Array, "W"]) -> Float[Array, "B P W"]:
    """`_normed` with variance E[x²] - E[x]², as in flax. Used for the gradient, where it takes fewer kernels."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean))
    return ((wide - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale) + bias).astype(x.dtype)


_normed.defvjp(
    lambda *inputs: (_normed(*inputs), inputs), lambda inputs, gradient: jax.vjp(_at_once, *inputs)[1](gradient)
)


def _dense(params: Params, x: Float[Array, "B P I"]) -> Float[Array, "B P O"]:
    return _biased(x @ params["kernel"].astype(x.dtype), params["bias"].astype(x.dtype))


@jax.custom_vjp
def _biased(x: Float[Array, "B P W"], bias: Float[Array, "W"]) -> Float[Array, "B P W"]:
    return x + bias


def _summed(_: None, gradient: Float[Array, "B P W"]) -> tuple[Float[Array, "B P W"], Float[Array, "W"]]:
    # The barrier makes the sum read the gradient from memory; fused with its producer, XLA would compute it twice.
    return gradient, jax.lax.optimization_barrier(gradient).sum((0, 1))


_biased.defvjp(lambda x, bias: (x + bias, None), _summed)


@jax.custom_vjp
def _thrice(x: Float[Array, "B P W"]) -> tuple[Array, Array, Array]:
    """x three times, behind a barrier that hides it from XLA, which would merge the three projections of x into one
    product and then copy its parts apart.
    """
    return jax.lax.optimization_barrier((x, x, x))


_thrice.defvjp(lambda x: (_thrice(x), None), lambda _, gradients: (sum(gradients),))


def _attention(params: Params, x: Float[Array, "B P W"], how: attention.Kernel | None) -> Float[Array, "B P W"]:
    seen = _thrice(x) if x.size > MANY else (x, x, x)

    def project(name: str, x: Array) -> Array:
        w = params[name]
        heads = w["bias"].shape
        flat = {"kernel": w["kernel"].reshape(x.shape[-1], -1), "bias": w["bias"].reshape(-1)}
        return _dense(flat, x).reshape(*x.shape[:-1], *heads)

    names = ("query", "key", "value")
    q, k, v = (kept(project(name, x), "vision_qkv") for name, x in zip(names, seen, strict=True))
    if how is None:
        # Unlike Gemma's, this softmax runs in the activations' dtype.
        logits = jnp.einsum("bqnh,bknh->bnqk", q / jnp.sqrt(q.shape[-1]).astype(q.dtype), k)
        out = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(logits, axis=-1), v)
    else:
        out = attention.fused(how, q, k, v, scale=q.shape[-1] ** -0.5)
    out = jnp.einsum("bqnh,nhd->bqd", out, params["out"]["kernel"].astype(x.dtype))
    return out + params["out"]["bias"].astype(x.dtype)
