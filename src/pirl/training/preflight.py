"""Checks before a run: report every problem at once, before a frame is decoded or a program compiled.

`check` reads only metadata (names and shapes of weights, columns of datasets) and changes nothing on disk. Downloads
start only once everything else is right. `pirl train` and `--dry-run` make the same checks.
"""

import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pirl.agents.agent import Agent, TrainState
from pirl.build import policy_leaves, schedules
from pirl.checkpoints.fetch import to_download
from pirl.checkpoints.ocdbt import read_json
from pirl.checkpoints.restore import check_tree
from pirl.checkpoints.run import EXTRA_FILE, EXTRA_ITEM, steps_to_keep
from pirl.checkpoints.run_directory import METADATA_FILE, check_directory, complete_steps
from pirl.checkpoints.run_metadata import refused_changes
from pirl.checkpoints.split import keeps_policy, split_state
from pirl.checkpoints.weights import check_fits
from pirl.config import RLTrainConfig
from pirl.config_io import to_dict
from pirl.data import check as data
from pirl.data.assets import own_assets
from pirl.data.create import SYNTHETIC, select_cameras, training_source
from pirl.data.dataset import LeRobotSource
from pirl.data.fit import Expected, clip_warnings, fit_problems
from pirl.data.lerobot import to_download as to_download_dataset
from pirl.data.normalize import load_norm_stats
from pirl.data.pool import fingerprint
from pirl.envs.make import check_installed
from pirl.errors import CheckpointError, ConfigError, PirlError, PirlWarning, did_you_mean, listing, numbered
from pirl.files import size_of
from pirl.models.params import shapes_of
from pirl.names import ACTIONS, NORM_STATS_FILE, TRAIN_STATE_ITEM
from pirl.parallel.sharding import check_batch, validate_fsdp_sharding
from pirl.planning.memory import leaf_bytes
from pirl.planning.plan import batch_shapes
from pirl.rollout.evaluate import EVAL_METRICS
from pirl.training.build import stats_of_weights
from pirl.training.measured import metric_names as held_out_metrics
from pirl.training.streams import logged_names

GB = 10**9
TIMES = ("time/seconds", "time/step_seconds", "time/samples_per_second", "time/mfu", "time/stall_fraction")


class PreflightError(PirlError):
    """Several problems of one run. Nothing was changed on disk."""

    def __init__(self, problems: list[PirlError]) -> None:
        found = numbered([(problem.message, problem.hint) for problem in problems])
        super().__init__(f"{len(problems)} problems; nothing was started or changed\n{found}")
        self.problems = tuple(problems)


def check(
    config: RLTrainConfig,
    agent: Agent,
    mesh: jax.sharding.Mesh,
    shapes: TrainState,
    *,
    resume: bool = False,
    overwrite: bool = False,
    fresh_if_missing: bool = False,
    own_metrics: bool = False,
) -> None:
    """Raise if the run cannot succeed: a single problem as its own error, several as one `PreflightError`.

    `shapes`: the training state's, with shardings. `own_metrics`: an `eval_fn` may log any metric name.
    """
    modes = {"resume": resume, "overwrite": overwrite, "fresh_if_missing": fresh_if_missing}
    checks: list[Callable[[], Iterator[PirlError | PirlWarning]]] = [
        partial(folder_problems, config, shapes, **modes),
        partial(device_problems, config, mesh, shapes),
        partial(environment_problems, config),
        partial(data_problems, config),
        partial(weight_problems, config),
        partial(metric_problems, config, agent, shapes, own_metrics=own_metrics),
        partial(disk_problems, config, shapes),
    ]
    problems = _collect(checks)
    if problems and all(isinstance(problem, data.NotHereError) for problem in problems):
        problems = _collect(
            [partial(data_problems, config, download=True), partial(weight_problems, config, download=True)]
        )
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PreflightError(problems)


