"""The mathematics of critic-free RL on a flow policy: rollouts of one initial state, compared with each other.

    A_k   = r_k - mean_{j≠k} r_j                                 advantage in a group   (RLOO; RIPT, arXiv 2505.17016)
    nft   r ‖v⁺ - u‖² + (1 - r) ‖v⁻ - u‖²,  r = (1 + A)/2        both signs, bounded    (DiffusionNFT, 2509.16117)
          v⁺ = (1 - β) v_old + β v,   v⁻ = (1 + β) v_old - β v
    fpo   -min(ρ A, clip(ρ, 1 ± ε) A),  ρ = exp(L_old - L)       PPO on flow losses     (FPO, 2507.21053)
    awr   w L,  w = min(exp(A/β), cap) / mean                    weighted imitation     (AWR, 1910.00177)
    cfg   (1 - p) 1[A > 0] L(conditional) + p L(unconditional)   advantage conditioning (CFGRL, 2505.23458)

L = ‖v(x_t, t) - u‖² is the flow-matching loss of a rollout's chunk, u = ε - a. It bounds the intractable -log π(a|s),
so A · L gives a policy gradient, but only for a single step: for A < 0 it has no minimum. With d = v - v_old and
e = u - v_old, NFT is

    β² ‖d‖² - 2 β A ⟨e, d⟩ + ‖e‖²

which is A · L linearised at v_old plus a quadratic that keeps v near v_old: convex for either sign of A.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pirl.agents import objectives as ob
from pirl.agents.rollout_config import GroupAdvantage, GroupLoss
from pirl.errors import ConfigError, EnvError

# Groups of rollouts, on the host


def accepted(rewards: Float[np.ndarray, "G K"]) -> Bool[np.ndarray, "G"]:
    """Mask of the groups with unequal rewards; in the others all advantages are zero."""
    return rewards.max(1) > rewards.min(1)


def group_advantages(
    rewards: Float[np.ndarray, "G K"], normalise: GroupAdvantage = "rloo", *, limit: float = 3.0
) -> Float[np.ndarray, "G K"]:
    """Advantage of each rollout within its group; zeros for groups with equal rewards.

    `rloo` compares with the mean of the other rollouts: K(1 - p)/(K - 1) for a success and -Kp/(K - 1) for a failure at
    success rate p. `std` subtracts the group's mean and divides by its standard deviation, so that groups of any
    success rate have equal weight, and clips to ±`limit`.
    """
    if not np.isfinite(rewards).all():
        groups = np.flatnonzero(~np.isfinite(rewards).all(1)).tolist()
        raise EnvError(f"rewards of the groups {groups} are not finite", hint="look at the environment's rewards")
    if rewards.shape[1] < 2:
        raise ConfigError(f"groups of {rewards.shape[1]} rollout", hint="a rollout is compared with others: at least 2")
    if normalise == "rloo":
        return np.asarray(ob.rloo(rewards))
    centred = rewards - rewards.mean(1, keepdims=True)
    spread = np.where(accepted(rewards)[:, None], rewards.std(1, keepdims=True), np.inf)
    return np.clip(centred / spread, -limit, limit)


def largest_advantage(size: int, normalise: GroupAdvantage, *, limit: float = 3.0) -> float:
    """The largest |A| in a group of K rollouts with rewards in [0, 1]: one rollout against all others."""
    return 1.0 if normalise == "rloo" else min((size - 1) ** 0.5, limit)


# Losses, on the device


def row_weights(
    loss: GroupLoss,
    advantage: Float[Array, "B"],
    rows: Float[Array, "B"],
    *,
    beta: float,
    cap: float,
    acceptance: ob.Scalar = 1.0,
    largest: float = 1.0,
) -> Float[Array, "B"]:
    """The weight of each row in the loss, from its advantage; `rows` are row weights, 0 for padding.

    NFT divides advantages by `largest` and clips them to ±1.

    `acceptance` is the share of groups with unequal rewards. In NFT, rows of the rejected groups (advantage 0) would
    only regularise the policy. Without them the other rows pull 1/acceptance times as hard, increasingly so as the task
    gets solved; multiplying their advantages by `acceptance` compensates. The other losses have no such term.

    Imitation weights (`awr`, `filter`) are divided by their mean, so that batches with few successes do not learn more
    slowly.
    """
    if loss == "nft":
        return jnp.clip(advantage / largest, -1.0, 1.0) * acceptance
    if loss in ("raw", "fpo"):
        return advantage
    weights = ob.awr_weights(advantage, beta, cap) if loss == "awr" else (advantage > 0).astype(jnp.float32)
    return weights if loss == "cfg" else weights / jnp.maximum(ob.masked_mean(weights, rows), 1e-6)


def nft_loss(
    v: Float[Array, "B N H A"],
    v_old: Float[Array, "B N H A"],
    u: Float[Array, "B N H A"],
    advantage: Float[Array, "B H"],
    beta: float,
) -> Float[Array, "B N H A"]:
    """r (v⁺ - u)² + (1 - r) (v⁻ - u)², elementwise, with advantages in [-1, 1] per step of the chunk.

    For a step with advantage 0, such as one never executed, this is β² (v - v_old)² plus a constant, which keeps v at
    v_old.
    """
    positive, negative = (1 - beta) * v_old + beta * v, (1 + beta) * v_old - beta * v
    r = (advantage[:, None, :, None] + 1) / 2
    return r * jnp.square(positive - u) + (1 - r) * jnp.square(negative - u)


def fpo_loss(
    loss: Float[Array, "B"], loss_old: Float[Array, "B"], advantage: Float[Array, "B"], clip: float
) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """(PPO's clipped loss, ratio ρ = exp(L_old - L)). Both L must be computed at the same flow draws."""
    ratio = jnp.exp(jnp.clip(loss_old - loss, -3.0, 3.0))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage), ratio


def negative_share(weights: Float[Array, "B"], rows: Float[Array, "B"]) -> Float[Array, ""]:
    """Share of the total absolute weight that is negative, i.e. pushes away."""
    return (rows * jnp.maximum(-weights, 0)).sum() / jnp.maximum((rows * jnp.abs(weights)).sum(), 1e-6)
