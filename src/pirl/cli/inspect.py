"""`pirl inspect`: the contents of a recipe, a checkpoint or a dataset."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pirl.data.config import DataConfig, Takeover
from pirl.text import table

NAME = "inspect"
HELP = "Shows the contents of a recipe, a checkpoint or a dataset. Read-only; loads no weights."
EXAMPLES = """\
examples:
  pirl inspect recipe acrlpd_libero
  pirl inspect checkpoint checkpoints/my_run/20000
  pirl inspect data lerobot/aloha_sim_insertion_human"""
RECIPE_EXAMPLES = """\
examples:
  pirl inspect recipe acrlpd_libero_lora         parts with parameters and bytes
  pirl inspect recipe pi05_lora --leaves         every parameter with its shape
  pirl inspect recipe pi0 --freeze vlm_frozen    trainable parts under another rule"""
CHECKPOINT_EXAMPLES = """\
examples:
  pirl inspect checkpoint checkpoints/my_run/20000
  pirl inspect checkpoint gs://openpi-assets/checkpoints/pi0_base
  pirl inspect checkpoint model.safetensors --leaves"""
DATA_EXAMPLES = """\
examples:
  pirl inspect data lerobot/aloha_sim_insertion_human    from the hub, or from HF_LEROBOT_HOME
  pirl inspect data recordings/fold_box                  a folder
  pirl inspect data recordings/fold_box --pictures ends.png"""

_WINDOW = DataConfig.takeover_window


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl inspect`."""
    kinds = parser.add_subparsers(dest="what", metavar="what", title="what to inspect", required=True)
    text = "the parameters of a recipe's policy or a model preset, and which ones train"
    one = kinds.add_parser("recipe", help=text, description=f"Shows {text}.", epilog=RECIPE_EXAMPLES)
    one.add_argument("name", metavar="NAME", help="recipe, YAML file, or model preset such as pi05_lora")
    one.add_argument("--leaves", action="store_true", help="list every parameter with its shape")
    one.add_argument("--freeze", metavar="RULE", help="full, lora, vlm_frozen or expert_only (default: the recipe's)")
    text = "a checkpoint: weights, statistics, training state"
    one = kinds.add_parser("checkpoint", help=text, description=f"Shows {text}.", epilog=CHECKPOINT_EXAMPLES)
    one.add_argument("location", metavar="CHECKPOINT", help="folder, file, gs:// or hf:// address")
    one.add_argument("--leaves", action="store_true", help="list every array with its shape and type")
    text = "a LeRobot dataset: episodes, features, tasks, outcomes"
    one = kinds.add_parser("data", help=text, description=f"Shows and checks {text}.", epilog=DATA_EXAMPLES)
    one.add_argument("location", metavar="DATASET", help="folder, or repo id on the Hugging Face hub")
    held_out = "data.held_out: share of the episodes, or number of each outcome, to hold out (default 0.1)"
    one.add_argument("--held-out", type=float, default=0.1, metavar="SHARE", help=held_out)
    one.add_argument("--seed", type=int, default=0, metavar="S", help="data.seed, which selects them (default 0)")
    text = "data.takeover: how critics treat an operator's takeover, ignore or failure (default ignore)"
    one.add_argument("--takeover", choices=get_args(Takeover), default="ignore", help=text)
    text = f"data.takeover_window: the policy's frames before a takeover to blame for it (default {_WINDOW})"
    one.add_argument("--takeover-window", type=int, default=_WINDOW, metavar="N", help=text)
    text = "data.takeover_reward: added to the reward of blamed frames (default 0)"
    one.add_argument("--takeover-reward", type=float, default=0.0, metavar="R", help=text)
    text = "draw the first and last frames of some successes and failures"
    one.add_argument("--pictures", type=Path, metavar="PNG", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the description of the recipe, checkpoint or dataset."""
    for line in {"recipe": recipe, "checkpoint": checkpoint, "data": data}[args.what](args):
        print(line)
    return 0


def data(args: argparse.Namespace) -> Iterator[str]:
    """A dataset's summary."""
    from pirl.data.held_out import describe
    from pirl.data.inspection import draw_ends, inspect_dataset

    split = DataConfig(held_out=args.held_out, seed=args.seed)
    takeovers = {name: getattr(args, name) for name in ("takeover", "takeover_window", "takeover_reward")}
    found = inspect_dataset(args.location, settings=DataConfig(**takeovers))
    yield str(found)
    if args.held_out:
        yield describe(found.success, found.indices, split.held_out, split.seed)
    if args.pictures:
        args.pictures.parent.mkdir(parents=True, exist_ok=True)
        draw_ends(found.root, found.success).save(args.pictures, "PNG")
        yield f"first and last frames -> {args.pictures}"


def checkpoint(args: argparse.Namespace) -> Iterator[str]:
    """A checkpoint's summary and, with --leaves, its arrays."""
    from pirl.checkpoints.fetch import fetch
    from pirl.checkpoints.inspect import describe, render

    found = describe(fetch(args.location))
    yield render(found)
    if args.leaves:
        rows = [(name, _shape(leaf.shape), leaf.dtype) for name, leaf in sorted(found.leaves.items())]
        yield from table(rows, "<<<", indent="  ")


def recipe(args: argparse.Namespace) -> Iterator[str]:
    """A table of a policy's parameters by part and, with --leaves, every leaf."""
    from pirl.errors import did_you_mean
    from pirl.models.config import FreezeRule
    from pirl.models.freeze import freeze_dtypes, trainable_mask
    from pirl.models.params import flatten
    from pirl.models.pi0 import param_shapes

    config, rule = policy_of(args.name)
    rule = args.freeze or rule
    if rule not in get_args(FreezeRule):
        raise did_you_mean(rule, get_args(FreezeRule), kind="freeze rule")
    shapes = param_shapes(config)
    mask = trainable_mask(shapes, config, rule)
    leaves, trains = flatten(freeze_dtypes(shapes, mask)), flatten(mask)
    yield f"{args.name}: freeze rule {rule}, chunks of {config.horizon} actions of {config.action_dim} dimensions"
    parts: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        parts.setdefault(part_of(path), {})[path] = leaf
    header = ("part", "leaves", "parameters", "trainable", "bytes", "types")
    rows = [_summary(part, members, trains) for part, members in (parts | {"total": leaves}).items()]
    yield from table([header, *rows], "<>>>><", indent="  ")
    if args.leaves:
        listed = [
            (path, _shape(leaf.shape), leaf.dtype.name, "trains" if trains[path] else "frozen")
            for path, leaf in sorted(leaves.items())
        ]
        yield from table(listed, "<<<<", indent="  ")


def policy_of(name: str) -> tuple[Any, Any]:
    """(model, freeze rule) of a recipe, YAML file or model preset."""
    from pirl.errors import ConfigError, did_you_mean
    from pirl.models.config import PRESETS, Pi0Config
    from pirl.models.freeze import default_rule
    from pirl.recipes import ALIASES, list_configs, load

    if name in PRESETS:
        return PRESETS[name], default_rule(PRESETS[name])
    recipes = [*list_configs(), *ALIASES]
    if name not in recipes and not name.endswith((".yaml", ".yml")):
        raise did_you_mean(name, [*recipes, *PRESETS], kind="recipe or model preset")
    config = load(name)
    if not isinstance(config.model, Pi0Config):
        raise ConfigError(f"the policy of {name} is an MLP, which has no parts", hint="`inspect recipe` is for π₀")
    return config.model, config.freeze_rule


def part_of(path: str) -> str:
    """The part of the model a parameter belongs to."""
    if path.startswith("PaliGemma/img/"):
        return "SigLIP"
    if path.startswith("PaliGemma/llm/embedder/"):
        return "embedder"
    if path.startswith("PaliGemma/llm/"):
        return "Gemma expert" if "_1/" in path else "Gemma VLM"
    return "heads"


def _summary(name: str, leaves: Mapping[str, Any], trains: Mapping[str, bool]) -> tuple[str, ...]:
    total = sum(leaf.size for leaf in leaves.values())
    trainable = sum(leaf.size for path, leaf in leaves.items() if trains[path])
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    types = ", ".join(sorted({leaf.dtype.name for leaf in leaves.values()}))
    return name, str(len(leaves)), f"{total:,}", f"{trainable:,}", f"{size:,}", types


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
