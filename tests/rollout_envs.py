"""Small environments that fail on demand. Workers import this module, so it only needs NumPy."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pirl.envs.env import EnvBatch, Outcome, Outcomes, RobotEnv, SeparateEnvs
from pirl.errors import EnvError, MissingExtraError
from pirl.records import Context


class CountingEnv(RobotEnv):
    """State: (init, steps, sum of all actions). The task `count` succeeds after 7 steps; any other task fails as its
    name says at action number `init`, or at the start for init 0.
    """

    robot = "counting"
    tasks = ("count", "count forever", "die", "hang", "raise", "nan reward", "nan state", "grow")
    max_steps = 12
    fps = 5
    action_dim = 2

    def begin(self, context: Context) -> None:
        self.context, self.steps, self.sum = context, 0, np.zeros(2, np.float32)
        self.misbehave()

    def now(self, task: str) -> bool:
        return self.context.task == task and self.context.init == self.steps

    def misbehave(self) -> None:
        if self.now("die"):
            os._exit(7)
        if self.now("hang"):
            time.sleep(3600)
        if self.now("raise"):
            raise EnvError(f"the cup broke at step {self.steps}")

    def act(self, action: np.ndarray) -> Outcome:
        self.steps += 1
        self.sum = self.sum + action
        self.misbehave()
        done = self.context.task == "count" and self.steps == 7
        reward = np.nan if self.now("nan reward") else self.steps + float(action[0])
        return Outcome(reward, done, self.steps == self.max_steps, done)

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        state = np.array([self.context.init, self.steps, *self.sum], np.float32)
        if self.now("nan state"):
            state[1] = np.nan
        if self.now("grow"):
            state = np.append(state, 0)
        seen: dict[str, Any] = {"state": state, "prompt": self.context.task}
        if pictures:
            seen |= {f"camera {i}": np.full((2, 3, 3), 10 * self.steps + i, np.uint8) for i in range(2)}
        return seen


def counting(size: int) -> EnvBatch:
    return SeparateEnvs([CountingEnv() for _ in range(size)])


class InspectingEnv(CountingEnv):
    """Its state describes the process in which it runs."""

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        threads = [int(os.environ.get(name, "0")) for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS")]
        return {"state": np.array([os.getpid(), "jax" in sys.modules, ignores, *threads])}


def inspecting(size: int) -> EnvBatch:
    return SeparateEnvs([InspectingEnv() for _ in range(size)])


class VectorisedEnvs:
    """Acts in all slots or fails as a whole; with `wrong` it returns one reward too few."""

    def __init__(self, size: int, *, wrong: bool = False) -> None:
        self.inner = inner = SeparateEnvs([CountingEnv() for _ in range(size)])
        self.wrong = wrong
        vars(self).update(vars(inner), begin=inner.begin, observe=inner.observe, close=inner.close)

    def act(self, slots: list[int], actions: np.ndarray) -> Outcomes:
        outcomes = self.inner.act(slots, actions)
        return outcomes._replace(reward=outcomes.reward[1:]) if self.wrong else outcomes


def broken(size: int) -> EnvBatch:
    raise OSError("libGL.so.1: cannot open shared object file")


def missing(size: int) -> EnvBatch:
    raise MissingExtraError("gym_aloha", "aloha", "the ALOHA simulator")


def stillborn(size: int) -> EnvBatch:
    os._exit(9)


def sleepy(size: int) -> EnvBatch:
    time.sleep(3600)
    return counting(size)


def slow(size: int) -> EnvBatch:
    time.sleep(1)
    return counting(size)


def late(log: Path, failures: int, size: int) -> EnvBatch:
    """Fails the first times, then works; writes a line per attempt."""
    with log.open("a") as file:
        file.write("attempt\n")
    return counting(size) if len(log.read_text().split()) > failures else broken(size)


def held_back(folder: Path, free: int, size: int) -> EnvBatch:
    """The first workers start at once, later ones wait for a file `go`."""
    with (folder / "log").open("a") as file:
        file.write("attempt\n")
    if len((folder / "log").read_text().split()) > free:
        wait_for(folder / "go")
    return counting(size)


class MeetingEnv(CountingEnv):
    """Environment `init` waits at each action until environment `1 - init` acts too."""

    folder: Path

    def act(self, action: np.ndarray) -> Outcome:
        (self.folder / f"{self.context.init}").touch()
        wait_for(self.folder / f"{1 - self.context.init}")
        return super().act(action)


def meeting(folder: Path, size: int) -> EnvBatch:
    MeetingEnv.folder = folder
    return SeparateEnvs([MeetingEnv() for _ in range(size)])


def wait_for(path: Path, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise EnvError(f"there is no {path.name} after {seconds:.0f} s")
        time.sleep(0.02)
