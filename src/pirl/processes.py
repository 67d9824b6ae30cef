"""Child processes that end with their parent, even after `kill -9`, when no handler runs.

Also returns the freed memory of long-lived processes to the system.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading

PARENT_VARIABLE = "PIRL_PARENT"
"""Environment variable with the descriptor of a pipe's read end; the pipe closes when the parent ends."""
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """End this process when its parent's pipe (`PIRL_PARENT`) closes; does nothing without one."""
    handle = os.environ.pop(PARENT_VARIABLE, "")
    if handle.isdecimal():
        with contextlib.suppress(OSError):  # a wrapper script closed the pipe: no parent to follow
            os.set_inheritable(int(handle), False)
            end_with_parent(int(handle))
            if sys.platform == "linux":  # works even while this process is stopped or stuck in a driver
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent(handle: int) -> None:
    """Watch a pipe or socket from a thread; exit the process as soon as its other end closes."""
    threading.Thread(target=_wait_and_exit, args=(handle,), name="pirl-parent", daemon=True).start()


def return_freed_memory() -> None:
    """Return freed memory to the system (`malloc_trim`); does nothing without glibc.

    Compiling a step and writing a checkpoint allocate from many threads, and glibc keeps what they free: gigabytes
    after a compilation, and growing. A trainer that used 0.2 GB held 2.4. Fragments in its arenas stay; the environment
    variable MALLOC_ARENA_MAX bounds their number.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _wait_and_exit(handle: int) -> None:
    hangup = select.poll()
    hangup.register(handle, 0)
    hangup.poll()
    os._exit(1)
