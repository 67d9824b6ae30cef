"""Files of episodes in LeRobot's formats v2.1 and v3.0, and their atomic commit.

An episode changes several files: parquet, videos, metadata. All are staged at their final relative paths, then
committed together (see `journal`).

In v3.0 many episodes share a file. Saving an episode rewrites the current file with the episode appended (copying
parquet row groups and video packets, without re-encoding), which costs at most a copy of a full file. Save short
episodes together, so that the copy is made once for all of them.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pirl import __version__
from pirl.data.columns import V21, V30
from pirl.data.encode import append_video, can_append, video_info
from pirl.data.episode_stats import Stats, merge_stats
from pirl.data.journal import recover, staging
from pirl.data.reading import DAMAGE, open_parquet, read_json, read_table
from pirl.data.schema import INFO_FILE, parse_info
from pirl.errors import DataError

CREATED_FILE = "meta/pirl.json"
"""Marks a dataset created by pirl, which pirl may therefore overwrite if asked to."""
TASKS = {V21: "meta/tasks.jsonl", V30: "meta/tasks.parquet"}
DATA_PATH = {
    V21: "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    V30: "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
VIDEO_PATH = {
    V21: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    V30: "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_PANDAS_INDEX = "__index_level_0__"


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """A dataset's metadata, as the writer needs it to add an episode."""

    info: dict[str, Any]
    """info.json."""
    tasks: dict[str, int]
    """Instruction to task_index."""
    stats: Stats
    """v3.0: statistics over all episodes so far."""
    episodes: pa.Table | None
    """v3.0: the newest episode table; None before the first episode."""


@dataclass(frozen=True, kw_only=True)
class FinishedEpisode:
    """Everything one episode adds to a dataset."""

    task: str
    """The instruction."""
    table: pa.Table
    """The parquet rows."""
    videos: Mapping[str, Path]
    """One finished mp4 per camera; staging moves them."""
    stats: Stats
    """Statistics of every numeric column and camera."""


def read_metadata(root: Path, *, version: str) -> Metadata:
    """Read the state of an existing dataset; raises unless it has this format."""
    info = read_json(root, root / INFO_FILE)
    parse_info(root / INFO_FILE, info)
    if (found := info.get("codebase_version")) != version:
        raise DataError(
            f"{root} has format {found}, you ask for {version}", hint="write to another folder, or ask for that format"
        )
    if not info.get("total_episodes"):  # LeRobot writes info.json before the first episode
        return Metadata(info=info, tasks={}, stats={}, episodes=None)
    try:
        return _read_v21(root, info) if version == V21 else _read_v30(root, info)
    except (*DAMAGE, AttributeError, IndexError) as error:
        raise DataError(
            f"{root}: the metadata cannot be read ({type(error).__name__}: {error})",
            hint="the dataset is incomplete or damaged; restore it before adding to it",
        ) from error


def _read_v21(root: Path, info: dict[str, Any]) -> Metadata:
    lines = read_json(root, root / TASKS[V21], lines=True)
    tasks = {entry["task"]: entry["task_index"] for entry in lines}
    return Metadata(info=info, tasks=tasks, stats={}, episodes=None)


def _read_v30(root: Path, info: dict[str, Any]) -> Metadata:
    table = read_table(root, root / TASKS[V30])
    texts = table["task" if "task" in table.column_names else _PANDAS_INDEX].to_pylist()
    tasks = dict(zip(texts, table["task_index"].to_pylist(), strict=True))
    raw = read_json(root, root / "meta/stats.json")
    stats = {key: {name: np.array(value) for name, value in column.items()} for key, column in raw.items()}
    newest = max((root / "meta/episodes").glob("chunk-*/file-*.parquet"), key=_file_number)
    episodes = read_table(root, newest)
    last = _last_row(episodes)
    listed = {"total_episodes": last["episode_index"] + 1, "total_frames": last["dataset_to_index"]}
    if listed != (said := {name: info[name] for name in listed}):
        raise DataError(
            f"{root}: info.json says {said}, {newest.relative_to(root)} ends with {listed}",
            hint="the dataset was left half-written by another program; repair it before adding to it",
        )
    return Metadata(info=info, tasks=tasks, stats=stats, episodes=episodes)


