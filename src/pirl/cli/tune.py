"""`pirl tune`: hyper-parameter search."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pirl.cli.app import INTERRUPTED, console, positive

NAME = "tune"
HELP = """\
Searches a recipe's settings with Optuna (`pip install 'pirl[tune]'`). Each trial is an ordinary run, evaluated on
validation states during training and pruned when it falls behind. The first trial is the recipe itself, the next five
are random, then TPE leads. A failed trial is recorded, and the search continues.

--space names a YAML search space; the default covers the algorithm's most important settings (--show-space prints it to
copy and edit). Other flags set the same value in all trials, as in `pirl train`. --seed also seeds the search: the same
command gives the same trials.

Writes checkpoints/RECIPE/STUDY: results.json, results.csv, tuning.html, best.yaml. After an interruption, run the same
command again to continue. Keeps the best trial's checkpoints, or all with --keep all."""
EXAMPLES = """\
examples:
  pirl tune bc_tabletop --trials 20
  pirl tune acrlpd_tabletop --show-space
  pirl tune acrlpd_tabletop --trials 10 --init-weights checkpoints/bc_tabletop/first/2400
  pirl tune acrlpd_tabletop --trials 40 --study wide --space wide.yaml --timeout 8h --max-steps 400"""
USAGE = "%(prog)s RECIPE --trials N [--study NAME] [--space FILE.yaml] [--timeout TIME] [--SETTING VALUE ...]"
PAGE_FILE = "tuning.html"
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl tune`; settings are left to the recipe's own flags."""
    parser.usage = USAGE
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name or YAML file")
    _add_flags(parser)
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="--SETTING VALUE", help="see `pirl train`")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trials", type=positive, metavar="N", help="total number of trials, earlier calls included")
    add("--study", default=NAME, metavar="NAME", help=f"study name (default {NAME})")
    add("--space", type=Path, metavar="FILE", help="YAML search space (default: see --show-space)")
    add("--show-space", action="store_true", help="print the search space as YAML and stop")
    add("--metric", default="eval/success_rate", metavar="NAME", help="metric to maximise (default eval/success_rate)")
    add("--timeout", type=seconds, metavar="TIME", help="start no trial after this time: 90m, 8h, 2d")
    add("--jobs", type=positive, default=1, metavar="N", help="parallel trials (default 1)")
    add("--keep", choices=("best", "all"), default="best", help="whose checkpoints to keep (default best)")


def seconds(text: str) -> float:
    """argparse type: a duration."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, such as 90m, 8h or 2d")
    return float(found[1]) * UNITS[found[2]]


def run(args: argparse.Namespace) -> int:
    """Search, print the results and the next commands."""
    from pirl.config_io import read_yaml
    from pirl.recipes import cli
    from pirl.tune.space import default_space, parse_space, space_yaml

    flags = argparse.ArgumentParser(prog=f"pirl {NAME}", usage=USAGE, add_help=False, allow_abbrev=False)
    _add_flags(flags)
    args, settings = flags.parse_known_args(args.settings, args)
    if any(word.partition("=")[0] in ("--exp-name", "--exp_name") for word in settings):
        flags.error("--exp-name names one run; a search is named with --study")
    config = cli([args.recipe, *settings], prog=f"pirl {NAME}", about=HELP)
    space = parse_space(config, read_yaml(args.space)) if args.space else default_space(config)
    if args.show_space:
        print(space_yaml(config, space), end="")
        return 0
    if args.trials is None:
        flags.error("--trials is required")
    _check(args, config)
    return _search(args, config, space, settings)


def _check(args: argparse.Namespace, config: Any) -> None:
    """Raise if trials of this configuration cannot be compared, or the extra is missing."""
    import importlib.util

    from pirl.config import check_name
    from pirl.errors import ConfigError, MissingExtraError

    if importlib.util.find_spec("optuna") is None:
        raise MissingExtraError("optuna", "tune", "`pirl tune`")
    if config.evaluation is None:
        env = "" if config.env is not None else "take a recipe that has an environment, or name one (--env.type), and "
        often = f"--evaluation.interval {max(1, config.num_train_steps // 4)} --evaluation.episodes 50"
        raise ConfigError(
            f"{config.name} is not evaluated while it trains, so its trials cannot be compared",
            hint=f"{env}say how often it is evaluated: {often}",
        )
    if config.evaluation.split != "validation":
        raise ConfigError(
            f"evaluation.split is {config.evaluation.split!r}: tuning on test states invalidates results on them",
            hint="--evaluation.split validation",
        )
    check_name("--study", args.study)


def _search(args: argparse.Namespace, config: Any, space: Any, settings: Sequence[str]) -> int:
    from pirl.errors import ConfigError, did_you_mean
    from pirl.training.interrupt import stop_on_signal
    from pirl.tune.run import Tuner
    from pirl.tune.study import METRICS, Search, Study

    if args.metric not in METRICS:
        raise did_you_mean(args.metric, METRICS, kind="metric to maximise:")
    with (
        Study(Search(config=config, space=space, study=args.study, metric=args.metric)) as study,
        stop_on_signal() as stop,
    ):
        if config.evaluation.interval >= config.num_train_steps:
            print("the only evaluation is at the end: no trial can be stopped earlier (--evaluation.interval)")
        ending = Tuner(
            study,
            trials=args.trials,
            jobs=args.jobs,
            timeout=args.timeout,
            keep=args.keep,
            stop=lambda: bool(stop),
            on_results=lambda: _write_page(study, args.recipe, settings),
        ).run()
        if ending.interrupted:
            open_ones = ", ".join(f"trial {result.number}" for result in study.results() if result.state == "open")
            print(f"interrupted{f' in {open_ones}' if open_ones else ''}; the same command continues")
            return INTERRUPTED
        _show(study, args.recipe, settings)
        if not ending.finished:
            print(f"out of time after {study.count()} of {args.trials} trials; the same command continues")
        if study.best() is None:
            raise ConfigError("no trial was finished", hint=f"why is in {study.search.folder / 'results.csv'}")
    return 0


def _write_page(study: Any, recipe: str, settings: Sequence[str]) -> None:
    from pirl.report.page import write_page
    from pirl.report.tuning import build_tuning_page
    from pirl.tune.results import results_json

    page = build_tuning_page(results_json(study), _next_commands(study, recipe, settings))
    write_page(study.search.folder / PAGE_FILE, page)


def _show(study: Any, recipe: str, settings: Sequence[str]) -> None:
    """Print the table of trials, the output files and the next commands."""
    from rich.table import Table

    from pirl.tune.results import BEST_FILE, RESULTS_FILE, TABLE_FILE, described

    search, best = study.search, study.best()
    shown = console(200)
    title = f"{search.config.name}/{search.study}: {search.metric}, 95 % interval"
    table = Table("trial", "value", "state", *search.space, title=title, title_justify="left")
    for result in study.results():
        mark = " *" if best is not None and result.number == best.number else ""
        state = result.state if result.state != "failed" else described(result)
        tried = (str(result.settings.get(path, "")) for path in search.space)
        table.add_row(f"{result.number}{mark}", str(result.last or ""), state, *tried)
    shown.print(table)
    names = ", ".join((RESULTS_FILE, TABLE_FILE, PAGE_FILE, *([BEST_FILE] if best is not None else [])))
    shown.print(f"{search.folder}: {names}", highlight=False, soft_wrap=True)
    for line in _next_commands(study, recipe, settings):
        shown.print(f"  {line}", highlight=False, soft_wrap=True)


def _next_commands(study: Any, recipe: str, settings: Sequence[str]) -> list[str]:
    """Commands that evaluate the best trial on test states, and that train it again by flags or from its file."""
    import shlex

    from pirl.tune.results import BEST_FILE
    from pirl.tune.space import flags

    search, best = study.search, study.best()
    if best is None:
        return []
    name = ["--exp-name", f"{search.study}-best"]
    own = [*_without(settings, best.settings), *flags(search.config, best.settings)]
    return [
        shlex.join(["pirl", "eval", best.run, "--split", "test", "--episodes", "400"]),
        shlex.join(["pirl", "train", recipe, *own, *name]),
        shlex.join(["pirl", "train", str(search.folder / BEST_FILE)]),
    ]


def _without(settings: Sequence[str], taken: Any) -> list[str]:
    """The command line's flags without those for searched settings."""
    kept: list[str] = []
    keeping = True
    for word in settings:
        if word.startswith("--"):
            keeping = word.partition("=")[0].removeprefix("--").replace("-", "_").replace(".no_", ".") not in taken
        kept += [word] if keeping else []
    return kept
