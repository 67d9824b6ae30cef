"""Whether two generations of `pirl improve` lift an imitated policy on the tabletop while a control does not improve.

    python benchmarks/results/improve.py --seeds 0 1 2

Each seed records imperfect demonstrations, clones them, and runs the loop in these ways (`--arms`):

    corrected  ACRLPD on outcomes; a scripted supervisor watches half of the collected episodes and takes over
    outcomes   the same without a supervisor
    control    neither outcomes nor corrections: cloning of the demonstrations and all collected episodes

The table has the success of the cloned policy and of each generation's candidate in `pirl eval`, on the same held-out
states. Everything is a pirl command; after an interruption, repeat the call.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pirl.improve.processes import pirl

ROBOT = "-m pirl.robot.simulated --server {server} --record {dataset} --inits {inits} --seed {seed} --purpose {purpose}"


class Arm(NamedTuple):
    """One way to learn."""

    recipe: str
    supervise: float
    """Share of the collected episodes that the supervisor watches."""


ARMS = {
    "corrected": Arm("acrlpd_tabletop", 0.5),
    "outcomes": Arm("acrlpd_tabletop", 0.0),
    "control": Arm("bc_tabletop", 0.0),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["corrected", "control"])
    parser.add_argument("--folder", type=Path, default=Path("loops/measured"))
    parser.add_argument("--demos", type=int, default=1500, help="demonstrations to record")
    parser.add_argument("--clone-steps", type=int, default=2400, help="training steps of the cloned policy")
    parser.add_argument("--steps", type=int, default=1600, help="training steps of each generation")
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=60, help="episodes to collect per generation")
    parser.add_argument("--comparison", type=int, default=100, help="most episodes of a blind comparison")
    parser.add_argument("--held-out", type=int, default=200, help="states to measure success on")
    args = parser.parse_args(argv)
    for seed in args.seeds:
        clone(args, args.folder / str(seed), seed)
        for arm in args.arms:
            loop(args, args.folder / str(seed), seed, arm)
    print(table(args))
    return 0


def clone(args: argparse.Namespace, folder: Path, seed: int) -> None:
    """Make the demonstrations, their statistics and the cloned policy."""
    demos, start = folder / "demos", str(cloned(args, folder))
    stats = folder / "assets" / demos.name
    limits = ["--max-steps", str(args.clone_steps)]
    places = ["--data.assets-dir", str(stats.parent), "--checkpoint.base-dir", str(folder / "runs")]
    record = ["record", "bc_tabletop", "--episodes", str(args.demos), "--seed", str(seed), "--root", str(demos)]
    train = ["train", "bc_tabletop", "--exp-name", "start", "--seed", str(seed), "--data-path", str(demos)]
    run(demos / "meta/info.json", record)
    run(
        stats / "norm_stats.json",
        ["norm-stats", str(demos), "--robot", "tabletop", "--horizon", "4", "--out", str(stats)],
    )
    run(Path(start), [*train, *limits, *places, "--resume", "auto"])
    out = folder / "start"
    run(out / "eval.json", ["eval", start, "--episodes", str(args.held_out), "--out", str(out)])


def cloned(args: argparse.Namespace, folder: Path) -> Path:
    return folder / "runs/bc_tabletop/start" / str(args.clone_steps)


def loop(args: argparse.Namespace, folder: Path, seed: int, name: str) -> None:
    """Run `pirl improve` from the cloned policy."""
    arm, place = ARMS[name], folder / name
    steps = ["--max-steps", str(args.steps), "--policy-schedule.decay-steps", str(args.steps)]
    # Success is measured once, by the loop's own check.
    steps += ["--evaluation.interval", str(args.steps), "--evaluation.episodes", "8"]
    if arm.recipe == "acrlpd_tabletop":
        steps += ["--agent.actor-warmup", "hold"]
    settings = {
        "folder": str(place),
        "recipe": arm.recipe,
        "start": str(cloned(args, folder)),
        "demonstrations": [str(folder / "demos")],
        "robot": f"{shlex.quote(sys.executable)} {ROBOT} --supervise {arm.supervise}",
        "generations": args.generations,
        "episodes": args.episodes,
        "train": [*steps, "--data.assets-dir", str(folder / "assets")],
        "serve": ["--max-rate", "10000", "--max-batch", "1"],
        "port": 0,
        "held_out": args.held_out,
        "held_out_drop": 1.0,
        "comparison": args.comparison,
        "look_every": 24,
        "seed": seed,
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(settings, indent=2))  # JSON is YAML
    run(None, ["improve", str(file)])


def run(product: Path | None, words: Sequence[str]) -> None:
    """Run a pirl command unless its product exists."""
    if product is None or not product.exists():
        print(f"$ pirl {shlex.join(words)}", flush=True)
        subprocess.run(pirl(*words), check=True)


def table(args: argparse.Namespace) -> str:
    """A table with one line per seed and way."""
    heads = ["seed", "way", "imitation", *(f"generation {n + 1}" for n in range(args.generations)), "corrected"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for seed in args.seeds:
        for name in args.arms:
            folder = args.folder / str(seed)
            state = json.loads((folder / name / "state.json").read_text())
            parts = [folder / name / "generations" / f"{one['number']:03d}" for one in state["finished"]]
            rates = [rate(part / "evaluation/eval.json") for part in parts[: args.generations]]
            rates = [f"{text}, {one['decision']}" for text, one in zip(rates, state["finished"], strict=False)]
            watched = sum(one["collected"]["corrected"] for one in state["finished"])
            cells = [str(seed), name, rate(folder / "start/eval.json"), *rates, f"{watched} episodes"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rate(file: Path) -> str:
    """A success rate with its 95 % interval."""
    success = json.loads(file.read_text())["result"]["success"]
    return f"{success['rate']:.3f} ({success['low']:.2f} to {success['high']:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
