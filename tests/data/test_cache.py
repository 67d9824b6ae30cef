"""The frame cache: the same pictures from every tier, decoded once, and never a broken file."""

import errno
import mmap
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pirl import text
from pirl.data import cache, lerobot, video
from pirl.data.cache import CacheConfig, FrameCache, cache_key, choose_tier
from pirl.data.lerobot import DatasetMeta
from pirl.errors import DataError, PirlWarning

pytestmark = pytest.mark.usefixtures("own_home")

GOLDEN = Path(__file__).parents[1] / "golden/lerobot"
CAMERAS = ("observation.images.cam_high", "observation.images.cam_left_wrist")
SIZE = 48


@pytest.fixture
def meta() -> DatasetMeta:
    return lerobot.read_meta(GOLDEN / "v30_video_multifile")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Every (episode, camera) decoded from here on."""
    calls: list[tuple[int, str]] = []
    read = video.read_frames

    def counted(meta, episode, camera, **settings):  # type: ignore[no-untyped-def]
        calls.append((episode.index, camera))
        return read(meta, episode, camera, **settings)

    monkeypatch.setattr(video, "read_frames", counted)
    return calls


def make(meta: DatasetMeta, tier: str, **settings: int) -> FrameCache:
    return FrameCache(meta, CAMERAS, size=SIZE, config=CacheConfig(tier=tier, workers=2, **settings))


def files(frames: FrameCache) -> list[Path]:
    return [frames.path(position, camera) for camera in CAMERAS for position in range(len(frames.meta.episodes))]


def assert_right(frames: FrameCache) -> None:
    for camera in CAMERAS:
        for position, episode in enumerate(frames.meta.episodes):
            expected = video.read_frames(frames.meta, episode, camera, size=SIZE)
            np.testing.assert_array_equal(frames.frames(position, camera), expected, strict=True)


@pytest.mark.parametrize("tier", ["ram", "disk", "pool", "auto"])
def test_every_tier_gives_the_same_frames(meta: DatasetMeta, tier: str) -> None:
    frames = make(meta, tier)
    assert_right(frames)
    found = frames.frames(0, CAMERAS[0])
    assert type(found) is np.ndarray
    owner = found
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    assert isinstance(owner, mmap.mmap) == (tier == "disk")
    assert all(path.exists() == (tier == "disk") for path in files(frames))


def test_maps_stay_open_within_the_limit(meta: DatasetMeta, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = np.memmap

    def counted(path: Path, *options: Any, **named: Any) -> Any:
        opened.append(path)
        return real(path, *options, **named)

    monkeypatch.setattr(np, "memmap", counted)
    monkeypatch.setattr(cache, "map_limit", lambda: 2)
    frames, camera = make(meta, "disk"), CAMERAS[0]
    assert frames.frames(0, camera) is frames.frames(0, camera)
    for position in (1, 0, 2, 0, 1):  # 2 pushes out 1, which was asked for before 0
        frames.frames(position, camera)
    assert opened == [frames.path(position, camera) for position in (0, 1, 2, 1)]
    make(meta, "disk").frames(1, camera)  # another reader of the same files shares them
    assert len(opened) == 4
    assert_right(frames)


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "expected", "asked"),
    [
        (1024, 4096, True, 2048, 4096),
        (1024, 10**6, True, 32_768, 65_536),  # more maps than a process may have are of no use
        (1024, -1, True, 32_768, 65_536),
        (1024, 4096, False, 512, 4096),
        (10**6, 10**6, True, 32_768, None),
        (-1, -1, True, 32_768, None),
    ],
)
def test_the_limit_on_open_files_is_raised_and_half_is_left_to_others(
    soft: int, hard: int, allowed: bool, expected: int, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []

    def setrlimit(which: int, limits: tuple[int, int]) -> None:
        assert (which, limits[1]) == (resource.RLIMIT_NOFILE, hard)
        raised.append(limits[0])
        if not allowed:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert cache.map_limit() == expected
    assert raised == ([] if asked is None else [asked])


def test_the_disk_tier_decodes_once_and_resumes(meta: DatasetMeta, decoded: list[tuple[int, str]]) -> None:
    make(meta, "disk").build()
    assert sorted(decoded) == sorted((episode.index, camera) for camera in CAMERAS for episode in meta.episodes)
    decoded.clear()
    again = make(meta, "disk")
    again.frames(0, CAMERAS[0])
    assert decoded == []
    again.path(1, CAMERAS[0]).unlink()
    make(meta, "disk").build()
    assert decoded == [(1, CAMERAS[0])]
    # What is on disk also serves the other tiers.
    decoded.clear()
    for tier in ("ram", "auto", "pool"):
        make(meta, tier).frames(2, CAMERAS[1])
    assert decoded == []


def test_a_half_written_file_is_found_and_decoded_again(meta: DatasetMeta, decoded: list[tuple[int, str]]) -> None:
    frames = make(meta, "disk")
    frames.build()
    whole = frames.path(3, CAMERAS[1])
    os.truncate(whole, whole.stat().st_size // 2)
    frames.path(0, CAMERAS[0]).write_bytes(b"")
    decoded.clear()
    fresh = make(meta, "disk")
    fresh.build()
    assert sorted(decoded) == [(0, CAMERAS[0]), (3, CAMERAS[1])]
    assert_right(fresh)


@pytest.mark.parametrize("tier", ["disk", "ram", "pool"])
@pytest.mark.parametrize("where", [0, 10, 200, 5000, -20, -3])
def test_a_flipped_bit_is_found_and_the_entry_decoded_again(
    meta: DatasetMeta, decoded: list[tuple[int, str]], tier: str, where: int
) -> None:
    """In the header, in the pictures or in the checksum."""
    frames = make(meta, "disk")
    frames.build()
    path = frames.path(1, CAMERAS[0])
    content = bytearray(path.read_bytes())
    content[where] ^= 16
    path.write_bytes(content)
    decoded.clear()
    again = make(meta, tier)
    with pytest.warns(PirlWarning, match="is damaged: decoded again, it is replaced"):
        again.frames(1, CAMERAS[0])
    assert decoded == [(1, CAMERAS[0])]
    assert_right(again)
    decoded.clear()
    for camera in CAMERAS:
        make(meta, tier).frames(1, camera)
    assert decoded == []


def test_a_damaged_entry_that_cannot_be_replaced_is_still_not_read(
    meta: DatasetMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = make(meta, "disk")
    frames.build()
    path = frames.path(1, CAMERAS[0])
    path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setattr(cache, "write_array", lambda *_: (_ for _ in ()).throw(OSError("read-only")))
    with pytest.warns(PirlWarning, match="could not be replaced .read-only"):
        assert_right(make(meta, "disk"))


def test_leftovers_of_killed_builders_go_and_those_of_living_ones_stay(meta: DatasetMeta) -> None:
    frames = make(meta, "disk")
    folder = frames.folders[CAMERAS[0]]
    folder.mkdir(parents=True)
    old, new = folder / ".episode_000000.npy.a.tmp.npy", folder / ".episode_000000.npy.b.tmp.npy"
    old.write_bytes(b"half"), new.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    frames.build()
    assert (old.exists(), new.exists()) == (False, True)


def test_a_file_that_another_builder_finishes_meanwhile_is_no_leftover(
    meta: DatasetMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many runs that start together build one cache: what one lists, another renames."""
    listed = Path.glob

    def glob(folder: Path, pattern: str) -> list[Path]:
        return [*listed(folder, pattern), folder / ".episode_000000.npy.0123456789ab.tmp.npy"]

    monkeypatch.setattr(Path, "glob", glob)
    frames = make(meta, "disk")
    frames.build()
    assert_right(frames)


