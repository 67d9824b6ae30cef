"""A ladder: one simulator, imperfect demonstrations, and the methods that learn from them, run by pirl commands.

Every stage is a process with a log in the run's folder: record, norm-stats, then each row's training and evaluation. A
row may start from another row's weights; rows that are ready run in parallel. Finished stages are skipped and stopped
training runs resume: repeat the command until the table is full. Each evaluation is one line of results.jsonl.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pirl.data.inspection import inspect_dataset
from pirl.recipes import get_config
from pirl.rollout.evaluate import Rate
from pirl.rollout.record import num_recorded
from pirl.training.config import CosineSchedule
from pirl.tune.intervals import t_interval

DOCS = Path(__file__).parents[2] / "docs/results"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


@dataclass(frozen=True)
class Row:
    """One policy to measure."""

    name: str
    """Name of its folders."""
    title: str
    """Name in the table."""
    recipe: str
    """Recipe to train with."""
    start: str | None = None
    """Row whose weights it starts from."""
    settings: tuple[str, ...] = ()
    """Additional flags of `pirl train`."""
    of: str | None = None
    """Row whose trained weights it evaluates, instead of training."""
    acting: tuple[str, ...] = ()
    """Additional flags of `pirl eval`."""


DEMOS = Row("demos", "the demonstrations themselves", "")
"""The first line of a table; its success rate is known from recording."""


def rows_from_state(task: str, best: str) -> tuple[Row, ...]:
    """The rows that every ladder from state begins with; `best` titles the filter by return.

    All offline rows after BC make as many updates, at the same rate and batch size.
    """
    bc, rl = f"bc_{task}", f"acrlpd_{task}"
    config = get_config(rl)
    steps, schedule = str(config.num_train_steps), config.policy_schedule
    assert isinstance(schedule, CosineSchedule)
    alike = ("--pi0-lr", str(schedule.peak_lr), "--policy-schedule.decay-steps", steps, "--max-steps", steps)
    alike += ("--batch-size", str(config.batch_size))
    return (
        Row("untrained", "untrained (one update)", bc, settings=("--max-steps", "1")),
        Row("bc", "BC", bc),
        Row("bc_more", "BC, continued for as many updates as RL", bc, "bc", alike),
        Row("successes", "BC, then successes only", bc, "bc", ("--data.successes-only", *alike)),
        Row("filtered", f"BC, then the best {best} by discounted return", f"filtered_{task}", "bc"),
        Row("acrlpd", "**ACRLPD, offline**", rl, "bc"),
        Row("acrlpd_best", "– best of 8 by its critic", rl, of="acrlpd", acting=("--best-of", "8")),
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """The recorded task."""

    name: str
    """Name of its folders, its page and its results."""
    record: tuple[str, ...]
    """`pirl record`: the recipe and its flags, without episodes, seed and folder."""
    robot: str
    horizon: int
    rows: tuple[Row, ...]
    given: tuple[str, ...] = ()
    """Flags of every training run, such as the environment's task."""
    demos: int = 300
    """Default number of demonstrations."""


