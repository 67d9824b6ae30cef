"""Pictures that come without letterbox rows give what letterboxed ones give."""

import jax.numpy as jnp
import numpy as np

from pirl.models.observation import Observation
from pirl.models.preprocess import prepare

CAMERA = ("base_0_rgb",)


def observe(image: np.ndarray) -> Observation:
    return Observation(images={CAMERA[0]: jnp.asarray(image)}, image_masks={}, state=jnp.zeros((len(image), 2)))


def test_black_bars_may_be_left_out():
    content = np.random.default_rng(0).integers(0, 256, (2, 18, 24, 3), np.uint8)
    boxed = np.zeros((2, 24, 24, 3), np.uint8)
    boxed[:, 3:21] = content
    ours, full = (prepare(observe(x), size=24, cameras=CAMERA).images[CAMERA[0]] for x in (content, boxed))
    np.testing.assert_array_equal(ours, full)


def test_an_odd_remainder_goes_below():
    boxed = prepare(observe(np.full((1, 5, 8, 3), 255, np.uint8)), size=8, cameras=CAMERA).images[CAMERA[0]]
    np.testing.assert_array_equal(np.asarray(boxed[0, :, 0, 0]), [-1, 1, 1, 1, 1, 1, -1, -1])


def test_preparing_twice_is_harmless():
    once = prepare(observe(np.random.default_rng(1).integers(0, 256, (1, 9, 8, 3), np.uint8)), size=8, cameras=CAMERA)
    twice = prepare(once, size=8, cameras=CAMERA)
    np.testing.assert_array_equal(once.images[CAMERA[0]], twice.images[CAMERA[0]])
