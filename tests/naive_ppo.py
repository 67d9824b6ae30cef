"""One FlowPPO update in NumPy: float64, row by row, finite differences; shares no code with pirl's agents.

The policy is an MLPFlow, the critic an MLPCritic, all optimizers are plain gradient descent. The step of Flow-SDE is in
πRL's form: weights of the two end points that the velocity points from and to.
"""

from dataclasses import dataclass
from math import cos, exp, log, pi, sin, sqrt
from statistics import fmean
from typing import Any

import numpy as np

import naive_acrlpd as q
from naive_acrlpd import gelu, gradient, mapped, norm, velocity

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the update; names as in the config."""

    exploration: str
    noise_level: float
    noise_low: float
    noise_high: float
    entropy_weight: float
    clip: float
    reduce: str
    bc_weight: float
    flow_steps: int
    real_dims: int
    head_state_dim: int
    value_clip: float
    rate: float
    critic_rate: float
    critic: q.Settings


def std_of_head(s: Settings, head: Tree, state, x, t: float):
    """Bounded standard deviations of one noisy chunk."""
    hidden = state[: s.head_state_dim] @ head["state"] + head["bias"] + x.ravel() @ head["chunk"]
    hidden = hidden + np.array([t, sin(pi * t), cos(pi * t)]) @ head["time"]
    out = gelu(hidden) @ head["out"]["kernel"] + head["out"]["bias"]
    share = (np.tanh(out) + 1) / 2
    return np.exp(log(s.noise_low) + share * (log(s.noise_high) - log(s.noise_low))).reshape(x.shape)


def step(s: Settings, groups: Tree, state, x, number: int):
    """(mean, standard deviations) of one step of one path."""
    delta = 1 / s.flow_steps
    t = 1 - number * delta
    v = velocity(groups["policy"], state, x, np.array(t))
    data, noise = x - t * v, x + (1 - t) * v
    if s.exploration == "flow_noise":
        return data * (1 - t + delta) + noise * (t - delta), std_of_head(s, groups["noise"], state, x, t)
    sigma = s.noise_level * sqrt(t / (1 - t if number else delta))
    mean = data * (1 - (t - delta)) + noise * ((t - delta) - sigma**2 * delta / (2 * t))
    return mean, np.full(x.shape, sigma * sqrt(delta))


def reduced(s: Settings, batch: Tree, b: int, found: list) -> float:
    """Reduce over denoising steps, executed steps and real dimensions."""
    numbers = [
        one[h, a] for one in found for h in range(one.shape[0]) if batch["executed"][b, h] for a in range(s.real_dims)
    ]
    return sum(numbers) if s.reduce == "sum" else fmean(numbers)


def log_densities(s: Settings, groups: Tree, batch: Tree, b: int):
    """Elementwise log density of every random step."""
    path, first = batch["notes"]["path"][b], int(batch["notes"]["step"][b])
    found = []
    for i in range(len(path) - 1):
        mean, std = step(s, groups, batch["observations"]["state"][b], path[i], first + i)
        found.append(-((path[i + 1] - mean) ** 2) / (2 * std**2) - np.log(std * sqrt(2 * pi)))
    return found


def divergences(s: Settings, groups: Tree, old: Tree, batch: Tree, b: int):
    """Elementwise KL(old ‖ new) of every random step."""
    path, first = batch["notes"]["path"][b], int(batch["notes"]["step"][b])
    found = []
    for i in range(len(path) - 1):
        state = batch["observations"]["state"][b]
        (m, sd), (mo, sdo) = (step(s, one, state, path[i], first + i) for one in (groups, old))
        found.append(np.log(sd / sdo) + (sdo**2 + (mo - m) ** 2) / (2 * sd**2) - 0.5)
    return found


def surrogate(ratio: float, advantage: float, clip: float) -> float:
    return max(-ratio * advantage, -min(max(ratio, 1 - clip), 1 + clip) * advantage)


def entropies(s: Settings, groups: Tree, batch: Tree, b: int):
    path = batch["notes"]["path"][b]
    stds = [
        std_of_head(s, groups["noise"], batch["observations"]["state"][b], x, 1 - i / s.flow_steps)
        for i, x in enumerate(path[:-1])
    ]
    return fmean((np.log(np.array(stds)) + 0.5 * log(2 * pi * np.e)).ravel().tolist()), np.mean(stds)


def demo_loss(s: Settings, policy: Tree, demos: Tree, noise, time) -> float:
    found = []
    for b, chunk in enumerate(demos["actions"]):
        here = []
        for eps, t in zip(noise[b], time[b], strict=True):
            v = velocity(policy, demos["observations"]["state"][b], t * eps + (1 - t) * chunk, t)
            here.append(((v - (eps - chunk)) ** 2)[demos["valid"][b] > 0, : s.real_dims].mean())
        found.append(fmean(here))
    return fmean(found)


def value_errors(s: Settings, critic: Tree, batch: Tree):
    """Each member's loss on each row: [E, B]."""
    states, target, before = batch["observations"]["state"], batch["return"], batch["notes"]["value"]
    nothing = np.zeros((len(states), s.critic.critic_horizon, s.critic.real_dims))
    out = q.outputs(s.critic, critic, states, nothing)
    plain = q.error(s.critic, out, target)
    if s.critic.loss == "hl_gauss":
        return plain
    near = before + np.clip(out - before, -s.value_clip, s.value_clip)
    return np.maximum(plain, q.error(s.critic, near, target))


