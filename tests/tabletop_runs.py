"""The tabletop's `easy` level from demonstrations to evaluation, in memory and compiled for speed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from pirl.agents.agent import TrainState
from pirl.build import build_agent
from pirl.config import RLTrainConfig
from pirl.data.create import create_transform
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.replay import MemorySource
from pirl.data.stats import compute_norm_stats
from pirl.data.transforms import Transform
from pirl.envs.tabletop_expert import demonstrate
from pirl.parallel.sharding import make_mesh
from pirl.records import Rollout
from pirl.rollout.contexts import fixed_contexts, random_contexts
from pirl.rollout.evaluate import Rate, evaluate
from pirl.rollout.policy import ChunkPolicy, replay_frames
from pirl.rollout.pool import LocalPool
from pirl.training.build import build_chunk_policy, build_stream

FAST: dict[str, Any] = {"xla_backend_optimization_level": 1}
"""These tests spend their time computing, so they raise the optimisation level that tests/conftest.py lowers."""
if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
    FAST["xla_cpu_use_fusion_emitters"] = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """Demonstrations with a policy's configuration and transform."""

    config: RLTrainConfig
    demos: Sequence[Rollout]
    transform: Transform

    def source(self, demos: Sequence[Rollout] | None = None) -> MemorySource:
        """The demonstrations, or `demos`, as training data."""
        cameras = self.config.cameras
        chosen = self.demos if demos is None else demos
        frames = [replay_frames(self.transform, rollout.frames, cameras, borders=False) for rollout in chosen]
        episodes = [rollout.episode for rollout in chosen]
        return MemorySource(cameras=cameras, items=list(zip(episodes, frames, strict=True)))


def table(config: RLTrainConfig, *, demos: int, seed: int) -> Table:
    """Imperfect demonstrations of the level, deterministic given the seed."""
    with LocalPool(config.env, 1) as pool:
        contexts = random_contexts(pool.info, demos, np.random.default_rng(11 + 100 * seed))
    made = demonstrate(config.env, contexts, seed=12 + seed)
    low_dim = MemorySource(cameras=(), items=[(rollout.episode, {}) for rollout in made])
    transform = create_transform(
        config.data,
        horizon=config.horizon,
        norm_stats=compute_norm_stats(low_dim, config.robot, config.horizon),
        action_dim=config.model.action_dim,
        state_dim=config.state_dim,
        token_len=config.token_len,
        image_size=config.model.image_size,
    )
    return Table(config=config, demos=made, transform=transform)


def train_offline(
    config: RLTrainConfig, on: Table, *, source: MemorySource | None = None, weights: Any = None, seed: int = 0
) -> TrainState:
    """Train an offline configuration for all its steps."""
    agent = build_agent(config)
    update = jax.jit(agent.update, donate_argnums=0, compiler_options=FAST)
    state = jax.jit(agent.init)(jax.random.key(seed), weights)
    state = agent.heard(state, {}, lambda _: None)  # nothing is held out here
    with ACRLPDDataLoader(
        on.source() if source is None else source,
        on.transform,
        config=replace(config.data, seed=seed),
        batch_size=config.batch_size,
        horizon=config.horizon,
        discount=config.discount,
        next_observations=config.has_critic,
        corrections=config.agent.heeds_corrections,
    ) as loader:
        for step in range(config.num_train_steps):
            state, _ = update(state, loader.sample_batch(), jax.random.fold_in(jax.random.key(seed + 7), step))
    return state


def fast(policy: ChunkPolicy) -> ChunkPolicy:
    """The policy, recompiled with FAST."""
    policy._act = jax.jit(policy._act.__wrapped__, compiler_options=FAST)
    return policy


def train_groups(config: RLTrainConfig, on: Table, *, weights: Any, seed: int = 0) -> TrainState:
    """Train RIPT for all its iterations."""
    config = replace(config, seed=seed)
    agent = build_agent(config)
    update = jax.jit(agent.update, donate_argnums=0, compiler_options=FAST)
    state = jax.jit(agent.init)(jax.random.key(seed), weights)
    updates = 0
    with LocalPool(config.env, config.rollout.num_envs) as pool:
        stream = build_stream(config, agent, on.transform, make_mesh(), None, None, pool)
        fast(stream._collector.policy)
        for iteration in range(1, config.num_train_steps + 1):
            for batch in stream.round(iteration, state, lambda: False, lambda _: None):
                state, metrics = update(state, batch, jax.random.fold_in(jax.random.key(seed + 9), updates))
                stream.notice(metrics)
                updates += 1
    return state


def success(config: RLTrainConfig, on: Table, state: TrainState, *, best_of: int = 1, episodes: int = 400) -> Rate:
    """Success rate on test states, on which nothing was trained or tuned."""
    config = replace(config, rollout=replace(config.rollout, num_envs=200))
    policy = fast(build_chunk_policy(config, build_agent(config), on.transform, best_of=best_of))
    with LocalPool(config.env, 200) as pool:
        contexts = fixed_contexts(pool.info, episodes, "test")
        return evaluate(pool, policy.use(state, jax.random.key(1)), contexts).success


def shuffled(demos: Sequence[Rollout], seed: int) -> list[Rollout]:
    """The episodes with permuted outcomes, which carry no information."""
    outcomes = np.random.default_rng(seed).permutation([bool(rollout.episode.success) for rollout in demos]).tolist()

    def labelled(rollout: Rollout, outcome: bool) -> Rollout:
        last = np.arange(len(rollout.episode)) == len(rollout.episode) - 1
        rewards = (last & outcome).astype(np.float32)
        return replace(rollout, episode=replace(rollout.episode, success=outcome, rewards=rewards))

    return [labelled(rollout, outcome) for rollout, outcome in zip(demos, outcomes, strict=True)]
