"""LeRobot datasets on disk: metadata of formats v2.0, v2.1 and v3.0 in one representation.

The formats store the same content in different places. This module hides the difference: an episode is a run of rows in
a parquet file and, per camera, a run of frames in a video file or of PNGs in that same parquet file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from pirl import paths
from pirl.data import journal
from pirl.data.reading import column_names, missing, read_json, read_table, wrong_length
from pirl.data.schema import INFO_FILE, Feature, Info, count, parse_info
from pirl.errors import DataError, listing


@dataclass(frozen=True, kw_only=True)
class Span:
    """Start of a run of rows or frames; its length is the episode's."""

    path: Path
    """The file."""
    first: int
    """Index of the first row or frame within the file."""


@dataclass(frozen=True, kw_only=True)
class EpisodeMeta:
    """Location of one episode."""

    index: int
    """The dataset's `episode_index`."""
    length: int
    """Number of frames."""
    start: int
    """First row in the arrays of `read_columns`."""
    tasks: tuple[str, ...]
    """Instructions."""
    data: Span
    """Rows in the parquet file."""
    cameras: Mapping[str, Span]
    """Frames by camera; every camera has its own files and offsets."""


@dataclass(frozen=True, kw_only=True)
class DatasetMeta:
    """Metadata of a dataset: everything but columns and images."""

    root: Path
    """The dataset's folder."""
    version: str
    """One of VERSIONS."""
    fps: int | float
    """Frames per second."""
    robot: str
    """Robot type, as declared; may be empty."""
    features: Mapping[str, Feature]
    """Features by key."""
    tasks: Mapping[int, str]
    """Instruction by task_index."""
    episodes: tuple[EpisodeMeta, ...]
    """Sorted by index."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Keys of the image features."""
        return tuple(key for key, feature in self.features.items() if feature.is_camera)

    @property
    def lengths(self) -> Int[np.ndarray, "E"]:
        """Frames of each episode."""
        return np.array([episode.length for episode in self.episodes], dtype=np.int64)

    def feature(self, key: str) -> Feature:
        """The feature of that key; an unknown key raises and lists the known ones."""
        if key not in self.features:
            raise DataError(
                f"{self.root / INFO_FILE}: no feature {key!r}; the dataset has\n{listing(sorted(self.features), 30)}",
                hint="name one of these in the camera mapping, state key or action key",
            )
        return self.features[key]

    def camera(self, key: str) -> Feature:
        """The image feature of that key; an unknown key raises and lists the cameras."""
        feature = self.features.get(key)
        if feature is None or not feature.is_camera:
            found = "is not a picture" if feature else "does not exist"
            raise DataError(
                f"{self.root / INFO_FILE}: camera {key!r} {found}; there are {', '.join(self.cameras) or 'none'}",
                hint="map the model's camera slots to these keys, or leave the slot out",
            )
        return feature


def to_download(name: str | Path) -> list[Path]:
    """Folders searched for a dataset that only the hub may have; empty if it is here, or is no repo id."""
    looked = _places(name)
    here = any((folder / INFO_FILE).is_file() for folder in looked)
    return [] if here or not _is_repo_id(name) else looked


def _places(name: str | Path) -> list[Path]:
    return list(dict.fromkeys([Path(name).expanduser(), paths.lerobot_home() / name]))


def _is_repo_id(name: str | Path) -> bool:
    parts = str(name).split("/")
    return len(parts) == 2 and all(parts) and not parts[0].startswith((".", "~")) and not _places(name)[0].is_dir()


def resolve(name: str | Path) -> Path:
    """The folder of a dataset: a local path, or a repo id in LeRobot's home. Downloads a repo id that is absent."""
    looked = _places(name)
    for folder in looked:
        if journal.exists(folder, folder / INFO_FILE):
            return folder
    tried = [f"{folder} (no {INFO_FILE})" if folder.is_dir() else f"{folder} (no such folder)" for folder in looked]
    if not _is_repo_id(name):
        raise DataError(
            f"no LeRobot dataset at {name}; looked at\n{listing(tried)}",
            hint="give a dataset folder, or a Hugging Face repo id such as lerobot/aloha_sim_transfer_cube_human",
        )
    return _download(str(name), looked[-1], tried)


def _download(repo_id: str, target: Path, tried: list[str]) -> Path:
    """Download to a temporary folder beside the target, then rename: a partial download never looks like a dataset."""
    import huggingface_hub

    partial = target.with_name(f".{target.name}.incomplete")
    try:
        huggingface_hub.snapshot_download(repo_id, repo_type="dataset", local_dir=str(partial))
    except Exception as error:  # the hub's client raises what its HTTP library of the day raises
        tried.append(f"Hugging Face hub, dataset {repo_id} ({type(error).__name__}: {error})")
        raise DataError(
            f"no LeRobot dataset {repo_id}; looked at\n{listing(tried)}",
            hint=f"copy the dataset to {target}, or check the repo id, the network, HF_TOKEN and HF_HUB_OFFLINE",
        ) from error
    if not (partial / INFO_FILE).is_file():
        raise DataError(f"{repo_id} on the Hugging Face hub has no {INFO_FILE}", hint="is it a LeRobot dataset?")
    try:
        partial.rename(target)
    except OSError:
        if not (target / INFO_FILE).is_file():  # otherwise another process finished it first
            raise
    return target


