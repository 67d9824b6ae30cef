"""From a `DataConfig` to the parts training needs: episode source, robot transform, batch loader."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pirl import names
from pirl.data import lerobot, synthetic, video
from pirl.data.assets import own_assets
from pirl.data.cache import CacheConfig
from pirl.data.config import DataConfig, Rule
from pirl.data.dataset import LeRobotSource, MixedSource, successful
from pirl.data.held_out import split
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.normalize import NormStats, load_norm_stats
from pirl.data.outcomes import OutcomeRule
from pirl.data.replay import ReplayBuffer
from pirl.data.robots import ROBOTS, Robot, get_robot
from pirl.data.stats import compute_norm_stats
from pirl.data.tokenizer import ByteTokenizer, PaliGemmaTokenizer, Tokenizer, WordTokenizer
from pirl.data.transforms import Transform
from pirl.errors import ConfigError, DataError, did_you_mean
from pirl.records import EpisodeSource

SYNTHETIC = "synthetic"
"""A dataset name that stands for generated demonstrations (`data.synthetic`)."""


def create_acrlpd_data_loader(
    config: DataConfig,
    *,
    transform: Transform,
    horizon: int,
    discount: float,
    batch_size: int = 128,
    replay: ReplayBuffer | None = None,
    next_observations: bool = True,
    corrections: bool = False,
    tasks: bool = False,
    suffixes: bool = False,
    sharding: Any = None,
    host_id: int = 0,
    host_count: int = 1,
) -> ACRLPDDataLoader:
    """A loader of the datasets in `config` and of `replay`; at least one of them is required.

    `transform` (see `create_transform`) also determines the robot and the size at which images are kept. Fills the
    frame cache before it returns. Close the loader, or use it as a context manager.
    """
    height, width = transform.image_size
    if height != width:
        raise ConfigError(f"the model's pictures are {height}x{width}", hint="datasets are read for square pictures")
    source, held_out = None, None
    if config.repo_ids:
        source, held_out = training_source(config, transform.robot, image_size=height)
    loader = ACRLPDDataLoader(
        source,
        transform,
        config=config,
        batch_size=batch_size,
        horizon=horizon,
        discount=discount,
        replay=replay,
        next_observations=next_observations,
        corrections=corrections,
        tasks=tasks,
        suffixes=suffixes,
        sharding=sharding,
        host_id=host_id,
        host_count=host_count,
    )
    loader.held_out = held_out
    return loader


def training_source(
    config: DataConfig, robot: Robot, *, image_size: int = 224
) -> tuple[EpisodeSource, EpisodeSource | None]:
    """(training episodes, held-out episodes or None). `successes_only` filters only the training episodes."""
    source, held_out = split(create_source(config, robot, image_size=image_size), config.held_out, config.seed)
    return successful(source) if config.successes_only else source, held_out


def create_transform(
    config: DataConfig,
    *,
    horizon: int,
    robot: Robot | None = None,
    norm_stats: Mapping[str, NormStats] | None = None,
    action_dim: int = 32,
    state_dim: int | None = None,
    token_len: int = 48,
    quantile: bool = False,
    discrete_state: bool = False,
    image_size: int = 224,
    default_prompt: str | None = None,
    prompt_suffixes: tuple[str, ...] = (),
) -> Transform:
    """The transform between the robot of `config` and a model of these sizes (arguments as in `Transform`).

    Pass `robot` for one that is not in the registry, `norm_stats` for statistics that are not in a file.
    """
    robot = select_cameras(robot or get_robot(config.robot), config.cameras)
    return Transform(
        robot=robot,
        norm_stats=find_norm_stats(config, robot, horizon) if norm_stats is None else norm_stats,
        tokenizer=create_tokenizer(config.tokenizer),
        action_dim=action_dim,
        state_dim=state_dim,
        token_len=token_len,
        quantile=quantile,
        discrete_state=discrete_state,
        image_size=(image_size, image_size),
        default_prompt=default_prompt,
        suffixes=prompt_suffixes,
    )


def open_dataset(
    dataset: str | Path, robot: Robot | str, *, outcome: Rule = "auto", image_size: int = 224
) -> EpisodeSource:
    """A LeRobot dataset (a folder or a repo id) as training reads it: episodes, rewards, ends, and images on demand."""
    config = DataConfig(repo_ids=(str(dataset),), outcome=outcome)
    return create_source(config, get_robot(robot) if isinstance(robot, str) else robot, image_size=image_size)


def create_source(config: DataConfig, robot: Robot, *, image_size: int = 224) -> EpisodeSource:
    """The datasets of `config`, mixed if there are several.

    If a camera's aspect ratio differs between datasets, images are stored with their letterbox, since they share a
    batch; otherwise the device adds it.
    """
    if config.repo_ids == (SYNTHETIC,):
        return synthetic.demonstrations(seed=config.seed, pictures=bool(robot.cameras))
    if not config.repo_ids:
        raise ConfigError("data: repo_ids is empty", hint="name at least one LeRobot dataset: a folder, or a repo id")
    robot = select_cameras(robot, config.cameras)
    metas = [lerobot.read_meta(lerobot.resolve(name)) for name in config.repo_ids]
    letterbox = _proportions_differ(metas, robot, image_size)
    files = zip(metas, config.success_files, strict=True)
    sources = [open_source(meta, config, robot, file, image_size, letterbox=letterbox) for meta, file in files]
    return sources[0] if len(sources) == 1 else MixedSource(sources, config.weights)


def open_source(
    meta: lerobot.DatasetMeta,
    config: DataConfig,
    robot: Robot,
    success_file: str | None,
    image_size: int,
    *,
    letterbox: bool = False,
) -> LeRobotSource:
    """Open one dataset of `config`: reads and checks numbers and outcomes, decodes no images."""
    state_key, action_key = find_columns(robot, meta.features)
    return LeRobotSource(
        meta.root,
        cameras=robot.find_cameras(meta.features, meta.cameras),
        state_key=state_key,
        action_key=action_key,
        outcome=OutcomeRule(
            rule=config.outcome,
            success_file=success_file,
            failure=config.failure,
            failure_reward=config.failure_reward,
        ),
        image_size=image_size,
        resize="exact" if config.exact_resize else "fast",
        letterbox=letterbox,
        cache=CacheConfig(tier=config.cache, folder=config.cache_dir),
    )


def _proportions_differ(metas: Sequence[lerobot.DatasetMeta], robot: Robot, image_size: int) -> bool:
    sizes: dict[str, set[tuple[int, int]]] = {}
    for meta in metas:
        for slot, key in robot.find_cameras(meta.features, meta.cameras).items():
            sizes.setdefault(slot, set()).add(video.frame_size(meta, key, image_size))
    return any(len(found) > 1 for found in sizes.values())


def find_columns(robot: Robot, features: Collection[str]) -> tuple[tuple[str, ...], str]:
    """The dataset's state columns and action column; LeRobot's standard names if none of the robot's keys match."""
    state = next((keys for keys in robot.state_keys if set(keys) <= set(features)), (names.LEROBOT_STATE,))
    return state, next((key for key in robot.action_keys if key in features), names.LEROBOT_ACTION)


