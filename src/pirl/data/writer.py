"""Writes LeRobot datasets: v3.0 (what LeRobot reads from 0.4 on) and v2.1 (what OpenPI's pinned LeRobot reads).

    with LeRobotWriter(root, fps=50, features=features, robot_type="aloha") as writer:
        for observation, action in rollout:
            writer.add_frame({"observation.state": state, "action": action, "observation.images.cam_high": picture})
        writer.save_episode(task="transfer the red cube")

Images are encoded as they arrive, so an episode is never in memory uncompressed; image features (PNG inside the
parquet) are held compressed. Saving is atomic: readers see an episode once `save_episode` returns and nothing of it
before.
"""

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from pirl.data.columns import STANDARD_FEATURES, V21, V30, Column, check_frame, make_table, parse_features
from pirl.data.encode import EpisodeVideo, VideoEncoding, choose_encoding, encode_png
from pirl.data.episode_files import (
    CREATED_FILE,
    DATA_PATH,
    VIDEO_PATH,
    FinishedEpisode,
    Metadata,
    next_task_index,
    read_metadata,
    stage_episodes,
)
from pirl.data.episode_stats import Stats, column_stats, image_histogram, image_stats
from pirl.data.journal import STAGE, commit, lock_dataset, recover, release_dataset, staging, writing
from pirl.data.schema import INFO_FILE
from pirl.errors import DataError, listing

_DATASET_FILES = (".json", ".jsonl", ".parquet", ".mp4", ".png")


