"""Records requests and replies at the server, for clients that cannot record: a LeRobot dataset of chunk transitions.

    recorder = ExchangeRecorder("recordings/seen", fps=50, execute=10)
    PolicyServer(load, config, on_exchange=recorder.exchange, on_close=recorder.closed)

The server sees one observation per chunk. Each request becomes one row per executed step of its chunk, with those
actions; only the first row has its own observation (`observed`), the others repeat it. Training starts chunks and
bootstraps only at observed rows. The number of executed steps is what the client reports (`pirl/step`), or else
`execute`. Outcomes come from `pirl label`.
"""

import logging
import queue
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from pirl.data.writer import LeRobotWriter
from pirl.errors import DataError
from pirl.names import INTENDED, INTENDED_STEP, LEROBOT_ACTION, OBSERVED, POLICY, PROMPT
from pirl.robot.recorder import columns_of
from pirl.robot.writing import feature_of
from pirl.serve.session import Exchange

log = logging.getLogger("pirl.serve.recording")
NO_TASK = "unknown"
"""The task of an episode whose observations have no instruction."""


class ExchangeRecorder:
    """Writes one dataset; a thread encodes and writes each finished episode."""

    def __init__(
        self,
        root: Path | str,
        *,
        fps: int,
        execute: int,
        robot_type: str | None = None,
        codec: str = "av1",
        max_pending_gb: float = 1.0,
    ) -> None:
        """`fps`: the robot's control steps per second. An episode is dropped if more than `max_pending_gb` wait."""
        if execute < 1 or fps < 1:
            raise DataError(f"{root}: {execute} executed steps at {fps} a second", hint="both are at least 1")
        self.root = Path(root).expanduser()
        self._fps, self._execute, self._robot_type, self._codec = fps, execute, robot_type, codec
        self._max_pending = int(max_pending_gb * 1e9)
        self._open: dict[int, list[Exchange]] = {}
        self._spoilt: dict[int, int | str] = {}
        self._lock = threading.Lock()
        self._pending = 0
        self.episodes: Counter[str] = Counter()
        """Number of episodes by result: saved, given up or failed."""
        self._queue: queue.Queue[list[Exchange] | None] = queue.Queue()
        self._writer: LeRobotWriter | None = None
        self._thread = threading.Thread(target=self._write_all, name="pirl-record", daemon=True)
        self._thread.start()

    def exchange(self, one: Exchange) -> None:
        """Add one request and its chunk; a new episode ends the connection's previous one."""
        with self._lock:
            if self._spoilt.get(one.session) == one.episode:
                return
            self._spoilt.pop(one.session, None)
            kept = self._open.setdefault(one.session, [])
            if kept and kept[-1].episode != one.episode:
                self._queue.put(self._open.pop(one.session))
                kept = self._open.setdefault(one.session, [])
            self._pending += _size(one)
            kept.append(one)
            problem = self._problem(kept)
            if problem:
                self._pending -= sum(map(_size, self._open.pop(one.session)))
                self._spoilt[one.session] = one.episode
                self.episodes["given up"] += 1
                log.warning("an episode of connection %d is not recorded: %s", one.session, problem)

    def closed(self, session: int) -> None:
        """End the episode of a closed connection."""
        with self._lock:
            self._spoilt.pop(session, None)
            if kept := self._open.pop(session, None):
                self._queue.put(kept)

    def close(self) -> None:
        """End all episodes, and wait until they are written."""
        for session in list(self._open):
            self.closed(session)
        self._queue.put(None)
        self._thread.join()

    def _problem(self, kept: list[Exchange]) -> str | None:
        if kept[-1].early:
            return "the client asks before its chunk is used up; record it at the robot (pirl.robot.recorder)"
        if self._pending > self._max_pending:
            return f"over {self._max_pending / 1e9:g} GB wait to be written"
        if len(kept) > 1 and (count := self._executed(*kept[-2:])) > len(kept[-2].chunk):
            return f"{count} steps between two requests, and a chunk has {len(kept[-2].chunk)}"
        return None

    def _executed(self, one: Exchange, following: Exchange | None) -> int:
        if following is not None and one.told and following.told:
            return max(0, following.step - one.step)
        return min(self._execute, len(one.chunk))

    def _write_all(self) -> None:
        while (episode := self._queue.get()) is not None:
            try:
                self._write(episode)
                self.episodes["saved"] += 1
            except Exception as error:  # a recording error must not stop the robot
                if self._writer is not None:
                    self._writer.discard_episode()
                self.episodes["failed"] += 1
                log.error("%s: an episode was not recorded: %s", self.root, error)
            with self._lock:
                self._pending -= sum(map(_size, episode))
        if self._writer is not None:
            self._writer.close()

    def _write(self, episode: list[Exchange]) -> None:
        rows = 0
        for one, following in zip(episode, [*episode[1:], None], strict=True):
            chunk = np.asarray(one.chunk, np.float32)
            seen = columns_of(one.observation) | {INTENDED: chunk, POLICY: one.policy}
            for step in range(self._executed(one, following)):
                row = seen | {LEROBOT_ACTION: chunk[step], INTENDED_STEP: step, OBSERVED: step == 0}
                if self._writer is None:
                    self._writer = self._begin(row)
                self._writer.add_frame(row)
                rows += 1
        if rows and self._writer is not None:
            prompt = episode[0].observation.get(PROMPT)
            self._writer.save_episode(task=prompt if isinstance(prompt, str) and prompt.strip() else NO_TASK)

    def _begin(self, row: dict[str, Any]) -> LeRobotWriter:
        features = {name: feature_of(value) for name, value in row.items()}
        return LeRobotWriter(
            self.root, fps=self._fps, features=features, robot_type=self._robot_type, codec=self._codec
        )


def _size(one: Exchange) -> int:
    return sum(value.nbytes for value in _arrays(one.observation))


def _arrays(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, dict):
        return [array for value in tree.values() for array in _arrays(value)]
    return [tree] if isinstance(tree, np.ndarray) else []
