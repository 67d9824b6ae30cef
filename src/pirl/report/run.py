"""Reads a run folder. Damaged files are skipped and noted; they never raise."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from pirl.config_io import parse_yaml
from pirl.errors import CheckpointError, ConfigError
from pirl.report.evaluations import FILE, FOLDER, Evaluation, RateShown, find_evaluations, read_evaluation

METRICS, CONFIG, METADATA, FIRST_BATCH = "metrics.jsonl", "config.yaml", "metadata.json", "first_batch.png"
HELD_OUT = "held_out.json"
SUCCESS, SUCCESS_LOW, SUCCESS_HIGH = "eval/success_rate", "eval/success_low", "eval/success_high"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric and the steps at which it was logged."""

    steps: Float64[np.ndarray, "n"]
    values: Float64[np.ndarray, "n"]
    """Values; NaN for non-finite ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The readable contents of a run folder."""

    folder: Path
    config: Mapping[str, Any]
    """The configuration as plain data; empty if missing."""
    metadata: Mapping[str, Any]
    """Revision, versions, start: the run's, updated by the latest checkpoint's."""
    state: Mapping[str, Any]
    """The stream's state in the latest checkpoint."""
    series: Mapping[str, Series]
    times: Float64[np.ndarray, "n"]
    """Times of all records, in seconds since 1970."""
    evaluations: tuple[Evaluation, ...]
    first_batch: Path | None
    held_out: Mapping[str, Any]
    """The latest measurement on held-out episodes; empty if there is none."""
    notes: tuple[str, ...]
    """Unreadable files and other oddities."""

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return str(self.config.get("name") or self._asked("recipe") or self.folder.parent.name)

    @property
    def exp_name(self) -> str:
        """The experiment name."""
        return str(self.config.get("exp_name") or self._asked("exp_name") or self.folder.name)

    def _asked(self, key: str) -> Any:
        return self.evaluations[0].asked.get(key) if self.evaluations else None

    @property
    def only_evaluations(self) -> bool:
        """Whether the folder holds evaluations and no run."""
        return bool(self.evaluations) and not self.series and not self.config

    @property
    def algorithm(self) -> str:
        """The algorithm's name in configurations; "" if unknown."""
        agent = self.config.get("agent")
        return str(agent.get("type", "")) if isinstance(agent, Mapping) else ""

    @cached_property
    def last_step(self) -> int:
        """The last logged step."""
        return int(max((series.steps[-1] for series in self.series.values()), default=0))

    @property
    def total_steps(self) -> int | None:
        """The configured number of steps."""
        total = self.config.get("num_train_steps")
        return total if isinstance(total, int) else None

    @property
    def seconds(self) -> float | None:
        """Seconds from the start (or the first record, whichever is earlier) to the last record."""
        if not len(self.times):
            return None
        return float(self.times.max() - min(self.times.min(), _timestamp(self.metadata.get("started_at"))))

    @property
    def episodes(self) -> int | None:
        """Episodes collected for training, without evaluations; None if unknown."""
        counted = self.state.get("episodes")
        if isinstance(counted, int):
            return counted
        series = self.series.get("online/episodes")
        return None if series is None or not np.isfinite(series.values[-1]) else int(series.values[-1])

    def success(self, which: int) -> tuple[int, RateShown] | None:
        """(step, success rate) of an evaluation during training: 0 is the first, -1 the last."""
        if SUCCESS not in self.series:
            return None
        rates = self.series[SUCCESS]
        known = np.flatnonzero(np.isfinite(rates.values))
        if not len(known):
            return None
        step = rates.steps[known[which]]
        low, high = (self.at(name, step) for name in (SUCCESS_LOW, SUCCESS_HIGH))
        return int(step), RateShown(value=float(rates.values[known[which]]), low=low, high=high)

    def at(self, name: str, step: float) -> float:
        """A metric at a step; NaN if it was not logged there."""
        series = self.series.get(name)
        if series is None:
            return math.nan
        found = np.flatnonzero(series.steps == step)
        return float(series.values[found[-1]]) if len(found) else math.nan