class LeRobotWriter:
    """Adds episodes to a LeRobot dataset, new or existing (written by this class or by LeRobot)."""

    def __init__(
        self,
        root: Path | str,
        *,
        fps: int,
        features: Mapping[str, Any],
        robot_type: str | None = None,
        version: Literal["v3.0", "v2.1"] = V30,
        codec: str | VideoEncoding = "av1",
        existing: Literal["append", "refuse", "overwrite"] = "append",
        chunks_size: int = 1000,
        data_files_size_in_mb: float = 100,
        video_files_size_in_mb: float = 200,
    ) -> None:
        """Open `root` for writing; creates only a hidden folder in it until the first episode is saved.

        `features` is LeRobot's dictionary, {key: {"dtype", "shape", "names"}}; the standard columns are added to it.
        `codec` is "av1", "h264" or a VideoEncoding. `existing`: append to an existing dataset (which must agree with
        the arguments and keeps its own file sizes), refuse it, or overwrite it.
        """
        if fps <= 0:
            raise DataError(f"fps is {fps}", hint="give the whole number of frames a second that was recorded")
        self.root = Path(root)
        own = {key: feature for key, feature in features.items() if key not in STANDARD_FEATURES}
        self._columns = parse_features(own)
        self._all_columns = (*self._columns, *parse_features(STANDARD_FEATURES))
        self._encoders = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="encode")
        videos = any(column.dtype == "video" for column in self._columns)
        self._encoding = choose_encoding(codec) if videos else None
        sizes = {"data_files_size_in_mb": data_files_size_in_mb, "video_files_size_in_mb": video_files_size_in_mb}
        info: dict[str, Any] = {
            "codebase_version": version,
            "robot_type": robot_type,
            "total_episodes": 0,
            "total_frames": 0,
            "total_tasks": 0,
            **({"total_videos": 0, "total_chunks": 0} if version == V21 else {}),
            "chunks_size": chunks_size,
            **(sizes if version == V30 else {}),
            "fps": fps,
            "splits": {},
            "data_path": DATA_PATH[version],
            "video_path": VIDEO_PATH[version] if videos else None,
            "features": _normal_form(own) | STANDARD_FEATURES,
        }
        self._lock = lock_dataset(self.root)
        try:
            with writing(self.root):
                self._meta = _open(self.root, info, existing)
        except BaseException:
            self._release()
            raise
        self._reset()

    @property
    def num_episodes(self) -> int:
        """Number of saved episodes, including those from before."""
        return int(self._meta.info["total_episodes"])

    @property
    def num_frames(self) -> int:
        """Number of saved frames."""
        return int(self._meta.info["total_frames"])

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Add a frame to the current episode: one value per feature, images as uint8 (height, width, 3).

        An invalid frame raises and leaves the episode unchanged; an error while encoding discards the episode.
        """
        where = f"{self.root}, episode {self._next_index}, frame {self._length}"
        values = check_frame(self._columns, frame, where=where)
        try:
            with writing(self.root):
                if not self._length:
                    self._open_videos()
                for column in self._columns:
                    self._add_value(column, values[column.key])
        except BaseException:  # some columns already have the frame
            self.discard_episode()
            raise
        self._length += 1

    def add_episode(self, columns: Mapping[str, Any], *, task: str, save: bool = True) -> int:
        """Save a whole episode, given as one array (or sequence) per feature with a row per frame; returns its index.

        With save=False it is encoded and waits for the next `save`. Saving many short episodes together is much faster:
        the files they extend are copied once.
        """
        if self._length:
            raise DataError(f"{self.root}: {self._length} frames are not saved", hint="save or discard them first")
        lengths = {key: len(values) for key, values in columns.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{self.root}: the columns have lengths {lengths}", hint="give one row per frame in each")
        try:
            for t in range(next(iter(lengths.values()))):
                self.add_frame({key: values[t] for key, values in columns.items()})
            return self.save_episode(task=task) if save else self._finish(task)
        except BaseException:
            self.discard_episode()
            raise

    def save_episode(self, *, task: str) -> int:
        """Save the frames added so far as an episode; returns its index."""
        index = self._finish(task)
        self.save()
        return index

    def save(self) -> None:
        """Save all waiting episodes, atomically."""
        if self._length:
            raise DataError(f"{self.root}: {self._length} frames belong to no episode", hint="save or discard them")
        try:
            if self._waiting:
                with writing(self.root):
                    after = stage_episodes(self.root, self._meta, self._waiting)
                    commit(self.root)
                    self._meta = after
                    recover(self.root)
        finally:
            shutil.rmtree(staging(self.root), ignore_errors=True)  # left by a failed save
            self._reset()

    def discard_episode(self) -> None:
        """Discard the frames added since the last episode."""
        for video in self._videos.values():
            with suppress(Exception):  # flush to avoid the encoder's warnings; the file is deleted anyway
                video.close()
        shutil.rmtree(self._episode_folder, ignore_errors=True)
        self._start()

    def close(self) -> None:
        """Release the dataset; discards unsaved frames and episodes."""
        self.discard_episode()
        self._reset()
        self._release()

    def __enter__(self) -> "LeRobotWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unsaved, waiting = self._length, len(self._waiting)
        self.close()
        if unsaved and kind is None:
            raise DataError(
                f"{self.root}: the last {unsaved} frames belong to no episode and were discarded",
                hint="call save_episode(task=...) or discard_episode() before leaving the with block",
            )
        if waiting and kind is None:
            raise DataError(
                f"{self.root}: the last {waiting} episodes were not saved and were discarded",
                hint="call save() before leaving the with block",
            )

    def _open_videos(self) -> None:
        for column in self._columns:
            if column.dtype == "video" and self._encoding is not None:
                height, width, _ = column.shape
                path, fps = self._video_path(column.key), self._meta.info["fps"]
                path.parent.mkdir(parents=True, exist_ok=True)
                video = EpisodeVideo(path, fps=fps, height=height, width=width, encoding=self._encoding)
                self._videos[column.key] = video

    def _add_value(self, column: Column, value: Any) -> None:
        if column.is_picture:
            self._histograms[column.key].append(image_histogram(value))
        if column.dtype == "video":
            self._videos[column.key].write(value)
        else:
            # Copy the frame: the caller may reuse its buffer while a thread encodes.
            self._values[column.key].append(
                self._encoders.submit(encode_png, np.array(value)) if column.is_picture else value
            )

    @property
    def _next_index(self) -> int:
        return self.num_episodes + len(self._waiting)

    @property
    def _episode_folder(self) -> Path:
        return self.root / STAGE / "episode" / str(self._next_index)

    def _finish(self, task: str) -> int:
        """Turn the frames added so far into a waiting episode; returns its index."""
        index = self._next_index
        if not self._length:
            raise DataError(f"{self.root}: episode {index} has no frames", hint="call add_frame first")
        if not task.strip():
            raise DataError(f"{self.root}: episode {index} has no task", hint="describe the task in words")
        try:
            with writing(self.root):
                for video in self._videos.values():
                    video.close()
            self._waiting.append(self._finished(task))
        except BaseException:
            self.discard_episode()
            raise
        self._waiting_frames += self._length
        self._start()
        return index

    def _finished(self, task: str) -> FinishedEpisode:
        steps = np.arange(self._length)
        self._tasks[task] = next_task_index(self._tasks, task)
        values: dict[str, Any] = {
            "timestamp": steps / self._meta.info["fps"],
            "frame_index": steps,
            "episode_index": np.full(self._length, self._next_index),
            "index": steps + self.num_frames + self._waiting_frames,
            "task_index": np.full(self._length, self._tasks[task]),
        }
        for column in self._columns:
            if column.dtype != "video":
                rows = self._values[column.key]
                rows = [png.result() for png in rows] if column.is_picture else rows
                values[column.key] = rows if column.dtype in ("string", "image") else np.stack(rows)
        version = self._meta.info["codebase_version"]
        return FinishedEpisode(
            task=task,
            table=make_table(self._all_columns, values, version=version),
            videos={key: self._video_path(key) for key in self._videos},
            stats=self._stats(values, quantiles=version == V30),
        )

    def _stats(self, values: Mapping[str, Any], *, quantiles: bool) -> Stats:
        stats: Stats = {}
        for column in self._all_columns:
            if column.is_picture:
                stats[column.key] = image_stats(self._histograms[column.key], quantiles=quantiles)
            elif column.dtype != "string":
                stats[column.key] = column_stats(values[column.key], quantiles=quantiles)
        return stats

    def _video_path(self, key: str) -> Path:
        return self._episode_folder / f"{key}.mp4"

    def _reset(self) -> None:
        """Drop all waiting episodes and unsaved frames."""
        shutil.rmtree(self.root / STAGE / "episode", ignore_errors=True)
        self._waiting: list[FinishedEpisode] = []
        self._waiting_frames = 0
        self._tasks = {**self._meta.tasks}
        self._start()

    def _start(self) -> None:
        """Start an empty episode."""
        self._length = 0
        self._values: dict[str, list[Any]] = {c.key: [] for c in self._columns if c.dtype != "video"}
        self._histograms: dict[str, list[np.ndarray]] = {c.key: [] for c in self._columns if c.is_picture}
        self._videos: dict[str, EpisodeVideo] = {}

    def _release(self) -> None:
        self._encoders.shutdown(cancel_futures=True)
        release_dataset(self._lock)


def _normal_form(features: Mapping[str, Any]) -> dict[str, Any]:
    """Features as stored in info.json: lists instead of tuples, `names` always present, no info of other videos."""
    plain = {key: {"dtype": f["dtype"], "shape": f["shape"], "names": f.get("names")} for key, f in features.items()}
    return dict(json.loads(json.dumps(plain)))


def _open(root: Path, wanted: dict[str, Any], existing: str) -> Metadata:
    """The dataset's metadata, new or read, after completing or removing what an interrupted writer left behind."""
    recover(root)
    shutil.rmtree(root / STAGE / "episode", ignore_errors=True)
    found = [name for name in ("meta", "data", "videos") if (root / name).exists()]
    if found and not (root / INFO_FILE).exists():
        raise DataError(
            f"{root} holds {', '.join(found)} but no {INFO_FILE}: not a LeRobot dataset", hint="choose an empty folder"
        )
    if found and existing == "refuse":
        raise DataError(f"{root} already holds a dataset", hint="choose another folder, or append or overwrite it")
    if found and existing == "overwrite":
        _check_ours(root, found)
        for name in found:  # meta first: an interrupted deletion leaves no half dataset
            shutil.rmtree(root / name)
    if not found or existing == "overwrite":
        return Metadata(info=wanted, tasks={}, stats={}, episodes=None)
    meta = read_metadata(root, version=wanted["codebase_version"])
    if differences := _differences(meta.info, wanted):
        raise DataError(
            f"{root} cannot be continued with these settings:\n{listing(differences)}",
            hint="write to another folder, or pass what the dataset has",
        )
    return meta


