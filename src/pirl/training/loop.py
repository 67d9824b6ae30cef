"""The training loop: one for every algorithm, from one device to many hosts, bit-exact on resume."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
from rich.console import Console

from pirl.agents.agent import Agent, TrainState
from pirl.build import build_agent, schedules
from pirl.checkpoints.run import Checkpoints
from pirl.checkpoints.run_directory import prepare_directory
from pirl.checkpoints.run_metadata import check_compatible, run_metadata
from pirl.config import RLTrainConfig
from pirl.config_io import to_dict, write_yaml
from pirl.data.assets import named_asset
from pirl.errors import EnvError
from pirl.names import CONFIG_FILE
from pirl.parallel import distributed
from pirl.parallel.sharding import make_mesh, sharded_shapes, state_shardings
from pirl.planning.choices import with_choices
from pirl.planning.flops import update_flops
from pirl.planning.memory import GPUMemoryMonitor
from pirl.planning.plan import batch_shapes
from pirl.rollout.collect import CollectionStoppedError
from pirl.training import preflight, recovered
from pirl.training.build import build_acting, build_transform, load_policy
from pirl.training.dry_run import describe_run
from pirl.training.early_stop import Patience
from pirl.training.ending import summary
from pirl.training.eval_fn import EvalFn, find_eval_fn
from pirl.training.evaluator import Evaluations
from pirl.training.interrupt import stop_on_signal
from pirl.training.metrics import MetricLog, Timers, check_finite, peak_flops
from pirl.training.pictures import save_camera_grid
from pirl.training.progress import Progress
from pirl.training.recovered import Recovery
from pirl.training.saving import Saver
from pirl.training.sinks import RunInfo
from pirl.training.step import Step
from pirl.training.streams import Stream
from pirl.training.watchdog import Watchdog

EXPECTED_CHANGES = (
    *("exp_name", "num_train_steps", "log_interval", "sinks", "tracking", "checkpoint", "mesh", "early_stop"),
    *("debug_nans", "log_memory", "watchdog", "recovery", "evaluation.films", "evaluation.films_kept"),
    *("rollout.backend", "rollout.num_workers", "rollout.worker_timeout", "rollout.worker_start_timeout"),
)
"""Settings that may change when a run resumes: none of them changes an update."""


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

    `resume` continues the run; with `fresh_if_missing` it starts one that has no checkpoint yet. `eval_fn` is called
    at evaluation intervals, its numbers are logged; by default it is the one that `config.eval_fn` names.
    """
    if eval_fn is None and config.eval_fn is not None:
        eval_fn = find_eval_fn(config.eval_fn)
    distributed.initialize()
    mesh = make_mesh(config.mesh.size)
    modes = {"resume": resume, "overwrite": overwrite, "fresh_if_missing": fresh_if_missing}
    init_key, train_key = jax.random.split(jax.random.key(config.seed))
    agent = build_agent(config)
    shapes = sharded_shapes(mesh, jax.eval_shape(agent.init, init_key))
    preflight.check(config, agent, mesh, shapes, own_metrics=eval_fn is not None, **modes)
    chosen = with_choices(config)
    agent, transform, mesh = build_agent(chosen), build_transform(config), make_mesh(chosen.mesh.size)
    shapes = sharded_shapes(mesh, shapes)
    with distributed.all_alive(), ExitStack() as parts:
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
        if going_on:  # before anything in the folder is changed
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
    start, total, is_main = int(extra.get("step", 0)), config.num_train_steps, distributed.is_main()
    memory, patience = GPUMemoryMonitor(), Patience(config.early_stop, extra.get("patience"))
    updates, step, stopped = int(state.step), start, False
    first_update, began = updates, time.monotonic()
    if config.log_memory:
        memory.mark("weights loaded")
    ending = "" if start < total else f"step {start} of {total} is done already; --max-steps N trains on"
    if is_main:
        write_yaml(config.run_dir / CONFIG_FILE, config, overwrite=True)
    with (
        metric_log(config, extra) as log,
        Progress(config.name, total, start=start, interval=None, is_main=is_main) as progress,
        stop_on_signal() as stop,
        Watchdog(config.watchdog, config.run_dir) as watchdog,
    ):
        saver = Saver(
            agent=agent,
            checkpoints=checkpoints,
            stream=stream,
            log=log,
            patience=patience,
            stop=stop,
            grace=config.checkpoint.grace,
        )
        if not extra and (evaluator is None or not evaluator.hold_out):
            state = agent.heard(state, {}, progress.say)
        if evaluator is not None and evaluator.due(0, total) and not extra:
            state, _ = evaluated(evaluator, agent, log, state, 0, total, progress.say)
        for step in range(start + 1, total + 1):
            try:
                for batch in stream.round(step, state, lambda: bool(stop), progress.say):
                    if updates == 0 and is_main:
                        save_camera_grid(batch["observations"], config.run_dir / "first_batch.png")
                    state, metrics = update(state, batch, jax.random.fold_in(key, updates))
                    if config.log_memory and updates == first_update:
                        memory.mark(f"step {step}, compiled" if jax.block_until_ready(metrics) else "")
                    log.count_flops(partial(update_flops, agent, state, batch))
                    updates += 1
                    stream.notice(metrics)
                    log.gather(metrics)
            except CollectionStoppedError:  # no update of this step has run
                stopped, ending = True, f"interrupted while collecting for step {step}; --resume continues"
                ending += saver.leave(state, step - 1, None)
                break
            except EnvError:  # broken environments; the weights are fine
                saver.save(state, step - 1, None)
                raise
            own = stream.metrics() | ({recovered.METRIC: len(gone_back)} if gone_back else {})
            values = log.log(step, own, updates=updates, last=step == total)
            if values is not None:
                check_finite(values, step=step)
                if config.log_memory:
                    memory.mark(f"step {step}")
            if evaluator is not None and evaluator.due(step, total):
                try:
                    with log.paused():
                        state, results = evaluated(evaluator, agent, log, state, step, total, progress.say)
                except EnvError:
                    saver.save(state, step, values)
                    raise
                values = (values or {}) | results
            watchdog.beat()
            if values and (alarms := watchdog.look(values)):
                log.write(step, alarms)
            if patience.exhausted(values if values and log.closing is None else {}) and step < total:
                ending = f"stopped early at step {step}: {patience}"
            elif step < total and stop.agreed(step):
                stopped, ending = True, f"interrupted after step {step}; --resume continues"
            over = step == total or bool(ending)
            if stopped:
                ending += saver.leave(state, step, values)
            elif over or checkpoints.due(step):
                saver.save(state, step, values)
                stop.warn(config.checkpoint.grace, checkpoints.seconds, progress.say)
            progress.advance()
            if over:
                break
        saver.finish()
    if is_main and (said := summary(config, checkpoints, start=start, step=step, seconds=time.monotonic() - began)):
        print("\n".join([said, *map(str, gone_back)]))
    if is_main and config.log_memory:
        Console(stderr=True).print(memory.report(), markup=False)
    if is_main and ending:
        Console(stderr=True).print(f"{config.name}/{config.exp_name}: {ending}", markup=False, soft_wrap=True)
    return 130 if stopped else 0


