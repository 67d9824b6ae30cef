"""`pirl demo`: the whole pipeline on the tabletop, from imperfect demonstrations to a policy that succeeds."""

import argparse
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "demo"
HELP = """\
Runs the whole pipeline on the embedded tabletop with a π₀ of 270,000 parameters: records imperfect demonstrations as a
LeRobot dataset, clones them, improves the clone offline with Q-chunking (ACRLPD) and then with group rollouts (RIPT),
evaluates every policy on the same held-out initial states, and writes a report with videos of before and after. Needs
two CPU cores and about ten minutes.

Each stage is a pirl command, printed before it runs; use the same commands for your own robot. After an interruption,
run the same command again: it continues and skips finished stages."""
EXAMPLES = """\
examples:
  pirl demo
  pirl demo --folder /data/demo
  pirl demo --quick                     two minutes: every stage, but too few steps to learn much
  pirl demo --robot                     the improvement loop with a simulated robot: serve, correct, improve, compare"""


@dataclass(frozen=True)
class Stage:
    """One command, its product and its expected duration."""

    title: str
    command: tuple[str, ...]
    product: Path
    """File or folder that exists once the stage is done."""
    done: bool
    """Whether the product exists."""
    seconds: int
    """Duration measured on two cores; used to estimate the time left."""
    resumable: bool = False
    """Whether the command supports `--resume auto`."""


