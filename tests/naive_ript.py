"""One RIPT update in NumPy: float64, sample by sample, finite differences; shares no code with pirl's agents.

The policy is an MLPFlow, the optimizer plain gradient descent.
"""

from dataclasses import dataclass
from math import exp
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from naive_acrlpd import gradient, mapped, norm, velocity

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the update; names as in the config."""

    loss: str
    real_dims: int
    nft_beta: float
    awr_beta: float
    weight_cap: float
    fpo_clip: float
    condition_dropout: float
    bc_weight: float
    rate: float
    decay: float | None


# Groups


def advantages(rewards: list[list[float]], how: str, limit: float) -> list[list[float]]:
    found = []
    for group in rewards:
        row = []
        for k, reward in enumerate(group):
            if how == "rloo":
                row.append(reward - fmean(group[:k] + group[k + 1 :]))
            else:
                spread = pstdev(group)
                row.append(
                    0.0 if max(group) == min(group) else min(max((reward - fmean(group)) / spread, -limit), limit)
                )
        found.append(row)
    return found


# Losses of one number


def nft(v: float, old: float, u: float, advantage: float, beta: float) -> float:
    """The two branches, as in the paper."""
    r = advantage / 2 + 1 / 2
    positive = (1 - beta) * old + beta * v
    negative = (1 + beta) * old - beta * v
    return r * (positive - u) ** 2 + (1 - r) * (negative - u) ** 2


def nft_as_trust_region(v: float, old: float, u: float, advantage: float, beta: float) -> float:
    """`nft`, expanded around v_old."""
    d, e = v - old, u - old
    return beta**2 * d**2 - 2 * beta * advantage * e * d + e**2


def fpo(loss: float, old: float, advantage: float, clip: float) -> tuple[float, float]:
    ratio = exp(min(max(old - loss, -3.0), 3.0))
    return max(-ratio * advantage, -min(max(ratio, 1 - clip), 1 + clip) * advantage), ratio


def weights(s: Settings, advantage: list[float]) -> list[float]:
    """The loss weight of each advantage; no padding."""
    if s.loss == "nft":
        return [min(max(a, -1.0), 1.0) for a in advantage]
    if s.loss in ("raw", "fpo"):
        return list(advantage)
    if s.loss == "awr":
        raw = [min(exp(a / s.awr_beta), s.weight_cap) for a in advantage]
    else:
        raw = [1.0 if a > 0 else 0.0 for a in advantage]
    mean = fmean(raw) if s.loss in ("awr", "filter") else 1.0
    return [w / mean for w in raw] if mean else raw


# The step


def folded(policy: Tree, condition) -> Tree:
    """The weights with the condition added to the first bias."""
    if condition is None:
        return policy
    first = policy["dense_0"]
    return policy | {"dense_0": first | {"bias": first["bias"] + condition}}


def sample(fields: list[tuple[float, Tree]], state, noise, steps: int):
    """From noise to chunks along a weighted sum of velocity fields."""
    x = noise
    for i in range(steps):
        t = np.full(x.shape[:-2], 1 - i / steps)
        x = x - sum(scale * velocity(weights, state, x, t) for scale, weights in fields) / steps
    return x


def flow_losses(s: Settings, policy: Tree, states, chunks, steps, noise, times):
    """Flow loss per sample: mean over draws, counted steps and real dimensions."""
    found = np.zeros(len(chunks))
    for b, chunk in enumerate(chunks):
        for eps, t in zip(noise[b], times[b], strict=True):
            v = velocity(policy, states[b], t * eps + (1 - t) * chunk, t)
            found[b] += ((v - (eps - chunk)) ** 2)[steps[b] > 0, : s.real_dims].mean() / len(times[b])
    return found


def nft_losses(s: Settings, policy: Tree, old: Tree, batch: Tree, rows, noise, times):
    found = []
    for b, chunk in enumerate(batch["actions"]):
        values = []
        for eps, t in zip(noise[b], times[b], strict=True):
            x = t * eps + (1 - t) * chunk
            v, v_old = (velocity(p, batch["observations"]["state"][b], x, t) for p in (policy, old))
            for step in range(len(chunk)):
                a = rows[b] if batch["executed"][b, step] else 0.0
                values += [
                    nft(v[step, i], v_old[step, i], (eps - chunk)[step, i], a, s.nft_beta) for i in range(s.real_dims)
                ]
        found.append(fmean(values))
    return np.array(found)


def update(s: Settings, state: Tree, batch: Tree, draws: Tree) -> tuple[Tree, Tree]:
    """(new state, metrics). State: policy, old; with `cfg` also condition, old_condition; EMAs as ema_... ."""
    counted = batch["weight"] > 0
    batch = {name: batch[name][counted] for name in ("actions", "executed", "advantage")} | {
        "observations": {"state": batch["observations"]["state"][counted]},
        "demos": batch["demos"],
    }
    noise, times = draws["noise"][counted], draws["time"][counted]
    states, rows = batch["observations"]["state"], np.array(weights(s, batch["advantage"].tolist()))
    old = folded(state["old"], state.get("old_condition"))

    def plain(policy: Tree):
        return flow_losses(s, policy, states, batch["actions"], batch["executed"], noise, times)

    def of_rows(groups: Tree):
        acting = folded(groups["policy"], groups.get("condition"))
        if s.loss == "nft":
            return nft_losses(s, acting, old, batch, rows, noise, times)
        if s.loss == "fpo":
            pairs = zip(plain(acting), plain(old), rows, strict=True)
            return np.array([fpo(new, before, a, s.fpo_clip)[0] for new, before, a in pairs])
        if s.loss == "cfg":
            p = s.condition_dropout
            return (1 - p) * rows * plain(acting) + p * plain(groups["policy"])
        return rows * plain(acting)

    def of_demos(groups: Tree):
        demos, acting = batch["demos"], folded(groups["policy"], groups.get("condition"))
        given = (demos["observations"]["state"], demos["actions"], demos["valid"])
        return flow_losses(s, acting, *given, draws["demo_noise"], draws["demo_time"])

    def total(groups: Tree) -> float:
        return of_rows(groups).mean() + (s.bc_weight * of_demos(groups).mean() if s.bc_weight else 0.0)

    groups = {name: state[name] for name in ("policy", "condition") if name in state}
    acting = folded(groups["policy"], groups.get("condition"))
    grads = gradient(total, groups)
    moved = mapped(lambda x, g: x - s.rate * g, groups, grads)
    distances = [
        (velocity(acting, states[b], x, t) - velocity(old, states[b], x, t))[:, : s.real_dims] ** 2
        for b, chunk in enumerate(batch["actions"])
        for eps, t in zip(noise[b], times[b], strict=True)
        for x in [t * eps + (1 - t) * chunk]
    ]
    metrics = {
        "ript/loss": of_rows(groups).mean(),
        "ript/flow_loss": plain(acting).mean(),
        "ript/drift": np.mean(distances),
        "ript/grad_norm": norm(grads),
        "ript/negative_share": -rows[rows < 0].sum() / np.abs(rows).sum(),
        "ript/rows": counted.sum(),
    }
    if s.loss in ("awr", "filter"):
        metrics["ript/ess"] = rows.sum() ** 2 / (len(rows) * (rows**2).sum())
    if s.loss == "fpo":
        ratios = [fpo(a, b, 1.0, s.fpo_clip)[1] for a, b in zip(plain(acting), plain(old), strict=True)]
        metrics["ript/ratio"] = fmean(ratios)
        metrics["ript/ratio_clipped"] = fmean(float(abs(r - 1) > s.fpo_clip) for r in ratios)
    if s.bc_weight:
        metrics["bc/loss"] = of_demos(groups).mean()
    if s.decay is None:
        return moved, metrics
    averages = {
        f"ema_{name}": mapped(lambda a, x: s.decay * a + (1 - s.decay) * x, {"": state[f"ema_{name}"]}, {"": new})[""]
        for name, new in moved.items()
    }
    return moved | averages, metrics
