"""The process that writes a `Recorder`'s episodes: messages on standard input, replies on standard output.

It exits when its input ends, after writing ended episodes; an unfinished episode is discarded.
"""

import os
import struct
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from pirl.data.writer import LeRobotWriter
from pirl.errors import DataError, PirlError
from pirl.names import NEXT_DONE, NEXT_SUCCESS, NEXT_TRUNCATED, NOTE
from pirl.robot import wire

SMALLEST_VIDEO = 64
"""Images with a shorter or an odd side are stored as PNG."""
_LIMITS = wire.Limits(max_bytes=2**31)
_LOCK_SECONDS = 30.0
"""Longest wait for a dataset that an earlier process is still writing, in seconds."""
_POLITE = 15
"""Increment of the niceness, so that the control loop has priority."""


def write_message(file: int, data: bytes, pictures: Sequence[bytearray] = ()) -> None:
    """Write a packed message, preceded by its length and followed by the images whose shapes it lists."""
    parts: list[bytes | bytearray] = [struct.pack("<Q", len(data)), data, *pictures]
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(file, rest) :]


def read_message(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next message with its images among its columns; None at the end of input, also within a message."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    data = stream.read(length)
    if len(data) < length:
        return None
    message: dict[str, Any] = wire.unpack(data, _LIMITS)
    for name, shape in message.pop("pictures", {}).items():
        picture = np.empty(shape, np.uint8)
        if stream.readinto(picture.data.cast("B")) < picture.nbytes:  # type: ignore[attr-defined]
            return None
        message["columns"][name] = picture
    return message


class DatasetWriter:
    """Executes the messages of one recorder. Holds the last step back, because the episode's end completes it."""

    def __init__(self, opening: dict[str, Any]) -> None:
        self._opening = opening
        self._writer: LeRobotWriter | None = None
        self._last: dict[str, Any] | None = None
        self._problem: PirlError | None = None

    def step(self, columns: dict[str, Any]) -> None:
        """Add the previous step and hold this one. An invalid step fails the episode; `end` raises the error."""
        if self._problem is not None:
            return
        try:
            if self._writer is None:
                self._writer = self._open(columns)
            if self._last is not None:
                self._add(self._last)
            self._last = columns
        except (PirlError, OSError) as error:
            self._problem = error if isinstance(error, PirlError) else DataError(f"{self._opening['root']}: {error}")

    def end(self, task: str, *, success: bool, truncated: bool, note: str) -> int:
        """Write the last step and save the episode; returns its index."""
        try:
            if self._problem is not None:
                raise self._problem
            if self._writer is None or self._last is None:
                raise DataError(f"{self._opening['root']}: the episode has no steps")
            self._add(self._last, done=True, success=success, truncated=truncated, note=note)
            return self._writer.save_episode(task=task)
        finally:
            self.discard()

    def discard(self) -> None:
        """Discard the running episode."""
        self._last = self._problem = None
        if self._writer is not None:
            self._writer.discard_episode()

    def close(self) -> None:
        """Discard an unfinished episode and release the dataset."""
        if self._writer is not None:
            self._writer.close()

    def _add(
        self,
        columns: dict[str, Any],
        *,
        done: bool = False,
        success: bool = False,
        truncated: bool = False,
        note: str = "",
    ) -> None:
        assert self._writer is not None
        outcome = {NEXT_SUCCESS: success, NEXT_DONE: done, NEXT_TRUNCATED: truncated}
        self._writer.add_frame({**columns, **(outcome if self._opening["outcomes"] else {}), NOTE: note})

    def _open(self, columns: dict[str, Any]) -> LeRobotWriter:
        flag = {"dtype": "bool", "shape": [1], "names": None}
        features = {key: feature_of(value) for key, value in columns.items()}
        if self._opening["outcomes"]:
            features |= dict.fromkeys((NEXT_SUCCESS, NEXT_DONE, NEXT_TRUNCATED), flag)
        features[NOTE] = {"dtype": "string", "shape": [1], "names": None}
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return LeRobotWriter(
                    self._opening["root"],
                    fps=self._opening["fps"],
                    features=features,
                    robot_type=self._opening["robot_type"],
                    codec=self._opening["codec"],
                )
            except DataError as error:
                if "another writer" not in error.message or time.monotonic() > until:
                    raise
                time.sleep(0.1)


def feature_of(value: Any) -> dict[str, Any]:
    """LeRobot's feature of a column, from its first value."""
    if isinstance(value, str):
        return {"dtype": "string", "shape": [1], "names": None}
    array = np.asarray(value)
    shape = list(array.shape)
    if len(shape) != 3:
        return {"dtype": array.dtype.name, "shape": shape or [1], "names": None}
    small = min(shape[:2]) < SMALLEST_VIDEO or shape[0] % 2 or shape[1] % 2
    return {"dtype": "image" if small else "video", "shape": shape, "names": ["height", "width", "channels"]}


def serve(requests: IO[bytes], answers: int) -> None:
    """Execute messages until the input ends."""
    opening = read_message(requests)
    if opening is None:
        return
    writer = DatasetWriter(opening)
    try:
        while (message := read_message(requests)) is not None:
            verb = message.pop("do")
            if verb == "step":
                writer.step(message["columns"])
                continue
            try:
                if verb == "discard":
                    writer.discard()
                    answer: dict[str, Any] = {}
                else:
                    answer = {"saved": writer.end(message.pop("task"), **message)}
            except PirlError as error:
                answer = {"refused": error.message, "hint": error.hint}
            except OSError as error:
                answer = {"refused": f"{opening['root']}: the episode is lost: {error}", "hint": "is the disk full?"}
            try:
                write_message(answers, wire.pack(answer))
            except OSError:  # the recorder is gone
                continue
    finally:
        writer.close()


if __name__ == "__main__":
    os.nice(_POLITE)
    serve(sys.stdin.buffer, sys.stdout.fileno())
