"""Per-task statistics in tables of fixed size, so that tasks of different difficulty do not share a scale.

The batch's `task` selects the row, modulo `SLOTS`: with more tasks than that, some share a row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SLOTS = 256
"""Number of rows."""
RECENT = 512
"""Values kept per task."""


class Recent(NamedTuple):
    """The latest values of each task."""

    values: Float[Array, "T M"]
    """One ring buffer per task."""
    total: Int[Array, "T"]
    """Number of values added so far."""


def fresh() -> Recent:
    """Empty tables."""
    return Recent(jnp.zeros((SLOTS, RECENT)), jnp.zeros(SLOTS, jnp.int32))


def quantiles(recent: Recent, task: Int[Array, "B"], level: float) -> Float[Array, "B"]:
    """For each row, the quantile of its task's latest values; 0 before the first value."""
    slot = task % SLOTS
    known = jnp.minimum(recent.total[slot], RECENT)
    ordered = jnp.sort(jnp.where(jnp.arange(RECENT) < known[:, None], recent.values[slot], jnp.inf))
    place = (level * jnp.maximum(known - 1, 0)).astype(jnp.int32)
    found = jnp.take_along_axis(ordered, place[:, None], axis=1)[:, 0]
    return jnp.where(known > 0, found, 0.0)


def added(recent: Recent, task: Int[Array, "B"], values: Float[Array, "B"]) -> Recent:
    """Append a batch's values, overwriting the oldest ones."""
    slot = task % SLOTS
    same = slot[:, None] == slot
    before = jnp.tril(same, -1).sum(1)
    after = jnp.triu(same, 1).sum(1)
    # If one task has more than RECENT values in the batch, keep its last ones, so that no index is written twice.
    place = jnp.where(after < RECENT, (recent.total[slot] + before) % RECENT, RECENT)
    return Recent(
        recent.values.at[slot, place].set(values, mode="drop"),
        recent.total.at[slot].add(1),
    )
