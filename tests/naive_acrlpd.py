"""One ACRLPD update in NumPy: float64, gradients by finite differences; shares no code with pirl's agents.

The policy is an MLPFlow, the critic an MLPCritic, both optimizers are plain gradient descent.
"""

from dataclasses import dataclass
from math import erf, exp, log, sqrt
from typing import Any

import numpy as np

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the update; names as in the configs."""

    actor: str
    loss: str
    aggregation: str
    value: str
    expectile: float
    partial: int | None
    discount: float
    low: float
    high: float
    real_dims: int
    critic_horizon: int
    critic_state_dim: int
    flow_steps: int
    critic_updates: int
    tau: float
    target_ess: float
    weight_cap: float
    bc_loss_weight: float
    warmup: int
    mc: bool
    shares: bool
    heed_agreement: bool
    scale_by_state: bool
    calql_weight: float
    bins: int
    sigma_ratio: float
    huber_delta: float
    action_clip: float
    policy_rate: float
    critic_rate: float
    policy_decay: float
    critic_decay: float
    correction_weight: float | None = None


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The random numbers of the step."""

    noise: np.ndarray
    time: np.ndarray
    here: np.ndarray
    there: np.ndarray
    pairs: np.ndarray


# Networks


def gelu(x):
    return 0.5 * x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def velocity(policy: Tree, state, x, t):
    """dx/dt of one noisy chunk [H, A] per state; all three may have leading axes."""
    h = np.concatenate([state, x.reshape(*x.shape[:-2], -1), t[..., None]], axis=-1)
    for i in range(len(policy)):
        h = h @ policy[f"dense_{i}"]["kernel"] + policy[f"dense_{i}"]["bias"]
        if i < len(policy) - 1:
            h = gelu(h)
    return h.reshape(x.shape)


def sample(policy: Tree, state, noise, steps: int):
    """From noise at t = 1 to a chunk at t = 0, one per state."""
    x = noise
    for i in range(steps):
        x = x - velocity(policy, state, x, np.full(x.shape[:-2], 1 - i / steps)) / steps
    return x


def outputs(s: Settings, critic: Tree, state, chunk, steps: int | None = None):
    """Each member's outputs for one chunk per state, or its first steps: [E, ...] or [E, ..., bins]."""
    looks = s.critic_horizon if steps is None else steps
    chunk = np.clip(chunk[..., :looks, : s.real_dims], -s.action_clip, s.action_clip)
    eyes = critic["layer_0"]["state"]
    critic = critic if steps is None else critic[f"first_{steps}"]
    found = []
    for member in range(len(critic["head"]["bias"])):
        h, i = np.concatenate([state[..., : s.critic_state_dim], chunk.reshape(*chunk.shape[:-2], -1)], axis=-1), 0
        while f"layer_{i}" in critic:
            layer = {name: x[member] for name, x in critic[f"layer_{i}"].items()}
            first = [eyes[member]] + ([layer["action"]] if "action" in layer else [])
            matrix = np.concatenate(first) if i == 0 else layer["hidden"]
            h = gelu(h @ matrix + layer["bias"])
            h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-6)
            h, i = h * layer["scale"] + layer["offset"], i + 1
        found.append(h @ critic["head"]["kernel"][member] + critic["head"]["bias"][member])
    return np.array(found) if s.loss == "hl_gauss" else np.array(found)[..., 0]


def margin(s: Settings) -> int:
    return int(np.ceil(4 * s.sigma_ratio))


def edges(s: Settings):
    width = (s.high - s.low) / (s.bins - 2 * margin(s))
    return s.low + width * (np.arange(s.bins + 1) - margin(s)), width


def members(s: Settings, critic: Tree, state, chunk, steps: int | None = None):
    """Each member's value of one chunk per state, or of its first steps: [E, ...]."""
    out = outputs(s, critic, state, chunk, steps)
    if s.loss != "hl_gauss":
        return out
    borders, _ = edges(s)
    p = np.exp(out - out.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ ((borders[1:] + borders[:-1]) / 2)


def error(s: Settings, out, y):
    """Each member's loss on each sample: [E, B]."""
    if s.loss == "mse":
        return (out - y) ** 2
    if s.loss == "huber":
        e, d = np.abs(out - y), s.huber_delta
        return np.where(e <= d, e**2 / 2, d * (e - d / 2))
    borders, width = edges(s)
    cdf = np.array([[0.5 * (1 + erf((b - one) / (s.sigma_ratio * width * sqrt(2)))) for b in borders] for one in y])
    p = np.diff(cdf) / (cdf[:, -1:] - cdf[:, :1])
    shifted = out - out.max(-1, keepdims=True)
    return -(p * (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))).sum(-1)


