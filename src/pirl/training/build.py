"""Builds a run's data, environments, evaluations and initial weights from its configuration."""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pirl.agents.agent import Agent
from pirl.build import policy_leaves
from pirl.checkpoints.weights import check_finite, load
from pirl.config import RLTrainConfig
from pirl.data.assets import assets_beside, choose_asset, named_asset, own_assets
from pirl.data.create import create_acrlpd_data_loader, create_transform
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.normalize import load_norm_stats
from pirl.data.replay import ReplayBuffer
from pirl.data.transforms import Transform
from pirl.envs.make import make_env
from pirl.errors import ConfigError
from pirl.models.params import Params, shapes_of
from pirl.names import NORM_STATS_FILE
from pirl.parallel.distributed import is_main
from pirl.parallel.sharding import data_sharding, sharded_shapes
from pirl.paths import lerobot_home
from pirl.records import EpisodeSource
from pirl.rollout.collector import Collector
from pirl.rollout.curriculum import Curriculum
from pirl.rollout.files import ROLLOUTS
from pirl.rollout.make_pool import make_pool
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import EnvPool
from pirl.rollout.record import RolloutRecorder
from pirl.training import compiler
from pirl.training.eval_fn import EvalFn, UserEvaluation
from pirl.training.evaluator import Evaluations, Evaluator, Measurement
from pirl.training.held_out import BATCH_SIZE, HeldOut
from pirl.training.measured import FILE
from pirl.training.streams import DatasetStream, GroupStream, OnlineStream, Stream


def build_transform(config: RLTrainConfig) -> Transform:
    """The transform between robot units and model units, for training and acting."""
    folder = stats_of_weights(config)
    return create_transform(
        config.data,
        norm_stats=None if folder is None else load_norm_stats(folder),
        horizon=config.horizon,
        action_dim=config.model.action_dim,
        state_dim=config.state_dim,
        token_len=config.token_len,
        quantile=config.quantile_norm,
        discrete_state=config.discrete_state,
        image_size=config.model.image_size,
        prompt_suffixes=config.agent.prompt_suffixes,
    )


def stats_of_weights(config: RLTrainConfig) -> Path | None:
    """The folder of the norm stats beside the initial weights, which were trained in those units.

    None if the run has its own in `assets_dir`, or if neither the named asset nor a single one lies beside the weights.
    """
    own = own_assets(config.data)
    weights = None if config.init_weights is None else Path(config.init_weights).expanduser()
    if weights is None or not weights.is_dir():  # `assets` beside a single file may be unrelated
        return None
    if own is not None and (own / NORM_STATS_FILE).is_file():
        return None
    found = assets_beside(weights)
    chosen = choose_asset(found, named_asset(config.data, config.robot))
    return None if chosen is None else found[chosen]


@contextmanager
def build_acting(
    config: RLTrainConfig, agent: Agent, transform: Transform, mesh: Any, eval_fn: EvalFn | None = None
) -> Iterator[tuple[Stream, Evaluations]]:
    """(batch stream, evaluations), with the datasets, environments and replay buffer they need; closed on exit."""
    with ExitStack() as parts:
        loader = replay = pool = recorder = None
        if config.env is not None and (config.acts or config.evaluation):
            pool = parts.enter_context(build_pool(config))
        if config.online is not None:
            limits = {"max_episodes": config.data.replay_episodes, "max_bytes": config.data.replay_bytes}
            replay = ReplayBuffer(cameras=config.cameras, **limits)
        if config.agent.uses_dataset:
            loader = parts.enter_context(build_loader(config, transform, mesh, replay))
        if config.acts and pool is not None and config.rollout.record is not None and is_main():
            folder = dataset_folder(config.rollout.record)
            recorder = parts.enter_context(
                RolloutRecorder(folder, info=pool.info, robot=config.robot, existing="append")
            )
        policy = None
        if config.acts and pool is not None:
            policy = build_collecting_policy(config, agent, transform)
        as_it_acts = None if config.agent.explores else policy
        measured: list[Measurement | None] = [build_evaluator(config, agent, transform, pool, policy=as_it_acts)]
        if loader is not None and loader.held_out is not None:
            apart = parts.enter_context(build_held_out_loader(config, transform, mesh, loader.held_out))
            file = config.run_dir / FILE
            measured.append(build_held_out(config, agent, transform, mesh, apart, loader.held_out, file=file))
        if eval_fn is not None:
            acting = as_it_acts or build_chunk_policy(config, agent, transform)
            measured.append(UserEvaluation(eval_fn, config, agent, transform, acting))
        yield (
            build_stream(config, agent, transform, mesh, loader, replay, pool, policy=policy, recorder=recorder),
            Evaluations([one for one in measured if one is not None]),
        )


