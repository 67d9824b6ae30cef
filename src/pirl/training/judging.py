"""Held-out metrics of saved checkpoints, as training logs them; for one checkpoint or a paired comparison of two."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pirl.agents.agent import TrainState
from pirl.build import build_agent
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.data.create import create_source, training_source
from pirl.errors import ConfigError, PirlWarning
from pirl.names import TRAIN_STATE_ITEM
from pirl.records import EpisodeSource
from pirl.training.acting import Found, acting_mesh, checkpoint_transform, load_groups
from pirl.training.build import build_held_out, build_held_out_loader
from pirl.training.held_out_metrics import paired_difference
from pirl.training.measured import Measured


def judged_data(config: RLTrainConfig, named: Sequence[str]) -> tuple[DataConfig, bool]:
    """(datasets to measure on, whether all are training datasets). Without names: the run's own."""
    own = config.data
    names = tuple(named) or own.repo_ids
    if not names:
        raise ConfigError("the checkpoint names no dataset", hint="name one: --data DATASET")
    trained = set(names) <= set(own.repo_ids)
    files = dict(zip(own.repo_ids, own.success_files, strict=True))
    labels = tuple(files.get(name) or "none" for name in names)
    # Decode only the episodes needed, not whole datasets; frames cached on disk are used.
    data = replace(own, repo_ids=names, weights=None, success_file=labels if set(labels) != {"none"} else None)
    return replace(data, cache="pool", episodes_per_memory_pool=own.episodes_per_memory_pool or 64), trained


def judged_episodes(config: RLTrainConfig, data: DataConfig, *, trained: bool, image_size: int) -> EpisodeSource:
    """The held-out episodes of the run's own datasets (all, with a warning, if it held none out); all of others."""
    robot = config.robot
    if not trained:
        return create_source(data, robot, image_size=image_size)
    _, held_out = training_source(data, robot, image_size=image_size)
    if held_out is not None:
        return held_out
    warnings.warn(
        "the run held nothing out (data.held_out): these numbers are of episodes it was trained on, and too good",
        PirlWarning,
        stacklevel=2,
    )
    return create_source(data, robot, image_size=image_size)


def judge(found: Found, data: DataConfig, *, trained: bool) -> Measured:
    """Load a checkpoint, with its critic if stored, and measure it. The weights are freed afterwards."""
    config, folder = found.config, found.folder
    agent, transform, mesh = build_agent(config), checkpoint_transform(folder, config), acting_mesh(config)
    groups = agent.acting_groups(config.rollout.best_of)
    if config.has_critic and (folder / TRAIN_STATE_ITEM).is_dir():
        groups |= {"critic"}
    elif config.has_critic:
        warnings.warn(
            f"{folder} holds no {TRAIN_STATE_ITEM}: the policy is measured, its critic is not",
            PirlWarning,
            stacklevel=2,
        )
    state = TrainState(step=jnp.zeros((), jnp.int32), params=load_groups(found, agent, mesh, groups))
    source = judged_episodes(config, data, trained=trained, image_size=transform.image_size[0])
    config = replace(config, data=data)
    with build_held_out_loader(config, transform, mesh, source) as loader:
        return build_held_out(config, agent, transform, mesh, loader, source).measure(state)


def comparison(this: Measured, other: Measured) -> dict[str, Any]:
    """Paired differences `this` - `other` on the same rows, with intervals over episodes; failures separately."""
    kinds = {"not_failed": this.outcome != 0, "failures": this.outcome == 0}
    found: dict[str, Any] = {}
    for name, a, b in (
        ("action_error", this.action_error, other.action_error),
        ("flow_loss", this.numbers.get("flow_loss"), other.numbers.get("flow_loss")),
    ):
        if a is None or b is None:
            continue
        for kind, rows in kinds.items():
            if rows.any():
                differs = asdict(paired_difference(a[rows], b[rows], this.episode[rows]))
                found[f"{name}_{kind}"] = {key: x if np.isfinite(x) else None for key, x in differs.items()}
    return found


def check_comparable(this: Found, other: Found) -> None:
    """Raise unless both checkpoints have the same horizon and norm stats, so that errors share units."""
    stats = [checkpoint_transform(Path(one.folder), one.config).norm_stats for one in (this, other)]
    same = all(
        np.array_equal(getattr(stats[0][key], name), getattr(stats[1][key], name))
        for key in ("state", "actions")
        for name in ("mean", "std", "q01", "q99")
        if stats[0] and stats[1]
    )
    if this.config.horizon != other.config.horizon or not same:
        raise ConfigError(
            f"{this.folder} and {other.folder} have other chunks or normalisation statistics: their errors are not in "
            "the same units",
            hint="measure each alone and compare action_error.robot_units of the files",
        )
