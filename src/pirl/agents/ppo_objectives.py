"""The mathematics of PPO over plans; a plan is one action of L environment steps.

R_i = Σ_{l<L} γ^l r_l                                              reward of a plan
δ_i = R_i + γ^L V(s_{i+1}) - V(s_i)
A_i = δ_i + γ^L λ A_{i+1}                                          GAE (arXiv 1506.02438)
-min(ρ A, clip(ρ, 1 ± ε) A),   ρ = π(path) / π_old(path)           PPO (arXiv 1707.06347)
max(ℓ(V, G), ℓ(V_old + clip(V - V_old, ±c), G)),   G = A + V_old   value
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pirl.agents import objectives as ob
from pirl.models.critic_config import LossKind

# On the host


def plan_rewards(
    rewards: Float[np.ndarray, "T"], starts: Int[np.ndarray, "k"], discount: float
) -> tuple[Float[np.ndarray, "k"], Int[np.ndarray, "k"]]:
    """(discounted reward R_i, executed steps L) of each plan."""
    lengths = np.diff(np.append(starts, len(rewards)))
    ages = np.arange(len(rewards)) - np.repeat(starts, lengths)
    return np.add.reduceat(rewards.astype(np.float64) * discount**ages, starts), lengths


def gae(
    rewards: Float[np.ndarray, "k"],
    values: Float[np.ndarray, "k"],
    after: float,
    lengths: Int[np.ndarray, "k"],
    discount: float,
    trace: float,
) -> Float[np.ndarray, "k"]:
    """GAE advantages of an episode's plans. `after`: value after the last plan, 0 if the task ended."""
    found, ahead, following = np.zeros(len(rewards)), 0.0, after
    for i in reversed(range(len(rewards))):
        factor = discount ** int(lengths[i])
        ahead = rewards[i] + factor * following - values[i] + factor * trace * ahead
        found[i], following = ahead, float(values[i])
    return found


def standardised(advantages: Sequence[Float[np.ndarray, "_"]]) -> list[Float[np.ndarray, "_"]]:
    """Advantages standardised over all plans; zeros if they are all equal."""
    if not advantages:
        return []
    flat = np.concatenate(advantages)
    return [(one - flat.mean()) / max(float(flat.std()), 1e-8) for one in advantages]


# On the device


def clipped_surrogate(
    log_ratio: Float[Array, "B"], advantage: Float[Array, "B"], clip: float
) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """(loss, ρ). The log ratio is clipped to ±20, far beyond any clip range."""
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage), ratio


def value_loss(
    kind: LossKind,
    out: Float[Array, "E B *bins"],
    target: Float[Array, "B"],
    before: Float[Array, "B"],
    *,
    clip: float | None,
    support: ob.HLGauss | None,
    delta: float,
) -> Float[Array, "E B"]:
    """Each member's loss. With regression, a value further than `clip` from the rollout's gets no gradient to move
    further. Histograms are not clipped: their targets are bounded.
    """
    plain = ob.critic_loss(kind, out, target, support=support, delta=delta)
    if kind == "hl_gauss" or clip is None:
        return plain
    near = before + jnp.clip(out - before, -clip, clip)
    return jnp.maximum(plain, ob.critic_loss(kind, near, target, support=support, delta=delta))


def explained_variance(
    value: Float[Array, "B"], target: Float[Array, "B"], share: Float[Array, "B"]
) -> Float[Array, ""]:
    """1 - Var(G - V) / Var(G), weighted by `share`: 1 is perfect, 0 no better than a constant."""

    def variance(x: Array) -> Array:
        mean = ob.masked_mean(x, share)
        return ob.masked_mean(jnp.square(x - mean), share)

    return 1 - variance(target - value) / jnp.maximum(variance(target), 1e-8)
