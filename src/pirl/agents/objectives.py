"""The mathematics of offline chunk RL, one free function per formula, in the papers' symbols.

    y   = Σ_{l<L} γ^l r_l + γ^L · mask · V(s_{t+L})    target of the chunk critic   (Q-chunking, arXiv 2507.07969)
    a*  = argmax_n Q(s, a^n),  a^n ~ π(·|s)            best of N                    (Q-chunking)
    w   = min(exp(A/β), cap),  A = Q(s, a) - V(s)      weight in the flow loss      (AWR, arXiv 1910.00177)
    A_k = r_k - mean_{j≠k} r_j                         advantage within a group     (RLOO, RIPT)

Losses come back per sample: what counts, and how it is averaged, is the caller's to say (`masked_mean`).
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf, logsumexp
from jaxtyping import Array, Bool, Float, Int

from pirl.errors import ConfigError
from pirl.models.critic_config import Aggregation, LossKind
from pirl.models.params import Params

Scalar = float | Float[Array, ""]
"""A setting, or a value on the device that an algorithm adapts."""


# Targets


def value_range(
    reward_min: float, reward_max: float, discount: float, limit: int | None = None, *, once: bool = False
) -> tuple[float, float]:
    """The discounted returns that rewards in [reward_min, reward_max] allow.

    An episode has at least one step and may end at any; what comes after its end is worth nothing. `limit` is the
    number of steps at which it ends for sure: leave it out where targets bootstrap through a time limit, for then
    values look beyond it. `once` is for sparse rewards: one step of an episode at most pays anything.
    """
    if reward_min > reward_max:
        raise ConfigError(f"the smallest reward, {reward_min}, is above the largest, {reward_max}")
    if not 0 <= discount <= 1:
        raise ConfigError(f"the discount is {discount}", hint="it is between 0 and 1, such as 0.99")
    if limit is not None and limit < 1:
        raise ConfigError(f"episodes of at most {limit} steps", hint="an episode has at least one step")
    if once:
        low, high = min(reward_min, 0.0), max(reward_max, 0.0)
    else:
        steps = _discounted_steps(discount, limit)
        low, high = min(reward_min, reward_min * steps), max(reward_max, reward_max * steps)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(
            f"rewards in [{reward_min}, {reward_max}] at discount {discount} give returns in [{low}, {high}]",
            hint="a critic needs a finite range with some width: check the rewards, or give a limit for discount 1",
        )
    return float(low), float(high)


def _discounted_steps(discount: float, limit: int | None) -> float:
    """Σ_{l<limit} γ^l."""
    if discount == 1:
        return math.inf if limit is None else float(limit)
    return (1.0 if limit is None else 1 - discount**limit) / (1 - discount)


def td_target(
    reward_sum: Float[Array, "B"],
    discount: Scalar,
    length: Int[Array, "B"],
    mask: Float[Array, "B"],
    next_value: Float[Array, "*E B"],
    low: Scalar = -math.inf,
    high: Scalar = math.inf,
) -> Float[Array, "*E B"]:
    """y = Σ_{l<L} γ^l r_l + γ^L · mask · V(s_{t+L}), clipped to the possible; no gradient (Q-chunking).

    The sum is given; L is per sample, since a chunk may end early. `mask` is 0 where the episode terminated.
    """
    target = reward_sum + jnp.power(jnp.float32(discount), length) * mask * next_value
    return jax.lax.stop_gradient(jnp.clip(target, low, high))


def known_return(mc_return: Float[Array, "B"], otherwise: Float[Array, "*E B"]) -> Float[Array, "*E B"]:
    """The observed return as a target; where it is unknown (NaN), the other one."""
    return jnp.where(jnp.isnan(mc_return), otherwise, mc_return)


def aggregate(q: Float[Array, "E *rest"], how: Aggregation = "mean", key: Array | None = None) -> Float[Array, "*rest"]:
    """One value out of an ensemble's: the mean (Q-chunking), the lowest (TD3), or the lower of two random members.

    REDQ (arXiv 2101.05982) draws the two once per target, the same for the whole batch.
    """
    if how == "mean":
        return q.mean(0)
    if how == "min":
        return q.min(0)
    if key is None or len(q) < 2:
        raise ConfigError(
            f"random_pair with {'no key' if key is None else f'{len(q)} critic'}",
            hint="it draws two of the ensemble's members: give a key and at least two critics",
        )
    return q[jax.random.choice(key, len(q), (2,), replace=False)].min(0)


# Losses of the critic


@dataclass(frozen=True)
class HLGauss:
    """Returns as histograms, p_i = Φ((z_{i+1} - y)/σ) - Φ((z_i - y)/σ) (HL-Gauss, "Stop regressing", arXiv 2403.03950).

    A target becomes a Gaussian around it, integrated over bins. The bins reach four standard deviations beyond
    [low, high]: cut off at the ends, where "already solved" and "never solved" lie, the Gaussian of an end would have
    its mean 0.8 standard deviations inside. Like this the mean of a projection is the target, at the ends as well.
    """

    low: float
    high: float
    bins: int = 101
    sigma_ratio: float = 0.75
    """Standard deviation of the Gaussian, in bins."""

    def __post_init__(self) -> None:
        if not (self.low < self.high and self.sigma_ratio > 0):
            raise ConfigError(f"HL-Gauss on [{self.low}, {self.high}] with a spread of {self.sigma_ratio} bins")
        if self.bins <= 2 * self.margin:
            raise ConfigError(
                f"{self.bins} bins with a spread of {self.sigma_ratio} bins leave none for [{self.low}, {self.high}]",
                hint=f"{self.margin} bins lie beyond each end: use many more than {2 * self.margin}",
            )

    @property
    def margin(self) -> int:
        """Bins beyond each end."""
        return math.ceil(4 * self.sigma_ratio)

    @property
    def width(self) -> float:
        """Width of a bin."""
        return (self.high - self.low) / (self.bins - 2 * self.margin)

    def project(self, y: Float[Array, "*shape"]) -> Float[Array, "*shape bins"]:
        """The histogram of a target; targets outside [low, high] count as the nearer end."""
        # In units of bins from the lowest edge, where float32 is equally fine for any range.
        position = (jnp.clip(y, self.low, self.high) - self.low) / self.width + self.margin
        z = (jnp.arange(self.bins + 1) - position[..., None]) / (self.sigma_ratio * math.sqrt(2))
        # Far from the target, rounding can make a difference of two equal numbers negative.
        mass = jnp.maximum(jnp.diff(erf(z), axis=-1), 0.0)
        return mass / mass.sum(-1, keepdims=True)

    def value(self, logits: Float[Array, "*shape bins"]) -> Float[Array, "*shape"]:
        """The mean of a predicted histogram."""
        positions = jnp.arange(self.bins) + 0.5 - self.margin
        return self.low + self.width * (jax.nn.softmax(logits) * positions).sum(-1)

    def loss(self, logits: Float[Array, "*shape bins"], y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Cross-entropy against the target's histogram. Its floor is that histogram's entropy (1.20 at 0.75), not 0."""
        return -(self.project(y) * jax.nn.log_softmax(logits)).sum(-1)


