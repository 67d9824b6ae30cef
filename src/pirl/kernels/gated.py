"""The first half of a gated feed-forward, gelu(x gate) * (x up), as one kernel for Hopper GPUs.

XLA emits two matmuls and an elementwise kernel, so both products go through memory. Here they stay in registers until
they are multiplied. Only for passes without gradients, which would store both products anyway: the derivative is that
of the plain form.

Each thread block computes one tile of the result after the other. Two of its warpgroups each accumulate both products
for half of the tile's rows; the third prefetches their operands.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.errors import PirlWarning
from pirl.kernels import attention
from pirl.kernels.remat import kept
from pirl.models.config import Pi0Config

WORKERS = 2
ROWS, COLUMNS, INNER = 128, 128, 64
"""A tile is ROWS x COLUMNS of the result; each step multiplies INNER of the inner dimension."""
AHEAD = 4
"""Pipeline depth: steps in flight or waiting in shared memory."""
STORED = 64
"""Columns that a warpgroup stores at a time, through two alternating buffers in shared memory."""
SNAKE = 8
"""Tiles run in stripes of this many, so that concurrent tiles are neighbours and share operands in cache."""
ROOT_TWO_OVER_PI, CUBIC = 0.7978845608028654, 0.044715

_planned: ContextVar[bool] = ContextVar("planned", default=False)


@contextmanager
def standing_in() -> Iterator[None]:
    """Trace programs on any machine as on a GPU that has the kernel, with the plain form in its place
    (`gated_stand_in`). For the memory planner.
    """
    token = _planned.set(True)
    try:
        yield
    finally:
        _planned.reset(token)


def possible(config: Pi0Config) -> bool:
    """Whether to use the kernel here. Single device only: XLA cannot partition it."""
    wanted = config.attention in ("auto", "cudnn") and config.dtype == "bfloat16"
    here = wanted and attention.cuda_capability() == attention.HOPPER and jax.device_count() == 1
    return _planned.get() or (here and compiles())


@cache
def compiles() -> bool:
    """Whether the kernel compiles on this machine; its compiler is another one than XLA's, and no run depends on it."""
    inner = AHEAD * INNER
    shapes = ((ROWS, inner), (inner, COLUMNS), (inner, COLUMNS))
    try:
        jax.jit(in_tiles).lower(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)).compile()
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        message = f"gated products go without their kernel, which does not compile here ({said})"
        warnings.warn(message, PirlWarning, stacklevel=2)
        return False
    return True


def fits(x: Float[Array, "... W"], *weights: Float[Array, "W _"]) -> bool:
    """Whether all sizes are multiples of the tiles. Weights: gate and up, or one array with both side by side."""
    rows, inner, columns = x.size // x.shape[-1], x.shape[-1], _columns(weights)
    whole = not (rows % ROWS or inner % INNER or columns % COLUMNS) and inner // INNER >= AHEAD
    return whole or _planned.get()


def activated(gate: Float[Array, "*s"], up: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """gelu(gate) * up, with the tanh approximation as in Gemma."""
    return jax.nn.gelu(gate, approximate=True) * up


def plain(x: Float[Array, "... W"], *weights: Float[Array, "W _"]) -> Float[Array, "... O"]:
    """The reference, compiled by XLA."""
    products = jnp.split(x @ weights[0], 2, axis=-1) if len(weights) == 1 else [x @ w for w in weights]
    return activated(*(kept(x, name) for x, name in zip(products, ("gate", "up"), strict=True)))


@jax.custom_jvp
def product(x: Float[Array, "... W"], *weights: Float[Array, "W _"]) -> Float[Array, "... O"]:
    """gelu(x gate) * (x up). Weights: gate and up, or one array with both side by side."""
    return (gated_stand_in if _planned.get() else gated_kernel)(x, *weights)


product.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))


# Named in the trace, so that the memory planner can recognise them.
@jax.jit
def gated_kernel(x: Float[Array, "... W"], *weights: Float[Array, "W _"]) -> Float[Array, "... O"]:
    return in_tiles(x.reshape(-1, x.shape[-1]), *weights).reshape(*x.shape[:-1], -1)


@jax.jit
def gated_stand_in(x: Float[Array, "... W"], *weights: Float[Array, "W _"]) -> Float[Array, "... O"]:
    return plain(x, *weights)


IN_ONE = frozenset({"gated_kernel", "gated_stand_in"})


