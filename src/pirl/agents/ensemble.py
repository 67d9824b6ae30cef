"""Which critic of an ensemble trains on which episode.

Members that learn from the same episodes find the same patterns, also where outcomes are noise: on outcomes dealt at
random to 300 episodes they agreed on 95 % of the advantages. Members that learn from halves of the episodes disagree by
what chance did to the halves, which is about what it did to the whole (the half-sample bootstrap).

A member that did not learn from an episode values it without having seen how it ended (`unseen`).
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int


def learns(episode: Int[Array, "B"], members: int, folds: int) -> Bool[Array, "E B"]:
    """Which members of an ensemble learn from a row: all but one of every `folds` neighbours; with one fold, all.

    Each such group deals out the episodes anew, at random and by their numbers alone.
    """
    if folds == 1:
        return jnp.ones((members, len(episode)), bool)

    def fold(group: Array) -> Int[Array, "B"]:
        key = jax.random.fold_in(jax.random.key(0), group)
        drawn = jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number)))(episode)
        return (drawn * folds).astype(jnp.int32)

    left_out = (jnp.arange(members) + 1) % folds
    return jax.vmap(fold)(jnp.arange(members) // folds) != left_out[:, None]


def halves(episode: Int[Array, "B"], members: int) -> Bool[Array, "E B"]:
    """Which members of an ensemble learn from a row: a random half of all episodes each, neighbours the two halves."""
    return learns(episode, members, 2)


def unseen(values: Float[Array, "E B"], episode: Int[Array, "B"], folds: int) -> Float[Array, "B"]:
    """Each row's value by the members that do not learn from its episode; with one fold, by all."""
    if folds == 1:
        return values.mean(0)
    blind = ~learns(episode, len(values), folds)
    return jnp.where(blind, values, 0.0).sum(0) / blind.sum(0)


def apart(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer for each member by itself: clipped together, one's gradient would depend on what others saw."""
    return optax.GradientTransformation(jax.vmap(tx.init), jax.vmap(tx.update))