def mse(pred: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """(pred - y)², before the mean (Q-chunking)."""
    return jnp.square(pred - y)


def huber(pred: Float[Array, "*shape"], y: Float[Array, "*shape"], delta: float = 1.0) -> Float[Array, "*shape"]:
    """½e² for |e| ≤ δ, else δ(|e| - ½δ)."""
    error = jnp.abs(pred - y)
    inner = jnp.minimum(error, delta)
    return 0.5 * jnp.square(inner) + delta * (error - inner)


def critic_value(kind: LossKind, out: Float[Array, "..."], support: HLGauss | None = None) -> Float[Array, "..."]:
    """Values out of a critic's outputs, whatever it predicts: the last axis is gone if it was one of bins."""
    return _support(support).value(out) if kind == "hl_gauss" else out


def critic_loss(
    kind: LossKind,
    out: Float[Array, "E B *bins"],
    y: Float[Array, "*#E B"],
    *,
    support: HLGauss | None = None,
    delta: float = 1.0,
) -> Float[Array, "E B"]:
    """Each member's loss on each sample. `support` is for hl_gauss, `delta` for huber."""
    targets = jnp.broadcast_to(y, out.shape[:2])
    if kind == "hl_gauss":
        return _support(support).loss(out, targets)
    return mse(out, targets) if kind == "mse" else huber(out, targets, delta)


def _support(support: HLGauss | None) -> HLGauss:
    if support is None:
        raise ConfigError("hl_gauss without its support", hint="give the range of returns: HLGauss(*value_range(...))")
    return support


def expectile_weights(error: Float[Array, "*shape"], tau: float) -> Float[Array, "*shape"]:
    """|τ - 1[u < 0]| for u = y - v: so weighted, v learns the τ-expectile of y, not its mean (IQL, arXiv 2110.06169).

    With the squared error it is IQL's loss. With cross-entropy to histograms the mean of the best histogram is the
    expectile as well: both have Σ w · (y - v) = 0 at their optimum.
    """
    return jax.lax.stop_gradient(jnp.where(error < 0, 1 - tau, tau))


def calql_penalty(
    q_candidates: Float[Array, "E B N"],
    q_data: Float[Array, "E B"],
    mc_return: Float[Array, "B"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "E B"]:
    """T·log(1/N Σ_n exp(max(Q(s, a^n), G)/T)) - Q(s, a): Cal-QL (arXiv 2303.05479) on the policy's chunks.

    CQL's regulariser pushes down what the policy might pick and up what the data hold. Cal-QL stops pushing at the
    data's own return G, below which no policy worth having is: values stay on the scale of returns, and what is
    learned offline is not unlearned online. Where the return is unknown (NaN) the push has no floor: plain CQL. A high
    temperature approaches the mean over candidates, a low one their maximum. (Best of N on samples of a cloned policy
    hardly leaves the data: this is for actors that do.)
    """
    floor = jnp.where(jnp.isnan(mc_return), -jnp.inf, mc_return)[:, None]
    floored_q = jnp.maximum(q_candidates, floor) / temperature
    return temperature * (logsumexp(floored_q, axis=-1) - math.log(q_candidates.shape[-1])) - q_data


# Best of N


def select_best(values: Float[Array, "B N"]) -> Int[Array, "B"]:
    """argmax_n Q(s, a^n); the first of equals."""
    return jnp.argmax(values, axis=-1)


def take_candidate(candidates: Float[Array, "B N H A"], index: Int[Array, "B"]) -> Float[Array, "B H A"]:
    """One candidate of each observation."""
    return jnp.take_along_axis(candidates, index[:, None, None, None], axis=1)[:, 0]


# Weights of the actor's loss


def awr_weights(advantage: Float[Array, "B"], beta: Scalar, cap: float) -> Float[Array, "B"]:
    """w = min(exp(A/β), cap): the best policy within a KL distance, as weights on the data (AWR)."""
    return jax.lax.stop_gradient(jnp.exp(_log_weights(advantage, beta, cap)))


def _log_weights(advantage: Float[Array, "B"], beta: Scalar, cap: float) -> Float[Array, "B"]:
    # The cap comes before the exponential, which overflows.
    return jnp.minimum(advantage / beta, math.log(cap))


def effective_sample_size(weights: Float[Array, "B"], mask: Bool[Array, "B"] | None = None) -> Float[Array, ""]:
    """(Σw)² / (n Σw²): 1 where all count the same, 1/n where one counts alone, 0 where nothing counts."""
    kept = jnp.ones_like(weights) if mask is None else mask.astype(weights.dtype)
    weights = weights * kept
    # It does not depend on the scale, whose square might not be a float32.
    weights = weights / jnp.maximum(weights.max(), jnp.finfo(weights.dtype).tiny)
    return jnp.square(weights.sum()) / jnp.maximum(kept.sum() * jnp.square(weights).sum(), 1.0)


def fit_beta(
    advantage: Float[Array, "B"], target_ess: Scalar, cap: float, mask: Bool[Array, "B"] | None = None
) -> Float[Array, ""]:
    """The β at which AWR's weights have the given effective sample size: how greedy the data let us be.

    It is the largest β at which the size is not above the target, so it grows with the target. The cap is why a grid
    comes before the bisection: it makes good samples equal, so that below some β the size may rise again. Where even
    the greediest weights are more even than asked for, it is the β of the least even ones; equal advantages get a β so
    large that all weights are 1.
    """
    kept = jnp.ones_like(advantage, dtype=bool) if mask is None else mask
    advantage = jnp.where(kept, advantage, 0.0)
    scale = jnp.maximum(jnp.abs(advantage).max(), 1e-6)
    best = jnp.where(kept.any(), jnp.where(kept, advantage, -jnp.inf).max(), 0.0)

    def size(log_beta: Array) -> Array:
        # Relative to the largest weight, so that a common offset of all advantages cannot make all weights vanish.
        log_weights = jnp.where(kept, _log_weights(advantage, jnp.exp(log_beta), cap), -jnp.inf)
        largest = jnp.where(kept.any(), log_weights.max(), 0.0)
        return effective_sample_size(jnp.exp(log_weights - largest), kept)

    # At the upper end weights are equal to four digits; at the lower one the largest is at least e^-30.
    low, high = jnp.log(jnp.maximum(1e-4 * scale, -best / 30)), jnp.log(1e4 * scale)
    grid = jnp.linspace(low, high, 256)
    sizes = jax.vmap(size)(grid)
    reached = sizes <= target_ess
    last = len(grid) - 1 - jnp.argmax(jnp.where(reached.any(), reached, sizes == sizes.min())[::-1])

    def halve(_: Array, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        below, above = bracket
        middle = (below + above) / 2
        enough = size(middle) <= target_ess
        return jnp.where(enough, middle, below), jnp.where(enough, above, middle)

    bracket = grid[last], grid[jnp.minimum(last + 1, len(grid) - 1)]
    log_beta, _ = jax.lax.fori_loop(0, 20, halve, bracket)
    return jnp.exp(jnp.where(reached.any(), log_beta, grid[last]))


def agreement(members: Float[Array, "E B"], *, halved: bool = False) -> Float[Array, ""]:
    """ρ = max(0, 1 - s²/Var_b(mean_e A)),  s² = mean_b Var_e(A)/E: the share of the advantages that is not noise.

    s² is the variance that the mean of E independent members has by itself. Members that only differ by chance give 0,
    members that agree give 1; one member agrees with itself.

    Members that learn from the same episodes are not independent: they agree about the noise of these episodes. Members
    that learn from halves (`agents/ensemble.py`) lie as far from their mean as that lies from the truth: then
    s² = mean_b Var_e(A), without the division.
    """
    count = len(members)
    if count < 2:
        return jnp.ones(())
    noise = (members.var(0) if halved else members.var(0, ddof=1) / count).mean()
    signal = members.mean(0).var()
    return jax.lax.stop_gradient(jnp.clip(1 - noise / jnp.maximum(signal, 1e-12), 0.0, 1.0))


def scaled_by_state(
    advantage: Float[Array, "B"], spread: Float[Array, "B"], typical: Scalar, floor: float = 0.25
) -> Float[Array, "B"]:
    """A · (1 + floor) σ̄ / (σ(s) + floor σ̄): advantages in units of what is at stake in their state.

    σ(s) is the spread of the candidates' values, σ̄ a typical one. With one temperature for all states, early decisions
    that change the value by little are drowned by late ones that change it by much. States in which nothing is at
    stake stay quiet (`floor`); where all states are alike, nothing changes.
    """
    scale = (1 + floor) * typical / jnp.maximum(spread + floor * typical, 1e-12)
    return jax.lax.stop_gradient(advantage * scale)


def floored(weights: Float[Array, "B"], mean_weight: Scalar, floor: Scalar) -> Float[Array, "B"]:
    """floor + (1 - floor) · w / mean(w): AWR plus `floor` times plain cloning, for one forward pass instead of two."""
    return floor + (1 - floor) * weights / jnp.maximum(mean_weight, jnp.finfo(weights.dtype).tiny)


def rloo(returns: Float[Array | np.ndarray, "G K"]) -> Float[Array | np.ndarray, "G K"]:
    """A_k = r_k - mean_{j≠k} r_j over K rollouts of one context (RLOO; RIPT-VLA). Equal returns give zeros."""
    others = returns.shape[1] - 1
    if others < 1:
        raise ConfigError("leave-one-out advantages of groups of one rollout", hint="use at least two per group")
    return returns - (returns.sum(1, keepdims=True) - returns) / others


# Averages


def moving_quantile(
    quantile: Scalar, values: Float[Array, "B"], level: float, rate: float, *, first: Bool[Array, ""] | bool = False
) -> Float[Array, ""]:
    """The quantile of a stream of batches: it moves towards that of the latest one, and starts at the `first` one's.

    NaN counts as the lowest. Where the quantile of a batch is not finite, nothing moves.
    """
    latest = jnp.quantile(jnp.nan_to_num(values, nan=-1e30), level, method="lower")
    moved = jnp.where(first, latest, (1 - rate) * quantile + rate * latest)
    return jax.lax.stop_gradient(jnp.where(latest > -1e29, moved, quantile))


def masked_mean(x: Float[Array, "..."], mask: Float[Array, "..."] | Bool[Array, "..."]) -> Float[Array, ""]:
    """Mean of x where the mask, broadcast to it, is 1; 0 where it is 1 nowhere. What is masked may be NaN.

    Q-chunking divides by the whole batch instead; this one does not weaken the loss where fewer samples count.
    """
    weight = jnp.broadcast_to(mask, x.shape).astype(jnp.float32)
    total = weight.sum()
    return (jnp.where(weight > 0, x, 0.0) * weight).sum() / jnp.where(total > 0, total, 1.0)


def correlation(x: Float[Array, "B"], y: Float[Array, "B"], mask: Float[Array, "B"]) -> Float[Array, ""]:
    """Pearson correlation over the masked samples; 0 where either does not vary."""
    x, y = x - masked_mean(x, mask), jnp.where(mask > 0, y, 0.0)
    y = y - masked_mean(y, mask)
    cov, var_x, var_y = (masked_mean(z, mask) for z in (x * y, x * x, y * y))
    return cov / jnp.sqrt(jnp.maximum(var_x * var_y, 1e-12))


def soft_update(target: Params, online: Params, tau: Scalar) -> Params:
    """target ← (1 - τ)·target + τ·online, in float32: at τ = 0.005 bfloat16 would never move."""
    return jax.tree.map(
        lambda old, new: (1 - tau) * old.astype(jnp.float32) + tau * new.astype(jnp.float32), target, online
    )


def ema_update(average: Params, new: Params, decay: Scalar) -> Params:
    """average ← d·average + (1 - d)·new, as OpenPI. Leaves not in float32 are frozen ones: they are the new ones."""

    def update(old: Array, leaf: Array) -> Array:
        if leaf.dtype != jnp.float32:
            return leaf.astype(old.dtype)
        return decay * old + (1 - decay) * leaf

    return jax.tree.map(update, average, new)
