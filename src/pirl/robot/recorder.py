"""Records every control step of a robot as a LeRobot dataset (v3.0), without slowing the control loop.

    with Recorder("recordings/fold", fps=50, robot_type="aloha", horizon=20) as recorder:
        recorder.start(task="fold the box", policy="acrlpd/50000")
        for ...:
            recorder.step(observation, action, intended=(chunk, index), intervention=False)
        recorder.end(success=True, note="slow but clean")

`step` copies the step and returns. A second process (`robot.writing`) encodes and writes, so it never holds this
interpreter's lock. It also survives this process: after `kill -9` it finishes the episodes that have ended and discards
the running one.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Float

from pirl.errors import DataError
from pirl.files import size_of
from pirl.names import (
    INTENDED,
    INTENDED_STEP,
    INTERVENTION,
    LEROBOT_ACTION,
    LEROBOT_IMAGES,
    LEROBOT_STATE,
    POLICY,
    PROMPT,
)
from pirl.nested import flatten
from pirl.robot import wire
from pirl.robot.keys import PREFIX
from pirl.robot.writing import read_message, write_message

Array = np.ndarray
STATE_KEYS = ("state", "observation/state", LEROBOT_STATE)
"""Keys of an observation's state, in order of preference; without any, all its vectors are concatenated."""
NO_STEP = -1
"""`intended_step` of steps without a chunk."""
_ANSWER_SECONDS = 600.0
"""Longest wait for an episode to be written, in seconds."""


class Recorder:
    """Writes one dataset. Not thread-safe: one control loop, one recorder."""

    def __init__(
        self,
        root: Path | str,
        *,
        fps: int,
        robot_type: str | None = None,
        horizon: int | None = None,
        max_gb: float | None = None,
        min_free_gb: float = 1.0,
        max_pending_gb: float = 1.0,
        codec: str = "av1",
        outcomes: bool = True,
    ) -> None:
        """`horizon`: steps of a policy's chunk, to record chunks as well. None: do not record them.

        `outcomes`: False if outcomes are unknown at the robot and added later with `pirl label`.

        Disk budget: an episode does not start when the dataset exceeds `max_gb` (10⁹ bytes) or the disk has less than
        `min_free_gb` left. Memory budget: an episode is given up when more than `max_pending_gb` wait to be encoded.
        """
        self.root = Path(root).expanduser()
        self.horizon = horizon
        self._max_gb, self._min_free_gb, self._max_pending = max_gb, min_free_gb, int(max_pending_gb * 1e9)
        self._outcomes = outcomes
        self._open = {"do": "open", "root": str(self.root), "fps": fps, "robot_type": robot_type, "codec": codec}
        self._open["outcomes"] = outcomes
        self._writer: _Writer | None = None
        self._episode: dict[str, Any] | None = None
        self.steps = 0
        """Number of steps of the running episode."""

    @property
    def running(self) -> bool:
        """Whether an episode has started and not ended."""
        return self._episode is not None

    def start(self, *, task: str, policy: str = "") -> None:
        """Begin an episode. `policy` names the acting policy; a step may override it."""
        if self.running:
            raise DataError(f"{self.root}: an episode is running", hint="call end(success=...) or discard() first")
        if not task.strip():
            raise DataError(f"{self.root}: the episode has no task", hint="describe the task in words")
        self._check_budget()
        if self._writer is None or not self._writer.alive:
            self._writer = _Writer(self._open, max_pending=self._max_pending)
        self._writer.overrun = False
        self._episode, self.steps = {"task": task, "policy": policy}, 0

    def step(
        self,
        observation: Mapping[str, Any],
        action: Float[Array, "A"],
        *,
        intended: tuple[Float[Array, "H A"], int] | None = None,
        intervention: bool = False,
        policy: str | None = None,
    ) -> None:
        """Record one control step: the observation and the action executed after it. Never waits for the disk.

        `intended` is the policy's chunk and the index of its step that was due.
        """
        if self._episode is None or self._writer is None:
            raise DataError(f"{self.root}: no episode is running", hint="call start(task=...) first")
        action = np.asarray(action, np.float32)
        columns: dict[str, Any] = {**columns_of(observation), LEROBOT_ACTION: action}
        if self.horizon is not None:
            chunk, index = (np.zeros((self.horizon, len(action)), np.float32), NO_STEP)
            if intended is not None:
                chunk, index = np.asarray(intended[0], np.float32), intended[1]
            columns |= {INTENDED: chunk, INTENDED_STEP: index}
        columns |= {INTERVENTION: bool(intervention), POLICY: self._episode["policy"] if policy is None else policy}
        self._writer.send_step(columns)
        self.steps += 1

    def end(self, success: bool | None = None, *, truncated: bool = False, note: str = "") -> int:
        """End the episode, wait until it is on disk, and return its index in the dataset.

        `truncated`: time ran out, and the task could still have succeeded. A failure that is not truncated ends the
        task: learning gives its last actions the value 0.
        """
        if self._episode is None or self._writer is None:
            raise DataError(f"{self.root}: no episode is running", hint="call start(task=...) first")
        if not self.steps:
            raise DataError(f"{self.root}: the episode has no steps", hint="record some steps, or discard()")
        if self._outcomes != (success is not None):
            said = "lacks its outcome" if self._outcomes else "has an outcome, but this recorder stores none"
            raise DataError(f"{self.root}: the episode {said}", hint="end(success=True), or Recorder(outcomes=False)")
        task, self._episode = self._episode["task"], None
        last = {"success": bool(success), "truncated": bool(truncated) and not success, "note": note}
        if self._writer.overrun:
            self._writer.ask({"do": "discard"})
            raise DataError(
                f"{self.root}: the episode was given up: over {self._max_pending / 1e9:g} GB waited to be encoded",
                hint='smaller pictures, codec="h264", fewer cameras, or a larger max_pending_gb',
            )
        return int(self._writer.ask({"do": "end", "task": task, **last})["saved"])

    def discard(self) -> None:
        """Discard the running episode."""
        if self._episode is not None and self._writer is not None:
            self._episode = None
            self._writer.ask({"do": "discard"})

    def close(self) -> None:
        """End the writing process; discards a running episode."""
        self._episode = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_budget(self) -> None:
        place = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if free < self._min_free_gb * 1e9:
            raise DataError(
                f"{self.root}: {free / 1e9:.1f} GB are free on the disk, less than min_free_gb {self._min_free_gb:g}",
                hint="move earlier recordings away, or record to another disk",
            )
        if self._max_gb is not None and (size := size_of(self.root)) >= self._max_gb * 1e9:
            raise DataError(
                f"{self.root}: the dataset has {size / 1e9:.2f} GB, its budget is {self._max_gb:g}",
                hint="record to another dataset, or raise max_gb",
            )


