"""From camera images to SigLIP's input, on the device: scale, letterbox, augment. Same result as OpenPI's."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pirl.errors import ConfigError
from pirl.models.observation import AnyArray, Observation

CROP = 0.95
MAX_ROTATION = 5.0
BRIGHTNESS, CONTRAST, SATURATION = 0.3, 0.4, 0.5


@jax.named_scope("pictures")
def prepare(observation: Observation, *, size: int, cameras: Sequence[str], key: Array | None = None) -> Observation:
    """Images as float32 in [-1, 1] at the model's size, in the model's camera order, each with a mask.

    A key augments them as in OpenPI's training. Without a key this is idempotent: float images of the right size pass
    unchanged.
    """
    unknown = sorted(set(observation.images) - set(cameras))
    if unknown:
        raise ConfigError(
            f"the observation has cameras {unknown} that the model does not know",
            hint=f"map the robot's cameras to the model's slots: {', '.join(cameras)}",
        )
    images: dict[str, AnyArray] = {}
    masks: dict[str, AnyArray] = {}
    for name in cameras:
        if name not in observation.images:
            continue
        image = letterbox(to_float(jnp.asarray(observation.images[name])), size)
        if key is not None:
            image = augment(key, image, geometric="wrist" not in name)
        images[name] = image
        mask = observation.image_masks.get(name)
        masks[name] = jnp.ones(image.shape[0], bool) if mask is None else jnp.asarray(mask)
    return replace(observation, images=images, image_masks=masks)


def to_float(image: UInt8[Array, "B h w 3"] | Float[Array, "B h w 3"]) -> Float[Array, "B h w 3"]:
    """uint8 0..255 to float32 in [-1, 1]; float images keep their values."""
    if image.dtype == jnp.uint8:
        return image.astype(jnp.float32) / 255.0 * 2.0 - 1.0
    return image.astype(jnp.float32)


def letterbox(image: Float[Array, "B h w 3"], size: int) -> Float[Array, "B size size 3"]:
    """Resize to fit the square, keeping the aspect ratio; pad with black (-1)."""
    height, width = image.shape[1:3]
    if (height, width) == (size, size):
        return image
    ratio = max(width / size, height / size)
    inner_height, inner_width = int(height / ratio), int(width / ratio)
    if (inner_height, inner_width) != (height, width):
        shape = (image.shape[0], inner_height, inner_width, image.shape[3])
        image = jnp.clip(jax.image.resize(image, shape, method="linear"), -1.0, 1.0)
    top, left = (size - inner_height) // 2, (size - inner_width) // 2
    padding = ((0, 0), (top, size - inner_height - top), (left, size - inner_width - left), (0, 0))
    return jnp.pad(image, padding, constant_values=-1.0)


def augment(key: Array, image: Float[Array, "B h w 3"], *, geometric: bool) -> Float[Array, "B h w 3"]:
    """Random crop and rotation (`geometric`; not for wrist cameras), then colour jitter; one draw per sample.

    `prepare` passes the same key for every camera, so a sample's wrist cameras get the same jitter; the base camera's
    differs, because its chain of transforms is longer.
    """
    import augmax  # only training needs it

    height, width = image.shape[1:3]
    transforms: list = []
    if geometric:
        transforms += [
            augmax.RandomCrop(int(width * CROP), int(height * CROP)),
            augmax.Resize(width, height),
            augmax.Rotate((-MAX_ROTATION, MAX_ROTATION)),
        ]
    transforms.append(augmax.ColorJitter(brightness=BRIGHTNESS, contrast=CONTRAST, saturation=SATURATION))
    keys = jax.random.split(key, image.shape[0])
    return jax.vmap(augmax.Chain(*transforms))(keys, image / 2.0 + 0.5) * 2.0 - 1.0
