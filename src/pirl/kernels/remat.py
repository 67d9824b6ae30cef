"""Scans over blocks, and rematerialisation of each in the backward pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from pirl.models.config import Remat

Block = Callable[..., Any]
At = Callable[..., Array]

SAVED_NAMES = ("gate", "up", "qkv", "attention", "attended", "vision_qkv", "vision_up", "vision_attended")
"""Names under which the projections that cost most to recompute are `kept`."""
FUSED_FORWARD = "dot_product_attention_fwd_wrapper"
"""jax's name for the primitive of cuDNN's forward pass: what it leaves is kept too."""


def over_layers(
    block: Block,
    carry: Any,
    layers: Any,
    along: Any,
    remat: Remat,
    dtype: jnp.dtype,
    *,
    view: Callable[[Any, At], Any] = lambda layers, at: jax.tree.map(at, layers),
) -> tuple[Any, Any]:
    """(last carry, stacked outputs) of block(carry, layer, its part of `along`): a scan over layers that are stacked,
    with their matrices in the given type.

    `along` is what else there is for each layer; where it is shorter than the layers are, the last ones are left out.
    `view` is what the block sees of a layer, in terms of `at(weights)`, or of `at(weights, i)` for a part of them: then
    gradients of the parts are written one by one, each in place.

    A list of layers is for inference, where it spares the scan's copy of each layer's weights: blocks follow one
    another in the program, and nothing is recomputed because there is no backward pass.
    """
    count = len(jax.tree.leaves(along)[0])
    if isinstance(layers, list):
        outs = []
        for number, layer in enumerate(layers[:count]):
            carry, out = block(carry, layer, layer_at(along, number))
            outs.append(out)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)
    # Each turn takes its layer out of the whole and casts it: taken out of what was cast before, it would be copied
    # once more. What is scanned over is never read, and only brings gradients back, in the type of the products, which
    # are no more exact than that. What is frozen is kept in bfloat16 and has none.
    whole = jax.tree.map(lambda w: w if w.dtype == jnp.bfloat16 else jax.lax.stop_gradient(w), layers)
    stacks, structure = jax.tree.flatten(view(layers, lambda w, *i: w[(slice(count), *i)]))
    places = [None if w.dtype == jnp.bfloat16 else in_type(w, dtype) for w in stacks]

    def turn(carry: Any, x: tuple[Array, list[Any], Any]) -> tuple[Any, Any]:
        number, places, part = x
        taken = jax.tree.leaves(view(whole, lambda w, *i: w[(number, *i)]))
        taken = [w if p is None else _taken(w.astype(p.dtype), p) for w, p in zip(taken, places, strict=True)]
        return block(carry, jax.tree.unflatten(structure, taken), part)

    return jax.lax.scan(rematerialised(turn, remat), carry, (jnp.arange(count), places, along))


@jax.custom_vjp
def _taken(weight: Array, scanned: Array) -> Array:
    """The weight, with its gradient sent to what stands for it in the scan."""
    return weight


_taken.defvjp(lambda weight, scanned: (weight, None), lambda _, gradient: (jnp.zeros_like(gradient), gradient))


def kept(x: Array, name: str) -> Array:
    """The same, kept under a name.

    What is kept is its negative. A product that the loop keeps as it is would be computed twice on a GPU: once written
    in place, once for its present reader. Twice negated, nothing is left of it for the latter.
    """
    return -checkpoint_name(-x, name)


def layer_at(layers: Any, number: Any) -> Any:
    """One of the layers, of a list or stacked."""
    return layers[number] if isinstance(layers, list) else jax.tree.map(lambda x: x[number], layers)


def in_type(stacked: Any, dtype: jnp.dtype) -> Any:
    """Stacked layers with their matrices in the type they are multiplied in; vectors (norms, biases) as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 2 else x, stacked)


def rematerialised(block: Block, remat: Remat) -> Block:
    """The block, keeping for its backward pass only what the setting allows."""
    if remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = {
        "auto": policies.nothing_saveable,  # where nobody has chosen, what fits best
        "full": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "names": policies.save_from_both_policies(policies.save_only_these_names(*SAVED_NAMES), _fused_attention),
    }[remat]
    # Inside a scan no common subexpressions can be merged across iterations, so the barrier is not needed.
    return jax.checkpoint(block, policy=policy, prevent_cse=False)


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep what a fused kernel leaves: its output alone would not do, the backward kernel needs the normaliser too."""
    return bool(primitive.name == FUSED_FORWARD)
