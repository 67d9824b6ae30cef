"""What the backward pass recomputes: rematerialisation of one transformer block inside a scan."""

from collections.abc import Callable
from typing import Any

import jax

from pirl.models.config import Remat

Block = Callable[..., Any]

SAVED_NAMES = ("gate", "up", "qkv", "attention", "vision_qkv", "vision_up")
"""`checkpoint_name`s of the projections that cost most to recompute."""


def rematerialised(block: Block, remat: Remat) -> Block:
    """The block, keeping for its backward pass only what the setting says."""
    if remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = {
        "full": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "names": policies.save_only_these_names(*SAVED_NAMES),
    }[remat]
    # Inside a scan no common subexpressions can be merged across iterations, so the barrier is not needed.
    return jax.checkpoint(block, policy=policy, prevent_cse=False)
