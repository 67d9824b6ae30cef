"""The action expert for sampling: ten Euler steps, N candidates, one prefix.

Computes the same as `gemma.run_suffix` from the same weights. Before the first step, weights are split into layers,
cast, and concatenated where they multiply the same input, so the loop only reads them. The state's token attends only
to the prefix and itself, so its keys and values are equal in every step and for every candidate: they join the prefix.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pirl.kernels import attention, gated
from pirl.kernels.remat import in_type
from pirl.models.config import GemmaConfig, LoRAConfig, Pi0Config
from pirl.models.gemma import expert_layers, joint_attention, suffix_rotation
from pirl.models.layers import Rotation, modulated, residual, rms_norm, rope
from pirl.models.params import Params
from pirl.parallel.placement import by_sample, everywhere

FEW = 8
"""With fewer suffixes (B·N) than this a fused kernel does not fill the GPU, and plain attention is as fast."""
EVEN, MULTIPLE, WHOLE = 2, 8, 128
"""Key counts are padded (and masked) to multiples of these: a candidate's own, the shared ones, and both in one array.
Fused kernels need even lengths; matrix products want whole tiles."""

ROWS = 16
"""Rows of the smallest matmul tile."""


def cut(layers: Params, dtype: jnp.dtype) -> list[Params]:
    """Stacked weights as one tree per layer. Casts matrices to `dtype`; norms stay float32."""
    found = _apart(in_type(layers, dtype))
    for layer in found:
        if "mlp" in layer:
            # Gate and up are multiplied separately; splitting them here saves a slice in every call.
            layer["mlp"]["gating_einsum"] = list(layer["mlp"]["gating_einsum"])
    return found


@jax.named_scope("candidates")
def pack(layers: Params, config: Pi0Config) -> list[Params]:
    """The expert's weights layer by layer, in `prepared`'s layout, with adapters merged into their matrices.

    Replicated on every device: sharded, they would be gathered in every Euler step, and they are small.
    """
    dtype = jnp.dtype(config.dtype)
    packed = [_packed(layer, config.expert, dtype) for layer in _apart(expert_layers(layers, 1))]
    return jax.tree.map(everywhere, packed)


def _apart(layers: Params) -> list[Params]:
    leaves, structure = jax.tree.flatten(layers)
    return [jax.tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(len(leaves[0]))]


def _packed(w: Params, c: GemmaConfig, dtype: jnp.dtype) -> Params:
    attn, mlp = w["attn"], w["mlp"]
    q = _adapted(attn["q_einsum"], c.attn_lora)
    kv = _adapted(attn["kv_einsum"], c.attn_lora)
    qkv = jnp.concatenate([q, kv[0], kv[1]]).swapaxes(0, 1)
    gating, linear = (
        mlp[name] + mlp[f"{name}_lora_a"] @ mlp[f"{name}_lora_b"] if c.ffn_lora else mlp[name]
        for name in ("gating_einsum", "linear")
    )
    out = attn["attn_vec_einsum"]
    # The output adapter's second matrix is summed over heads: `layers.einsum` keeps no head axis in between.
    out = _adapted(out if c.attn_lora is None else out | {"lora_b": out["lora_b"].sum(0)}, c.attn_lora)
    norms = {name: w[name] for name in ("pre_attention_norm", "pre_ffw_norm")}
    if "Dense_0" in norms["pre_ffw_norm"]:
        both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *(norm["Dense_0"] for norm in norms.values()))
        norms = {"modulation": _in_type(both, dtype)}
    return norms | {
        "qkv": qkv.reshape(c.width, -1).astype(dtype),
        "out": out.reshape(-1, c.width).astype(dtype),
        "gating": jnp.concatenate([gating[0], gating[1]], axis=1).astype(dtype),
        "linear": linear.astype(dtype),
    }


def _in_type(tree: Params, dtype: jnp.dtype) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _adapted(p: Params, lora: LoRAConfig | None) -> Array:
    return p["w"] if lora is None else p["w"] + lora.scaling * (p["lora_a"] @ p["lora_b"])


@jax.named_scope("candidates")
def first_token(
    layers: list[Params], config: Pi0Config, x: Float[Array, "B 1 1 W"], keys: Array, values: Array, mask: Array
) -> tuple[Float[Array, "layers B 1 K h"], Float[Array, "layers B 1 K h"]]:
    """Per-layer keys and values of the state's token, from packed weights."""
    x, turn, found = x.astype(jnp.dtype(config.dtype)), suffix_rotation(config, mask, 1), []
    for i, w in enumerate(layers):
        x, k, v = _block(w, config.expert, x, turn, _plain(keys[i], values[i], mask), None)
        found.append((k[:, 0], v[:, 0]))
    k, v = (jnp.stack(part) for part in zip(*found, strict=True))
    return k, v