def read_run(path: Path) -> Run:
    """Read a run folder; raises only if it is not one."""
    folder = path.expanduser().absolute()
    if not any((folder / name).exists() for name in (METRICS, CONFIG, FILE, FOLDER)):
        raise _not_a_run(path, folder)
    notes: list[str] = []
    series, times = _read_metrics(folder / METRICS, notes)
    latest = max((int(child.name) for child in folder.iterdir() if child.name.isdecimal()), default=None)
    extra = None if latest is None else folder / str(latest) / "extra"
    metadata = _read_json(folder / METADATA, folder, notes)
    if extra is not None:
        metadata = {**metadata, **_read_json(extra / METADATA, folder, notes)}
    stream = {} if extra is None else _read_json(extra / "extra.json", folder, notes).get("stream")
    picture = folder / FIRST_BATCH
    return Run(
        folder=folder,
        config=_read_config(folder, metadata, notes),
        metadata=metadata,
        state=stream if isinstance(stream, Mapping) else {},
        series=series,
        times=times,
        evaluations=_read_evaluations(folder, notes),
        first_batch=picture if picture.is_file() else None,
        held_out=_read_json(folder / HELD_OUT, folder, notes),
        notes=tuple(notes),
    )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read several folders. Evaluation folders are merged into the run they evaluate, if it is among `paths`."""
    found = [read_run(path) for path in paths]
    trained = {(run.recipe, run.exp_name) for run in found if not run.only_evaluations}
    runs = [run for run in found if not run.only_evaluations or (run.recipe, run.exp_name) not in trained]
    for run in (run for run in found if run not in runs):
        owner = next(i for i, one in enumerate(runs) if (one.recipe, one.exp_name) == (run.recipe, run.exp_name))
        notes = tuple(f"{run.folder.name}/{note}" for note in run.notes)
        runs[owner] = replace(
            runs[owner],
            evaluations=(*runs[owner].evaluations, *run.evaluations),
            notes=(*runs[owner].notes, *notes),
        )
    return runs


def _not_a_run(path: Path, folder: Path) -> CheckpointError:
    what = f"holds none of {METRICS}, {CONFIG}, {FILE}" if folder.is_dir() else "is not a folder"
    inside = [str(path / file.parent.name) for file in sorted(folder.glob(f"*/{METRICS}"))[:5]]
    if inside:
        hint = f"name the runs in it: {', '.join(inside)}"
    elif (folder.parent / METRICS).exists():
        hint = f"name the run, not one of its steps: {path.parent}"
    else:
        hint = "name the folder of a run: checkpoints/RECIPE/EXP_NAME"
    return CheckpointError(f"{path} {what}", hint=hint)


def _read_metrics(file: Path, notes: list[str]) -> tuple[dict[str, Series], Float64[np.ndarray, "n"]]:
    """(metrics by name, times of records). Invalid lines are skipped and noted, such as one truncated by a crash."""
    text = _read_text(file, notes) if file.exists() else ""
    gathered: dict[str, tuple[list[float], list[float]]] = {}
    times: list[float] = []
    bad: list[int] = []
    lines = text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step, time = float(record["step"]), float(record["time"])
            values = {str(name): math.nan if x is None else float(x) for name, x in record["values"].items()}
            if not (math.isfinite(step) and math.isfinite(time)):
                raise ValueError("a step and a time are numbers")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            bad.append(number)
            continue
        times.append(time)
        for name, value in values.items():
            steps, found = gathered.setdefault(name, ([], []))
            steps.append(step)
            found.append(value if math.isfinite(value) else math.nan)
    if bad == [len(lines)] and not text.endswith("\n"):
        notes.append(f"{METRICS}: the last line is cut off and was ignored")
    elif bad:
        notes.append(f"{METRICS}: {len(bad)} of {len(lines)} lines are not records and were ignored (first: {bad[0]})")
    series = {name: _sorted(*pair) for name, pair in gathered.items()}
    return series, np.array(times, np.float64)


def _sorted(steps: list[float], values: list[float]) -> Series:
    order = np.argsort(steps, kind="stable")
    return Series(steps=np.array(steps, np.float64)[order], values=np.array(values, np.float64)[order])


def _read_config(folder: Path, metadata: Mapping[str, Any], notes: list[str]) -> Mapping[str, Any]:
    """The configuration from config.yaml, or else from the latest checkpoint."""
    file = folder / CONFIG
    if file.exists():
        try:
            return parse_yaml(_read_text(file, notes))
        except (ConfigError, RecursionError) as error:
            notes.append(f"{CONFIG}: {getattr(error, 'message', error)}")
    saved = metadata.get("config")
    return saved if isinstance(saved, Mapping) else {}


def _read_evaluations(folder: Path, notes: list[str]) -> tuple[Evaluation, ...]:
    found = []
    for file in find_evaluations(folder):
        try:
            evaluation, odd = read_evaluation(file)
        except ValueError as error:
            notes.append(f"{file.relative_to(folder)} is not what `pirl eval` writes and was left out ({error})")
        else:
            found.append(evaluation)
            notes += [f"{file.parent.relative_to(folder) / text}" for text in odd]
    return tuple(found)


def _read_json(file: Path, folder: Path, notes: list[str]) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(_read_text(file, notes))
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} where an object was expected")
    except (ValueError, RecursionError) as error:
        notes.append(f"{file.relative_to(folder)} cannot be read: {error}")
        return {}
    return content


def _read_text(file: Path, notes: list[str]) -> str:
    """A file's text, with invalid bytes replaced; "" with a note if it is unreadable."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{file.name} cannot be read: {error.strerror}")
        return ""


def _timestamp(text: Any) -> float:
    """An ISO time as seconds since 1970; infinity if invalid."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return math.inf
