"""Hosts stop together, and ask each other no more often than that needs."""

import signal
import threading
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from pirl.agents.config import BCConfig
from pirl.checkpoints.run import Checkpoints
from pirl.training.interrupt import MOST_STEPS, SECONDS, StopRequest, stop_on_signal
from pirl.training.loop import train
from small_runs import small_run, steps_of


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


@pytest.mark.parametrize(
    ("grace", "took", "passed", "fits"),
    [
        (None, 999.0, 0.0, True),
        (30.0, None, 0.0, True),
        (30.0, 10.0, 0.0, True),
        (30.0, 10.0, 20.0, False),
        (30.0, 25.0, 0.0, False),
    ],
)
def test_a_checkpoint_is_begun_where_it_fits_into_the_grace(
    grace: float | None, took: float | None, passed: float, fits: bool
) -> None:
    now = 100.0
    request = StopRequest(clock=lambda: now)
    request.note(signal.SIGTERM)
    now += passed
    assert request.time_to_save(grace, took) is fits


def test_hosts_decide_alike_by_the_one_that_was_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def gather(mine: np.ndarray) -> np.ndarray:
        said.append(mine)
        return np.stack([mine, np.array([-5.0, 12.0], np.float32)])  # the other: 5 s left, its last one took 8

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    assert not StopRequest().time_to_save(30.0, None)
    np.testing.assert_array_equal(said[0], [-30, 0])


def test_a_grace_that_is_too_short_is_said_once() -> None:
    said: list[str] = []
    request = StopRequest()
    for seconds in (None, 10.0, 25.0, 25.0):
        request.warn(30.0, seconds, said.append)
    assert len(said) == 1
    assert "a checkpoint took 25 s" in said[0]


@pytest.mark.parametrize(("took", "left"), [(100.0, [5]), (1.0, [5, 7])])
def test_a_run_that_is_preempted_leaves_the_last_whole_step_or_one_more(
    took: float, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM arrives in step 7 of 11, with 30 s to live; a checkpoint takes so many."""
    config = small_run(tmp_path, BCConfig())
    config = replace(config, checkpoint=replace(config.checkpoint, grace=30.0))

    def agreed(self: StopRequest, step: int) -> bool:
        if step == 7:
            signal.raise_signal(signal.SIGTERM)
        return bool(self)

    seal = Checkpoints._seal

    def sealed(self: Checkpoints) -> None:
        seal(self)
        self.seconds = took

    with monkeypatch.context() as patched:
        patched.setattr(StopRequest, "agreed", agreed)
        patched.setattr(Checkpoints, "_seal", sealed)
        assert train(config) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert steps_of(config) == left
    assert ("not saved: the last checkpoint took 100 s" in said) == (took == 100.0)
    assert ("last complete step is 5" in said) == (took == 100.0)
    assert train(config, resume=True) == 0
    assert steps_of(config) == [*left, 10, 11]
