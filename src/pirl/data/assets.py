"""Which normalisation statistics a run uses: FOLDER/NAME/norm_stats.json, where NAME is an asset id.

FOLDER is `data.assets_dir`, or the `assets` of a checkpoint: a run that starts from weights takes the statistics beside
them unless it has its own, and a checkpoint acts with its own alone.
"""

from pathlib import Path

from pirl.data.config import DataConfig
from pirl.data.robots import Robot
from pirl.names import ASSETS_ITEM, NORM_STATS_FILE


def asset_id(dataset: str) -> str:
    """The name of a dataset's statistics: a repo id keeps its owner, as in OpenPI; a folder goes by its own name."""
    folder = Path(dataset).expanduser()
    return folder.resolve().name if folder.is_dir() or len(Path(dataset).parts) != 2 else dataset


def named_asset(config: DataConfig, robot: Robot | None = None) -> str | None:
    """The asset id the settings name: their own, their first dataset's, or the robot's; None without any."""
    first = asset_id(config.repo_ids[0]) if config.repo_ids else None
    return config.asset_id or first or (None if robot is None else robot.name)


def own_assets(config: DataConfig) -> Path | None:
    """The folder in `assets_dir` where the settings look for statistics; None where nothing names them."""
    named = named_asset(config)
    return None if named is None else Path(config.assets_dir).expanduser() / named


def assets_beside(weights: Path) -> dict[str, Path]:
    """The statistics of a checkpoint: asset id -> folder."""
    assets = (weights if weights.is_dir() else weights.parent) / ASSETS_ITEM
    folders = [file.parent for file in sorted(assets.rglob(NORM_STATS_FILE))]
    return {folder.relative_to(assets).as_posix(): folder for folder in folders}


def choose_asset(found: dict[str, Path], named: str | None) -> str | None:
    """The one that is named, or the only one; None where neither is there."""
    if named in found:
        return named
    return next(iter(found)) if len(found) == 1 else None
