"""Which normalisation statistics a run uses: FOLDER/NAME/norm_stats.json, where NAME is an asset id.

FOLDER is `data.assets_dir`, or the `assets` of a checkpoint. A run that starts from weights uses the statistics beside
them unless it has its own; a served checkpoint uses only its own.
"""

from pathlib import Path

from pirl.data.config import DataConfig
from pirl.data.robots import Robot
from pirl.names import ASSETS_ITEM, NORM_STATS_FILE


def asset_id(dataset: str) -> str:
    """The asset id of a dataset: the whole repo id (with owner), as in OpenPI; for a folder its base name."""
    folder = Path(dataset).expanduser()
    return folder.resolve().name if folder.is_dir() or len(Path(dataset).parts) != 2 else dataset


def named_asset(config: DataConfig, robot: Robot | None = None) -> str | None:
    """The asset id from the settings: `asset_id`, else the first dataset's, else the robot's name, else None."""
    first = asset_id(config.repo_ids[0]) if config.repo_ids else None
    return config.asset_id or first or (None if robot is None else robot.name)


def own_assets(config: DataConfig) -> Path | None:
    """The folder in `assets_dir` for the settings' statistics; None without an asset id."""
    named = named_asset(config)
    return None if named is None else Path(config.assets_dir).expanduser() / named


def assets_beside(weights: Path) -> dict[str, Path]:
    """A checkpoint's statistics: asset id -> folder."""
    assets = (weights if weights.is_dir() else weights.parent) / ASSETS_ITEM
    folders = [file.parent for file in sorted(assets.rglob(NORM_STATS_FILE))]
    return {folder.relative_to(assets).as_posix(): folder for folder in folders}


def choose_asset(found: dict[str, Path], named: str | None) -> str | None:
    """The named asset if it exists, else the only one, else None."""
    if named in found:
        return named
    return next(iter(found)) if len(found) == 1 else None