def _collect(checks: list[Callable[[], Iterator[PirlError | PirlWarning]]]) -> list[PirlError]:
    """Problems that the checks yield or raise; shows their warnings."""
    problems: list[PirlError] = []
    for one in checks:
        try:
            for found in one():
                if isinstance(found, PirlError):
                    problems.append(found)
                else:
                    warnings.warn(found, stacklevel=3)
        except PirlError as error:
            problems.append(error)
    return problems


def folder_problems(config: RLTrainConfig, shapes: TrainState, **modes: bool) -> Iterator[PirlError]:
    """A run folder that is in use, has nothing to resume from, or holds a state of another structure."""
    if not check_directory(config.run_dir, **modes):
        return
    step = complete_steps(config.run_dir)[-1]
    folder = config.run_dir / str(step)
    file = folder / EXTRA_ITEM / METADATA_FILE
    saved = read_json(file).get("config", {}) if file.is_file() else {}
    if refused := refused_changes(saved, to_dict(config)):
        yield CheckpointError(
            f"{folder} was trained with other settings that shape its state\n{listing(list(refused.values()))}",
            hint="resume with the saved settings, or start a new run from its weights: "
            f"--exp-name NAME --init-weights {folder}",
        )
        return
    item = folder / TRAIN_STATE_ITEM
    if not item.is_dir():
        yield CheckpointError(
            f"{folder} holds weights only (checkpoint.save params)",
            hint=f"start a new run from them: --exp-name NAME --init-weights {folder}",
        )
        return
    check_tree(item, split_state(shapes, keep_policy=keeps_policy(folder))[1])
    yield from position_problems(config, read_json(folder / EXTRA_ITEM / EXTRA_FILE).get("stream", {}))


def position_problems(config: RLTrainConfig, saved: Mapping[str, Any]) -> Iterator[PirlError]:
    """A resumed run whose data differ from those it started with."""
    for what, had, has in (
        ("collects episodes with `online`", "replay" in saved, config.online is not None),
        ("reads a dataset", "data" in saved, config.agent.uses_dataset),
    ):
        if had != has:
            yield CheckpointError(
                f"the saved run {'' if had else 'never '}{what}, this one {'does' if has else 'does not'}",
                hint="resume with the saved setting, or start a new run from its weights",
            )
            return
    position, names = saved.get("data"), config.data.repo_ids
    if position is None:
        return
    if position["seed"] != config.data.seed:
        yield CheckpointError(
            f"data.seed was {position['seed']}, now it is {config.data.seed}",
            hint="resume with the seed the run began with",
        )
    elif names and (names == (SYNTHETIC,) or not any(map(to_download_dataset, names))):
        robot = select_cameras(config.robot, config.data.cameras)
        source, _ = training_source(config.data, robot, image_size=config.model.image_size)
        if fingerprint(source) != position["fingerprint"]:
            yield CheckpointError(
                f"{', '.join(names)}: the episodes to train on have changed since the run began "
                "(datasets, labels, weights or data.held_out)",
                hint="resume with the same data, or start a new run from its weights: --exp-name NAME "
                "--init-weights CHECKPOINT",
            )


def device_problems(config: RLTrainConfig, mesh: jax.sharding.Mesh, shapes: TrainState) -> Iterator[PirlError]:
    """A batch that the devices cannot share, or weights that cannot be sharded."""
    try:
        check_batch(config.batch_size, mesh)
        per_device, parts = config.batch_size // mesh.size, config.agent.parts
        if per_device % parts:
            raise ConfigError(
                f"each of {mesh.size} device(s) gets {per_device} samples, in {parts} parts",
                hint=f"take a batch size that is a multiple of devices × agent.accumulate = {mesh.size * parts}",
            )
    except ConfigError as error:
        yield error
    validate_fsdp_sharding(shapes, mesh)


