"""Command-line overrides: a flag for every setting by dotted path, and a few short names. Imports tyro.

Applied in this order, later ones win: recipe, `--debug`, `--variant`, other short names, `--X.type`, dotted flags.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import tyro

from pirl.config import RLTrainConfig
from pirl.config_io import TAG, with_settings
from pirl.recipes.debug import shrink, vary
from pirl.training.config import ConstantSchedule, CosineSchedule, Schedule

DESCRIPTION = """\
Every setting of this configuration with its present value. A part that may be one of several kinds is changed with
`--PART.type KIND` (such as --agent.type BC or --policy-schedule.type ConstantSchedule) and starts from its defaults.

Short names:
"""


def apply_flags(config: RLTrainConfig, flags: Sequence[str], *, prog: str, about: str = "") -> RLTrainConfig:
    """Apply flags to a configuration; `about` introduces the help."""
    short = short_names(prog)
    given, rest = short.parse_known_args([_normalized(word) for word in flags])
    config = _apply_short_names(config, given)
    kinds, rest = _take_kinds(rest)
    for path, kind in (*kinds, *_unset_parts(config, rest)):
        config = with_settings(config, {path.replace("-", "_"): kind})
    listed = "\n".join(f"  {line}" for line in _described(short))
    return tyro.cli(
        RLTrainConfig,
        args=rest,
        default=config,
        prog=prog,
        description=f"{about}\n\n{DESCRIPTION}{listed}".strip(),
        config=(tyro.conf.AvoidSubcommands,),
    )


def short_names(prog: str) -> argparse.ArgumentParser:
    """The parser for short names."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False, usage=f"{prog} [flags]")
    add = parser.add_argument
    add("--max-steps", "--num-steps", type=int, metavar="N", help="num_train_steps")
    add("--pi0-lr", type=float, metavar="LR", help="the policy's peak learning rate; a floor moves with it")
    add("--critic-lr", type=float, metavar="LR", help="the critic's peak learning rate; a floor moves with it")
    add("--save-interval", type=int, metavar="N", help="checkpoint.save_interval")
    add("--data-path", nargs="+", metavar="DATASET", help="data.repo_ids, in equal shares: folders or hub names")
    add("--enable-fsdp", action="store_true", help="mesh.fsdp auto: shard the weights over as many devices as needed")
    add("--no-wandb", action="store_true", help="take wandb out of the sinks")
    add("--variant", choices=("quick", "full", "benchmark"), help="few steps; unchanged; evaluated like the benchmark")
    add("--debug", action="store_true", help="the same run with a tiny model and ten steps, to test the set-up")
    return parser


def _described(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        flag = ", ".join(action.option_strings) + (f" {action.metavar}" if action.metavar else "")
        yield f"{flag:<28}{action.help}"


def _apply_short_names(config: RLTrainConfig, given: argparse.Namespace) -> RLTrainConfig:
    if given.debug:
        config = shrink(config)
    if given.variant is not None:
        config = vary(config, given.variant)
    changes: dict[str, Any] = {}
    if given.max_steps is not None:
        changes["num_train_steps"] = given.max_steps
    if given.pi0_lr is not None:
        changes["policy_schedule"] = with_peak(config.policy_schedule, given.pi0_lr)
    if given.critic_lr is not None:
        changes["critic_schedule"] = with_peak(config.critic_schedule, given.critic_lr)
    if given.save_interval is not None:
        changes["checkpoint"] = replace(config.checkpoint, save_interval=given.save_interval)
    if given.data_path is not None:
        changes["data"] = replace(config.data, repo_ids=tuple(given.data_path), weights=None)
    if given.enable_fsdp:
        changes["mesh"] = replace(config.mesh, fsdp="auto")
    if given.no_wandb:
        changes["sinks"] = tuple(sink for sink in config.sinks if sink != "wandb")
    return replace(config, **changes)


def with_peak(schedule: Schedule, peak: float) -> Schedule:
    """The schedule with another peak learning rate and the same shape."""
    if isinstance(schedule, ConstantSchedule):
        return replace(schedule, lr=peak)
    if isinstance(schedule, CosineSchedule) and schedule.peak_lr > 0:
        return replace(schedule, peak_lr=peak, decay_lr=schedule.decay_lr * peak / schedule.peak_lr)
    return replace(schedule, peak_lr=peak)


def _normalized(word: str) -> str:
    """A flag with hyphens instead of underscores; its value is unchanged."""
    if not word.startswith("--"):
        return word
    flag, sign, value = word.partition("=")
    return flag.replace("_", "-") + sign + value


def _take_kinds(flags: Sequence[str]) -> tuple[list[tuple[str, dict[str, str]]], list[str]]:
    """(the `--PART.type KIND` flags as (part, {type: kind}), the other words)."""
    kinds, rest = [], list(flags)
    for flag in [word for word in flags if word.startswith("--") and word.partition("=")[0].endswith(f".{TAG}")]:
        at = rest.index(flag)
        name, sign, kind = rest.pop(at).partition("=")
        if not sign:
            kind = rest.pop(at) if at < len(rest) else ""
        kinds.append((name[2:].removesuffix(f".{TAG}"), {TAG: kind}))
    return kinds, rest


def _unset_parts(config: RLTrainConfig, flags: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Parts that are None although a flag sets one of their fields; they start from defaults."""
    for flag in flags:
        *parts, _ = flag.partition("=")[0].removeprefix("--").replace("-", "_").split(".")
        value: Any = config
        for depth, part in enumerate(parts, 1):
            if (value := getattr(value, part, "")) is None:
                yield ".".join(parts[:depth]), {}
                break
