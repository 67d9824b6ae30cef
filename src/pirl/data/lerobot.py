"""LeRobot datasets on disk: metadata of formats v2.0, v2.1 and v3.0 read into one shape, and the numbers into memory.

The three formats hold the same things in different places. Everything after this file sees one picture: an episode is a
run of rows in a parquet file and, per camera, a run of frames in a video file or of PNGs in that same parquet file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int, Shaped

from pirl import paths
from pirl.errors import DataError, listing

VERSIONS = ("v2.0", "v2.1", "v3.0")
INFO_FILE = "meta/info.json"
_NUMERIC = ("float", "int", "uint", "bool")
_ROW_KEYS = ("episode_index", "frame_index", "timestamp", "task_index")  # in every LeRobot dataset


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One declared feature of a dataset."""

    dtype: str
    """`video`, `image`, `string`, or a NumPy name such as `float32`."""
    shape: tuple[int, ...]
    """Of one row. (1,) is stored, and read, as a scalar."""
    names: tuple[str, ...] = ()
    """What the entries (or the axes of a picture) are called, where the dataset says so."""
    depth: bool = False
    """A depth map rather than a picture; not read."""

    @property
    def is_camera(self) -> bool:
        """Pictures a policy can look at."""
        return self.dtype in ("video", "image") and len(self.shape) == 3 and not self.depth

    @property
    def is_column(self) -> bool:
        """Low-dimensional: kept in memory as an array."""
        return self.dtype == "string" or self.dtype.startswith(_NUMERIC)

    @property
    def frame_size(self) -> tuple[int, int]:
        """Height and width of a camera. LeRobot writes H,W,C; older datasets declare C,H,W."""
        channels_first = self.names[0].startswith("c") if len(self.names) == 3 else self.shape[2] not in (1, 3)
        height, width = self.shape[1:] if channels_first else self.shape[:2]
        return height, width


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where a run of rows or frames begins; its length is the episode's."""

    path: Path
    """The file."""
    first: int
    """Number of the first row or frame within the file."""


@dataclass(frozen=True, kw_only=True)
class EpisodeMeta:
    """Where one episode is."""

    index: int
    """The dataset's own number for it (`episode_index`)."""
    length: int
    """Number of frames."""
    start: int
    """Its first row in the arrays of `read_columns`."""
    tasks: tuple[str, ...]
    """Its instructions."""
    data: Span
    """Its rows."""
    cameras: Mapping[str, Span]
    """Its frames, per camera. Each camera has files and offsets of its own."""


@dataclass(frozen=True, kw_only=True)
class DatasetMeta:
    """A dataset without its numbers and pictures."""

    root: Path
    """The dataset's folder."""
    version: str
    """One of VERSIONS."""
    fps: int | float
    """Frames a second."""
    robot: str
    """Robot type, as declared; may be empty."""
    features: Mapping[str, Feature]
    """By key."""
    tasks: Mapping[int, str]
    """Instruction by task_index."""
    episodes: tuple[EpisodeMeta, ...]
    """In the order of their index."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Keys of the features that are pictures."""
        return tuple(key for key, feature in self.features.items() if feature.is_camera)

    @property
    def lengths(self) -> Int[np.ndarray, "E"]:
        """Frames of each episode."""
        return np.array([episode.length for episode in self.episodes], dtype=np.int64)

    def feature(self, key: str) -> Feature:
        """The feature of that key, or an error that lists what there is."""
        if key not in self.features:
            raise DataError(
                f"{self.root / INFO_FILE}: no feature {key!r}; the dataset has\n{listing(sorted(self.features), 30)}",
                hint="name one of these in the camera mapping, state key or action key",
            )
        return self.features[key]

    def camera(self, key: str) -> Feature:
        """The camera of that key, or an error that lists the cameras there are."""
        feature = self.features.get(key)
        if feature is None or not feature.is_camera:
            found = "is not a picture" if feature else "does not exist"
            raise DataError(
                f"{self.root / INFO_FILE}: camera {key!r} {found}; there are {', '.join(self.cameras) or 'none'}",
                hint="map the model's camera slots to these keys, or leave the slot out",
            )
        return feature


