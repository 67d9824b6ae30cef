"""`pirl norm-stats`: normalisation statistics of states and actions, computed as OpenPI does."""

import argparse
from pathlib import Path

from pirl.cli.app import positive

NAME = "norm-stats"
HELP = """\
Computes mean, standard deviation and quantiles of a dataset's states and action chunks, in the model's units, and
writes OpenPI's norm_stats.json. Decodes no video. Pools several datasets, each step with equal weight."""
EXAMPLES = """\
examples:
  pirl norm-stats lerobot/aloha_sim_transfer_cube_human --robot aloha_sim
  pirl norm-stats recordings/fold_box --robot aloha --out assets/fold_box
  pirl norm-stats recordings/pick --robot libero --horizon 10 --overwrite
  pirl norm-stats recordings/demos recordings/rollouts --robot droid --out assets/pick"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl norm-stats`."""
    text = "LeRobot datasets: folders or hub repo ids"
    parser.add_argument("data", metavar="DATASET", nargs="+", help=text)
    parser.add_argument("--robot", required=True, metavar="NAME", help="the robot: aloha, libero, droid, ...")
    parser.add_argument("--horizon", type=positive, default=50, metavar="H", help="actions per chunk (default 50)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (default assets/DATASET, the first)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing statistics")


def run(args: argparse.Namespace) -> int:
    """Compute, show and write the statistics."""
    from pirl.data import lerobot
    from pirl.data.assets import asset_id
    from pirl.data.create import find_columns
    from pirl.data.dataset import LeRobotSource, MixedSource
    from pirl.data.normalize import StatsOrigin, check_absent, save_norm_stats
    from pirl.data.outcomes import OutcomeRule
    from pirl.data.robots import get_robot
    from pirl.data.stats import compute_norm_stats
    from pirl.text import table

    robot = get_robot(args.robot)
    folder = args.out or Path("assets") / asset_id(args.data[0])
    if not args.overwrite:  # check before computing for minutes
        check_absent(folder)
    sources = []
    for name in args.data:
        root = lerobot.resolve(name)
        state_key, action_key = find_columns(robot, lerobot.read_meta(root).features)
        # Statistics need neither outcomes nor images: use a rule without columns, and no cameras.
        rule = OutcomeRule(rule="sparse_success")
        source = LeRobotSource(root, cameras={}, state_key=state_key, action_key=action_key, outcome=rule)
        sources.append(source)
    data = MixedSource(sources)
    stats = compute_norm_stats(data, robot, args.horizon)
    for key, found in stats.items():
        print(f"{key}: {len(found)} dimensions, in the model's units")
        columns = {name: getattr(found, name) for name in ("mean", "std", "q01", "q99")}
        numbers = [(str(i), *(f"{column[i]:.4f}" for column in columns.values())) for i in range(len(found))]
        print("\n".join(table([("", *columns), *numbers], ">>>>>", indent="  ")))
    origin = StatsOrigin(robot=robot.name, horizon=args.horizon, datasets=tuple(args.data))
    file = save_norm_stats(folder, stats, origin=origin, overwrite=args.overwrite)
    print(f"{int(data.lengths.sum())} steps of {len(data)} episodes -> {file}")
    return 0
