"""Letterboxing and augmentation against OpenPI's preprocess_observation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden_data import FAMILIES
from pirl.models.observation import Observation
from pirl.models.preprocess import prepare
from pirl.names import CAMERAS

WITH_PICTURES = [family for family in FAMILIES.values() if family.has("preprocess.npz")]
PIXEL = dict(rtol=0, atol=2e-5)


@pytest.fixture(params=WITH_PICTURES, ids=lambda family: family.root.name)
def golden(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    return request.param.arrays("preprocess")


def prepared(golden: dict[str, np.ndarray], size: int, key: jax.Array | None = None) -> Observation:
    images = {name: jnp.asarray(golden[f"in_uint8/{name}"]) for name in CAMERAS}
    observation = Observation(images=images, image_masks={}, state=jnp.zeros((1, 4)))
    return prepare(observation, size=size, cameras=CAMERAS, key=key)


def test_letterbox(golden: dict[str, np.ndarray]):
    large, small = prepared(golden, 224), prepared(golden, 56)
    for name in CAMERAS:
        np.testing.assert_allclose(large.images[name][:, ::7, ::7], golden[f"out224_every7/{name}"], **PIXEL)
        np.testing.assert_allclose(large.images[name].mean((2, 3)), golden[f"out224_rowmean/{name}"], **PIXEL)
        np.testing.assert_allclose(small.images[name], golden[f"out56/{name}"], **PIXEL)
        np.testing.assert_array_equal(large.image_masks[name], golden[f"out_mask/{name}"])


def test_augmentation(golden: dict[str, np.ndarray]):
    """The same key gives the same crop, rotation and colours; a resampled pixel may differ by rounding."""
    key = jax.random.wrap_key_data(jnp.asarray(golden["augment_rng_key_data"]))
    augmented = prepared(golden, 56, key)
    plain = prepared(golden, 56)
    for name in CAMERAS:
        np.testing.assert_allclose(augmented.images[name], golden[f"out56_augmented/{name}"], rtol=0, atol=2e-4)
        assert np.abs(augmented.images[name] - plain.images[name]).max() > 0.05
