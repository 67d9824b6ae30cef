"""An error in one process ends all processes of a run, each with a message that names the cause.

The others may be blocked where no exception reaches them: in a collective, at a barrier, in a read. So each process
listens in a thread, through JAX's coordination service. A failing process announces its error and stays until the
others have left; a process that learns of a failure raises its own error, or its listener ends it.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import jax
import orbax.checkpoint as ocp

from pirl.errors import PirlError

PATIENCE = 10.0
"""Seconds for a process to end by itself after reporting that another one failed."""
_ASK_SECONDS = 1.0
_LAST_SECONDS = 5.0
"""Seconds for the others to print their error and exit."""
_LOST = re.compile(r"gloo|nccl|heartbeat|coordination.?service|(reset|closed) by peer|socket closed", re.IGNORECASE)
_HINT = "see its log, or the scheduler's; start all of them again with --resume auto: complete steps are untouched"
_numbers = count()


class DistributedError(PirlError):
    """Processes that failed to connect or to synchronise."""


class LostProcessError(DistributedError):
    """Another process of the run failed or died."""


@contextmanager
def all_alive() -> Iterator[None]:
    """End all processes together: announce this process's error, or name another's if that is the cause.

    All processes must enter these contexts in the same order.
    """
    if jax.process_count() == 1:
        yield
        return
    notices = Notices(ocp.multihost.get_jax_distributed_client())
    threading.Thread(target=notices.listen, name="pirl-failures", daemon=True).start()
    try:
        yield
    except BaseException as error:
        lost, first = _tells_of_loss(error), notices.failure()
        if first is None:
            notices.announce(f"lost another one: {_cause(error)}" if lost else f"failed: {_in_words(error)}")
        notices.leave()
        if not lost or jax.process_index() == 0:
            notices.wait_for_others()
        if first is not None and (lost or isinstance(error, DistributedError)):
            raise LostProcessError(f"{_this_process()}: {first}", hint=_HINT) from error
        if lost:
            raise LostProcessError(f"{_this_process()} lost another one: {_cause(error)}", hint=_HINT) from error
        raise
    finally:
        notices.leave()


class Notices:
    """Failure messages between the processes of a run."""

    def __init__(self, client: Any) -> None:
        self._client, self._place = client, f"pirl.failures/{next(_numbers)}/"
        self._left = threading.Event()

    def announce(self, what: str) -> None:
        """Announce this process's failure to the others."""
        self._set(f"failed/{jax.process_index():06}", f"process {jax.process_index()} {what}")

    def failure(self) -> str | None:
        """The message of the failed process of lowest rank; None if none has failed."""
        with suppress(jax.errors.JaxRuntimeError):  # the service died with process 0
            told = self._client.key_value_dir_get(f"{self._place}failed")
            return min(told)[1] if told else None
        return None

    def leave(self) -> None:
        """Announce that this process no longer waits for any other."""
        if not self._left.is_set():
            self._left.set()
            self._set(f"left/{jax.process_index():06}", "")

    def wait_for_others(self) -> None:
        """Wait until all have left. Process 0 exits last: it runs the service, without which JAX aborts the others."""
        end = time.monotonic() + 2 * PATIENCE
        with suppress(jax.errors.JaxRuntimeError):
            while len(self._client.key_value_dir_get(f"{self._place}left")) < jax.process_count():
                if time.monotonic() > end:
                    return
                time.sleep(_ASK_SECONDS)
        if jax.process_index() == 0:
            time.sleep(_LAST_SECONDS)

    def listen(self) -> None:
        """Thread body: end this process if another one failed and this one does not end by itself."""
        while not self._left.wait(_ASK_SECONDS):
            if (told := self.failure()) is None:
                continue
            if self._left.wait(PATIENCE / 4):  # it ends by itself
                return
            print(f"error: {_this_process()}: {told}\n  hint: {_HINT}", file=sys.stderr, flush=True)
            if not self._left.wait(PATIENCE):
                self.leave()
                self.wait_for_others()
                os._exit(1)

    def _set(self, key: str, word: str) -> None:
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{self._place}{key}", word, allow_overwrite=True)


def _tells_of_loss(error: BaseException) -> bool:
    return any(_LOST.search(text) for text in _chain(error))


def _cause(error: BaseException) -> str:
    return _chain(error)[-1].splitlines()[0][:300]


def _chain(error: BaseException) -> list[str]:
    return [str(one) for one in (error, error.__cause__, error.__context__) if one is not None]


def _in_words(error: BaseException) -> str:
    if isinstance(error, PirlError):
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return f"{type(error).__name__}: {error}"


def _this_process() -> str:
    return f"process {jax.process_index()} of {jax.process_count()}"
