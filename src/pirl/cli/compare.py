"""`pirl compare`: train and compare algorithms under the same conditions."""

import argparse
import re
from pathlib import Path
from typing import Any

from pirl.cli.app import INTERRUPTED, positive
from pirl.cli.tune import seconds

NAME = "compare"
HELP = """\
Trains several algorithms under the same conditions and compares them. Each algorithm and seed is one run, with the same
data, model, initial weights, batches and number of updates (or the same training time, --seconds), and is then
evaluated on the recipe's test states. Without an environment, --metric names a logged metric to compare.

--agents takes kinds (`--agent.type`, such as BC or ACRLPD), or recipes for algorithms with their own settings. Other
flags change the recipe and so apply to all runs, as in `pirl train`. Several recipes give one table each.

Writes compare/NAME: results.json, table.md with intervals over seeds, curves.html, and the runs. After an
interruption or a crash, the same command continues and skips finished runs. More --agents or --seeds extend a
comparison."""
EXAMPLES = """\
examples:
  pirl compare bc_tabletop --agents BC acrlpd_tabletop --seeds 0 1 2 --init-weights checkpoints/bc_tabletop/first/2400
  pirl compare acrlpd_tabletop --agents BC ACRLPD --seeds 0 1 2 3 4 --seconds 10m --name ten-minutes
  pirl compare debug --agents BC ACRLPD --seeds 0 1 2 --data.held-out 0.1 --metric held_out/flow_loss"""
USAGE = "%(prog)s RECIPE [RECIPE ...] --agents A B [...] --seeds N [N ...] [--name NAME] [--SETTING VALUE ...]"
PAGE_FILE = "curves.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl compare`; settings are left to the recipe's own flags."""
    parser.usage = USAGE
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name or YAML file; several give one table each")
    _add_flags(parser)
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="--SETTING VALUE", help="see `pirl train`")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--agents", nargs="+", metavar="AGENT", help="kinds or recipes; the first is the reference")
    add("--seeds", nargs="+", type=int, metavar="N", help="seeds: one run of every algorithm per seed")
    add("--name", metavar="NAME", help="name of the comparison (default: the recipe's)")
    add("--out", type=Path, default=Path(NAME), metavar="DIR", help=f"folder of all comparisons (default {NAME})")
    add("--seconds", type=seconds, metavar="TIME", help="training time of each run instead of updates: 90s, 10m, 2h")
    add("--episodes", type=positive, default=400, metavar="N", help="test episodes of each run (default 400)")
    add("--metric", metavar="NAME", help="compare the last value of this logged metric; no evaluation")
    add("--jobs", type=positive, default=1, metavar="N", help="parallel runs (default 1)")


def run(args: argparse.Namespace) -> int:
    """Train and evaluate all runs, then print the table."""
    from pirl.config import check_name
    from pirl.errors import ConfigError
    from pirl.recipes import cli
    from pirl.tune.compared import SUCCESS
    from pirl.tune.contenders import runs_of

    flags = argparse.ArgumentParser(prog=f"pirl {NAME}", usage=USAGE, add_help=False, allow_abbrev=False)
    _add_flags(flags)
    count = next((at for at, word in enumerate(args.settings) if word.startswith("-")), len(args.settings))
    sources = [args.recipe, *args.settings[:count]]
    args, settings = flags.parse_known_args(args.settings[count:], args)
    for name in ("agents", "seeds"):
        if not getattr(args, name):
            flags.error(f"--{name} names at least one")
    if any(re.split(r"[=.]", word)[0] in ("--exp-name", "--exp_name", "--seed") for word in settings):
        flags.error("runs are named and seeded by the comparison: --name, --seeds")
    tasks = [cli([source, *settings], prog=f"pirl {NAME}", about=HELP) for source in sources]
    name = args.name or tasks[0].name
    check_name("--name", name)
    if args.metric is None and (lacking := [task.name for task in tasks if task.env is None]):
        raise ConfigError(
            f"{', '.join(lacking)} has no environment to evaluate in",
            hint="compare a metric of the log: --metric NAME, such as eval/success_rate or held_out/flow_loss; "
            "metrics.csv of a run has their names",
        )
    folder = args.out.expanduser() / name
    runs = runs_of(tasks, args.agents, args.seeds, folder=folder, seconds=args.seconds)
    return _compare(args, runs, folder, args.metric or SUCCESS)


def _compare(args: argparse.Namespace, runs: Any, folder: Path, metric: str) -> int:
    from pirl.training.interrupt import stop_on_signal
    from pirl.tune.compare import Comparison
    from pirl.tune.compared import RESULTS_FILE, TABLE_FILE, results_json, table

    tasks = {run.task: run.config.init_weights for run in runs}
    if without := [task for task, weights in tasks.items() if weights is None]:
        print(f"{', '.join(without)}: no --init-weights, so each algorithm draws its own initial weights from the seed")
    with stop_on_signal() as stop:
        comparison = Comparison(
            runs, folder=folder, metric=metric, episodes=args.episodes, jobs=args.jobs, stop=lambda: bool(stop)
        )
        if not comparison.run():
            print("interrupted; the same command continues")
            return INTERRUPTED
    _write_page(runs, folder)
    print(table(results_json(runs, comparison.asked)))
    print(f"{folder}: {RESULTS_FILE}, {TABLE_FILE}, {PAGE_FILE}")
    return 0


def _write_page(runs: Any, folder: Path) -> None:
    """Write a report page of all runs, as `pirl report` does."""
    from pirl.config_io import to_dict
    from pirl.recipes import RECIPES
    from pirl.report.page import build_page, write_page
    from pirl.report.run import read_runs

    found = read_runs([run.folder for run in runs if run.folder.is_dir()])
    write_page(folder / PAGE_FILE, build_page(found, {name: to_dict(one) for name, one in RECIPES.items()}))
