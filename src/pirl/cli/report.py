"""`pirl report`: one HTML page about runs."""

import argparse
from pathlib import Path

NAME = "report"
HELP = """\
Writes one HTML page about one run, or several in the same charts: success with intervals, losses, critic calibration,
curriculum, speed, memory, settings that differ from the recipe, evaluations per task, and videos of the same initial
states side by side (from `pirl eval --video`).

The page is one self-contained file. The command reads only the run's files, also while the run continues, and replaces
only an earlier report."""
EXAMPLES = """\
examples:
  pirl report checkpoints/debug/first
  pirl report checkpoints/acrlpd_tabletop/first --open
  pirl report checkpoints/bc_tabletop/first checkpoints/acrlpd_tabletop/first --out compare.html"""
FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run or evaluation folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"output file (default {FILE} in the run; for several runs, here)"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the page, print its path."""
    import warnings

    from pirl.config_io import to_dict
    from pirl.errors import PirlWarning
    from pirl.recipes import ALIASES, get_config, list_configs
    from pirl.report.page import build_page, write_page
    from pirl.report.run import read_runs
    from pirl.text import size

    runs = read_runs(args.runs)
    recipes = {name: to_dict(get_config(name)) for name in (*list_configs(), *ALIASES)}
    page = build_page(runs, recipes)
    file = write_page(args.out or (runs[0].folder / FILE if len(runs) == 1 else Path(FILE)), page)
    for one in runs:
        for note in one.notes:
            warnings.warn(f"{one.folder.name}: {note}", PirlWarning, stacklevel=2)
    print(f"{file} ({size(len(page.encode()))})")
    if args.open:
        import webbrowser

        webbrowser.open(file.absolute().as_uri())
    return 0
