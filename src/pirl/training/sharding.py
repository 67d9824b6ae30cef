"""Where arrays live: OpenPI's rule for fully sharded parameters."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import DTypeLike

DATA_AXIS, FSDP_AXIS = "batch", "fsdp"
"""Mesh axes, named as in OpenPI; a batch is split over both."""
MIN_SHARDED_BYTES = 4 * 2**20


def fsdp_spec(shape: Sequence[int], dtype: DTypeLike, fsdp: int) -> PartitionSpec:
    """Shard the largest axis that the device count divides; vectors and arrays under 4 MiB are replicated.

    Among equal axes the later one is taken, as OpenPI's reversed argsort does.
    """
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if fsdp == 1 or len(shape) < 2 or nbytes < MIN_SHARDED_BYTES:
        return PartitionSpec()
    for axis in np.argsort(shape, kind="stable")[::-1]:
        if shape[axis] % fsdp == 0:
            return PartitionSpec(*(FSDP_AXIS if i == axis else None for i in range(len(shape))))
    return PartitionSpec()
