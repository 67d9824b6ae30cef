"""The numeric and text columns of a LeRobot dataset in memory, checked row by row against the metadata.

Values are never coerced: rows of the wrong length, numbers that do not survive the declared dtype (1.58 as int8) and
text where numbers are declared raise errors that name the file, the episode and the frame.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Shaped

from pirl.data import journal
from pirl.data.lerobot import DatasetMeta, EpisodeMeta, read_meta
from pirl.data.reading import DAMAGE, read_table, unreadable, wrong_length
from pirl.data.schema import INFO_FILE, Feature
from pirl.errors import DataError
from pirl.names import NEXT_DONE, NEXT_REWARD, NEXT_SUCCESS, NEXT_TRUNCATED

ROW_KEYS = ("episode_index", "frame_index", "timestamp", "task_index")
"""Columns of every LeRobot dataset."""
_UNREAD = {NEXT_REWARD, NEXT_SUCCESS, NEXT_DONE, NEXT_TRUNCATED}  # undeclared ones warn: they define outcomes
_HINT = "the file and its metadata belong to different datasets, or an export went wrong"


def read_dataset(root: Path) -> tuple[DatasetMeta, dict[str, Shaped[np.ndarray, "N ..."]]]:
    """Metadata and columns of one consistent state of the dataset, even while a writer appends to it."""
    root = root.expanduser().resolve()

    def read() -> tuple[DatasetMeta, dict[str, np.ndarray]]:
        meta = read_meta(root)
        return meta, read_columns(meta)

    return journal.consistent(root, read)


def read_columns(meta: DatasetMeta) -> dict[str, Shaped[np.ndarray, "N ..."]]:
    """Every low-dimensional column of the dataset as one array; an episode's rows are `start : start + length`."""
    keys = list(dict.fromkeys([*ROW_KEYS, *(key for key, feature in meta.features.items() if feature.is_column)]))
    for key in ROW_KEYS:
        if not meta.feature(key).is_number or math.prod(meta.features[key].shape) != 1:
            feature = meta.features[key]
            raise DataError(
                f"{meta.root / INFO_FILE}: feature {key!r} is {feature.dtype}{list(feature.shape)}",
                hint="expected one number per frame: download or export the dataset again",
            )
    parts: dict[str, list[np.ndarray]] = {key: [] for key in keys}
    files: dict[Path, list[EpisodeMeta]] = {}
    for episode in meta.episodes:
        files.setdefault(episode.data.path, []).append(episode)
    for path, episodes in files.items():
        table = read_table(meta.root, path, keys, episode=episodes[0].index, unread=_UNREAD)
        columns: dict[str, np.ndarray] = {}
        for key in keys:
            columns[key] = _to_numpy(table.column(key), meta.features[key], path, key, episodes)
            if len(columns) == len(ROW_KEYS):
                _check_rows(path, episodes, columns, meta.fps)
        for key, column in columns.items():
            parts[key].append(column)
    return {key: np.ascontiguousarray(np.concatenate(part)) for key, part in parts.items()}