def select_cameras(robot: Robot, slots: Collection[str] | None) -> Robot:
    """The robot with only these camera slots; None: unchanged."""
    if slots is None:
        return robot
    for slot in slots:
        if slot not in robot.cameras:
            raise did_you_mean(slot, robot.cameras, kind=f"camera slot of robot {robot.name!r}")
    left_out = [key for slot, keys in robot.cameras.items() if slot not in slots for key in keys]
    return replace(
        robot,
        cameras={slot: keys for slot, keys in robot.cameras.items() if slot in slots},
        optional_cameras=tuple(slot for slot in robot.optional_cameras if slot in slots),
        unused_cameras=(*robot.unused_cameras, *left_out),
    )


def create_tokenizer(choice: str) -> Tokenizer | None:
    """The tokenizer named `paligemma`, `byte`, `word` or `none`, or from a sentencepiece file."""
    if choice == "none":
        return None
    if choice == "byte":
        return ByteTokenizer()
    if choice == "word":
        return WordTokenizer()
    return PaliGemmaTokenizer(None if choice == "paligemma" else choice)


def find_norm_stats(config: DataConfig, robot: Robot, horizon: int) -> dict[str, NormStats]:
    """The statistics in `assets_dir/asset_id/norm_stats.json`; if missing, the error says how to compute them."""
    if config.repo_ids == (SYNTHETIC,):
        return compute_norm_stats(create_source(config, robot), robot, horizon)
    if (folder := own_assets(config)) is None:
        raise ConfigError(
            "data: set asset_id or repo_ids to choose the normalisation statistics",
            hint=f"set asset_id to the folder below {config.assets_dir} that holds {names.NORM_STATS_FILE}",
        )
    if (missing := missing_stats(config, robot, horizon, folder)) is not None:
        raise missing
    return load_norm_stats(folder)


def missing_stats(config: DataConfig, robot: Robot, horizon: int, folder: Path) -> DataError | None:
    """The error for a folder without statistics."""
    file = folder / names.NORM_STATS_FILE
    if file.is_file():
        return None
    how = f"compute them{how_to_compute(config, robot, horizon, folder)}"
    return DataError(
        f"no normalisation statistics at {file}",
        hint=f"{how}; or copy those of the checkpoint that training starts from",
    )


def how_to_compute(config: DataConfig, robot: Robot, horizon: int, folder: Path, *, overwrite: bool = False) -> str:
    """The command that computes the statistics of these settings; in Python for a robot that no command can name."""
    named = config.robot if ":" in config.robot else robot.name
    if ":" not in named and named not in ROBOTS:
        more = ", overwrite=True" if overwrite else ""
        return f" in Python: save_norm_stats({str(folder)!r}, compute_norm_stats(source, robot, {horizon}){more})"
    words = ["pirl", "norm-stats", *(config.repo_ids or ("DATASET",)), "--robot", named, "--horizon", str(horizon)]
    return f": {shlex.join([*words, '--out', str(folder), *(['--overwrite'] if overwrite else [])])}"
