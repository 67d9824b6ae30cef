"""Reads a dataset's JSON and parquet files; errors name the missing or damaged file and its episode."""

import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pirl.data import journal
from pirl.data.schema import INFO_FILE, parse_json
from pirl.errors import DataError, PirlWarning

DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError)
"""Exceptions of Arrow on a damaged file."""


def read_json(root: Path, file: Path, *, lines: bool = False) -> Any:
    """Parse a JSON file, or with `lines` a JSON lines file to a list."""
    try:
        text = journal.opened(root, file, lambda path: path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise missing(file) from error
    except (OSError, ValueError) as error:
        raise unreadable(file, None, error) from error
    if not lines:
        return parse_json(text, where=str(file))
    rows = enumerate(text.split("\n"), 1)
    return [parse_json(line, where=f"{file}, line {number}") for number, line in rows if line.strip()]


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a parquet file. Reading verifies page checksums, which files written by pirl have."""
    return pq.ParquetFile(path, page_checksum_verification=True)


def read_table(
    root: Path,
    file: Path,
    columns: Sequence[str] | None = None,
    *,
    episode: int | None = None,
    unread: Collection[str] = (),
) -> pa.Table:
    """Read a parquet file, or some of its columns; warns if one of `unread` is present but not requested."""
    try:
        with journal.opened(root, file, open_parquet) as source:
            names = source.schema_arrow.names
            if absent := [name for name in columns or () if name not in names]:
                raise DataError(
                    f"{file}{_of(episode)}: no column {', '.join(map(repr, absent))}, which {INFO_FILE} declares",
                    hint=f"export the dataset again, or remove the feature from {INFO_FILE} if nothing needs it",
                )
            if len(set(names)) != len(names):
                raise ValueError(f"columns stand twice: {sorted({one for one in names if names.count(one) > 1})}")
            if hidden := [name for name in names if name in unread and name not in (columns or ())]:
                warnings.warn(
                    f"{file}: {INFO_FILE} does not declare the column {hidden[0]!r}: it is not read, and does not "
                    "decide how episodes end",
                    PirlWarning,
                    stacklevel=2,
                )
            return source.read(columns=None if columns is None else list(columns))
    except FileNotFoundError as error:
        raise missing(file, episode) from error
    except DAMAGE as error:
        raise unreadable(file, episode, error) from error


def column_names(root: Path, file: Path) -> list[str]:
    """Column names of a parquet file."""
    try:
        return list(journal.opened(root, file, pq.read_schema).names)
    except FileNotFoundError as error:
        raise missing(file) from error
    except DAMAGE as error:
        raise unreadable(file, None, error) from error


def missing(path: Path, episode: int | None = None) -> DataError:
    """The error for a missing file."""
    return DataError(f"{path}{_of(episode)}: no such file", hint="the dataset is incomplete: download or copy it again")


def unreadable(path: Path, episode: int | None, error: Exception) -> DataError:
    """The error for a damaged file."""
    problem = " ".join(str(error).split())[:300] or type(error).__name__
    return DataError(f"{path}{_of(episode)}: cannot be read ({problem})", hint="download or export the file again")


def wrong_length(path: Path, episode: int, found: int, what: str, expected: int) -> DataError:
    """The error for a file whose length differs from the metadata."""
    return DataError(
        f"{path}: episode {episode}: {found} {what}, but the episode's length is {expected} in the metadata",
        hint="files and metadata disagree: download or export the dataset again, or remove the episode",
    )


def _of(episode: int | None) -> str:
    return "" if episode is None else f": episode {episode}"
