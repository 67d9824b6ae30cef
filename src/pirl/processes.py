"""Child processes that end with their parent, however it ends: also by `kill -9`, where no handler runs.

Also returns freed memory of long-lived processes to the system.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading

PARENT_VARIABLE = "PIRL_PARENT"
"""Number of a pipe's reading end; nothing is ever written to it, and it closes with the parent."""
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """In a process whose environment names a pipe: end when its other end closes."""
    handle = os.environ.pop(PARENT_VARIABLE, "")
    if handle.isdecimal():
        with contextlib.suppress(OSError):  # closed on the way here, by a wrapper script: nobody to follow
            os.set_inheritable(int(handle), False)
            end_with_parent(int(handle))
            if sys.platform == "linux":  # also while it is stopped or stuck in a driver
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent(handle: int) -> None:
    """Watch a pipe or socket from a thread, and exit when its other end closes, whatever else this process does."""
    threading.Thread(target=_wait_and_exit, args=(handle,), name="pirl-parent", daemon=True).start()


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library is glibc; elsewhere nothing happens.

    Compiling a step and writing a checkpoint allocate from many threads. glibc keeps what they free, gigabytes after a
    compilation, and that grows: a trainer that used 0.2 GB held 2.4. Fragments in its arenas stay; the environment
    variable MALLOC_ARENA_MAX bounds their number.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _wait_and_exit(handle: int) -> None:
    hangup = select.poll()
    hangup.register(handle, 0)
    hangup.poll()
    os._exit(1)
