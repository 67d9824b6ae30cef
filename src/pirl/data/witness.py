"""Detects swapped columns and cameras by comparing a dataset with its own statistics.

LeRobot records minimum, maximum and mean of every feature of every episode. Data that changed since, or that belongs to
another feature, does not match them. Evidently swapped columns or cameras raise; other differences only warn, because
the statistics may be out of date. Without statistics nothing is checked.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped, UInt8

from pirl.data import journal
from pirl.data.episode_stats import sampled_frames
from pirl.data.lerobot import DatasetMeta, EpisodeMeta
from pirl.data.reading import column_names, read_json, read_table
from pirl.errors import DataError, PirlWarning, listing

_NAMES = ("min", "max", "mean")
_CLOSE = np.array([[1e-5], [1e-5], [2e-4]])  # tolerance relative to a column's range; means vary with summation order
_SWAPPED = 0.03  # difference of mean colours in [0, 1] below which cameras look alike
_THIN = 4  # pixel stride, enough for a mean

Bounds = Float[np.ndarray, "3 _"]
"""Minimum, maximum and mean of each entry."""
Recorded = Mapping[int, Mapping[str, Bounds]]
"""Recorded bounds by episode and feature."""


def recorded(meta: DatasetMeta, keys: Collection[str]) -> Recorded:
    """The dataset's own statistics of these features, by episode; missing or illegible ones are left out."""
    found: dict[int, dict[str, Bounds]] = {}
    try:
        for index, entry in _entries(meta, keys):
            for key in keys:
                values = [entry.get(f"{key}/{name}") for name in _NAMES]
                if (bounds := _bounds(values)) is not None:
                    found.setdefault(index, {})[key] = bounds
    except DataError:
        return {}
    return found


def _entries(meta: DatasetMeta, keys: Collection[str]) -> list[tuple[int, dict[str, Any]]]:
    file = meta.root / "meta/episodes_stats.jsonl"
    wanted = [f"{key}/{name}" for key in keys for name in _NAMES]
    entries: list[tuple[int, dict[str, Any]]] = []
    if meta.version != "v3.0" and journal.exists(meta.root, file):
        for line in read_json(meta.root, file, lines=True):
            stats = line.get("stats") if isinstance(line, dict) else None
            if isinstance(stats, dict) and type(line.get("episode_index")) is int:
                columns = {key: column for key in keys if isinstance(column := stats.get(key), dict)}
                told = {f"{key}/{name}": column.get(name) for key, column in columns.items() for name in _NAMES}
                entries.append((line["episode_index"], told))
    if meta.version == "v3.0":
        for file in journal.listed(meta.root, "meta/episodes/*/*.parquet"):
            present = [name for name in wanted if f"stats/{name}" in column_names(meta.root, file)]
            table = read_table(meta.root, file, ["episode_index", *(f"stats/{name}" for name in present)])
            for row in table.to_pylist():
                entries.append((row["episode_index"], {name: row[f"stats/{name}"] for name in present}))
    return entries


def _bounds(values: Sequence[Any]) -> Bounds | None:
    try:
        rows = [np.asarray(value, np.float64).reshape(-1) for value in values if value is not None]
        found = np.stack(rows) if len(rows) == len(_NAMES) else None
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is not None and np.isfinite(found).all() else None


def check_columns(meta: DatasetMeta, columns: Mapping[str, Shaped[np.ndarray, "N ..."]], keys: Collection[str]) -> None:
    """Raise for swapped columns; warn about columns that differ from their recorded statistics."""
    known = {key for key, feature in meta.features.items() if feature.is_number and len(feature.shape) <= 1}
    said, wrong = recorded(meta, sorted(known)), dict[str, list[str]]()
    for key in (key for key in keys if key in known):
        for episode in meta.episodes:
            bounds = said.get(episode.index, {})
            rows = columns[key][episode.start : episode.start + episode.length].reshape(episode.length, -1)
            found = _of_rows(rows)
            if key not in bounds or _fits(found, bounds[key]):
                continue
            telling = len(np.unique(rows)) > 2  # flag columns often agree by chance
            others = [other for other in bounds if other != key and _fits(found, bounds[other])] if telling else []
            if others and not _fits(bounds[key], bounds[others[0]]):
                raise DataError(
                    f"{episode.data.path}: episode {episode.index}: column {key!r} holds what was recorded as "
                    f"{others[0]!r}, by the statistics in {meta.root / 'meta'}",
                    hint="columns have changed places: export the dataset again, or rename them back",
                )
            wrong.setdefault(key, []).append(_difference(found, bounds[key], episode.index))
    if wrong:
        told = [f"{key}: {found[0]}" + f" ({len(found)} episodes)" * (len(found) > 1) for key, found in wrong.items()]
        warnings.warn(
            f"{meta.root}: columns differ from the statistics that were recorded with them:\n{listing(told)}\n"
            "  hint: if they were changed on purpose, recompute the dataset's statistics; otherwise download it again",
            PirlWarning,
            stacklevel=3,
        )


def _of_rows(rows: Shaped[np.ndarray, "T D"]) -> Bounds:
    wide = rows.astype(np.float64)
    return np.stack([wide.min(0), wide.max(0), wide.mean(0)])


def _fits(found: Bounds, said: Bounds) -> bool:
    if found.shape != said.shape:
        return False
    scale = np.maximum(said[1] - said[0], 0) + 1e-2 * np.abs(said).max(0) + 1e-6
    return bool((np.abs(found - said) <= _CLOSE * scale + 1e-9).all())


def _difference(found: Bounds, said: Bounds, episode: int) -> str:
    if found.shape != said.shape:
        return f"episode {episode} has {found.shape[1]} entries, {said.shape[1]} were recorded"
    row, entry = np.unravel_index(np.argmax(np.abs(found - said)), found.shape)
    name = _NAMES[int(row)]
    return (
        f"the {name} of entry {entry} in episode {episode} is {found[row, entry]:.6g}, recorded {said[row, entry]:.6g}"
    )


def check_pictures(
    episode: EpisodeMeta, camera: str, frames: UInt8[np.ndarray, "T h w 3"], said: Recorded, *, content: float
) -> None:
    """Raise if a camera's images are evidently another's. `content`: share of the area that is not letterbox."""
    bounds = said.get(episode.index, {})
    if camera not in bounds:
        return
    seen = frames[sampled_frames(len(frames)), ::_THIN, ::_THIN].mean((0, 1, 2)) / (255 * content)
    away = {key: float(np.abs(seen - one[2]).max()) for key, one in bounds.items() if one.shape == (3, 3)}
    nearest = min(away, key=lambda key: (away[key], key != camera), default=camera)
    if nearest != camera and away[camera] > _SWAPPED and 4 * away[nearest] < away[camera]:
        raise DataError(
            f"{episode.cameras[camera].path}: episode {episode.index}: the pictures of {camera} are those recorded as "
            f"{nearest}, by the statistics (mean colour off by {away[camera]:.3f}, from {nearest} {away[nearest]:.3f})",
            hint="cameras have changed places: download or export the dataset again, or rename them back",
        )
