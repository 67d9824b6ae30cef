"""Speed of rollouts: the tabletop alone, the policy alone, and both together.

    python benchmarks/rollout.py             on this machine, about two minutes of CPU time

Rates are per CPU-second of this process, or ratios within one run, because machines are shared. The policy is the tiny
π₀ of the tabletop recipes with random weights: only its cost matters.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from pirl.build import build_agent
from pirl.data.create import create_transform
from pirl.data.normalize import NormStats
from pirl.envs.config import TabletopConfig
from pirl.envs.make import make_batch
from pirl.recipes import get_config
from pirl.rollout.collect import CollectStats, collect, numbered
from pirl.rollout.contexts import random_contexts
from pirl.rollout.pool import EnvInfo, EnvPool, LocalPool
from pirl.rollout.workers import ProcessPool
from pirl.training.build import build_chunk_policy

SIZES = (1, 16, 64, 256)


def env_rates(size: int, *, steps: int = 400) -> dict[str, float]:
    """Environment steps per CPU-second, with and without an image after each step."""
    rates = {}
    for name, pictures in (("with pictures", True), ("without", False)):
        batch = make_batch(TabletopConfig(), size)
        rng = np.random.default_rng(0)
        slots = list(range(size))
        rounds = max(1, steps * 64 // size // 12)
        began = time.process_time()
        for _ in range(rounds):
            batch.begin(slots, random_contexts(EnvInfo.of(batch), size, rng))
            for _ in range(12):
                batch.act(slots, rng.uniform(-1, 1, (size, 3)).astype(np.float32))
                batch.observe(slots, pictures=pictures)
        rates[name] = rounds * 12 * size / (time.process_time() - began)
    return rates


def run(pool: EnvPool, num_envs: int, episodes: int) -> dict[str, float]:
    """Collect episodes; returns the rate and the shares of time."""
    recipe = get_config("bc_tabletop")
    config = replace(recipe, rollout=replace(recipe.rollout, num_envs=num_envs))
    stats = {
        "state": NormStats(mean=np.zeros(4), std=np.ones(4)),
        "actions": NormStats(mean=np.zeros(3), std=np.ones(3)),
    }
    transform = create_transform(
        config.data,
        horizon=config.horizon,
        norm_stats=stats,
        action_dim=config.model.action_dim,
        state_dim=config.state_dim,
        token_len=config.token_len,
        image_size=config.model.image_size,
    )
    agent = build_agent(config)
    policy = build_chunk_policy(config, agent, transform)
    policy.use(jax.jit(agent.init)(jax.random.key(0)), jax.random.key(1))
    contexts = random_contexts(pool.info, episodes, np.random.default_rng(0))
    for _ in collect(pool, policy, numbered(contexts[:num_envs])):  # compile
        pass
    found = CollectStats()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in collect(pool, policy, numbered(contexts), stats=found):
        pass
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "steps per CPU-second": found.env_steps / cpu,
        "environments": found.env_seconds / wall,
        "policy": found.policy_seconds / wall,
        "rest": 1 - (found.env_seconds + found.policy_seconds) / wall,
        "occupancy": found.rows_used / (found.policy_calls * num_envs),
    }


def main() -> None:
    """Print the tables; `--json` also writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    envs = {size: env_rates(size) for size in SIZES}
    print("| tabletop, instances | steps per CPU-s with pictures | without |\n|---|---|---|")
    for size, rates in envs.items():
        print(f"| {size} | {rates['with pictures']:,.0f} | {rates['without']:,.0f} |")
    rollouts = {}
    for size, episodes in ((1, 24), (16, 128), (128, 512)):
        with LocalPool(TabletopConfig(), size) as pool:
            rollouts[f"{size}, this process"] = run(pool, size, episodes)
    with ProcessPool(TabletopConfig(), size=16, num_workers=2, timeout=60.0) as pool:
        rollouts["16, two processes"] = run(pool, 16, 128)
    print(
        "\n| environments | steps per CPU-s | in environments | policy | rest | occupancy |\n|---|---|---|---|---|---|"
    )
    for name, row in rollouts.items():
        rate, *shares = row.values()
        print(f"| {name} | {rate:,.0f} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    one, many = (rollouts[f"{size}, this process"]["steps per CPU-second"] for size in (1, 128))
    print(f"\nanswering 128 environments in one call: {many / one:.1f} times the steps of one by one, per CPU-second")
    if args.json:
        args.json.write_text(json.dumps({"environment": envs, "rollouts": rollouts}, indent=1))


if __name__ == "__main__":
    main()
