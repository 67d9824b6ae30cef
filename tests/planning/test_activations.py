"""What is alive at once in a traced step: counted by hand, and held against XLA's own account."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pirl.planning.activations import PROBE, Load, largest, step_loads

WIDTH, HIDDEN, DEPTH = 8, 32, 5
FLOAT = 4


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def peak(function: Callable[..., Any], *args: Any, batch: int = 1000, **settings: Any) -> Load:
    return max(step_loads(function, *args, **settings), key=lambda load: load.at(batch))


def test_a_product_stores_what_it_reads_and_what_it_gives() -> None:
    up, down, x = array(WIDTH, HIDDEN), array(HIDDEN, WIDTH), array(PROBE, WIDTH)
    # x @ up, its gelu, and the second product are in memory together; nothing between gelu's operations is.
    assert peak(lambda up, down, x: jax.nn.gelu(x @ up) @ down, up, down, x) == Load(0, (2 * HIDDEN + WIDTH) * FLOAT)
    # A cast weight is an array of its own, and does not grow with the batch.
    half = peak(lambda up, x: x.astype(jnp.bfloat16) @ up.astype(jnp.bfloat16), up, x)
    assert half == Load(WIDTH * HIDDEN * 2, (WIDTH + HIDDEN) * 2)
    # Cast twice, it is the same array.
    twice = peak(lambda up, x: x @ up.astype(jnp.bfloat16) + x @ up.astype(jnp.bfloat16), up, x)
    assert twice.fixed == WIDTH * HIDDEN * 2
    # Views are no arrays, and what nobody wants is not computed.
    assert peak(lambda up, x: (x @ up).reshape(PROBE, 2, -1).swapaxes(0, 1), up, x) == Load(0, HIDDEN * FLOAT)
    assert peak(lambda up, x: (x, x @ up)[0], up, x) == Load()


def test_a_step_writes_its_state_in_place() -> None:
    weights, gradient = array(64, 64), array(64, 64)
    assert step_loads(lambda w, m, g: (w - 0.1 * (m + g), m + g), weights, weights, gradient) == (Load(),)
    x = array(PROBE, 64)

    def learn(w: Any, moment: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.square(x @ w).mean())(w)
        moment = 0.9 * moment + g
        return w - moment, moment

    # The gradient lives beside the weights until the update is done; by then activations are gone.
    assert peak(learn, weights, weights, x, batch=1) == Load(64 * 64 * FLOAT, 2 * 64 * FLOAT)
    assert (
        peak(learn, array(2048, 2048), array(2048, 2048), array(PROBE, 2048), fsdp=8).fixed == 2048 * 2048 * FLOAT / 8
    )


def stack(remat: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of DEPTH blocks of gelu(x @ up) @ down."""

    def block(x: Any, layer: Any) -> tuple[Any, None]:
        up, down = layer
        return jax.nn.gelu(x @ up) @ down, None

    def step(up: Any, down: Any, x: Any) -> Any:
        return jax.grad(lambda layers: jnp.square(jax.lax.scan(remat(block), x, layers)[0]).sum())((up, down))

    return step


LAYERS = (array(DEPTH, WIDTH, HIDDEN), array(DEPTH, HIDDEN, WIDTH), array(PROBE, WIDTH))


def test_a_loop_holds_what_its_backward_pass_reads() -> None:
    recomputed = peak(stack(lambda block: jax.checkpoint(block, prevent_cse=False)), *LAYERS)
    # The blocks' inputs; of one block the recomputed product, its gelu, its slope, and the cotangents of both products.
    kept = DEPTH * WIDTH
    assert kept + 3 * HIDDEN < recomputed.per_sample / FLOAT < kept + 5 * HIDDEN + 4 * WIDTH
    assert 2 * DEPTH * WIDTH * HIDDEN * FLOAT <= recomputed.fixed < 2 * (DEPTH + 2) * WIDTH * HIDDEN * FLOAT
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    dots = peak(stack(lambda block: jax.checkpoint(block, prevent_cse=False, policy=policy)), *LAYERS)
    everything = peak(stack(lambda block: block), *LAYERS)
    # Each block keeps its first product as well; without any setting also the elementwise results that gelu's needs.
    assert dots.per_sample == pytest.approx(recomputed.per_sample + DEPTH * HIDDEN * FLOAT, rel=0.15)
    assert everything.per_sample > recomputed.per_sample + 3 * DEPTH * HIDDEN * FLOAT