def read_meta(root: Path) -> DatasetMeta:
    """Read the metadata of a dataset folder in any supported format."""
    root = root.expanduser().resolve()
    return journal.consistent(root, partial(_read_meta, root))


def _read_meta(root: Path) -> DatasetMeta:
    info = parse_info(root / INFO_FILE, read_json(root, root / INFO_FILE))
    rows, tasks = (_episodes_v3 if info.version == "v3.0" else _episodes_v2)(root, info)
    rows.sort(key=lambda row: row.index)
    _check_totals(info, rows)
    return DatasetMeta(
        root=root,
        version=info.version,
        fps=info.fps,
        robot=info.robot,
        features=info.features,
        tasks=tasks,
        episodes=_place(rows, info.features),
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """An episode as listed in the metadata, before `_place` computes its row offsets."""

    index: int
    length: int
    tasks: tuple[str, ...]
    data: Path
    videos: Mapping[str, Span]


def _episodes_v2(root: Path, info: Info) -> tuple[list[_Row], dict[int, str]]:
    """v2.0 and v2.1: JSON lines, and one parquet file and one video per episode."""
    file, rows = root / "meta/episodes.jsonl", []
    for entry in read_json(root, file, lines=True):
        index, length, tasks = _described(file, entry)
        place = {"episode_chunk": index // info.chunks_size, "episode_index": index}
        videos = {key: Span(path=root / info.video(key, **place), first=0) for key in info.videos}
        rows.append(_Row(index=index, length=length, tasks=tasks, data=root / info.data(**place), videos=videos))
    file = root / "meta/tasks.jsonl"
    return rows, _tasks(file, [_entry(file, one) for one in read_json(root, file, lines=True)], "task")


def _episodes_v3(root: Path, info: Info) -> tuple[list[_Row], dict[int, str]]:
    """v3.0: parquet tables, and data and video files with many episodes each."""
    files = journal.listed(root, "meta/episodes/*/*.parquet")
    if not files:
        raise missing(root / "meta/episodes/chunk-*/file-*.parquet")
    rows = []
    for file in files:
        # Skip the statistics: most of the columns, and unused here.
        columns = [name for name in column_names(root, file) if not name.startswith("stats/")]
        for entry in _entries(root, file, columns):
            index, length, tasks = _described(file, entry)
            where = f"{file}: episode {index}"
            begin, end = (_counted(entry, f"dataset_{name}_index", where) for name in ("from", "to"))
            if end - begin != length:
                raise wrong_length(file, index, end - begin, "data rows", length)
            place = {name: _counted(entry, f"data/{name}", where) for name in ("chunk_index", "file_index")}
            videos = {key: _video_span_v3(root, info, key, entry, where) for key in info.videos}
            rows.append(_Row(index=index, length=length, tasks=tasks, data=root / info.data(**place), videos=videos))
    file = root / "meta/tasks.parquet"
    names = column_names(root, file)
    name = "task" if "task" in names else "__index_level_0__"  # the latter is a pandas index
    return rows, _tasks(file, _entries(root, file, ["task_index", name]), name)


def _entries(root: Path, file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    table = read_table(root, file, columns)
    try:
        return [dict(row) for row in table.to_pylist()]
    except (ValueError, OverflowError) as error:  # invalid UTF-8
        raise DataError(f"{file}: cannot be read ({error})", hint="download or export the file again") from error


def _entry(file: Path, entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise DataError(f"{file}: {str(entry)[:80]!r} is no object", hint="download or export the dataset again")
    return entry


def _described(file: Path, entry: Any) -> tuple[int, int, tuple[str, ...]]:
    """Index, length and tasks of an episode."""
    index = _counted(_entry(file, entry), "episode_index", str(file))
    tasks = entry.get("tasks") or ()
    if not isinstance(tasks, list | tuple) or not all(isinstance(task, str) for task in tasks):
        raise DataError(f"{file}: episode {index}: tasks are {str(tasks)[:80]!r}", hint="expected a list of texts")
    return index, _counted(entry, "length", f"{file}: episode {index}"), tuple(tasks)


def _counted(entry: Mapping[str, Any], name: str, where: str) -> int:
    return count(entry.get(name), what=name, where=where)


def _tasks(file: Path, entries: Sequence[Mapping[str, Any]], name: str) -> dict[int, str]:
    """Instruction by task_index."""
    tasks: dict[int, str] = {}
    for entry in entries:
        index, task = _counted(entry, "task_index", str(file)), entry.get(name)
        if not isinstance(task, str) or tasks.setdefault(index, task) != task:
            raise DataError(
                f"{file}: task {index} is {task!r:.80}" + (f" and {tasks[index]!r:.80}" if index in tasks else ""),
                hint="expected one text per task_index: download or export the dataset again",
            )
    return tasks


def _video_span_v3(root: Path, info: Info, key: str, entry: Mapping[str, Any], where: str) -> Span:
    """Convert timestamps to frame numbers, only here: from_timestamp is a running float sum that drifts."""
    times: list[Any] = [entry.get(f"videos/{key}/{name}_timestamp") for name in ("from", "to")]
    if any(type(time) not in (int, float) or not 0 <= time < 2**31 for time in times):
        raise DataError(f"{where}: {key} runs from {times[0]} s to {times[1]} s", hint="export the dataset again")
    begin, end = map(float, times)
    first, frames = round(begin * info.fps), round((end - begin) * info.fps)
    if frames != entry["length"]:
        raise DataError(
            f"{where}: {begin:.3f} s to {end:.3f} s of {key} are {frames} frames at "
            f"{info.fps} fps, but the episode's length is {entry['length']}",
            hint=f"if fps in {INFO_FILE} is right, the video lacks frames: download or export the dataset again",
        )
    place = {name: _counted(entry, f"videos/{key}/{name}", where) for name in ("chunk_index", "file_index")}
    return Span(path=root / info.video(key, **place), first=first)


def _place(rows: Sequence[_Row], features: Mapping[str, Feature]) -> tuple[EpisodeMeta, ...]:
    """Compute where each episode's rows begin, in its file and in memory (where whole files are concatenated)."""
    totals: dict[Path, int] = {}
    for row in rows:
        totals[row.data] = totals.get(row.data, 0) + row.length
    begins = dict(zip(totals, np.cumsum([0, *totals.values()]).tolist(), strict=False))
    seen = dict.fromkeys(totals, 0)
    images = [key for key, feature in features.items() if feature.dtype == "image" and feature.is_camera]
    episodes = []
    for row in rows:
        data = Span(path=row.data, first=seen[row.data])
        seen[row.data] += row.length
        videos = {key: span for key, span in row.videos.items() if features[key].is_camera}
        episodes.append(
            EpisodeMeta(
                index=row.index,
                length=row.length,
                start=begins[row.data] + data.first,
                tasks=row.tasks,
                data=data,
                cameras=videos | dict.fromkeys(images, data),
            )
        )
    return tuple(episodes)


def _check_totals(info: Info, rows: Sequence[_Row]) -> None:
    """Raise if info.json and the episode list disagree: lost episodes would otherwise go unnoticed."""
    folder, counts = info.file.parent, {"total_episodes": len(rows), "total_frames": sum(row.length for row in rows)}
    for key, found in counts.items():
        if info.totals.get(key, found) != found:
            raise DataError(
                f"{info.file}: {key} is {info.totals[key]}, but the episodes listed in {folder} make {found}",
                hint="the metadata is incomplete: download or export the dataset again",
            )
    if len({row.index for row in rows}) != len(rows):
        raise DataError(f"{folder}: an episode_index is listed twice", hint="export the dataset again")
    for row in rows:
        if row.length < 1:
            raise DataError(f"{folder}: episode {row.index}: length is {row.length}", hint="remove the episode")
    if not rows:
        raise DataError(f"{folder}: no episode is listed", hint="record or download some first")
    _check_spans(folder, rows)


def _check_spans(folder: Path, rows: Sequence[_Row]) -> None:
    """Raise if a video frame belongs to two episodes or two cameras."""
    ends: dict[Path, list[tuple[int, int, int, str]]] = {}
    for row in rows:
        for key, span in row.videos.items():
            ends.setdefault(span.path, []).append((span.first, span.first + row.length, row.index, key))
    for path, spans in ends.items():
        spans.sort()
        for (_, end, index, key), (first, _, other, also) in pairwise(spans):
            if first < end:
                raise DataError(
                    f"{folder}: frame {first} of {path} belongs to {key} of episode {index} and to {also} of {other}",
                    hint="the metadata is damaged: download or export the dataset again",
                )


def check_files(meta: DatasetMeta, cameras: Sequence[str]) -> None:
    """Raise if a data or video file is missing, before spending hours on decoding the others."""
    for episode in meta.episodes:
        for span in (episode.data, *(episode.cameras[camera] for camera in cameras)):
            if not journal.exists(meta.root, span.path):
                raise missing(span.path, episode.index)