def resolve(name: str | Path) -> Path:
    """The folder of a dataset: a local path, or a repo id in LeRobot's home, downloaded there when it is absent."""
    home = paths.lerobot_home()
    looked = list(dict.fromkeys([Path(name).expanduser(), home / name]))
    for folder in looked:
        if (folder / INFO_FILE).is_file():
            return folder
    tried = [f"{folder} (no {INFO_FILE})" if folder.is_dir() else f"{folder} (no such folder)" for folder in looked]
    parts = str(name).split("/")
    if len(parts) != 2 or not all(parts) or parts[0].startswith((".", "~")) or looked[0].is_dir():
        raise DataError(
            f"no LeRobot dataset at {name}; looked at\n{listing(tried)}",
            hint="give a dataset folder, or a Hugging Face repo id such as lerobot/aloha_sim_transfer_cube_human",
        )
    return _download(str(name), home / name, tried)


def _download(repo_id: str, target: Path, tried: list[str]) -> Path:
    """Fetch a dataset beside its place and move it there whole, so that a broken download is never taken for one."""
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
    """Read the metadata of a dataset folder, whichever of the known formats it has."""
    root = root.expanduser().resolve()
    info_path = root / INFO_FILE
    info = _read_json(info_path)
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if version not in VERSIONS:
        raise DataError(
            f"{info_path}: codebase_version is {version!r}, known are {', '.join(VERSIONS)}",
            hint="convert the dataset with LeRobot's own converter",
        )
    try:
        fps, declared = info["fps"], info["features"]
        features = {key: _feature(value) for key, value in declared.items()}
        if not (isinstance(fps, int | float) and fps > 0):
            raise ValueError(f"fps is {fps!r}")
        rows, tasks = (_episodes_v3 if version == "v3.0" else _episodes_v2)(root, info, features)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{root / 'meta'}: the metadata is not what format {version} prescribes ({type(error).__name__}: {error})",
            hint="download or export the dataset again",
        ) from error
    _check_totals(info_path, info, rows)
    return DatasetMeta(
        root=root,
        version=version,
        fps=fps,
        robot=info.get("robot_type") or "",
        features=features,
        tasks=tasks,
        episodes=_place(rows, features),
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """An episode as a format lists it, before its rows have been counted."""

    index: int
    length: int
    tasks: tuple[str, ...]
    data: Path
    videos: Mapping[str, Span]


def _episodes_v2(
    root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]
) -> tuple[list[_Row], dict[int, str]]:
    """v2.0 and v2.1: JSON lines, and one parquet file and one video per episode."""
    rows = []
    for entry in _read_json(root / "meta/episodes.jsonl", lines=True):
        index = entry["episode_index"]
        place = {"episode_chunk": index // info["chunks_size"], "episode_index": index}
        videos = {
            key: Span(path=root / info["video_path"].format(video_key=key, **place), first=0)
            for key, feature in features.items()
            if feature.dtype == "video"
        }
        data = root / info["data_path"].format(**place)
        rows.append(
            _Row(index=index, length=entry["length"], tasks=tuple(entry.get("tasks", ())), data=data, videos=videos)
        )
    tasks = {entry["task_index"]: entry["task"] for entry in _read_json(root / "meta/tasks.jsonl", lines=True)}
    return sorted(rows, key=lambda row: row.index), tasks


def _episodes_v3(
    root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]
) -> tuple[list[_Row], dict[int, str]]:
    """v3.0: parquet tables, and files that hold many episodes."""
    files = sorted((root / "meta/episodes").glob("*/*.parquet"))
    if not files:
        raise _missing(root / "meta/episodes/chunk-*/file-*.parquet")
    videos = [key for key, feature in features.items() if feature.dtype == "video"]
    rows = []
    for file in files:
        # The statistics are most of the columns and nothing here needs them.
        columns = [name for name in _schema(file).names if not name.startswith("stats/")]
        for entry in read_table(file, columns).to_pylist():
            place = {"chunk_index": entry["data/chunk_index"], "file_index": entry["data/file_index"]}
            rows.append(
                _Row(
                    index=entry["episode_index"],
                    length=entry["length"],
                    tasks=tuple(entry.get("tasks") or ()),
                    data=root / info["data_path"].format(**place),
                    videos={key: _video_span_v3(root, file, info, key, entry) for key in videos},
                )
            )
            if (rows_declared := entry["dataset_to_index"] - entry["dataset_from_index"]) != entry["length"]:
                raise _lengths(file, entry["episode_index"], rows_declared, "data rows", entry["length"])
    table = read_table(root / "meta/tasks.parquet").to_pydict()
    names = table["task"] if "task" in table else table["__index_level_0__"]  # the latter is a pandas index
    return sorted(rows, key=lambda row: row.index), dict(zip(table["task_index"], names, strict=True))


