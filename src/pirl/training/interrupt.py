"""Graceful interruption: the first SIGINT or SIGTERM ends the run after its current step, with a checkpoint."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

ROOM = 1.5
"""Safety factor: a checkpoint may take this many times as long as the last one."""
SECONDS, MOST_STEPS = 2.0, 50
"""Hosts synchronise stop requests about every SECONDS, at most MOST_STEPS steps apart; each exchange blocks all."""


class StopRequest:
    """Whether the run was asked to stop, and when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: signal.Signals | None = None
        self.at: float | None = None
        """Clock time of the signal."""
        self._clock, self._warned = clock, False
        self._last: tuple[int, float] | None = None
        self._next = 0

    def __bool__(self) -> bool:
        return self.signal is not None

    def time_to_save(self, grace: float | None, seconds: float | None) -> bool:
        """Whether a save fits into the rest of `grace`, given that the last took `seconds`. Equal on all hosts."""
        if grace is None:
            return True
        left = grace if self.at is None else grace - (self._clock() - self.at)
        took = 0.0 if seconds is None else ROOM * seconds
        if jax.process_count() > 1:
            answers = multihost_utils.process_allgather(np.array([-left, took], np.float32)).max(0)
            left, took = -float(answers[0]), float(answers[1])
        return took <= left

    def warn(self, grace: float | None, seconds: float | None, say: Callable[[str], None]) -> None:
        """Warn once if saving takes longer than `grace`, so that SIGTERM leaves no time to save."""
        if self._warned or grace is None or seconds is None or ROOM * seconds <= grace:
            return
        self._warned = True
        say(
            f"a checkpoint took {seconds:.0f} s and checkpoint.grace is {grace:g} s: after SIGTERM none will be begun. "
            "What was learned since the last one is learned again; a smaller checkpoint.save_interval loses less"
        )

    def note(self, number: int) -> None:
        """Record a signal that arrives now."""
        self.signal, self.at = signal.Signals(number), self._clock()

    def agreed(self, step: int) -> bool:
        """Whether any host was asked to stop. All hosts get the same answer at the same step, so all stop there.

        The next step at which they exchange follows from the slowest host's pace, which all know: no host waits alone.
        """
        if jax.process_count() == 1:
            return bool(self)
        if step < self._next:
            return False
        last, now = self._last or (step, self._clock()), self._clock()
        answers = multihost_utils.process_allgather(np.array([bool(self), now - last[1]], np.float32))
        asked, elapsed = answers.max(0)
        steps = int(SECONDS * (step - last[0]) / max(float(elapsed), 1e-6))
        self._last, self._next = (step, self._clock()), step + min(max(steps, 1), MOST_STEPS)
        return bool(asked)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second SIGINT interrupts at once."""
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        request.note(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
