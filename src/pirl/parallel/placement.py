"""Sharding of activations over several devices: each device keeps its samples.

With FSDP, weights are sharded over the same devices as the batch. By default the compiler then often shards activations
like the weights, and gathers the whole batch on every device to do so. Training declares the batch's sharding
(`batch_on`), and the models repeat it at block boundaries (`by_sample`), so that only weights and gradients are
communicated. Outside that context these are no-ops; results are the same either way.
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
    """While tracing inside this context, `by_sample` shards batches along their first axis by `sharding`."""
    token = _batch.set(sharding)
    try:
        yield
    finally:
        _batch.reset(token)


def everywhere(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The array replicated on every device: for weights that a loop reads in every iteration, gathered before it."""
    sharding = _batch.get()
    return x if sharding is None else jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, PartitionSpec()))


def by_sample(x: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """The array sharded by sample; unchanged if the samples do not divide evenly among the devices."""
    sharding = _batch.get()
    if sharding is None or len(x) % sharding.mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, sharding)
