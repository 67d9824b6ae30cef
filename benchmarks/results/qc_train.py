"""Q-chunking's setting with pirl's agent; trains the critics of all five tasks of a seed in one program.

Q-chunking's actor imitates, independent of rewards. So a seed's tasks share the policy, the batches and the policy's
candidates, and `ACRLPD.update` is vmapped over the critics. Each critic trains exactly as alone with the same random
numbers; seeds are independent, tasks of one seed are not.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from qc_play import log

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.agent import TrainState
from pirl.agents.config import ACRLPDConfig
from pirl.agents.learner import Learner
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.models.config import DType, MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.training.config import AdamW, ConstantSchedule

HORIZON, ACTION, DISCOUNT = 5, 5, 0.99
METRICS = ("critic/loss", "critic/q_mean", "actor/flow_loss")
AXES = {
    "step": None,
    "params": {"policy": None, "critic": 0},
    "target": {"critic": 0},
    "ema": None,
    "opt": {"policy": None, "critic": 0},
    "scalars": None,
}
"""vmap axes of the state: 0 for what belongs to the critic, which differs between tasks."""
Fields = dict[str, Any]
"""A `TrainState` as a dict of fields, for which vmap axes can be given."""


def make_agent(state_dim: int, dtype: str = "float32", width: int = 512, samples: int = 32) -> ACRLPD:
    """Q-chunking's agent: best of N, the mean of two critics, MSE, default Adam, no clipping except of actions.

    `mixed` keeps the policy in bfloat16 and the critics in float32.
    """
    hidden = (width,) * 4
    of_policy: DType = "float32" if dtype == "float32" else "bfloat16"
    of_critic: DType = "bfloat16" if dtype == "bfloat16" else "float32"
    tx = make_optimizer(
        AdamW(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip_gradient_norm=None),
        make_schedule(ConstantSchedule(lr=3e-4)),
    )
    policy = MLPFlowConfig(state_dim=state_dim, action_dim=ACTION, horizon=HORIZON, hidden=hidden, dtype=of_policy)
    return ACRLPD(
        policy=MLPFlow(policy),
        critic=make_critic(
            CriticConfig(num_critics=2, hidden=hidden, loss="mse", dtype=of_critic, action_clip=1.0),
            feature_width=None,
            state_dim=state_dim,
            real_action_dim=ACTION,
            critic_horizon=HORIZON,
        ),
        config=ACRLPDConfig(
            actor="best_of_n",
            num_action_samples=samples,
            flow_steps=10,
            flow_times="uniform",
            discount=DISCOUNT,
            target_update_rate=0.005,
            q_aggregation="mean",
            reward_low=-1.0,
            reward_high=0.0,
            reward_once=False,
            clip_targets=False,
            augment=False,
        ),
        policy_learner=Learner(tx=tx, ema_decay=None),
        critic_learner=Learner(tx=tx, ema_decay=None),
        encoder_frozen=True,
    )


def fields(state: TrainState) -> Fields:
    """The state as a dictionary."""
    return {name: getattr(state, name) for name in AXES}


def init(agent: ACRLPD, seed: int, tasks: int) -> Fields:
    """One policy and a pair of critics for each task."""
    policy_key, critic_key = jax.random.split(jax.random.key(seed))
    policy = agent.policy.init(policy_key)
    each = jax.vmap(lambda key: fields(agent.init(key, policy)), out_axes=AXES)
    return each(jax.random.split(critic_key, tasks))


def init_seeds(agent: ACRLPD, seeds: Sequence[int], tasks: int) -> Fields:
    """States of several seeds, seeds on axis 0."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(init(agent, seed, tasks) for seed in seeds))


def update_key(seed: jax.Array | int) -> jax.Array:
    """The PRNG key of a seed's updates."""
    return jax.random.fold_in(jax.random.key(seed), 1)


def chunk_batch(data: Mapping[str, jax.Array], index: jax.Array) -> dict[str, Any]:
    """Chunks starting at the given rows, by Q-chunking's rule: chunks that cross an episode's end are masked out.

    A success inside a chunk ends bootstrapping; rewards after it count, as in the paper's code.
    """
    rows = index[:, None] + jnp.arange(HORIZON)
    ended = jax.lax.cummax(data["terminals"][rows], axis=1)
    valid = jnp.concatenate([jnp.ones_like(ended[:, :1]), 1 - ended[:, :-1]], axis=1)
    actions = data["actions"][rows]
    return {
        "observations": {"state": data["observations"][index]},
        "next_observations": {"state": data["next_observations"][index + HORIZON - 1]},
        "actions": actions,
        "critic_actions": actions,
        "valid": valid,
        "sequence_mask": valid[:, -1],
        "length": jnp.full(len(index), HORIZON, jnp.int32),
        "reward_sum": (data["rewards"][:, rows] * DISCOUNT ** jnp.arange(HORIZON)).sum(-1),
        "next_terminal": 1 - data["masks"][:, rows].min(-1),
        "mc_return": jnp.zeros(len(index)),
    }