def environment_problems(config: RLTrainConfig) -> Iterator[PirlError]:
    """Simulators that are not installed."""
    if config.env is not None and (config.acts or config.evaluation):
        check_installed(config.env)
    return iter(())


def data_problems(config: RLTrainConfig, *, download: bool = False) -> Iterator[PirlError | PirlWarning]:
    """Datasets, tokenizer and statistics."""
    names, robot = config.data.repo_ids, config.robot
    sources: list[LeRobotSource] = []
    if config.agent.uses_dataset:
        size = config.model.image_size
        sources = yield from data.dataset_problems(config.data, robot, image_size=size, download=download)
        yield from value_problems(config, sources)
    yield from data.tokenizer_problems(config.data.tokenizer)
    if names == (SYNTHETIC,):
        return
    if (folder := own_assets(config.data)) is not None:
        folder = stats_of_weights(config) or folder
        if not folder.exists() and any(folder == Path(name) for name in names):
            return  # a mistyped dataset path is already reported as a missing dataset
        found = data.norm_stats_problems(
            config.data, robot, folder, horizon=config.horizon, quantile=config.quantile_norm
        )
        yield from found
        yield from clip_problems(config, sources, folder)
    elif config.agent.uses_dataset:
        hint = "name one: --data-path DATASET (a LeRobot folder or a hub repo id)"
        yield ConfigError(f"{config.name} has no dataset", hint=hint)
    else:
        yield ConfigError(
            "no data.asset_id and no dataset to choose the normalisation statistics by",
            hint=f"--data.asset-id NAME, the folder below {config.data.assets_dir} that holds them",
        )


def misfits(config: RLTrainConfig) -> Iterator[PirlError | PirlWarning]:
    """Settings that do not fit the datasets; yields nothing if a dataset is missing or has problems of its own."""
    sources: list[LeRobotSource] = []

    def opened() -> Iterator[PirlError]:
        sources.extend(
            (yield from data.dataset_problems(config.data, config.robot, image_size=config.model.image_size))
        )

    if not config.agent.uses_dataset or any(opened()):
        return
    yield from value_problems(config, sources)
    if (folder := stats_of_weights(config) or own_assets(config.data)) is not None:
        yield from clip_problems(config, sources, folder)


def value_problems(config: RLTrainConfig, sources: Sequence[LeRobotSource]) -> Iterator[PirlError | PirlWarning]:
    """Rewards and episode lengths that do not fit the critic's value range and horizon."""
    if not config.has_critic or len(sources) < len(config.data.repo_ids):
        return
    rewards = config.agent.reward_range(config)
    bounds = None if rewards is None else (rewards.low, rewards.high)
    ahead = config.data.n_step * config.critic_horizon
    once = rewards is not None and rewards.once
    expected = Expected(discount=config.discount, rewards=bounds, once=once, ahead=ahead)
    yield from fit_problems(sources, expected)


def clip_problems(config: RLTrainConfig, sources: Sequence[LeRobotSource], folder: Path) -> Iterator[PirlWarning]:
    """Actions that, normalised by these statistics, exceed the critic's `action_clip`."""
    if not config.agent.chooses or not (folder / NORM_STATS_FILE).is_file():
        return
    stats, robot = load_norm_stats(folder)[ACTIONS], config.robot
    if len(stats) < robot.action_dim or (config.quantile_norm and stats.q01 is None):
        return  # already reported
    clip, steps = config.critic.action_clip, config.critic_horizon
    yield from clip_warnings(sources, robot, stats, clip=clip, steps=steps, quantile=config.quantile_norm)


def weight_problems(config: RLTrainConfig, *, download: bool = False) -> Iterator[PirlError]:
    """Missing weights, or weights of another model (by names and shapes)."""
    where = config.init_weights
    if where is None:
        return
    if not download and (place := to_download(where)):
        yield data.NotHereError(
            f"the weights {where} are not on this machine; looked at {place}",
            hint="they are downloaded once everything else is right",
        )
    else:
        check_fits(where, shapes_of(policy_leaves(config)))


