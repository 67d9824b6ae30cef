"""The writer makes of a recording what LeRobot's own writers made of it, and continues what they began."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pirl.data.episode_files import CREATED_FILE
from pirl.data.lerobot import read_meta
from pirl.data.rows import read_columns
from pirl.data.video import read_frames
from pirl.data.writer import LeRobotWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
STANDARD = ("timestamp", "frame_index", "episode_index", "index", "task_index")
CAMERAS = tuple(f"observation.images.cam_{name}" for name in ("high", "left_wrist", "right_wrist"))
TASKS = ("transfer the red cube", "insert the peg")
LENGTHS = (37, 80, 52, 45, 63)
V30 = ("v30_video", "v30_image")
V21 = ("v21_video", "v21_image")


def golden_info(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "meta/info.json").read_text())


@pytest.fixture(scope="module")
def recording() -> list[dict[str, Any]]:
    """The frames of the golden datasets, from the one that holds their pictures without loss."""
    frames = pq.read_table(GOLDEN / "v30_image/data/chunk-000/file-000.parquet").to_pylist()
    for frame in frames:
        for camera in CAMERAS:
            frame[camera] = np.asarray(Image.open(io.BytesIO(frame[camera]["bytes"])))
        for key in ("observation.state", "action"):
            frame[key] = np.array(frame[key], np.float32)
    return frames


@pytest.fixture(scope="module")
def written(recording: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden recording written by us, in the four flavours of the golden datasets."""
    folder = tmp_path_factory.mktemp("written")
    for name in V30 + V21:
        info = golden_info(name)
        version = info["codebase_version"]
        with LeRobotWriter(folder / name, fps=50, features=info["features"], robot_type="aloha", version=version) as w:
            for episode in range(5):
                for frame in recording:
                    if frame["episode_index"] == episode:
                        w.add_frame({key: value for key, value in frame.items() if key not in STANDARD})
                assert w.save_episode(task=TASKS[episode % 2]) == episode
            assert (w.num_episodes, w.num_frames) == (5, 277)
    return folder


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".npz")


@pytest.mark.parametrize("name", V30 + V21)
def test_files_and_info_are_lerobots(written: Path, name: str) -> None:
    assert [file for file in files(written / name) if file != CREATED_FILE] == files(GOLDEN / name)
    for file in ("info.json", *(("episodes.jsonl", "tasks.jsonl") if name in V21 else ())):
        assert (written / name / "meta" / file).read_bytes() == (GOLDEN / name / "meta" / file).read_bytes()


def described(schema: pa.Schema) -> dict[bytes, Any]:
    """The schema's metadata without what names the process that wrote it."""
    metadata = {key: json.loads(value) for key, value in (schema.metadata or {}).items()}
    for value in metadata.values():
        for volatile in ("fingerprint", "creator", "pandas_version"):
            value.pop(volatile, None)
    return metadata


@pytest.mark.parametrize("name", V30 + V21)
def test_parquet_schemas_rows_and_row_groups_are_lerobots(written: Path, name: str) -> None:
    for file in (file for file in files(GOLDEN / name) if file.endswith(".parquet")):
        ours, theirs = pq.ParquetFile(written / name / file), pq.ParquetFile(GOLDEN / name / file)
        assert ours.schema_arrow.names == theirs.schema_arrow.names
        assert [str(field) for field in ours.schema_arrow] == [str(field) for field in theirs.schema_arrow]
        assert described(ours.schema_arrow) == described(theirs.schema_arrow)
        groups = [[f.metadata.row_group(i).num_rows for i in range(f.num_row_groups)] for f in (ours, theirs)]
        assert groups[0] == groups[1]
        assert ours.metadata.row_group(0).column(0).compression == "SNAPPY"
        ours, theirs = ours.read(), theirs.read()
        for column in theirs.column_names:
            if column.startswith("stats/"):
                continue
            if column in CAMERAS:  # PNG is lossless, but every encoder writes it differently
                a, b = ours[column].to_pylist(), theirs[column].to_pylist()
                assert [cell["path"] for cell in a] == [cell["path"] for cell in b]
                pixels = [[np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in side] for side in (a, b)]
                np.testing.assert_array_equal(pixels[0], pixels[1])
            else:
                assert ours[column].equals(theirs[column]), column


def golden_image_std() -> dict[str, np.ndarray]:
    """Per camera and episode, from LeRobot's v2.1 writer."""
    lines = (GOLDEN / "v21_video/meta/episodes_stats.jsonl").read_text().splitlines()
    stats = [json.loads(line)["stats"] for line in lines]
    return {key: np.array([s[key]["std"] for s in stats]) for key in (*CAMERAS, "action")}


def assert_close(ours: Any, theirs: Any, what: str) -> None:
    a, b = np.array(ours), np.array(theirs)
    assert (a.shape, a.dtype) == (b.shape, b.dtype), what
    np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-6, atol=1e-6, err_msg=what)


@pytest.mark.parametrize("name", V21)
def test_episode_statistics_are_lerobots_v21(written: Path, name: str) -> None:
    lines = [(root / name / "meta/episodes_stats.jsonl").read_text().splitlines() for root in (written, GOLDEN)]
    assert len(lines[0]) == 5
    for ours, theirs in zip(*(map(json.loads, side) for side in lines), strict=True):
        assert ours["episode_index"] == theirs["episode_index"]
        assert list(ours["stats"]) == list(theirs["stats"])
        for key, column in theirs["stats"].items():
            assert list(ours["stats"][key]) == list(column)
            for stat, value in column.items():
                assert_close(ours["stats"][key][stat], value, f"{key} {stat}")


