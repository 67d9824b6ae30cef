"""Runs a search: each trial is an ordinary run in its own process, monitored through its files.

A process frees all memory when it ends, and SIGTERM stops it with a checkpoint. So trials cannot affect each other, an
out-of-memory error fails a single trial, and an interrupted search resumes its unfinished runs. The search process
itself uses no device.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optuna.trial import Trial

from pirl.config import RLTrainConfig
from pirl.errors import ConfigError, PirlError
from pirl.progress import Progress
from pirl.tune.children import STOPPED, Child, Launch, Slots, launch, train_words
from pirl.tune.results import described, drop_checkpoints, write_results
from pirl.tune.study import State, Study, read_evaluations

POLL_SECONDS = 0.25
FAILURES_IN_A_ROW = 3
"""End the search after this many consecutive failures that the settings do not explain."""
Keep = Literal["best", "all"]


@dataclass(eq=False, kw_only=True)
class Attempt(Child):
    """A running trial."""

    trial: Trial
    config: RLTrainConfig
    seen: int = 0
    """Number of evaluations reported so far."""
    step: int = 0
    """The last logged step."""
    pruned: str = ""
    """Why it is pruned."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a search ended."""

    finished: bool
    """Whether all trials are done; otherwise interrupted or out of time."""
    interrupted: bool = False


class Tuner:
    """Runs trials until the study has enough."""

    def __init__(
        self,
        study: Study,
        *,
        trials: int,
        jobs: int = 1,
        timeout: float | None = None,
        keep: Keep = "best",
        stop: Callable[[], bool] = lambda: False,
        on_results: Callable[[], None] = lambda: None,
        start: Launch = launch,
        clock: Callable[[], float] = time.monotonic,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`trials` counts all of the study's; no trial starts after `timeout` seconds; `stop` is polled; `on_results`
        is called after results are written.
        """
        self._study, self._search, self._trials, self._jobs, self._keep = study, study.search, trials, jobs, keep
        self._timeout, self._stop, self._on_results = timeout, stop, on_results
        self._slots = Slots(jobs=jobs, kind=Attempt, start=start, clock=clock)
        self._clock, self._poll_seconds = clock, poll_seconds
        self._interrupted = False
        self._unexplained = 0

    def run(self) -> Ending:
        """Run all missing trials, interrupted ones first."""
        steps, end = self._search.config.num_train_steps, self._clock() + (self._timeout or math.inf)
        waiting = self._study.open_trials()
        self._write()
        with Progress(self._search.study, self._trials * steps, start=self._finished() * steps) as self._progress:
            try:
                while self._fill(waiting, late=self._clock() >= end):
                    time.sleep(self._poll_seconds)
                    self._watch()
                    at = self._finished() * steps + sum(one.step for one in self._slots.active)
                    self._progress.update(at, status=self._status())
            finally:
                self._slots.leave(self._spend)
        return Ending(finished=self._finished() >= self._trials, interrupted=self._interrupted)

    def _finished(self) -> int:
        return self._study.count("done", "pruned", "failed")

    def _fill(self, waiting: list[Trial], *, late: bool) -> bool:
        """Start trials in free slots; returns whether any run is active."""
        self._interrupted |= self._stop()
        while not (self._interrupted or late) and self._slots.free and self._begin(waiting):
            pass
        return bool(self._slots.active)

    def _watch(self) -> None:
        """Poll every run once."""
        self._interrupted |= self._stop()
        for one in list(self._slots.active):
            if self._interrupted:
                one.stop()
            code = one.process.poll()  # before reading its log, so that nothing is missed
            self._look(one)
            if code is not None:
                self._slots.active.remove(one)
                self._end(one, code)

    def _begin(self, waiting: list[Trial]) -> bool:
        """Start the next trial; return False if there is none."""
        if waiting:
            trial = waiting.pop(0)
        elif self._study.count() < self._trials:
            trial = self._study.ask()
        else:
            return False
        values = self._study.values(trial, at_once=self._jobs > 1)
        self._print(f"trial {trial.number}: {', '.join(f'{path} {value}' for path, value in values.items())}")
        try:
            config = self._search.trial(trial.number, values)
        except ConfigError as error:
            self._finish(trial, "failed", f"not possible: {error.message}")
            self._write()
            return True
        name = f"trial-{trial.number:03d}"
        words = train_words(self._search.folder / f"{name}.yaml", config)
        self._slots.begin(words, self._search.folder / f"{name}.log", trial=trial, config=config)
        return True

    def _look(self, one: Attempt) -> None:
        """Report new evaluations and prune the run if they are hopeless."""
        found, one.step = read_evaluations(one.config.run_dir, self._search.metric)
        for evaluated in found[one.seen :]:
            if one.pruned:
                break  # evaluations after the request to stop depend on timing: ignore them
            one.seen += 1
            self._study.report(one.trial, evaluated)
            if evaluated.step < one.config.num_train_steps:
                one.pruned = self._study.hopeless(one.trial, evaluated)
        if one.pruned:
            one.stop()

    def _end(self, one: Attempt, code: int) -> None:
        """Record how a run ended."""
        self._spend(one)
        if one.pruned:
            self._finish(one.trial, "pruned", one.pruned)
        elif code == 0 and one.seen:
            self._finish(one.trial, "done")
            self._unexplained = 0
        elif code in STOPPED:
            self._interrupted = True  # an external signal stops the whole search
        else:
            self._fail(one, code)
        self._write()

    def _fail(self, one: Attempt, code: int) -> None:
        """Record a failure. Raise if its settings do not explain it and no trial has succeeded, or if it repeats."""
        reason, explained = one.failure(code)
        self._unexplained = 0 if explained else self._unexplained + 1
        hint = f"see its log, {one.log}; once fixed, the same command continues"
        if not explained and not self._study.count("done", "pruned"):
            raise PirlError(f"trial {one.trial.number} failed: {reason}", hint=hint)  # the trial stays open
        self._finish(one.trial, "failed", reason)
        if self._unexplained >= FAILURES_IN_A_ROW:
            self._write()
            raise PirlError(f"{self._unexplained} trials in a row failed, the last one: {reason}", hint=hint)

    def _spend(self, one: Attempt) -> None:
        self._study.spend(one.trial, self._clock() - one.began)

    def _write(self) -> None:
        """Write all results and, with keep "best", delete the checkpoints of other finished trials."""
        write_results(self._study)
        if self._keep == "best":
            best = self._study.best()
            for result in self._study.results():
                if result.state != "open" and (best is None or result.number != best.number):
                    drop_checkpoints(Path(result.run))
        self._on_results()

    def _finish(self, trial: Trial, state: State, reason: str = "") -> None:
        self._print(f"trial {trial.number}: {described(self._study.finish(trial, state, reason))}")

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _status(self) -> str:
        best = self._study.best()
        told = [f"trial {one.trial.number} at step {one.step}" for one in self._slots.active]
        return ", ".join(told + ([f"best {best.last} in trial {best.number}"] if best else []))
