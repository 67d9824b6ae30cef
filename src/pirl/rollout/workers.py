"""Environments in other processes of this machine.

A worker is a fresh interpreter: fork would break JAX's threads, and `multiprocessing`'s spawn imports the main script
again (jax included) and recurses if the script has no `__main__` guard.
"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from pirl.processes import end_with_parent
from pirl.rollout.remote import ONE_THREAD, Host, RemotePool, WorkerLostError

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from pirl.rollout.workers import serve; serve(int(sys.argv[1]))"
"""Code for the new interpreter: takes over this one's `sys.path`, then serves."""


class ProcessPool(RemotePool):
    """Environments in `num_workers` processes. A process that dies, hangs longer than `timeout` seconds or does not
    start within `start_timeout` is replaced; its slots answer `Lost`.
    """

    def _launch(self) -> "ProcessWorker":
        return ProcessWorker()


class ProcessWorker:
    """A process with environments, at the other end of a pipe."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a simulator's output must not mix with results on stdout
                env=os.environ | ONE_THREAD,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C reaches only the parent, and the group's children die together
            )

    def send(self, request: bytes) -> None:
        """Send a request. If the worker is dead, `receive` raises."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(request)

    def receive(self, timeout: float) -> bytes:
        """The answer; raises WorkerLostError with the cause if the process is gone."""
        try:
            if self._connection.poll(timeout):
                return self._connection.recv_bytes()
        except (EOFError, OSError):
            self.kill()
            raise WorkerLostError(_cause_of_death(self._process.returncode)) from None
        raise TimeoutError

    def kill(self) -> None:
        """Kill the process and its children; an ended process keeps its exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver call; it dies when that returns
                self._process.wait(5)
        self._connection.close()


def _cause_of_death(code: int | None) -> str:
    if code is None:
        return "its worker closed the connection"
    if code >= 0:
        return f"its worker ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"its worker was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def serve(handle: int) -> None:
    """Main loop of a worker: answer requests until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    faulthandler.enable()
    os.set_inheritable(handle, False)
    end_with_parent(handle)  # from a thread: a hanging simulator would not notice
    host = Host()
    with Connection(handle) as connection, contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(host.answer(connection.recv_bytes()))
