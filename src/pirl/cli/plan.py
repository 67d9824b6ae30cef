"""`pirl plan`: whether a run fits into device memory, and what to change if not."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pirl.cli.app import positive

NAME = "plan"
HELP = """\
Estimates the memory of a training step per device (weights, optimizer, EMA, critic, activations), the largest batch
that fits, and the least rematerialisation that fits. Works from a trace of the step: needs no weights and no GPU.
If the dataset is available, also checks discount, rewards and the critic's clip against it.
Override any setting with a flag, as in `pirl train`."""
EXAMPLES = """\
examples:
  pirl plan acrlpd_libero --devices 8 --device-gb 80 --mesh.fsdp 8
  pirl plan acrlpd_aloha_fold_lora --device-gb 24
  pirl plan my.yaml --device-gb 24 --batch-size 8 --freeze expert_only"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl plan`; settings are left to the recipe's own flags."""
    parser.usage = "%(prog)s RECIPE --device-gb GB [--devices N] [--SETTING VALUE ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name or YAML file")
    _add_devices(parser)
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="--SETTING VALUE", help="see `pirl train`")


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=positive, metavar="N", help="number of devices (default: mesh.fsdp, or 1)")
    parser.add_argument("--device-gb", type=float, metavar="GB", help="memory per device in GiB, as in nvidia-smi")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from pirl.recipes import cli

    devices = argparse.ArgumentParser(prog=f"pirl {NAME}", add_help=False, allow_abbrev=False)
    _add_devices(devices)
    args, settings = devices.parse_known_args(args.settings, args)
    config = cli([args.recipe, *settings], prog=f"pirl {NAME}")
    if args.device_gb is None or not args.device_gb > 0:
        devices.error("--device-gb is required: memory per device, such as 24 or 80")

    from pirl.planning.plan import plan
    from pirl.training.preflight import misfits

    with _progress() as say:
        found = plan(config, device_gb=args.device_gb, devices=args.devices, choose=True, say=say)
    print(f"{config.name}: freeze rule {config.freeze_rule}, {len(config.cameras)} camera(s)")
    print(found)
    if found.accumulate is not None and found.accumulate > config.agent.parts:
        chosen = ", which `auto` chooses" if config.agent.accumulate == "auto" else ""
        print(f"split the batch with --agent.accumulate {found.accumulate}{chosen}")
    for misfit in misfits(config):
        print(f"the settings and the data: {misfit}")
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the variation being planned; a full-size model takes seconds per variation."""
    from rich.console import Console

    console = Console(stderr=True)
    said: list[str] = []

    def say(what: str) -> None:
        if console.is_terminal:
            status.update(f"planning: {what}")
        elif what not in said:
            said.append(what)
            console.print(f"planning: {what}", highlight=False, soft_wrap=True)

    with console.status("planning") as status:
        yield say
