"""Hosts stop together, and ask each other no more often than that needs."""

import signal
import threading

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from pirl.training.interrupt import MOST_STEPS, SECONDS, StopRequest, stop_on_signal


class Hosts:
    """Two hosts as threads, each with a clock of its own; what they gather they gather together or not at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, paces: tuple[float, float]) -> None:
        self.paces = paces
        self.barrier = threading.Barrier(2, timeout=10)
        self.said: dict[str, np.ndarray] = {}
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(multihost_utils, "process_allgather", self.gather)

    def gather(self, value: np.ndarray) -> np.ndarray:
        self.said[threading.current_thread().name] = value
        self.barrier.wait()
        both = np.stack([self.said["0"], self.said["1"]])
        self.barrier.wait()
        return both

    def run(self, *, steps: int, asked_at: int | None = None) -> list[tuple[int, int]]:
        """(step it stopped after, times it asked) of each host; the second one is asked to stop."""
        results: dict[int, tuple[int, int]] = {}

        def host(number: int) -> None:
            now, asked = 0.0, 0
            request = StopRequest(clock=lambda: now)
            for step in range(1, steps + 1):
                now += self.paces[number]
                if number == 1 and step == asked_at:
                    request.signal = signal.SIGTERM
                before = request._next
                stop = request.agreed(step)
                asked += request._next != before
                if stop:
                    break
            results[number] = (step, asked)

        threads = [threading.Thread(target=host, args=(number,), name=str(number)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[0], results[1]]


@pytest.mark.parametrize(
    ("paces", "between"),
    [((0.001, 0.002), MOST_STEPS), ((0.2, 0.1), SECONDS / 0.2), ((300.0, 299.0), 1)],
    ids=["fast", "as slow as the slower", "iterations of minutes"],
)
def test_hosts_ask_at_their_pace_and_stop_together(
    paces: tuple[float, float], between: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, asked = Hosts(monkeypatch, paces).run(steps=400)[0]
    assert steps == 400
    assert asked == pytest.approx(400 / between, abs=3)
    (first, _), (second, _) = Hosts(monkeypatch, paces).run(steps=400, asked_at=123)
    assert first == second
    assert 123 <= first <= 123 + between


def test_one_process_asks_itself_every_step() -> None:
    with stop_on_signal() as request:
        assert not request.agreed(1)
        signal.raise_signal(signal.SIGTERM)
        assert request.agreed(2)
