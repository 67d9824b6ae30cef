"""`pirl improve`: collect on the robot, train, compare, promote, repeat."""

import argparse
from pathlib import Path

NAME = "improve"
HELP = """\
Improves a robot's policy in generations. Each generation collects episodes with the current policy, waits for labels
if outcomes are missing (`pirl label`), trains a candidate from the last checkpoint on demonstrations and all episodes,
checks it in a simulator if there is one, and compares candidate and current policy blindly on the robot. A better
candidate becomes the robot's policy.

The loop can be stopped or killed at any time; the same command continues. FOLDER/loop.html shows its progress; all
generations stay in FOLDER/generations and FOLDER/runs (`pirl report FOLDER/runs/*/*`).

LOOP.yaml has the settings; --show prints all of them with explanations."""
EXAMPLES = """\
examples:
  pirl improve loop.yaml
  pirl improve loop.yaml --show              its settings, explained
  pirl improve loop.yaml --generations 3     one more generation"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl improve`."""
    from pirl.cli.app import positive

    parser.add_argument("loop", type=Path, metavar="LOOP.yaml", help="settings of the loop")
    parser.add_argument("--generations", type=positive, metavar="N", help="run until this generation is finished")
    parser.add_argument("--show", action="store_true", help="print the settings and stop")


def run(args: argparse.Namespace) -> int:
    """Run or show the loop."""
    from dataclasses import replace

    from pirl.config_io import from_dict, read_yaml, to_yaml
    from pirl.improve.config import LoopConfig

    config = from_dict(LoopConfig, read_yaml(args.loop))
    if args.generations:
        config = replace(config, generations=args.generations)
    if args.show:
        print(to_yaml(config, comments=True), end="")
        return 0
    from pirl.improve.loop import improve

    improve(config, lambda text: print(text, flush=True))
    return 0
