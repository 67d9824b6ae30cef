"""The loop's child processes. They end with it, also after `kill -9` (on Linux)."""

import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pirl.errors import PirlError

START_SECONDS = 1800.0
"""Longest time in seconds for a server to load and compile."""
_TAIL = 20
_LAUNCHER = (
    sys.executable,
    "-c",
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 15)\n"  # PR_SET_PDEATHSIG, SIGTERM
    "os.execvp(sys.argv[1], sys.argv[1:])",
)
"""Starts a command that gets SIGTERM when this process dies for any reason (Linux); `preexec_fn` is not thread-safe."""


class ProcessError(PirlError):
    """A command of the loop failed."""


def run(command: Sequence[str], log: Path) -> None:
    """Run a command to completion, appending its output to `log`; raises ProcessError if it fails."""
    with log.open("ab") as output:
        output.write(f"\n$ {shlex.join(command)}\n".encode())
        output.flush()
        process = _start(command, output)
        try:
            code = process.wait()
        finally:
            _stop(process)
    if code:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
        raise ProcessError(
            f"{shlex.join(command)} ended with {code}; the last lines of {log}:\n{said}",
            hint="fix it, and run the same `pirl improve` again: it continues here",
        )


def pirl(*words: str) -> list[str]:
    """The command line of a pirl command, with this interpreter."""
    return [sys.executable, "-m", "pirl", *words]


@contextmanager
def serving(checkpoint: str, words: Sequence[str], *, host: str, port: int, log: Path) -> Iterator[str]:
    """Run `pirl serve` inside the context; yields its local address once it is healthy."""
    port = port or free_port()
    command = pirl("serve", checkpoint, "--host", host, "--port", str(port), *words)
    with log.open("ab") as output:
        output.write(f"\n$ {shlex.join(command)}\n".encode())
        output.flush()
        process = _start(command, output)
        try:
            _await_health(process, port, log)
            yield f"ws://127.0.0.1:{port}"
        finally:
            _stop(process)


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fill(command: str, values: Mapping[str, str]) -> list[str]:
    """Split the robot's command into words, then fill the placeholders, so that values are never split."""
    return [word.format_map(values) for word in shlex.split(command)]


def _await_health(process: subprocess.Popen, port: int, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        if process.poll() is not None or time.monotonic() > until:
            said = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
            raise ProcessError(f"the policy server did not start; the last lines of {log}:\n{said}")
        time.sleep(0.1)


def _start(command: Sequence[str], output: IO[bytes]) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            [*_LAUNCHER, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise ProcessError(f"{shlex.join(command)}: {error}", hint="check the robot's command") from error


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
