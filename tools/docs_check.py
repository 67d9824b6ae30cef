"""`make docs-check`: runs the commands and Python blocks of README*.md and docs/*.md, so that they cannot go stale.

`tests/test_docs.py` checks that they parse; this runs them in a temporary folder, at reduced size. docs_tables.py
defines what is reduced or left out, which is reported at the end. Everything else runs unchanged and must succeed.

    python tools/docs_check.py                         everything
    python tools/docs_check.py docs/data.md            a page (and the quickstart, on whose results the others rest)

The quickstart runs first, with a few datasets. Every other page runs in a copy of the resulting folder, several at a
time.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from docs_tables import ALL_PAGES, ALONE, DATASETS, GIVEN, INSTEAD, LEFT_OUT, LOOKS, TESTED, make_dataset

from pirl.errors import ConfigError, PirlError
from pirl.models.config import Pi0Config
from pirl.paths import pirl_home
from pirl.recipes import get_config, load

ROOT = Path(__file__).parents[1]
BASE = "docs/quickstart.md"
LIMIT = 1200
"""Time limit of a command in seconds."""
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
STEP = re.compile(r"checkpoints/(\w+)/(\w+)/(\d+)")


@dataclass(frozen=True)
class Done:
    """One command, or Python block, of a page."""

    page: str
    command: str
    ran: str = ""
    """The command that was run: the original or a reduced one."""
    why: str = ""
    """Reason why it was not run."""
    problem: str = ""
    """Failure message."""


def commands(page: str) -> Iterator[str]:
    """A page's commands and Python blocks in order; a script that begins with #! is one command."""
    for language, code in FENCE.findall((ROOT / page).read_text()):
        if code.lstrip().startswith("#!") or (language == "python" and page not in TESTED):
            yield code
        elif language in ("bash", "sh", ""):
            lines = (re.sub(r"(^|\s+)#\s.*", "", line).strip() for line in code.replace("\\\n", " ").splitlines())
            yield from (line for line in lines if line.startswith("pirl ") or (line and language))


def smaller(command: str, folder: Path) -> str:
    """The command with reduced sizes."""
    text = STEP.sub(r"checkpoints/\1/\2", command)  # the latest step, which reduced runs change
    for pattern, instead in INSTEAD.items():
        text = re.sub(pattern, instead, text)
    text = re.sub(r" --episodes (\d+)", lambda found: f" --episodes {max(4, int(found[1]) // 25)}", text)
    hundredth = r" --(max-steps|online\.start-step) (\d+)"
    text = re.sub(hundredth, lambda found: f" --{found[1]} {max(1, int(found[2]) // 100)}", text)
    found = re.match(r"pirl (?:train|tune) (\S+)(?!.*(--help|--show-space))", text)
    if not found or found[1].startswith("checkpoints/"):  # a resumed run has its own settings
        return text
    recipe = found[1]
    config = load(str(folder / recipe) if recipe.endswith(".yaml") else recipe)
    full_size = isinstance(config.model, Pi0Config) and config.model.vlm.width > 64
    if full_size and "--debug" not in text:
        text += " --debug"
    elif "--debug" not in text and "--variant" not in text:
        text += " --variant quick"
    if "--max-steps" not in text and "--variant" not in command:
        text += f" --max-steps {2 if '--debug' in text else max(1, config.num_train_steps // 100)}"
    return text + " --online.start-step 2 --online.episodes 8" * (config.online is not None and "--online" not in text)


def anew(text: str) -> str:
    """The command adapted to results left by another page or an alternative line."""
    if found := re.match(r"pirl record (?!.*--append).*--repo-id (\S+)", text):
        return f"rm -rf $HF_LEROBOT_HOME/{found[1]} && {text}"
    if found := re.match(r"pirl recipes cp \S+ (\S+)", text):
        return f"rm -f {found[1]} && {text}"
    if re.match(
        r"pirl (train(?! checkpoints/)|eval|norm-stats|export)\b(?!.*--(resume|dry-run|help|overwrite)\b)", text
    ):
        return f"{text} --overwrite"
    return text


def execute(text: str, folder: Path, home: Path) -> str:
    """Run a command; returns the end of its output if it failed, else ""."""
    devices = " --xla_force_host_platform_device_count=8" if "--mesh.fsdp 8" in text else ""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_LEROBOT_HOME": str(folder / "lerobot"),
        **{"PIRL_HOME": str(home), "OPENPI_DATA_HOME": str(home / "openpi"), "HF_HUB_OFFLINE": "1"},
        "JAX_COMPILATION_CACHE_DIR": str(pirl_home() / "compiled"),  # the next check is twice as fast
        **{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_backend_optimization_level=0{devices}", "BROWSER": "true"},
    }
    line = ["bash", "-euo", "pipefail", "-c", text]
    if "\n" in text and not text.startswith("#!"):
        line = [sys.executable, "-c", text]
    try:
        done = subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took more than {LIMIT} s"
    return "" if done.returncode == 0 else f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-1500:]}"


def wrong_step(command: str) -> str:
    """A checkpoint number in the command that differs from its recipe's last step."""
    for recipe, run, step in STEP.findall(command):
        try:
            last = get_config(recipe).num_train_steps
        except ConfigError as error:
            return error.message
        if int(step) != last:
            return f"checkpoints/{recipe}/{run}/{step}: the last step of {recipe} is {last}"
    return ""


