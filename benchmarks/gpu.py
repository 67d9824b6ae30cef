"""Speed and memory of full-size π₀ on one GPU: BC and ACRLPD steps, sampling, best-of-N; random weights.

    PYTHONPATH=src python benchmarks/gpu.py --quick          a few rows
    PYTHONPATH=src python benchmarks/gpu.py --json out.json   all rows

Needs jax, optax and jaxtyping only (augmax for `--augment`). Each row: median of the repeats after a warm-up, the
compile time of the first call, and the peak memory of the process so far (rows run from small to large).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.bc import BC
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.agents.learner import Learner
from pirl.models import flow, pi0
from pirl.models.config import Pi0Config, get_preset
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.freeze import trainable_mask
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.training.config import AdamW, ConstantSchedule, CosineSchedule
from pirl.training.optim import make_optimizer, make_schedule

GIB = 2**30


def real_dim(config: Pi0Config) -> int:
    """Dimensions of an ALOHA's state and actions, as far as the model has room."""
    return min(14, config.action_dim)


def critic_horizon(config: Pi0Config) -> int:
    """Steps the critic scores."""
    return min(10, config.horizon)


def batch(config: Pi0Config, size: int, cameras: int, key: jax.Array) -> dict[str, Any]:
    """A made-up Q-chunk batch on the device."""
    keys = iter(jax.random.split(key, 16))

    def observation() -> dict[str, Any]:
        shape = (size, config.image_size, config.image_size, 3)
        names = config.cameras[:cameras]
        return {
            "image": {n: jax.random.randint(next(keys), shape, 0, 256, jnp.int32).astype(jnp.uint8) for n in names},
            "image_mask": {n: jnp.ones(size, bool) for n in names},
            "state": jax.random.normal(next(keys), (size, config.action_dim)),
            "tokenized_prompt": jax.random.randint(next(keys), (size, config.token_len), 0, 1000),
            "tokenized_prompt_mask": jnp.ones((size, config.token_len), bool),
        }

    actions = jax.random.normal(next(keys), (size, config.horizon, config.action_dim))
    ones = jnp.ones((size, config.horizon))
    return {
        "observations": observation(),
        "next_observations": observation(),
        "actions": actions,
        "critic_actions": actions[:, : critic_horizon(config)],
        "valid": ones,
        "next_terminal": jnp.zeros(size),
        "sequence_mask": jnp.ones(size),
        "length": jnp.full(size, critic_horizon(config), jnp.int32),
        "reward_sum": jnp.zeros(size),
        "mc_return": jnp.full(size, 0.5),
    }


def learner(config: Pi0Config, rule: str) -> Learner:
    """OpenPI's optimizer and average."""
    mask = None if rule == "full" else trainable_mask(pi0.param_shapes(config), config, rule)  # type: ignore[arg-type]
    return Learner(tx=make_optimizer(AdamW(), make_schedule(CosineSchedule())), mask=mask, ema_decay=0.99)


def make_agent(config: Pi0Config, what: str, rule: str, num: int, augment: bool) -> BC | ACRLPD:
    """`bc`, `awr` or `distill`."""
    if what == "bc":
        return BC(
            policy=Pi0(config),
            config=BCConfig(augment=augment),
            learner=learner(config, rule),
            real_action_dim=real_dim(config),
        )
    critic = make_critic(
        CriticConfig(),
        feature_width=config.vlm.width,
        state_dim=real_dim(config),
        real_action_dim=real_dim(config),
        critic_horizon=critic_horizon(config),
    )
    return ACRLPD(
        policy=Pi0(config),
        critic=critic,
        config=ACRLPDConfig(actor=what, num_action_samples=num, augment=augment),  # type: ignore[arg-type]
        policy_learner=learner(config, rule),
        critic_learner=Learner(tx=make_optimizer(AdamW(), make_schedule(ConstantSchedule())), ema_decay=0.99),
        encoder_frozen=rule in ("vlm_frozen", "expert_only"),
    )


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(seconds of the first call, median seconds of the others)."""
    begin = time.perf_counter()
    jax.block_until_ready(call())
    first, times = time.perf_counter() - begin, []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return first, float(np.median(times))


def peak() -> float:
    """GiB at most in use so far."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0) / GIB


def train_row(config: Pi0Config, what: str, *, size: int, cameras: int, rule: str, num: int, args: Any) -> dict:
    """One training step."""
    agent = make_agent(config, what, rule, num, args.augment)
    state = jax.jit(agent.init)(jax.random.key(0))
    data = jax.jit(lambda key: batch(config, size, cameras, key))(jax.random.key(1))
    update = jax.jit(agent.update, donate_argnums=0)

    def step() -> Any:
        nonlocal state
        state, metrics = update(state, data, jax.random.key(2))
        return metrics

    first, seconds = timed(step, args.repeats)
    return {"seconds": seconds, "first_call": first}


def sample_row(config: Pi0Config, *, size: int, num: int, args: Any) -> dict:
    """N chunks for each of some observations, from pictures, with bfloat16 weights."""
    policy = Pi0(config)
    params = jax.jit(lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy.init(key)))(jax.random.key(0))
    data = jax.jit(lambda key: batch(config, size, 3, key))(jax.random.key(1))["observations"]

    @jax.jit
    def sample(params: Any, data: Any, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, (size, num, config.horizon, config.action_dim))
        context = policy.encode(params, Observation.from_dict(data))
        return flow.sample(policy, params, context, noise)

    first, seconds = timed(lambda: sample(params, data, jax.random.key(2)), args.repeats)
    return {"seconds": seconds, "first_call": first}


def rows(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Name and measurement of every row, small ones first."""
    base = replace(get_preset(args.preset), remat=args.remat)
    for size, num in ((1, 1), (8, 1), (32, 1), (32, 4), (32, 32)):
        if not args.quick or (size, num) in ((1, 1), (32, 1), (32, 32)):
            yield (
                f"sample batch {size}, best of {num}",
                lambda s=size, n=num: sample_row(base, size=s, num=n, args=args),
            )  # type: ignore[misc]

    def row(what: str, size: int, cameras: int, rule: str, num: int = 4) -> tuple[str, Callable[[], dict]]:
        name = f"{what} batch {size}, {cameras} cameras, {rule}, {base.remat}" + ("" if what == "bc" else f", N={num}")
        return name, lambda: train_row(base, what, size=size, cameras=cameras, rule=rule, num=num, args=args)

    yield row("bc", 32, 3, "full")
    yield row("awr", 32, 3, "full")
    if not args.quick:
        yield row("awr", 32, 2, "full")
        yield row("awr", 32, 3, "vlm_frozen")
        yield row("distill", 32, 3, "vlm_frozen")
        yield row("bc", 64, 3, "full")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="pi0", help="model preset (pi0, pi05, pi0_small, ...)")
    parser.add_argument("--remat", default="names", choices=("none", "names", "dots", "full"))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--augment", action="store_true", help="augment pictures (needs augmax)")
    parser.add_argument("--quick", action="store_true", help="a few rows")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {args.preset}, remat {args.remat}\n")
    print("| what | ms | first call s | peak GiB |\n|---|---|---|---|")
    results = {}
    for name, measure in rows(args):
        if args.only not in name:
            continue
        try:
            found = measure() | {"peak_gib": peak()}
            print(f"| {name} | {1e3 * found['seconds']:.1f} | {found['first_call']:.1f} | {found['peak_gib']:.1f} |")
        except Exception as error:
            found = {"error": str(error).splitlines()[0][:200]}
            print(f"| {name} | {found['error']} | | |")
        results[name] = found
        sys.stdout.flush()
        jax.clear_caches()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
