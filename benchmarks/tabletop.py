"""Does it learn? The README's table: every method on the embedded tabletop, by the commands that a user types.

    python benchmarks/tabletop.py                    seeds 0, 1, 2; some 40 minutes on two cores
    python benchmarks/tabletop.py --seeds 0          one of them; another process may do another meanwhile
    python benchmarks/tabletop.py --quick            a tenth of the steps: does the program work?
    python benchmarks/tabletop.py --level stitch     where every demonstration errs once

A seed is one of everything: demonstrations, first weights, batches, rollouts. It is `pirl demo` first, then what that
leaves out: distillation, RIPT without ACRLPD, ACRLPD online, and two controls whose outcomes say nothing (of other
episodes, of a coin). All are evaluated on the same 400 test states. What is there is not done again: interrupted,
the same command goes on. The table is printed, and written beside the runs as table.md.

`stitch` has rows of its own: what filters make of demonstrations that all err, and what imitation of perfect ones does.
"""

import argparse
import json
import shlex
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pirl.agents.agent import Agent, Lesson
from pirl.cli.app import main as pirl
from pirl.names import NEXT_DONE, NEXT_REWARD, NEXT_SUCCESS, NEXT_TRUNCATED
from pirl.recipes import get_config
from pirl.records import Rollout
from pirl.rollout.record import num_recorded

ROWS = {
    "BC": "imitation",
    "BC, success-filtered": "imitation_of_successes",
    "ACRLPD, `awr`, offline": "ACRLPD",
    "– the same, best of 8 by the critic": "ACRLPD,_best_of_8",
    "ACRLPD, `distill`, offline": "distill",
    "ACRLPD, `awr`, online": "online",
    "BC, then RIPT": "RIPT",
    "**ACRLPD, then RIPT**": "ACRLPD_then_RIPT",
    "control: ACRLPD, outcomes shuffled": "ACRLPD_shuffled",
    "control: RIPT, outcomes of a coin": "RIPT_shuffled",
}
"""What a row is called, and the folder of its evaluation."""
STITCH_ROWS = {
    "BC": "imitation",
    "BC, success-filtered": "imitation_of_successes",
    "BC, filtered by discounted return": "filtered",
    "**ACRLPD, `awr`, offline**": "ACRLPD",
    "– the same, best of 8 by the critic": "ACRLPD,_best_of_8",
    "control: ACRLPD, outcomes shuffled": "ACRLPD_shuffled",
    "BC on perfect demonstrations": "perfect",
}
"""The same at level `stitch`."""
PERFECT = ("--dials", "wrong=0", "wrong_block=0")
FILTERED = (
    "--data.successes-only",
    *("--freeze", "vlm_frozen", "--pi0-lr", "7e-4", "--policy-schedule.decay-steps", "1200"),
)
"""Imitation goes on, on the successes alone: as in `pirl demo`."""


