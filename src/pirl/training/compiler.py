"""Compiler options that differ from XLA's defaults."""

from functools import cache

import jax

from pirl.kernels.attention import cuda_capability

Options = dict[str, bool | str]

TRAINING: Options = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    "xla_gpu_copy_insertion_use_region_analysis": True,
}
"""The same twice is the same to the bit, or a resumed run would not be the one that was interrupted: scatters, for one,
may otherwise add up in any order. A loop over layers fills the memory in which it keeps things for
the backward pass: it need not be zeroed before. And the residual that a product adds to needs no copy where it has been
kept already.
"""
TRANSFORMER: Options = {"xla_gpu_enable_triton_gemm": False}
"""cuBLAS alone: its products write the gradients of stacked layers in place and add biases themselves, and there is
less to choose from at compile time.
"""
ACTING: Options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""Kernels wait for those they read from, not for all before them. Most are small where one chunk is sampled."""


def for_training(*, transformer: bool = False) -> Options:
    """Options of `jax.jit` for a training step."""
    return _known(TRAINING | (TRANSFORMER if transformer else {}))


def for_acting() -> Options:
    """Options of `jax.jit` for sampling."""
    return _known(ACTING)


def _known(wanted: Options) -> Options:
    """On an NVIDIA GPU, those that this version of the compiler knows; elsewhere none."""
    return {} if cuda_capability() is None else {name: value for name, value in wanted.items() if _accepts(name, value)}


@cache
def _accepts(name: str, value: bool | str) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True