def dataset_folder(name: str) -> Path:
    """The dataset's folder: absolute paths and those that begin with "." as given, other names below LeRobot's home."""
    path = Path(name).expanduser()
    return path if path.is_absolute() or name.startswith(".") else lerobot_home() / path


def build_pool(config: RLTrainConfig) -> EnvPool:
    """The environment pool; raises if the environments' robot is not that of the data."""
    if config.env is None:
        raise ConfigError(
            f"{config.name} has no environment",
            hint="name one: --env.type Aloha; without a simulator, measure on episodes: pirl eval CHECKPOINT --data",
        )
    pool = make_pool(config.env, config.rollout)
    if pool.info.robot != config.data.robot:
        pool.close()
        raise ConfigError(
            f"the environment is of robot {pool.info.robot!r}, the data of {config.data.robot!r}",
            hint=f"set data.robot to {pool.info.robot}, or take another environment",
        )
    return pool


def build_collecting_policy(config: RLTrainConfig, agent: Agent, transform: Transform) -> ChunkPolicy:
    """The policy that collects rollouts; it explores if the algorithm does."""
    explore = config.agent.explores
    return build_chunk_policy(config, agent, transform, best_of=config.rollout.best_of, explore=explore)


def build_chunk_policy(
    config: RLTrainConfig, agent: Agent, transform: Transform, *, best_of: int = 1, explore: bool = False
) -> ChunkPolicy:
    """The agent's policy, batched over `rollout.num_envs` environments."""
    if best_of > 1 and not agent.config.chooses:
        raise ConfigError(
            f"best of {best_of} without a critic", hint="only algorithms with a critic can choose: best_of 1"
        )
    return ChunkPolicy(
        partial(agent.explore if explore else agent.act, best_of=best_of),
        transform,
        batch_size=config.rollout.num_envs,
        execute=config.execute,
        cameras=config.cameras,
        compiler_options=compiler.for_acting(),
    )


def build_evaluator(
    config: RLTrainConfig,
    agent: Agent,
    transform: Transform,
    pool: EnvPool | None,
    *,
    policy: ChunkPolicy | None = None,
) -> Evaluator | None:
    """Evaluation during training, or None. Shares the collecting policy if best_of agrees, so it compiles once."""
    if config.evaluation is None or pool is None:
        return None
    if policy is None or config.evaluation.best_of != config.rollout.best_of:
        policy = build_chunk_policy(config, agent, transform, best_of=config.evaluation.best_of)
    # A remote simulator may not run here, so films are only re-acted with local ones.
    local = config.env is not None and config.rollout.backend == "local"
    return Evaluator(
        pool,
        policy,
        config.evaluation,
        key=_key(config, "eval"),
        retries=config.rollout.retries,
        folder=config.run_dir,
        make=partial(make_env, config.env) if local and config.env is not None else None,
    )


