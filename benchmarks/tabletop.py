"""The tables of docs/results/tabletop.md: success of every method on the embedded tabletop, on many seeds.

    python benchmarks/tabletop.py                              the main rows on seeds 0, 1, 2; 10 CPU minutes each
    python benchmarks/tabletop.py --seeds 3 4                  two more; another process may do others meanwhile
    python benchmarks/tabletop.py --rows more stress           distillation, RIPT, online; wrong labels, little data
    python benchmarks/tabletop.py --level stitch               where no episode that begins at the table succeeds
    python benchmarks/tabletop.py --quick                      a tenth of the steps: does the program work?

A seed determines demonstrations, initial weights, batches and rollouts; its first rows are those of `pirl demo --seed
N`. All are evaluated on the same 400 test states. After an interruption, repeat the command: it skips finished rows and
resumes. The table (means over seeds with Student's t intervals) is printed, and written beside the runs as table.md and
results.json.
"""

import argparse
import json
import shlex
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pirl.agents.agent import Agent, Lesson
from pirl.cli.app import main as pirl
from pirl.names import NEXT_DONE, NEXT_REWARD, NEXT_SUCCESS, NEXT_TRUNCATED
from pirl.paths import pirl_home
from pirl.recipes import get_config
from pirl.records import Rollout
from pirl.rollout.record import num_recorded
from pirl.tune.intervals import t_interval

FILTERED = (
    "--data.successes-only",
    *("--freeze", "vlm_frozen", "--pi0-lr", "7e-4", "--policy-schedule.decay-steps", "1200"),
)
"""Further imitation of the successes alone, as in `pirl demo`."""
SILENT = ("--evaluation.interval", "100000", "--evaluation.episodes", "8", "--evaluation.films", "0")
"""No evaluation during training: it costs time and changes no weights."""


@dataclass(frozen=True)
class Row:
    """A row of the table: one evaluated run."""

    title: str
    recipe: str = ""
    """Recipe to train with; empty: evaluates the weights of row `after` with other settings."""
    settings: tuple[str, ...] = ()
    steps: int | None = None
    """Training steps; None: the recipe's."""
    data: str = "tabletop"
    after: str | None = "imitation"
    """Row whose weights it starts from; None: random initial weights."""
    acts: tuple[str, ...] = ()
    """Settings of the evaluation."""


@dataclass(frozen=True)
class Data:
    """A set of demonstrations."""

    episodes: int = 1500
    record: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    """Settings of the environment, also for training and evaluation."""