def _video_span_v3(root: Path, file: Path, info: Mapping[str, Any], key: str, entry: Mapping[str, Any]) -> Span:
    """Seconds become frame numbers here, once: from_timestamp is a running sum of floats and drifts in long files."""
    begin, end = (entry[f"videos/{key}/{name}_timestamp"] for name in ("from", "to"))
    first, frames = round(begin * info["fps"]), round((end - begin) * info["fps"])
    if frames != entry["length"]:
        raise DataError(
            f"{file}: episode {entry['episode_index']}: {begin:.3f} s to {end:.3f} s of {key} are {frames} frames at "
            f"{info['fps']} fps, but the episode's length is {entry['length']}",
            hint=f"if fps in {INFO_FILE} is right, the video lacks frames: download or export the dataset again",
        )
    place = {name: entry[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
    return Span(path=root / info["video_path"].format(video_key=key, **place), first=first)


def _place(rows: Sequence[_Row], features: Mapping[str, Feature]) -> tuple[EpisodeMeta, ...]:
    """Say where each episode's rows begin, in its file and in memory (files follow each other, each one whole)."""
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


def _feature(declared: Mapping[str, Any]) -> Feature:
    names, info = declared.get("names"), declared.get("info") or declared.get("video_info") or {}
    return Feature(
        dtype=declared["dtype"],
        shape=tuple(declared["shape"]),
        names=tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else (),
        depth=bool(info.get("video.is_depth_map") or info.get("is_depth_map")),
    )


def _check_totals(path: Path, info: Mapping[str, Any], rows: Sequence[_Row]) -> None:
    """Episodes lost between info.json and the episode list would otherwise only be missed."""
    counts = {"total_episodes": len(rows), "total_frames": sum(row.length for row in rows)}
    for key, found in counts.items():
        if info.get(key, found) != found:
            raise DataError(
                f"{path}: {key} is {info[key]}, but the episodes listed in {path.parent} make {found}",
                hint="the metadata is incomplete: download or export the dataset again",
            )
    if len({row.index for row in rows}) != len(rows):
        raise DataError(f"{path.parent}: an episode_index is listed twice", hint="export the dataset again")
    for row in rows:
        if row.length < 1:
            raise DataError(f"{path.parent}: episode {row.index}: length is {row.length}", hint="remove the episode")
    if not rows:
        raise DataError(f"{path.parent}: no episode is listed", hint="record or download some first")


def read_columns(meta: DatasetMeta) -> dict[str, Shaped[np.ndarray, "N ..."]]:
    """Every low-dimensional column of the dataset as one array; rows of an episode are `start : start + length`."""
    keys = list(dict.fromkeys([*(key for key, feature in meta.features.items() if feature.is_column), *_ROW_KEYS]))
    parts: dict[str, list[np.ndarray]] = {key: [] for key in keys}
    files: dict[Path, list[EpisodeMeta]] = {}
    for episode in meta.episodes:
        files.setdefault(episode.data.path, []).append(episode)
    for path, episodes in files.items():
        table = read_table(path, keys, episode=episodes[0].index)
        columns = {key: _to_numpy(table.column(key), meta.feature(key), path, key) for key in keys}
        _check_rows(path, episodes, columns, meta.fps)
        for key, column in columns.items():
            parts[key].append(column)
    return {key: np.ascontiguousarray(np.concatenate(part)) for key, part in parts.items()}


def _to_numpy(column: Any, feature: Feature, path: Path, key: str) -> np.ndarray:
    """A parquet column as an array of the declared type and shape."""
    rows, values = len(column), column.combine_chunks()
    nulls = values.null_count
    while (
        pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type)
    ):
        values = values.flatten()
        nulls += values.null_count
    shape = () if feature.shape in ((), (1,)) else feature.shape
    if nulls or len(values) != rows * math.prod(shape):
        raise DataError(
            f"{path}: column {key!r} holds {len(values)} values ({nulls} null) in {rows} rows, "
            f"expected {math.prod(shape)} per row (shape {feature.shape} in {INFO_FILE})",
            hint="the file and its metadata belong to different datasets, or an export went wrong",
        )
    if feature.dtype == "string":
        return np.array(values.to_pylist(), dtype=np.dtypes.StringDType())
    array = values.to_numpy(zero_copy_only=False).astype(np.dtype(feature.dtype), copy=False)
    return array.reshape(rows, *shape)


def _check_rows(
    path: Path, episodes: Sequence[EpisodeMeta], columns: Mapping[str, np.ndarray], fps: int | float
) -> None:
    """The rows are the episodes the metadata lists, in order, without a gap, at the declared rate."""
    owner, frame, time = columns["episode_index"], columns["frame_index"], columns["timestamp"]
    counts = dict(zip(*np.unique(owner, return_counts=True), strict=True))
    for episode in episodes:
        if (found := int(counts.pop(episode.index, 0))) != episode.length:
            raise _lengths(path, episode.index, found, "data rows", episode.length)
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
    if (wrong := np.flatnonzero(np.abs(time - counted / fps) > 0.5 / fps)).size:
        raise DataError(
            f"{path}: episode {listed[wrong[0]]}: frame {counted[wrong[0]]} has timestamp {time[wrong[0]]:.4f} s, "
            f"expected {counted[wrong[0]] / fps:.4f} s at the {fps} fps of {INFO_FILE}",
            hint=f"correct fps in {INFO_FILE}, or write timestamps as frame_index / fps",
        )


def read_table(path: Path, columns: Sequence[str] | None = None, *, episode: int | None = None) -> Any:
    """A parquet file, or those columns of it."""
    missing = [name for name in columns or () if name not in _schema(path, episode).names]
    if missing:
        raise DataError(
            f"{path}{_of(episode)}: no column {', '.join(map(repr, missing))}, which {INFO_FILE} declares",
            hint=f"export the dataset again, or remove the feature from {INFO_FILE} if nothing needs it",
        )
    try:
        return pq.read_table(path, columns=None if columns is None else list(columns))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, episode, error) from error


