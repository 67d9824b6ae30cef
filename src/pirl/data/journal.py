"""Atomic multi-file changes to a dataset, for writers and readers.

All files of a change are first written under `.writing/next`, at their final relative paths. Renaming that folder to
`.writing/commit` commits the change; then the files are moved into place. A crash before the rename leaves the dataset
unchanged; after it the next writer finishes the moves.

Readers do not wait: a file in `.writing/commit` takes precedence over the one it replaces. Every change includes
info.json, so a reader that sees the same info.json (same inode) before and after has read one consistent state;
otherwise it reads again.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pirl.data.schema import INFO_FILE
from pirl.errors import DataError
from pirl.files import sync

STAGE = ".writing"
_PATIENCE = 20  # a reader's attempts to find a consistent state
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WriterLock:
    """An exclusive write lock on a dataset."""

    root: Path
    """The dataset."""
    handle: int
    """The open lock file."""
    created: tuple[Path, ...]
    """Folders created for the lock, innermost first."""

    def release(self) -> None:
        """Release the lock."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)  # explicitly: a child process may have inherited the descriptor
        os.close(self.handle)


def lock_dataset(root: Path) -> WriterLock:
    """Take the exclusive write lock; raises if another writer holds it."""
    if root.is_file():
        raise DataError(f"{root} is a file, expected a folder", hint="choose another place for the dataset")
    path = root / STAGE / "lock"
    while True:
        created = tuple(folder for folder in (root, *root.parents) if not folder.exists())
        with writing(root):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except (FileNotFoundError, FileExistsError):  # the previous writer is just removing the folder
                if path.parent.is_file():
                    raise
                continue
            except OSError:
                _remove_empty(root, created)
                raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), path.stat()):
                return WriterLock(root=root, handle=handle, created=created)
        except BlockingIOError as error:
            os.close(handle)
            raise DataError(
                f"{root} is being written by another writer", hint="wait until that one is closed"
            ) from error
        except FileNotFoundError:
            pass
        os.close(handle)  # the previous writer removed this lock file: the next one would not see it


def release_dataset(lock: WriterLock) -> None:
    """Release the lock and remove its file."""
    stage = lock.root / STAGE
    if not (stage / "commit").exists():  # else the next writer must finish that change
        for path in stage.glob("*"):
            if path.name != "lock":
                shutil.rmtree(path, ignore_errors=True)
        (stage / "lock").unlink(missing_ok=True)  # from here on the next writer may create its own
        _remove_empty(lock.root, lock.created)
    lock.release()


def _remove_empty(root: Path, created: tuple[Path, ...]) -> None:
    with suppress(OSError):  # the next writer created its lock, or the folders are in use
        for folder in (root / STAGE, *created):
            folder.rmdir()


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Convert an OSError of a write to a DataError with a hint."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in str(error)
        raise DataError(
            f"{root} cannot be written ({error})",
            hint=("free some space on the disk, or write elsewhere" if full else "check the folder and its permissions")
            + "; episodes saved before are safe",
        ) from error


def staging(root: Path) -> Path:
    """The folder of files for the next `commit`."""
    return root / STAGE / "next"


def commit(root: Path) -> None:
    """Atomically make the staged files part of the dataset; `recover` then moves them into place."""
    staged = staging(root)
    for path in (*sorted(staged.rglob("*"), key=Path.is_dir), staged):  # files first, then folder entries
        sync(path)
    staged.rename(root / STAGE / "commit")
    sync(root / STAGE)


def recover(root: Path) -> None:
    """Move committed files into place and delete staged ones, of this process or a crashed one."""
    shutil.rmtree(staging(root), ignore_errors=True)
    pending = root / STAGE / "commit"
    paths = sorted(path.relative_to(pending) for path in _files(pending))
    for path in sorted(paths, key=lambda path: (path.parts[0] == "meta", path == Path(INFO_FILE))):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(pending / path, root / path)
    for folder in dict.fromkeys(parent for path in paths for parent in (root / path).parents if root in parent.parents):
        sync(folder)
    shutil.rmtree(pending, ignore_errors=True)


def opened(root: Path, path: Path, opener: Callable[[Path], T]) -> T:
    """Apply `opener` to a dataset's file, or to its committed version that has not been moved yet."""
    try:
        pending = root / STAGE / "commit" / path.relative_to(root)
        return opener(pending)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return opener(path)


def exists(root: Path, path: Path) -> bool:
    """Whether the file exists, in place or committed."""
    try:
        return opened(root, path, lambda found: found.stat() is not None and found.is_file())
    except OSError:
        return False


def listed(root: Path, pattern: str) -> list[Path]:
    """The dataset's files that match the pattern, sorted: in place and committed."""
    pending = root / STAGE / "commit"
    waiting = {root / path.relative_to(pending) for path in pending.glob(pattern)}
    return sorted(waiting | set(root.glob(pattern)))


def consistent(root: Path, read: Callable[[], T]) -> T:
    """The result of `read` on one state of the dataset; repeats the read if a writer changed it meanwhile."""
    for tries in range(_PATIENCE):
        before = _state(root)
        try:
            found = read()
        except DataError:
            if _state(root) == before:
                raise
        else:
            if _state(root) == before:
                return found
        time.sleep(0.01 * tries)
    raise DataError(
        f"{root} was changed {_PATIENCE} times while it was read",
        hint="wait until the recording has ended, or record with fewer saves",
    )


def _state(root: Path) -> tuple[int, ...] | None:
    """Identifies a state of the dataset: a new info.json changes it, moving it into place does not."""
    try:
        stat = opened(root, root / INFO_FILE, os.stat)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