def columns_of(observation: Mapping[str, Any]) -> dict[str, Array]:
    """An observation's state and images under LeRobot's names; nested keys count as `a/b`.

    Images are uint8 arrays with three axes, stored as (height, width, 3) in either input order.
    """
    flat = flatten(observation)
    columns: dict[str, Array] = {}
    vectors: dict[str, Array] = {}
    for key, value in flat.items():
        if key == PROMPT or key.startswith(PREFIX) or isinstance(value, str | bytes) or value is None:
            continue
        array = np.asarray(value)
        if array.ndim == 3 and array.dtype == np.uint8:
            if array.shape[0] == 3 and array.shape[2] != 3:
                array = array.transpose(1, 2, 0)
            name = f"{LEROBOT_IMAGES}.{key.rpartition('/')[2].removeprefix(LEROBOT_IMAGES + '.')}"
            if name in columns:
                raise DataError(
                    f"two of the observation's pictures would be recorded as {name}", hint="rename one of them"
                )
            columns[name] = array
        elif array.ndim <= 1 and array.dtype.kind in "fiub":
            vectors[key] = np.atleast_1d(array).astype(np.float32)
    chosen = next(([key] for key in STATE_KEYS if key in vectors), list(vectors))
    if not chosen:
        raise DataError(
            f"the observation has no state: {', '.join(flat) or 'nothing'}", hint="give the robot's state as a vector"
        )
    return {LEROBOT_STATE: np.concatenate([vectors[key] for key in chosen]), **columns}


class _Writer:
    """The writing process, and the thread that feeds it."""

    def __init__(self, opening: Mapping[str, Any], *, max_pending: int) -> None:
        self._root = opening["root"]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pirl.robot.writing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # so that Ctrl-C at the robot does not reach it
        )
        self._max_pending = max_pending
        self._queue: deque[tuple[bytes, list[bytearray]] | None] = deque()
        self._free: dict[int, list[bytearray]] = {}  # by size; reused memory avoids page faults
        self._pending = 0
        self._changed = threading.Condition()
        self.overrun = False
        """Whether too much is waiting: steps were dropped, so the episode will be."""
        self._thread = threading.Thread(target=self._feed, name="recorder", daemon=True)
        self._thread.start()
        self.send(opening)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send_step(self, columns: Mapping[str, Any]) -> None:
        """Send a step's columns, or drop them if too much is waiting."""
        pictures = {name: value for name, value in columns.items() if np.ndim(value) == 3}
        if self._pending + sum(value.nbytes for value in pictures.values()) > self._max_pending:
            self.overrun = True
            return
        copies = []
        for value in pictures.values():
            free = self._free.get(value.nbytes)
            copies.append(free.pop() if free else bytearray(value.nbytes))
            np.copyto(np.frombuffer(copies[-1], np.uint8).reshape(value.shape), value)
        rest = {name: value for name, value in columns.items() if name not in pictures}
        shapes = {name: value.shape for name, value in pictures.items()}
        self.send({"do": "step", "columns": rest, "pictures": shapes}, copies)

    def send(self, message: Mapping[str, Any], pictures: list[bytearray] | None = None) -> None:
        """Queue a message for the feeding thread."""
        item = (wire.pack(message), pictures or [])
        with self._changed:
            self._pending += _size(item)
            self._queue.append(item)
            self._changed.notify()

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and wait for the answer; re-raises errors of the writing process."""
        self.send(message)
        assert self._process.stdout is not None
        timer = threading.Timer(_ANSWER_SECONDS, self._process.kill)
        timer.start()
        try:
            answer = read_message(self._process.stdout)
        finally:
            timer.cancel()
        if answer is None:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()[-2000:]
            raise DataError(
                f"{self._root}: the process that writes the dataset ended; this episode is lost\n{said}",
                hint="episodes that were saved before are safe; the next start() begins a new process",
            )
        if "refused" in answer:
            raise DataError(answer["refused"], hint=answer["hint"])
        return answer

    def close(self) -> None:
        """End the process after it has handled all messages."""
        with self._changed:
            self._queue.append(None)
            self._changed.notify()
        self._thread.join()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _feed(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._queue))
                    item = self._queue.popleft()
                if item is None:
                    break
                write_message(stream.fileno(), *item)
                with self._changed:
                    self._pending -= _size(item)
                for picture in item[1]:
                    self._free.setdefault(len(picture), []).append(picture)
        except OSError:  # the process is gone; `ask` reports it
            with self._changed:
                self._max_pending = 0  # drop all further steps
                self._queue.clear()
        finally:
            with contextlib.suppress(OSError):
                stream.close()


def _size(item: tuple[bytes, list[bytearray]]) -> int:
    return len(item[0]) + sum(map(len, item[1]))
