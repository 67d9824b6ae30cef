"""Chunks that choose different ways: success with and without real-time chunking where the policy has two modes.

    python benchmarks/real_time_fork.py --out docs/results/real-time-fork.json

A point moves towards a post and passes it on either side. Demonstrations go all the way to one side, chosen by a coin,
and the policy sees its place sideways only with noise, so for most of the way nothing tells it which side it chose. Two
policies of a small π₀ are cloned, one with `agent.real_time_delay`. The ways to bridge the latency are those of
`real_time.py`. All meet the same starts and the same noise.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner
from pirl.models import flow
from pirl.models.config import get_preset
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.rollout.evaluate import Rate

HORIZON, STEPS, MILLISECONDS = 8, 12, 100
"""Of a chunk; from the start to the post; of a control step."""
SPEED, POST, START, UNSURE = 0.07, 0.5, 0.2, 0.5
"""Sideways per step; half the post's width; how far aside a point may start; deviation of what is seen."""
_TINY = get_preset("pi0_tiny")
POLICY = Pi0(
    replace(
        _TINY,
        vlm=replace(_TINY.vlm, depth=2),
        expert=replace(_TINY.expert, depth=2),
        cameras=(),
        action_dim=2,
        horizon=HORIZON,
        max_token_len=2,
    )
)
Sample = Callable[[Any, Any, Any, Any, Any], Any]
"""(what is seen, chunk before, how many of its steps will have been executed, how many it has, key) -> chunks."""


class Row(NamedTuple):
    """One latency, one way."""

    latency_ms: int
    way: str
    success: Rate
    switches: float
    """How often a point changes its side on the way, on average."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--updates", type=int, default=400, help="of each policy's cloning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file with the table")
    args = parser.parse_args()
    rows = []
    print("| latency | way | success (95 %) | changes of side |\n|---|---|---|---|")
    for row in table(args.episodes, args.updates, args.seed):
        rows.append(row)
        low, high = row.success.interval
        rate = f"{row.success.value:.2f} ({low:.2f} to {high:.2f})"
        print(f"| {row.latency_ms} ms | {row.way} | {rate} | {row.switches:.2f} |", flush=True)
    if args.out is not None:
        found = [row._asdict() | {"success": asdict(row.success)} for row in rows]
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def table(episodes: int, updates: int, seed: int) -> Iterator[Row]:
    """Every latency from 0 to 3 steps, every way."""
    plain, delayed = (sampler(cloned(updates, seed, delay), delay) for delay in (0, 3))
    for late in range(4):
        for way, sample in {"synchronous": plain, "asynchronous": plain, "guided": plain, "trained": delayed}.items():
            told = way in ("guided", "trained")
            done, sides = drive(sample, episodes, seed, late=late, told=told, waits=way == "synchronous")
            switches = float((np.diff(np.sign(sides), axis=1) != 0).sum(1).mean())
            yield Row(late * MILLISECONDS, way, Rate(successes=int(done.sum()), trials=episodes), switches)


def drive(sample: Sample, count: int, seed: int, *, late: int, told: bool, waits: bool) -> tuple[Any, Any]:
    """(who passes the post, everybody's moves sideways)."""
    rng = np.random.default_rng(seed + 1)
    place, moves, rows = rng.uniform(-START, START, count), [], np.arange(count)
    nothing = np.zeros((count, HORIZON, 1))

    def look(step: int) -> Any:
        return seen(np.full(count, step), place + UNSURE * np.random.default_rng((seed, step)).standard_normal(count))

    key = jax.random.key(seed)
    chunk, at = sample(look(0), nothing, 0, 0, key), 0
    ask, coming = (HORIZON // 2 if waits else 1), None
    for step in range(STEPS):
        if waits and at == ask:  # it stands still until the chunk is there
            chunk, at = sample(look(step), nothing, 0, 0, jax.random.fold_in(key, step)), 0
        elif not waits and coming is None and at >= ask:
            rest = np.concatenate([chunk[:, at:], nothing[:, :at]], axis=1) if told else nothing
            known = HORIZON - at if told else 0
            coming = step, sample(look(step), rest, min(late, known), known, jax.random.fold_in(key, step))
        if coming is not None and step - coming[0] >= late:
            (asked, chunk), coming = coming, None
            at = step - asked
            ask = at + 1
        move = np.clip(chunk[rows, at, 0], -1, 1)
        place, at = place + SPEED * move, at + 1
        moves.append(move)
    return np.abs(place) > POST, np.stack(moves, axis=1)


def seen(step: Any, place: Any) -> dict[str, Any]:
    """How far the post is, and about where the point is sideways."""
    count = len(step)
    state = np.stack([step / STEPS, place], axis=1).astype(np.float32)
    tokens = np.ones((count, POLICY.config.token_len), np.int32)
    words = {"tokenized_prompt": tokens, "tokenized_prompt_mask": tokens == 1}
    return {"image": {}, "image_mask": {}, "state": state, **words}


def demonstrated(rng: np.random.Generator, count: int) -> dict[str, Any]:
    """Moments of demonstrations: where one is after some steps to one side, and the moves from there on."""
    side, step = rng.choice([-1.0, 1.0], count), rng.integers(0, STEPS, count)
    place = rng.uniform(-START, START, count) + SPEED * side * step
    actions = np.zeros((count, HORIZON, 2), np.float32)
    actions[:, :, 0] = side[:, None]
    noisy = place + UNSURE * rng.standard_normal(count)
    return {"observations": seen(step, noisy), "actions": actions, "valid": np.ones((count, HORIZON), np.float32)}


def cloned(updates: int, seed: int, delay: int) -> Any:
    """Weights of a policy that imitates them."""
    config = BCConfig(augment=False, flow_draws=4, ema_decay=None, real_time_delay=delay)
    learner = Learner(tx=optax.adam(optax.cosine_decay_schedule(2e-3, updates, 0.05)))
    agent = BC(policy=POLICY, config=config, learner=learner, real_action_dim=1)
    state, rng = agent.init(jax.random.key(seed)), np.random.default_rng(seed)
    step = jax.jit(lambda state, batch, key: agent.update(state, batch, key)[0], donate_argnums=0)
    for key in jax.random.split(jax.random.key(seed + 1), updates):
        state = step(state, demonstrated(rng, 64), key)
    return state.policy


def sampler(params: Any, delay: int) -> Sample:
    """Chunks as the server makes them: guided by the chunk before, or given its steps where it was trained so."""

    @jax.jit
    def sample(inputs: Any, before: Any, frozen: Any, overlap: Any, key: Any) -> Any:
        def steer(velocity: flow.Velocity) -> flow.Velocity:
            if delay:
                return flow.prefixed(velocity, before, jnp.minimum(frozen, delay))
            return flow.continued(velocity, before, flow.prefix_weights(frozen, overlap, HORIZON))

        count = len(before)
        noise = jax.random.normal(key, (count, 1, HORIZON, 2))
        context = POLICY.encode(params, Observation.from_dict(inputs))
        return flow.sample(POLICY, params, context, noise, steer=steer)[:, 0]

    def act(inputs: Any, before: Any, frozen: int, overlap: int, key: Any) -> Any:
        rest = np.zeros((len(before), HORIZON, 2), np.float32)
        rest[..., : before.shape[-1]] = before
        steps = (np.full(len(before), number, np.int32) for number in (frozen, overlap))
        return np.asarray(sample(inputs, rest, *steps, key))[..., :1]

    return act


if __name__ == "__main__":
    raise SystemExit(main())