def _columns(weights: tuple[Array, ...]) -> int:
    return weights[0].shape[1] // (2 if len(weights) == 1 else 1)


def _swizzled(gpu: Any, width: int) -> tuple[Any, ...]:
    """Shared-memory layout for rows of `width` bfloat16 numbers, free of bank conflicts."""
    size = gpu.find_swizzle(width * 16)
    return gpu.TilingTransform((8, size // 2)), gpu.SwizzleTransform(size)


def _pipeline(gpu: Any, inner: int, step: Any, around: Any) -> Any:
    """The loop over the inner dimension: `step` runs on each prefetched part, `around` wraps the loop."""

    def fetched(shape: tuple[int, int], at: Any) -> Any:
        return gpu.BlockSpec(shape, at, transforms=_swizzled(gpu, INNER), memory_space=gpu.SMEM)

    weight = fetched((INNER, COLUMNS), lambda k: (k, 0))
    return gpu.emit_pipeline_warp_specialized(
        step,
        grid=(inner // INNER,),
        memory_registers=40,
        in_specs=[fetched((ROWS, INNER), lambda k: (0, k)), weight, weight],
        wg_axis="worker",
        num_compute_wgs=WORKERS,
        max_concurrent_steps=AHEAD,
        compute_context=around,
    )


def in_tiles(x: Float[Array, "T W"], *weights: Float[Array, "W _"], interpret: Any = None) -> Float[Array, "T O"]:
    """The Mosaic kernel; `interpret` runs it on a CPU."""
    import jax.experimental.pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    gpu: Any = mosaic_gpu
    rows, inner, columns = *x.shape, _columns(weights)
    blocks = getattr(jax.local_devices()[0], "core_count", 2)  # a CPU has none
    part = ROWS // WORKERS

    def kernel(x: Any, *refs: Any) -> None:
        gate, up, out = refs[0], refs[-2], refs[-1]
        shift = columns if len(weights) == 1 else 0
        nothing = _pipeline(gpu, inner, lambda *_: None, lambda *_: None)

        @partial(
            pl.run_scoped,
            room=nothing.get_allocations(x, gate, up),
            leaving=gpu.SMEM((WORKERS, 2, part, STORED), jnp.bfloat16, transforms=_swizzled(gpu, STORED)),
            collective_axes="worker",
        )
        def _(room: Any, leaving: Any) -> None:
            worker = jax.lax.axis_index("worker")
            own = pl.ds(worker * part, part)

            def computed(turn: Any) -> None:
                i, j = gpu.planar_snake(turn.index[0], (rows // ROWS, columns // COLUMNS), 0, SNAKE)
                here, there = pl.ds(i * ROWS, ROWS), pl.ds(j * COLUMNS, COLUMNS)

                def tile(run: Any) -> None:
                    def added_up(*sums: Any) -> None:
                        run(sums)
                        store(*(total[...] for total in sums))

                    sums = gpu.ACC((part, COLUMNS), jnp.float32)
                    pl.run_scoped(added_up, sums, sums)

                def multiplied(_: Any, x: Any, gate: Any, up: Any, sums: Any) -> Any:
                    for total, weight in zip(sums, (gate, up), strict=True):
                        gpu.wgmma(total, x.at[own], weight)
                    gpu.wgmma_wait(0)
                    return sums

                def store(g: Array, u: Array) -> None:
                    tanh = jnp.tanh(g * (ROOT_TWO_OVER_PI * (1 + CUBIC * g * g)))
                    result = (g * (0.5 + 0.5 * tanh) * u).astype(jnp.bfloat16)
                    for number, begin in enumerate(range(0, COLUMNS, STORED)):
                        these = slice(begin, begin + STORED)
                        place = leaving.at[worker, number % 2]
                        gpu.wait_smem_to_gmem(1, wait_read_only=True)
                        place[...] = result[:, these]
                        gpu.commit_smem()
                        gpu.copy_smem_to_gmem(place, out.at[here, there].at[own].at[:, these])

                shifted = pl.ds(shift + j * COLUMNS, COLUMNS)
                whole = _pipeline(gpu, inner, multiplied, tile)
                whole(x.at[here, :], gate.at[:, there], up.at[:, shifted], allocations=room)

            gpu.nd_loop((rows // ROWS * (columns // COLUMNS),), collective_axes="block")(computed)

        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    return gpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WORKERS + 1,
        thread_name="worker",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(x, *weights)