class Check:
    """One check; pages run in threads."""

    def __init__(self, work: Path) -> None:
        self.work, self.results = work, list[Done]()
        self._problems: dict[object, Future[str]] = {}
        """Failure messages ("" for success), keyed by a single command or by a page's commands up to it."""
        self._lock = threading.Lock()
        self._base: set[str] = set()
        """Commands of the quickstart, whose results the other pages start from."""

    def page(self, page: str, folder: Path) -> None:
        """Run every command of a page in a prepared folder."""
        self.given(page, folder)
        every = list(commands(page))
        for number, command in enumerate(every, 1):
            why = left_out(command)
            if not why and ALONE.match(command):
                continue
            if why or (problem := wrong_step(command)):
                self.results.append(Done(page, command, why=why, problem="" if why else problem))
                continue
            try:
                text = smaller(command, folder)
            except (PirlError, OSError) as error:
                self.results.append(Done(page, command, problem=str(error)))
                continue
            alike = page == BASE or leads_nowhere(text, every[number:])
            problem = self.run(text, folder, key=text if alike or text in self._base else tuple(every[:number]))
            self.results.append(Done(page, command, ran=text, problem=problem))

    def given(self, page: str, folder: Path) -> None:
        """Create what the page takes for granted."""
        for text in GIVEN.get(page, ()):
            if problem := self.run(text, folder, key=(page, text)):
                self.results.append(Done(page, text, ran=text, problem=problem))

    def run(self, text: str, folder: Path, *, key: object) -> str:
        """Run a command unless the same is done or running; returns the failure message."""
        with self._lock:
            known, mine = self._problems.get(key), Future[str]()
            if known is None:
                self._problems[key] = mine
        if known is not None:
            return known.result()
        began = time.monotonic()
        problem = execute(anew(text), folder, self.work / "home")
        said = "FAILED" if problem else "ok"
        print(f"{said:6} {time.monotonic() - began:5.0f} s  {folder.name}: {first_line(text)}", flush=True)
        mine.set_result(problem)
        return problem

    def alone(self, text: str) -> None:
        """Run a command in its own folder."""
        folder = Path(tempfile.mkdtemp(prefix="alone_", dir=self.work))
        (folder / "examples").symlink_to(ROOT / "examples")
        self.run(text, folder, key=text)

    def everything(self, pages: list[str], workers: int) -> None:
        """Run the quickstart, then the other pages, in parallel with independent commands."""
        base = self.work / "quickstart"
        for name, robot in DATASETS.items():
            make_dataset(base / name, robot)
        alone = [
            (page, command, smaller(command, base))
            for page in pages
            for command in commands(page)
            if ALONE.match(command) and not left_out(command)
        ]
        with ThreadPoolExecutor(workers) as pool:
            first = pool.submit(self.page, BASE, base)
            started = [pool.submit(self.alone, text) for text in dict.fromkeys(text for *_, text in alone)]
            first.result()
            self._base = {one.ran for one in self.results}
            self.given(ALL_PAGES, base)
            longest = sorted(pages, key=lambda page: -sum(text.startswith("pirl t") for text in commands(page)))
            for page in longest:
                if page != BASE and any(commands(page)):
                    folder = self.work / Path(page).stem
                    shutil.copytree(base, folder, symlinks=True)
                    started.append(pool.submit(self.page, page, folder))
            for one in started:
                one.result()
        self.results += [
            Done(page, command, ran=text, problem=self._problems[text].result()) for page, command, text in alone
        ]


def leads_nowhere(text: str, later: list[str]) -> bool:
    """Whether no later command on the page uses this command's results; then it needs to run only once."""
    found = re.match(r"pirl (train|tune) (\w+) (?!.*--resume)(?:.*--(?:exp-name|study) (\S+))?", text)
    if not found:
        return bool(LOOKS.search(text))
    name = found[3] or {"train": "run", "tune": "tune"}[found[1]]
    goes_on = re.compile(rf"/{get_config(found[2]).name}/{name}|{found[2]} .*--resume")
    return not any(goes_on.search(command) for command in later)


def left_out(command: str) -> str:
    """The reason why a command is not run; "" if it is."""
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, command)), "")


def first_line(command: str) -> str:
    """A block's first line, to identify it."""
    return command.strip().splitlines()[0]


def report(results: list[Done]) -> int:
    """Print what was run, reduced and left out; returns the exit code."""
    groups = {
        "run as it stands": [one for one in results if one.ran == one.command and not one.problem],
        "run smaller": [one for one in results if one.ran not in ("", one.command) and not one.problem],
        "not run": [one for one in results if one.why],
        "FAILED": [one for one in results if one.problem],
    }
    for name, group in groups.items():
        print(f"\n== {name}: {len(group)}")
        for one in group:
            print(f"{one.page}: {first_line(one.command)}")
            run = f"as: {first_line(one.ran)}" if one.ran not in ("", one.command) else ""
            for text in filter(None, (run, one.why, one.problem)):
                print("    " + text.strip().replace("\n", "\n    "))
    return int(bool(groups["FAILED"]))


def main() -> int:
    """Check the named pages, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="such as docs/data.md (default: all)")
    workers = max(2, (os.cpu_count() or 2) // 2)
    parser.add_argument("--workers", type=int, default=workers, metavar="N", help=f"pages at a time ({workers})")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this folder, and leave it there")
    args = parser.parse_args()
    # Translated pages have their originals' commands: docs/translations.py.
    english = (path for path in sorted((ROOT / "docs").glob("*.md")) if not path.name.endswith(".zh.md"))
    found = [*sorted(ROOT.glob("README*.md")), *english]
    pages = args.pages or [path.relative_to(ROOT).as_posix() for path in found]
    with tempfile.TemporaryDirectory() as temporary:
        check = Check(args.keep or Path(temporary))
        check.everything(pages, args.workers)
        return report(check.results)


if __name__ == "__main__":
    sys.exit(main())