def test_the_key_depends_on_all_that_decides_the_pixels(
    dataset_copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = dataset_copy("v30_video_multifile")

    def key(
        camera: str = CAMERAS[0], size: int | None = 64, method: video.Resize = "fast", letterbox: bool = False
    ) -> str:
        return cache_key(lerobot.read_meta(root), camera, size, method, letterbox=letterbox)

    keys = [key(), key(camera=CAMERAS[1]), key(size=32), key(size=None), key(method="exact"), key(letterbox=True)]
    assert key() == keys[0]
    os.utime(next((root / "videos" / CAMERAS[0]).rglob("*.mp4")), (1, 1))
    keys.append(key())
    os.utime(next((root / "data").rglob("*.parquet")), (1, 1))
    keys.append(key())
    info = root / "meta/info.json"
    info.write_text(info.read_text() + "\n")
    keys.append(key())
    monkeypatch.setattr(cache, "CODE_VERSION", 999)
    keys.append(key())
    assert len(set(keys)) == len(keys)
    unchanged = key()
    os.utime(next((root / "videos" / CAMERAS[1]).rglob("*.mp4")), (1, 1))
    assert key() == unchanged, "another camera's video is none of this one's business"


def test_a_disk_that_fills_up_leaves_whole_files_one_warning_and_a_pool(
    meta: DatasetMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = iter(range(100))

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and next(synced) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    frames = make(meta, "disk")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.warns(PirlWarning, match="disk is too full") as caught:
            frames.build()
    frames.build()
    assert len(caught) == 1
    assert frames.tier == "pool"
    folders = list(frames.folders.values())
    assert sum(path.exists() for path in files(frames)) == 3
    assert {path.suffix for folder in folders for path in folder.iterdir()} == {".npy"}
    assert_right(frames)
    # With room again, the next run finishes the work.
    roomy = make(meta, "disk")
    roomy.build()
    assert roomy.tier == "disk"
    assert all(path.exists() for path in files(roomy))
    assert_right(roomy)


def test_a_disk_known_to_be_too_small_is_not_written_to(meta: DatasetMeta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda folder: 1000)
    frames = make(meta, "disk")
    with pytest.warns(PirlWarning, match=r"1\.0 kB free"):
        assert_right(frames)
    assert frames.tier == "pool"
    assert not any(path.exists() for path in files(frames))


def test_a_folder_that_cannot_be_written_is_told(meta: DatasetMeta, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("")
    frames = FrameCache(meta, CAMERAS, size=SIZE, config=CacheConfig(tier="disk", folder=str(tmp_path / "occupied/x")))
    with pytest.raises(DataError, match="cannot be written"):
        frames.build()


def test_frames_too_many_for_the_memory_are_told(meta: DatasetMeta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(DataError, match="use cache tier disk"):
        make(meta, "ram").build()


def test_two_builders_at_once(meta: DatasetMeta) -> None:
    program = (
        "from pathlib import Path; from pirl.data import lerobot; from pirl.data.cache import CacheConfig, FrameCache\n"
        f"meta = lerobot.read_meta(Path({str(meta.root)!r}))\n"
        f"FrameCache(meta, {CAMERAS!r}, size={SIZE}, config=CacheConfig(tier='disk', workers=2)).build()"
    )
    builders = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(2)]
    for builder in builders:
        _, errors = builder.communicate(timeout=60)
        assert builder.returncode == 0, errors.decode()
    frames = make(meta, "disk")
    assert all(path.exists() for path in files(frames))
    assert not [path for folder in frames.folders.values() for path in folder.iterdir() if path.suffix != ".npy"]
    assert_right(frames)


def test_the_pool_keeps_the_most_recent_within_its_bytes(meta: DatasetMeta, decoded: list[tuple[int, str]]) -> None:
    camera = CAMERAS[0]
    first, second, third = (make(meta, "pool").frames(position, camera).nbytes for position in (0, 1, 2))
    frames = make(meta, "pool", pool_bytes=first + max(second, third))
    decoded.clear()
    for position in (0, 1, 0, 2, 0, 1):
        frames.frames(position, camera)
    assert [episode for episode, _ in decoded] == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("total", "missing", "memory", "disk", "expected"),
    [
        (10**12, 0, 10**9, 0, "disk"),  # there already
        (10**8, 10**8, 10**10, 10**12, "ram"),  # few
        (10**8, 10**8, 10**8, 10**12, "disk"),  # few, but the memory is tiny
        (10**11, 10**11, 10**12, 10**12, "disk"),
        (10**11, 10**11, 10**12, 10**11, "ram"),  # the disk would be full to the brim
        (10**11, 10**11, 10**11, 10**10, "pool"),
    ],
)
def test_what_auto_chooses(total: int, missing: int, memory: int, disk: int, expected: str) -> None:
    assert choose_tier(total=total, missing=missing, memory=memory, disk=disk)[0] == expected


def test_auto_says_what_it_chose_and_the_size_is_said_first(
    meta: DatasetMeta, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = make(meta, "auto")
    assert capsys.readouterr().err == ""
    frames.build()
    said = capsys.readouterr().err.splitlines()
    assert "tier 'ram' because" in said[0]
    size = text.size(2 * int(meta.lengths.sum()) * 36 * 48 * 3)
    assert f"decoding {2 * meta.lengths.sum()} frames, {size}, into memory" in said[1]
    make(meta, "disk").build()
    capsys.readouterr()
    make(meta, "ram").build()
    assert f"loading {2 * meta.lengths.sum()} frames, {size}, into memory" in capsys.readouterr().err


def test_a_dataset_without_cameras_has_nothing_to_build(meta: DatasetMeta) -> None:
    frames = FrameCache(meta, (), size=SIZE)
    frames.build()
    assert frames.nbytes == 0


def test_without_a_terminal_progress_is_a_plain_line(meta: DatasetMeta, capsys: pytest.CaptureFixture[str]) -> None:
    make(meta, "ram").build()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("decoding")]
    total = 2 * int(meta.lengths.sum())
    assert len(lines) == 1
    assert lines[0].startswith(f"decoding: {total}/{total} frames (100%)")
