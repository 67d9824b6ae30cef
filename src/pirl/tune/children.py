"""Child processes of a search or comparison: `pirl` commands that log to a file and end with this process."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pirl.checkpoints.run_directory import METADATA_FILE, complete_steps, lock_run
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml
from pirl.processes import PARENT_VARIABLE

PATIENCE_SECONDS = 120.0
"""Seconds for a stopped process to save its checkpoint."""
FREED_SECONDS = 30.0
"""Seconds to wait for the lock of a killed search's trial, which is still shutting down."""
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of an interrupted run."""


@runtime_checkable
class Process(Protocol):
    """A running process; `subprocess.Popen` implements it."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""

    def kill(self) -> None:
        """End it at once."""


Launch = Callable[[Sequence[str], Path, Mapping[str, str]], Process]
"""Starts `pirl` with arguments, a log file and additional environment variables."""


def launch(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start `pirl` in a child process that appends its output to `log` and ends with this process."""
    listening, _ = _lifeline()
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "pirl", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, PARENT_VARIABLE: str(listening)},
            pass_fds=[listening],
        )


@functools.cache
def _lifeline() -> tuple[int, int]:
    """A pipe that closes when this process ends."""
    return os.pipe()


@dataclass(eq=False, kw_only=True)
class Child:
    """A process that works on a run."""

    process: Process
    log: Path
    begin_of_log: int
    """Size of the log before this attempt."""
    slot: int
    """Index of its job slot."""
    began: float
    told: bool = False
    """Whether it was asked to stop. Only once: a second signal would not reach the first's handler."""

    def stop(self) -> None:
        """Ask it to save and stop."""
        if not self.told:
            self.told = True
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def failure(self, code: int) -> tuple[str, bool]:
        """(why it failed, whether its settings may be the cause)."""
        return explain(code, tail(self.log, self.begin_of_log))


C = TypeVar("C", bound=Child)


@dataclass(frozen=True, kw_only=True)
class Slots(Generic[C]):
    """Job slots for parallel processes."""

    jobs: int
    """Number of slots."""
    kind: type[C]
    start: Launch = launch
    clock: Callable[[], float] = time.monotonic
    active: list[C] = field(default_factory=list)

    @property
    def free(self) -> bool:
        """Whether a slot is free."""
        return len(self.active) < self.jobs

    def begin(self, words: Sequence[str], log: Path, **own: Any) -> None:
        """Start a process in a free slot; `own`: further fields of its attempt."""
        slot = next(place for place in range(self.jobs) if place not in [one.slot for one in self.active])
        begin = log.stat().st_size if log.exists() else 0
        process = self.start(words, log, devices(slot, self.jobs, os.environ))
        place: dict[str, Any] = {"log": log, "begin_of_log": begin, "slot": slot, "began": self.clock()}
        self.active.append(self.kind(process=process, **place, **own))

    def leave(self, spent: Callable[[C], None]) -> None:
        """Stop running processes: SIGTERM, then SIGKILL after a timeout; `spent` is called for each."""
        for one in self.active:
            one.stop()
        for one in self.active:
            try:
                one.process.wait(PATIENCE_SECONDS)
            except BaseException as error:
                one.process.kill()
                one.process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
            spent(one)


def train_words(file: Path, config: RLTrainConfig) -> list[str]:
    """The command that starts or resumes a run; writes the configuration to `file`.

    Recovery is off: a diverged run must fail, because recovery would change the learning rate under test.
    """
    write_yaml(file, config, overwrite=True)
    return ["train", str(file), *_goes_on(config.run_dir), "--recovery.attempts", "0"]


def _goes_on(run: Path) -> list[str]:
    """The flag for an existing run: --resume with checkpoints, --overwrite without; none for a new run."""
    if not run.is_dir():
        return []
    lock_run(run, timeout=FREED_SECONDS).release()  # wait for the process of a killed search to end
    if complete_steps(run):
        return ["--resume"]
    return ["--overwrite"] if (run / METADATA_FILE).exists() else []


def explain(code: int, said: str) -> tuple[str, bool]:
    """(why a run failed, from the end of its log; whether its settings may be the cause)."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("  hint:")]
    errors = [line for line in lines if line.startswith(("error: ", "internal error: "))]
    reason = (errors or lines or [f"exit code {code}"])[-1].removeprefix("error: ")[:300]
    if "RESOURCE_EXHAUSTED" in reason or "out of memory" in reason.lower():
        return f"out of memory: {reason}", True
    if code == -signal.SIGKILL:
        return "killed, probably out of memory", True
    return reason, reason.startswith("training diverged")


def devices(slot: int, jobs: int, environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for one of several parallel runs, if it names enough GPUs to split."""
    named = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": ",".join(named[slot::jobs])} if 1 < jobs <= len(named) else {}


def tail(log: Path, begin: int, most: int = 20_000) -> str:
    """The end of a file, not before offset `begin`."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - most))
        return file.read().decode("utf-8", "replace")