def make_updates(agent: ACRLPD, batch: int) -> Any:
    """A function `many(states, data, seeds, updates)`: several updates of several seeds in one program.

    An update's random numbers depend on its number, so interruptions do not matter.
    """

    def one_task(state: Fields, rows: Any, key: jax.Array) -> tuple[Fields, jax.Array]:
        new, metrics = agent.update(TrainState(**state), rows, key)
        return fields(new), jnp.stack([metrics[name] for name in METRICS])

    def once(state: Fields, data: Any, key: jax.Array) -> tuple[Fields, jax.Array]:
        draw, update = jax.random.split(jax.random.fold_in(key, state["step"]))
        size = len(data["actions"])
        rows = chunk_batch(data, jax.random.randint(draw, (batch,), 0, size - HORIZON + 1))
        of_task = dict.fromkeys(rows) | {"reward_sum": 0, "next_terminal": 0}
        return jax.vmap(one_task, in_axes=(AXES, of_task, None), out_axes=(AXES, 1))(state, rows, update)

    @partial(jax.jit, static_argnames="updates", donate_argnums=0)
    def many(states: Fields, data: Any, seeds: jax.Array, updates: int) -> tuple[Fields, jax.Array]:
        keys = jax.vmap(update_key)(seeds)
        each = jax.vmap(lambda state, key: once(state, data, key))
        states, seen = jax.lax.scan(lambda states, _: each(states, keys), states, length=updates)
        return states, seen.mean(0)

    return many


def make_act(agent: ACRLPD) -> Any:
    """A function `act(params, states, keys, tasks)`: the chunk chosen by the critic of each row's task."""

    @jax.jit
    def act(params: Any, states: jax.Array, keys: jax.Array, tasks: jax.Array) -> jax.Array:
        observation = Observation.from_dict({"state": states})

        def one_task(params: Any) -> jax.Array:
            return agent.act(TrainState(step=0, params=params), observation, keys)

        chunks = jax.vmap(one_task, in_axes=(AXES["params"],))(params)
        return chunks[tasks, jnp.arange(len(states))]

    return act


def save(path: Path, tree: Any) -> None:
    """Save leaves by name, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    partial_path = path.with_name(f"{path.stem}.part.npz")
    np.savez(partial_path, **leaves)
    partial_path.rename(path)


def restore(path: Path, like: Any) -> Any:
    """Load a file of `save` into the structure of `like`."""
    with np.load(path) as file:
        return jax.tree_util.tree_map_with_path(lambda key, _: jnp.asarray(file[jax.tree_util.keystr(key)]), like)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Training length, and intervals of saving and evaluating."""

    steps: int = 100_000
    evaluate_every: int = 50_000
    save_every: int = 25_000
    per_program: int = 1000
    """Updates per program."""
    deadline: float = math.inf
    """Time (seconds since the epoch) at which training saves and stops."""


def train_seeds(
    many: Any, states: Fields, data: Any, seeds: Sequence[int], *, run: Path, name: str, schedule: Schedule
) -> bool:
    """Train or resume several seeds together on all tasks; returns False if time ran out."""
    steps, per_program = schedule.steps, schedule.per_program
    title = f"train {name} seeds {' '.join(map(str, seeds))}"
    path = run / "states" / f"{name}_{'-'.join(map(str, seeds))}.npz"
    if path.exists():
        states = restore(path, states)
        log(f"{title}: go on at {int(states['step'][0])}")
    step = start = int(states["step"][0])
    begin = time.monotonic()
    while step < steps:
        count = min(per_program, steps - step)
        states, seen = many(states, data, jnp.asarray(seeds), count)
        seen = np.asarray(seen)
        step += count
        late = time.time() > schedule.deadline
        if step % schedule.evaluate_every == 0:
            for i, seed in enumerate(seeds):
                save(run / "weights" / f"{name}_{seed}_{step}.npz", jax.tree.map(lambda x, i=i: x[i], states["params"]))
        if step % schedule.save_every == 0 or step == steps or late:
            save(path, states)
        if step % (10 * per_program) == 0 or step == steps or late:
            loss, q, flow = seen.mean(0)
            rate = len(seeds) * (step - start) / (time.monotonic() - begin)
            values = " ".join(f"{value:.1f}" for value in q)
            errors = " ".join(f"{value:.2f}" for value in loss)
            log(f"{title} {step}: {rate:.0f} updates/s in all, flow {flow[0]:.3f}, Q {values}, loss {errors}")
        if late and step < steps:
            log(f"{title}: the time is up at {step}")
            return False
    return True


def random_data(state_dim: int, tasks: int, rows: int = 1_000_000) -> dict[str, jax.Array]:
    """Random data of the right shapes, to measure speed."""
    keys = jax.random.split(jax.random.key(0), 2)
    observations = jax.random.normal(keys[0], (rows, state_dim))
    return {
        "observations": observations,
        "next_observations": observations,
        "actions": jax.random.uniform(keys[1], (rows, ACTION), minval=-1.0),
        "terminals": jnp.zeros(rows),
        "rewards": -jnp.ones((tasks, rows)),
        "masks": jnp.ones((tasks, rows)),
    }


def speed(agent: ACRLPD, data: Any, batch: int, updates: int, seeds: int) -> float:
    """Updates per second over all seeds, without compilation."""
    many, states = make_updates(agent, batch), init_seeds(agent, range(seeds), len(data["rewards"]))
    for _ in range(2):
        begin = time.monotonic()
        states, _ = jax.block_until_ready(many(states, data, jnp.arange(seeds), updates))
    return seeds * updates / (time.monotonic() - begin)
