"""Shared code of pools whose environments run in other processes or on other machines.

A worker holds some of the slots in its own `LocalPool` and answers one request at a time, as bytes. The pool sends all
requests before it awaits the first answer, so workers run in parallel. Workers may die, hang or fail to start; a
`_Seat` persists: it replaces its worker, remembers which episodes were lost, and starts the new worker in the
background while the other seats continue.

Images travel in the pickle: two cameras of 224 x 224 in 16 slots are 4.8 MB and take 7 ms, much less than rendering.
Nothing here needs jax, because it also runs inside workers.
"""

import contextlib
import math
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pirl import errors
from pirl.errors import ConfigError, EnvError, PirlError, PirlWarning
from pirl.rollout.pool import Build, EnvInfo, LocalPool, Lost, Pool

_THREADS = "OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS NUMEXPR_NUM_THREADS LP_NUM_THREADS"
ONE_THREAD = dict.fromkeys(_THREADS.split(), "1")
"""Environment variables of a worker. With one worker per core, threads of NumPy or Mesa's renderer (`LP_`) inside it
would only compete."""

START_TIMEOUT = 180.0
"""Seconds for a worker to import its simulator and build its environments."""
START_NOTICE = 20.0
"""Report a worker that is still starting after this many seconds."""

CLOSE_TIMEOUT = 2.0
"""Seconds for a worker to close its environments before it is killed."""

START_ATTEMPTS = 3
"""Give up after this many failed starts in a row."""


class WorkerLostError(Exception):
    """The worker is gone."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.details = details or reason


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A worker's error answer. Text only, because exceptions may not unpickle."""

    kind: str
    """Name of the exception class."""
    message: str
    """Its message."""
    hint: str
    """Its hint, for pirl's own errors, else empty."""
    traceback: str
    """Its formatted traceback."""

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Describe an exception."""
        return cls(
            kind=type(error).__name__,
            message=error.message if isinstance(error, PirlError) else str(error),
            hint=error.hint if isinstance(error, PirlError) else "",
            traceback="".join(traceback.format_exception(error)),
        )

    def throw(self) -> None:
        """Raise it again: pirl's errors as themselves, others as WorkerLostError."""
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, PirlError):
            error = found.__new__(found)
            PirlError.__init__(error, self.message, hint=self.hint)  # subclasses take other arguments
            raise error
        raise WorkerLostError(f"its worker raised {self.kind}: {self.message}", self.traceback)


class Host:
    """Runs inside a worker and serves its environments."""

    _pool: LocalPool

    def answer(self, request: bytes) -> bytes:
        """Execute a pickled request (`open` first, then methods of `LocalPool`); returns the pickled result."""
        try:
            verb, args, options = pickle.loads(request)
            if verb == "open":
                self._pool = LocalPool(*args)
                result = self._pool.info
            else:
                result = getattr(self._pool, verb)(*args, **options)
            return pickle.dumps(result, protocol=5)
        except Exception as error:
            return pickle.dumps(Failure.of(error))


@runtime_checkable
class Worker(Protocol):
    """A handle on a `Host` elsewhere, which starts in the background when the handle is made."""

    def send(self, request: bytes) -> None:
        """Send a request without waiting; `receive` reports whether it arrived."""

    def receive(self, timeout: float) -> bytes:
        """The answer; raises `WorkerLostError` with the cause, or `TimeoutError`."""

    def kill(self) -> None:
        """Kill it, even if it hangs."""


def _request(verb: str, *args: Any, **options: Any) -> bytes:
    return pickle.dumps((verb, args, options), protocol=5)


