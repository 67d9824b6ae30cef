"""What the compiler is told beyond its defaults."""

from functools import cache

import jax

from pirl.models.attention import cuda_capability

WANTED = {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}
"""A loop over layers fills the memory in which it keeps things for the backward pass: it need not be zeroed before."""
WHERE_ALL_TRAINS = {"xla_gpu_enable_triton_gemm": False}
"""cuBLAS alone: its products write the gradients of stacked layers in place and add biases themselves, and there is
less to choose from at compile time. Not where weights are frozen: a product that reads a part of a stack is not tuned.
"""


@cache
def options(*, all_trains: bool = False) -> dict[str, bool]:
    """Options for `jax.jit`: on an NVIDIA GPU, those wanted that this version of the compiler knows.

    `all_trains`: the program trains a transformer, and all of it.
    """
    if cuda_capability() is None:
        return {}
    wanted = WANTED | (WHERE_ALL_TRAINS if all_trains else {})
    return {name: value for name, value in wanted.items() if _known(name, value)}


def _known(name: str, value: bool) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True
