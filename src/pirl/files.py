"""Atomic files: written to a temporary name, synced, then renamed."""

import glob
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

LEFTOVERS = ".*.tmp*"
"""Matches the partial files of processes that were killed."""
_STALE_SECONDS = 3600.0
"""A partial file that nobody has written to for so long belongs to a process that was killed."""


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A partial file with the same suffix; it replaces `file` when the block ends, or is deleted after an error.

    Makes the folder. Safe against a crash or power cut, and against several writers at once: the last one wins.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}.tmp{file.suffix}")
    try:
        yield partial
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(partial, file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on disk: nothing of it is lost in a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some network file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def write_bytes(file: Path, content: bytes) -> None:
    """Write or replace a file atomically; partial files of earlier writers that were killed go after an hour."""
    with replacing(file) as partial:
        partial.write_bytes(content)
    for leftover in file.parent.glob(f".{glob.escape(file.name)}.{'[0-9a-f]' * 12}.tmp*"):
        with suppress(OSError):  # somebody else removed it
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()


def write_text(file: Path, text: str) -> None:
    """Write or replace a UTF-8 file atomically; line ends stay as they are."""
    write_bytes(file, text.encode())


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write or replace an uncompressed `.npz` atomically."""
    with replacing(file) as partial, partial.open("wb") as opened:
        np.savez(opened, **arrays)  # type: ignore[arg-type]


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Every array of an `.npz`; nothing is unpickled. Damage is an OSError or a ValueError."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError):
        raise
    except Exception as error:  # a damaged zip asks for compression methods, passwords or memory there are not
        raise ValueError(f"{type(error).__name__}: {error}") from error


def json_text(content: Any) -> str:
    """Indented JSON; NaN and infinities raise a ValueError."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