DATA = {
    "tabletop": Data(),
    "perfect": Data(record=("--dials", "wrong=0", "wrong_block=0", "detour=0", "early=0", "handed=0")),
    "labels_5": Data(record=("--dials", "mislabelled=0.05")),
    "labels_10": Data(record=("--dials", "mislabelled=0.1")),
    "demos_50": Data(episodes=50),
    "demos_200": Data(episodes=200),
    "slips": Data(env=("--env.slip", "0.3")),
}
BEST = ("--best-of", "8")
MAIN = {
    "imitation": Row("BC", "bc_tabletop", after=None),
    "imitation_of_successes": Row("BC, success-filtered", "bc_tabletop", FILTERED, 1200),
    "filtered": Row("BC, filtered by discounted return", "filtered_tabletop"),
    "continued": Row("BC, continued for as many updates", "acrlpd_tabletop", ("--agent.actor", "best_of_n")),
    "continued,_best_of_8": Row("– the same, best of 8 by a critic", after="continued", acts=BEST),
    "ACRLPD": Row("**ACRLPD**", "acrlpd_tabletop"),
    "ACRLPD,_best_of_8": Row("– the same, best of 8", after="ACRLPD", acts=BEST),
    "ACRLPD_shuffled": Row("control: ACRLPD, outcomes shuffled", "acrlpd_tabletop", data="shuffled"),
}
"""Folder of the evaluation -> row."""
TIMELESS = ("--agent.gate", "None", "--agent.discount", "0.999")
MORE = {
    "distill": Row("ACRLPD, `distill`", "acrlpd_tabletop", ("--agent.actor", "distill")),
    "online": Row("ACRLPD, online", "acrlpd_tabletop_online"),
    "RIPT": Row("BC, then RIPT", "ript_tabletop"),
    "ACRLPD_then_RIPT": Row("**ACRLPD, then RIPT**", "ript_tabletop", after="ACRLPD"),
    "shuffled_ungated": Row(
        "control: shuffled, without a gate",
        "acrlpd_tabletop",
        ("--agent.gate", "None"),
        data="shuffled",
    ),
    "shuffled_timeless": Row("– the same, γ 0.999", "acrlpd_tabletop", TIMELESS, data="shuffled"),
    "RIPT_shuffled": Row("control: RIPT, outcomes of a coin", "ript_tabletop"),
}
STRESS = {
    "labels_5": Row("ACRLPD, 5 % of the labels wrong", "acrlpd_tabletop", data="labels_5"),
    "labels_10": Row("ACRLPD, 10 % of the labels wrong", "acrlpd_tabletop", data="labels_10"),
    "BC_demos_50": Row("BC, 50 demonstrations", "bc_tabletop", data="demos_50", after=None),
    "demos_50": Row("ACRLPD, 50 demonstrations", "acrlpd_tabletop", data="demos_50", after="BC_demos_50"),
    "BC_demos_200": Row("BC, 200 demonstrations", "bc_tabletop", data="demos_200", after=None),
    "demos_200": Row("ACRLPD, 200 demonstrations", "acrlpd_tabletop", data="demos_200", after="BC_demos_200"),
    "BC_slips": Row("BC, random physics", "bc_tabletop", data="slips", after=None),
    "slips": Row("ACRLPD, random physics", "acrlpd_tabletop", data="slips", after="BC_slips"),
}
TWICE = ("--policy-schedule.decay-steps", "3200")
STITCH = {
    "imitation": MAIN["imitation"],
    "imitation_of_successes": Row("BC, success-filtered", "bc_tabletop", FILTERED, 1200),
    "filtered": Row("BC, filtered by return", "filtered_tabletop", ("--agent.share", "0.2", *TWICE), 3200),
    "MC": Row("ACRLPD, observed returns only", "acrlpd_tabletop", ("--agent.mc-steps", "3200", *TWICE), 3200),
    "RECAP": Row("RECAP", "recap_tabletop", TWICE, 3200),
    "ACRLPD": Row("**ACRLPD**", "acrlpd_tabletop", TWICE, 3200),
    "ACRLPD,_best_of_8": MAIN["ACRLPD,_best_of_8"],
    "ACRLPD_shuffled": Row("control: ACRLPD, outcomes shuffled", "acrlpd_tabletop", TWICE, 3200, data="shuffled"),
    "perfect": Row("BC on perfect demonstrations", "bc_tabletop", data="perfect", after=None),
}
"""Twice the demonstrations and updates: there are two choices to learn, and one of them by bootstrapping alone."""
ROWS = {"easy": {"main": MAIN, "more": MORE, "stress": STRESS}, "stitch": {"main": STITCH}}


