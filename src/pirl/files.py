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
"""Glob for partial files left by killed processes."""
_STALE_SECONDS = 3600.0
"""Age from which an untouched partial file counts as a killed process's."""


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a temporary path with the same suffix; it replaces `file` atomically on exit, or is deleted on error.

    Creates the folder. Safe against crashes, power cuts and concurrent writers (the last one wins).
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
    """fsync a file or a folder's entries, so that a power cut does not lose them."""
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
    """Write or replace a UTF-8 file atomically, without newline translation."""
    write_bytes(file, text.encode())


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write or replace an uncompressed `.npz` atomically."""
    with replacing(file) as partial, partial.open("wb") as opened:
        np.savez(opened, **arrays)  # type: ignore[arg-type]


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Every array of an `.npz`, without unpickling. Raises OSError or ValueError for a damaged file."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError):
        raise
    except Exception as error:  # a damaged zip may ask for unknown compression, a password or too much memory
        raise ValueError(f"{type(error).__name__}: {error}") from error


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def json_text(content: Any) -> str:
    """Indented JSON; NaN and infinities raise a ValueError."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
