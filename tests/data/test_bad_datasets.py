"""Damaged datasets are refused where they are read, with the file and the episode named."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pirl.data import lerobot, video
from pirl.data.cache import CacheConfig
from pirl.data.dataset import LeRobotSource
from pirl.data.outcomes import OutcomeRule
from pirl.errors import DataError, PirlWarning

pytestmark = pytest.mark.usefixtures("own_home")

HIGH = "observation.images.cam_high"
Copy = Callable[[str], Path]


def read(root: Path, tier: str = "disk", **settings: Any) -> LeRobotSource:
    source = LeRobotSource(
        root, cameras={"base_0_rgb": HIGH}, image_size=32, cache=CacheConfig(tier=tier, workers=2), **settings
    )
    source.prepare()
    return source


def refuse(root: Path, *told: str | Path, **settings: Any) -> None:
    """Reading fails with an error that says all of this, and leaves nothing half-written behind."""
    with pytest.raises(DataError) as caught:
        read(root, **settings)
    for expected in told:
        assert str(expected) in caught.value.message
    assert caught.value.hint
    assert not list(root.parent.rglob("*.tmp"))


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def with_column(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[pa.Table], pa.Table]:
    def changed(table: pa.Table) -> pa.Table:
        old = table.column(name)
        values = change(np.array(old.to_pylist()))
        return table.set_column(table.column_names.index(name), name, pa.array(values.tolist(), old.type))

    return changed


def edit_episode(root: Path, number: int, **changes: Any) -> None:
    path = root / "meta/episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number] |= changes
    path.write_text("\n".join(map(json.dumps, lines)))


def encode(path: Path, pictures: np.ndarray, times: list[int]) -> None:
    """A video whose frames have these numbers, with its index at the front of the file."""
    with av.open(str(path), "w", options={"movflags": "faststart"}) as target:
        stream = target.add_stream("libx264", rate=50)
        stream.height, stream.width, stream.pix_fmt = *pictures.shape[1:3], "yuv420p"
        stream.codec_context.time_base = Fraction(1, 50)
        for number, picture in zip(times, pictures, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number
            target.mux(stream.encode(frame))
        target.mux(stream.encode())


@pytest.mark.parametrize("kept", [0.3, 0.9])
@pytest.mark.parametrize("name", ["v21_video", "v30_video"])
def test_truncated_video(dataset_copy: Copy, name: str, kept: float) -> None:
    root = dataset_copy(name)
    path = sorted((root / "videos").rglob(f"*{HIGH}/**/*.mp4"))[-1]
    os.truncate(path, int(path.stat().st_size * kept))
    refuse(root, path, "episode ")


def test_truncated_video_whose_index_survived(dataset_copy: Copy) -> None:
    """With the index at the front of the file, a cut video opens well and then ends too early."""
    root = dataset_copy("v21_video")
    meta = lerobot.read_meta(root)
    path = meta.episodes[2].cameras[HIGH].path
    encode(path, video.read_frames(meta, meta.episodes[2], HIGH, size=None), list(range(52)))
    read(root, tier="pool").frames(2)
    os.truncate(path, int(path.stat().st_size * 0.8))
    refuse(root, path, "episode 2")


def test_frames_missing_in_the_middle_of_a_video(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    meta = lerobot.read_meta(root)
    episode = meta.episodes[0]
    pictures = video.read_frames(meta, episode, HIGH, size=None)
    path = episode.cameras[HIGH].path
    encode(path, pictures, list(range(len(pictures))))
    read(root, tier="pool").frames(0)
    encode(path, pictures[:-2], [*range(10), *range(12, len(pictures))])
    refuse(root, path, "episode 0", "found frame 12", "expected frame 10")


def test_video_shorter_or_longer_than_its_episode(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    meta = lerobot.read_meta(root)
    short, long = (meta.episodes[index].cameras[HIGH].path for index in (0, 1))
    short_bytes = short.read_bytes()
    short.write_bytes(long.read_bytes())
    refuse(root, short, "episode 0", "80 frames", "length is 37")
    short.write_bytes(short_bytes)
    long.write_bytes(short_bytes)
    refuse(root, long, "episode 1", "ends before frame 37", "expected frames 0 to 79")


def test_data_rows_and_metadata_disagree(dataset_copy: Copy, edit_info: Callable[..., None]) -> None:
    root = dataset_copy("v21_image")
    edit_episode(root, 3, length=44)
    refuse(root, root / "meta/info.json", "total_frames is 277", "276")
    edit_info(root, total_frames=276)
    refuse(root, "episode_000003.parquet", "episode 3", "45 data rows", "length is 44")


@pytest.mark.parametrize("name", ["v21_video", "v30_video_multifile"])
def test_rows_missing_at_the_end_of_an_episode(dataset_copy: Copy, name: str) -> None:
    root = dataset_copy(name)
    path = lerobot.read_meta(root).episodes[1].data.path
    table = pq.read_table(path)
    of_episode = np.flatnonzero(table.column("episode_index").to_numpy() == 1)
    pq.write_table(table.take(np.setdiff1d(np.arange(table.num_rows), of_episode[-3:])), path)
    refuse(root, path, "episode 1", "77 data rows", "length is 80")


def test_rows_missing_in_the_middle_although_the_number_is_right(dataset_copy: Copy) -> None:
    root = dataset_copy("v30_image")
    path = lerobot.read_meta(root).episodes[1].data.path
    rewrite(path, with_column("frame_index", lambda frames: np.where(frames > 40, frames + 1, frames)))
    refuse(root, path, "episode 1", "frame_index is 42", "expected 41")


def test_rows_of_episodes_mixed_up(dataset_copy: Copy) -> None:
    root = dataset_copy("v30_video")
    path = lerobot.read_meta(root).episodes[0].data.path
    rewrite(path, lambda table: table.take(np.roll(np.arange(table.num_rows), 5)))
    refuse(root, path, "not those of episodes 0 to 4")


@pytest.mark.parametrize("fps", [25, 30, 60, 100])
@pytest.mark.parametrize("name", ["v21_video", "v21_image", "v30_video", "v30_image"])
def test_wrong_fps(dataset_copy: Copy, edit_info: Callable[..., None], name: str, fps: int) -> None:
    root = dataset_copy(name)
    edit_info(root, fps=fps)
    refuse(root, "episode 0", f"{fps} fps", root / "meta" if name == "v30_video" else root / "data")


@pytest.mark.parametrize("fps", [25, 30, 60, 100])
def test_wrong_fps_where_only_the_video_can_tell(dataset_copy: Copy, fps: int) -> None:
    meta = replace(lerobot.read_meta(dataset_copy("v21_video")), fps=fps)
    with pytest.raises(DataError, match=r"fps in meta/info\.json is wrong") as caught:
        video.read_frames(meta, meta.episodes[1], HIGH, size=None)
    assert "episode 1" in caught.value.message


@pytest.mark.parametrize("column", ["action", "timestamp", "next.reward"])
def test_a_column_missing_from_a_data_file(dataset_copy: Copy, column: str) -> None:
    root = dataset_copy("v21_video")
    path = lerobot.read_meta(root).episodes[2].data.path
    rewrite(path, lambda table: table.drop_columns([column]))
    refuse(root, path, "episode 2", repr(column))


def test_an_image_column_missing_from_a_data_file(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_image")
    path = lerobot.read_meta(root).episodes[2].data.path
    rewrite(path, lambda table: table.drop_columns([HIGH]))
    refuse(root, path, "episode 2", HIGH)


def test_a_picture_that_is_none(dataset_copy: Copy) -> None:
    root = dataset_copy("v30_image")
    path = lerobot.read_meta(root).episodes[1].data.path

    def spoil(table: pa.Table) -> pa.Table:
        cells = table.column(HIGH).to_pylist()
        cells[37 + 6]["bytes"] = cells[37 + 6]["bytes"][:60]
        return table.set_column(table.column_names.index(HIGH), HIGH, pa.array(cells, table.schema.field(HIGH).type))

    rewrite(path, spoil)
    refuse(root, path, "episode 1", "picture 6")


def test_vectors_of_another_length_than_declared(dataset_copy: Copy) -> None:
    root = dataset_copy("v30_video")
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"]["action"]["shape"] = [7]
    path.write_text(json.dumps(info))
    refuse(root, "file-000.parquet", "'action'", "expected 7 per row")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", ["action", "observation.state", "next.reward"])
def test_values_that_are_not_finite(dataset_copy: Copy, column: str, value: float) -> None:
    root = dataset_copy("v30_video_multifile")
    path = lerobot.read_meta(root).episodes[2].data.path

    def spoil(values: np.ndarray) -> np.ndarray:
        rows = np.flatnonzero(pq.read_table(path).column("episode_index").to_numpy() == 2)
        values.reshape(len(values), -1)[rows[9], -1] = value
        return values

    rewrite(path, with_column(column, spoil))
    refuse(root, path, "episode 2", column, "frame 9")
    if column == "next.reward":
        read(root, tier="pool", outcome=OutcomeRule(rule="step_penalty"))  # which has no use for it


@pytest.mark.parametrize("name", ["v21_video", "v21_image"])
def test_an_episode_of_one_frame_works(dataset_copy: Copy, edit_info: Callable[..., None], name: str) -> None:
    root = dataset_copy(name)
    edit_episode(root, 0, length=1)
    edit_info(root, total_frames=277 - 36)
    meta = lerobot.read_meta(root)
    rewrite(meta.episodes[0].data.path, lambda table: table.slice(0, 1))
    if name == "v21_video":
        path = meta.episodes[0].cameras[HIGH].path
        encode(path, np.full((1, 96, 128, 3), 200, np.uint8), [0])
    source = read(root)
    episode = source.episode(0)
    assert len(episode) == 1
    assert episode.terminated.tolist() == [True]  # next.success says that it failed
    assert source.frames(0)["base_0_rgb"].shape == (1, 24, 32, 3)
    if name == "v21_video":
        assert abs(float(source.frames(0)["base_0_rgb"].mean()) - 200) < 2
    np.testing.assert_array_equal(source.episode(1).actions[:, 0], 1000 + np.arange(80))


@pytest.mark.parametrize("version", ["v1.6", "v3.1", "v4.0", None, 3])
def test_unknown_format_version(dataset_copy: Copy, edit_info: Callable[..., None], version: object) -> None:
    root = dataset_copy("v30_video")
    edit_info(root, codebase_version=version)
    refuse(root, root / "meta/info.json", repr(version), "v2.0, v2.1, v3.0")


@pytest.mark.parametrize(
    "change",
    [
        *({"fps": value} for value in (0, "fast", None, True, float("nan"), float("inf"), [50], -1)),
        *({"features": value} for value in (None, [], {"action": 3}, {"action": {"shape": [14]}})),
        *({"chunks_size": value} for value in (0, -1, 1.5, "1000", None, True)),
        {"robot_type": 7},
        {"total_frames": "277"},
    ],
)
def test_metadata_that_makes_no_sense(
    dataset_copy: Copy, edit_info: Callable[..., None], change: dict[str, object]
) -> None:
    root = dataset_copy("v21_video")
    edit_info(root, **change)
    refuse(root, root / "meta/info.json", "feature" if "features" in change else next(iter(change)))


@pytest.mark.parametrize(
    "path",
    [
        "{nothing}",
        "data/{episode_index:06d",
        "/etc/{episode_index}",
        "../{episode_index}",
        "data/../../{episode_index}",
        "data/{episode_index:0999999999d}",
        "data/{episode_index:999999999}",
        "data/{episode_index!r}",
        "data/{episode_index.__class__}",
        "data/{episode_index[0]}",
        "data/rows.parquet",
        "data/\0{episode_index}",
        "data/\ud800{episode_index}",
        "d" * 300 + "{episode_index}",
        "",
        None,
        7,
    ],
)
@pytest.mark.parametrize("name", ["data_path", "video_path"])
def test_paths_stay_inside_the_dataset(
    dataset_copy: Copy, edit_info: Callable[..., None], name: str, path: object
) -> None:
    root = dataset_copy("v21_video")
    edit_info(root, **{name: path if name == "data_path" or type(path) is not str else path + "/{video_key}"})
    refuse(root, root / "meta/info.json", name)


def test_a_video_path_without_the_camera_is_refused(dataset_copy: Copy, edit_info: Callable[..., None]) -> None:
    """Otherwise every camera would show what one of them saw."""
    root = dataset_copy("v21_video")
    edit_info(root, video_path="videos/chunk-{episode_chunk:03d}/" + HIGH + "/episode_{episode_index:06d}.mp4")
    refuse(root, root / "meta/info.json", "video_path", "{video_key}")


@pytest.mark.parametrize("key", ["action", "timestamp", HIGH])
@pytest.mark.parametrize(
    "change",
    [{"dtype": dtype} for dtype in ("float17", "float", "int", "boolean", None, 5, ["float32"])]
    + [
        {"shape": shape}
        for shape in (None, [None], [0], [-1], [1.5], ["1"], "14", 14, [2**40], [10**300], [[1]], [True])
    ],
)
def test_a_feature_of_no_known_kind_or_shape(dataset_copy: Copy, key: str, change: dict[str, object]) -> None:
    root = dataset_copy("v30_video")
    edit_feature(root, key, **change)
    refuse(root, root / "meta/info.json", repr(key))


def edit_feature(root: Path, key: str, **changes: Any) -> None:
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"][key] |= changes
    path.write_text(json.dumps(info))


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "bool", "float16", "string"])
def test_no_number_is_changed_to_fit_its_declaration(dataset_copy: Copy, dtype: str) -> None:
    root = dataset_copy("v30_video")
    edit_feature(root, "action", dtype=dtype)
    refuse(root, "file-000.parquet", "episode 0, frame ", "'action'", dtype)


@pytest.mark.parametrize(("dtype", "stored"), [("float64", "float32"), ("float32", "float64")])
def test_other_widths_of_floats_are_read(dataset_copy: Copy, dtype: str, stored: str) -> None:
    root = dataset_copy("v30_video")
    expected = read(root, tier="pool").episode(1).actions
    edit_feature(root, "action", dtype=dtype)
    path = lerobot.read_meta(root).episodes[0].data.path
    kind = pa.list_(pa.from_numpy_dtype(np.dtype(stored)))
    rewrite(
        path, lambda table: table.set_column(table.column_names.index("action"), "action", table["action"].cast(kind))
    )
    np.testing.assert_array_equal(read(root, tier="pool").episode(1).actions, expected)


def test_rows_of_unequal_length_although_the_total_is_right(dataset_copy: Copy) -> None:
    """One row with a value more, the next with one less: all rows between would be shifted."""
    root = dataset_copy("v30_video")
    path = lerobot.read_meta(root).episodes[0].data.path

    def ragged(table: pa.Table) -> pa.Table:
        rows = table["action"].to_pylist()
        rows[40], rows[41] = [*rows[40], rows[41][0]], rows[41][1:]
        return table.set_column(table.column_names.index("action"), "action", pa.array(rows, pa.list_(pa.float32())))

    rewrite(path, ragged)
    refuse(root, path, "episode 1, frame 3", "'action'", "15 values, expected 14")


@pytest.mark.parametrize("declared", ["string", "bool"])
def test_success_as_text_is_not_success(dataset_copy: Copy, declared: str) -> None:
    root = dataset_copy("v30_video")
    path = lerobot.read_meta(root).episodes[0].data.path
    rewrite(path, lambda table: _texts(table, "next.success"))
    edit_feature(root, "next.success", dtype=declared)
    refuse(root, "next.success", "string")


def _texts(table: pa.Table, name: str) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(list(map(str, table[name].to_pylist()))))


@pytest.mark.parametrize("key", ["next.success", "next.done"])
def test_flags_are_0_or_1(dataset_copy: Copy, key: str) -> None:
    root = dataset_copy("v30_video")
    path = lerobot.read_meta(root).episodes[0].data.path
    before = read(root, tier="pool").outcomes

    def numbered(values: dict[int, float]) -> None:
        rows = [values.get(row, float(flag)) for row, flag in enumerate(flags)]
        column = pa.array(rows, pa.float32())
        rewrite(path, lambda table: table.set_column(table.column_names.index(key), key, column))

    flags = pq.read_table(path)[key].to_pylist()
    edit_feature(root, key, dtype="float32")
    numbered({})
    for one, other in zip(read(root, tier="pool").outcomes, before, strict=True):
        assert one.success == other.success
    numbered({37 + 9: 0.5})
    refuse(root, path, "episode 1", key, "neither 0 nor 1 at frame 9")


def test_time_that_is_not_a_number(dataset_copy: Copy) -> None:
    root = dataset_copy("v30_video")
    path = lerobot.read_meta(root).episodes[0].data.path
    rewrite(path, with_column("timestamp", lambda times: np.where(np.arange(len(times)) == 39, np.nan, times)))
    refuse(root, path, "episode 1", "frame 2 has timestamp nan")


def test_tasks_that_changed_places(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    path = root / "meta/tasks.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    swapped = [first | {"task": second["task"]}, second | {"task": first["task"]}]
    path.write_text("\n".join(map(json.dumps, swapped)))
    refuse(root, "episode 0", first["task"], second["task"])
    renamed = [first | {"task": "say it better"}, second]
    path.write_text("\n".join(map(json.dumps, renamed)))
    assert "say it better" in {read(root, tier="pool").episode(i).task for i in range(5)}


def test_frames_that_belong_to_two_episodes(dataset_copy: Copy) -> None:
    root = dataset_copy("v30_video")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    for end in ("from", "to"):
        name = f"videos/{HIGH}/{end}_timestamp"
        rewrite(path, with_column(name, lambda times: times - 0.1 * (np.arange(len(times)) == 2)))
    refuse(root, root / "meta", "episode 1", "of 2")


@pytest.mark.parametrize("name", ["meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl"])
def test_json_nested_beyond_reason(dataset_copy: Copy, name: str) -> None:
    root = dataset_copy("v21_video")
    (root / name).write_text("[" * 200_000)
    refuse(root, root / name, "nested too deeply")


def test_columns_of_language_are_left_alone(dataset_copy: Copy) -> None:
    """LeRobot 0.6 keeps lists of structs beside the numbers."""
    root = dataset_copy("v30_video")
    expected = read(root, tier="pool").episode(1)
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    said = [{"role": "assistant", "content": "grasp it", "style": "subtask", "timestamp": 0.0}]
    for key, rows in (("language_persistent", [said] * 277), ("language_events", [[]] * 276 + [said])):
        info["features"][key] = {"dtype": "language", "shape": [1], "names": None}
        column = pa.array(rows, pa.array([said]).type)
        rewrite(root / "data/chunk-000/file-000.parquet", lambda t, k=key, c=column: t.append_column(k, c))
    path.write_text(json.dumps(info))
    found = read(root, tier="pool").episode(1)
    np.testing.assert_array_equal(found.actions, expected.actions)
    with pytest.raises(DataError, match="expected numbers"):
        LeRobotSource(root, cameras={}, state_key="language_persistent")


def test_pictures_outside_the_dataset_are_not_read(dataset_copy: Copy, tmp_path: Path) -> None:
    root = dataset_copy("v30_image")
    path = lerobot.read_meta(root).episodes[0].data.path
    cells = pq.read_table(path)[HIGH].to_pylist()
    (tmp_path / "secret.png").write_bytes(cells[0]["bytes"])
    for place in (str(tmp_path / "secret.png"), "../secret.png"):
        cells[0] = {"bytes": None, "path": place}
        column = pa.array(cells)
        rewrite(path, lambda t, c=column: t.set_column(t.column_names.index(HIGH), HIGH, c))
        refuse(root, path, "episode 0", "leads out of the dataset")


def test_missing_camera_state_or_action(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    for cameras, told in (
        ({"base_0_rgb": "observation.images.top"}, HIGH),
        ({"base_0_rgb": "action"}, "not a picture"),
    ):
        with pytest.raises(DataError, match=re.escape(told)) as caught:
            LeRobotSource(root, cameras=cameras)
        assert next(iter(cameras.values())) in caught.value.message
    for key in ("state_key", "action_key"):
        with pytest.raises(DataError, match=r"no feature 'actions'; the dataset has\n +action\n"):
            LeRobotSource(root, cameras={}, **{key: "actions"})
        with pytest.raises(DataError, match="expected numbers"):
            LeRobotSource(root, cameras={}, **{key: HIGH})


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("v21_video", "meta/info.json"),
        ("v21_video", "meta/episodes.jsonl"),
        ("v21_video", "meta/tasks.jsonl"),
        ("v21_video", "data/chunk-000/episode_000003.parquet"),
        ("v21_video", f"videos/chunk-000/{HIGH}/episode_000003.mp4"),
        ("v30_video", "meta/tasks.parquet"),
        ("v30_video", "meta/episodes/chunk-000/file-000.parquet"),
        ("v30_video_multifile", f"videos/{HIGH}/chunk-001/file-000.mp4"),
        ("v30_video_multifile", "data/chunk-001/file-001.parquet"),
    ],
)
def test_missing_file(dataset_copy: Copy, name: str, missing: str) -> None:
    root = dataset_copy(name)
    (root / missing).unlink()
    told = ["episode "] if missing.startswith(("data", "videos")) else []
    refuse(root, re.sub(r"/chunk-000/file-000.parquet$", "", missing), *told)


@pytest.mark.parametrize("damaged", ["meta/info.json", "meta/episodes.jsonl", "data/chunk-000/episode_000003.parquet"])
def test_damaged_file(dataset_copy: Copy, damaged: str) -> None:
    root = dataset_copy("v21_video")
    os.truncate(root / damaged, (root / damaged).stat().st_size - 40)
    refuse(root, damaged, "cannot be read")


def test_frames_of_another_size_than_declared(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"][HIGH]["shape"] = [120, 160, 3]
    path.write_text(json.dumps(info))
    refuse(root, "episode ", "96x128", "120x160")


def test_a_task_that_is_not_listed(dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    path = root / "meta/tasks.jsonl"
    path.write_text(path.read_text().splitlines()[0])
    refuse(root, "episode ", "task_index is 1")


def test_lists_of_episodes_that_cannot_be(dataset_copy: Copy, edit_info: Callable[..., None]) -> None:
    root = dataset_copy("v21_video")
    edit_episode(root, 4, episode_index=3)
    refuse(root, root / "meta", "listed twice")
    edit_episode(root, 4, episode_index=4, length=0)
    edit_info(root, total_frames=277 - 63)
    refuse(root, root / "meta", "episode 4", "length is 0")
    (root / "meta/episodes.jsonl").write_text("")
    edit_info(root, total_frames=0, total_episodes=0)
    refuse(root, root / "meta", "no episode is listed")


def test_an_episode_table_that_contradicts_itself(dataset_copy: Copy) -> None:
    root = dataset_copy("v30_video")
    path = next((root / "meta/episodes").rglob("*.parquet"))
    rewrite(path, with_column("dataset_to_index", lambda rows: rows + (np.arange(5) == 1)))
    refuse(root, path, "episode 1", "81 data rows", "length is 80")


def test_an_outcome_of_several_values_a_frame(dataset_copy: Copy, edit_info: Callable[..., None]) -> None:
    root = dataset_copy("v21_video")
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features["next.success"]["shape"] = [2]
    edit_info(root, features=features)
    for path in root.rglob("*.parquet"):
        rewrite(path, lambda table: _doubled(table, "next.success"))
    refuse(root, root / "meta/info.json", "next.success is bool of shape (2,), expected one truth value")


def _doubled(table: pa.Table, name: str) -> pa.Table:
    pairs = pa.array([[value, value] for value in table.column(name).to_pylist()])
    return table.set_column(table.column_names.index(name), name, pairs)


@pytest.mark.parametrize("finished_by_another", [True, False])
def test_a_download_that_is_no_dataset_or_comes_second(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, finished_by_another: bool
) -> None:
    import huggingface_hub

    target = own_home / "lerobot_home/someone/robot"

    def snapshot_download(repo_id: str, *, repo_type: str, local_dir: str) -> None:
        for folder in (Path(local_dir), target) if finished_by_another else (Path(local_dir),):
            (folder / "meta").mkdir(parents=True)
            if finished_by_another:
                (folder / "meta/info.json").write_text(folder.name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    if finished_by_another:
        assert lerobot.resolve("someone/robot") == target
        assert (target / "meta/info.json").read_text() == "robot"
    else:
        with pytest.raises(DataError, match=r"has no meta/info\.json"):
            lerobot.resolve("someone/robot")
        assert not target.exists()


def test_a_dataset_found_nowhere(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: object, **settings: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DataError) as caught:
        lerobot.resolve("someone/robot")
    for place in ("someone/robot (no such folder)", str(own_home / "lerobot_home/someone/robot"), "no route to host"):
        assert place in caught.value.message
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    for path in (own_home, own_home / "nothing", "./a/b", "a"):
        with pytest.raises(DataError, match="looked at"):
            lerobot.resolve(path)


def test_an_outcome_that_is_not_declared(dataset_copy: Copy) -> None:
    """Without next.success the same rows would say that other episodes succeeded."""
    root = dataset_copy("v30_video")
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    del info["features"]["next.success"]
    path.write_text(json.dumps(info))
    with pytest.warns(PirlWarning, match=r"does not declare the column 'next\.success'"):
        read(root)


def test_a_flipped_bit_in_a_png_is_found(dataset_copy: Copy) -> None:
    root = dataset_copy("v30_image")
    path = lerobot.read_meta(root).episodes[0].data.path
    whole = pq.read_table(path)[HIGH].to_pylist()
    for place in (20, 60, 200, -20, -6):
        cells = [dict(cell) for cell in whole]
        content = bytearray(cells[5]["bytes"])
        content[place] ^= 1
        cells[5]["bytes"] = bytes(content)
        column = pa.array(cells)
        rewrite(path, lambda t, c=column: t.set_column(t.column_names.index(HIGH), HIGH, c))
        refuse(root, path, "episode 0", "picture 5")


def test_a_video_cut_off_anywhere(dataset_copy: Copy) -> None:
    """Also in the middle of its index, where a track is known and its codec is not."""
    meta = lerobot.read_meta(dataset_copy("v21_video"))
    path = meta.episodes[0].cameras[HIGH].path
    content, whole = path.read_bytes(), video.read_frames(meta, meta.episodes[0], HIGH, size=None)
    refused = 0
    for end in range(len(content) - 1, 0, -61):
        path.write_bytes(content[:end])
        try:
            np.testing.assert_array_equal(video.read_frames(meta, meta.episodes[0], HIGH, size=None), whole)
        except DataError:
            refused += 1
    assert refused > 50  # the last bytes only name the program that wrote the file
