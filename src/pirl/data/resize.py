"""Resizing images to the model's size: the same arithmetic for datasets and observations, pixel-equal to OpenPI's."""

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image

from pirl.records import Array


def content_size(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image inside a letterbox of `size`, rounded exactly as in OpenPI."""
    ratio = max(width / size[1], height / size[0])
    return int(height / ratio), int(width / ratio)


def resize_exact(image: UInt8[Array, "h w 3"], size: tuple[int, int]) -> UInt8[Array, "h2 w2 3"]:
    """Resize with PIL's bilinear filter, as OpenPI's data pipeline does."""
    if image.shape[:2] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))


def fit(image: UInt8[Array, "h w 3"], size: tuple[int, int]) -> UInt8[Array, "h2 w2 3"]:
    """Resize the image to fit into `size`, keeping its aspect ratio."""
    return resize_exact(image, content_size(image.shape[0], image.shape[1], size))


def pad(image: Shaped[Array, "*B h w 3"], size: tuple[int, int]) -> Shaped[Array, "*B h2 w2 3"]:
    """Centre the image, which must fit, on black."""
    height, width = image.shape[-3:-1]
    if (height, width) == size:
        return image
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    out = np.zeros((*image.shape[:-3], *size, 3), image.dtype)
    out[..., top : top + height, left : left + width, :] = image
    return out


def letterbox(image: UInt8[Array, "h w 3"], size: tuple[int, int]) -> UInt8[Array, "h2 w2 3"]:
    """Resize the image to fit and centre it on black."""
    return pad(fit(image, size), size)
