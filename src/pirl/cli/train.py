"""`pirl train`: trains a recipe or YAML configuration."""

import argparse

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
  --mesh.fsdp N            devices that share one copy of the weights
  --agent.discount G       --sinks wandb                 --no-wandb
  --debug                  the same run with a tiny model and ten steps, to test the set-up

An existing run needs --resume or --overwrite."""
EXAMPLES = """\
examples:
  pirl train debug --exp-name first                         a laptop, no files
  pirl train rl_fold_box --exp-name box1 --data-path recordings/fold_box --dry-run
  pirl train acrlpd_libero --exp-name q1 --mesh.fsdp 8 --agent.discount 0.995
  pirl train acrlpd_libero --exp-name q1 --mesh.fsdp 8 --resume
  pirl train my.yaml --exp-name q2 --batch-size 64          from `pirl recipes cp acrlpd_libero my.yaml`"""

MODES = """\
Trains this configuration. --resume continues from the latest checkpoint, --overwrite deletes the existing run and
starts again, --dry-run checks and builds everything and stops before the first step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl train`; settings are left to the recipe's own flags."""
    parser.usage = "%(prog)s RECIPE [--exp-name NAME] [--resume | --overwrite] [--dry-run] [--SETTING VALUE ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name or YAML file")
    _add_modes(parser)
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="--SETTING VALUE", help="see above")


def _add_modes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="delete the existing run and start again")
    parser.add_argument("--dry-run", action="store_true", help="check and build everything, then stop before step 1")


def run(args: argparse.Namespace) -> int:
    """Resolve the configuration and train."""
    from pirl.recipes import cli

    # What follows the recipe reaches argparse as one remainder; flags before it were parsed already.
    modes = argparse.ArgumentParser(prog=f"pirl {NAME}", add_help=False, allow_abbrev=False)
    _add_modes(modes)
    words = ["--dry-run" if word == "--dry_run" else word for word in args.settings]
    args, settings = modes.parse_known_args(words, args)
    if args.resume and args.overwrite:
        modes.error("--resume goes on with the run that is there, --overwrite deletes it: choose one")
    config = cli([args.recipe, *settings], about=MODES)

    from pirl.training.loop import train

    return train(config, resume=args.resume, overwrite=args.overwrite, dry_run=args.dry_run)