class _Seat:
    """Manages one worker and its replacements."""

    def __init__(self, launch: Callable[[], Worker], opening: bytes, timeout: float, start_timeout: float) -> None:
        self.restarts = 0
        self._launch, self._opening = launch, opening
        self._timeout, self._start_timeout = timeout, start_timeout
        self._episodes: set[int] = set()
        self._why_lost = "no episode was started in this slot"
        self._open()

    def _open(self) -> None:
        self.ready = self._busy = False
        self._asked = time.monotonic()
        self._worker = self._launch()
        self._worker.send(self._opening)

    def _send(self, verb: str, *args: Any, **options: Any) -> None:
        self._asked = time.monotonic()
        self._worker.send(_request(verb, *args, **options))
        self._busy = True

    def _receive(self, timeout: float, notice: float = math.inf) -> Any:
        # Time counts from the request, since other workers were awaited first; leave a moment to fetch the answer.
        left = max(self._asked + timeout - time.monotonic(), min(timeout, 1.0))
        try:
            answer = pickle.loads(self._wait(left, notice))
        except TimeoutError as error:
            reason = f"its worker gave no answer for {timeout:g} s"
            raise WorkerLostError(reason, f"{reason} {error}") from None
        self._busy = False
        if isinstance(answer, Failure):
            answer.throw()
        return answer

    def _wait(self, left: float, notice: float) -> bytes:
        if left > notice:
            try:
                return self._worker.receive(notice)
            except TimeoutError as error:
                said = " ".join(filter(None, ("an environment worker is still starting", str(error))))
                warnings.warn(
                    f"{said}; after {self._start_timeout:g} s (rollout.worker_start_timeout) it is replaced",
                    PirlWarning,
                    stacklevel=2,
                )
                left -= notice
        return self._worker.receive(left)

    def _replace(self, reason: str) -> None:
        self._worker.kill()
        self._episodes.clear()
        self._why_lost = reason
        self.restarts += 1
        warnings.warn(f"an environment worker is restarted (restart {self.restarts}): {reason}", PirlWarning, 2)
        self._open()

    def await_ready(self) -> EnvInfo:
        """Wait until the worker has made its environments, replacing it if it fails; returns their facts."""
        failures = 0
        while not self.ready:
            try:
                self._info: EnvInfo = self._receive(self._start_timeout, START_NOTICE)
                self.ready = True
            except WorkerLostError as lost:
                failures += 1
                if failures == START_ATTEMPTS:
                    raise EnvError(
                        f"an environment worker failed {failures} times in a row while starting; the last time:\n"
                        f"{lost.details.rstrip()}",
                        hint="`rollout.backend=local` creates the environments in this process, which may show more",
                    ) from None
                self._replace(f"{lost.reason}, while starting")
        return self._info

    def ask(self, verb: str, requests: Mapping[int, Any], **options: Any) -> dict[int, Lost]:
        """Send a request to the worker, and return `Lost` for slots whose episode is gone."""
        if self.ready and self._busy:  # an earlier call was interrupted before it received the answer
            self._replace("the answer of its worker was not awaited")
        self.await_ready()
        if verb == "start":
            self._episodes.update(requests)
        possible = {slot: request for slot, request in requests.items() if slot in self._episodes}
        if possible:
            self._send(verb, possible, **options)
        return {slot: Lost(reason=self._why_lost) for slot in requests if slot not in possible}

    def answers(self, slots: Mapping[int, Any]) -> dict[int, Any]:
        """Receive the answers for these slots; all are `Lost` if the worker failed."""
        if not self._busy:
            return {}
        try:
            answers: dict[int, Any] = self._receive(self._timeout)
            return answers
        except WorkerLostError as lost:
            self._replace(lost.reason)
            return {slot: Lost(reason=lost.reason) for slot in slots}

    def ask_to_close(self) -> None:
        """Ask the worker to close its environments, if it is alive."""
        if self.ready and not self._busy:
            self._send("close")
        else:
            self._worker.kill()

    def close(self) -> None:
        """Wait briefly for the worker to close its environments, then kill it."""
        if self.ready and self._busy:
            with contextlib.suppress(WorkerLostError, PirlError):
                self._receive(CLOSE_TIMEOUT)
        self._worker.kill()


class RemotePool(Pool):
    """An `EnvPool` over remote workers. Slot s lives in worker s % num_workers."""

    def __init__(
        self, build: Build, *, size: int, num_workers: int, timeout: float, start_timeout: float = START_TIMEOUT
    ) -> None:
        if not 1 <= num_workers <= size:
            raise ConfigError(
                f"{size} environments for {num_workers} workers", hint="give every worker at least one environment"
            )
        try:
            openings = [_request("open", build, len(range(i, size, num_workers))) for i in range(num_workers)]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvError(
                f"{build!r} cannot be sent to a worker: {error}",
                hint="give a configuration, a function of a module, or a functools.partial of one",
            ) from error
        self.size = size
        self._seats: list[_Seat] = []
        try:
            for opening in openings:
                self._seats.append(_Seat(self._launch, opening, timeout, start_timeout))
            self.info, *_ = [seat.await_ready() for seat in self._seats]
            self.restarts = sum(seat.restarts for seat in self._seats)
        except BaseException:
            self.close()
            raise

    def _launch(self) -> Worker:
        raise NotImplementedError(f"{type(self).__name__}._launch")

    def _answers(self, verb: str, requests: Mapping[int, Any], **options: Any) -> dict[int, Any]:
        if not self._seats:
            raise EnvError("this pool of environments is closed", hint="make a new one")
        seats = len(self._seats)
        parts: dict[int, dict[int, Any]] = {}
        for slot, request in requests.items():
            parts.setdefault(slot % seats, {})[slot // seats] = request
        found: dict[int, Any] = {}
        # Workers that are just starting come last, so that the others do not wait for their requests.
        for number in sorted(parts, key=lambda number: not self._seats[number].ready):
            lost = self._seats[number].ask(verb, parts[number], **options)
            found |= {slot * seats + number: answer for slot, answer in lost.items()}
        for number, part in parts.items():
            answers = self._seats[number].answers(part)
            found |= {slot * seats + number: answer for slot, answer in answers.items()}
        self.restarts = sum(seat.restarts for seat in self._seats)
        return {slot: found[slot] for slot in requests}

    def close(self) -> None:
        """End all workers."""
        for seat in self._seats:
            seat.ask_to_close()
        for seat in self._seats:
            seat.close()
        self._seats = []
