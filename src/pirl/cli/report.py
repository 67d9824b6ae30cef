"""`pirl report`: what became of a run, as one page."""

import argparse
from pathlib import Path

NAME = "report"
HELP = """\
Makes one HTML page of a run, or of several in the same charts: success with its interval, losses, calibration of the
critic, curriculum, speed, memory, the settings that differ from the recipe, evaluations task by task, and films of the
same initial states side by side (those `pirl eval --video` made).

The page is a single file that asks nothing of any other place: send it, open it on a phone. It is made from the run's
files alone, also while the run goes on; nothing but an earlier report is replaced."""
EXAMPLES = """\
examples:
  pirl report checkpoints/debug/first
  pirl report checkpoints/acrlpd_tabletop/first --open
  pirl report checkpoints/bc_tabletop/first checkpoints/acrlpd_tabletop/first --out compare.html"""
FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of an evaluation")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the page (default: {FILE} in the run; of several runs, here)"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def run(args: argparse.Namespace) -> int:
    """Read, write, say where it is."""
    import warnings

    from pirl.config_io import to_dict
    from pirl.errors import PirlWarning
    from pirl.recipes import ALIASES, get_config, list_configs
    from pirl.report.page import build_page, write_page
    from pirl.report.run import read_runs
    from pirl.report.scales import size

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
