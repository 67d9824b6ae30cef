"""The mathematics of offline chunk RL, one free function per formula, in the papers' symbols.

    y   = Σ_{l<L} γ^l r_l + γ^L · mask · V(s_{t+L})    target of the chunk critic   (Q-chunking, arXiv 2507.07969)
    a*  = argmax_n Q(s, a^n),  a^n ~ π(·|s)            best of N                    (Q-chunking)
    w   = min(exp(A/β), cap),  A = Q(s, a) - V(s)      weight in the flow loss      (AWR, arXiv 1910.00177)
    A_k = r_k - mean_{j≠k} r_j                         advantage within a group     (RLOO, RIPT)

Losses are per sample; the caller masks and averages them (`masked_mean`).
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
"""A setting, or a device value that an algorithm adapts."""


# Targets


def value_range(
    reward_min: float, reward_max: float, discount: float, limit: int | None = None, *, once: bool = False
) -> tuple[float, float]:
    """(smallest, largest) discounted return for rewards in [reward_min, reward_max].

    An episode may end after any number of steps from 1 on; the return after its end is 0. `limit`: largest number of
    steps; omit it if targets bootstrap through the time limit, because values then look beyond it. `once`: sparse
    rewards, non-zero in at most one step of an episode.
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
    """y = Σ_{l<L} γ^l r_l + γ^L · mask · V(s_{t+L}), clipped to [low, high]; no gradient (Q-chunking).

    `reward_sum` is the first sum. L is per sample, because a chunk may end early. `mask` is 0 where the episode
    terminated.
    """
    target = reward_sum + jnp.power(jnp.float32(discount), length) * mask * next_value
    return jax.lax.stop_gradient(jnp.clip(target, low, high))


def known_return(mc_return: Float[Array, "B"], otherwise: Float[Array, "*E B"]) -> Float[Array, "*E B"]:
    """The observed return where it is known (not NaN), else `otherwise`."""
    return jnp.where(jnp.isnan(mc_return), otherwise, mc_return)


def aggregate(q: Float[Array, "E *rest"], how: Aggregation = "mean", key: Array | None = None) -> Float[Array, "*rest"]:
    """Aggregate an ensemble: mean (Q-chunking), minimum (TD3), or minimum of two random members (REDQ).

    As in REDQ (arXiv 2101.05982), the pair is drawn once for the whole batch.
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

    A target becomes a Gaussian, integrated over bins. The bins extend four standard deviations beyond [low, high], so
    that a projection's mean equals its target even at the ends. Truncated there, the mean would be 0.8 standard
    deviations off, exactly for "already solved" and "never solved".
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
        """The histogram of a target, clipped to [low, high]."""
        # In units of bins from the lowest edge, so that float32 precision does not depend on the range.
        position = (jnp.clip(y, self.low, self.high) - self.low) / self.width + self.margin
        z = (jnp.arange(self.bins + 1) - position[..., None]) / (self.sigma_ratio * math.sqrt(2))
        # Far from the target, rounding can make differences slightly negative.
        mass = jnp.maximum(jnp.diff(erf(z), axis=-1), 0.0)
        return mass / mass.sum(-1, keepdims=True)

    def value(self, logits: Float[Array, "*shape bins"]) -> Float[Array, "*shape"]:
        """The mean of a predicted histogram."""
        positions = jnp.arange(self.bins) + 0.5 - self.margin
        return self.low + self.width * (jax.nn.softmax(logits) * positions).sum(-1)

    def loss(self, logits: Float[Array, "*shape bins"], y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Cross-entropy with the target's histogram. Its minimum is that histogram's entropy (1.20 at 0.75), not 0."""
        return -(self.project(y) * jax.nn.log_softmax(logits)).sum(-1)


