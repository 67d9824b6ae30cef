"""Readers see a dataset as it was before a change or after it, whenever they look; so do writers, one at a time."""

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data import journal
from pirl.data.dataset import LeRobotSource
from pirl.data.inspection import inspect_dataset
from pirl.data.journal import STAGE, lock_dataset, release_dataset
from pirl.data.rows import read_dataset
from pirl.data.writer import LeRobotWriter
from pirl.errors import DataError
from pirl.rollout.record import num_recorded

pytestmark = pytest.mark.usefixtures("own_home")

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
    "action": {"dtype": "float32", "shape": (2,), "names": None},
    "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    "observation.images.a": {"dtype": "image", "shape": (8, 8, 3), "names": None},
}


def episode(index: int, length: int) -> dict[str, Any]:
    """Columns that name their episode and frame."""
    steps = np.arange(length)
    vectors = np.stack([np.full(length, index), steps], 1).astype(np.float32)
    pictures = np.broadcast_to((10 * index + steps)[:, None, None, None], (length, 8, 8, 3)).astype(np.uint8)
    return {
        "observation.state": vectors,
        "action": vectors,
        "next.success": steps == length - 1,
        "observation.images.a": pictures,
    }


def add(root: Path, *indices: int, version: str = "v3.0") -> None:
    with LeRobotWriter(root, fps=10, features=FEATURES, version=version) as writer:
        for index in indices:
            writer.add_episode(episode(index, 3 + index), task=f"task {index % 2}")


def check(root: Path, episodes: int) -> None:
    """The dataset holds exactly these episodes, numbers and pictures."""
    source = LeRobotSource(root, cameras={"base_0_rgb": "observation.images.a"}, image_size=None)
    assert len(source) == episodes == num_recorded(root)
    for index in range(episodes):
        wanted = episode(index, 3 + index)
        np.testing.assert_array_equal(source.episode(index).actions, wanted["action"])
        assert source.episode(index).task == f"task {index % 2}"
        np.testing.assert_array_equal(source.frames(index)["base_0_rgb"], wanted["observation.images.a"])
    assert len(inspect_dataset(root).lengths) == episodes


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_reader_needs_no_writer_to_finish_what_one_began(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between any two moves: the episode is there or it is not, and reading changes nothing on the disk."""
    real = os.replace
    add(tmp_path / "start", 0, version=version)
    seen = []
    for step in range(40):
        root = tmp_path / f"cut_{step}"
        shutil.copytree(tmp_path / "start", root)
        left = step

        def replace(source: Any, target: Any, root: Path = root) -> None:
            nonlocal left
            if f"{root}/{STAGE}/commit" in str(source):
                if left == 0:
                    raise KilledError
                left -= 1
            real(source, target)

        writer = LeRobotWriter(root, fps=10, features=FEATURES, version=version)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                writer.add_episode(episode(1, 4), task="task 1")
            except KilledError:
                writer._lock.release()
            else:
                writer.close()
                break
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        check(root, 2)
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
        add(root, 2, version=version)
        check(root, 3)
        seen.append(step)
    assert len(seen) >= 4, "the writer moved fewer files than a change has"


def test_a_first_episode_that_was_never_moved_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "new"
    writer = LeRobotWriter(root, fps=10, features=FEATURES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KilledError))
        with pytest.raises(KilledError):
            writer.add_episode(episode(0, 3), task="task 0")
    writer._lock.release()
    assert not (root / "meta").exists()
    check(root, 1)


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_live_readers_never_see_half(tmp_path: Path, version: str) -> None:
    """A reader beside a writer sees a growing number of whole episodes, and no error."""
    add(tmp_path, 0, version=version)
    errors: list[BaseException] = []
    written, total = threading.Event(), 12

    def write() -> None:
        try:
            for index in range(1, total):
                add(tmp_path, index, version=version)
        except BaseException as error:
            errors.append(error)
        finally:
            written.set()

    thread = threading.Thread(target=write)
    thread.start()
    counts = []
    while not written.is_set():
        meta, columns = read_dataset(tmp_path)
        counts.append(len(meta.episodes))
        assert len(columns["action"]) == sum(3 + index for index in range(counts[-1]))
        owners = np.repeat(np.arange(counts[-1]), meta.lengths)
        np.testing.assert_array_equal(columns["action"][:, 0], owners)
    thread.join()
    assert not errors
    assert counts == sorted(counts)
    check(tmp_path, total)


def test_a_change_in_the_middle_of_reading_is_read_again(tmp_path: Path) -> None:
    add(tmp_path, 0)
    reads = 0

    def read() -> int:
        nonlocal reads
        reads += 1
        first = num_recorded(tmp_path)
        if reads == 1:
            add(tmp_path, 1)
            raise DataError("half of this and half of that")
        return first

    assert journal.consistent(tmp_path, read) == 2
    assert reads == 2
    with pytest.raises(DataError, match="for good"):
        journal.consistent(tmp_path, lambda: (_ for _ in ()).throw(DataError("for good")))


def test_a_lock_file_that_was_removed_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opened it just before its writer left would hold a lock that nobody after him sees."""
    root, real = tmp_path / "set", fcntl.flock
    first = lock_dataset(root)

    def flock(handle: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", real)
            release_dataset(first)  # between opening the file and locking it
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    second = lock_dataset(root)
    with pytest.raises(DataError, match="another writer"):
        lock_dataset(root)
    release_dataset(second)
    assert not root.exists()


def test_writers_that_come_and_go_never_meet(tmp_path: Path) -> None:
    root, inside, most = tmp_path / "set", [0], [0]
    guard, errors = threading.Lock(), []

    def visit() -> None:
        for _ in range(150):
            try:
                lock = lock_dataset(root)
            except DataError as error:
                if "another writer" not in error.message:
                    errors.append(error)
                continue
            except BaseException as error:
                errors.append(error)
                continue
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            (root / STAGE / "mine").mkdir(exist_ok=True)
            with guard:
                inside[0] -= 1
            release_dataset(lock)

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert most == [1]
    assert not list(root.glob("*"))


@pytest.mark.parametrize("where", ["open", "write_table", "fsync", "rename"])
def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    add(tmp_path / "old", 0)
    for root, kept in ((tmp_path / "old", 1), (tmp_path / "deep/new", 0)):
        before = sorted(root.rglob("*"))

        def full(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        module = {"open": os, "write_table": pq.ParquetWriter, "fsync": os, "rename": Path}[where]
        with monkeypatch.context() as patch:
            patch.setattr(module, where, full)
            with pytest.raises(DataError, match="No space left") as caught:
                add(root, kept)
        assert "free some space" in caught.value.hint
        assert sorted(root.rglob("*")) == before
        add(root, kept)
        check(root, kept + 1)
        assert (tmp_path / "deep").exists() == (kept == 0)
    shutil.rmtree(tmp_path / "deep")


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_flipped_bit_in_rows_that_pirl_wrote_is_found(tmp_path: Path, version: str) -> None:
    add(tmp_path, 0, 1, version=version)
    found = 0
    for path in sorted((tmp_path / "data").rglob("*.parquet")):
        content = path.read_bytes()
        for place in range(4, len(content) - 1500, 397):  # the pages; behind them is the description of the file
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            try:
                check(tmp_path, 2)
            except DataError:
                found += 1
        path.write_bytes(content)
    assert found > 5
    check(tmp_path, 2)