def stage_episodes(root: Path, meta: Metadata, episodes: Sequence[FinishedEpisode]) -> Metadata:
    """Write every file that the episodes change under `.writing/next`; returns the metadata after the commit."""
    recover(root)
    staged = staging(root)
    info, tasks = meta.info, {**meta.tasks}
    for episode in episodes:
        tasks[episode.task] = next_task_index(tasks, episode.task)
        info = _next_info(info, episode, total_tasks=len(tasks))
    after = Metadata(info=info, tasks=tasks, stats=meta.stats, episodes=meta.episodes)
    stage = _stage_v21 if info["codebase_version"] == V21 else _stage_v30
    after = stage(root, staged, after, episodes)
    if not meta.info["total_episodes"]:
        write_json(staged / CREATED_FILE, {"created_by": f"pirl {__version__}"})
    write_json(staged / INFO_FILE, after.info)
    return after


def next_task_index(tasks: Mapping[str, int], task: str) -> int:
    """The task's index; for a new task the next free one."""
    return tasks.get(task, max(tasks.values(), default=-1) + 1)


def _next_info(info: Mapping[str, Any], episode: FinishedEpisode, *, total_tasks: int) -> dict[str, Any]:
    episodes = info["total_episodes"] + 1
    after = {**info, "total_episodes": episodes, "total_tasks": total_tasks, "splits": {"train": f"0:{episodes}"}}
    after["total_frames"] += episode.table.num_rows
    if info["codebase_version"] == V21:
        after["total_videos"] += len(episode.videos)
        after["total_chunks"] = (episodes - 1) // info["chunks_size"] + 1
    described = {key: {"info": video_info(path)} for key, path in episode.videos.items() if episodes == 1}
    after["features"] = {key: {**feature, **described.get(key, {})} for key, feature in info["features"].items()}
    return after