def _check_ours(root: Path, folders: list[str]) -> None:
    """Raise unless pirl created the dataset and it holds only dataset files."""
    files = [path for name in folders for path in sorted((root / name).rglob("*")) if path.is_file()]
    other = [str(path.relative_to(root)) for path in files if path.suffix not in _DATASET_FILES]
    if other or not (root / CREATED_FILE).is_file():
        raise DataError(
            f"{root} {f'holds {other[0]}' if other else 'was not created by pirl'} and is not overwritten",
            hint="write to another folder, or remove this one yourself",
        )


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    names = ["fps", "data_path", "video_path"] + ["robot_type"] * (wanted["robot_type"] is not None)
    pairs: dict[str, tuple[Any, Any]] = {name: (found.get(name), wanted[name]) for name in names}
    old, new = found["features"], wanted["features"]
    for key in dict.fromkeys([*old, *new]):
        if key in old and key in new:
            parts = ("dtype", "shape", "names")
            pairs |= {f"{key}: {part}": (old[key].get(part), new[key].get(part)) for part in parts}
        else:
            pairs[key] = ("it" if key in old else "no such feature", "it" if key in new else "no such feature")
    return [f"{name}: the dataset has {a!r}, you ask for {b!r}" for name, (a, b) in pairs.items() if a != b]