@dataclass(frozen=True)
class Seed:
    """One seed's folder, and what is run in it."""

    folder: Path
    seed: int
    quick: bool
    rows = ROWS

    @property
    def demo(self) -> Path:
        """Where `pirl demo` puts all of it."""
        return self.folder.with_name(f"{self.folder.name}_quick") if self.quick else self.folder

    @property
    def runs(self) -> Path:
        """Where training leaves its folders."""
        return self.demo / "runs"

    def run(self) -> None:
        """Everything that is not there yet."""
        number, quick = str(self.seed), ["--quick"] if self.quick else []
        call(["demo", "--folder", str(self.folder), "--seed", number, *quick])
        self.method("distill", "acrlpd_tabletop", "--agent.actor", "distill")
        self.method("online", "acrlpd_tabletop_online")
        self.method("RIPT", "ript_tabletop")
        told = shuffled(self.demo / "data" / "tabletop", self.seed)
        self.method("ACRLPD_shuffled", "acrlpd_tabletop", data=told)
        with patch.object(Agent, "lesson", dealt(self.seed)):
            self.method("RIPT_shuffled", "ript_tabletop")

    def method(
        self, name: str, recipe: str, *settings: str, data: Path | None = None, whole: int | None = None
    ) -> Path:
        """Train from this seed's imitation, evaluate; on this seed's demonstrations, or on other data. The weights."""
        begun = max((self.runs / "bc_tabletop" / "imitation").glob("[0-9]*"), key=number_of)
        return self.trained(name, recipe, *settings, "--init-weights", str(begun), data=data, whole=whole)

    def trained(
        self, name: str, recipe: str, *settings: str, data: Path | None = None, whole: int | None = None
    ) -> Path:
        """The same, from whatever the settings say; `whole` steps if not as many as the recipe's."""
        whole = whole or get_config(recipe).num_train_steps
        begun, steps = self.runs / recipe / name, str(max(1, whole // 10) if self.quick else whole)
        result, assets = self.demo / "evaluations" / name / "eval.json", self.demo / "assets"
        if not result.is_file() and not (begun / steps).is_dir():
            places = ("--data.assets-dir", assets, "--checkpoint.base-dir", self.runs)
            given = ("--data-path", data or self.demo / "data" / "tabletop")
            words = [*given, *places, "--seed", self.seed, "--max-steps", steps, *settings]
            goes_on = ["--resume"] if begun.is_dir() else []
            call(["train", recipe, "--exp-name", name, *map(str, words), *goes_on])
        self.evaluate(name, begun / steps)
        return begun / steps

    def evaluate(self, name: str, weights: Path, *settings: str) -> None:
        """On the test states."""
        result = self.demo / "evaluations" / name
        if not (result / "eval.json").is_file():
            episodes = "40" if self.quick else "400"
            call(["eval", str(weights), "--episodes", episodes, "--out", str(result), *settings])

    def cell(self, name: str) -> str:
        """A success rate and Wilson's 95 % interval."""
        file = self.demo / "evaluations" / name / "eval.json"
        if not file.is_file():
            return "–"
        found = json.loads(file.read_text())["result"]["success"]
        return f"{found['rate']:.3f} ({found['low']:.2f}–{found['high']:.2f})"


@dataclass(frozen=True)
class Stitch(Seed):
    """The same at level `stitch`, which `pirl demo` does not know."""

    rows = STITCH_ROWS

    def run(self) -> None:
        """Everything that is not there yet."""
        data, perfect = self.recorded("tabletop"), self.recorded("perfect", *PERFECT)
        level = ("--env.level", "stitch")
        self.trained("imitation", "bc_tabletop", *level)
        self.trained("perfect", "bc_tabletop", *level, data=perfect)
        self.method("imitation_of_successes", "bc_tabletop", *level, *FILTERED, whole=1200)
        self.method("filtered", "filtered_tabletop", *level)
        improved = self.method("ACRLPD", "acrlpd_tabletop", *level)
        self.evaluate("ACRLPD,_best_of_8", improved, "--best-of", "8")
        self.method("ACRLPD_shuffled", "acrlpd_tabletop", *level, data=shuffled(data, self.seed))

    def recorded(self, name: str, *dials: str) -> Path:
        """Demonstrations, with their statistics."""
        data, stats = self.demo / "data" / name, self.demo / "assets" / name
        have, whole = num_recorded(data), 150 if self.quick else 1500
        if have < whole:
            words = ("--env.level", "stitch", "--episodes", str(whole - have), "--seed", str(self.seed), *dials)
            call(["record", "bc_tabletop", *words, "--root", str(data), *(["--append"] if have else [])])
        if not stats.is_dir():
            call(["norm-stats", str(data), "--robot", "tabletop", "--horizon", "4", "--out", str(stats)])
        return data


def shuffled(dataset: Path, seed: int) -> Path:
    """A copy in which every episode ends as another did: succeeds, fails or is cut off."""
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
    """What groups teach if their outcomes are those of a coin."""

    def toss(group: Sequence[Rollout]) -> list[float]:
        # Groups may be asked for again, with the same answer: what was done in one decides how the coin falls.
        done = zlib.crc32(b"".join(rollout.episode.actions.tobytes() for rollout in group))
        coin = np.random.default_rng([seed, done])
        return [float(side) for side in coin.random(len(group)) < 0.5]

    def lesson(agent: Agent, groups: Sequence[Sequence[Rollout]]) -> Lesson:
        return agent.prepare(np.array([toss(group) for group in groups]))

    return lesson


def number_of(folder: Path) -> int:
    return int(folder.name)


def call(words: list[str]) -> None:
    print(f"$ pirl {shlex.join(words)}", flush=True)
    if code := pirl(words):
        sys.exit(code)


def markdown(seeds: Sequence[Seed]) -> str:
    head = ["method", *(f"seed {one.seed}" for one in seeds)]
    rows = [
        head,
        ["---"] * len(head),
        *([title, *(one.cell(name) for one in seeds)] for title, name in seeds[0].rows.items()),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("tabletop_table"), metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--level", choices=("easy", "stitch"), default="easy")
    args = parser.parse_args()
    kind = Stitch if args.level == "stitch" else Seed
    seeds = [kind(args.folder / f"seed{number}", number, args.quick) for number in args.seeds]
    for one in seeds:
        one.run()
    table = markdown(seeds)
    (args.folder / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
