"""Stores labels as `next.success`, the column LeRobot reads, in every file that lists columns.

All files are staged and committed atomically, like an episode (`episode_files`). Rows, row groups, videos and other
columns do not change.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pirl.data import labels, lerobot
from pirl.data.columns import V21, V30
from pirl.data.dataset import read_outcomes
from pirl.data.episode_files import new_file, open_writer, write_json
from pirl.data.episode_stats import ColumnStats, column_stats, merge_stats
from pirl.data.journal import commit, lock_dataset, recover, release_dataset, staging
from pirl.data.lerobot import DatasetMeta
from pirl.data.outcomes import OutcomeRule
from pirl.data.reading import open_parquet, read_json
from pirl.data.rows import read_columns
from pirl.data.schema import INFO_FILE
from pirl.errors import DataError, listing
from pirl.names import NEXT_SUCCESS

FEATURE = {"dtype": "bool", "shape": [1], "names": None}


def write_success(root: Path) -> int:
    """Store the labels as `next.success`; returns the number of episodes.

    The column is true from the labelled moment of success on, or at the last frame if none was labelled. Episodes
    without a label keep their recorded column. Raises if an episode is neither a success nor a failure.
    """
    root = root.expanduser().resolve()
    lock = lock_dataset(root)
    try:
        recover(root)
        meta = lerobot.read_meta(root)
        if meta.version not in (V21, V30):
            raise DataError(f"{root} has format {meta.version}", hint="convert it to v2.1 or v3.0 with LeRobot first")
        flags = _flags(meta)
        staged = staging(root)
        _stage_data(meta, staged, flags)
        _stage_info(meta, staged, flags)
        commit(root)
        recover(root)
    finally:
        release_dataset(lock)
    return len(flags)


def _flags(meta: DatasetMeta) -> dict[int, np.ndarray]:
    """The values of `next.success` by episode."""
    verdicts = labels.newest(labels.read(meta.root, {one.index: one.length for one in meta.episodes}))
    if not verdicts:
        raise DataError(f"{meta.root}: it has no labels", hint=f"label it first: pirl label {meta.root}")
    recorded = read_columns(meta)
    _, outcomes = read_outcomes(meta, recorded, OutcomeRule(rule="sparse_success", failure="timeout"))
    pairs = list(zip(meta.episodes, outcomes, strict=True))
    open_ = [
        f"episode {one.index}: {verdicts.get(one.index) or 'no label'}" for one, found in pairs if found.success is None
    ]
    if open_:
        raise DataError(
            f"{meta.root}: {len(open_)} episodes are neither a success nor a failure, and {NEXT_SUCCESS} has no third "
            f"value:\n{listing(open_)}",
            hint=f"settle them: pirl label {meta.root}; training reads the labels as they are, without --write",
        )
    return {one.index: found.rewards > 0 for one, found in pairs}


def _stage_data(meta: DatasetMeta, staged: Path, flags: Mapping[int, np.ndarray]) -> None:
    files: dict[Path, list[np.ndarray]] = {}
    for episode in meta.episodes:
        files.setdefault(episode.data.path, []).append(flags[episode.index])
    for path, parts in files.items():
        values, begin = np.concatenate(parts), 0
        with open_parquet(path) as source:
            schema = _with_success(source.schema_arrow, meta.version)
            with open_writer(new_file(staged, str(path.relative_to(meta.root))), schema) as target:
                for group in range(source.num_row_groups):
                    table = source.read_row_group(group)
                    column = pa.array(values[begin : begin + len(table)], pa.bool_())
                    begin += len(table)
                    arrays = [
                        pa.chunked_array([column]) if name == NEXT_SUCCESS else table[name] for name in schema.names
                    ]
                    target.write_table(pa.table(arrays, schema=schema), row_group_size=max(len(table), 1))


def _with_success(schema: pa.Schema, version: str) -> pa.Schema:
    """The Arrow schema with `next.success`, also in its Hugging Face metadata."""
    metadata = dict(schema.metadata or {})
    field = pa.field(NEXT_SUCCESS, pa.bool_())
    place = schema.get_field_index(NEXT_SUCCESS)
    schema = schema.append(field) if place < 0 else schema.set(place, field)
    if raw := metadata.get(b"huggingface"):
        described = json.loads(raw)
        described["info"]["features"][NEXT_SUCCESS] = {"dtype": "bool", "_type": "Value"}
        metadata[b"huggingface"] = json.dumps(described).encode()
    metadata.pop(b"pandas", None)  # optional, and its list of columns would be out of date
    return schema.with_metadata(metadata)


def _stage_info(meta: DatasetMeta, staged: Path, flags: Mapping[int, np.ndarray]) -> None:
    info = read_json(meta.root, meta.root / INFO_FILE)
    info["features"] = {**info["features"], NEXT_SUCCESS: FEATURE}
    stats = {index: column_stats(column, quantiles=meta.version == V30) for index, column in flags.items()}
    (_stage_stats_v21 if meta.version == V21 else _stage_stats_v30)(meta.root, staged, stats)
    write_json(staged / INFO_FILE, info)


def _stage_stats_v21(root: Path, staged: Path, stats: Mapping[int, ColumnStats]) -> None:
    path = root / "meta/episodes_stats.jsonl"
    if not path.exists():  # some converters leave it out
        return
    lines = []
    for line in path.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if (found := stats.get(entry["episode_index"])) is not None:
            entry["stats"] = {**entry["stats"], NEXT_SUCCESS: _lists(found)}
        lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
    new_file(staged, "meta/episodes_stats.jsonl").write_text("".join(lines), "utf-8")


def _stage_stats_v30(root: Path, staged: Path, stats: Mapping[int, ColumnStats]) -> None:
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        table = pq.read_table(path)
        rows = [_lists(stats[index]) for index in table["episode_index"].to_pylist()]
        if any(name.startswith("stats/") for name in table.column_names):
            for name in rows[0]:
                key = f"stats/{NEXT_SUCCESS}/{name}"
                column = pa.array([row[name] for row in rows])
                place = table.schema.get_field_index(key)
                table = table.append_column(key, column) if place < 0 else table.set_column(place, key, column)
        pq.write_table(table, new_file(staged, str(path.relative_to(root))))
    if (root / "meta/stats.json").exists():
        merged = merge_stats([{NEXT_SUCCESS: one} for one in stats.values()])[NEXT_SUCCESS]
        write_json(
            staged / "meta/stats.json", {**read_json(root, root / "meta/stats.json"), NEXT_SUCCESS: _lists(merged)}
        )


def _lists(stats: ColumnStats) -> dict[str, Any]:
    """Statistics as lists, with a boolean column's bounds as numbers (like LeRobot 0.6)."""
    return {
        name: (value.astype(np.float64) if value.dtype == bool else value).tolist() for name, value in stats.items()
    }