def build_held_out_loader(
    config: RLTrainConfig, transform: Transform, mesh: Any, source: EpisodeSource
) -> ACRLPDDataLoader:
    """Batches of held-out episodes, of at most about BATCH_SIZE rows, rounded up to a multiple of the devices."""
    return ACRLPDDataLoader(
        source,
        transform,
        config=replace(config.data, prefetch=0),
        batch_size=-(-min(BATCH_SIZE, config.batch_size) // mesh.size) * mesh.size,
        horizon=config.horizon,
        discount=config.discount,
        next_observations=config.has_critic,
        suffixes=bool(config.agent.prompt_suffixes),
        sharding=data_sharding(mesh),
        host_id=jax.process_index(),
        host_count=jax.process_count(),
    )


def build_held_out(
    config: RLTrainConfig,
    agent: Agent,
    transform: Transform,
    mesh: Any,
    loader: ACRLPDDataLoader,
    source: EpisodeSource,
    *,
    file: Path | None = None,
) -> HeldOut:
    """The measurement on held-out episodes; its noise depends only on `config.seed`."""
    return HeldOut(
        agent,
        transform,
        loader,
        source,
        mesh,
        config.held_out,
        discount=config.discount,
        flow_steps=config.rollout.flow_steps,
        key=_key(config, "held_out"),
        file=file,
    )


def build_stream(
    config: RLTrainConfig,
    agent: Agent,
    transform: Transform,
    mesh: Any,
    loader: ACRLPDDataLoader | None,
    replay: ReplayBuffer | None,
    pool: EnvPool | None,
    *,
    policy: ChunkPolicy | None = None,
    recorder: RolloutRecorder | None = None,
) -> Stream:
    """The stream for the algorithm: dataset only, online with replay, or groups of rollouts."""
    if pool is None or not config.acts:
        assert loader is not None  # only algorithms that act need no dataset
        return DatasetStream(loader)
    collector = Collector(
        pool,
        policy or build_collecting_policy(config, agent, transform),
        key=_key(config, "collect"),
        directory=config.run_dir / ROLLOUTS,
        retries=config.rollout.retries,
        every_picture=config.rollout.record is not None or (replay is not None and bool(config.cameras)),
        last_look=config.agent.groups is not None and config.agent.groups.last_look,
        recorder=recorder,
    )
    if config.agent.groups is not None:
        return GroupStream(
            collector,
            Curriculum(config.curriculum, pool.info, config.seed),
            agent,
            batch_size=config.batch_size,
            horizon=config.horizon,
            seed=config.seed,
            demonstrations=loader,
            sharding=data_sharding(mesh),
        )
    assert loader is not None
    assert replay is not None
    assert config.online is not None
    return OnlineStream(
        loader,
        replay,
        collector,
        Curriculum(config.online.curriculum, pool.info, config.seed),
        config.online,
        borders=loader.has_borders,
        directory=config.run_dir / "replay",
    )


def _key(config: RLTrainConfig, what: str) -> jax.Array:
    """A PRNG key for one purpose, independent of the updates' keys."""
    return jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(what.encode()))


def build_loader(
    config: RLTrainConfig, transform: Transform, mesh: Any, replay: ReplayBuffer | None = None
) -> ACRLPDDataLoader:
    """The training loader: batches sharded over the mesh, each host reading its share."""
    return create_acrlpd_data_loader(
        config.data,
        transform=transform,
        horizon=config.horizon,
        discount=config.discount,
        batch_size=config.batch_size,
        replay=replay,
        next_observations=config.has_critic,
        corrections=config.agent.heeds_corrections,
        tasks=config.agent.knows_tasks,
        suffixes=bool(config.agent.prompt_suffixes),
        sharding=data_sharding(mesh),
        host_id=jax.process_index(),
        host_count=jax.process_count(),
    )


def load_policy(config: RLTrainConfig, mesh: Any, key: jax.Array) -> Params | None:
    """The initial weights, read directly into their shards; None without `init_weights`."""
    if config.init_weights is None:
        return None
    leaves = policy_leaves(config)

    def fresh(path: str) -> jax.Array:
        leaf = leaves[path]
        return leaf.init(jax.random.fold_in(key, zlib.crc32(path.encode())), leaf.shape)

    reference = sharded_shapes(mesh, shapes_of(leaves))
    params = load(config.init_weights, reference, init=fresh)
    check_finite(params, source=config.init_weights)
    return params
