"""Set LIBERO up and check it: `python -m pirl.envs.libero_install`; `--check` installs nothing.

LIBERO's own requirements include its training code, so three packages are installed without dependencies, and its
assets are a separate download. Steps that are done already are skipped; at the end each line says what works.
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
    """The packages, or an error that names those that are missing."""
    check_packages()
    return " ".join(PINNED)


Step = tuple[str, Callable[[], str], tuple[list[str], ...]]
"""Name, check (returns what it found or raises), and the arguments of python that repair it."""
STEPS: tuple[Step, ...] = (
    (
        "packages",
        packages,
        (["-m", "pip", "install", "pirl[libero]"], ["-m", "pip", "install", "--no-deps", *PINNED]),
    ),
    ("assets", lambda: str(find_assets(None)), (["-c", DOWNLOAD],)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Install what is missing, then check everything; 0 if LIBERO can be used."""
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
    """Load the tasks of every suite: their goals and initial states must be on the disk."""
    prepare(None)
    counts = {suite: len(load_tasks(suite)) for suite in get_args(LiberoSuite)}
    if not all(counts.values()):
        raise EnvError(f"suites without tasks: {counts}", hint=f"install {PINNED[-1]} again")
    return ", ".join(f"{suite} {count}" for suite, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
