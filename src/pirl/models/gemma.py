"""Gemma with two experts, over OpenPI's parameters (`PaliGemma/llm`).

One shared attention, separate weights: expert 0 (the VLM; names without suffix) reads images and prompt, expert 1
(names ending in `_1`) reads state and noisy actions. The prefix never attends to the suffix, so `encode_prefix`
computes its keys and values once, and `run_suffix` reuses them for any number of suffixes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pirl.kernels import attention, gated
from pirl.kernels.remat import At, kept, layer_at, over_layers
from pirl.models.config import GemmaConfig, LoRAConfig, Pi0Config
from pirl.models.layers import Rotation, einsum, feed_forward, residual, rms_norm, rope, rotation
from pirl.models.params import Initializer, Leaf, Params, lecun_normal, normal, prefixed, zeros
from pirl.parallel.placement import by_sample

MASKED = -2.3819763e38
"""Logit of a masked pair. Finite, so that a fully masked row becomes uniform instead of NaN."""
LORA_STD = 0.01


def declare_block(config: GemmaConfig, suffix: str, *, adaptive: bool) -> dict[str, Leaf]:
    """Parameters of one block of one expert, with OpenPI's names, shapes and initialisation."""
    width, heads, kv_heads, head_dim = config.width, config.num_heads, config.num_kv_heads, config.head_dim
    block: dict[str, Leaf] = {}

    def project(path: str, shape: tuple[int, ...], init: Initializer, lora: LoRAConfig | None, joint: str) -> None:
        block[f"{path}{joint}w" if joint == "/" else path] = Leaf(shape, init)
        if lora:
            *front, rows, columns = shape
            block[f"{path}{joint}lora_a"] = Leaf((*front, rows, lora.rank), normal(LORA_STD))
            block[f"{path}{joint}lora_b"] = Leaf((*front, lora.rank, columns), normal(LORA_STD))

    # OpenPI nests attention weights and adapters under one name (`q_einsum/lora_a`) and flattens the feed-forward's
    # (`gating_einsum_lora_a`).
    attn, ffn, mlp_dim = config.attn_lora, config.ffn_lora, config.mlp_dim
    project(f"attn/q_einsum{suffix}", (heads, width, head_dim), lecun_normal(width), attn, "/")
    project(f"attn/kv_einsum{suffix}", (2, kv_heads, width, head_dim), lecun_normal(width), attn, "/")
    project(f"attn/attn_vec_einsum{suffix}", (heads, head_dim, width), lecun_normal(heads * head_dim), attn, "/")
    project(f"mlp{suffix}/gating_einsum", (2, width, mlp_dim), lecun_normal(width), ffn, "_")
    project(f"mlp{suffix}/linear", (mlp_dim, width), lecun_normal(mlp_dim), ffn, "_")
    for norm in ("pre_attention_norm", "pre_ffw_norm"):
        block |= _declare_norm(f"{norm}{suffix}", width, adaptive=adaptive)
    return block


def _declare_norm(name: str, width: int, *, adaptive: bool) -> dict[str, Leaf]:
    if not adaptive:
        return {f"{name}/scale": Leaf((width,), zeros)}
    # Zero gates: at initialisation every block of an adaptive expert is the identity.
    return {
        f"{name}/Dense_0/kernel": Leaf((width, 3 * width), zeros),
        f"{name}/Dense_0/bias": Leaf((3 * width,), zeros),
    }


def declare(config: Pi0Config) -> dict[str, Leaf]:
    """Every parameter of both experts."""
    leaves = {"embedder/input_embedding": Leaf((config.vocab_size, config.vlm.width), normal(0.01))}
    for expert, suffix, adaptive in ((config.vlm, "", False), (config.expert, "_1", config.pi05)):
        leaves |= prefixed("layers", declare_block(expert, suffix, adaptive=adaptive), stack=expert.depth)
        leaves |= _declare_norm(f"final_norm{suffix}", expert.width, adaptive=adaptive)
    return leaves


def embed_tokens(params: Params, tokens: Int[Array, "B L"], dtype: jnp.dtype) -> Float[Array, "B L W"]:
    """Embedded prompt tokens, scaled by sqrt(width) in the table's dtype, as in Gemma."""
    table = params["embedder"]["input_embedding"]
    x = table[tokens]
    return (x * jnp.sqrt(table.shape[-1]).astype(x.dtype)).astype(dtype)


class Prefix(NamedTuple):
    """Outputs of the VLM: per layer keys (after RoPE) and values, and features for a critic."""

    keys: Float[Array, "layers B P K h"]
    values: Float[Array, "layers B P K h"]
    features: Float[Array, "B P W"]