# Gradients


def gradient(loss, tree: Tree, step: float = 1e-5) -> Tree:
    """Central differences, element by element."""
    moved = copied(tree)

    def of(node: Tree) -> Tree:
        out: Tree = {}
        for name, leaf in node.items():
            if isinstance(leaf, dict):
                out[name] = of(leaf)
                continue
            out[name] = np.empty_like(leaf)
            for index in np.ndindex(leaf.shape):
                before = leaf[index]
                leaf[index] = before + step
                up = loss(moved)
                leaf[index] = before - step
                out[name][index] = (up - loss(moved)) / (2 * step)
                leaf[index] = before
        return out

    return of(moved)


def mapped(function, tree: Tree, *others: Tree) -> Tree:
    return {
        name: mapped(function, leaf, *(o[name] for o in others))
        if isinstance(leaf, dict)
        else function(leaf, *(o[name] for o in others))
        for name, leaf in tree.items()
    }


def copied(tree: Tree) -> Tree:
    return mapped(np.copy, tree)


def norm(tree: Tree) -> float:
    return sqrt(sum(norm(x) ** 2 if isinstance(x, dict) else (x**2).sum() for x in tree.values()))


# The step


def of_data_rows(rows: Tree):
    return rows["observations"]["state"], rows["critic_actions"]


def target(s: Settings, online: Tree, slow: Tree, candidates, batch: Tree, pair, info: Tree):
    y = []
    for b in range(len(batch["length"])):
        state = batch["next_observations"]["state"][b]
        if s.value == "expectile":
            value = members(s, online, state, np.zeros((s.critic_horizon, s.real_dims)), 0).mean()
        else:
            chosen = [members(s, online, state, chunk, s.partial).mean() for chunk in candidates[b]]
            valued = [members(s, slow, state, chunk, s.partial) for chunk in candidates[b]]
            info["disagree"] |= int(np.argmax(chosen)) != int(np.argmax([v.mean() for v in valued]))
            value = together(s, valued[int(np.argmax(chosen))], pair)
            info["gain"].append(max(chosen) - np.mean(chosen))
        ahead = 0.0 if batch["next_terminal"][b] else s.discount ** int(batch["length"][b]) * value
        raw = batch["reward_sum"][b] + ahead
        info["clipped"].append(not s.low <= raw <= s.high)
        y.append(min(max(raw, s.low), s.high))
    return np.array(y)


def together(s: Settings, values, pair):
    """Aggregate an ensemble over axis 0."""
    return {"mean": values.mean(0), "min": values.min(0), "random_pair": values[pair].min(0)}[s.aggregation]


def heads(s: Settings, critic: Tree, slow: Tree, batch: Tree, pair) -> dict:
    """Steps of each head -> (targets [B], expectile weights [E, B])."""
    state, chunk, found, looks = batch["observations"]["state"], batch["critic_actions"], {}, None
    for steps in ([s.partial] if s.partial else []) + ([0] if s.value == "expectile" else []):
        higher = together(s, members(s, slow, state, chunk, looks), pair)
        below = members(s, critic, state, chunk, steps)
        found[steps] = higher, np.where(below > higher, 1 - s.expectile, s.expectile)
        looks = steps
    return found


def critic_loss(s: Settings, critic: Tree, candidates, batch: Tree, y, heads: dict):
    """(loss without Cal-QL, Cal-QL's penalty, loss of each head): means over members and unmasked samples."""
    counted = batch["sequence_mask"] > 0
    state, chunk = batch["observations"]["state"][counted], batch["critic_actions"][counted]
    loss, penalty = error(s, outputs(s, critic, state, chunk), y[counted]).mean(), 0.0
    more = {
        steps: (weights[:, counted] * error(s, outputs(s, critic, state, chunk, steps), higher[counted])).mean()
        for steps, (higher, weights) in heads.items()
    }
    if s.calql_weight:
        floor = np.where(np.isnan(batch["mc_return"]), -np.inf, batch["mc_return"])[counted]
        pushed = [
            np.maximum(members(s, critic, state, candidates[counted, n]), floor) for n in range(len(candidates[0]))
        ]
        penalty = (np.log(np.exp(pushed).mean(0)) - members(s, critic, state, chunk)).mean()
    return loss, penalty, more


