"""Metrics of a run: accumulated on the device without blocking, written once per interval, checked for NaN.

`MetricLog.gather` is called after every update with the scalars that `Agent.update` returned. It keeps the device
arrays and returns at once, so the next update is dispatched while this one runs. Every `interval` steps (`log`) all of
them are fetched in one transfer, averaged, and handed to the sinks.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pirl.errors import ConfigError, PirlError, listing
from pirl.planning.memory import memory_values
from pirl.training import sinks as sinks_module
from pirl.training.shown import Shown
from pirl.training.sinks import CsvSink, Guarded, JsonlSink, Record, RunInfo, Sink, SinkName

PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 FLOP/s as the makers state them, by a part of jax's `device_kind`; the first that matches counts."""


class DivergedError(PirlError):
    """A metric is not finite; training on would only spoil the checkpoints."""

    def __init__(self, message: str, *, hint: str = "", step: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.step = step
        """The step after which it was noticed."""


def check_finite(values: Mapping[str, float | Sequence[float]], *, step: int) -> None:
    """Raise if any value, or one of several of a metric, is NaN or infinite, naming the step and the metrics."""
    found = {name: [v for v in np.ravel(value).tolist() if not math.isfinite(v)] for name, value in values.items()}
    bad = ", ".join(f"{name} = {wrong[0]}" for name, wrong in sorted(found.items()) if wrong)
    if bad:
        raise _diverged(f"at step {step} {bad}, where a finite number was expected", step)


def check_state(state: Any, *, step: int) -> None:
    """Raise if a number of the training state is NaN or infinite; its metrics describe the state before the update."""
    finite = jax.tree_util.tree_leaves_with_path(jax.device_get(_finite(state)))
    if bad := [jax.tree_util.keystr(path, simple=True, separator="/") for path, whole in finite if not whole]:
        raise _diverged(f"after step {step} {len(bad)} of {len(finite)} arrays are not finite\n{listing(bad)}", step)


@jax.jit
def _finite(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree)


def _diverged(how: str, step: int) -> DivergedError:
    return DivergedError(
        f"training diverged: {how}",
        hint="go on from the last checkpoint with a smaller learning rate or stronger gradient clipping; "
        "--debug-nans finds the operation",
        step=step,
    )


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s one device could reach, where its kind is known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


class Timers:
    """Speed of the steps between two readings. The very first step, which compiles, is left out."""

    def __init__(
        self,
        *,
        batch_size: int,
        flops_per_step: int | float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`flops_per_step` and `peak_flops` are of all devices together; without either there is no MFU."""
        self._batch_size, self._flops, self._peak, self._clock = batch_size, flops_per_step, peak_flops, clock
        self._count: Callable[[], int | float] | None = None
        self._start: float | None = None
        self._compiled = False
        self._steps = 0
        self._paused = 0.0

    def count_flops(self, count: Callable[[], int | float]) -> None:
        """How to count a step's operations, once its shapes are known. Counting is slow: it runs when MFU is first
        logged, not before the first step, and not at all on devices without a known peak.
        """
        if self._peak is not None and self._flops is None:
            self._count = self._count or count

    def tick(self) -> None:
        """One more step is done (or dispatched)."""
        if self._compiled:
            self._steps += 1
        else:
            self._start, self._paused, self._compiled = self._clock(), 0.0, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is no training: evaluation, or waiting for a checkpoint."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin

    def read(self) -> dict[str, float]:
        """Speed since the last reading; to be called when the device has caught up."""
        values: dict[str, float] = {}
        now = self._clock()
        elapsed = 0.0 if self._start is None else now - self._start - self._paused
        if elapsed > 0:  # also where rollouts taught nothing, and no step was made
            values["time/seconds"] = elapsed
        if self._steps and elapsed > 0:
            values |= {
                "time/step_seconds": elapsed / self._steps,
                "time/samples_per_second": self._batch_size * self._steps / elapsed,
            }
            if self._count is not None:
                self._flops, self._count, now = self._count(), None, self._clock()
            if self._flops and self._peak:
                values["time/mfu"] = self._flops * self._steps / elapsed / self._peak
        self._start, self._steps, self._paused = now, 0, 0.0
        return values


class MetricLog:
    """Gathers scalars, writes their means. On all processes alike, but only the main one has sinks.

    Everything outside `time/` and `memory/` is a function of the run alone: a run that was resumed with `resume_step`
    and the `pending` of its checkpoint leaves the same records as one that was never interrupted.
    """

    def __init__(
        self,
        directory: Path,
        sinks: Sequence[SinkName | Sink] = ("console",),
        *,
        interval: int = 100,
        is_main: bool = True,
        last: Collection[str] = ("learning_rate", "stall_fraction"),
        timers: Timers | None = None,
        schedules: Mapping[str, Callable[[int], Any]] | None = None,
        run: RunInfo | None = None,
        resume_step: int | None = None,
        pending: Mapping[str, Sequence[float]] | None = None,
        closing: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`last` names metrics (or the last part of their names) of which not the mean but the last value counts.

        `closing` is the time of the record that ended the run before its interval did; going on, it is dropped.
        `schedules` are metrics that the number of updates before a step decides; they cost nothing between records.
        """
        if interval < 1:
            raise ConfigError(f"metrics are written every {interval} steps", hint="give an interval of at least 1")
        self.timers = timers
        self._schedules = dict(schedules or {})
        self._interval, self._last, self._clock = interval, frozenset(last), clock
        self._gathered: dict[str, list[Any]] = {name: list(values) for name, values in (pending or {}).items()}
        self.closing: float | None = None
        """When the last record was written, if its interval had not ended."""
        self._sinks = _open(Path(directory), sinks, run or RunInfo(), resume_step, closing) if is_main else []

    def gather(self, metrics: Mapping[str, Any]) -> None:
        """Keep the scalars of one update, without waiting for them."""
        self._keep(metrics)
        if self.timers:
            self.timers.tick()

    def log(
        self,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        updates: int | None = None,
        last: bool = False,
    ) -> dict[str, float] | None:
        """A step is done, with these numbers of its own; at the end of an interval write, and return what was written.

        `updates` counts those so far, where a step is not one. The `last` step is always written; its interval goes on
        if the run does.
        """
        self._keep(metrics or {})
        if step % self._interval == 0:
            return self.flush(step, updates=updates)
        return self.flush(step, updates=updates, goes_on=True) if last else None

    def _keep(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if np.shape(value):
                raise ConfigError(
                    f"metric {name!r} has shape {np.shape(value)}, expected a scalar", hint="reduce it in the update"
                )
            self._gathered.setdefault(name, []).append(value)

    def paused(self) -> AbstractContextManager[None]:
        """Exclude this time from the step timers."""
        return self.timers.paused() if self.timers else nullcontext()

    def count_flops(self, count: Callable[[], int | float]) -> None:
        """Have the timers learn the operations of a step."""
        if self.timers:
            self.timers.count_flops(count)

    def flush(self, step: int, *, updates: int | None = None, goes_on: bool = False) -> dict[str, float]:
        """Write what was gathered so far; the one place that waits for the device."""
        gathered, names = jax.device_get(self._gathered), list(self._gathered)
        self._gathered = {name: list(gathered[name]) for name in names} if goes_on else {}
        values = {name: self._reduce(name, gathered[name]) for name in names}  # jax has sorted them
        before = max((step if updates is None else updates) - 1, 0)
        values |= {name: float(schedule(before)) for name, schedule in self._schedules.items()}
        if self.timers:
            values |= self.timers.read()
        values |= memory_values()
        written = self.write(step, values)
        self.closing = written if goes_on else None
        return values

    def write(self, step: int, values: Mapping[str, float]) -> float:
        """Write numbers as they are, now: results of an evaluation, for example. Returns the record's time."""
        record = Record(step=step, time=self._clock(), values={name: float(value) for name, value in values.items()})
        for sink in self._sinks:
            sink.write(record)
        return record.time

    def show(self, step: int, shown: Shown | None) -> None:
        """Pass on what an evaluation shows beside its numbers."""
        if shown is not None:
            for sink in self._sinks:
                sink.show(step, shown)

    def pending(self) -> dict[str, list[float]]:
        """The interval that has begun but is not written, for a checkpoint; waits for the device."""
        values = jax.device_get(self._gathered)
        self._gathered = {name: [float(value) for value in values[name]] for name in self._gathered}
        return {name: list(entries) for name, entries in self._gathered.items() if not name.startswith("time/")}

    def close(self) -> None:
        """Close the sinks. What is pending is not written: it belongs to an interval that did not end."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reduce(self, name: str, entries: Sequence[Any]) -> float:
        if name in self._last or name.rsplit("/", 1)[-1] in self._last:
            return float(entries[-1])
        return float(np.mean(np.asarray(entries, np.float64)))


def _open(
    directory: Path, sinks: Sequence[SinkName | Sink], run: RunInfo, resume_step: int | None, closing: float | None
) -> list[Guarded]:
    """The two files, made to fit the step the run starts from, and the chosen sinks."""
    directory.mkdir(parents=True, exist_ok=True)
    jsonl, table = directory / sinks_module.JSONL_FILE, directory / sinks_module.CSV_FILE
    if resume_step is not None:
        sinks_module.truncate_jsonl(jsonl, resume_step, without=closing)
        sinks_module.truncate_csv(table, resume_step, without=closing)
    elif present := [path for path in (jsonl, table) if path.exists() and path.stat().st_size]:
        raise ConfigError(
            f"{present[0]} already holds the metrics of a run, and this run starts anew",
            hint="resume that run, or give this one another name",
        )
    opened = [Guarded(jsonl.name, lambda: JsonlSink(jsonl)), Guarded(table.name, lambda: CsvSink(table))]
    for sink in sinks:
        if isinstance(sink, str):
            opened.append(sinks_module.open_sink(sink, directory, run))
        else:
            opened.append(Guarded(type(sink).__name__, lambda made=sink: made))  # type: ignore[misc]
    return opened
