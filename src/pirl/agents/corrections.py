"""Weights and masks of an actor's loss for data with operator corrections, from the batch's `acted_by`.

A chunk belongs to whoever chose its first action; its steps are that actor's up to the next handover.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pirl.records import AUTONOMOUS, BLAMED, CORRECTED


def begun_by(acted_by: Int[Array, "B H"], actor: int) -> Bool[Array, "B"]:
    """Mask of the chunks whose first action is by `actor`."""
    return acted_by[:, 0] == actor


def until_handover(acted_by: Int[Array, "B H"]) -> Float[Array, "B H"]:
    """1 up to the first handover between policy and operator."""
    by_person = acted_by == CORRECTED
    return jnp.cumprod(by_person == by_person[:, :1], axis=1).astype(jnp.float32)


def imitated_steps(acted_by: Int[Array, "B H"]) -> Float[Array, "B H"]:
    """1 for steps up to the first handover that no takeover is blamed on."""
    return until_handover(acted_by) * (acted_by != BLAMED)


def chunk_weights(acted_by: Int[Array, "B H"], *, correction: float, autonomous: float) -> Float[Array, "B"]:
    """Chunk weights: demonstrations 1, corrections `correction`, the policy's chunks `autonomous`, blamed ones 0."""
    weights = jnp.where(begun_by(acted_by, CORRECTED), correction, 1.0)
    weights = jnp.where(begun_by(acted_by, AUTONOMOUS), autonomous, weights)
    return jnp.where(begun_by(acted_by, BLAMED), 0.0, weights)


def judged(better: Bool[Array, "B"], acted_by: Int[Array, "B H"]) -> Bool[Array, "B"]:
    """`better`, forced to True for an operator's chunks and to False for those that a takeover is blamed on."""
    return (better | begun_by(acted_by, CORRECTED)) & ~begun_by(acted_by, BLAMED)


def raised(weights: Float[Array, "B"], acted_by: Int[Array, "B H"], floor: float) -> Float[Array, "B"]:
    """The weights, raised to at least `floor` for an operator's chunks."""
    return jnp.where(begun_by(acted_by, CORRECTED), jnp.maximum(weights, floor), weights)


def persons_own(valid: Float[Array, "B H"], acted_by: Int[Array, "B H"]) -> Float[Array, "B H"]:
    """`valid`, in an operator's chunks only up to the handover back to the policy."""
    return valid * jnp.where(begun_by(acted_by, CORRECTED)[:, None], until_handover(acted_by), 1.0)