def flow_losses(s: Settings, policy: Tree, state, chunks, valid, noise, times):
    """Flow loss per sample: mean over draws, valid steps and real dimensions."""
    per_step = np.zeros(valid.shape)
    for d in range(times.shape[1]):
        eps, t = noise[:, d], times[:, d, None, None]
        v = velocity(policy, state, t * eps + (1 - t) * chunks, times[:, d])
        per_step += ((v - (eps - chunks)) ** 2)[..., : s.real_dims].mean(-1) / times.shape[1]
    return np.array([row[counts > 0].sum() / max(counts.sum(), 1) for row, counts in zip(per_step, valid, strict=True)])


def fitted_beta(advantage, target_ess: float, cap: float) -> float:
    """The largest β with an effective sample size of at most the target: a fine scan, then bisection."""

    def size(beta: float) -> float:
        w = np.minimum(np.exp(np.minimum(advantage / beta, 50.0)), cap)
        return w.sum() ** 2 / (len(w) * (w**2).sum())

    scan = np.exp(np.linspace(log(1e-3), log(1e4), 4000))
    below = max(i for i, beta in enumerate(scan) if size(beta) <= target_ess)
    low, high = scan[below], scan[below + 1]
    for _ in range(60):
        low, high = ((low + high) / 2, high) if size((low + high) / 2) <= target_ess else (low, (low + high) / 2)
    return low


