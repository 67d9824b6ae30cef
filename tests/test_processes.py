"""A process ends with the one that started it, also where that one was killed."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import os, signal, sys, time
from pirl.processes import follow_parent
follow_parent()
assert "PIRL_PARENT" not in os.environ
print(os.getpid(), flush=True)
if "stopped" in sys.argv:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
listening, _ = os.pipe()
subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], *sys.argv[2:]],
    env=os.environ | {"PIRL_PARENT": str(listening)},
    pass_fds=[listening],
)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ends_with_parent(*words: str) -> bool:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, *words], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if "stopped" in words:
        while Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.01)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 20
    while not gone(child) and time.monotonic() < end:
        time.sleep(0.01)
    if gone(child):
        return True
    os.kill(child, signal.SIGKILL)
    return False


def test_a_child_ends_with_its_parent() -> None:
    assert ends_with_parent()


def test_a_stopped_child_ends_with_its_parent() -> None:
    assert sys.platform != "linux" or ends_with_parent("stopped")


SCATTERED = """
import ctypes
import psutil
from pirl.processes import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
mib = lambda: psutil.Process().memory_info().rss / 2**20
before = mib()
blocks = [libc.malloc(8192) for _ in range(12_000)]
for block in blocks:
    ctypes.memset(block, 1, 8192)
for number, block in enumerate(blocks):
    if number % 100:  # what stays keeps the heap from shrinking at its end
        libc.free(block)
kept = mib() - before
return_freed_memory()
print(kept, mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed like this")
def test_freed_memory_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", SCATTERED], capture_output=True, text=True, check=True)
    kept, after = map(float, done.stdout.split())
    assert kept > 60
    assert after < 20
