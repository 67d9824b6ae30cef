"""Block after block, and what the backward pass recomputes of each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from pirl.models.config import Remat

Block = Callable[..., Any]

SAVED_NAMES = ("gate", "up", "qkv", "attention", "attended", "vision_qkv", "vision_up", "vision_attended")
"""Names under which the projections that cost most to recompute are `kept`."""
FUSED_FORWARD = "dot_product_attention_fwd_wrapper"
"""jax's name for the primitive of cuDNN's forward pass: what it leaves is kept too."""


def over_layers(
    block: Block, carry: Any, layers: Any, remat: Remat, dtype: jnp.dtype, *, leave_out: int = 0
) -> tuple[Any, Any]:
    """(last carry, stacked outputs) of block(carry, layer, its number) for each layer but the last `leave_out`: a scan
    over layers that are stacked, with their matrices in the given type.

    A list of layers is for inference, where it spares the scan's copy of each layer's weights: blocks follow one
    another in the program, and nothing is recomputed because there is no backward pass.
    """
    if not isinstance(layers, list):
        cast = in_type(layers, dtype)
        numbers = jnp.arange(len(jax.tree.leaves(layers)[0]) - leave_out)
        if not leave_out:
            run = rematerialised(lambda carry, layer: block(carry, *layer), remat)
            return jax.lax.scan(run, carry, (cast, numbers))
        # To scan over some of the layers would copy them. So each turn takes its own out of all; what is scanned over
        # is never read, and only brings gradients back. What is frozen is kept in bfloat16 and has none.
        leaves, structure = jax.tree.flatten(cast)
        trains = [x.dtype != jnp.bfloat16 for x in jax.tree.leaves(layers)]
        whole = [jax.lax.stop_gradient(w) if trained else w for w, trained in zip(leaves, trains, strict=True)]
        scanned = [w[: len(numbers)] if trained else None for w, trained in zip(leaves, trains, strict=True)]

        def turn(carry: Any, x: tuple[list[Any], Any]) -> tuple[Any, Any]:
            places, number = x
            layer = [w[number] if s is None else _taken(w[number], s) for w, s in zip(whole, places, strict=True)]
            return block(carry, jax.tree.unflatten(structure, layer), number)

        return jax.lax.scan(rematerialised(turn, remat), carry, (scanned, numbers))
    outs = []
    for number, layer in enumerate(layers[: len(layers) - leave_out]):
        carry, out = block(carry, layer, number)
        outs.append(out)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


@jax.custom_vjp
def _taken(weight: Array, scanned: Array) -> Array:
    """The weight, with its gradient sent to what stands for it in the scan."""
    return weight


_taken.defvjp(lambda weight, scanned: (weight, None), lambda _, gradient: (jnp.zeros_like(gradient), gradient))


def kept(x: Array, name: str) -> Array:
    """The same, kept under a name.

    What is kept is its negative. A product that the loop keeps as it is would be computed twice on a GPU: once written
    in place, once for who reads it now. Twice negated, nothing is left of it for the latter.
    """
    return -checkpoint_name(-x, name)


def layer_at(layers: Any, number: Any) -> Any:
    """One of the layers, of a list or stacked."""
    return layers[number] if isinstance(layers, list) else jax.tree.map(lambda x: x[number], layers)


def in_type(stacked: Any, dtype: jnp.dtype) -> Any:
    """Stacked layers with their matrices in the type they are multiplied in; vectors (norms, biases) as they are.

    Cast once, before the loop: inside it every layer's float32 weights would be read again in each pass, and its
    gradients written as float32 although they are only as exact as this type.
    """
    return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 2 else x, stacked)


def rematerialised(block: Block, remat: Remat) -> Block:
    """The block, keeping for its backward pass only what the setting says."""
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