@dataclass(frozen=True)
class Seed:
    """One seed's folder and runs."""

    folder: Path
    seed: int
    level: str = "easy"
    quick: bool = False

    @property
    def rows(self) -> dict[str, Row]:
        """Every row of the level."""
        return ALL[self.level]

    def run(self, name: str) -> None:
        """Train and evaluate a row unless it is finished."""
        row = self.rows[name]
        if not self.result(name).is_file():
            weights = self.trained(name if row.recipe else str(row.after))
            episodes = "40" if self.quick else "400"
            call(["eval", str(weights), "--episodes", episodes, "--out", str(self.result(name).parent), *row.acts])

    def trained(self, name: str) -> Path:
        """A row's weights; trains them if missing."""
        row = self.rows[name]
        whole = row.steps or get_config(row.recipe).num_train_steps
        run = self.folder / "runs" / row.recipe / name
        product = run / str(max(1, whole // 10) if self.quick else whole)
        if product.is_dir():
            return product
        start = () if row.after is None else ("--init-weights", str(self.trained(row.after)))
        places = ("--data-path", str(self.data(row.data)), "--data.assets-dir", str(self.folder / "assets"))
        words = [*places, "--checkpoint.base-dir", str(self.folder / "runs"), "--seed", str(self.seed), *start]
        words += ["--max-steps", product.name, *SILENT, *self.env(row.data), *row.settings]
        with ExitStack() as told:
            if name == "RIPT_shuffled":
                told.enter_context(patch.object(Agent, "lesson", dealt(self.seed)))
            call(["train", row.recipe, "--exp-name", name, *words, *(["--resume"] if run.is_dir() else [])])
        return product

    def env(self, data: str) -> tuple[str, ...]:
        """Settings of the environment."""
        level = () if self.level == "easy" else ("--env.level", self.level)
        return (*level, *(DATA[data].env if data in DATA else ()))

    def data(self, name: str) -> Path:
        """Demonstrations with their statistics; records them if missing."""
        if name == "shuffled":
            return shuffled(self.data("tabletop"), self.seed)
        root, stats = self.folder / "data" / name, self.folder / "assets" / name
        whole = DATA[name].episodes * (2 if self.level == "stitch" else 1) // (10 if self.quick else 1)
        have = num_recorded(root)
        if have < whole:
            words = ("--episodes", str(whole - have), "--seed", str(self.seed), *self.env(name), *DATA[name].record)
            call(["record", "bc_tabletop", *words, "--root", str(root), *(["--append"] if have else [])])
        if not stats.is_dir():
            call(["norm-stats", str(root), "--robot", "tabletop", "--horizon", "4", "--out", str(stats)])
        return root

    def result(self, name: str) -> Path:
        """The file of a row's evaluation."""
        return self.folder / "evaluations" / name / "eval.json"

    def success(self, name: str) -> float | None:
        """A row's success rate on the test states."""
        file = self.result(name)
        return float(json.loads(file.read_text())["result"]["success"]["rate"]) if file.is_file() else None


ALL = {level: {name: row for rows in groups.values() for name, row in rows.items()} for level, groups in ROWS.items()}


def shuffled(dataset: Path, seed: int) -> Path:
    """A copy with permuted outcomes (success, failure or truncation)."""
    copy = dataset.with_name(f"{dataset.name}_shuffled")
    if copy.is_dir():
        return copy
    begun = shutil.copytree(dataset, copy.with_suffix(".begun"), dirs_exist_ok=True)
    for file in begun.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        episode = table["episode_index"].to_numpy()
        last = np.flatnonzero(np.append(episode[1:] != episode[:-1], True))
        mixed = np.random.default_rng(seed).permutation(last)
        for name in (NEXT_REWARD, NEXT_SUCCESS, NEXT_DONE, NEXT_TRUNCATED):
            values = table[name].to_numpy().copy()
            values[last] = values[mixed]
            field = table.schema.field(name)
            table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
        pq.write_table(table, file)
    return begun.rename(copy)


def dealt(seed: int) -> Callable[[Agent, Sequence[Sequence[Rollout]]], Lesson]:
    """A replacement of `Agent.lesson` whose outcomes are coin tosses."""

    def toss(group: Sequence[Rollout]) -> list[float]:
        # The same group must get the same outcomes when asked again: seed the coin by the group's actions.
        done = zlib.crc32(b"".join(rollout.episode.actions.tobytes() for rollout in group))
        coin = np.random.default_rng([seed, done])
        return [float(side) for side in coin.random(len(group)) < 0.5]

    def lesson(agent: Agent, groups: Sequence[Sequence[Rollout]]) -> Lesson:
        return agent.prepare(np.array([toss(group) for group in groups]))

    return lesson


def call(words: list[str]) -> None:
    print(f"$ pirl {shlex.join(words)}", flush=True)
    if code := pirl(words):
        sys.exit(code)


def markdown(seeds: Sequence[Seed], rows: dict[str, Row]) -> str:
    """Markdown: each seed's success, their mean and its interval."""
    lines = [["method", *(f"seed {one.seed}" for one in seeds), "mean (95 %)"]]
    lines.append(["---"] * len(lines[0]))
    for name, row in rows.items():
        found = [one.success(name) for one in seeds]
        known = [rate for rate in found if rate is not None]
        mean, low, high = t_interval(known) if known else (np.nan,) * 3
        summary = f"{mean:.3f} ({low:.2f} to {high:.2f})" if len(known) > 1 else "–"
        lines.append([row.title, *("–" if rate is None else f"{rate:.3f}" for rate in found), summary])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("tabletop_table"), metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--level", choices=tuple(ROWS), default="easy")
    parser.add_argument("--rows", nargs="+", default=["main"], metavar="GROUP|ROW", help="main, more, stress, or rows")
    args = parser.parse_args()
    groups, known = ROWS[args.level], ALL[args.level]
    if unknown := [name for name in args.rows if name not in groups and name not in known]:
        parser.error(f"no rows {unknown}; there are {', '.join([*groups, *known])}")
    rows = [name for part in args.rows for name in groups.get(part, [part])]
    jax.config.update("jax_compilation_cache_dir", str(pirl_home() / "compiled"))  # seeds share their programs
    folder = args.folder / args.level / ("quick" if args.quick else "whole")
    for number in args.seeds:
        for name in rows:
            Seed(folder / f"seed{number}", number, args.level, args.quick).run(name)
    there = sorted(int(seed.name.removeprefix("seed")) for seed in folder.glob("seed*"))
    seeds = [Seed(folder / f"seed{number}", number, args.level, args.quick) for number in there]
    table = markdown(seeds, known)
    (folder / "table.md").write_text(table)
    found = {name: {str(one.seed): one.success(name) for one in seeds} for name in known}
    (folder / "results.json").write_text(json.dumps(found, indent=2))
    print(table)


if __name__ == "__main__":
    main()