def _schema(path: Path, episode: int | None = None) -> Any:
    if not path.is_file():
        raise _missing(path, episode)
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, episode, error) from error


def _read_json(path: Path, *, lines: bool = False) -> Any:
    """A JSON object, or a list of them where each line is one."""
    if not path.is_file():
        raise _missing(path)
    try:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    except ValueError as error:
        raise _unreadable(path, None, error) from error


def check_files(meta: DatasetMeta, cameras: Sequence[str]) -> None:
    """Refuse a dataset whose files are not all there, before hours are spent on those that are."""
    for episode in meta.episodes:
        for span in (episode.data, *(episode.cameras[camera] for camera in cameras)):
            if not span.path.is_file():
                raise _missing(span.path, episode.index)


def _of(episode: int | None) -> str:
    return "" if episode is None else f": episode {episode}"


def _missing(path: Path, episode: int | None = None) -> DataError:
    return DataError(f"{path}{_of(episode)}: no such file", hint="the dataset is incomplete: download or copy it again")


def _unreadable(path: Path, episode: int | None, error: Exception) -> DataError:
    return DataError(f"{path}{_of(episode)}: cannot be read ({error})", hint="download or export the file again")


def _lengths(path: Path, episode: int, found: int, what: str, expected: int) -> DataError:
    return DataError(
        f"{path}: episode {episode}: {found} {what}, but the episode's length is {expected} in the metadata",
        hint="files and metadata disagree: download or export the dataset again, or remove the episode",
    )
