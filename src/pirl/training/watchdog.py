"""Health checks on a run's metrics. Each problem is reported once.

It checks every written record, free disk space and (from a thread) the time since the last step. Findings are warnings;
with `watchdog.stop` they end the run.
"""

import itertools
import shutil
import statistics
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pirl.config import WatchdogConfig
from pirl.errors import PirlError, PirlWarning

SUCCESS = ("eval/success_rate", "ript/success_rate", "online/success_rate")
GIB = 2**30
KNOWN = 0.7
"""A critic whose values and returns correlate more than this on training batches has fitted its training data."""


class UnhealthyError(PirlError):
    """Raised at an alarm if `watchdog.stop` is set."""


class Watchdog:
    """Watches one run: call `look` on every record and `beat` after every step. Its context runs the hang detector."""

    def __init__(
        self,
        config: WatchdogConfig,
        directory: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._config, self._directory, self._clock, self._free = config, directory, clock, free_bytes
        self._said: set[str] = set()
        self._strikes: dict[str, int] = {}
        self._best: dict[str, float] = {}
        self._trained = 0.0
        self._memory: deque[float] = deque(maxlen=config.patience + 1)
        self._beats: deque[float] = deque(maxlen=32)
        self._paused = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="pirl-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._config.enabled:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def beat(self) -> None:
        """Note the end of a step."""
        self._beats.append(self._clock())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context, such as an evaluation, from hang detection."""
        began, self._paused = self._clock(), True
        try:
            yield
        finally:
            lost = self._clock() - began
            self._beats = deque((beat + lost for beat in self._beats), maxlen=self._beats.maxlen)
            self._paused = False

    def look(self, values: Mapping[str, float]) -> dict[str, float]:
        """Check newly logged metrics; returns `health/...` for new alarms."""
        if not self._config.enabled:
            return {}
        new = {name: text for name, text in self._findings(values) if name not in self._said}
        for name, text in new.items():
            self._say(name, text)
        if new and self._config.stop:
            raise UnhealthyError(
                "; ".join(new.values()),
                hint="the last checkpoint is kept; without watchdog.stop this is only a warning",
            )
        return dict.fromkeys((f"health/{name}" for name in new), 1.0)

    def _findings(self, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        patience = self._config.patience
        stall = values.get("time/stall_fraction")
        if self._struck("stall", stall is not None and stall > 0.5):
            yield (
                "stall",
                f"the device waits for data {stall:.0%} of the time: more prefetch, a faster cache, fewer cameras",
            )
        for name in (name for name in values if name.endswith("/grad_norm")):
            if self._struck(name, abs(values[name]) < 1e-8):
                yield "dead_gradients", f"{name} has been zero in {patience} records: does anything train?"
        for name in (name for name in SUCCESS if name in values):
            best = self._best[name] = max(self._best.get(name, 0.0), values[name])
            if self._struck(name, values[name] < best / 2 and best - values[name] > 0.2, patience=2):
                yield (
                    "collapse",
                    f"{name} fell from {best:.2f} to {values[name]:.2f}: go back to an earlier checkpoint "
                    "with a smaller learning rate",
                )
            if self._struck(f"{name}, ever", best == 0 and not name.startswith("eval/"), patience=2):
                yield (
                    "no_success",
                    f"{name} has been 0 in two collections, so there is no learning signal; "
                    "imitate for longer first, or start with easier states",
                )
        yield from self._memorised(values)
        if "memory/host_gib" in values:
            self._memory.append(values["memory/host_gib"])
            seen = list(self._memory)
            grew = len(seen) > patience and all(a < b for a, b in itertools.pairwise(seen))
            if grew and seen[-1] > 1.2 * seen[0]:
                yield "memory", f"host memory grew from {seen[0]:.1f} to {seen[-1]:.1f} GiB in {patience} records"
        free = self._free(self._directory) / GIB
        if free < self._config.disk_gib:
            yield "disk", f"only {free:.1f} GiB free on the disk of {self._directory}: checkpoints may fail soon"

    def _memorised(self, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """A critic that is good on training batches but no better than chance on held-out episodes."""
        self._trained = values.get("critic/mc_correlation", self._trained)
        for name in ("held_out/auc", "held_out/rank_correlation"):
            if name not in values:
                continue
            found, chance = values[name], values.get(f"{name}_by_chance", 1.0)
            if self._struck(name, self._trained > KNOWN and found < chance, patience=2):
                yield (
                    "memorised",
                    f"{name} is {found:.2f}, no better than chance (up to {chance:.2f} with so few episodes), although "
                    f"on training batches values and returns correlate {self._trained:.2f}: the critic memorises "
                    "episodes. Check the labels, or record more failures",
                )

    def _struck(self, name: str, bad: bool, *, patience: int | None = None) -> bool:
        """Count consecutive bad records; True from `patience` on."""
        self._strikes[name] = self._strikes.get(name, 0) + 1 if bad else 0
        return self._strikes[name] >= (self._config.patience if patience is None else patience)

    def _say(self, name: str, text: str) -> None:
        self._said.add(name)
        warnings.warn(f"watchdog: {text}", PirlWarning, stacklevel=3)

    def _listen(self) -> None:
        while not self._over.wait(self._config.hang_seconds / 10):
            self.listen()

    def listen(self) -> None:
        """Warn if no step has ended for far longer than the median step. Needs three steps: the first one compiles."""
        beats = list(self._beats)
        if len(beats) < 3 or self._paused or "hang" in self._said:
            return
        usual = statistics.median(b - a for a, b in itertools.pairwise(beats))
        silent = self._clock() - beats[-1]
        if silent > max(self._config.hang_seconds, 20 * usual):
            self._say("hang", f"no step has ended for {silent:.0f} s; usually one takes {usual:.1f} s")
