"""Checks of a run's datasets, tokenizer and statistics before decoding a frame.

Functions yield all problems as errors with hints instead of raising the first one.
"""

from collections.abc import Generator, Iterator
from pathlib import Path

from pirl.data import lerobot
from pirl.data.config import DataConfig
from pirl.data.create import (
    SYNTHETIC,
    create_tokenizer,
    find_columns,
    how_to_compute,
    missing_stats,
    open_source,
    select_cameras,
)
from pirl.data.dataset import LeRobotSource, MixedSource
from pirl.data.normalize import load_norm_stats, load_origin
from pirl.data.robots import Robot
from pirl.errors import DataError, PirlError, PirlWarning
from pirl.names import ACTIONS, NORM_STATS_FILE, STATE


class NotHereError(PirlError):
    """Cannot be checked before it is downloaded."""


def dataset_problems(
    config: DataConfig, robot: Robot, *, image_size: int, download: bool = False
) -> Generator[PirlError, None, list[LeRobotSource]]:
    """Yield problems of datasets that are missing, do not match the robot or cannot be mixed; returns the opened ones.

    Without `download`, a dataset that may exist on the hub yields `NotHereError`.
    """
    sources: list[LeRobotSource] = []
    if config.repo_ids == (SYNTHETIC,):
        return sources
    robot = select_cameras(robot, config.cameras)
    for name, success_file in zip(config.repo_ids, config.success_files, strict=True):
        if not download and (places := lerobot.to_download(name)):
            yield NotHereError(
                f"dataset {name} is not on this machine; looked at {', '.join(map(str, places))}",
                hint="check the path; a repo id is downloaded once everything else is right",
            )
            continue
        try:
            meta = lerobot.read_meta(lerobot.resolve(name))
            yield from _size_problems(name, meta, robot)
            sources.append(open_source(meta, config, robot, success_file, image_size, letterbox=True))
        except PirlError as error:
            yield error
    if len(sources) < 2 or len(sources) < len(config.repo_ids):
        return sources
    rates = {source.meta.root.name: source.meta.fps for source in sources}
    if len(set(rates.values())) > 1:
        yield DataError(
            f"the datasets run at different rates: {', '.join(f'{name} {fps} fps' for name, fps in rates.items())}",
            hint="a chunk of H actions would last differently long: resample them to one rate, or train on one of them",
        )
    try:
        MixedSource(sources, config.weights)
    except PirlError as error:
        yield error
    return sources


def _size_problems(name: str, meta: lerobot.DatasetMeta, robot: Robot) -> Iterator[DataError]:
    """Yield mismatches between the dataset's and the robot's state and action sizes."""
    state_keys, action_key = find_columns(robot, meta.features)
    for what, keys, expected in (
        (STATE, state_keys, robot.state_dim),
        (ACTIONS, (action_key,), robot.action_dim),
    ):
        if not set(keys) <= set(meta.features):
            continue  # reported when they are read
        found = sum(meta.features[key].shape[0] if meta.features[key].shape else 1 for key in keys)
        if found != expected:
            yield DataError(
                f"{name}: {what} ({' + '.join(keys)}) has {found} dimensions, robot {robot.name!r} has {expected}",
                hint=f"the dataset says it is of {meta.robot or 'an unnamed robot'}: set --data.robot, "
                "or describe yours with --data.robot module:NAME",
            )


def tokenizer_problems(choice: str) -> Iterator[PirlError]:
    """Yield the error of a tokenizer that cannot be loaded."""
    try:
        create_tokenizer(choice)
    except PirlError as error:
        yield error


def norm_stats_problems(
    config: DataConfig, robot: Robot, folder: Path, *, horizon: int, quantile: bool
) -> Iterator[PirlError | PirlWarning]:
    """Statistics in a folder that are missing, of another robot, or of another horizon."""
    if (missing := missing_stats(config, robot, horizon, folder)) is not None:
        yield missing
        return
    again = f"compute them again{how_to_compute(config, robot, horizon, folder, overwrite=True)}"
    try:
        stats, origin = load_norm_stats(folder), load_origin(folder)
    except PirlError as error:
        yield error
        return
    for key, dim in ((STATE, robot.state_dim), (ACTIONS, robot.action_dim)):
        found = stats[key]
        if len(found) < dim or (quantile and (found.q01 is None or found.q99 is None)):
            yield DataError(
                f"{folder / NORM_STATS_FILE}: {key} has {len(found)} dimensions"
                f"{'' if found.q01 is not None else ' and no quantiles'}; "
                f"robot {robot.name!r} needs {dim}{' with q01 and q99' if quantile else ''}",
                hint=again,
            )
    if origin is not None and origin.robot != robot.name:
        yield DataError(
            f"{folder / NORM_STATS_FILE} was computed for robot {origin.robot!r}, this run is of {robot.name!r}",
            hint=again,
        )
    if origin is not None and origin.horizon != horizon:
        problem = f"{folder / NORM_STATS_FILE} was computed for chunks of {origin.horizon} actions, the model predicts "
        problem += f"{horizon}"
        if any(robot.delta_mask):
            yield DataError(f"{problem}; statistics of relative actions depend on it", hint=again)
        else:
            yield PirlWarning(f"{problem}: actions of {robot.name!r} are absolute, so that the numbers hardly differ")
