"""Atomically written export folders, and their normalisation statistics."""

import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pirl.checkpoints.checksums import seal
from pirl.checkpoints.ownership import is_export, is_unfinished_export
from pirl.checkpoints.quiet import quieten_orbax
from pirl.checkpoints.run_directory import reason_of
from pirl.data.normalize import NormStats, parse_norm_stats
from pirl.data.schema import inside
from pirl.errors import CheckpointError, DataError, PirlError
from pirl.files import sync
from pirl.names import ASSETS_ITEM, CHECKSUMS_FILE, NORM_STATS_FILE

StatsSource = str | os.PathLike[str] | Mapping[str, Any]
"""Statistics as JSON text, the path of a norm_stats.json, or a dict."""


@contextmanager
def fresh_directory(target: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """A sibling folder to write into; it becomes `target` if the block succeeds.

    Replaces only an earlier export, which is moved aside and deleted after the new folder is in place. In a
    multi-process job all processes enter the block and process 0 does the moving.
    """
    quieten_orbax()
    final = Path(target).expanduser().absolute()
    check_replaceable(final, overwrite=overwrite)
    temporary, aside = final.with_name(f".{final.name}.writing"), final.with_name(f".{final.name}.replaced")
    first = jax.process_index() == 0
    if first:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(temporary)
    _together("writing")
    try:
        yield temporary
        _together("written")
        if first:
            seal(temporary, CHECKSUMS_FILE)
    except BaseException as error:
        if first:
            _remove_leftovers(temporary)
        if isinstance(error, PirlError) or not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"{final} could not be written: {reason_of(error)}",
            hint="is the disk full or read-only? No partial files remain; an earlier export is untouched",
        ) from error
    if first:
        _remove_leftovers(aside)
        if final.exists():
            os.rename(final, aside)
        os.rename(temporary, final)
        sync(final.parent)
        _remove_leftovers(aside)
    _together("renamed")


def check_replaceable(final: Path, *, overwrite: bool) -> None:
    """Raise unless `final` does not exist, or is an earlier export and `overwrite` is set."""
    if not final.exists() and not final.is_symlink():
        return
    if not overwrite:
        raise CheckpointError(
            f"{final} exists already", hint="choose another folder, or pass --overwrite to replace it"
        )
    if not is_export(final):
        raise CheckpointError(
            f"{final} is not an export of pirl, or holds other files too, and is not replaced",
            hint="choose another folder, or move this one away",
        )


def write_norm_stats(folder: Path, norm_stats: Mapping[str, StatsSource]) -> None:
    """Write `assets/<asset_id>/norm_stats.json` for every asset, where OpenPI expects it."""
    for asset_id, source in norm_stats.items():
        file = folder / ASSETS_ITEM / check_asset_id(asset_id) / NORM_STATS_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(norm_stats_text(source, name=asset_id))


def check_asset_id(name: str) -> str:
    """The name, if it leads to a folder inside `assets`."""
    if not inside(name):
        raise CheckpointError(f"{name!r} cannot name an asset", hint="a name such as trossen or me/my_robot")
    return name


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write further files of a folder, by name."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def norm_stats_text(source: StatsSource, *, name: str) -> str:
    """The validated content of a norm_stats.json: with broken statistics a policy would move the robot wrongly."""
    if isinstance(source, Mapping):
        content = source if "norm_stats" in source else {"norm_stats": source}
        text = json.dumps(content, indent=2, default=lambda x: np.asarray(x).tolist())
    elif isinstance(source, str) and source.lstrip().startswith("{"):
        text = source
    else:
        try:
            text = Path(source).expanduser().read_text()
        except OSError as error:
            raise CheckpointError(f"no norm statistics for {name!r} at {os.fspath(source)}: {error}") from error
    _parsed(text, name)
    return text


def norm_stats_dims(text: str, *, name: str) -> dict[str, int]:
    """Key -> dimension of a norm_stats.json."""
    return {key: len(stats) for key, stats in _parsed(text, name).items()}


def _parsed(text: str, name: str) -> dict[str, NormStats]:
    try:
        return parse_norm_stats(text, where=f"norm statistics {name!r}")
    except DataError as error:
        raise CheckpointError(error.message, hint=error.hint) from error


def _remove_leftovers(path: Path) -> None:
    """Delete the unfinished export under this name and Orbax's temporary folders for it; raises for foreign ones."""
    unfinished = path.parent.glob(f"{glob.escape(path.name)}.orbax-checkpoint-tmp*")
    for folder in (path, *unfinished):
        if is_unfinished_export(folder):
            shutil.rmtree(folder)
        elif folder.exists():
            raise CheckpointError(f"{folder} is in the way, and pirl did not write it", hint="move it elsewhere")


def _together(point: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"pirl.export.{point}")