@jax.named_scope("vlm")
def encode_prefix(
    params: Params,
    config: Pi0Config,
    x: Float[Array, "B P W"],
    mask: Bool[Array, "B P"],
    positions: Int[Array, "B P"],
) -> Prefix:
    """Run the VLM over the prefix; every real token attends to every real token.

    Fused kernels need real tokens first (`attention.real_first`). The last layer computes only keys and values, unless
    the features are its output: this skips its attention and feed-forward, 1/18 of π₀'s VLM.
    """
    c = config.vlm
    last = c.depth - 1
    feature_layer = config.feature_layer % c.depth if config.feature_layer <= last else c.depth
    turn = rotation(positions, c.head_dim, limit=x.shape[1])
    attend, whole = _prefix_attention(config, mask), gated.possible(config)
    layers: Any = params["layers"]
    if not isinstance(layers, list):  # a list comes from `Pi0.for_inference`, already split by expert
        layers = expert_layers(layers, 0)
    skip = feature_layer <= last and c.depth > 1

    def begin(w: Params, x: Array) -> tuple[Array, Array, Array]:
        h, _ = rms_norm(w["pre_attention_norm"], by_sample(x), None)
        return h, *_keys_values(w["attn"], c, h, turn)

    def block(carry: tuple[Array, Array | None], w: Params, index: Any) -> tuple[tuple, tuple[Array, Array]]:
        x, features = carry
        if features is not None:
            features = jnp.where(index == feature_layer, jax.lax.stop_gradient(x), features)
        h, k, v = begin(w, x)
        attended = attend(_queries(w["attn"], c, h, turn), k, v)
        x = _after_attention(w, c, by_sample(x), attended, gate=None, cond=None, whole=whole)
        return (x, features), (k, v)

    carry = (x, jnp.zeros_like(x) if feature_layer < last else None)
    numbers = jnp.arange(c.depth - int(skip))
    (x, features), (keys, values) = over_layers(block, carry, layers, numbers, config.remat, x.dtype, view=_apart)
    if skip:
        _, k, v = begin(layer_at(layers, last), x)
        keys, values = jnp.concatenate([keys, k[None]]), jnp.concatenate([values, v[None]])
    if feature_layer == c.depth:
        x, _ = rms_norm(params["final_norm"], x, None)
    return Prefix(keys, values, jax.lax.stop_gradient(x) if features is None else features)


def _prefix_attention(config: Pi0Config, mask: Bool[Array, "B P"]) -> Callable[[Array, Array, Array], Array]:
    """Self-attention of the prefix: fused if configuration and device allow, else plain."""
    how = attention.kernel(config, config.vlm.head_dim, tokens=mask.shape[1])
    if how is not None:
        real = attention.lengths(mask)
        return lambda q, k, v: attention.fused(how, q, k, v, lengths=real)

    def plain(q: Array, k: Array, v: Array) -> Array:
        logits = jnp.einsum("btkgh,bskh->bkgts", attention.grouped(q, k), k, preferred_element_type=jnp.float32)
        probs = jax.nn.softmax(jnp.where(mask[:, None, None, None, :], logits, MASKED), axis=-1).astype(v.dtype)
        return kept(jnp.einsum("bkgts,bskh->btkgh", probs, v).reshape(q.shape), "attention")

    return plain


class Suffix(NamedTuple):
    """The expert's output and, per layer, the keys and values of its own tokens."""

    out: Float[Array, "B N S W"]
    keys: Float[Array, "layers B N S K h"]
    values: Float[Array, "layers B N S K h"]


