"""SigLIP's own arithmetic: its norm against NumPy, and projections that the compiler may not join."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.models import siglip
from pirl.models.config import PRESETS
from pirl.models.pi0 import Pi0

WIDTH = 12


def norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_the_norm_and_its_gradient(offset: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(offset, 1.0, (2, 3, WIDTH))
    scale, bias, weight = rng.normal(size=WIDTH), rng.normal(size=WIDTH), rng.normal(size=x.shape)
    params = {"scale": jnp.asarray(scale, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    single = jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(siglip._layer_norm(params, single), norm(x, scale, bias), rtol=0, atol=2e-5)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (siglip._layer_norm(params, x) * weight).sum()

    gradients, of_x = jax.grad(loss, argnums=(0, 1))(params, single)
    # In float64, along each number: (f(x + h) - f(x - h)) / 2h.
    step = 1e-6

    def slope(which: int) -> np.ndarray:
        inputs = [x, scale, bias]
        found = np.zeros_like(inputs[which])
        for index in np.ndindex(found.shape):
            for sign in (1, -1):
                moved = [a.copy() for a in inputs]
                moved[which][index] += sign * step
                found[index] += sign * (norm(*moved) * weight).sum() / (2 * step)
        return found

    for value, which in ((of_x, 0), (gradients["scale"], 1), (gradients["bias"], 2)):
        np.testing.assert_allclose(value, slope(which), rtol=0, atol=2e-4 * (1 + offset))


def test_projections_apart_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a size on they read what the compiler takes for three different arrays."""
    config = replace(PRESETS["pi0_tiny"], dtype="float32", remat="names", attention="plain")
    params = Pi0(config).init(jax.random.key(0))["PaliGemma"]["img"]
    # The last projection is zero when it is new, and would hide all gradients.
    params["head"]["kernel"] = jax.random.normal(jax.random.key(1), params["head"]["kernel"].shape) * 0.1
    images = jax.random.uniform(jax.random.key(2), (2, config.image_size, config.image_size, 3), minval=-1)

    def found() -> tuple[int, Any]:
        def loss(params: Any) -> jax.Array:
            return jnp.square(siglip.encode_images(params, config, images)).mean()

        learn = jax.value_and_grad(loss)
        return str(jax.make_jaxpr(learn)(params)).count("optimization_barrier"), jax.jit(learn)(params)

    before, joined = found()
    monkeypatch.setattr(siglip, "MANY", 0)
    after, apart = found()
    assert after > before
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), joined, apart)