def mse(pred: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """(pred - y)², elementwise (Q-chunking)."""
    return jnp.square(pred - y)


def huber(pred: Float[Array, "*shape"], y: Float[Array, "*shape"], delta: float = 1.0) -> Float[Array, "*shape"]:
    """½e² for |e| ≤ δ, else δ(|e| - ½δ)."""
    error = jnp.abs(pred - y)
    inner = jnp.minimum(error, delta)
    return 0.5 * jnp.square(inner) + delta * (error - inner)


def critic_value(kind: LossKind, out: Float[Array, "..."], support: HLGauss | None = None) -> Float[Array, "..."]:
    """Values from a critic's outputs; for `hl_gauss` the mean over the last axis (bins)."""
    return _support(support).value(out) if kind == "hl_gauss" else out


def critic_loss(
    kind: LossKind,
    out: Float[Array, "E B *bins"],
    y: Float[Array, "*#E B"],
    *,
    support: HLGauss | None = None,
    delta: float = 1.0,
) -> Float[Array, "E B"]:
    """Each member's loss on each sample. `support` is needed for hl_gauss, `delta` for huber."""
    targets = jnp.broadcast_to(y, out.shape[:2])
    if kind == "hl_gauss":
        return _support(support).loss(out, targets)
    return mse(out, targets) if kind == "mse" else huber(out, targets, delta)


def _support(support: HLGauss | None) -> HLGauss:
    if support is None:
        raise ConfigError("hl_gauss without its support", hint="give the range of returns: HLGauss(*value_range(...))")
    return support


def expectile_weights(error: Float[Array, "*shape"], tau: float) -> Float[Array, "*shape"]:
    """|τ - 1[u < 0]| for u = y - v: weights with which v learns the τ-expectile of y (IQL, arXiv 2110.06169).

    With the squared error this is IQL's loss. It also holds for the mean of a histogram trained by cross-entropy: both
    have Σ w · (y - v) = 0 at their optimum.
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

    CQL's regulariser lowers the values of the policy's chunks and raises those of the data. Cal-QL does not lower them
    below the observed return G, so values stay on the scale of returns and online training does not have to unlearn
    the offline values. If the return is unknown (NaN) there is no floor: plain CQL. A high temperature approaches the
    mean over candidates, a low one their maximum. (Best-of-N on samples of a cloned policy hardly leaves the data; this
    is for actors that do.)
    """
    floor = jnp.where(jnp.isnan(mc_return), -jnp.inf, mc_return)[:, None]
    floored_q = jnp.maximum(q_candidates, floor) / temperature
    return temperature * (logsumexp(floored_q, axis=-1) - math.log(q_candidates.shape[-1])) - q_data


# Best of N


def select_best(values: Float[Array, "B N"]) -> Int[Array, "B"]:
    """argmax_n Q(s, a^n); ties go to the first."""
    return jnp.argmax(values, axis=-1)


def take_candidate(candidates: Float[Array, "B N H A"], index: Int[Array, "B"]) -> Float[Array, "B H A"]:
    """The indexed candidate of each observation."""
    return jnp.take_along_axis(candidates, index[:, None, None, None], axis=1)[:, 0]


# Weights of the actor's loss


def awr_weights(advantage: Float[Array, "B"], beta: Scalar, cap: float) -> Float[Array, "B"]:
    """w = min(exp(A/β), cap): weights on the data whose imitation is the KL-constrained optimal policy (AWR)."""
    return jax.lax.stop_gradient(jnp.exp(_log_weights(advantage, beta, cap)))


def _log_weights(advantage: Float[Array, "B"], beta: Scalar, cap: float) -> Float[Array, "B"]:
    # Cap before the exponential, which could overflow.
    return jnp.minimum(advantage / beta, math.log(cap))


def effective_sample_size(weights: Float[Array, "B"], mask: Bool[Array, "B"] | None = None) -> Float[Array, ""]:
    """(Σw)² / (n Σw²), as a share of n: 1 for equal weights, 1/n for a single non-zero one, 0 if all are zero."""
    kept = jnp.ones_like(weights) if mask is None else mask.astype(weights.dtype)
    weights = weights * kept
    # Scale-invariant; normalise so that squares do not overflow or underflow float32.
    weights = weights / jnp.maximum(weights.max(), jnp.finfo(weights.dtype).tiny)
    return jnp.square(weights.sum()) / jnp.maximum(kept.sum() * jnp.square(weights).sum(), 1.0)


def fit_beta(
    advantage: Float[Array, "B"], target_ess: Scalar, cap: float, mask: Bool[Array, "B"] | None = None
) -> Float[Array, ""]:
    """The temperature β at which AWR's weights have the target effective sample size (ESS).

    It is the largest β whose ESS is at most the target. A grid search precedes the bisection because ESS is not
    monotonic: the cap makes good samples equal, so below some β it may rise again. If no β reaches the target, it is
    the β of the smallest ESS; for equal advantages a β so large that all weights are 1.
    """
    kept = jnp.ones_like(advantage, dtype=bool) if mask is None else mask
    advantage = jnp.where(kept, advantage, 0.0)
    scale = jnp.maximum(jnp.abs(advantage).max(), 1e-6)
    best = jnp.where(kept.any(), jnp.where(kept, advantage, -jnp.inf).max(), 0.0)

    def size(log_beta: Array) -> Array:
        # Relative to the largest weight, so that a common offset of the advantages cannot underflow all weights.
        log_weights = jnp.where(kept, _log_weights(advantage, jnp.exp(log_beta), cap), -jnp.inf)
        largest = jnp.where(kept.any(), log_weights.max(), 0.0)
        return effective_sample_size(jnp.exp(log_weights - largest), kept)

    # At the upper end weights agree to four digits; at the lower end the largest weight is at least e^-30.
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
    """ρ = max(0, 1 - s²/Var_b(mean_e A)),  s² = mean_b Var_e(A)/E: the non-noise share of the advantages' variance.

    s² is the sampling variance of the mean of E independent members. Members that differ only by chance give 0, members
    that agree give 1, a single member gives 1.

    Members trained on the same episodes are not independent: they share those episodes' noise. Members trained on
    halves (`agents/ensemble.py`) are as far from their mean as the mean is from the truth: then s² = mean_b Var_e(A),
    without the division.
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
    """A · (1 + floor) σ̄ / (σ(s) + floor σ̄): advantages relative to the spread of values in their state.

    σ(s) is the standard deviation of the candidates' values, σ̄ a typical one. Without it, one temperature lets late
    decisions, which change the value much, drown early ones. `floor` bounds the factor where the spread is small; if
    all states have the typical spread, nothing changes.
    """
    scale = (1 + floor) * typical / jnp.maximum(spread + floor * typical, 1e-12)
    return jax.lax.stop_gradient(advantage * scale)


def floored(weights: Float[Array, "B"], mean_weight: Scalar, floor: Scalar) -> Float[Array, "B"]:
    """floor + (1 - floor) · w / mean(w): AWR mixed with `floor` of plain cloning, in a single forward pass."""
    return floor + (1 - floor) * weights / jnp.maximum(mean_weight, jnp.finfo(weights.dtype).tiny)


def rloo(returns: Float[Array | np.ndarray, "G K"]) -> Float[Array | np.ndarray, "G K"]:
    """A_k = r_k - mean_{j≠k} r_j over K rollouts of one context (RLOO; RIPT-VLA). Equal returns give zeros."""
    others = returns.shape[1] - 1
    if others < 1:
        raise ConfigError("leave-one-out advantages of groups of one rollout", hint="use at least two per group")
    return returns - (returns.sum(1, keepdims=True) - returns) / others


# Running statistics and masked means


def moving_quantile(
    quantile: Scalar, values: Float[Array, "B"], level: float, rate: float, *, first: Bool[Array, ""] | bool = False
) -> Float[Array, ""]:
    """A running quantile over batches: the `first` batch's quantile, then moved towards each batch's by `rate`.

    NaN counts as the lowest value. A batch whose quantile is not finite changes nothing.
    """
    latest = jnp.quantile(jnp.nan_to_num(values, nan=-1e30), level, method="lower")
    moved = jnp.where(first, latest, (1 - rate) * quantile + rate * latest)
    return jax.lax.stop_gradient(jnp.where(latest > -1e29, moved, quantile))


def masked_mean(x: Float[Array, "..."], mask: Float[Array, "..."] | Bool[Array, "..."]) -> Float[Array, ""]:
    """Mean of x weighted by the mask, which is broadcast to x; 0 for an empty mask. Masked entries may be NaN.

    Q-chunking divides by the batch size instead, which weakens the loss when fewer samples count.
    """
    weight = jnp.broadcast_to(mask, x.shape).astype(jnp.float32)
    total = weight.sum()
    return (jnp.where(weight > 0, x, 0.0) * weight).sum() / jnp.where(total > 0, total, 1.0)


def correlation(x: Float[Array, "B"], y: Float[Array, "B"], mask: Float[Array, "B"]) -> Float[Array, ""]:
    """Pearson correlation over samples with mask 1; 0 if x or y is constant."""
    x, y = x - masked_mean(x, mask), jnp.where(mask > 0, y, 0.0)
    y = y - masked_mean(y, mask)
    cov, var_x, var_y = (masked_mean(z, mask) for z in (x * y, x * x, y * y))
    return cov / jnp.sqrt(jnp.maximum(var_x * var_y, 1e-12))


def soft_update(target: Params, online: Params, tau: Scalar) -> Params:
    """target ← (1 - τ)·target + τ·online, in float32: with τ = 0.005, bfloat16 would round every change away."""
    return jax.tree.map(
        lambda old, new: (1 - tau) * old.astype(jnp.float32) + tau * new.astype(jnp.float32), target, online
    )


def ema_update(average: Params, new: Params, decay: Scalar) -> Params:
    """average ← d·average + (1 - d)·new, as in OpenPI. Leaves that are not float32 are frozen and copied from `new`."""

    def update(old: Array, leaf: Array) -> Array:
        if leaf.dtype != jnp.float32:
            return leaf.astype(old.dtype)
        return decay * old + (1 - decay) * leaf

    return jax.tree.map(update, average, new)
