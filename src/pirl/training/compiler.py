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
"""Options of training steps. Deterministic ops make runs bit-reproducible, which exact resume needs; scatters, for
example, otherwise sum in any order. The loop over layers overwrites its buffer of saved activations completely, so the
buffer need not be zeroed first. Region analysis avoids copying a residual that has already been saved.
"""
TRANSFORMER: Options = {"xla_gpu_enable_triton_gemm": False}
"""cuBLAS only: its GEMMs write gradients of stacked layers in place and fuse biases, and autotuning has fewer
candidates at compile time.
"""
ACTING: Options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""Kernels wait only for their inputs, not for all earlier kernels; sampling one chunk runs many small kernels."""


def for_training(*, transformer: bool = False) -> Options:
    """Options of `jax.jit` for a training step."""
    return _known(TRAINING | (TRANSFORMER if transformer else {}))


def for_acting() -> Options:
    """Options of `jax.jit` for sampling."""
    return _known(ACTING)


def _known(wanted: Options) -> Options:
    """The options that this XLA version accepts on an NVIDIA GPU; none elsewhere."""
    return {} if cuda_capability() is None else {name: value for name, value in wanted.items() if _accepts(name, value)}


@cache
def _accepts(name: str, value: bool | str) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True