def test_what_a_loop_does_not_read_is_not_there() -> None:
    x, weights = array(PROBE, WIDTH), array(DEPTH, WIDTH, WIDTH)

    def looped(read: bool) -> Callable[..., Any]:
        def step(weights: Any, x: Any) -> Any:
            # Cast for a loop that looks at one of them; the choice is made inside a call.
            cast = weights.astype(jnp.bfloat16)
            choose = jax.jit(lambda w, half: half if read else w)

            def turn(x: Any, layer: Any) -> tuple[Any, None]:
                return x @ choose(*layer).astype(jnp.float32), None

            return jax.lax.scan(turn, x, (weights, cast))[0]

        return step

    assert peak(looped(read=True), weights, x).fixed >= DEPTH * WIDTH * WIDTH * 2
    # The layer at work alone.
    assert peak(looped(read=False), weights, x).fixed == WIDTH * WIDTH * FLOAT


@pytest.mark.parametrize(("shape", "turned"), [((4, 1024, 2048), True), ((4, 2048, 1024), False)])
def test_what_is_gathered_over_its_last_axis_is_turned_around(shape: tuple[int, ...], turned: bool) -> None:
    def step(weights: Any, x: Any) -> Any:
        def turn(x: Any, number: Any) -> tuple[Any, None]:
            return x * (x @ weights[number]).sum(), None

        x = jax.lax.scan(turn, x, jnp.arange(shape[0]))[0]
        return jax.lax.scan(turn, x, jnp.arange(shape[0]))[0]

    weights, x = array(*shape), array(PROBE, shape[1])
    # A gathered layer; and, for both loops together, the eighth that a device has.
    layer, whole = (FLOAT * count for count in (1024 * 2048, 4 * 1024 * 2048))
    assert peak(step, weights, x, fsdp=8).fixed == pytest.approx(layer + turned * whole / 8, rel=1e-5)
    assert peak(step, weights, x).fixed == pytest.approx(layer, rel=1e-5)


def test_a_branch_is_a_border() -> None:
    def gradient(branched: bool) -> Callable[..., Any]:
        def block(up: Any, down: Any, x: Any) -> Any:
            return jax.nn.gelu(x @ up) @ down

        def step(up: Any, down: Any, x: Any, flag: Any) -> Any:
            def loss(up: Any, down: Any) -> Any:
                out = jax.lax.cond(flag, block, lambda *_: x, up, down, x) if branched else block(up, down, x)
                return jnp.square(out).sum()

            return jax.grad(loss, (0, 1))(up, down)

        return step

    args = (array(WIDTH, HIDDEN), array(HIDDEN, WIDTH), array(PROBE, WIDTH), array(dtype=bool))
    plain, branched = (peak(gradient(flag), *args) for flag in (False, True))
    # What the backward branch reads of the forward branch is stored, elementwise results too.
    assert branched.per_sample > plain.per_sample + 2 * HIDDEN * FLOAT


def test_logits_of_fused_attention_are_not_in_memory() -> None:
    tokens = 24

    def attend(q: Any, k: Any) -> Any:
        return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ k

    q = array(PROBE, tokens, WIDTH)
    plain, fused = peak(attend, q, q), peak(attend, q, q, fused_tokens={tokens})
    assert fused.per_sample == tokens * (WIDTH + 2) * FLOAT, "the result, and two statistics per query"
    assert plain.per_sample >= fused.per_sample + 2 * tokens**2 * FLOAT


def test_it_agrees_with_what_xla_takes() -> None:
    """XLA for CPUs schedules and fuses in its own way; both count the same arrays."""
    batch, width, hidden, depth = 512, 64, 256, 8

    def shapes(rows: int) -> tuple[Any, ...]:
        return array(depth, width, hidden), array(depth, hidden, width), array(rows, width)

    for remat in (lambda block: block, lambda block: jax.checkpoint(block, prevent_cse=False)):
        step = stack(remat)
        memory = jax.jit(step).lower(*shapes(batch)).compile().memory_analysis()
        taken = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        predicted = peak(step, *shapes(PROBE), batch=batch).at(batch)
        assert predicted == pytest.approx(taken, rel=0.25)


def test_only_possible_peaks_are_kept() -> None:
    flat, steep, neither = Load(10, 1), Load(2, 3), Load(2, 1)
    assert largest([neither, steep, flat, flat]) == (flat, steep)
    assert flat.plus(steep) == Load(12, 4)
    assert flat.at(2) == 12
