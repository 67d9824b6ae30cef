"""Metric sinks: console, `metrics.jsonl`, `metrics.csv`, and tracking services that may be absent or offline.

A failing sink must not stop training: `Guarded` wraps every sink and disables it with a warning at its first error.
"""

import csv
import hashlib
import importlib
import io
import json
import math
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from pirl.errors import MissingExtraError, PirlWarning
from pirl.files import write_text
from pirl.training.console import grouped, heading, one_line
from pirl.training.shown import Shown

SinkName = Literal["console", "wandb", "trackio", "tensorboard"]
"""Optional sinks; the two files are always written."""

JSONL_FILE, CSV_FILE = "metrics.jsonl", "metrics.csv"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The metrics of one step."""

    step: int
    """Step of the training loop."""
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]
    """Numbers by slash-separated names; NaN and infinities are allowed."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run, as tracking services identify it."""

    project: str = "pirl"
    """Project that groups the runs."""
    name: str = "run"
    """Name and identity of the run: a resumed run continues its own curves."""
    entity: str | None = None
    """Team or user at wandb."""
    group: str | None = None
    """Group of related runs."""
    tags: tuple[str, ...] = ()
    """Tags at wandb."""
    steps: int | None = None
    """Total steps."""
    config: Mapping[str, Any] | None = None
    """The resolved configuration, as plain data."""


@runtime_checkable
class Sink(Protocol):
    """Takes records; after its first exception it is not called again. A `Gallery` (with `show`) also takes films."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and release; no record follows."""


@runtime_checkable
class Gallery(Protocol):
    """Takes films and tables of evaluations."""

    def show(self, step: int, shown: Shown) -> None:
        """Take films and the table of solved initial states."""


class Guarded:
    """A sink that cannot fail the run: its first error disables it."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self.name = name
        self._sink: Sink | None = None
        self._attempt("start", lambda: self._open(make))

    @property
    def alive(self) -> bool:
        """Whether the sink still works."""
        return self._sink is not None

    def write(self, record: Record) -> None:
        """Write a record if the sink works."""
        if (sink := self._sink) is not None:
            self._attempt("write", lambda: sink.write(record))

    def show(self, step: int, shown: Shown) -> None:
        """Show films if the sink works and is a `Gallery`."""
        if isinstance(sink := self._sink, Gallery):
            self._attempt("show films", lambda: sink.show(step, shown))

    def close(self) -> None:
        """Close the sink if it works."""
        if (sink := self._sink) is not None:
            self._attempt("close", sink.close)
            self._sink = None

    def _open(self, make: Callable[[], Sink]) -> None:
        self._sink = make()

    def _attempt(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._sink = None
            reason = str(error) if isinstance(error, MissingExtraError) else f"{type(error).__name__}: {error}"
            message = f"the {self.name} sink failed to {what} and is off for the rest of this run: {reason}"
            warnings.warn(PirlWarning(message), stacklevel=2)


class ConsoleSink:
    """Prints each record. Looks up `sys.stdout` at every write, because a live progress bar replaces it."""

    def __init__(self, total: int | None = None) -> None:
        """`total`: steps of the run; if given, each line shows progress and time left."""
        self._total = total
        self._first: Record | None = None

    def write(self, record: Record) -> None:
        """Print one line, or on a terminal one line per group of metrics."""
        self._first = first = self._first or record
        steps = record.step - first.step
        head = heading(record.step, self._total, (record.time - first.time) / steps if steps > 0 else None)
        width = shutil.get_terminal_size().columns
        print(grouped(head, record.values, width) if sys.stdout.isatty() else one_line(head, record.values), flush=True)

    def close(self) -> None:
        """Nothing to release."""


class JsonlSink:
    """One JSON object per line: step, time, values. Non-finite values are null and named in `non_finite`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Record) -> None:
        """Append one line in a single write."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")

    def close(self) -> None:
        """Nothing to release."""


def to_json(record: Record) -> str:
    """A record as strict JSON, which has no NaN."""
    non_finite = sorted(name for name, value in record.values.items() if not math.isfinite(value))
    values = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
    entry: dict[str, Any] = {"step": record.step, "time": record.time, "values": values}
    if non_finite:
        entry["non_finite"] = non_finite
    return json.dumps(entry, allow_nan=False, ensure_ascii=False)


def truncate_jsonl(path: Path, step: int, *, without: float | None = None) -> None:
    """Drop records after `step`, a last line truncated by a crash, and the record written at time `without`."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        kept = "".join(line for line in text.splitlines(keepends=True) if _written_by(line, step, without))
        if kept != text:
            write_text(path, kept)


