"""Scan over transformer blocks with rematerialisation in the backward pass."""

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
"""Checkpoint names of the projections that are most expensive to recompute (see `kept`)."""
FUSED_FORWARD = "dot_product_attention_fwd_wrapper"
"""jax's primitive for cuDNN's forward pass, whose residuals are saved too."""


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
    """Scan block(carry, layer, along[i]) over stacked layers with matrices cast to `dtype`; (last carry, outputs).

    `along` is a pytree of per-layer inputs. Its leading axis sets the number of layers to run, so a shorter one skips
    the last layers. `view` builds the layer that the block sees from `at(weights)`, or from `at(weights, i)` for slice
    i, whose gradient is then written in place.

    A list of layers is for inference: blocks are unrolled, which saves the scan's copy of each layer's weights, and
    nothing is rematerialised because there is no backward pass.
    """
    count = len(jax.tree.leaves(along)[0])
    if isinstance(layers, list):
        outs = []
        for number, layer in enumerate(layers[:count]):
            carry, out = block(carry, layer, layer_at(along, number))
            outs.append(out)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)
    # Each iteration slices its layer out of the closed-over stack and then casts it: slicing a stack that was cast
    # before costs another copy. The scanned `places` are never read; they only carry gradients back, in the dtype of
    # the matmuls, which are no more precise. Frozen weights (bfloat16) need no gradient.
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
    """The weight, with its gradient redirected to its placeholder in the scan."""
    return weight


_taken.defvjp(lambda weight, scanned: (weight, None), lambda _, gradient: (jnp.zeros_like(gradient), gradient))


def kept(x: Array, name: str) -> Array:
    """x, saved for the backward pass under a checkpoint name (if the policy saves that name).

    Saves -x: on a GPU XLA would compute a saved product twice, once in place in the loop's stack and once for its
    reader in the forward pass. Negation prevents that, and the second one cancels it for the reader.
    """
    return -checkpoint_name(-x, name)


def layer_at(layers: Any, number: Any) -> Any:
    """Layer `number` of a list or of stacked layers."""
    return layers[number] if isinstance(layers, list) else jax.tree.map(lambda x: x[number], layers)


def in_type(stacked: Any, dtype: jnp.dtype) -> Any:
    """Stacked layers with matrices cast to the matmul dtype; vectors (norms, biases) stay as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 2 else x, stacked)


def rematerialised(block: Block, remat: Remat) -> Block:
    """The block under `jax.checkpoint` with the setting's policy."""
    if remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = {
        "auto": policies.nothing_saveable,  # not resolved by training: use the least memory
        "full": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "names": policies.save_from_both_policies(policies.save_only_these_names(*SAVED_NAMES), _fused_attention),
    }[remat]
    # Inside a scan no common subexpressions can be merged across iterations, so the barrier is not needed.
    return jax.checkpoint(block, policy=policy, prevent_cse=False)


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save all residuals of the fused kernel: its backward pass needs the normaliser besides the output."""
    return bool(primitive.name == FUSED_FORWARD)