@jax.named_scope("candidates")
def prepared(
    layers: list[Params],
    final_norm: Params,
    config: Pi0Config,
    keys: Float[Array, "layers B P K h"],
    values: Float[Array, "layers B P K h"],
    mask: Bool[Array, "B P"],
    first: tuple[Float[Array, "layers B 1 K h"], Float[Array, "layers B 1 K h"]] | None,
) -> Callable[[Array, Array | None], Array]:
    """(action tokens [B, N, H, W], condition) -> the expert's output. `first`: keys and values of the state's token."""
    dtype, before, real = jnp.dtype(config.dtype), 0, mask
    if first is not None:
        # In front, because a fused kernel needs padding to come last.
        keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(first, (keys, values), strict=True))
        before, real = 1, jnp.concatenate([jnp.ones_like(mask[:, :1]), mask], axis=1)
    if attention.kernel(config, config.expert.head_dim) is not None:
        # Pad once, not in every step.
        gap = -real.shape[1] % MULTIPLE
        keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, gap), (0, 0), (0, 0))) for x in (keys, values))
        real = jnp.pad(real, ((0, 0), (0, gap)))
    shared = [(keys[i], values[i], real) for i in range(config.expert.depth)]
    last = _in_type(final_norm.get("Dense_0", {}), dtype)

    @jax.named_scope("candidates")
    def run(x: Float[Array, "B N T W"], cond: Float[Array, "B N *T W"] | None) -> Float[Array, "B N T W"]:
        x, length = x.astype(dtype), x.shape[2]
        turn = suffix_rotation(config, mask, length, before)
        how = attention.kernel(config, config.expert.head_dim)
        if how == "cudnn" and x.shape[0] * x.shape[1] < FEW:
            how = None

        @jax.jit  # traced once, not once per layer
        def block(w: Params, x: Array, turn: Rotation, cache: tuple[Array, Array, Array], cond: Array | None) -> Array:
            attend = _plain(*cache) if how is None else _fused(how, *cache)
            return _block(w, config.expert, x, turn, attend, cond, whole=gated.possible(config))[0]

        for w, cache in zip(layers, shared, strict=True):
            x = block(w, x, turn, cache, cond)
        return _norm(final_norm, x, None if cond is None else _modulation(last, cond))[0]

    return run


