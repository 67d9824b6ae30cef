"""What goes into a dataset comes out of it, and no accident loses an episode or shows half of one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pirl.data import encode
from pirl.data.encode import H264, EpisodeVideo, VideoEncoding, choose_encoding
from pirl.data.episode_stats import image_histogram, image_stats, sampled_frames
from pirl.data.lerobot import read_meta
from pirl.data.rows import read_columns
from pirl.data.video import read_frames
from pirl.data.writer import LeRobotWriter
from pirl.errors import DataError, PirlWarning

STANDARD = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def drawn(episode: int, frame: int, camera: int, *, height: int = 32) -> np.ndarray:
    """A picture that names itself: 16 blocks of 8 pixels, least significant bit first, as in the golden datasets."""
    number = frame | episode << 8 | camera << 12 | 1 << 14
    picture = np.full((height, 128, 3), 90, np.uint8)
    for bit in range(16):
        picture[:16, 8 * bit : 8 * bit + 8] = 235 if number >> bit & 1 else 16
    return picture


def named(picture: np.ndarray) -> tuple[int, int, int]:
    bits = [int(picture[4:12, 8 * bit + 2 : 8 * bit + 6].mean() > 128) for bit in range(16)]
    assert bits[14:] == [1, 0], "not a drawn picture"
    number = sum(bit << i for i, bit in enumerate(bits[:14]))
    return number >> 8 & 15, number & 255, number >> 12


def decode(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def episodes_of(root: Path) -> Iterator[tuple[dict[str, Any], pa.Table, dict[str, list[np.ndarray]]]]:
    """Metadata, rows and pictures of each episode, found by the metadata alone."""
    info = json.loads((root / "meta/info.json").read_text())
    videos = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    rows = (
        [row for file in sorted(root.glob("meta/episodes/*/*.parquet")) for row in pq.read_table(file).to_pylist()]
        if info["codebase_version"] == "v3.0"
        else [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    )
    assert [row["episode_index"] for row in rows] == list(range(info["total_episodes"]))
    decoded: dict[Path, list[np.ndarray]] = {}
    for row in rows:
        where = {"episode_chunk": row["episode_index"] // info["chunks_size"], "episode_index": row["episode_index"]}
        place = {name.removeprefix("data/"): row[name] for name in row if name.startswith("data/")} | where
        table = pq.read_table(root / info["data_path"].format(**place))
        table = table.filter(pa.compute.equal(table["episode_index"], row["episode_index"]))
        pictures = {}
        for key in videos:
            place = {n.rpartition("/")[2]: row[n] for n in row if n.startswith(f"videos/{key}/")} | where
            path = root / info["video_path"].format(video_key=key, **place)
            frames = decoded.setdefault(path, decode(path))
            first = place.get("from_timestamp", 0.0) * info["fps"]
            last = place.get("to_timestamp", row["length"] / info["fps"]) * info["fps"]
            assert abs(first - round(first)) < 1e-9
            assert abs(last - round(last)) < 1e-9
            pictures[key] = frames[round(first) : round(last)]
        yield row, table, pictures


FEATURES: dict[str, Any] = {
    "observation.images.a": {"dtype": "video", "shape": (32, 128, 3), "names": ["height", "width", "channels"]},
    "observation.images.b": {"dtype": "video", "shape": (32, 128, 3), "names": ["height", "width", "channels"]},
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": (2,), "names": None},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.truncated": {"dtype": "bool", "shape": (1,), "names": None},
}


def frame_of(episode: int, frame: int, *, noise: int = 0) -> dict[str, Any]:
    pictures = [drawn(episode, frame, camera) for camera in range(2)]
    if noise:
        pictures[0][16:] = np.random.default_rng(1000 * episode + frame).integers(0, noise, (16, 128, 3))
    return {
        "observation.images.a": pictures[0],
        "observation.images.b": pictures[1],
        "observation.state": np.array([frame, episode, frame * 0.25], np.float32),
        "action": [0.5 * frame, -1.0],
        "next.reward": float(frame == 3),
        "next.truncated": frame == 4,
    }


def record(root: Path, lengths: list[int], *, start: int = 0, noise: int = 0, **options: Any) -> None:
    with LeRobotWriter(root, fps=30, features=FEATURES, **options) as writer:
        for episode, length in enumerate(lengths, start):
            for t in range(length):
                writer.add_frame(frame_of(episode, t, noise=noise))
            writer.save_episode(task=f"task {episode % 2}")


def check(root: Path, lengths: list[int]) -> None:
    """Every number and every picture is where it belongs; then the same through the project's own reader."""
    begin = 0
    found = list(episodes_of(root))
    assert [row["length"] for row, _, _ in found] == lengths
    meta = read_meta(root)
    columns = read_columns(meta)
    for episode, (row, table, pictures) in enumerate(found):
        length = lengths[episode]
        assert row["tasks"] == [f"task {episode % 2}"]
        assert table["frame_index"].to_pylist() == list(range(length))
        assert table["index"].to_pylist() == list(range(begin, begin + length))
        assert table["task_index"].to_pylist() == [episode % 2] * length
        np.testing.assert_allclose(table["timestamp"].to_numpy(), np.arange(length) / 30, atol=1e-6)
        for t in range(length):
            frame = frame_of(episode, t)
            assert table["observation.state"][t].as_py() == frame["observation.state"].tolist()
            assert table["action"][t].as_py() == frame["action"]
            assert table["next.reward"][t].as_py() == frame["next.reward"]
            assert table["next.truncated"][t].as_py() is frame["next.truncated"]
        entry = meta.episodes[episode]
        assert columns["action"][entry.start : entry.start + length, 0].tolist() == [0.5 * t for t in range(length)]
        for number, key in enumerate(pictures):
            assert [named(picture) for picture in pictures[key]] == [(episode, t, number) for t in range(length)]
            again = read_frames(meta, entry, key, size=None)
            np.testing.assert_array_equal(again, pictures[key])
        begin += length
    assert not (root / ".writing").exists()