def metric_problems(
    config: RLTrainConfig, agent: Agent, shapes: TrainState, *, own_metrics: bool = False
) -> Iterator[PirlError]:
    """Metrics for early stopping or keep_best that the run never logs."""
    rules = {"early_stop": config.early_stop, "checkpoint.keep_best": config.checkpoint.keep_best}
    for name, rule in rules.items():
        if rule is None:
            continue
        known = metric_names(config, agent, shapes)
        if rule.metric.startswith("eval/") and rule.metric in EVAL_METRICS and config.evaluation is None:
            yield ConfigError(
                f"{name}.metric is {rule.metric!r}, and the run does not evaluate",
                hint="--evaluation.interval N evaluates every N steps (it needs an environment)",
            )
        elif known is not None and rule.metric not in known and not own_metrics:
            error = did_you_mean(rule.metric, known, kind=f"metric in {name}.metric:")
            yield ConfigError(error.message, hint=error.hint)
    best = config.checkpoint.keep_best
    measured = config.held_out if best and best.metric.startswith("held_out/") else config.evaluation
    if best and best.metric.startswith(("eval/", "held_out/")) and measured is not None:
        every, saved = measured.interval, config.checkpoint.save_interval
        if every % saved and saved % every and math.lcm(every, saved) > config.num_train_steps:
            yield ConfigError(
                f"only the last step is both evaluated (every {every}) and saved (every {saved}): no choice of a best",
                hint=f"make one a multiple of the other: --checkpoint.save-interval {every}",
            )


def metric_names(config: RLTrainConfig, agent: Agent, shapes: TrainState) -> set[str] | None:
    """Names of all metrics the run logs; None if `update` cannot be traced with the standard batch."""
    try:
        batch, key = batch_shapes(agent, config.batch_sizes), jax.eval_shape(lambda: jax.random.key(0))
        _, metrics = jax.eval_shape(agent.update, shapes, batch, key)
    except Exception:  # a custom batch type
        return None
    evaluated = EVAL_METRICS if config.evaluation is not None else ()
    held_out = held_out_metrics(values=config.has_critic) if config.data.held_out and config.agent.uses_dataset else ()
    return {*metrics, *schedules(config), *TIMES, *logged_names(config), *evaluated, *held_out}


def disk_problems(config: RLTrainConfig, shapes: TrainState) -> Iterator[PirlError]:
    """Not enough disk for the kept checkpoints and the one being written, counting space of existing ones as free."""
    needed, steps = checkpoint_bytes(config, shapes)
    held = sum(size_of(config.run_dir / str(step)) for step in complete_steps(config.run_dir))
    place = next(parent for parent in (config.run_dir, *config.run_dir.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free + held:
        yield CheckpointError(
            f"the checkpoints take up to {needed / GB:.1f} GB ({steps} steps), and {place} has {free / GB:.1f} GB free",
            hint="keep fewer (--checkpoint.keep-period None, --checkpoint.keep-last 1) or their weights alone "
            "(--checkpoint.save params), or name another disk: --checkpoint.base-dir PATH",
        )


def checkpoint_bytes(config: RLTrainConfig, shapes: TrainState) -> tuple[int, int]:
    """Most (bytes, steps) on disk at any time: the kept steps and the one being written."""
    rule, total = config.checkpoint, config.num_train_steps
    steps = sorted({*range(rule.save_interval, total + 1, rule.save_interval), total})
    scores = {step: float(step) for step in steps} if rule.keep_best else {}
    most = min(len(steps_to_keep(steps, scores, rule)) + 1, len(steps))
    served, rest = split_state(shapes)
    weights, others = (sum(map(leaf_bytes, jax.tree.leaves(tree))) for tree in (served, rest))
    resumable = min(most, 2) if rule.save == "params" else most
    return most * weights + resumable * others, most