def _block(
    w: Params,
    c: GemmaConfig,
    x: Float[Array, "B N T W"],
    turn: Rotation,
    attend: Callable[[Array, Array, Array], Array],
    cond: Float[Array, "B N *T W"] | None,
    *,
    whole: bool = False,
) -> tuple[Array, Array, Array]:
    """One block on packed weights (`whole`: use the gated kernel if shapes fit). Returns (output, keys, values)."""
    x = by_sample(x)
    here, there = (None, None) if cond is None else jnp.split(_modulation(w["modulation"], cond), 2, axis=-1)
    h, gate = _norm(w.get("pre_attention_norm", {}), x, here)
    q, k, v = jnp.split(
        _product(h, w["qkv"]).reshape(*x.shape[:-1], -1, c.head_dim),
        [c.num_heads, c.num_heads + c.num_kv_heads],
        axis=-2,
    )
    q, k = rope(q, turn) * c.head_dim**-0.5, rope(k, turn)
    x = residual(x, _product(attend(q, k, v).reshape(*x.shape[:-1], -1), w["out"]), gate)
    h, gate = _norm(w.get("pre_ffw_norm", {}), x, there)
    if whole and gated.fits(h, w["gating"]):
        hidden = gated.product(h, w["gating"])
    else:
        hidden = gated.activated(*jnp.split(by_sample(_product(h, w["gating"])), 2, axis=-1))
    return residual(x, _product(hidden, w["linear"]), gate), k, v


def _norm(params: Params, x: Float[Array, "B N T W"], modulation: Array | None) -> tuple[Array, Array | None]:
    return rms_norm(params, x, None) if modulation is None else modulated(x, modulation)


def _modulation(dense: Params, cond: Float[Array, "B N *T W"]) -> Float[Array, "B N *T O"]:
    """Scale, shift and gate from the condition; concatenated for both norms of a block if `dense` is."""
    return _product(cond.astype(dense["kernel"].dtype), dense["kernel"]) + dense["bias"]


def _product(x: Float[Array, "... T W"], w: Float[Array, "W O"]) -> Float[Array, "... T O"]:
    """x @ w. Repeats a single row (one observation's π₀ state or π₀.₅ condition) `ROWS` times: for a vector XLA emits
    no matmul but an elementwise product through memory and a reduction.
    """
    if x.size > x.shape[-1]:
        return x @ w
    # The barriers stop XLA from simplifying it back to one row.
    rows = jax.lax.optimization_barrier(jnp.repeat(x, ROWS, axis=-2))
    return jax.lax.optimization_barrier(rows @ w)[..., :1, :]


def _plain(
    shared_k: Float[Array, "B S K h"], shared_v: Float[Array, "B S K h"], real: Bool[Array, "B S"]
) -> Callable[[Array, Array, Array], Array]:
    """Attention with materialised logits; shared keys are not replicated over candidates."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        seen = jnp.ones((q.shape[2], k.shape[2]), bool)
        return joint_attention(q, k, v, shared_k, shared_v, real, seen, WHOLE)

    return attend


def _fused(
    how: attention.Kernel,
    shared_k: Float[Array, "B S K h"],
    shared_v: Float[Array, "B S K h"],
    real: Bool[Array, "B S"],
) -> Callable[[Array, Array, Array], Array]:
    """Two fused kernels, merged: all candidates' queries over the shared keys, and each candidate's over its own.

    Query heads that share a key head become queries of one head, which fills the kernel's tile although chunks are
    short.
    """
    shared_real = attention.lengths(real)

    def attend(q: Array, k: Array, v: Array) -> Array:
        batch, num, length, kv_heads, head_dim = k.shape
        queries = attention.grouped(q, k).swapaxes(3, 4)

        def over(size: int, keys: Array, values: Array, real: Array | None) -> attention.Partial:
            part = attention.partial(how, queries.reshape(size, -1, kv_heads, head_dim), keys, values, real)
            return attention.Partial(part.out.reshape(queries.shape), part.norm.reshape(queries.shape[:-1]))

        def own(x: Array) -> Array:
            return jnp.pad(x.reshape(-1, length, kv_heads, head_dim), ((0, 0), (0, -length % EVEN), (0, 0), (0, 0)))

        # Pass lengths only if there is padding: without them the kernel prepares less.
        own_real = jnp.full(batch * num, length, jnp.int32) if length % EVEN else None
        out = attention.merged(
            over(batch, shared_k, shared_v, shared_real), over(batch * num, own(k), own(v), own_real)
        )
        return out.swapaxes(3, 4).reshape(q.shape)

    return attend
