"""Sharding of activations on several devices: each device keeps its samples.

Weights may be split over the same devices as the batch (FSDP). Left to itself the compiler then often splits an
activation by the weights it meets, and gathers the whole batch on every device to do so. `train` says where the batch
lies (`batch_on`), and the models repeat it at the borders of their blocks (`by_sample`): what travels is then weights
and gradients alone. Outside that context these are no-ops; the numbers are the same either way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

_batch: ContextVar[NamedSharding | None] = ContextVar("batch", default=None)


@contextmanager
def batch_on(sharding: NamedSharding) -> Iterator[None]:
    """While a program is traced inside: batches are split along their first axis as `sharding` says."""
    token = _batch.set(sharding)
    try:
        yield
    finally:
        _batch.reset(token)


def everywhere(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The same array, whole on every device: for weights that a loop reads in every turn, gathered before it."""
    sharding = _batch.get()
    return x if sharding is None else jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, PartitionSpec()))


def by_sample(x: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """The same array, with every device keeping its samples; as it is where the devices cannot share them evenly."""
    sharding = _batch.get()
    if sharding is None or len(x) % sharding.mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, sharding)
