"""What was recorded under a name is what is read under it, as far as the dataset's own statistics tell."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pirl.data import lerobot
from pirl.data.cache import CacheConfig
from pirl.data.dataset import LeRobotSource
from pirl.errors import DataError, PirlWarning

pytestmark = pytest.mark.usefixtures("own_home")

HIGH, LEFT, RIGHT = (f"observation.images.cam_{name}" for name in ("high", "left_wrist", "right_wrist"))
NAMES = ["v21_image", "v21_video", "v30_image", "v30_video", "v30_video_multifile"]
Copy = Callable[[str], Path]


def read(root: Path, *, letterbox: bool = False) -> LeRobotSource:
    cameras = {"base_0_rgb": HIGH, "left_wrist_0_rgb": LEFT, "right_wrist_0_rgb": RIGHT}
    source = LeRobotSource(
        root, cameras=cameras, image_size=32, letterbox=letterbox, cache=CacheConfig(tier="pool", workers=1)
    )
    for index in range(len(source)):
        source.frames(index)
    return source


def rename(root: Path, first: str, second: str) -> None:
    """Swap the names of two columns in every data file."""
    for path in (root / "data").rglob("*.parquet"):
        table = pq.read_table(path)
        swap = {first: second, second: first}
        pq.write_table(table.rename_columns([swap.get(name, name) for name in table.column_names]), path)


@pytest.mark.parametrize("letterbox", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_lerobots_own_datasets_agree_with_their_statistics(name: str, letterbox: bool, dataset_copy: Copy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PirlWarning)
        read(dataset_copy(name), letterbox=letterbox)


@pytest.mark.parametrize("name", NAMES)
def test_swapped_columns_are_refused(name: str, dataset_copy: Copy) -> None:
    root = dataset_copy(name)
    rename(root, "observation.state", "action")
    with pytest.raises(DataError, match=r"episode 0: column 'observation\.state' holds .* recorded as 'action'"):
        read(root)


@pytest.mark.parametrize("name", NAMES)
def test_swapped_cameras_are_refused(name: str, dataset_copy: Copy) -> None:
    root = dataset_copy(name)
    if name.endswith("image"):
        rename(root, HIGH, LEFT)
    elif name.startswith("v21"):
        for path in (root / "videos").rglob(f"{HIGH}/*.mp4"):
            other = Path(str(path).replace(HIGH, LEFT))
            one, two = path.read_bytes(), other.read_bytes()
            path.write_bytes(two)
            other.write_bytes(one)
    else:
        (root / "videos" / HIGH).rename(root / "videos/aside")
        (root / "videos" / LEFT).rename(root / "videos" / HIGH)
        (root / "videos/aside").rename(root / "videos" / LEFT)
        if name.endswith("multifile"):  # each camera has files and offsets of its own
            path = root / "meta/episodes/chunk-000/file-000.parquet"
            for file in sorted((root / "meta/episodes").rglob("*.parquet")):
                table, swap = pq.read_table(file), {HIGH: LEFT, LEFT: HIGH}
                names = [
                    column.replace(camera, swap[camera])
                    if (camera := next((c for c in swap if column.startswith(f"videos/{c}/")), None))
                    else column
                    for column in table.column_names
                ]
                pq.write_table(table.rename_columns(names), file)
            assert path.exists()
    with pytest.raises(DataError, match="are those recorded as") as caught:
        read(root)
    assert HIGH in caught.value.message
    assert LEFT in caught.value.message


@pytest.mark.parametrize("name", ["v21_video", "v30_video"])
def test_numbers_that_changed_since_are_told(name: str, dataset_copy: Copy) -> None:
    root = dataset_copy(name)
    path = lerobot.read_meta(root).episodes[0].data.path
    table = pq.read_table(path)
    rows = np.array(table["action"].to_pylist(), np.float32)
    rows[7, 3] += 5
    column = pa.array(rows.tolist(), table.schema.field("action").type)
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), path)
    with pytest.warns(PirlWarning, match=r"action: the max of entry 3 in episode 0"):
        read(root)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"episode_index": 0, "stats": {"action": {"mean": "x"}}}'])
def test_statistics_that_say_nothing_are_no_witness(content: str, dataset_copy: Copy) -> None:
    root = dataset_copy("v21_video")
    (root / "meta/episodes_stats.jsonl").write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PirlWarning)
        read(root)
    line = {"episode_index": 0, "stats": {"action": {name: [float("nan")] for name in ("min", "max", "mean")}}}
    (root / "meta/episodes_stats.jsonl").write_text(json.dumps(line))
    read(root)