@jax.named_scope("expert")
def run_suffix(
    params: Params,
    config: Pi0Config,
    x: Float[Array, "B N S W"],
    keys: Float[Array, "layers B P K h"],
    values: Float[Array, "layers B P K h"],
    prefix_mask: Bool[Array, "B P"],
    suffix_mask: Bool[Array, "S S"],
    cond: Float[Array, "B N *S W"] | None,
) -> Suffix:
    """Run the expert over N suffixes per observation, all attending to the same prefix."""
    c = config.expert
    turn = suffix_rotation(config, prefix_mask, x.shape[2])
    attend, whole = _suffix_attention(config, prefix_mask, suffix_mask), gated.possible(config)

    def block(x: Array, weights: Params, prefix: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x = by_sample(x)
        h, gate = rms_norm(weights["pre_attention_norm"], x, cond)
        q, (k, v) = _queries(weights["attn"], c, h, turn), _keys_values(weights["attn"], c, h, turn)
        attended = attend(q, k, v, *prefix)
        return _after_attention(weights, c, x, attended, gate=gate, cond=cond, whole=whole), (k, v)

    layers, prefix = expert_layers(params["layers"], 1), (keys, values)
    x, (own_keys, own_values) = over_layers(block, x, layers, prefix, config.remat, x.dtype, view=_apart)
    out, _ = rms_norm(params["final_norm_1"], x, cond)
    return Suffix(out, own_keys, own_values)


def joint_attention(
    q: Float[Array, "B N T n h"],
    k: Float[Array, "B N S K h"],
    v: Float[Array, "B N S K h"],
    shared_k: Float[Array, "B P K h"],
    shared_v: Float[Array, "B P K h"],
    shared_mask: Bool[Array, "B P"],
    own_mask: Bool[Array, "T S"],
    tile: int = 1,
) -> Float[Array, "B N T n h"]:
    """N sequences attend to shared keys, which are not replicated, and each to its own.

    The softmax spans both: logits are concatenated before it and split after it, with the keys on the last axis (left
    to XLA they may end up on a strided one, where softmax is slow). A single sequence (N = 1) concatenates own and
    shared keys instead, padded to a multiple of `tile`, which launches the fewest kernels.
    """
    by_key = jnp.moveaxis(attention.grouped(q, k), 3, 1)  # B K N T g h
    (batch, heads, num, *_, dim), count = by_key.shape, shared_k.shape[1]
    rows, own_mask = by_key.reshape(batch, heads, -1, dim), jnp.repeat(own_mask, by_key.shape[4], axis=0)
    if num == 1:
        out = _single_attention(rows, k[:, 0], v[:, 0], shared_k, shared_v, shared_mask, own_mask, tile)
        return jnp.moveaxis(out.reshape(by_key.shape), 1, 3).reshape(q.shape)
    apart = by_key.reshape(batch, heads, num, -1, dim)
    to_shared = jnp.einsum("bkqh,bskh->bkqs", rows, shared_k, preferred_element_type=jnp.float32)
    to_own = jnp.einsum("bknqh,bnskh->bknqs", apart, k, preferred_element_type=jnp.float32)
    to_own = jnp.where(own_mask, to_own, MASKED)
    to_shared = jnp.where(shared_mask[:, None, None], to_shared, MASKED)
    logits = jnp.concatenate([to_shared, to_own.reshape(*rows.shape[:3], -1)], axis=-1)
    probs = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqs,bskh->bkqh", probs[..., :count], shared_v)
    own = jnp.einsum("bknqs,bnskh->bknqh", probs[..., count:].reshape(to_own.shape), v)
    return jnp.moveaxis((out + own.reshape(out.shape)).reshape(by_key.shape), 1, 3).reshape(q.shape)


def _single_attention(
    rows: Float[Array, "B K q h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    shared_k: Float[Array, "B P K h"],
    shared_v: Float[Array, "B P K h"],
    shared_mask: Bool[Array, "B P"],
    own_mask: Bool[Array, "q S"],
    tile: int,
) -> Float[Array, "B K q h"]:
    """`joint_attention` for N = 1, with queries grouped by key head."""
    batch, length, heads, dim = k.shape
    gap = -(length + shared_k.shape[1]) % tile

    def joined(own: Array, shared: Array) -> Array:
        return jnp.concatenate([own, jnp.zeros((batch, gap, heads, dim), own.dtype), shared], axis=1)

    own_mask = jnp.pad(own_mask, ((0, 0), (0, gap)))
    seen = jnp.concatenate(
        [
            jnp.broadcast_to(own_mask, (batch, *own_mask.shape)),
            jnp.broadcast_to(shared_mask[:, None], (batch, len(own_mask), shared_k.shape[1])),
        ],
        axis=-1,
    )
    logits = jnp.einsum("bkqh,bskh->bkqs", rows, joined(k, shared_k), preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(jnp.where(seen[:, None], logits, MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("bkqs,bskh->bkqh", probs, joined(v, shared_v))


def _suffix_attention(
    config: Pi0Config, prefix_mask: Bool[Array, "B P"], suffix_mask: Bool[Array, "S S"]
) -> Callable[[Array, Array, Array, Array, Array], Array]:
    """Attention of N suffixes to the prefix and to themselves: (q, own k and v, the prefix's k and v) -> out."""

    def plain(q: Array, k: Array, v: Array, prefix_k: Array, prefix_v: Array) -> Array:
        allowed = suffix_mask[: q.shape[2], : k.shape[2]]
        return kept(joint_attention(q, k, v, prefix_k, prefix_v, prefix_mask, allowed), "attention")

    # π₀'s state token comes first and does not attend to actions, so the fused kernel runs without it.
    alone, heads = 0 if config.pi05 else 1, config.expert.num_heads // config.expert.num_kv_heads
    how = attention.kernel(config, config.expert.head_dim, tokens=(len(suffix_mask) - alone) * heads)
    if how is None or len(suffix_mask) == alone:
        return plain
    real = prefix_mask.sum(-1) + len(suffix_mask)

    def fused(q: Array, k: Array, v: Array, prefix_k: Array, prefix_v: Array) -> Array:
        batch, num, _, kv_heads, head_dim = k.shape

        def joined(own: Array, shared: Array) -> Array:
            # The prefix goes last, because padding has to. Kernels need an even number of keys.
            shared = jnp.broadcast_to(shared[:, None], (batch, num, *shared.shape[1:]))
            keys = jnp.concatenate([own, shared], axis=2).reshape(batch * num, -1, kv_heads, head_dim)
            return jnp.pad(keys, ((0, 0), (0, keys.shape[1] % 2), (0, 0), (0, 0)))

        # Query heads that share a key head become queries of one head, which fills the kernel's tile.
        actions = attention.grouped(q[:, :, alone:], k).swapaxes(3, 4)
        queries = actions.reshape(batch * num, -1, kv_heads, head_dim)
        lengths = jnp.repeat(real, num).astype(jnp.int32)
        out = attention.fused(how, queries, joined(k, prefix_k), joined(v, prefix_v), lengths=lengths)
        out = out.reshape(actions.shape).swapaxes(3, 4).reshape(q[:, :, alone:].shape)
        if not alone:
            return out
        state = plain(q[:, :, :alone], k[:, :, :alone], v[:, :, :alone], prefix_k, prefix_v)
        return jnp.concatenate([state, out], axis=2)

    return fused


def suffix_rotation(config: Pi0Config, prefix_mask: Bool[Array, "B P"], length: int, start: int = 0) -> Rotation:
    """Rotary embedding of suffix tokens, whose positions continue after the prefix's real ones; same for all N."""
    positions = prefix_mask.sum(-1)[:, None] + jnp.arange(start, start + length)
    return rotation(positions[:, None, :], config.expert.head_dim, limit=prefix_mask.shape[1] + start + length)


def expert_layers(layers: Params, expert: int) -> Params:
    """One expert's stacked weights, with the `_1` suffix removed from their names."""
    suffix = "" if expert == 0 else "_1"
    return {
        "attn": {name: layers["attn"][f"{name}{suffix}"] for name in ("q_einsum", "kv_einsum", "attn_vec_einsum")},
        **{name: layers[f"{name}{suffix}"] for name in ("mlp", "pre_attention_norm", "pre_ffw_norm")},
    }


def _apart(layers: Params, at: At) -> Params:
    """One layer's weights, with gate and up as separate arrays."""
    both = layers["mlp"]["gating_einsum"]
    found = jax.tree.map(at, layers)
    return found | {"mlp": found["mlp"] | {"gating_einsum": [at(both, 0), at(both, 1)]}}


def _queries(w: Params, config: GemmaConfig, h: Float[Array, "... T W"], turn: Rotation) -> Array:
    q = einsum("...td,ndh->...tnh", h, w["q_einsum"], config.attn_lora)
    return kept(rope(q, turn) * config.head_dim**-0.5, "qkv")


def _keys_values(w: Params, config: GemmaConfig, h: Float[Array, "... T W"], turn: Rotation) -> tuple[Array, Array]:
    k, v = einsum("...td,ckdh->c...tkh", h, w["kv_einsum"], config.attn_lora)
    return kept(rope(k, turn), "qkv"), kept(v, "qkv")


def _after_attention(
    w: Params,
    config: GemmaConfig,
    x: Float[Array, "... T W"],
    attended: Float[Array, "... T n h"],
    *,
    gate: Array | None,
    cond: Float[Array, "... W"] | None,
    whole: bool,
) -> Float[Array, "... T W"]:
    """The rest of a block: output projection, residual, norm, feed-forward, residual. `whole`: use the gated kernel."""
    x = residual(x, einsum("...tnh,nhd->...td", attended, w["attn"]["attn_vec_einsum"], config.attn_lora), gate)
    x = kept(x, "attended")
    h, gate = rms_norm(w["pre_ffw_norm"], x, cond)
    return residual(x, feed_forward(w["mlp"], h, whole), gate)
