"""Updates per second with Q-chunking's networks: 4 × 512, batches of 256, best of 32, ten Euler steps, from states.

    PYTHONPATH=src python benchmarks/qc.py

Data stay on the device, and many updates run in one program, as in a state-based benchmark such as OGBench. Needs jax,
optax and jaxtyping.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.config import ACRLPDConfig
from pirl.agents.learner import Learner
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.models.config import DType, MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.planning.flops import count_flops
from pirl.training.config import AdamW, ConstantSchedule

STATE, ACTION, HORIZON, WIDTH = 37, 5, 5, 512
"""Sizes of OGBench's cube-double."""


def make_agent(dtype: DType, width: int) -> ACRLPD:
    """Q-chunking: an imitating flow policy, and a critic that chooses among its samples."""
    hidden = (width,) * 4
    tx = make_optimizer(AdamW(), make_schedule(ConstantSchedule(lr=3e-4)))
    policy = MLPFlowConfig(state_dim=STATE, action_dim=ACTION, horizon=HORIZON, hidden=hidden, dtype=dtype)
    return ACRLPD(
        policy=MLPFlow(policy),
        critic=make_critic(
            CriticConfig(hidden=hidden, loss="mse", dtype=dtype),
            feature_width=None,
            state_dim=STATE,
            real_action_dim=ACTION,
            critic_horizon=HORIZON,
        ),
        config=ACRLPDConfig(actor="best_of_n", num_action_samples=32, augment=False),
        policy_learner=Learner(tx=tx, ema_decay=None),
        critic_learner=Learner(tx=tx, ema_decay=None),
        encoder_frozen=True,
    )


def dataset(rows: int) -> dict[str, Any]:
    """Random transitions on the device."""
    keys = jax.random.split(jax.random.key(0), 4)
    chunks = jax.random.uniform(keys[2], (rows, HORIZON, ACTION), minval=-1.0)
    return {
        "observations": {"state": jax.random.normal(keys[0], (rows, STATE))},
        "next_observations": {"state": jax.random.normal(keys[1], (rows, STATE))},
        "actions": chunks,
        "critic_actions": chunks,
        "valid": jnp.ones((rows, HORIZON)),
        "next_terminal": jnp.zeros(rows),
        "sequence_mask": jnp.ones(rows),
        "length": jnp.full(rows, HORIZON, jnp.int32),
        "reward_sum": -jax.random.uniform(keys[3], (rows,)),
        "mc_return": jnp.zeros(rows),
    }


def main() -> None:
    """Measure each dtype and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=500, help="in one program")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rows", type=int, default=200_000, help="transitions on the device")
    parser.add_argument("--width", type=int, default=WIDTH)
    args = parser.parse_args()
    data = jax.jit(lambda: dataset(args.rows))()
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, batch {args.batch}, {args.updates} updates a program"
    )
    types: tuple[DType, ...] = ("float32", "bfloat16")
    for dtype in types:
        agent = make_agent(dtype, args.width)
        state = jax.jit(agent.init)(jax.random.key(1))

        def once(state: Any, key: jax.Array, agent: ACRLPD = agent) -> tuple[Any, jax.Array]:
            draw, update = jax.random.split(key)
            index = jax.random.randint(draw, (args.batch,), 0, args.rows)
            batch = jax.tree.map(lambda x: x[index], data)
            state, metrics = agent.update(state, batch, update)
            return state, metrics["critic/loss"]

        @jax.jit
        def many(state: Any, key: jax.Array, once: Any = once) -> tuple[Any, jax.Array]:
            return jax.lax.scan(once, state, jax.random.split(key, args.updates))

        flops = count_flops(once, state, jax.random.key(2))
        begin = time.perf_counter()
        state, losses = jax.block_until_ready(many(state, jax.random.key(2)))
        compiled, times = time.perf_counter() - begin, []
        for turn in range(3):
            begin = time.perf_counter()
            state, losses = jax.block_until_ready(many(state, jax.random.key(3 + turn)))
            times.append(time.perf_counter() - begin)
        rate = args.updates / float(np.median(times))
        print(
            f"{dtype:9} {rate:.0f} updates/s, {flops / 1e9:.0f} GFLOP each, {rate * flops / 1e12:.0f} TFLOP/s, "
            f"first program {compiled:.0f} s, last loss {float(losses[-1]):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