def _written_by(line: str, step: int, without: float | None) -> bool:
    try:
        entry = json.loads(line) if line.endswith("\n") else {}
        return int(entry["step"]) <= step and (without is None or entry["time"] != without)
    except (ValueError, KeyError, TypeError):
        return False


class CsvSink:
    """One row per record. A name that was not seen before becomes a new last column."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = _read_csv(path)[0]

    def write(self, record: Record) -> None:
        """Append a row; new columns rewrite the file atomically."""
        row = {"step": str(record.step), "time": repr(record.time)}
        row |= {name: repr(value) for name, value in record.values.items()}
        if new := [name for name in row if name not in self._columns]:
            columns, rows = [*self._columns, *new], _read_csv(self._path)[1]
            write_text(self._path, _csv_text(columns, rows, header=True))
            self._columns = columns
        with self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(_csv_text(self._columns, [row], header=False))

    def close(self) -> None:
        """Nothing to release."""


def truncate_csv(path: Path, step: int, *, without: float | None = None) -> None:
    """Drop rows after `step`, the row written at time `without`, and columns that only those rows filled.

    A resumed run adds the columns again in the same order, so the file equals an uninterrupted run's.
    """
    if path.exists():
        columns, rows = _read_csv(path)
        rows = [row for row in rows if int(row["step"]) <= step and (without is None or float(row["time"]) != without)]
        columns = [name for name in columns if any(row.get(name) for row in rows)]
        write_text(path, _csv_text(columns, rows, header=bool(columns)))


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """(columns, rows), without a last row truncated by a crash."""
    if not path.exists() or not (text := path.read_text(encoding="utf-8")):
        return [], []
    whole = text[: text.rfind("\n") + 1]
    columns, *rows = csv.reader(io.StringIO(whole)) if whole else [[]]
    return columns, [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _csv_text(columns: Sequence[str], rows: Sequence[Mapping[str, str]], *, header: bool) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


class TrackerSink:
    """wandb, or trackio, which has the same calls."""

    def __init__(self, package: Literal["wandb", "trackio"], directory: Path, run: RunInfo) -> None:
        self._module = _extra(package, package)
        options: dict[str, Any] = {"project": run.project, "name": run.name, "group": run.group, "resume": "allow"}
        if package == "wandb":
            options |= {"id": wandb_id(run.name), "dir": str(directory), "entity": run.entity, "tags": run.tags or None}
        self._module.init(config=dict(run.config or {}), **options)

    def write(self, record: Record) -> None:
        """Send a record; the service shows gaps for non-finite values."""
        self._module.log(dict(record.values), step=record.step)

    def show(self, step: int, shown: Shown) -> None:
        """Send films and, to wandb, a table of initial states (solved before, solved now)."""
        media: dict[str, Any] = {
            f"eval/films/{file.stem}": self._module.Video(str(file), format="mp4") for file in shown.films
        }
        if shown.strip is not None:
            media["eval/filmstrip"] = self._module.Image(str(shown.strip))
        if self._module.__name__ == "wandb":
            columns = ["task", "init", "before", "now"]
            rows = [[getattr(one, name) for name in columns] for one in shown.states]
            media["eval/states"] = self._module.Table(columns=columns, data=rows)
        if media:
            self._module.log(media, step=step)

    def close(self) -> None:
        """Upload pending data."""
        self._module.finish()


def wandb_id(name: str) -> str:
    """The run's name as a valid wandb id: wandb refuses `/`, a few other characters, and more than 128 characters.

    Deterministic, so that a resumed run finds its id. A name that has to change gets a hash, so that ids stay unique.
    """
    allowed = re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:100]
    return name if allowed == name else f"{allowed}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class TensorBoardSink:
    """Writes event files to `tensorboard/` without TensorFlow or torch."""

    def __init__(self, directory: Path) -> None:
        self._writer: Any = _extra("tensorboardX", "tensorboard").SummaryWriter(str(directory / "tensorboard"))

    def write(self, record: Record) -> None:
        """One scalar per value."""
        for name, value in record.values.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def show(self, step: int, shown: Shown) -> None:
        """Add the filmstrip; videos would need another package."""
        if shown.strip is not None:
            with Image.open(shown.strip) as strip:
                self._writer.add_image("eval/filmstrip", np.asarray(strip), step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _extra(package: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(package, extra, f"logging to {extra}") from error


def open_sink(name: SinkName, directory: Path, run: RunInfo) -> Guarded:
    """Open a sink by name; one that fails to open warns and stays disabled."""
    makers: dict[str, Callable[[], Sink]] = {
        "console": lambda: ConsoleSink(run.steps),
        "wandb": lambda: TrackerSink("wandb", directory, run),
        "trackio": lambda: TrackerSink("trackio", directory, run),
        "tensorboard": lambda: TensorBoardSink(directory),
    }
    return Guarded(name, makers[name])
