"""Batches requests that arrive within a few milliseconds; the device never runs on the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

from pirl.errors import PirlError
from pirl.serve.metrics import Metrics
from pirl.serve.planner import PlannedChunk, Planner, Row


@dataclass(frozen=True, kw_only=True, eq=False)
class _Waiting:
    planner: Planner
    row: Row
    answer: asyncio.Future[tuple[PlannedChunk, float]]
    since: float

    def shares(self, other: "_Waiting") -> bool:
        """Whether both fit into one batch: same planner, and both or neither continue a chunk."""
        return self.planner is other.planner and (self.row.before is None) == (other.row.before is None)


class Batcher:
    """Batches waiting rows for the device."""

    def __init__(self, *, max_batch: int, window: float, expected: Callable[[], int], metrics: Metrics) -> None:
        """`expected`: most simultaneous requests; once this many wait, the batch starts at once."""
        self._max_batch, self._window, self._expected, self._metrics = max_batch, window, expected, metrics
        self._waiting: list[_Waiting] = []
        self._arrived = asyncio.Event()
        self._device = ThreadPoolExecutor(1, thread_name_prefix="pirl-device")

    async def plan(self, planner: Planner, row: Row) -> tuple[PlannedChunk, float]:
        """(the row's plan, seconds the model took)."""
        answer: asyncio.Future[tuple[PlannedChunk, float]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(planner=planner, row=row, answer=answer, since=perf_counter()))
        self._arrived.set()
        return await answer

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._gather()
                batch = self._take()
                if not batch:
                    continue
                start = perf_counter()
                for one in batch:
                    self._metrics.took("wait", start - one.since)
                rows = [one.row for one in batch]
                try:
                    plans = await loop.run_in_executor(self._device, batch[0].planner.plan, rows)
                except Exception as error:
                    for one in batch:
                        _tell(one.answer, error)
                    continue
                seconds = perf_counter() - start
                self._metrics.count("batches", "size", str(len(batch)))
                for one, plan in zip(batch, plans, strict=True):
                    self._metrics.took("plan", seconds)
                    _tell(one.answer, plan if isinstance(plan, PirlError) else (plan, seconds))
        finally:
            for one in self._waiting:
                one.answer.cancel()
            self._device.shutdown(wait=False)

    async def _gather(self) -> None:
        """Wait until a batch is full, no more requests are expected, or the oldest waited for `window`."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        deadline = self._waiting[0].since + self._window
        while len(self._waiting) < min(self._max_batch, self._expected()):
            left = deadline - perf_counter()
            if left <= 0:
                return
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """Remove and return the oldest request and those that can share its batch; drops those of gone clients."""
        self._waiting = [one for one in self._waiting if not one.answer.done()]
        if not self._waiting:
            return []
        batch = [one for one in self._waiting if one.shares(self._waiting[0])][: self._max_batch]
        self._waiting = [one for one in self._waiting if one not in batch]
        return batch


def _tell(answer: asyncio.Future[tuple[PlannedChunk, float]], found: tuple[PlannedChunk, float] | Exception) -> None:
    if answer.done():  # the client is gone
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)
