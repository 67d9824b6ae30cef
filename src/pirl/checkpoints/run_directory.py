"""A run's folder: locking, resuming and overwriting."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pirl import __version__
from pirl.checkpoints.ownership import check_only_ours, foreign_in_run
from pirl.errors import CheckpointError, PirlError
from pirl.files import json_text, write_text
from pirl.names import PARAMS_ITEM
from pirl.parallel.distributed import barrier, is_main
from pirl.training.config import ResumeMode

METADATA_FILE = "metadata.json"
LOCK_FILE = ".lock"


def check_directory(
    directory: str | os.PathLike[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    fresh_if_missing: bool = False,
) -> bool:
    """Raise if a run may not use the folder; True if there is a checkpoint to resume from. Changes nothing."""
    ResumeMode(resume=resume, overwrite=overwrite, fresh_if_missing=fresh_if_missing)
    directory = Path(directory).expanduser().absolute().resolve()
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file, expected the folder of a run", hint="choose another exp_name")
    names, content = _contents(directory)
    steps = complete_steps(directory)
    if resume and not steps and not fresh_if_missing:
        runs = sorted(child.name for child in directory.parent.glob("*") if complete_steps(child))
        others = f"; runs of {directory.parent.name} are {', '.join(runs[:6])}" if runs else ""
        raise CheckpointError(
            f"{directory} holds no complete checkpoint to resume from"
            + (f", only {', '.join(content[:6])}" if content else ""),
            hint=f"check the recipe and exp_name{others}; or start without --resume",
        )
    if content and not resume and not overwrite:
        reached = f"with checkpoints of steps {', '.join(map(str, steps))}" if steps else "without a checkpoint"
        raise CheckpointError(
            f"{directory} is an existing run {reached}",
            hint="--resume continues it, --overwrite deletes it, another --exp-name starts a new one",
        )
    if content and overwrite and not (steps or METADATA_FILE in names):
        raise CheckpointError(
            f"{directory} does not look like a run (it holds {', '.join(content[:6])}) and is not deleted",
            hint=f"a run has step folders or {METADATA_FILE}; choose another folder, or empty this one yourself",
        )
    if overwrite or (content and not steps):
        check_only_ours(directory, foreign_in_run(directory))
    return bool(steps) and resume


def _contents(directory: Path) -> tuple[list[str], list[str]]:
    """The entries of a folder, and those that a run which never started does not leave."""
    names = sorted(child.name for child in directory.iterdir()) if directory.is_dir() else []
    return names, [name for name in names if name not in (METADATA_FILE, LOCK_FILE)]


def prepare_directory(
    directory: str | os.PathLike[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    fresh_if_missing: bool = False,
) -> bool:
    """Prepare the folder of a run; True if there is a checkpoint to resume from.

    An existing run is resumed or deleted only on request. A folder with files that pirl did not write is never deleted.
    """
    going_on = check_directory(directory, resume=resume, overwrite=overwrite, fresh_if_missing=fresh_if_missing)
    directory = Path(directory).expanduser().absolute().resolve()
    _, content = _contents(directory)
    barrier("run.looked")  # process 0 must not change the folder before all have checked it
    if is_main():
        with io_errors(f"{directory} cannot be written to"):
            _finish_deleting(directory)
            if content and not going_on:  # overwrite, or a run that ended before its first checkpoint
                _delete(directory)
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / METADATA_FILE).exists():
                # Marks the folder as ours, and detects a read-only folder now instead of at the first save.
                write_text(directory / METADATA_FILE, json_text({"written_by": f"pirl {__version__}"}))
    barrier("run.prepared")
    return going_on


def complete_steps(directory: Path) -> list[int]:
    """Complete steps of a run, oldest first. A folder is named by its number only once it is complete."""
    if not directory.is_dir():
        return []
    names = (child.name for child in directory.iterdir() if child.name.isdecimal())
    return sorted(int(name) for name in names if (directory / name / PARAMS_ITEM / "_METADATA").is_file())


def lock_run(directory: Path, taken: PirlError | None = None, *, timeout: float = 0) -> FileLock:
    """Lock a folder for writing. The system releases the lock when the process ends, however it ends.

    Raises `taken` (default: an error about a run) if another process holds the lock for `timeout` seconds.
    """
    lock = FileLock(directory / LOCK_FILE)
    try:
        lock.acquire(timeout=timeout)
    except Timeout as error:
        hint = "stop it first, or choose another --exp-name"
        raise taken or CheckpointError(f"another process is training in {directory}", hint=hint) from error
    except NotImplementedError:
        pass  # a file system without locks
    return lock


@contextmanager
def io_errors(problem: str) -> Iterator[None]:
    """Convert OSError to CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{problem}: {error}", hint="check the path, its permissions and the disk") from error


def reason_of(error: Exception) -> str:
    """The cause in an error of Orbax or TensorStore: it stands at the end, before the description of the store."""
    return (str(error) or type(error).__name__).split(" [tensorstore_spec")[0][-300:]


def _aside(directory: Path) -> Path:
    """Name of a run's folder during deletion."""
    return directory.with_name(f".{directory.name}.deleted")


def _finish_deleting(directory: Path) -> None:
    """Complete an interrupted deletion; keeps a folder of that name with files that pirl did not write."""
    aside = _aside(directory)
    if aside.is_dir() and not foreign_in_run(aside):
        with suppress(FileNotFoundError):  # another process may delete it, too
            shutil.rmtree(aside)


def _delete(directory: Path) -> None:
    check_only_ours(_aside(directory), foreign_in_run(_aside(directory)))
    with lock_run(directory):
        os.rename(directory, _aside(directory))
    _finish_deleting(directory)
