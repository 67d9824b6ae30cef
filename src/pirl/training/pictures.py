"""Saves the first batch's camera images as one picture, so that a wrong camera mapping is visible."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

MAX_SAMPLES = 8


def save_camera_grid(observations: Any, path: Path) -> bool:
    """Save a grid: one column per sample, one row per camera. Returns False (no file) without images."""
    images = observations.get("image", {})
    rows = []
    for name in images:
        # This host holds only its shards of the batch.
        shard = images[name].addressable_shards[0].data if isinstance(images[name], jax.Array) else images[name]
        rows.append(np.concatenate(list(np.asarray(shard)[:MAX_SAMPLES]), axis=1))
    if not rows:
        return False
    width = max(row.shape[1] for row in rows)
    grid = np.concatenate([np.pad(row, ((0, 2), (0, width - row.shape[1]), (0, 0))) for row in rows])
    Image.fromarray(grid).save(path)
    return True
