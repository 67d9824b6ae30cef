"""Metrics of a run: accumulated on the device without blocking, written once per interval, checked for NaN.

`MetricLog.gather` takes the scalars of every `Agent.update`. It keeps the device arrays and returns at once, so the
next update is dispatched while this one runs. Every `interval` steps `log` fetches all of them in one transfer,
averages them and passes them to the sinks.
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
"""Vendors' dense bfloat16 peak FLOP/s, keyed by a substring of jax's `device_kind`; the first match wins."""


class DivergedError(PirlError):
    """A metric or weight is not finite; further checkpoints would be useless."""

    def __init__(self, message: str, *, hint: str = "", step: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.step = step
        """The step after which it was detected."""


def check_finite(values: Mapping[str, float | Sequence[float]], *, step: int) -> None:
    """Raise DivergedError, naming step and metrics, if any value (or entry of a list of values) is NaN or infinite."""
    found = {name: [v for v in np.ravel(value).tolist() if not math.isfinite(v)] for name, value in values.items()}
    bad = ", ".join(f"{name} = {wrong[0]}" for name, wrong in sorted(found.items()) if wrong)
    if bad:
        raise _diverged(f"at step {step} {bad}, where a finite number was expected", step)


def check_state(state: Any, *, step: int) -> None:
    """Raise DivergedError if the state holds NaN or infinity; metrics only describe the state before the update."""
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
    """Peak FLOP/s of one device; None for an unknown kind."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


class Timers:
    """Step speed between two readings, excluding the first step, which compiles."""

    def __init__(
        self,
        *,
        batch_size: int,
        flops_per_step: int | float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`flops_per_step` and `peak_flops` are summed over devices; MFU is only reported if both are known."""
        self._batch_size, self._flops, self._peak, self._clock = batch_size, flops_per_step, peak_flops, clock
        self._count: Callable[[], int | float] | None = None
        self._start: float | None = None
        self._compiled = False
        self._steps = 0
        self._paused = 0.0

    def count_flops(self, count: Callable[[], int | float]) -> None:
        """Register a function that counts a step's FLOPs. Counting is slow, so it runs when MFU is first logged, and
        never on devices without a known peak.
        """
        if self._peak is not None and self._flops is None:
            self._count = self._count or count

    def tick(self) -> None:
        """Count one dispatched step."""
        if self._compiled:
            self._steps += 1
        else:
            self._start, self._paused, self._compiled = self._clock(), 0.0, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context, such as evaluation or saving."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin

    def read(self) -> dict[str, float]:
        """Speed since the last reading; call it after waiting for the device."""
        values: dict[str, float] = {}
        now = self._clock()
        elapsed = 0.0 if self._start is None else now - self._start - self._paused
        if elapsed > 0:  # also for an interval without updates (no useful rollouts)
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
    """Gathers scalars and writes their means. Runs on all processes; only the main one has sinks.

    Everything outside `time/` and `memory/` is deterministic: a run resumed with `resume_step` and the `pending` of its
    checkpoint writes the same records as an uninterrupted one.
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
        """`last` lists metrics (full name or last part) logged as their last value instead of their mean.

        `closing`: time of the record a finished run wrote before its interval ended; a resumed run drops that record.
        `schedules`: metrics computed from the number of updates so far, evaluated only when a record is written.
        """
        if interval < 1:
            raise ConfigError(f"metrics are written every {interval} steps", hint="give an interval of at least 1")
        self.timers = timers
        self._schedules = dict(schedules or {})
        self._interval, self._last, self._clock = interval, frozenset(last), clock
        self._gathered: dict[str, list[Any]] = {name: list(values) for name, values in (pending or {}).items()}
        self.closing: float | None = None
        """Time of the last record if its interval had not ended, else None."""
        self._sinks = _open(Path(directory), sinks, run or RunInfo(), resume_step, closing) if is_main else []

    def gather(self, metrics: Mapping[str, Any]) -> None:
        """Keep the scalars of one update without waiting for the device."""
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
        """End a step that has these metrics of its own. At the end of an interval write the means and return them.

        `updates`: total so far, where a step is not one update. The `last` step is always written; if the run is later
        extended, the interval continues.
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
        """Register the timers' FLOP counter."""
        if self.timers:
            self.timers.count_flops(count)

    def flush(self, step: int, *, updates: int | None = None, goes_on: bool = False) -> dict[str, float]:
        """Write the means of what was gathered; waits for the device. `goes_on` keeps the values for the interval."""
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
        """Write a record immediately, without averaging (evaluation results, for example). Returns its time."""
        record = Record(step=step, time=self._clock(), values={name: float(value) for name, value in values.items()})
        for sink in self._sinks:
            sink.write(record)
        return record.time

    def show(self, step: int, shown: Shown | None) -> None:
        """Pass an evaluation's films and table to the sinks."""
        if shown is not None:
            for sink in self._sinks:
                sink.show(step, shown)

    def pending(self) -> dict[str, list[float]]:
        """The unfinished interval's values, for the checkpoint; waits for the device."""
        values = jax.device_get(self._gathered)
        self._gathered = {name: [float(value) for value in values[name]] for name in self._gathered}
        return {name: list(entries) for name, entries in self._gathered.items() if not name.startswith("time/")}

    def close(self) -> None:
        """Close the sinks. Pending values are not written, because their interval has not ended."""
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
    """Both files, truncated to the step the run resumes from, and the chosen sinks."""
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
