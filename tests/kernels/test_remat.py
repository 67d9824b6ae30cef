"""A loop over stacked layers is the layers one after the other: results, gradients, what is frozen or left out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.kernels.remat import At, kept, over_layers
from pirl.models.config import Remat

LAYERS, ROWS, WIDTH = 4, 3, 8
FLOAT, HALF = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def stacked() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "two": jnp.asarray(rng.normal(0, 0.4, (LAYERS, 2, WIDTH, WIDTH)), jnp.float32),
        "scale": jnp.asarray(rng.normal(0, 0.4, (LAYERS, WIDTH)), jnp.float32),
        "frozen": jnp.asarray(rng.normal(0, 0.4, (LAYERS, WIDTH, WIDTH)), jnp.bfloat16),
    }


def start() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def apart(layers: Any, at: At) -> Any:
    return jax.tree.map(at, layers) | {"two": [at(layers["two"], 0), at(layers["two"], 1)]}


def block(x: jax.Array, w: Any, number: Any) -> tuple[jax.Array, jax.Array]:
    first, second = w["two"]
    h = kept(x @ first.astype(x.dtype), "up") * jax.nn.gelu(x @ second.astype(x.dtype))
    x = x + (h * (1 + w["scale"])).astype(x.dtype) @ w["frozen"].astype(x.dtype) + number
    return x, x.sum()


def loss(layers: Any, x: jax.Array, count: int, remat: Remat, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    x, outs = over_layers(block, x.astype(dtype), layers, jnp.arange(count, dtype=dtype), remat, dtype, view=apart)
    return jnp.square(x.astype(jnp.float32)).mean(), outs


def by_hand(layers: Any, x: jax.Array, count: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    x, outs = x.astype(dtype), []
    for i in range(count):
        layer = jax.tree.map(lambda w, i=i: w[i], layers)
        x, out = block(x, layer, jnp.asarray(i, dtype))
        outs.append(out)
    return jnp.square(x.astype(jnp.float32)).mean(), jnp.stack(outs)


def trained(layers: Any) -> Any:
    return {name: w for name, w in layers.items() if name != "frozen"}


@pytest.mark.parametrize("count", [LAYERS, LAYERS - 1])
@pytest.mark.parametrize("remat", ["none", "names", "full"])
def test_results_and_gradients(remat: Remat, count: int) -> None:
    layers, x = stacked(), start()
    frozen = {"frozen": layers["frozen"]}
    learn = jax.grad(lambda w, x: loss(w | frozen, x, count, remat, FLOAT), argnums=(0, 1), has_aux=True)
    expect = jax.grad(lambda w, x: by_hand(w | frozen, x, count, FLOAT), argnums=(0, 1), has_aux=True)
    (found, found_x), outs = jax.jit(learn)(trained(layers), x)
    (expected, expected_x), expected_outs = jax.jit(expect)(trained(layers), x)
    np.testing.assert_allclose(outs, expected_outs, rtol=1e-5)
    np.testing.assert_allclose(found_x, expected_x, rtol=1e-4, atol=1e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        assert np.any(found[name][:count])
        assert not np.any(found[name][count:])


def test_gradients_of_matrices_are_as_exact_as_products() -> None:
    """In bfloat16 what comes back for a matrix is rounded to it, and what comes back for a vector is not."""
    layers, x = stacked(), start()
    frozen = {"frozen": layers["frozen"]}
    found = jax.jit(jax.grad(lambda w: loss(w | frozen, x, LAYERS, "names", HALF)[0]))(trained(layers))
    exact = jax.jit(jax.grad(lambda w: by_hand(w | frozen, x, LAYERS, FLOAT)[0]))(trained(layers))
    rounded = {name: np.array_equal(g, g.astype(jnp.bfloat16).astype(jnp.float32)) for name, g in found.items()}
    assert rounded == {"two": True, "scale": False}
    for name, value in exact.items():
        assert found[name].dtype == jnp.float32
        assert np.abs(found[name] - value).max() < 0.05 * np.abs(value).max()


def test_layers_in_a_list() -> None:
    layers, x, count = stacked(), start(), LAYERS - 1
    separate = [apart(layers, lambda w, *i, n=n: w[(n, *i)]) for n in range(LAYERS)]
    found = over_layers(block, x, separate, jnp.arange(count), "none", FLOAT)
    expected = over_layers(block, x, layers, jnp.arange(count), "none", FLOAT, view=apart)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