@pytest.mark.parametrize("codec", ["av1", "h264"])
@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_round_trip(tmp_path: Path, version: str, codec: str) -> None:
    record(tmp_path / "set", [7, 1, 12], version=version, codec=codec)
    check(tmp_path / "set", [7, 1, 12])
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert info["features"]["observation.images.a"]["info"]["video.codec"] == codec


def test_v30_rolls_files_and_each_camera_on_its_own(tmp_path: Path) -> None:
    lengths = [6, 9, 5, 8, 7, 6]
    record(tmp_path, lengths, noise=200, chunks_size=2, data_files_size_in_mb=0.003, video_files_size_in_mb=0.03)
    check(tmp_path, lengths)
    rows = [row for row, _, _ in episodes_of(tmp_path)]
    places = {
        key: [(row[f"{key}/chunk_index"], row[f"{key}/file_index"]) for row in rows]
        for key in ("data", "videos/observation.images.a", "videos/observation.images.b")
    }
    noisy, flat = (places[f"videos/observation.images.{camera}"] for camera in "ab")
    assert len(set(noisy)) > len(set(flat)) == 1
    for key in places:
        order = list(dict.fromkeys(places[key]))
        assert order == [(i // 2, i % 2) for i in range(len(order))]
    assert len(set(places["data"])) > 1
    for chunk, file in set(noisy):
        path = tmp_path / f"videos/observation.images.a/chunk-{chunk:03d}/file-{file:03d}.mp4"
        assert path.stat().st_size < 0.03 * 2**20 or noisy.count((chunk, file)) == 1


def test_v21_starts_a_new_chunk(tmp_path: Path) -> None:
    record(tmp_path, [2, 3, 2], version="v2.1", chunks_size=2)
    check(tmp_path, [2, 3, 2])
    assert (tmp_path / "data/chunk-001/episode_000002.parquet").exists()
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert (info["total_chunks"], info["total_videos"], info["splits"]) == (2, 6, {"train": "0:3"})


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_appending_in_a_second_session_equals_one_session(tmp_path: Path, version: str) -> None:
    record(tmp_path / "two", [5, 4], version=version)
    record(tmp_path / "two", [6, 3], start=2, version=version)
    record(tmp_path / "one", [5, 4, 6, 3], version=version)
    check(tmp_path / "two", [5, 4, 6, 3])
    assert files(tmp_path / "two") == files(tmp_path / "one")
    for file in files(tmp_path / "one"):
        a, b = (tmp_path / side / file for side in ("one", "two"))
        if file.endswith(".parquet"):
            assert pq.read_table(a).equals(pq.read_table(b), check_metadata=True), file
        elif file.endswith((".json", ".jsonl")):
            assert a.read_bytes() == b.read_bytes(), file


@pytest.mark.parametrize("kind", [pa.float64(), pa.bool_(), pa.int64()])
def test_bounds_of_flags_are_continued_as_they_were_stored(tmp_path: Path, kind: pa.DataType) -> None:
    """LeRobot 0.6 stores minimum and maximum of a boolean column as numbers, LeRobot 0.4 as booleans."""
    record(tmp_path, [5, 4])
    path = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    for name in ("min", "max"):
        table, key = pq.read_table(path), f"stats/next.truncated/{name}"
        column = pa.array(table[key].to_pylist()).cast(pa.list_(pa.int64())).cast(pa.list_(kind))
        pq.write_table(table.set_column(table.column_names.index(key), key, column), path)
    record(tmp_path, [6], start=2)
    check(tmp_path, [5, 4, 6])
    after = pq.read_table(path)
    assert after.schema.field("stats/next.truncated/max").type.value_type == kind
    assert [row[0] for row in after["stats/next.truncated/max"].to_pylist()] == [1, 0, 1]


def test_settings_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    record(tmp_path, [2], robot_type="aloha")
    before = {file: (tmp_path / file).read_bytes() for file in files(tmp_path)}
    other = {**FEATURES, "action": {"dtype": "float32", "shape": (7,), "names": None}}
    other["extra"] = other.pop("next.truncated")
    with pytest.raises(DataError) as caught:
        LeRobotWriter(tmp_path, fps=50, features=other, robot_type="droid")
    for part in (
        "fps: the dataset has 30, you ask for 50",
        "'aloha'",
        "'droid'",
        "action: shape",
        "[2]",
        "[7]",
        "extra",
    ):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"has format v3\.0, you ask for v2\.1"):
        LeRobotWriter(tmp_path, fps=30, features=FEATURES, version="v2.1")
    with pytest.raises(DataError, match="already holds a dataset"):
        LeRobotWriter(tmp_path, fps=30, features=FEATURES, existing="refuse")
    assert {file: (tmp_path / file).read_bytes() for file in files(tmp_path)} == before


def test_overwrites_only_when_asked_and_only_datasets(tmp_path: Path) -> None:
    record(tmp_path / "set", [2, 2])
    (tmp_path / "set/README.md").write_text("mine")
    record(tmp_path / "set", [3], existing="overwrite")
    check(tmp_path / "set", [3])
    assert (tmp_path / "set/README.md").read_text() == "mine"
    (tmp_path / "set/data/thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"holds data/thesis\.tex and is not overwritten"):
        record(tmp_path / "set", [3], existing="overwrite")
    (tmp_path / "set/data/thesis.tex").unlink()
    (tmp_path / "set/meta/pirl.json").unlink()  # as in what LeRobot recorded
    with pytest.raises(DataError, match="was not created by pirl and is not overwritten"):
        record(tmp_path / "set", [3], existing="overwrite")
    check(tmp_path / "set", [3])
    (tmp_path / "thesis/data").mkdir(parents=True)
    with pytest.raises(DataError, match="not a LeRobot dataset"):
        LeRobotWriter(tmp_path / "thesis", fps=30, features=FEATURES, existing="overwrite")
    assert (tmp_path / "thesis/data").is_dir()
    with pytest.raises(DataError, match="is a file"):
        LeRobotWriter(tmp_path / "set/README.md", fps=30, features=FEATURES)


def test_metadata_of_another_programs_crash_is_refused(tmp_path: Path) -> None:
    record(tmp_path, [2, 2])
    info = json.loads((tmp_path / "meta/info.json").read_text())
    (tmp_path / "meta/info.json").write_text(json.dumps(info | {"total_episodes": 1, "total_frames": 2}))
    with pytest.raises(DataError, match="half-written"):
        LeRobotWriter(tmp_path, fps=30, features=FEATURES)
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    (tmp_path / "meta/tasks.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"tasks\.parquet: cannot be read"):
        LeRobotWriter(tmp_path, fps=30, features=FEATURES)
    for content, message in (("{", "cannot be read"), ("[]", "codebase_version is None")):
        (tmp_path / "meta/info.json").write_text(content)
        with pytest.raises(DataError, match=message):
            LeRobotWriter(tmp_path, fps=30, features=FEATURES)


def test_a_dataset_that_lacks_a_file_is_not_continued(tmp_path: Path) -> None:
    record(tmp_path, [2])
    next((tmp_path / "data").rglob("*.parquet")).unlink()
    with pytest.raises(DataError, match=r"file-000\.parquet is missing"):
        record(tmp_path, [2], start=1)
    assert json.loads((tmp_path / "meta/info.json").read_text())["total_episodes"] == 1


def test_videos_of_another_codec_begin_a_new_file(tmp_path: Path) -> None:
    record(tmp_path, [3], codec="av1")
    record(tmp_path, [4, 2], start=1, codec="h264")
    check(tmp_path, [3, 4, 2])
    assert len(list((tmp_path / "videos/observation.images.a").rglob("*.mp4"))) == 2


def test_continues_a_dataset_without_episodes(tmp_path: Path) -> None:
    """LeRobot creates info.json when recording begins."""
    record(tmp_path / "full", [2])
    info = json.loads((tmp_path / "full/meta/info.json").read_text())
    (tmp_path / "new/meta").mkdir(parents=True)
    empty = info | {"total_episodes": 0, "total_frames": 0, "total_tasks": 0, "splits": {}}
    (tmp_path / "new/meta/info.json").write_text(json.dumps(empty))
    record(tmp_path / "new", [3])
    check(tmp_path / "new", [3])


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path, fps=30, features=FEATURES) as writer:
        with pytest.raises(DataError, match="another writer"):
            LeRobotWriter(tmp_path, fps=30, features=FEATURES)
        writer.add_frame(frame_of(0, 0))
        writer.save_episode(task="task 0")
    check(tmp_path, [1])


class PowerCutError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_crash_at_any_step_of_saving_leaves_all_or_nothing(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace
    record(tmp_path / "start", [3], version=version)
    outcomes = []
    for step in range(100):
        root = tmp_path / f"cut_{step}"
        shutil.copytree(tmp_path / "start", root)
        writer = LeRobotWriter(root, fps=30, features=FEATURES, version=version)
        for t in range(4):
            writer.add_frame(frame_of(1, t))
        calls = iter(range(100))

        def replace(source: Any, target: Any, calls: Iterator[int] = calls, step: int = step) -> None:
            if next(calls) == step:
                raise PowerCutError
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                writer.save_episode(task="task 1")
            except PowerCutError:
                assert json.loads((root / "meta/info.json").read_text())["total_episodes"] == 1
            else:
                writer.close()
                break
        if step % 2:
            writer.close()  # an exception: the process goes on and cleans up
        else:
            writer._lock.release()  # the process is gone
        with LeRobotWriter(root, fps=30, features=FEATURES, version=version) as again:
            outcomes.append(again.num_episodes)
            for t in range(2):
                again.add_frame(frame_of(again.num_episodes, t))
            again.save_episode(task=f"task {again.num_episodes % 2}")
        check(root, [3, 4, 2] if outcomes[-1] == 2 else [3, 2])
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == ({1, 2} if version == "v2.1" else {2})  # v3.0 joins videos before anything is moved
    assert len(outcomes) >= 5


def test_a_failed_save_can_be_followed_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LeRobotWriter(tmp_path, fps=30, features=FEATURES) as writer:
        for episode, broken in ((0, "fsync"), (0, None), (1, "replace"), (2, None)):
            writer.add_frame(frame_of(episode, 0))
            with monkeypatch.context() as patch:
                if broken is None:
                    writer.save_episode(task=f"task {episode % 2}")
                    continue
                real, calls = getattr(os, broken), iter(range(100))

                def fail(*args: Any, real: Any = real, calls: Iterator[int] = calls) -> Any:
                    if next(calls) == 1:
                        raise OSError(28, "No space left on device")
                    return real(*args)

                patch.setattr(os, broken, fail)
                with pytest.raises(DataError, match="No space"):
                    writer.save_episode(task=f"task {episode % 2}")
    check(tmp_path, [1, 1, 1])


def test_a_killed_recording_shows_no_trace_and_can_go_on(tmp_path: Path) -> None:
    script = (
        "import os, sys, signal, importlib.util as u\n"
        "spec = u.spec_from_file_location('t', sys.argv[1]); t = u.module_from_spec(spec); spec.loader.exec_module(t)\n"
        "w = t.LeRobotWriter(sys.argv[2], fps=30, features=t.FEATURES)\n"
        "[w.add_frame(t.frame_of(0, i)) for i in range(6)]; w.save_episode(task='task 0')\n"
        "[w.add_frame(t.frame_of(1, i)) for i in range(60)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, __file__, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".writing/episode").is_dir(), "the kill came too late to test anything"
    assert [row["length"] for row, _, _ in episodes_of(tmp_path)] == [6]
    record(tmp_path, [5], start=1)
    check(tmp_path, [6, 5])


def test_only_saved_episodes_count(tmp_path: Path) -> None:
    def crash() -> None:
        with LeRobotWriter(tmp_path, fps=30, features=FEATURES) as writer:
            writer.add_frame(frame_of(0, 0))
            writer.save_episode(task="task 0")
            writer.add_frame(frame_of(1, 0))
            raise RuntimeError("collision")

    def forget() -> None:
        with LeRobotWriter(tmp_path, fps=30, features=FEATURES) as writer:
            writer.add_frame(frame_of(1, 0))
            writer.add_frame(frame_of(1, 1))

    with pytest.raises(RuntimeError, match="collision"):
        crash()
    check(tmp_path, [1])
    with pytest.raises(DataError, match="last 2 frames"):
        forget()
    check(tmp_path, [1])
    with LeRobotWriter(tmp_path, fps=30, features=FEATURES) as writer:
        writer.add_frame(frame_of(7, 0))
        writer.discard_episode()
        writer.add_frame(frame_of(1, 0))
        writer.save_episode(task="task 1")
    check(tmp_path, [1, 1])


def test_an_encoder_that_fails_discards_the_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one camera would be a frame ahead of the others for the rest of it."""
    with LeRobotWriter(tmp_path, fps=30, features=FEATURES) as writer:
        writer.add_frame(frame_of(0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(EpisodeVideo, "write", lambda *_: (_ for _ in ()).throw(OSError("disk")))
            with pytest.raises(DataError, match=r"cannot be written \(disk"):
                writer.add_frame(frame_of(0, 1))
        with pytest.raises(DataError, match="has no frames"):
            writer.save_episode(task="task 0")
        writer.add_frame(frame_of(0, 0))
        writer.save_episode(task="task 0")
    check(tmp_path, [1])


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"action": None}, ["lacks {'action': (2,)}", "next.truncated"]),
        ({"jerk": np.zeros(5)}, ["unknown {'jerk': (5,)}"]),
        ({"action": np.zeros(3)}, ["'action' has shape (3,), expected (2,)"]),
        ({"action": np.zeros((1, 2))}, ["'action' has shape (1, 2), expected (2,)"]),
        ({"next.reward": np.zeros(2)}, ["'next.reward' has shape (2,), expected (1,)"]),
        ({"next.truncated": 1}, ["'next.truncated'", "dtype int64, expected bool"]),
        ({"action": ["a", "b"]}, ["'action' of shape (2,) has dtype <U1, expected float32"]),
        ({"action": [1.0, np.nan]}, ["'action' of shape (2,) is not finite at [1]"]),
        ({"action": [1e300, 0.0]}, ["'action' of shape (2,) is not finite at [0]"]),
        ({"observation.images.a": np.zeros((3, 32, 128), np.uint8)}, ["shape (3, 32, 128), expected (32, 128, 3)"]),
        ({"observation.images.a": np.zeros((32, 128, 3))}, ["dtype float64, expected uint8"]),
    ],
)
def test_bad_frames_are_named_and_leave_the_episode_as_it_was(tmp_path: Path, change: Any, parts: list[str]) -> None:
    with LeRobotWriter(tmp_path, fps=30, features=FEATURES) as writer:
        writer.add_frame(frame_of(0, 0))
        bad = {key: value for key, value in (frame_of(0, 1) | change).items() if value is not None}
        with pytest.raises(DataError) as caught:
            writer.add_frame(bad)
        assert f"{tmp_path}, episode 0, frame 1" in str(caught.value)
        for part in parts:
            assert part in str(caught.value)
        writer.add_frame(frame_of(0, 1))
        writer.save_episode(task="task 0")
    check(tmp_path, [2])


def test_bad_episodes_and_settings(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "set", fps=30, features=FEATURES) as writer:
        with pytest.raises(DataError, match="has no frames"):
            writer.save_episode(task="x")
        with pytest.raises(DataError, match="lengths"):
            writer.add_episode({"action": np.zeros((2, 2)), "next.reward": np.zeros(3)}, task="x")
        writer.add_frame(frame_of(0, 0))
        with pytest.raises(DataError, match="has no task"):
            writer.save_episode(task=" ")
        with pytest.raises(DataError, match="1 frames are not saved"):
            writer.add_episode({}, task="x")
        writer.discard_episode()
        late = {key: [frame_of(0, t)[key] for t in range(3)] for key in FEATURES}
        late["action"][2] = [np.inf, 0.0]
        with pytest.raises(DataError, match="frame 2: 'action'"):
            writer.add_episode(late, task="x")
        with pytest.raises(DataError, match="has no frames"):  # nothing of it was kept
            writer.save_episode(task="x")
    assert files(tmp_path) == []
    number = {"dtype": "float32", "shape": (1,), "names": None}
    for features, message in (
        ({}, "no features"),
        ({"a/b": number}, "a/b"),
        ({"..": number}, "cannot be stored"),
        ({"a": {"dtype": "complex64", "shape": (1,)}}, "complex64"),
        ({"a": {"dtype": "float32", "shape": ()}}, r"shape \(\)"),
        ({"a": {"dtype": "video", "shape": (32, 32, 4)}}, r"\(32, 32, 4\)"),
        ({"a": "float32"}, "is 'float32'"),
    ):
        with pytest.raises(DataError, match=message):
            LeRobotWriter(tmp_path / "bad", fps=30, features=features)
    with pytest.raises(DataError, match="fps is 0"):
        LeRobotWriter(tmp_path / "bad", fps=0, features=FEATURES)
    with pytest.raises(DataError, match="unknown video codec 'vp9'"):
        LeRobotWriter(tmp_path / "bad", fps=30, features=FEATURES, codec="vp9")
    with pytest.raises(DataError, match="libnothing"):
        LeRobotWriter(tmp_path / "bad", fps=30, features=FEATURES, codec=VideoEncoding(encoder="libnothing"))
    assert not (tmp_path / "bad").exists()
    odd = {"camera": {"dtype": "video", "shape": (33, 64, 3), "names": None}}
    with LeRobotWriter(tmp_path / "odd", fps=30, features=odd, codec="h264") as writer:
        with pytest.raises(DataError, match="refused 33x64"):
            writer.add_frame({"camera": np.zeros((33, 64, 3), np.uint8)})


def test_without_svt_av1_videos_become_h264_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "can_encode", lambda encoder: encoder != "libsvtav1")
    with pytest.warns(PirlWarning, match=r"H\.264"):
        assert choose_encoding("av1") == H264


def test_other_kinds_of_features(tmp_path: Path) -> None:
    features = {
        "camera": {"dtype": "image", "shape": (3, 6, 8), "names": ["channels", "height", "width"]},
        "force": {"dtype": "float64", "shape": (2, 3), "names": None},
        "contacts": {"dtype": "uint8", "shape": (4,), "names": ["a", "b", "c", "d"]},
        "note": {"dtype": "string", "shape": (1,), "names": None},
        "count": {"dtype": "int32", "shape": (1,), "names": None},
    }
    rng = np.random.default_rng(0)
    columns = {
        "camera": rng.integers(0, 256, (5, 6, 8, 3), dtype=np.uint8),
        "force": rng.normal(size=(5, 2, 3)),
        "contacts": rng.integers(0, 2, (5, 4), dtype=np.uint8),
        "note": ["eins", "zwei", "三", "", "five"],
        "count": np.arange(5)[:, None] - 2,
    }
    for version in ("v3.0", "v2.1"):
        root = tmp_path / version
        with LeRobotWriter(root, fps=10, features=features, version=version) as writer:
            writer.add_episode(columns, task="把红色方块移过去 🤖")
            with pytest.raises(DataError, match="does not fit into int32"):
                writer.add_frame({key: values[0] for key, values in columns.items()} | {"count": 2**40})
            writer.add_episode(columns, task="zweite Aufgabe: Würfel")
        meta = read_meta(root)
        assert meta.tasks == {0: "把红色方块移过去 🤖", 1: "zweite Aufgabe: Würfel"}
        read = read_columns(meta)
        np.testing.assert_array_equal(read["force"], np.tile(columns["force"], (2, 1, 1)))
        np.testing.assert_array_equal(read["contacts"], np.tile(columns["contacts"], (2, 1)))
        assert read["note"].tolist() == columns["note"] * 2
        assert read["count"].tolist() == [-2, -1, 0, 1, 2] * 2
        for episode in meta.episodes:
            np.testing.assert_array_equal(read_frames(meta, episode, "camera", size=None), columns["camera"])
    schema = pq.read_schema(next((tmp_path / "v3.0/data").rglob("*.parquet")))
    hugging_face = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert hugging_face["force"] == {"shape": [2, 3], "dtype": "float64", "_type": "Array2D"}
    assert hugging_face["note"] == {"dtype": "string", "_type": "Value"}
    v30 = json.loads((tmp_path / "v3.0/meta/stats.json").read_text())
    assert set(v30) == {*features, *STANDARD} - {"note"}
    np.testing.assert_allclose(v30["force"]["mean"], columns["force"].mean((0, 1)))
    v21 = json.loads((tmp_path / "v2.1/meta/episodes_stats.jsonl").read_text().splitlines()[0])["stats"]
    np.testing.assert_allclose(v21["force"]["mean"], columns["force"].mean(0))


def test_buffers_may_be_reused_and_pictures_are_not_kept(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path, fps=30, features=FEATURES) as writer:
        state, kept = np.zeros(3, np.float32), []
        for t in range(4):
            frame = frame_of(0, t)
            state[:] = frame["observation.state"]
            kept.append(weakref.ref(frame["observation.images.a"]))
            writer.add_frame(frame | {"observation.state": state})
            del frame
        assert [reference() for reference in kept] == [None] * 4
        writer.save_episode(task="task 0")
    check(tmp_path, [4])


def test_picture_statistics_look_at_the_pixels_lerobot_samples() -> None:
    assert [len(sampled_frames(n)) for n in (1, 100, 400, 1000, 5000, 10_000)] == [1, 100, 100, 177, 594, 1000]
    assert sampled_frames(400)[:3] + sampled_frames(400)[-1:] == [0, 4, 8, 399]
    rng = np.random.default_rng(0)
    large = rng.integers(0, 256, (480, 640, 3), dtype=np.uint8)
    small = large[::4, ::4].reshape(-1, 3)
    stats = image_stats([image_histogram(large)], quantiles=True)
    assert all(stats[name].shape == (3, 1, 1) for name in stats if name != "count")
    for name, expected in {
        "min": small.min(0),
        "max": small.max(0),
        "mean": small.mean(0),
        "std": small.std(0),
    }.items():
        np.testing.assert_allclose(stats[name].ravel(), expected / 255, rtol=1e-12)
    for name, q in {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}.items():
        np.testing.assert_allclose(stats[name].ravel(), np.quantile(small, q, axis=0) / 255, atol=1.1 / 255)
    frames = rng.integers(0, 256, (150, 4, 6, 3), dtype=np.uint8)
    stats = image_stats([image_histogram(frame) for frame in frames], quantiles=False)
    assert stats["count"].tolist() == [100]
    np.testing.assert_allclose(stats["mean"].ravel(), frames[sampled_frames(150)].mean((0, 1, 2)) / 255, rtol=1e-12)
