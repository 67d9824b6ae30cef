"""What is known of each task by itself, in tables of fixed size: tasks of different difficulty do not share a scale.

Tasks are told apart by the batch's `task`. Beyond `SLOTS` of them, some share a row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SLOTS = 256
"""Tasks that have a row of their own."""
RECENT = 512
"""Values of each that are remembered."""


class Recent(NamedTuple):
    """The latest values of each task."""

    values: Float[Array, "T M"]
    """A ring for each task."""
    total: Int[Array, "T"]
    """Values so far."""


def fresh() -> Recent:
    """Nothing yet."""
    return Recent(jnp.zeros((SLOTS, RECENT)), jnp.zeros(SLOTS, jnp.int32))


def quantiles(recent: Recent, task: Int[Array, "B"], level: float) -> Float[Array, "B"]:
    """The quantile of each row's task over its latest values; 0 before there is any."""
    slot = task % SLOTS
    known = jnp.minimum(recent.total[slot], RECENT)
    ordered = jnp.sort(jnp.where(jnp.arange(RECENT) < known[:, None], recent.values[slot], jnp.inf))
    place = (level * jnp.maximum(known - 1, 0)).astype(jnp.int32)
    found = jnp.take_along_axis(ordered, place[:, None], axis=1)[:, 0]
    return jnp.where(known > 0, found, 0.0)


def added(recent: Recent, task: Int[Array, "B"], values: Float[Array, "B"]) -> Recent:
    """With a batch's values; the oldest make room."""
    slot = task % SLOTS
    same = slot[:, None] == slot
    before = jnp.tril(same, -1).sum(1)
    after = jnp.triu(same, 1).sum(1)
    # Of more values than there is room for, the last ones: no place is written twice.
    place = jnp.where(after < RECENT, (recent.total[slot] + before) % RECENT, RECENT)
    return Recent(
        recent.values.at[slot, place].set(values, mode="drop"),
        recent.total.at[slot].add(1),
    )
