"""`pirl train`: trains a recipe or YAML configuration."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pirl.names import CONFIG_FILE

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig

NAME = "train"
HELP = """\
Trains a policy from a recipe (`pirl recipes ls`) or a YAML file. Writes checkpoints/RECIPE/EXP_NAME: OpenPI checkpoints
by step, metrics, configuration.

Every setting is a dotted flag; `pirl train RECIPE --help` lists all with their values. Common ones:

  --exp-name NAME          run name (default run)
  --data-path DATASET ...  LeRobot datasets: folders or hub repo ids
  --init-weights WHERE     a checkpoint's folder, a gs:// or hf:// address
  --batch-size N           across all devices            --max-steps N
  --pi0-lr LR              --critic-lr LR                --save-interval N
  --mesh.fsdp N            devices that share one copy of the weights (default: as many as needed)
  --agent.discount G       --sinks wandb                 --no-wandb
  --debug                  the same run with a tiny model and ten steps, to test the set-up

An existing run needs --resume or --overwrite. `pirl train RUN_FOLDER`, or --resume, continues with the run's own
settings; flags change settings and are listed. --resume auto resumes, or starts if there is nothing to resume: one
command line for schedulers that restart jobs."""
EXAMPLES = """\
examples:
  pirl train debug --exp-name first                         a laptop, no files
  pirl train rl_fold_box --exp-name box1 --data-path recordings/fold_box --dry-run
  pirl train acrlpd_libero --exp-name q1 --mesh.fsdp 8 --agent.discount 0.995
  pirl train checkpoints/acrlpd_libero/q1                   resume a run
  pirl train checkpoints/acrlpd_libero/q1 --max-steps 40000   resume and train longer
  pirl train my.yaml --exp-name q2 --batch-size 64          from `pirl recipes cp acrlpd_libero my.yaml`"""

MODES = """\
Trains this configuration. --resume continues from the latest checkpoint with the run's own settings, changed by the
given flags (--resume auto: or starts it); --overwrite deletes the existing run and starts again; --dry-run checks
everything, prints the plan and stops."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl train`; settings are left to the recipe's own flags."""
    parser.usage = (
        "%(prog)s RECIPE [--exp-name NAME] [--resume [auto] | --overwrite] [--dry-run] [--SETTING VALUE ...]\n"
        "       %(prog)s RUN_FOLDER [--SETTING VALUE ...]"
    )
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name, YAML file, or run folder to resume")
    _add_modes(parser)
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="--SETTING VALUE", help="see above")


def _add_modes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="resume from the latest checkpoint; auto: or start")
    parser.add_argument("--overwrite", action="store_true", help="delete the existing run and start again")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan and stop")


def run(args: argparse.Namespace) -> int:
    """Resolve the configuration and train."""
    # Words after the recipe arrive as one remainder, so parse the modes in it; flags before it are parsed already.
    modes = argparse.ArgumentParser(prog=f"pirl {NAME}", add_help=False, allow_abbrev=False)
    _add_modes(modes)
    words = ["--dry-run" if word == "--dry_run" else word for word in args.settings]
    if args.resume and args.recipe == "auto" and words:  # --resume auto RECIPE
        args.recipe, words = words[0], ["--resume", "auto", *words[1:]]
    auto, words = _take_auto(words)
    args, settings = modes.parse_known_args(words, args)
    if args.resume and args.overwrite:
        modes.error("--resume continues the existing run, --overwrite deletes it: choose one")
    config, resume = _config(args.recipe, settings, resume=args.resume, overwrite=args.overwrite)

    from pirl.training.recovery import train

    if auto:
        return train(config, resume=resume, fresh_if_missing=True, dry_run=args.dry_run)
    return train(config, resume=resume, overwrite=args.overwrite, dry_run=args.dry_run)


def _take_auto(words: list[str]) -> tuple[bool, list[str]]:
    """(whether the words contain `--resume auto`, the words with a plain `--resume` instead)."""
    joined = ["--resume" if word == "--resume=auto" else word for word in words]
    auto = joined != words
    for at, word in enumerate(joined[:-1]):
        if word == "--resume" and joined[at + 1] == "auto":
            return True, [*joined[: at + 1], *joined[at + 2 :]]
    return auto, joined


def _config(source: str, settings: list[str], *, resume: bool, overwrite: bool) -> "tuple[RLTrainConfig, bool]":
    """(configuration, whether it resumes a run); prints what it resumes."""
    from pirl.cli.resume import describe, is_run, saved_settings, with_changes
    from pirl.recipes import cli, is_known

    if not is_known(source) and is_run(source):
        folder, resume = Path(source).expanduser(), not overwrite
        asked = None
    else:
        asked = cli([source, *settings], about=MODES)
        folder = asked.run_dir
        if not resume or not (folder / CONFIG_FILE).is_file():
            return asked, resume
    saved = saved_settings(folder)
    config = with_changes(saved, settings, prog=f"pirl {NAME} {source}", about=MODES)

    from pirl.checkpoints.run_directory import complete_steps

    if resume:
        print(describe(saved, config, max(complete_steps(folder), default=None)))
    if asked is not None and source.endswith((".yaml", ".yml")) and (others := file_differences(asked, config)):
        print(f"  (ignored from {source}: {', '.join(others)}; use flags to change a run)")
    return config, resume


def file_differences(asked: "RLTrainConfig", config: "RLTrainConfig") -> list[str]:
    """Settings of a file that a resumed run ignores."""
    from pirl.config_io import diff

    return [f"{path} {new}" for path, _, new in diff(config, asked)]