def _to_numpy(
    column: pa.ChunkedArray, feature: Feature, path: Path, key: str, episodes: Sequence[EpisodeMeta]
) -> Shaped[np.ndarray, "n ..."]:
    """Convert a parquet column to an array of the declared dtype and shape."""

    def refuse(found: str, row: int = 0) -> DataError:
        return DataError(
            f"{path}{_place(episodes, row)}: column {key!r} holds {found}, expected {feature.dtype} of shape "
            f"{feature.shape}, as {INFO_FILE} declares",
            hint=_HINT,
        )

    rows = len(column)
    try:
        values = column.combine_chunks()
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
        levels, kind = _levels(values.type)
        shape = () if feature.shape in ((), (1,)) else feature.shape
        sizes = feature.shape if levels == len(feature.shape) else (math.prod(feature.shape),) if levels == 1 else shape
        if levels != len(sizes) or kind == "other" or (kind == "text") != (feature.dtype == "string"):
            raise refuse(str(column.type))
        before = 1
        for size in sizes:
            values = _flattened(values, size, before, refuse)
            before *= size
        if values.null_count:
            raise refuse("nothing (null)", int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))) // before)
        if kind == "text":
            return np.array(values.to_pylist(), dtype=np.dtypes.StringDType()).reshape(rows, *shape)
        stored = values.to_numpy(zero_copy_only=False)
    except DAMAGE as error:
        raise unreadable(path, episodes[0].index, error) from error
    array, changed = _cast(stored, np.dtype(feature.dtype))
    if changed.any():
        first = int(np.argmax(changed))
        raise refuse(f"{stored[first]} ({stored.dtype})", first // before)
    return array.reshape(rows, *shape)


def _levels(kind: pa.DataType) -> tuple[int, str]:
    """Nesting depth of lists, and the kind of the values in them."""
    levels = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind, levels = kind.value_type, levels + 1
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return levels, "text"
    numbers = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return levels, "numbers" if numbers else "other"


def _flattened(values: pa.Array, size: int, before: int, refuse: Any) -> pa.Array:
    """Flatten one level of lists, which must all have length `size`."""
    lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
    if (wrong := lengths != size).any():
        first = int(np.argmax(wrong))
        found = "nothing (null)" if lengths[first] < 0 else f"{lengths[first]} values, expected {size} per row"
        raise refuse(found, first // before)
    return values.flatten()


def _cast(stored: np.ndarray, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """(values cast to `dtype`, mask of values the cast changed). Rounding float64 to float32 is no change."""
    with np.errstate(all="ignore"):
        array = stored.astype(dtype, copy=False)
        if dtype == stored.dtype:
            return array, np.zeros(1, bool)
        if dtype == np.float32 and stored.dtype == np.float64:
            return array, np.isfinite(stored) & ~np.isfinite(array)
        back = array.astype(stored.dtype)
        same = (back == stored) | ((back != back) & (stored != stored))
        return array, ~same | ((array < 0) != (stored < 0))


def _check_rows(
    path: Path, episodes: Sequence[EpisodeMeta], columns: Mapping[str, np.ndarray], fps: int | float
) -> None:
    """Raise unless the rows are the listed episodes, in order, without gaps, at the declared rate."""
    owner, frame, time = (columns[key].reshape(-1) for key in ("episode_index", "frame_index", "timestamp"))
    counts = dict(zip(*np.unique(owner, return_counts=True), strict=True))
    for episode in episodes:
        if (found := int(counts.pop(episode.index, 0))) != episode.length:
            raise wrong_length(path, episode.index, found, "data rows", episode.length)
    lengths = [episode.length for episode in episodes]
    listed = np.repeat([episode.index for episode in episodes], lengths)
    if counts or (owner != listed).any():
        raise DataError(
            f"{path}: its rows are not those of episodes {listed[0]} to {listed[-1]}, one after the other",
            hint="rows are out of order or belong to episodes the metadata does not list: export the dataset again",
        )
    counted = np.concatenate([np.arange(length) for length in lengths])
    if (wrong := np.flatnonzero(frame != counted)).size:
        raise DataError(
            f"{path}: episode {listed[wrong[0]]}: frame_index is {frame[wrong[0]]}, expected {counted[wrong[0]]}",
            hint="frames are missing or out of order: export the episode again, or remove it",
        )
    if (wrong := np.flatnonzero(~(np.abs(time - counted / fps) <= 0.5 / fps))).size:  # NaN fails, too
        raise DataError(
            f"{path}: episode {listed[wrong[0]]}: frame {counted[wrong[0]]} has timestamp {time[wrong[0]]:.4f} s, "
            f"expected {counted[wrong[0]] / fps:.4f} s at the {fps} fps of {INFO_FILE}",
            hint=f"correct fps in {INFO_FILE}, or write timestamps as frame_index / fps",
        )


def _place(episodes: Sequence[EpisodeMeta], row: int) -> str:
    """The episode and frame of a row."""
    for episode in episodes:
        if row < episode.length:
            return f": episode {episode.index}, frame {row}"
        row -= episode.length
    return ""
