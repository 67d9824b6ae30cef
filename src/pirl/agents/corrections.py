"""How corrections weight an actor's loss, from the batch's `acted_by` alone.

A chunk belongs to whoever chose its first action, and is theirs until the robot changes hands.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pirl.records import AUTONOMOUS, BLAMED, CORRECTED


def begun_by(acted_by: Int[Array, "B H"], actor: int) -> Bool[Array, "B"]:
    """Which chunks are of this actor."""
    return acted_by[:, 0] == actor


def until_handover(acted_by: Int[Array, "B H"]) -> Float[Array, "B H"]:
    """1 until the robot changes hands, from a policy to a person or back."""
    by_person = acted_by == CORRECTED
    return jnp.cumprod(by_person == by_person[:, :1], axis=1).astype(jnp.float32)


def imitated_steps(acted_by: Int[Array, "B H"]) -> Float[Array, "B H"]:
    """1 for the steps that a chunk's own actor chose and that no takeover is blamed on."""
    return until_handover(acted_by) * (acted_by != BLAMED)


def chunk_weights(acted_by: Int[Array, "B H"], *, correction: float, autonomous: float) -> Float[Array, "B"]:
    """Weight of each chunk: demonstrations 1, corrections and the policy's own chunks as given, blamed ones 0."""
    weights = jnp.where(begun_by(acted_by, CORRECTED), correction, 1.0)
    weights = jnp.where(begun_by(acted_by, AUTONOMOUS), autonomous, weights)
    return jnp.where(begun_by(acted_by, BLAMED), 0.0, weights)


def judged(better: Bool[Array, "B"], acted_by: Int[Array, "B H"]) -> Bool[Array, "B"]:
    """Which chunks are better than usual: a person's always are, those that a takeover is blamed on never."""
    return (better | begun_by(acted_by, CORRECTED)) & ~begun_by(acted_by, BLAMED)


def raised(weights: Float[Array, "B"], acted_by: Int[Array, "B H"], floor: float) -> Float[Array, "B"]:
    """The weights, those of a person's chunks no smaller than `floor`."""
    return jnp.where(begun_by(acted_by, CORRECTED), jnp.maximum(weights, floor), weights)


def persons_own(valid: Float[Array, "B H"], acted_by: Int[Array, "B H"]) -> Float[Array, "B H"]:
    """`valid`, in a person's chunks only until they hand the robot back."""
    return valid * jnp.where(begun_by(acted_by, CORRECTED)[:, None], until_handover(acted_by), 1.0)