@pytest.mark.parametrize("name", V30)
def test_episode_and_global_statistics_are_lerobots_v30(written: Path, name: str) -> None:
    """LeRobot 0.4.4 loses two deviations, of pictures (squared as uint8) and of action[0] (cancellation in float32).

    Those are compared with what its older writer says about the same recording.
    """
    file = "meta/episodes/chunk-000/file-000.parquet"
    ours, theirs = (pq.read_table(root / name / file).to_pydict() for root in (written, GOLDEN))
    stats = [column for column in theirs if column.startswith("stats/")]
    assert len(stats) == 130
    true_std = golden_image_std()
    for column in stats:
        key, stat = column.split("/")[1:]
        truth = true_std[key] if stat == "std" and key in true_std else theirs[column]
        assert_close(ours[column], truth, column)
    ours, theirs = (json.loads((root / name / "meta/stats.json").read_text()) for root in (written, GOLDEN))
    assert set(ours) == set(theirs)
    assert list(ours) == list(golden_info(name)["features"])
    for key, column in theirs.items():
        assert list(ours[key]) == list(column)
        for stat, value in column.items():
            if key not in CAMERAS or stat != "std":
                assert_close(ours[key][stat], value, f"{key} {stat}")


def test_global_deviation_of_pictures_is_that_of_all_pixels(written: Path, recording: list[dict[str, Any]]) -> None:
    stats = json.loads((written / "v30_video/meta/stats.json").read_text())
    for camera in CAMERAS:
        pixels = np.stack([frame[camera] for frame in recording]) / 255
        np.testing.assert_allclose(np.ravel(stats[camera]["std"]), pixels.std((0, 1, 2)), rtol=1e-9)
        np.testing.assert_allclose(np.ravel(stats[camera]["mean"]), pixels.mean((0, 1, 2)), rtol=1e-9)


@pytest.mark.parametrize("name", ["v30_video", "v21_video"])
def test_video_streams_are_lerobots(written: Path, name: str) -> None:
    for file in (file for file in files(GOLDEN / name) if file.endswith(".mp4")):
        streams = []
        for root in (written, GOLDEN):
            with av.open(str(root / name / file)) as container:
                video = container.streams.video[0]
                packets = [(p.pts, p.dts, p.duration) for p in container.demux(video) if p.size]
                codec = video.codec_context
                picture = (video.codec.canonical_name, video.pix_fmt, video.height, video.width, codec.color_range)
                timing = (video.time_base, video.average_rate, video.frames, video.duration, packets)
                streams.append((picture, timing))
        assert streams[0] == streams[1]


def frame_number(picture: np.ndarray) -> int:
    """What the golden pictures say in their 16 blocks of 8 pixels, least significant bit first."""
    bits = [int(picture[4:12, 8 * bit + 2 : 8 * bit + 6].mean() > 128) for bit in range(16)]
    return sum(bit << i for i, bit in enumerate(bits))


@pytest.mark.parametrize("name", [*V30, *V21, "v30_video_multifile"])
def test_continues_a_dataset_that_lerobot_wrote(tmp_path: Path, recording: list[dict[str, Any]], name: str) -> None:
    root = tmp_path / name
    shutil.copytree(GOLDEN / name, root)
    info = golden_info(name)
    before = read_meta(GOLDEN / name)
    frames = [{k: v for k, v in frame.items() if k not in STANDARD} for frame in recording[100:112]]
    with LeRobotWriter(root, fps=50, features=info["features"], version=info["codebase_version"]) as writer:
        assert writer.add_episode({key: [f[key] for f in frames] for key in frames[0]}, task=TASKS[1]) == 5
        assert writer.add_episode({key: [f[key] for f in frames] for key in frames[0]}, task="new") == 6
    after = read_meta(root)
    assert [episode.length for episode in after.episodes] == [*LENGTHS, 12, 12]
    assert [episode.tasks for episode in after.episodes[5:]] == [(TASKS[1],), ("new",)]
    old, new = read_columns(before), read_columns(after)
    assert new["task_index"][277:].tolist() == [1] * 12 + [2] * 12
    for key, column in old.items():
        np.testing.assert_array_equal(new[key][:277], column)
    for camera in CAMERAS:
        for a, b in zip(before.episodes, after.episodes, strict=False):
            np.testing.assert_array_equal(
                read_frames(before, a, camera, size=None), read_frames(after, b, camera, size=None)
            )
        numbers = [frame_number(frame[camera]) for frame in frames]
        assert len(set(numbers)) == 12
        for episode in after.episodes[5:]:
            assert [frame_number(p) for p in read_frames(after, episode, camera, size=None)] == numbers
    if name in V30:
        stats = json.loads((root / "meta/stats.json").read_text())["observation.state"]
        assert stats["count"] == [277 + 24]
        np.testing.assert_allclose(stats["mean"], new["observation.state"].astype(float).mean(0), atol=1e-6)
        np.testing.assert_allclose(stats["std"], new["observation.state"].astype(float).std(0), rtol=1e-5)
