"""Progress: a bar with the time left on a terminal, otherwise one plain line per interval.

This keeps bar fragments out of log files. While the bar is shown, prints and log messages appear above it.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from rich import progress as rich_progress
from rich.console import Console
from rich.file_proxy import FileProxy


class Progress:
    """Counts towards a total. As a context manager it removes the bar on exit, also after an error."""

    def __init__(
        self,
        description: str,
        total: int | None = None,
        *,
        unit: str = "steps",
        start: int = 0,
        interval: int | float | None = 30.0,
        is_main: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start`: count at which a resumed loop begins. Without a terminal a line is printed every `interval` seconds
        and at the end; with `interval=None` none, for loops that print their own. Only the main process shows anything.
        """
        self.console = console or Console(stderr=True)
        self._description, self._total, self._unit, self._interval = description, total, unit, interval
        self._start, self._done, self._clock, self._is_main = start, start, clock, is_main
        self._status = ""
        self._began = self._printed = clock()
        self._printed_at: int | None = None
        self._bar: rich_progress.Progress | None = None
        self._exit = ExitStack()

    def __enter__(self) -> "Progress":
        self._began = self._printed = self._clock()
        if self._is_main and self.console.is_terminal:
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}", markup=False),
                rich_progress.BarColumn(),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TimeElapsedColumn(),
                rich_progress.TimeRemainingColumn(),
                rich_progress.TextColumn("{task.fields[status]}", markup=False),
                console=self.console,
            )
            self._task = self._bar.add_task(self._description, total=self._total, completed=self._start, status="")
            self._exit.enter_context(_logging_above(self.console))
            self._exit.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        if self._bar is None and self._is_main and self._interval is not None and self._printed_at != self._done:
            self._print(self._clock())

    def advance(self, count: int = 1, *, status: str | None = None) -> None:
        """Count `count` more; `status` is a short text to show."""
        self.update(self._done + count, status=status)

    def say(self, status: str) -> None:
        """Show a status without advancing."""
        self.update(self._done, status=status)

    def update(self, done: int, *, status: str | None = None) -> None:
        """Set the count to `done`."""
        self._done = done
        self._status = self._status if status is None else status
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=self._status)
        elif self._is_main and self._interval is not None and (now := self._clock()) - self._printed >= self._interval:
            self._print(now)

    def line(self, now: float) -> str:
        """The plain line: count, percentage, speed, time left."""
        done, total = self._done, self._total
        text = f"{self._description}: {done:,}" + (f"/{total:,} {self._unit}" if total else f" {self._unit}")
        if total:
            text += f" ({done / total:.0%})"
        elapsed, fresh = now - self._began, done - self._start
        if elapsed > 0 and fresh > 0:
            rate = fresh / elapsed
            text += f", {rate:.3g} {self._unit}/s"
            if total and done < total:
                text += f", {timedelta(seconds=round((total - done) / rate))} left"
            else:
                text += f", took {timedelta(seconds=round(elapsed))}"
        return f"{text}  {self._status}".rstrip()

    def _print(self, now: float) -> None:
        self._printed, self._printed_at = now, self._done
        self.console.print(self.line(now), soft_wrap=True, markup=False, highlight=False)


@contextmanager
def _logging_above(console: Console) -> Iterator[None]:
    """Route terminal log handlers through the console, above the bar; they hold the original stream otherwise."""
    moved: list[tuple[logging.StreamHandler, object]] = []
    for logger in (logging.getLogger(), logging.getLogger("pirl")):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout):
                moved.append((handler, handler.stream))
                handler.setStream(FileProxy(console, handler.stream))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
