"""Detects truncated checkpoints: every byte range in the index must lie inside an existing file.

Orbax keeps arrays in an OCDBT store: a manifest, index nodes, and data files. Without this check a truncated copy fails
only after reading gigabytes, with an error about an arbitrary array.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from pirl.errors import CheckpointError, listing

_REFERENCE = re.compile(r"(value|btreenode):([^:]*):([^:]*):(\d+):(\d+)")
_HINT = "the copy is incomplete: copy or download the checkpoint again, or take another step"


def check_files(folder: Path) -> None:
    """Raise if files of a checkpoint item are missing or truncated, naming them. Reads the index, not the arrays."""
    if not (folder / "manifest.ocdbt").is_file():
        if list(folder.glob("ocdbt.process_*")):
            raise CheckpointError(f"{folder} lacks manifest.ocdbt, the index of its arrays", hint=_HINT)
        return
    needed: dict[str, int] = {}
    damaged = []
    try:
        base = ts.KvStore.open({"driver": "file", "path": f"{folder.absolute()}/"}).result()
        manifest = ts.ocdbt.dump(base).result()
        pending = list(_strings(manifest["versions"][-1:]))
        while pending:
            reference = _REFERENCE.fullmatch(pending.pop())
            if reference is None:
                continue
            kind, directory, name, offset, length = reference.groups()
            file = unquote(directory) + unquote(name)
            needed[file] = max(needed.get(file, 0), int(offset) + int(length))
            if kind == "btreenode" and (folder / file).is_file():
                pending += _strings(ts.ocdbt.dump(base, reference[0]).result())
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise CheckpointError(f"the index of {folder} cannot be read: {str(error)[:300]}", hint=_HINT) from error
    for file, size in sorted(needed.items()):
        if not (folder / file).is_file():
            damaged.append(f"{file}: missing")
        elif (folder / file).stat().st_size < size:
            damaged.append(f"{file}: {(folder / file).stat().st_size} bytes, expected at least {size}")
    if damaged:
        raise CheckpointError(
            f"{folder} is incomplete: {len(damaged)} of {len(needed)} files are missing or cut\n{listing(damaged)}",
            hint=_HINT,
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; the error names a damaged file."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", hint=_HINT) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, expected a JSON object", hint=_HINT)
    return content


def _strings(node: Any) -> Iterator[str]:
    """Every string in a JSON tree; keys and inline values are bytes and are skipped."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value)
