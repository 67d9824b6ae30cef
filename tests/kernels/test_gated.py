"""Gated products in one kernel: what it computes, when it is used, and that gradients do not go through it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.errors import PirlWarning
from pirl.kernels import attention, gated
from pirl.models import flow
from pirl.models.config import Pi0Config
from pirl.models.params import flatten
from pirl.models.pi0 import Pi0
from pirl.planning.activations import PROBE, step_loads
from pirl.planning.flops import count_flops
from small_pi0 import CONFIGS, HALF, observation, points, weights

ROWS, INNER, COLUMNS = 2 * gated.ROWS, gated.AHEAD * gated.INNER, 2 * gated.COLUMNS


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def by_hand(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    g, u = x @ gate, x @ up
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u


@pytest.mark.parametrize("joined", [False, True])
def test_the_kernel_computes_what_it_says(joined: bool) -> None:
    """In jax's interpreter of GPU kernels, which also looks for races."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    running = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
    x, gate, up = normal(0, ROWS, INNER), *(normal(seed, INNER, COLUMNS) / INNER**0.5 for seed in (1, 2))
    given = [jnp.concatenate([gate, up], axis=1)] if joined else [gate, up]
    found = gated.in_tiles(x, *given, interpret=params.InterpretGPUParams(detect_races=True))
    assert not running.get_races().races_found
    wanted = by_hand(*(np.asarray(a, np.float64) for a in (x, gate, up)))
    assert found.shape == (ROWS, COLUMNS)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("joined", [False, True])
def test_the_plain_form_is_the_same(joined: bool) -> None:
    rng = np.random.default_rng(0)
    x, gate, up = rng.normal(size=(2, 5, 3)), rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    given = [np.concatenate([gate, up], axis=1)] if joined else [gate, up]
    found = gated.plain(*(jnp.asarray(a, jnp.float32) for a in (x, *given)))
    np.testing.assert_allclose(found, by_hand(x, gate, up), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "whole"),
    [
        ((4, 64), 256, 128, True),
        ((32, 816), 2048, 16384, True),
        ((4, 63), 256, 128, False),
        ((4, 64), 200, 128, False),
        ((4, 64), 192, 128, False),
        ((4, 64), 256, 100, False),
    ],
    ids=["smallest", "VLM", "rows", "inner", "too few inner", "columns"],
)
def test_it_takes_whole_tiles(rows: tuple[int, ...], inner: int, columns: int, whole: bool) -> None:
    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    x, one, both = shape(*rows, inner), shape(inner, columns), shape(inner, 2 * columns)
    found: list[bool] = []
    for given in ((x, one, one), (x, both)):
        jax.eval_shape(lambda *traced: found.append(gated.fits(*traced)), *given)
    assert found == [whole, whole]


@pytest.mark.parametrize(
    ("change", "capability", "devices", "possible"),
    [
        ({}, (9, 0), 1, True),
        ({"attention": "cudnn"}, (9, 0), 1, True),
        ({"attention": "plain"}, (9, 0), 1, False),
        ({"attention": "xla"}, (9, 0), 1, False),
        ({"dtype": "float32"}, (9, 0), 1, False),
        ({}, (8, 0), 1, False),
        ({}, (10, 0), 1, False),
        ({}, None, 1, False),
        ({}, (9, 0), 8, False),
    ],
)
def test_where_it_is_used(
    change: dict[str, Any],
    capability: tuple[int, int] | None,
    devices: int,
    possible: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "cuda_capability", lambda: capability)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(gated, "compiles", lambda: True)
    assert gated.possible(replace(HALF, **change)) == possible