def update(s: Settings, state: Tree, batch: Tree, draws: Draws) -> tuple[Tree, Tree, Tree]:
    """(new state, metrics, facts on covered cases). State: step, policy, critic, their ema_, target_, scalars."""
    info: Tree = {"disagree": False, "clipped": [], "critic_losses": []}
    size, here = len(batch["actions"]), batch["observations"]["state"]
    policy, critic = state["policy"], state["critic"]
    # Candidates at s come from the policy itself, at s' from its average; for distillation both from the fixed one.
    at_s, ahead = (state["fixed"],) * 2 if s.actor == "distill" else (policy, state["ema_policy"])
    there = batch["next_observations"]["state"]
    candidates, successors = (
        np.stack([sample(policy, state, noise[:, n], s.flow_steps) for n in range(noise.shape[1])], axis=1)
        for policy, state, noise in ((at_s, here, draws.here), (ahead, there, draws.there))
    )

    # The actor
    by_member = members(s, critic, here, batch["critic_actions"], s.partial)
    of_data = by_member.mean(0)
    each = np.array(
        [[members(s, critic, here[b], c, s.partial).reshape(-1) for c in candidates[b]] for b in range(size)]
    )
    of_candidates = each.mean(2)
    learned = s.value == "expectile"
    by_member = by_member - (members(s, critic, here, batch["critic_actions"], 0) if learned else each.mean(1).T)
    compares = s.actor != "best_of_n" or s.calql_weight > 0
    advantage = by_member.mean(0) if compares else np.zeros(size)
    agreed = max(0.0, 1 - np.mean([np.var(a, ddof=1) / len(a) for a in by_member.T]) / np.var(by_member.mean(0)))
    if s.scale_by_state:
        spread = np.array([np.std(values) for values in of_candidates])
        typical = state["spread"]
        advantage = np.array(
            [a * 1.25 * typical / (d + 0.25 * typical) for a, d in zip(advantage, spread, strict=True)]
        )
    raw = np.array([min(exp(a / state["beta"]), s.weight_cap) for a in advantage])
    info["capped"] = raw == s.weight_cap
    warming = state["step"] < s.warmup
    weight = raw
    if s.actor == "awr":
        weight = np.ones(size) if warming else s.bc_loss_weight + (1 - s.bc_loss_weight) * raw / state["mean_weight"]
    best = np.array([candidates[b, np.argmax(of_candidates[b])] for b in range(size)])

    imitable, floor = batch["valid"], np.zeros(size)
    if s.correction_weight is not None:
        persons = batch["acted_by"] == 3
        floor = np.where(persons[:, 0], s.correction_weight, 0.0)
        handed_back = np.maximum.accumulate(~persons, axis=1) & persons[:, :1]
        imitable = np.where(handed_back, 0.0, imitable)

    def losses(policy: Tree, chunks, valid):
        return flow_losses(s, policy, here, chunks, valid, draws.noise, draws.time)

    def actor_loss(policy: Tree) -> float:
        imitation = losses(policy, batch["actions"], imitable)
        if s.actor == "awr":
            return (np.maximum(weight, floor) * imitation).mean()
        if s.actor == "distill" and not warming:
            improved = losses(policy, best, np.ones_like(batch["valid"]))
            share = np.maximum(s.bc_loss_weight, floor)
            return (share * imitation + (1 - s.bc_loss_weight) * improved).mean()
        return (np.maximum(1.0, floor) * imitation).mean()

    policy_gradient = gradient(actor_loss, policy)
    new_policy = mapped(lambda x, g: x - s.policy_rate * g, policy, policy_gradient)

    # The critic
    new_critic, slow = critic, state["target_critic"]
    for k in range(s.critic_updates):
        info["gain"] = []
        own = slice(k, None, s.critic_updates) if s.shares else slice(None)
        rows, of_policy = mapped(lambda x, own=own: x[own], batch), candidates[own]
        y = target(s, new_critic, slow, successors[own], rows, draws.pairs[k], info)
        if s.mc:
            y = np.array([ret if ret == ret else guess for ret, guess in zip(rows["mc_return"], y, strict=True)])

        fixed = heads(s, new_critic, slow, rows, draws.pairs[k])

        def both(critic: Tree, y=y, rows=rows, of_policy=of_policy, fixed=fixed) -> float:
            loss, penalty, more = critic_loss(s, critic, of_policy, rows, y, fixed)
            return loss + s.calql_weight * penalty + sum(more.values())

        loss, penalty, more = critic_loss(s, new_critic, of_policy, rows, y, fixed)
        below = {steps: members(s, new_critic, *of_data_rows(rows), steps).mean() for steps in fixed}
        info["critic_losses"].append(both(new_critic))
        data = members(s, new_critic, *of_data_rows(rows))
        grads = gradient(both, new_critic)
        new_critic = mapped(lambda x, g: x - s.critic_rate * g, new_critic, grads)
        slow = mapped(lambda old, new: (1 - s.tau) * old + s.tau * new, slow, new_critic)

    # Adaptive scalars
    beta, mean_weight = state["beta"], state["mean_weight"]
    imitated = imitable.any(1)
    if compares:
        ess = 1 - (1 - s.target_ess) * agreed if s.heed_agreement else s.target_ess
        fitted = fitted_beta(advantage[imitated], ess, s.weight_cap)
        fitted = np.clip(fitted, 1e-4 * (s.high - s.low), s.high - s.low)
        beta, mean_weight = beta**0.9 * fitted**0.1, 0.9 * mean_weight + 0.1 * raw[imitated].mean()
    known = np.isfinite(batch["mc_return"])
    metrics = {
        "actor/loss": actor_loss(policy),
        "actor/grad_norm": norm(policy_gradient),
        "actor/flow_loss": losses(policy, batch["actions"], imitable).mean(),
        "critic/loss": loss,
        "critic/grad_norm": norm(grads),
        "critic/y": y.mean(),
        "critic/q_mean": data.mean(),
        "critic/q_std": data.std(1).mean(),
        "critic/mc_gap": (of_data - batch["mc_return"])[known].mean(),
        "critic/mc_correlation": np.corrcoef(of_data[known], batch["mc_return"][known])[0, 1],
        "data/valid_fraction": batch["valid"].mean(),
        "data/critic_fraction": batch["sequence_mask"].mean(),
    }
    if not learned:
        metrics["critic/candidate_gain"] = np.mean(info["gain"])
    for steps, name in ((s.partial, "partial"), (0, "value")):
        if steps in more:
            metrics |= {f"critic/{name}_loss": more[steps], f"critic/{name}_mean": below[steps]}
    if s.calql_weight:
        metrics["critic/calql"] = penalty
    if compares:
        metrics["actor/advantage"], metrics["actor/beta"] = advantage.mean(), state["beta"]
        metrics["actor/agreement"] = agreed
        metrics["actor/ess"] = raw[imitated].sum() ** 2 / (imitated.sum() * (raw[imitated] ** 2).sum())
    new = {
        "policy": new_policy,
        "critic": new_critic,
        "target_critic": slow,
        "ema_policy": mapped(
            lambda old, new: s.policy_decay * old + (1 - s.policy_decay) * new, state["ema_policy"], new_policy
        ),
        "ema_critic": mapped(
            lambda old, new: s.critic_decay * old + (1 - s.critic_decay) * new, state["ema_critic"], new_critic
        ),
        "beta": beta,
        "mean_weight": mean_weight,
    }
    if s.scale_by_state:
        new["spread"] = 0.9 * state["spread"] + 0.1 * sqrt((spread**2).mean())
    return new, metrics, info
