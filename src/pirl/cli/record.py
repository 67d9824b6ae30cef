"""`pirl record`: records episodes in an environment as a LeRobot dataset."""

import argparse
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pirl.cli.app import Parser, positive
from pirl.errors import ConfigError

NAME = "record"
HELP = """\
Records episodes of a scripted expert or a checkpoint in a recipe's environment as a LeRobot dataset. Keeps failures and
stores every outcome, so a critic can learn from all episodes.

Writes to HF_LEROBOT_HOME under the repo id (`pirl train --data-path me/demos` finds it there), or to --root. Uploads
nothing. --append adds to an existing dataset, with new initial states.

--dials KEY=VALUE changes the expert's quality. Override any setting with a dotted flag, as in `pirl train`: --env.level
colours."""
EXAMPLES = """\
examples:
  pirl record bc_tabletop --episodes 1500 --repo-id demos/tabletop
  pirl record bc_tabletop --episodes 200 --repo-id me/perfect --dials wrong=0 noise=0.02
  pirl record bc_tabletop --episodes 200 --repo-id me/hard --env.level two_blocks --seed 3
  pirl record bc_aloha_transfer_small --episodes 400 --repo-id demos/aloha_transfer --processes 8
  pirl record bc_tabletop --episodes 500 --repo-id me/rollouts --checkpoint checkpoints/bc_tabletop/first
  pirl record bc_tabletop --episodes 500 --repo-id me/rollouts --checkpoint checkpoints/bc_tabletop/first --append"""
USAGE = "%(prog)s RECIPE --episodes N --repo-id NAME [--checkpoint PATH] [--append] [--SETTING VALUE ...]"
EXPERT = "expert"


def add_arguments(parser: Parser) -> None:
    """Arguments of `pirl record`; settings are left to the recipe's own flags."""
    parser.usage, parser.takes_settings = USAGE, True
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="recipe with an environment, or YAML file")
    add("--episodes", type=positive, metavar="N", help="episodes to record")
    add("--repo-id", metavar="NAME", help="dataset name, such as me/demos")
    add("--root", type=Path, metavar="DIR", help="dataset folder (default: in HF_LEROBOT_HOME, by name)")
    add("--checkpoint", default=EXPERT, metavar="PATH", help=f"the actor: a checkpoint, or `{EXPERT}` (default)")
    add("--dials", nargs="+", default=[], metavar="KEY=VALUE", help="the expert's quality")
    add("--seed", type=int, default=0, metavar="S", help="seed of the episodes (default 0)")
    add("--split", choices=("train", "validation", "test"), default="train", help="initial states (default train)")
    add("--processes", type=positive, default=1, metavar="N", help="expert processes (default 1)")
    add("--append", action="store_true", help="add to an existing dataset")


def run(args: argparse.Namespace) -> int:
    """Record, then print the next commands."""
    if args.episodes is None or (args.repo_id is None and args.root is None):
        args.usage_error("--episodes and --repo-id (or --root) are required")
    if args.seed < 0:
        args.usage_error("--seed is 0 or more")
    if args.dials and args.checkpoint != EXPERT:
        args.usage_error("--dials configure the expert, --checkpoint replaces it: choose one")
    if args.processes > 1 and args.checkpoint != EXPERT:
        args.usage_error(
            "--processes are the expert's; for a policy set --rollout.backend process --rollout.num-workers"
        )

    from pirl.files import size_of
    from pirl.recipes import cli

    config = cli([args.recipe, *args.settings], prog=f"pirl {NAME}")
    if config.env is None:
        raise ConfigError(
            f"recipe {config.name} has no environment to record in",
            hint="use a recipe that has one (`pirl recipes ls tabletop`), or set one: --env.type Tabletop",
        )
    root = _root(args)
    episodes, frames, won = _record(args, config, root)
    size = size_of(root) / 1e6
    print(f"{episodes} episodes ({won} successful), {frames} steps; the dataset has {size:.1f} MB -> {root}")
    for line in _next_commands(args, config):
        print(line)
    return 0


def _root(args: argparse.Namespace) -> Path:
    from pirl.paths import lerobot_home

    if args.root is not None:
        return Path(args.root).expanduser()
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", args.repo_id) or ".." in args.repo_id:
        raise ConfigError(f"--repo-id {args.repo_id}", hint="OWNER/NAME of letters, digits and . _ -; or --root DIR")
    return lerobot_home() / args.repo_id


def _record(args: argparse.Namespace, config: Any, root: Path) -> tuple[int, int, int]:
    """Record; returns the numbers of (episodes, steps, successes)."""
    from pirl.progress import Progress
    from pirl.rollout.record import RolloutRecorder, num_recorded, recording_contexts

    frames = won = 0
    with ExitStack() as parts:
        info, rollouts = _expert(args, config) if args.checkpoint == EXPERT else _policy(args, config, parts)
        recorder = parts.enter_context(
            RolloutRecorder(root, info=info, robot=config.robot, existing="append" if args.append else "refuse")
        )
        before = num_recorded(root)
        contexts = recording_contexts(info, args.episodes, args.split, first=before)
        progress = parts.enter_context(Progress("recording", args.episodes, unit="episodes"))
        for rollout in rollouts(contexts, before):
            recorder.add(rollout)
            frames += len(rollout.episode)
            won += bool(rollout.episode.success)
            progress.advance(status=f"{won} succeeded")
    return recorder.saved, frames, won


def _expert(args: argparse.Namespace, config: Any) -> tuple[Any, Any]:
    """(the environment's facts, a function from contexts to the expert's rollouts)."""
    from pirl.envs.make import make_batch
    from pirl.rollout.pool import EnvInfo
    from pirl.rollout.record import expert_rollouts, parse_dials

    dials = parse_dials(config.env, args.dials)
    batch = make_batch(config.env, 1)
    info = EnvInfo.of(batch)
    batch.close()

    def rollouts(contexts: Any, first: int) -> Iterator[Any]:
        return expert_rollouts(config.env, contexts, dials=dials, seed=args.seed + first, processes=args.processes)

    return info, rollouts


def _policy(args: argparse.Namespace, config: Any, parts: ExitStack) -> tuple[Any, Any]:
    """Like `_expert`, for a checkpoint in the recipe's environment."""
    from dataclasses import replace

    from pirl.rollout.collect import collect, numbered
    from pirl.training.acting import open_checkpoint
    from pirl.training.build import build_pool

    acting = open_checkpoint(args.checkpoint, change=lambda own: replace(own, env=config.env, rollout=config.rollout))
    pool = parts.enter_context(build_pool(acting.found.config))
    policy = acting.use(args.seed)

    def rollouts(contexts: Any, first: int) -> Iterator[Any]:
        jobs = numbered(contexts, first)
        return collect(pool, policy, jobs, every_picture=True, retries=config.rollout.retries)

    return pool.info, rollouts


def _next_commands(args: argparse.Namespace, config: Any) -> Iterator[str]:
    """Lines with commands that use the dataset."""
    from pirl.data.assets import asset_id

    name = str(args.root or args.repo_id)
    assets = Path(config.data.assets_dir) / (config.data.asset_id or asset_id(name))
    stats = ["pirl", "norm-stats", name, "--robot", config.data.robot, "--horizon", str(config.horizon)]
    yield "next:"
    yield f"  pirl inspect data {shlex.quote(name)}"
    yield f"  {shlex.join([*stats, '--out', str(assets)])}"
    yield f"  {shlex.join(['pirl', 'train', args.recipe, '--exp-name', 'first', '--data-path', name])}"
