"""Stopping politely: the first SIGINT or SIGTERM ends the run after its current step, with a checkpoint."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

SECONDS, MOST_STEPS = 2.0, 50
"""Hosts ask each other about this often, but at least once in so many steps: asking waits for all of them."""


class StopRequest:
    """Has anybody asked the run to stop?"""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: signal.Signals | None = None
        self._clock = clock
        self._last: tuple[int, float] | None = None
        self._next = 0

    def __bool__(self) -> bool:
        return self.signal is not None

    def agreed(self, step: int) -> bool:
        """Has any host been asked? All hosts get the same answer after the same step, so all stop there.

        When they ask next follows from the pace of the slowest, which all of them know: no host asks alone.
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
        request.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
