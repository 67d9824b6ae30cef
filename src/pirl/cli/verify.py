"""`pirl verify`: compare all files of checkpoints with their checksums."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from pirl.errors import CheckpointError

NAME = "verify"
HELP = """\
Reads every file of a run's checkpoints, of one step or of an export, and compares it with the stored checksums. Lists
damaged steps and the newest intact one. Exits with 1 if anything is damaged.

`pirl train --resume` and every other command verify only the files they load; this verifies all of them."""
EXAMPLES = """\
examples:
  pirl verify checkpoints/my_recipe/my_run            every step of a run
  pirl verify checkpoints/my_recipe/my_run/20000      one step
  pirl verify to_robot                                an export
  cd checkpoints/my_recipe/my_run/20000 && sha256sum -c extra/checksums.sha256     the same without pirl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl verify`."""
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a run, a step or an export")


def run(args: argparse.Namespace) -> int:
    """Check every step and print the result."""
    from pirl.checkpoints.run_directory import complete_steps

    path = args.path.expanduser()
    steps = complete_steps(path) if path.is_dir() else []
    folders = [path / str(step) for step in steps] or [path]
    if not steps and not any((path / name).exists() for name in ("params", "model.safetensors")):
        raise CheckpointError(
            f"{path} holds no complete checkpoint", hint="name the folder of a run, of a step or of an export"
        )
    damaged = list(_damaged(folders))
    if damaged:
        whole = [folder.name for folder in folders if folder not in damaged]
        best = f"; the newest whole step is {whole[-1]}" if whole else ""
        raise CheckpointError(
            f"{len(damaged)} of {len(folders)} checkpoints are damaged: "
            f"{', '.join(folder.name for folder in damaged)}{best}",
            hint="restore them from an intact copy, or move them away to resume from an earlier step",
        )
    return 0


def _damaged(folders: list[Path]) -> Iterator[Path]:
    from pirl.checkpoints.checksums import damage, read_checksums

    for folder in folders:
        if reason := damage(folder):
            print(f"{folder}: DAMAGED: {reason}", flush=True)
            yield folder
        elif sums := read_checksums(folder):
            size = sum((folder / name).stat().st_size for name in sums)
            print(f"{folder}: whole, {len(sums)} files, {size / 1e6:,.1f} MB", flush=True)
        else:
            print(
                f"{folder}: no checksums (OpenPI and pirl 0.1 wrote none); no file is missing or truncated", flush=True
            )
