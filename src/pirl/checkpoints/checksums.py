"""Checksums of a step: SHA-256 of every file, stored with the weights in the format of `sha256sum -c`.

    cd checkpoints/my_recipe/my_run/20000 && sha256sum -c extra/checksums.sha256

Written before a step is renamed into place, so every complete step has them; exports, too. Steps of OpenPI and of pirl
0.1 have none; for those only the index is checked. `extra.json` may be amended later and contains its own checksum.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax

from pirl.checkpoints.ocdbt import check_files, read_json
from pirl.checkpoints.run_directory import complete_steps
from pirl.errors import CheckpointError, listing
from pirl.files import json_text, sync, write_text
from pirl.names import ASSETS_ITEM, CHECKSUMS_FILE, PARAMS_ITEM, TRAIN_STATE_ITEM

IN_STEP = f"extra/{CHECKSUMS_FILE}"
EXTRA_FILE = "extra/extra.json"
_CHANGED_LATER = (CHECKSUMS_FILE, IN_STEP, EXTRA_FILE, "_CHECKPOINT_METADATA")
_MARKER = "commit_success.txt"
_OWN_SUM = "sha256"


def seal(folder: Path, file: str = IN_STEP) -> None:
    """Write the checksums of a finished folder before it is renamed into place, and fsync everything in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    summed = [name for name in names if name not in _CHANGED_LATER and not name.endswith(_MARKER)]
    with _threads() as threads:
        list(threads.map(sync, files))
        sums = list(threads.map(lambda name: sha256(folder / name), summed))
    write_checksums(folder / file, dict(zip(summed, sums, strict=True)))
    for directory in sorted({path.parent for path in files}, reverse=True):
        sync(directory)


def write_checksums(file: Path, sums: Mapping[str, str]) -> None:
    """Write checksums in the format of `sha256sum`."""
    write_text(file, "".join(f"{text}  {name}\n" for name, text in sums.items()))


def read_checksums(folder: Path) -> dict[str, str]:
    """File -> SHA-256 of a step or an export; empty if it has none."""
    file = next((folder / name for name in (IN_STEP, CHECKSUMS_FILE) if (folder / name).is_file()), None)
    if file is None:
        return {}
    try:
        lines = [line.split("  ", 1) for line in file.read_text(encoding="utf-8").splitlines()]
        found = {name: text for text, name in lines}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", hint=_HINT) from error
    if not found or any(len(text) != 64 for text in found.values()):
        raise CheckpointError(f"{file} holds no checksums, or was cut", hint=_HINT)
    return found


def changed_files(folder: Path, *items: str) -> list[str]:
    """Files of a folder (or of some of its items) that are missing or changed, each with the problem."""
    expected = read_checksums(folder)
    names = [name for name in expected if not items or name.split("/")[0] in items]

    def look(name: str) -> str:
        try:
            return "" if sha256(folder / name) == expected[name] else f"{name}: changed since it was written"
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return f"{name}: {error}"

    with _threads() as threads:
        return [problem for problem in threads.map(look, names) if problem]


def damage(folder: Path, *, contents: bool = True) -> str:
    """The problem with a step's files; empty if it is intact. contents=False skips the checksums of large files."""
    try:
        sealed = read_checksums(folder)
        for item in (PARAMS_ITEM, TRAIN_STATE_ITEM):
            given_up = sealed and not any(name.startswith(f"{item}/") for name in sealed)
            if (folder / item).is_dir() or ((folder / "extra").is_dir() and not given_up):
                read_json(folder / item / "_METADATA")
                check_files(folder / item)
        if (folder / EXTRA_FILE).exists() or (folder / IN_STEP).exists():
            read_extra(folder)
        changed = changed_files(folder) if contents else []
    except CheckpointError as error:
        return error.message
    return f"{len(changed)} files are not as they were written\n{listing(changed)}" if changed else ""


def damaged_step(folder: Path, reason: str) -> CheckpointError:
    """The error for a damaged step; its hint names the newest intact earlier step."""
    run, number = folder.parent, folder.name
    if not number.isdecimal():
        return CheckpointError(f"{folder} is damaged: {reason}", hint=_HINT)
    earlier = [step for step in reversed(complete_steps(run)) if step < int(number)]
    resumable = [step for step in earlier if (run / str(step) / TRAIN_STATE_ITEM).is_dir()]
    good = next((step for step in resumable if not damage(run / str(step))), None)
    return CheckpointError(
        f"step {number} is damaged: {reason}",
        hint="no earlier step is intact: copy the checkpoint again, or start a new run"
        if good is None
        else f"step {good} is intact: move {folder} away to resume from it",
    )


@contextmanager
def verifying(folder: Path, *items: str) -> Iterator[None]:
    """Verify checksums while the block reads the same files, so that the disk reads them once. Process 0 only."""
    if jax.process_index() != 0:
        yield
        return
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(changed_files, folder, *items)
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        try:
            changed = [problem for problem in found.result() if not _moved_statistics(problem)]
        except CheckpointError as unreadable:
            changed = [unreadable.message]
        if changed:
            reason = f"{len(changed)} files are not as they were written\n{listing(changed)}"
            raise damaged_step(folder, reason) from error
        if error is not None:
            raise error


def _moved_statistics(problem: str) -> bool:
    """Whether the problem is a missing norm_stats.json. Users may move those; a missing needed one raises later."""
    return problem.startswith(f"{ASSETS_ITEM}/") and problem.endswith(": missing")


def extra_text(content: dict[str, object]) -> str:
    """The text of extra.json, including its own checksum."""
    return json_text({**content, _OWN_SUM: hashlib.sha256(json_text(content).encode()).hexdigest()})


def read_extra(folder: Path) -> dict[str, object]:
    """The verified content of a step's extra.json."""
    content = read_json(folder / EXTRA_FILE)
    expected = content.pop(_OWN_SUM, None)
    if expected is None and not (folder / IN_STEP).exists():
        return content
    if hashlib.sha256(json_text(content).encode()).hexdigest() != expected:
        raise CheckpointError(f"{folder / EXTRA_FILE} is not as it was written", hint=_HINT)
    return content


def sha256(file: Path) -> str:
    """Checksum of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) - 1)), thread_name_prefix="pirl-checksums")


_HINT = f"the files are damaged: copy them again, or use another step; if you changed them, delete {CHECKSUMS_FILE}"
