"""Runs a comparison: each run is an ordinary `pirl train` in its own process, then `pirl eval` on the test states.

All state is in files, so repeating the command continues after any interruption: finished runs are skipped, stopped or
killed ones resume from their checkpoints.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pirl.checkpoints.run_directory import complete_steps, lock_run
from pirl.errors import ConfigError, PirlError
from pirl.progress import Progress
from pirl.tune.children import STOPPED, Child, Launch, Slots, launch, train_words
from pirl.tune.compared import (
    SUCCESS,
    check_asked,
    eval_result,
    metric_result,
    note,
    read_log,
    read_state,
    results_json,
    write_results,
)
from pirl.tune.contenders import Run

POLL_SECONDS = 1.0


@dataclass(eq=False, kw_only=True)
class Attempt(Child):
    """A process that trains or evaluates a run."""

    run: Run
    training: bool
    """Whether it trains; otherwise it evaluates."""
    until: int
    """Step it resumed from: records of later steps count only if written after `since`."""
    since: float
    """Start time in seconds since the epoch."""
    enough: bool = False
    """Whether the run has used its budget."""


class Comparison:
    """Trains and evaluates all runs that have no result yet."""

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        folder: Path,
        metric: str = SUCCESS,
        episodes: int = 400,
        jobs: int = 1,
        stop: Callable[[], bool] = lambda: False,
        start: Launch = launch,
        clock: Callable[[], float] = time.monotonic,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`metric` is the success rate on `episodes` test states, or a metric of the log; `stop` is polled."""
        self._runs, self._folder, self._metric, self._episodes = runs, folder, metric, episodes
        self._stop, self._clock, self._poll_seconds = stop, clock, poll_seconds
        self._slots = Slots(jobs=jobs, kind=Attempt, start=start, clock=clock)
        self.asked: Mapping[str, Any] = {
            "metric": metric,
            "episodes": episodes if metric == SUCCESS else None,
            "seconds": runs[0].seconds,
        }
        self._waiting: list[Run] = []
        self._interrupted = False

    def run(self) -> bool:
        """Complete all runs; returns False if interrupted."""
        check_asked(self._folder, self.asked, self._runs)
        self._folder.mkdir(parents=True, exist_ok=True)
        busy = ConfigError(f"another process is comparing in {self._folder}", hint="stop it, or choose another --name")
        lock = lock_run(self._folder, busy)
        try:
            self._write()
            self._waiting = [run for run in self._runs if "result" not in read_state(run)]
            each = [run.updates if run.seconds is None else run.seconds for run in self._runs]
            unit = "updates" if self._runs[0].seconds is None else "seconds"
            with Progress("compare", round(sum(each)), unit=unit, start=round(self._at())) as self._progress:
                try:
                    while self._fill():
                        time.sleep(self._poll_seconds)
                        self._watch()
                        self._progress.update(round(self._at()), status=self._status())
                finally:
                    self._slots.leave(self._spend)
                    self._write()
        finally:
            lock.release()
        return not self._interrupted

    def _at(self) -> float:
        """The used part of the total budget."""
        found = 0.0
        for run in self._runs:
            budget = float(run.updates if run.seconds is None else run.seconds)
            attempt = next((one for one in self._slots.active if one.run is run and one.training), None)
            done = read_state(run).get("trained", False)
            found += budget if done else min(self._spent(run, attempt), budget)
        return found

    def _spent(self, run: Run, attempt: Attempt | None = None) -> float:
        """What a run has used of its budget, without steps after its checkpoint, which it will repeat."""
        if attempt is not None:
            return read_log(run, until=attempt.until, since=attempt.since).of(run)
        return read_log(run, until=max(complete_steps(run.folder), default=0)).of(run)

    def _fill(self) -> bool:
        """Start waiting runs in free slots; returns whether any process is active."""
        self._interrupted |= self._stop()
        while self._waiting and not self._interrupted and self._slots.free:
            self._begin(self._waiting.pop(0))
        return bool(self._slots.active)

    def _begin(self, run: Run) -> None:
        """Start training a run, or evaluating it if it is trained."""
        saved = max(complete_steps(run.folder), default=0)
        trained = read_state(run).get("trained", False)
        if not trained and saved and (saved >= run.config.num_train_steps or self._over(run, self._spent(run))):
            note(run, trained=True)  # killed after its last checkpoint, before it was noted
            trained = True
        if trained and (self._metric != SUCCESS or self._eval_file(run).is_file()):
            self._finish(run)
            return
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        words = self._eval_words(run) if trained else train_words(run.file(".yaml"), run.config)
        self._print(f"{run}: {'evaluating' if trained else f'resuming at step {saved}' if saved else 'training'}")
        own = {"run": run, "training": not trained, "until": saved, "since": time.time()}
        self._slots.begin(words, run.file(".log"), **own)

    def _over(self, run: Run, spent: float) -> bool:
        """Whether a run has used a budget that it does not enforce itself (seconds, or updates of iterations)."""
        if run.seconds is not None:
            return spent >= run.seconds
        return run.config.agent.groups is not None and spent >= run.updates

    def _eval_file(self, run: Run) -> Path:
        return run.folder / "evaluations" / "compare" / "eval.json"

    def _eval_words(self, run: Run) -> list[str]:
        out = self._eval_file(run).parent
        return ["eval", str(run.folder), "--split", "test", "--episodes", str(self._episodes), "--out", str(out)]

    def _watch(self) -> None:
        """Poll every process once; stop those whose run has used its budget."""
        self._interrupted |= self._stop()
        for one in list(self._slots.active):
            if self._interrupted:
                one.stop()
            code = one.process.poll()
            if one.training and not one.enough and not one.told and self._over(one.run, self._spent(one.run, one)):
                one.enough = True
                one.stop()
            if code is not None:
                self._slots.active.remove(one)
                self._end(one, code)

    def _end(self, one: Attempt, code: int) -> None:
        """Record how a process ended, and queue the run's evaluation if it is trained."""
        self._spend(one)
        if code == 0 or (one.enough and code in STOPPED):
            if one.training:
                note(one.run, trained=True)
                self._waiting.insert(0, one.run)
            else:
                self._finish(one.run)
        elif code in STOPPED:
            self._interrupted = True  # an external signal stops the whole comparison
        else:
            reason, explained = one.failure(code)
            if not explained:
                hint = f"see its log, {one.log}; once fixed, the same command continues"
                raise PirlError(f"{one.run} failed: {reason}", hint=hint)
            note(one.run, failed=reason)
            self._print(f"{one.run} failed: {reason}")
            self._write()

    def _finish(self, run: Run) -> None:
        """Read and record a run's result."""
        found = eval_result(self._eval_file(run)) if self._metric == SUCCESS else metric_result(run, self._metric)
        note(run, result=found, failed=None)
        self._print(f"{run}: {self._metric} {found['value']:.4g}")
        self._write()

    def _spend(self, one: Attempt) -> None:
        spent = read_state(one.run).get("wall_seconds", 0.0)
        note(one.run, wall_seconds=spent + self._clock() - one.began)

    def _write(self) -> None:
        write_results(self._folder, results_json(self._runs, self.asked))

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _status(self) -> str:
        told = []
        for one in self._slots.active:
            at = f"{self._spent(one.run, one):,.0f}" if one.training else "evaluation"
            told.append(f"{one.run.agent} seed {one.run.seed} at {at}")
        return ", ".join(told)
