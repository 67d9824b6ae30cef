"""Set LIBERO up and check it: `python -m pirl.envs.libero_install`; `--check` installs nothing.

LIBERO's own requirements include its training code, so three packages are installed without dependencies, and its
assets are a separate download. Completed steps are skipped; a line per step reports the result.
"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import get_args

from pirl.envs.config import LiberoSuite
from pirl.envs.libero_setup import DOWNLOAD, PINNED, check_packages, find_assets, load_tasks, prepare
from pirl.errors import EnvError, PirlError


def packages() -> str:
    """Names of the pinned packages; raises if some are missing."""
    check_packages()
    return " ".join(PINNED)


Step = tuple[str, Callable[[], str], tuple[list[str], ...]]
"""Name, check (returns a result to print, or raises), and python's argument lists that repair it."""
STEPS: tuple[Step, ...] = (
    (
        "packages",
        packages,
        (["-m", "pip", "install", "pirl[libero]"], ["-m", "pip", "install", "--no-deps", *PINNED]),
    ),
    ("assets", lambda: str(find_assets(None)), (["-c", DOWNLOAD],)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Install what is missing, then check everything; returns 0 if LIBERO works."""
    parser = argparse.ArgumentParser(prog="python -m pirl.envs.libero_install", description=__doc__)
    parser.add_argument("--check", action="store_true", help="install and download nothing")
    install = not parser.parse_args(argv).check
    done = [_done(name, check, repairs if install else ()) for name, check, repairs in STEPS]
    return 0 if all(done) and _done("tasks", tasks) else 1


def _done(name: str, check: Callable[[], str], repairs: Sequence[Sequence[str]] = ()) -> bool:
    """Check a step; if it fails, repair it and check again. Prints the result."""
    try:
        found = check()
    except (PirlError, ImportError) as error:
        if not repairs:
            message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "pip install 'pirl[libero]'")
            print(f"✗ {name}: {message}\n  to repair: {hint}")
            return False
        for words in repairs:
            command = [sys.executable, *words]
            print("$", *command, flush=True)
            if subprocess.run(command, check=False).returncode:
                print(f"✗ {name}: that command failed; its own message is above")
                return False
        importlib.invalidate_caches()
        return _done(name, check)
    print(f"✓ {name}: {found}")
    return True


def tasks() -> str:
    """Load the tasks of every suite; raises if goals or initial states are missing on disk."""
    prepare(None)
    counts = {suite: len(load_tasks(suite)) for suite in get_args(LiberoSuite)}
    if not all(counts.values()):
        raise EnvError(f"suites without tasks: {counts}", hint=f"install {PINNED[-1]} again")
    return ", ".join(f"{suite} {count}" for suite, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
