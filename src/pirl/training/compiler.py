"""What the compiler is told beyond its defaults."""

from functools import cache

import jax

from pirl.models.attention import cuda_capability

WANTED = {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}
"""A loop over layers fills the memory in which it keeps things for the backward pass: it need not be zeroed before."""


@cache
def options() -> dict[str, bool]:
    """Options for `jax.jit`: on an NVIDIA GPU, those of `WANTED` that this version of the compiler knows."""
    return {} if cuda_capability() is None else {name: value for name, value in WANTED.items() if _known(name, value)}


def _known(name: str, value: bool) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True
