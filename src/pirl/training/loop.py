"""The training loop, shared by all algorithms; runs on one device or many hosts and resumes bit-exactly."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import jax

from pirl.agents.agent import Agent, TrainState
from pirl.build import build_agent
from pirl.checkpoints.run import Checkpoints
from pirl.checkpoints.run_directory import prepare_directory
from pirl.checkpoints.run_metadata import check_compatible, run_metadata
from pirl.config import RLTrainConfig
from pirl.config_io import to_dict
from pirl.data.assets import named_asset
from pirl.parallel import distributed
from pirl.parallel.failures import all_alive
from pirl.parallel.sharding import make_mesh, sharded_shapes, state_shardings
from pirl.planning.choices import with_choices
from pirl.planning.plan import batch_shapes
from pirl.rollout.collect import CollectionStoppedError
from pirl.training import preflight, recovered
from pirl.training.build import build_acting, build_transform, load_policy
from pirl.training.callbacks import callbacks
from pirl.training.dry_run import describe_run
from pirl.training.eval_fn import EvalFn, find_eval_fn
from pirl.training.evaluator import Evaluations
from pirl.training.recovered import Recovery
from pirl.training.step import Step
from pirl.training.streams import Stream

EXPECTED_CHANGES = (
    *("exp_name", "num_train_steps", "log_interval", "sinks", "tracking", "checkpoint", "mesh", "early_stop"),
    *("debug_nans", "log_memory", "watchdog", "recovery", "evaluation.films", "evaluation.films_kept"),
    *("rollout.backend", "rollout.num_workers", "rollout.worker_timeout", "rollout.worker_start_timeout"),
)
"""Settings that may differ on resume: none of them affects an update."""


def train(
    config: RLTrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    fresh_if_missing: bool = False,
    dry_run: bool = False,
    eval_fn: EvalFn | None = None,
) -> int:
    """Train as configured; returns the exit code: 0 done, 130 interrupted after a final checkpoint.

    `resume` continues the run; with `fresh_if_missing` a run without a checkpoint starts from scratch. `eval_fn`
    (default: the function `config.eval_fn` names) is called at evaluation intervals and its metrics are logged.
    """
    if eval_fn is None and config.eval_fn is not None:
        eval_fn = find_eval_fn(config.eval_fn)
    distributed.initialize()
    with all_alive(), ExitStack() as parts:
        mesh = make_mesh(config.mesh.size)
        modes = {"resume": resume, "overwrite": overwrite, "fresh_if_missing": fresh_if_missing}
        init_key, train_key = jax.random.split(jax.random.key(config.seed))
        agent = build_agent(config)
        shapes = sharded_shapes(mesh, jax.eval_shape(agent.init, init_key))
        preflight.check(config, agent, mesh, shapes, own_metrics=eval_fn is not None, **modes)
        chosen = with_choices(config)
        agent, transform, mesh = build_agent(chosen), build_transform(config), make_mesh(chosen.mesh.size)
        shapes = sharded_shapes(mesh, shapes)
        parts.enter_context(jax.debug_nans(config.debug_nans))
        update = parts.enter_context(Step(agent, mesh, shapes))
        if dry_run:
            describe_run(config, agent, mesh, shapes, update)
            return 0
        if not config.debug_nans:  # compile while data and weights are read
            update.prepare(shapes, batch_shapes(agent, config.batch_sizes), train_key)
        stream, evaluator = parts.enter_context(build_acting(config, agent, transform, mesh, eval_fn))
        gone_back = recovered.read(config.run_dir) if resume else ()
        going_on = prepare_directory(config.run_dir, **modes)
        if going_on:  # check before the folder changes
            with Checkpoints(config.run_dir, config.checkpoint, read_only=True) as saved:
                check_compatible(saved.metadata().get("config", {}), to_dict(config), ignore=EXPECTED_CHANGES)
        elif distributed.is_main():
            recovered.write(config.run_dir, gone_back)  # the folder may have been emptied
        assets = {named_asset(config.data, config.robot) or config.robot.name: transform.norm_stats or {}}
        about = run_metadata(to_dict(config)) | {"recoveries": [asdict(one) for one in gone_back]}
        with Checkpoints(config.run_dir, config.checkpoint, run=about, norm_stats=assets) as checkpoints:
            if going_on:
                state, extra = checkpoints.restore(shapes), checkpoints.extra()
            else:
                state, extra = initial_state(config, agent, mesh, shapes, init_key), {}
            if going_on or gone_back:
                stream.restore(recovered.beyond(extra.get("stream") or stream.state(), gone_back))
            state = update.shared(state)
            return run(config, agent, update, state, stream, checkpoints, train_key, extra, evaluator, gone_back)


def run(
    config: RLTrainConfig,
    agent: Agent,
    update: Step,
    state: TrainState,
    stream: Stream,
    checkpoints: Checkpoints,
    key: jax.Array,
    extra: dict[str, Any],
    evaluator: Evaluations | None = None,
    gone_back: Sequence[Recovery] = (),
) -> int:
    """Update until the last step, early stopping or an interrupt; then save a checkpoint."""
    with callbacks(config, agent, stream, checkpoints, extra, evaluator, gone_back) as around:
        state = around.begin(state)
        for step in range(around.start + 1, config.num_train_steps + 1):
            try:
                for batch in around.batches(step, state):
                    state, metrics = update(state, batch, jax.random.fold_in(key, around.updates))
                    around.updated(state, batch, metrics)
            except CollectionStoppedError:  # no update of this step has run
                around.interrupted(state, step)
                break
            state = around.after(state, step)
            if around.over:
                break
    return 130 if around.stopped else 0


def initial_state(
    config: RLTrainConfig, agent: Agent, mesh: jax.sharding.Mesh, shapes: TrainState, key: jax.Array
) -> TrainState:
    """A fresh state, initialised directly into its shards; no device ever holds it whole. Donates loaded weights."""
    weights = load_policy(config, mesh, key)
    make = jax.jit(agent.init, out_shardings=state_shardings(mesh, shapes), donate_argnums=1)
    return make(key, weights)
