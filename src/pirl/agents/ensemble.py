"""Which critic of an ensemble trains on which episode.

Members that learn from the same episodes find the same patterns, also where outcomes are noise: on outcomes dealt at
random to 300 episodes they agreed on 95 % of the advantages. Members that learn from halves of the episodes disagree by
what chance did to the halves, which is about what it did to the whole (the half-sample bootstrap).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def halves(episode: Int[Array, "B"], members: int) -> Bool[Array, "E B"]:
    """Which members of an ensemble learn from a row: a random half of all episodes each, neighbours the two halves."""

    def first(pair: Array) -> Bool[Array, "B"]:
        key = jax.random.fold_in(jax.random.key(0), pair)
        return jax.vmap(lambda number: jax.random.bernoulli(jax.random.fold_in(key, number)))(episode)

    chosen = jax.vmap(first)(jnp.arange(members) // 2)
    return chosen ^ (jnp.arange(members)[:, None] % 2 == 1)
