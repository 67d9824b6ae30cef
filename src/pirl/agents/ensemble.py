"""Assigns episodes to the critics of an ensemble.

Members trained on the same episodes agree even on noise: with outcomes dealt at random to 300 episodes they agreed on
95 % of the advantages. Members trained on different halves of the episodes disagree by the sampling error of a half,
which estimates the error of the whole (the half-sample bootstrap).

`unseen` values an episode by the members that were not trained on it, so they do not know its outcome.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int


def learns(episode: Int[Array, "B"], members: int, folds: int) -> Bool[Array, "E B"]:
    """Which members learn from each row: all but one of every `folds` consecutive members; with one fold, all.

    Each group of `folds` members splits the episodes independently, at random but as a function of `episode` alone.
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
    """Which members learn from each row: each a random half of the episodes; pairs of members have complements."""
    return learns(episode, members, 2)


def unseen(values: Float[Array, "E B"], episode: Int[Array, "B"], folds: int) -> Float[Array, "B"]:
    """Each row's mean value over the members that do not learn from its episode; with one fold, over all."""
    if folds == 1:
        return values.mean(0)
    blind = ~learns(episode, len(values), folds)
    return jnp.where(blind, values, 0.0).sum(0) / blind.sum(0)


def apart(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer applied per member: clipping jointly would make a member's update depend on other folds' data."""
    return optax.GradientTransformation(jax.vmap(tx.init), jax.vmap(tx.update))