@dataclass(frozen=True)
class Measured:
    """One row of the final table."""

    name: str
    evaluation: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl demo`."""
    parser.add_argument("--folder", type=Path, default=Path("demo"), metavar="DIR", help="output folder (default demo)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, in a separate folder")
    parser.add_argument("--robot", action="store_true", help="two generations of `pirl improve` at a simulated robot")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of data and training (default 0)")


def run(args: argparse.Namespace) -> int:
    """Run every unfinished stage, then print the table."""
    from pirl.cli.app import main

    folder = args.folder.with_name(args.folder.name + "_quick") if args.quick else args.folder
    stages, results = plan(folder, quick=args.quick, seed=args.seed)
    if args.robot:
        from pirl.cli import demo_robot

        stages = demo_robot.plan_loop(folder, quick=args.quick, seed=args.seed)
        demo_robot.write_loop(folder, stages, quick=args.quick, seed=args.seed)
    missing = [stage for stage in stages if not stage.done]
    pace = 1.0
    for number, stage in enumerate(stages, 1):
        head = f"[{number}/{len(stages)}] {stage.title}"
        if stage not in missing:
            print(f"{head}: done already ({stage.product})")
            continue
        left = sum(other.seconds for other in missing[missing.index(stage) :]) * pace
        command = [*stage.command, *(["--resume", "auto"] if stage.resumable else [])]
        print(f"\n{head}  (about {max(1, round(left / 60))} min left)\n$ pirl {shlex.join(command)}", flush=True)
        began = time.monotonic()
        if code := main(command):
            print(f"\nstopped in stage {number}; the same command continues")
            return code
        pace = max(0.2, (time.monotonic() - began) / stage.seconds)
    print()
    if args.robot:
        print("\n".join(demo_robot.told(folder)))
        return 0
    print_table(results)
    print(f"\nreport: {folder / 'report.html'}\nfilms:  {folder / 'evaluations'}/*/")
    return 0


def plan(folder: Path, *, quick: bool, seed: int) -> tuple[list[Stage], list[Measured]]:
    """(stages in order, rows of the final table)."""
    from pirl.rollout.record import num_recorded

    data, assets, runs = folder / "data" / "tabletop", folder / "assets", folder / "runs"
    episodes, demos = (40, 150) if quick else (400, 1500)
    steps = {"bc": 2400, "filtered": 1200, "acrlpd": 1600, "ript": 15}
    steps = {name: max(1, count // 10) for name, count in steps.items()} if quick else steps
    share = 0.15 if quick else 1.0

    def train(recipe: str, exp: str, count: int, title: str, seconds: int, *more: str) -> Stage:
        command = ("train", recipe, "--exp-name", exp, "--max-steps", str(count), "--seed", str(seed))
        places = ("--data-path", str(data), "--data.assets-dir", str(assets), "--checkpoint.base-dir", str(runs))
        product = runs / recipe / exp / str(count)
        took = int(share * seconds) + 10
        return Stage(title, (*command, *places, *more), product, product.is_dir(), took, resumable=True)

    bc = train("bc_tabletop", "imitation", steps["bc"], "imitate the demonstrations", 90)
    start = ("--init-weights", str(bc.product))
    fine = (
        "--freeze",
        "vlm_frozen",
        "--pi0-lr",
        "7e-4",
        "--policy-schedule.decay-steps",
        str(max(steps["filtered"], 120)),
    )
    filtered = train(
        *("bc_tabletop", "successes", steps["filtered"], "imitate the successful ones only", 40),
        *(*start, *fine, "--data.successes-only"),
    )
    acrlpd = train("acrlpd_tabletop", "offline", steps["acrlpd"], "Q-chunking, offline (ACRLPD)", 95, *start)
    ript = train(
        *("ript_tabletop", "online", steps["ript"], "groups of rollouts, online (RIPT)", 30),
        *("--init-weights", str(acrlpd.product)),
    )

    def evaluated(name: str, of: Stage, *more: str) -> tuple[Stage, Measured]:
        out = folder / "evaluations" / name
        command = ("eval", str(of.product), "--episodes", str(episodes), "--video", "2", "--out", str(out), *more)
        label = f"evaluate: {name.replace('_', ' ')}"
        file = out / "eval.json"
        return Stage(label, command, file, file.is_file(), 6), Measured(name.replace("_", " "), file)

    evaluations = [
        evaluated("imitation", bc),
        evaluated("imitation_of_successes", filtered),
        evaluated("ACRLPD", acrlpd),
        evaluated("ACRLPD,_best_of_8", acrlpd, "--best-of", "8"),
        evaluated("ACRLPD_then_RIPT", ript),
    ]
    folders = [str(stage.product.parent) for stage in (bc, filtered, acrlpd, ript)]
    folders += [str(result.evaluation.parent) for _, result in evaluations]
    have = num_recorded(data) if data.is_dir() else 0
    record = ("record", "bc_tabletop", "--episodes", str(demos - have), "--seed", str(seed), "--root", str(data))
    stats = assets / data.name / "norm_stats.json"
    measure = ("norm-stats", str(data), "--robot", "tabletop", "--horizon", "4", "--out", str(stats.parent))
    page = folder / "report.html"
    stages = [
        Stage("record imperfect demonstrations", (*record, *(["--append"] if have else [])), data, have >= demos, 20),
        Stage("statistics of states and actions", measure, stats, stats.is_file(), 3),
        *(bc, filtered, acrlpd, ript),
        *(stage for stage, _ in evaluations),
        Stage("report", ("report", *folders, "--out", str(page)), page, page.is_file(), 3),
    ]
    return stages, [result for _, result in evaluations]


def print_table(results: Sequence[Measured]) -> None:
    """Print success rates with intervals and the change from the first policy."""
    from rich.console import Console
    from rich.table import Table

    rows = [(result.name, json.loads(result.evaluation.read_text())["result"]) for result in results]
    table = Table(title="success on the same fresh initial states, 95% interval")
    for column, side in (("policy", "left"), ("success", "right"), ("interval", "right"), ("before → after", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for cells in _cells(rows):
        table.add_row(*cells)
    Console(markup=False, emoji=False).print(table)


def _cells(rows: Sequence[tuple[str, dict]]) -> Iterator[tuple[str, str, str, str]]:
    before = rows[0][1]["success"]["rate"]
    for name, result in rows:
        success = result["success"]
        change = f"{before:.0%} → {success['rate']:.0%}" if result is not rows[0][1] else ""
        yield name, f"{success['rate']:.1%}", f"{success['low']:.1%} to {success['high']:.1%}", change