def test_where_it_does_not_compile_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on this machine, whose compiler has no such kernels. The question may come while something is traced."""
    monkeypatch.setattr(attention, "cuda_capability", lambda: attention.HOPPER)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    gated.compiles.cache_clear()
    found: list[bool] = []
    with pytest.warns(PirlWarning, match="gated products go without their kernel, which does not compile here"):
        jax.jit(lambda: found.append(gated.possible(HALF)))()
    assert found == [False]
    assert not gated.possible(HALF), "and says so once"
    gated.compiles.cache_clear()
    monkeypatch.setattr(gated, "in_tiles", gated.plain)
    assert gated.possible(HALF)
    gated.compiles.cache_clear()


# Functions are made anew where they are traced anew: jax remembers the trace of one it has seen.
def sampling(config: Pi0Config) -> Callable[[Any], jax.Array]:
    policy, seen, noise = Pi0(config), observation(config), points(config, 2)[0]
    return lambda params: flow.sample(policy, params, policy.encode(params, seen), noise, num_steps=2)


def loss(config: Pi0Config) -> Callable[[Any], jax.Array]:
    policy, seen, (x_t, t) = Pi0(config), observation(config), points(config, 1)
    return lambda params: jnp.square(policy.velocity(params, policy.encode(params, seen), x_t, t)).sum()


def kernels(program: Any) -> set[tuple[int, ...]]:
    """Shapes of what a kernel would compute, in the program and in all it calls."""
    found: set[tuple[int, ...]] = set()
    for equation in program.eqns:
        if equation.params.get("name") in gated.IN_ONE:
            found.add(equation.outvars[0].aval.shape)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                found |= kernels(value)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_sampling_goes_through_it(name: str) -> None:
    config = CONFIGS[name]
    params = weights(config)
    wanted = jax.jit(sampling(config))(params)
    with gated.standing_in():
        program = jax.make_jaxpr(sampling(config))(params)
        found = jax.jit(sampling(config))(params)
    # Adapters of the VLM's feed-forward are applied one by one, those of the expert are added to its weights before.
    vlm, candidates = (3, 18, 32), (3, 2, 3, 20)
    assert kernels(program.jaxpr) - {(3, 1, 1, 20)} == ({candidates} if name == "lora" else {vlm, candidates})
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "names", "full"])
def test_gradients_do_not(remat: Any) -> None:
    config = replace(CONFIGS["pi0"], remat=remat)
    params = weights(config)
    wanted = jax.jit(jax.grad(loss(config)))(params)
    with gated.standing_in():
        assert kernels(jax.make_jaxpr(loss(config))(params).jaxpr)
        program = jax.make_jaxpr(jax.grad(loss(config)))(params)
        found = jax.jit(jax.grad(loss(config)))(params)
    assert not kernels(program.jaxpr)
    for path, leaf in flatten(wanted).items():
        np.testing.assert_allclose(flatten(found)[path], leaf, rtol=2e-4, atol=1e-5, err_msg=path)


def test_what_a_backward_pass_reads_is_kept_under_its_names() -> None:
    x, gate, up = (normal(n, *s).astype(jnp.float32) for n, s in enumerate([(6, 4), (4, 8), (4, 8)]))

    def loss(*given: jax.Array) -> jax.Array:
        return gated.product(*given).sum()

    keep = jax.checkpoint_policies.save_only_these_names("gate", "up")
    with gated.standing_in():
        program = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=keep), argnums=(0, 1, 2)))(x, gate, up)
    # Two products forward, four backward, none again.
    assert str(program).count("dot_general") == 6


def test_a_plan_sees_one_array_of_it() -> None:
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((PROBE, 64), (64, 512), (64, 512), (512, 1))]

    def needed(function: Any) -> float:
        return max(load.per_sample for load in step_loads(lambda x, g, u, w: function(x, g, u) @ w, *shapes))

    with gated.standing_in():
        assert needed(gated.product) == pytest.approx(2 * (512 + 1))
        read_from_memory = needed(lambda x, *weights: gated.product(x + 1, *weights))
        assert read_from_memory == pytest.approx(2 * (512 + 64))
    assert needed(gated.plain) == pytest.approx(2 * 3 * 512, rel=0.01)


def test_its_operations_are_counted() -> None:
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 3, 64), (64, 512), (64, 512))]
    with gated.standing_in():
        assert count_flops(gated.product, *given) == count_flops(gated.plain, *given) == 2 * 2 * 6 * 64 * 512
        assert count_flops(gated.product, given[0], given[1]) == 2 * 2 * 6 * 64 * 256


def test_standing_in_ends() -> None:
    with gated.standing_in():
        assert gated.possible(HALF)
    assert not gated.possible(HALF)