def update(s: Settings, state: Tree, batch: Tree, draws: Tree) -> tuple[Tree, Tree]:
    """(new groups, metrics). `state` has policy, noise, critic, and the rollout weights in `old`."""
    old, share = state["old"], batch["weight"] / batch["weight"].mean()
    rows = [b for b in range(len(share)) if share[b] > 0]
    before = {b: log_densities(s, old, batch, b) for b in rows}

    def ratio(groups: Tree, b: int) -> float:
        pairs = zip(log_densities(s, groups, batch, b), before[b], strict=True)
        return exp(reduced(s, batch, b, [new - was for new, was in pairs]))

    def row(groups: Tree, b: int) -> float:
        loss = surrogate(ratio(groups, b), batch["advantage"][b], s.clip)
        if s.exploration == "flow_noise":
            loss -= s.entropy_weight * entropies(s, groups, batch, b)[0]
        return loss

    def of_rows(groups: Tree) -> float:
        return sum(share[b] * row(groups, b) for b in rows) / len(share)

    def total(groups: Tree) -> float:
        demos = demo_loss(s, groups["policy"], batch["demos"], draws["noise"], draws["time"])
        return of_rows(groups) + s.bc_weight * demos

    groups = {name: state[name] for name in ("policy", "noise") if name in state}
    grads = gradient(total, groups)
    new = {
        name: mapped(lambda x, g, rate=s.rate if name == "policy" else s.critic_rate: x - rate * g, groups[name], g)
        for name, g in grads.items()
    }
    ratios = {b: ratio(groups, b) for b in rows}
    kl = {b: reduced(s, batch, b, divergences(s, groups, old, batch, b)) for b in rows}

    def mean(of: dict[int, float]) -> float:
        return sum(share[b] * x for b, x in of.items()) / len(share)

    metrics = {
        "ppo/loss": of_rows(groups),
        "ppo/ratio": mean(ratios),
        "ppo/ratio_clipped": mean({b: float(abs(x - 1) > s.clip) for b, x in ratios.items()}),
        "ppo/kl": mean(kl),
        "ppo/grad_norm": norm(grads),
        "ppo/rows": len(rows),
        "ppo/held": 0.0,
        "bc/loss": demo_loss(s, groups["policy"], batch["demos"], draws["noise"], draws["time"]),
    }
    if s.exploration == "flow_noise":
        found = {b: entropies(s, groups, batch, b) for b in rows}
        metrics["ppo/entropy"] = mean({b: x[0] for b, x in found.items()})
        metrics["ppo/noise"] = mean({b: x[1] for b, x in found.items()})
    if "critic" in state:
        counted = {name: batch[name][rows] for name in ("return",)} | {
            "observations": {"state": batch["observations"]["state"][rows]},
            "notes": {"value": batch["notes"]["value"][rows]},
        }
        weights = share[rows] / len(share)

        def value_loss(critic: Tree) -> float:
            return float((weights * value_errors(s, critic, counted).mean(0)).sum())

        slope = gradient(value_loss, state["critic"])
        new["critic"] = mapped(lambda x, g: x - s.critic_rate * g, state["critic"], slope)
        nothing = np.zeros((len(rows), s.critic.critic_horizon, s.critic.real_dims))
        value = q.members(s.critic, state["critic"], counted["observations"]["state"], nothing).mean(0)
        target = counted["return"]

        def variance(x):
            return (weights * (x - (weights * x).sum()) ** 2).sum()

        metrics |= {
            "value/loss": value_loss(state["critic"]),
            "value/mean": (weights * value).sum(),
            "value/error": (weights * np.abs(value - target)).sum(),
            "value/explained_variance": 1 - variance(target - value) / variance(target),
        }
    return new, metrics


# Advantages


def advantages(rewards: list[float], starts: list[int], values: list[float], after: float, gamma: float, lam: float):
    """GAE as explicit sums: Σ_j Π_{i<=m<j} (γ^L_m λ) δ_j."""
    ends = [*starts[1:], len(rewards)]
    plan_rewards = [sum(gamma**k * rewards[a + k] for k in range(b - a)) for a, b in zip(starts, ends, strict=True)]
    factors = [gamma ** (b - a) for a, b in zip(starts, ends, strict=True)]
    following = [*values[1:], after]
    deltas = [r + f * n - v for r, f, n, v in zip(plan_rewards, factors, following, values, strict=True)]
    found = []
    for i in range(len(starts)):
        total, weight = 0.0, 1.0
        for j in range(i, len(starts)):
            total += weight * deltas[j]
            weight *= factors[j] * lam
        found.append(total)
    return found