@dataclass(kw_only=True)
class Ladder:
    """One seed of a task, with its own demonstrations, weights, batches and rollouts."""

    task: Task
    run: Path
    seed: int = 0
    demos: int = 300
    episodes: int = 200
    """Test episodes of each evaluation."""
    share: float = 1.0
    """Share of each recipe's steps to train."""
    processes: int = field(default_factory=lambda: os.cpu_count() or 1)
    deadline: float = float("inf")
    """No stage starts after this time; running ones are stopped with a checkpoint and resumed by a later call."""
    films: int = 2
    """Successes and failures to film in each evaluation."""
    extra: tuple[str, ...] = ()
    """Additional flags of every training run and evaluation."""

    @property
    def folder(self) -> Path:
        return self.run / self.task.name / f"seed{self.seed}"

    @property
    def data(self) -> Path:
        return self.folder / "data" / self.task.name

    @property
    def stats(self) -> Path:
        return self.folder / "assets" / self.task.name

    def row(self, name: str) -> Row:
        return next(row for row in self.task.rows if row.name == name)

    def steps(self, row: Row) -> int:
        asked = [
            int(after) for flag, after in zip(row.settings, row.settings[1:], strict=False) if flag == "--max-steps"
        ]
        return max(1, round(self.share * (asked or [get_config(row.recipe).num_train_steps])[0]))

    def weights(self, row: Row) -> Path:
        return self.folder / "runs" / row.recipe / row.name / str(self.steps(row))

    def evaluation(self, row: Row) -> Path:
        return self.folder / "evaluations" / row.name

    # Stages

    def prepare(self) -> bool:
        """Make the demonstrations and their statistics."""
        if not (self.folder / "recorded").exists():
            there = num_recorded(self.data)
            words = ["record", *self.task.record, "--episodes", self.demos - there, "--seed", self.seed]
            words += ["--root", self.data, "--processes", self.processes, *(["--append"] if there else [])]
            if there < self.demos and not self.call("record", *words):
                return False
            success = inspect_dataset(self.data).success
            self.note(DEMOS.name, 0, Rate(successes=sum(map(bool, success)), trials=len(success)))
            (self.folder / "recorded").touch()
        if (self.stats / "norm_stats.json").exists():
            return True
        robot = ("--robot", self.task.robot, "--horizon", self.task.horizon)
        return self.call("norm-stats", "norm-stats", self.data, *robot, "--out", self.stats)

    def train(self, row: Row) -> bool:
        """Train one row."""
        if self.weights(row).is_dir():
            return True
        start = [] if row.start is None else ["--init-weights", self.weights(self.row(row.start))]
        places = ("--data-path", self.data, "--data.assets-dir", self.stats.parent)
        runs = ("--checkpoint.base-dir", self.folder / "runs", "--seed", self.seed, "--resume", "auto")
        words = [*places, *runs, *start, *self.task.given, *row.settings, *self.extra, "--max-steps", self.steps(row)]
        return self.call(f"train_{row.name}", "train", row.recipe, "--exp-name", row.name, *words)

    def evaluate(self, row: Row) -> bool:
        """Evaluate one row on the test states."""
        out, trained = self.evaluation(row), self.row(row.of or row.name)
        if not (out / "eval.json").exists():
            words = (
                "--episodes",
                self.episodes,
                "--out",
                out,
                "--overwrite",
                *(("--video", self.films) if self.films else ()),
            )
            if not self.call(f"eval_{row.name}", "eval", self.weights(trained), *words, *row.acting, *self.extra):
                return False
            result = json.loads((out / "eval.json").read_text())["result"]
            rate = Rate(successes=result["success"]["successes"], trials=result["success"]["trials"])
            self.note(row.name, self.steps(trained), rate, result.get("tasks"))
        return True

    def climb(self, jobs: int) -> bool:
        """Run all rows, `jobs` at a time; a row waits for the row that it starts from."""
        if not self.prepare():
            return False
        trained = {row.name: threading.Event() for row in self.task.rows}
        failed = threading.Event()
        room = threading.Semaphore(jobs)

        def do(row: Row) -> bool:
            needed = row.of or row.start
            while needed is not None and not trained[needed].wait(1):
                if failed.is_set():
                    return False
            with room:
                done = not failed.is_set() and (row.of is not None or self.train(row))
                trained[row.name].set() if done else failed.set()
                return done and self.evaluate(row)

        with ThreadPoolExecutor(len(self.task.rows)) as pool:
            ended = list(pool.map(do, self.task.rows))
        return all(ended)

    def call(self, log: str, *words: object) -> bool:
        """Run a pirl command; returns False if it failed or time is up."""
        if time.time() > self.deadline:
            return False
        command = [sys.executable, "-m", "pirl", *map(str, words)]
        path = self.folder / "logs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        began = time.time()
        with path.open("ab") as output:
            output.write(f"$ pirl {shlex.join(command[3:])}\n".encode())
            output.flush()
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            left = self.deadline - began
            try:
                code = process.wait(None if left == float("inf") else left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                code = process.wait()
        ended = "done" if code == 0 else f"ended with {code}"
        say(f"{self.task.name} seed {self.seed}: {log} {ended}, {time.time() - began:.0f} s")
        return code == 0

    def note(self, method: str, steps: int, rate: Rate, tasks: dict[str, Any] | None = None) -> None:
        """Add a success rate to the run's results."""
        line = {"task": self.task.name, "seed": self.seed, "method": method, "demos": self.demos, "steps": steps}
        line |= {"episodes": rate.trials, "successes": rate.successes, "tasks": tasks, "device": device()}
        with (self.run / "results.jsonl").open("a") as file:
            file.write(json.dumps(line | {"time": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")


def device() -> str:
    """The device that jax computes on."""
    if shutil.which("nvidia-smi") is None:
        return f"{os.cpu_count()} CPU cores"
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or f"{os.cpu_count()} CPU cores"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# The page


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """All results; the later of two with the same method and seed."""
    lines = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    latest = {(x["task"], x["method"], x["seed"]): x for x in sorted(lines, key=lambda x: x["time"])}
    return list(latest.values())


def table(results: Sequence[dict[str, Any]], rows: Sequence[Row]) -> str:
    """Markdown: each row's success by seed with Wilson's 95 % interval, the mean over seeds and its interval."""
    by: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for result in results:
        by[result["method"]][result["seed"]] = result
    seeds = sorted({seed for found in by.values() for seed in found})
    lines = [["method", "updates", *(f"seed {seed}" for seed in seeds), "mean, 95 % interval"]]
    lines.append(["---"] * len(lines[0]))
    for row in (DEMOS, *rows):
        found = by[row.name]
        if not found:
            continue
        rates = {seed: Rate(successes=x["successes"], trials=x["episodes"]) for seed, x in found.items()}
        cells = [_cell(rates[seed]) if seed in rates else "–" for seed in seeds]
        updates = f"{next(iter(found.values()))['steps']:,}"
        lines.append([row.title, updates, *cells, _mean([rate.value for rate in rates.values()])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(rate: Rate) -> str:
    low, high = rate.interval
    return f"{rate.value:.3f} [{low:.2f}, {high:.2f}]"


def _mean(rates: list[float]) -> str:
    mean, low, high = t_interval(rates)
    if len(rates) < 2:
        return f"{mean:.3f} (one seed)"
    return f"{mean:.3f} ({max(0.0, low):.2f}–{min(1.0, high):.2f})"


def write(page: Path, raw: Path, found: Path, rows: dict[str, Sequence[Row]], titles: dict[str, str]) -> None:
    """Add a run's results to the raw file beside the page, and rewrite the tables between the page's markers."""
    known = set(raw.read_text().splitlines()) if raw.exists() else set()
    new = [line for line in found.read_text().splitlines() if line not in known] if found.exists() else []
    if new:
        raw.parent.mkdir(parents=True, exist_ok=True)
        with raw.open("a") as file:
            file.write("\n".join(new) + "\n")
    results = read([raw])
    parts = []
    for task, these in rows.items():
        of_task = [result for result in results if result["task"] == task]
        if of_task:
            episodes = sorted({result["episodes"] for result in of_task if result["method"] != DEMOS.name})
            head = f"### {titles[task]}\n\nSuccess on {' or '.join(map(str, episodes))} test states."
            parts.append(f"{head}\n\n{table(of_task, these)}")
    text = page.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}\n" + "\n".join(parts) + after)
