"""Stopping politely: the first SIGINT or SIGTERM ends the run after its current step, with a checkpoint."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils


class StopRequest:
    """Has anybody asked the run to stop?"""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def agreed(self) -> bool:
        """Has any host been asked? All hosts get the same answer, so all stop after the same step."""
        if jax.process_count() == 1:
            return bool(self)
        return bool(multihost_utils.process_allgather(np.array(bool(self))).any())


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