def _stage_v21(root: Path, staged: Path, meta: Metadata, episodes: Sequence[FinishedEpisode]) -> Metadata:
    for index, episode in enumerate(episodes, meta.info["total_episodes"] - len(episodes)):
        place = {"episode_chunk": index // meta.info["chunks_size"], "episode_index": index}
        _write(episode.table, new_file(staged, meta.info["data_path"].format(**place)))
        for key, video in episode.videos.items():
            os.replace(video, new_file(staged, meta.info["video_path"].format(video_key=key, **place)))
        stats = {key: {name: value.tolist() for name, value in column.items()} for key, column in episode.stats.items()}
        added = {"episode_index": index, "tasks": [episode.task], "length": episode.table.num_rows}
        _append_line(root, staged, "meta/episodes.jsonl", added)
        _append_line(root, staged, "meta/episodes_stats.jsonl", {"episode_index": index, "stats": stats})
    lines = [{"task_index": number, "task": task} for task, number in meta.tasks.items()]
    new_file(staged, TASKS[V21]).write_text("".join(map(_json_line, lines)), "utf-8")
    return meta


def _stage_v30(root: Path, staged: Path, meta: Metadata, episodes: Sequence[FinishedEpisode]) -> Metadata:
    last = None if meta.episodes is None else _last_row(meta.episodes)
    place, append = _place(root, staged, meta, last, "meta/episodes", EPISODES_PATH.format)
    begin = meta.info["total_frames"] - sum(episode.table.num_rows for episode in episodes)
    rows: list[dict[str, Any]] = []
    for index, (episode, located) in enumerate(
        zip(episodes, _stage_rows(root, staged, meta, [episode.table for episode in episodes], last), strict=True),
        meta.info["total_episodes"] - len(episodes),
    ):
        length = episode.table.num_rows
        row: dict[str, Any] = {"episode_index": index, "tasks": [episode.task], "length": length, **located}
        row |= {"dataset_from_index": begin, "dataset_to_index": (begin := begin + length)}
        for key, video in episode.videos.items():
            row |= _stage_video(root, staged, meta, key, video, last, length=length)
        for key, column in episode.stats.items():
            row |= {f"stats/{key}/{name}": value.tolist() for name, value in column.items()}
        last = row | _located("meta/episodes", place)
        rows.append(last)

    table = pa.Table.from_pylist(rows)
    if append and meta.episodes is not None:
        table = _as_numbers(table, meta.episodes.schema)
        table = pa.concat_tables([meta.episodes, table], promote_options="permissive")
    stats = merge_stats([meta.stats, *(episode.stats for episode in episodes)])
    _write(table, new_file(staged, EPISODES_PATH.format(**place)))
    _write(_tasks_table(meta.tasks), new_file(staged, TASKS[V30]))
    lists = {key: {name: value.tolist() for name, value in column.items()} for key, column in stats.items()}
    write_json(staged / "meta/stats.json", lists)
    return Metadata(info=meta.info, tasks=meta.tasks, stats=stats, episodes=table)


def _as_numbers(table: pa.Table, before: pa.Schema) -> pa.Table:
    """Convert bounds of boolean columns to the type of earlier rows: LeRobot 0.6 stores numbers, 0.4 booleans."""
    for place, field in enumerate(table.schema):
        if field.type != (known := before.field(field.name).type if field.name in before.names else field.type) and (
            pa.types.is_list(field.type) and pa.types.is_boolean(field.type.value_type)
        ):
            numbers = [None if row is None else [float(flag) for flag in row] for row in table[place].to_pylist()]
            table = table.set_column(place, field.name, pa.array(numbers).cast(known))
    return table


def _place(
    root: Path,
    staged: Path,
    meta: Metadata,
    last: Mapping[str, Any] | None,
    prefix: str,
    path_of: Callable[..., str],
    *,
    added: int = 0,
    limit: str = "data_files_size_in_mb",
) -> tuple[dict[str, int], bool]:
    """Chunk and file index for the next episode, and whether to append to that file."""
    if last is None:
        return {"chunk_index": 0, "file_index": 0}, False
    place = {name: last[f"{prefix}/{name}"] for name in ("chunk_index", "file_index")}
    current = _newest(root, staged, path_of(**place))
    if not current.exists():
        raise DataError(f"{current} is missing", hint="a dataset can only be continued where all of its files are")
    if current.stat().st_size + added < meta.info[limit] * 2**20:
        return place, True
    return _following(place, meta.info["chunks_size"]), False


def _newest(root: Path, staged: Path, relative: str) -> Path:
    """The staged version of a file if there is one, else the dataset's."""
    return staged / relative if (staged / relative).exists() else root / relative


def _following(place: Mapping[str, int], chunks_size: int) -> dict[str, int]:
    if place["file_index"] + 1 < chunks_size:
        return {"chunk_index": place["chunk_index"], "file_index": place["file_index"] + 1}
    return {"chunk_index": place["chunk_index"] + 1, "file_index": 0}


def _located(prefix: str, place: Mapping[str, int]) -> dict[str, int]:
    return {f"{prefix}/{name}": value for name, value in place.items()}


def _stage_rows(
    root: Path, staged: Path, meta: Metadata, tables: Sequence[pa.Table], last: Mapping[str, Any] | None
) -> list[dict[str, int]]:
    """Stage the rows, one row group per episode as in LeRobot (so episodes can be read alone); returns their places."""
    path_of, limit = meta.info["data_path"].format, meta.info["data_files_size_in_mb"] * 2**20
    place, append = _place(root, staged, meta, last, "data", path_of, added=tables[0].nbytes)
    located: list[dict[str, int]] = []
    while len(located) < len(tables):
        path, schema = path_of(**place), tables[0].schema
        with pa.OSFile(str(new_file(staged, path)), "wb") as file, open_writer(file, schema) as writer:
            if append:
                with open_parquet(root / path) as existing:
                    for group in range(existing.num_row_groups):
                        rows = existing.read_row_group(group).select(schema.names).cast(schema)
                        writer.write_table(rows, row_group_size=max(len(rows), 1))
            for count, table in enumerate(tables[len(located) :]):
                if count and file.tell() + table.nbytes >= limit:
                    break
                writer.write_table(table, row_group_size=len(table))
                located.append(_located("data", place))
        place, append = _following(place, meta.info["chunks_size"]), False
    return located


def _stage_video(
    root: Path,
    staged: Path,
    meta: Metadata,
    key: str,
    video: Path,
    last: Mapping[str, Any] | None,
    *,
    length: int,
) -> dict[str, Any]:
    """Stage one camera's video; returns its place and times (frame counts over fps, so they do not drift)."""
    fps, prefix = meta.info["fps"], f"videos/{key}"
    path_of = partial(meta.info["video_path"].format, video_key=key)
    size = video.stat().st_size
    place, append = _place(root, staged, meta, last, prefix, path_of, added=size, limit="video_files_size_in_mb")
    current = _newest(root, staged, path_of(**place))
    if append and not can_append(current, video, fps=fps):
        place, append = _following(place, meta.info["chunks_size"]), False
    target = new_file(staged, path_of(**place))
    first = 0
    if append:
        if current == target:  # an episode staged earlier created or extended it
            current = target.rename(video.with_suffix(".before"))
        first = append_video(current, video, target, fps=fps)
    else:
        os.replace(video, target)
    times = {"from_timestamp": first / fps, "to_timestamp": (first + length) / fps}
    return _located(prefix, place) | {f"{prefix}/{name}": value for name, value in times.items()}


def open_writer(file: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """A parquet writer with page checksums, which `open_parquet` verifies."""
    return pq.ParquetWriter(file, schema, write_page_checksum=True)


def _write(table: pa.Table, path: Path) -> None:
    with open_writer(path, table.schema) as writer:
        writer.write_table(table)


def _tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """The tasks, with pandas metadata: LeRobot reads the table with pandas and looks tasks up by its index."""
    index = {"name": None, "field_name": _PANDAS_INDEX, "pandas_type": "object", "numpy_type": "str", "metadata": None}
    number = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    header = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "str"}
    described = {
        "index_columns": [_PANDAS_INDEX],
        "column_indexes": [header | {"metadata": {"encoding": "UTF-8"}}],
        "columns": [number | {"metadata": None}, index],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "3.0.0",
    }
    schema = pa.schema([("task_index", pa.int64()), (_PANDAS_INDEX, pa.large_string())])
    arrays = [pa.array(list(tasks.values()), pa.int64()), pa.array(list(tasks), pa.large_string())]
    return pa.table(arrays, schema=schema.with_metadata({"pandas": json.dumps(described)}))


def _last_row(episodes: pa.Table) -> dict[str, Any]:
    names = [name for name in episodes.column_names if not name.startswith("stats/")]
    return episodes.select(names).slice(len(episodes) - 1).to_pylist()[0]


def _file_number(path: Path) -> tuple[int, int]:
    return int(path.parent.name.removeprefix("chunk-")), int(path.stem.removeprefix("file-"))


def new_file(staged: Path, relative: str) -> Path:
    """Path of a new staged file; its folder exists."""
    path = staged / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _append_line(root: Path, staged: Path, relative: str, value: Mapping[str, Any]) -> None:
    current = _newest(root, staged, relative)
    before = current.read_text("utf-8") if current.exists() else ""
    newline = "" if before.endswith("\n") or not before else "\n"
    new_file(staged, relative).write_text(before + newline + _json_line(value), "utf-8")


def _json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON in LeRobot's layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False), "utf-8")