def evaluated(
    evaluator: Evaluations,
    agent: Agent,
    log: MetricLog,
    state: TrainState,
    step: int,
    total: int,
    say: Callable[[str], None],
) -> tuple[TrainState, dict[str, float]]:
    """Evaluate, log and show it; returns the state, possibly updated by the algorithm from the results, and the
    results.
    """
    results = evaluator(state, step, total, say)
    log.write(step, results)
    log.show(step, evaluator.shown)
    return agent.heard(state, results, say), results


def initial_state(
    config: RLTrainConfig, agent: Agent, mesh: jax.sharding.Mesh, shapes: TrainState, key: jax.Array
) -> TrainState:
    """A fresh state, made in its shards: no device ever holds the whole, and nothing is built twice."""
    weights = load_policy(config, mesh, key)
    make = jax.jit(agent.init, out_shardings=state_shardings(mesh, shapes), donate_argnums=1)
    return make(key, weights)


def metric_log(config: RLTrainConfig, extra: Mapping[str, Any]) -> MetricLog:
    """Console, files and the chosen services; `extra` is stored state of the step to resume from."""
    goes_on = extra.get("step", 0) < config.num_train_steps
    named = f"{config.name}/{config.exp_name}"
    peak = peak_flops(jax.devices()[0].device_kind)
    return MetricLog(
        config.run_dir,
        ("console", *config.sinks),
        interval=config.log_interval,
        is_main=distributed.is_main(),
        timers=Timers(batch_size=config.batch_size, peak_flops=peak and peak * jax.device_count()),
        schedules=schedules(config),
        run=RunInfo(name=named, steps=config.num_train_steps, config=to_dict(config), **asdict(config.tracking)),
        resume_step=int(extra["step"]) if extra else None,
        pending=extra.get("pending"),
        closing=extra.get("closing") if goes_on else None,
    )
