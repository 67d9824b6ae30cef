"""`pirl norm-stats`: the statistics that states and actions are normalised with, as OpenPI computes them."""

import argparse
from pathlib import Path

from pirl.cli.app import positive

NAME = "norm-stats"
HELP = """\
Computes the mean, standard deviation and quantiles of a dataset's states and action chunks, in the units the model
sees, and writes them as OpenPI's norm_stats.json. Only the numbers are read; no video is decoded."""
EXAMPLES = """\
examples:
  pirl norm-stats lerobot/aloha_sim_transfer_cube_human --robot aloha_sim
  pirl norm-stats recordings/fold_box --robot aloha --out assets/fold_box
  pirl norm-stats recordings/pick --robot libero --horizon 10 --overwrite"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl norm-stats`."""
    parser.add_argument("data", metavar="DATASET", help="a LeRobot dataset: a folder, or a repo id on the hub")
    parser.add_argument("--robot", required=True, metavar="NAME", help="whose data it is: aloha, libero, droid, ...")
    parser.add_argument("--horizon", type=positive, default=50, metavar="H", help="actions per chunk (default 50)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default assets/DATASET)")
    parser.add_argument("--overwrite", action="store_true", help="replace statistics that are there")


def run(args: argparse.Namespace) -> int:
    """Compute, show and write the statistics."""
    from pirl import names
    from pirl.cli.inspect import table
    from pirl.data import lerobot
    from pirl.data.dataset import LeRobotSource
    from pirl.data.normalize import save_norm_stats
    from pirl.data.outcomes import OutcomeRule
    from pirl.data.robots import get_robot
    from pirl.data.stats import compute_norm_stats

    robot = get_robot(args.robot)
    root = lerobot.resolve(args.data)
    features = lerobot.read_meta(root).features
    states = [keys[0] for keys in robot.state_keys if len(keys) == 1]
    source = LeRobotSource(
        root,
        cameras={},
        state_key=next((key for key in states if key in features), names.LEROBOT_STATE),
        action_key=next((key for key in robot.action_keys if key in features), names.LEROBOT_ACTION),
        outcome=OutcomeRule(rule="sparse_success"),  # a rule that needs no columns: outcomes do not matter here
    )
    stats = compute_norm_stats(source, robot, args.horizon)
    for key, found in stats.items():
        print(f"{key}: {len(found)} dimensions, in the model's units")
        columns = {name: getattr(found, name) for name in ("mean", "std", "q01", "q99")}
        numbers = [(str(i), *(f"{column[i]:.4f}" for column in columns.values())) for i in range(len(found))]
        print("\n".join(table([("", *columns), *numbers], ">>>>>")))
    # A repo id keeps its owner, as OpenPI's asset ids do; a folder goes by its name.
    asset = root.resolve().name if Path(args.data).expanduser().is_dir() else args.data
    file = save_norm_stats(args.out or Path("assets") / asset, stats, overwrite=args.overwrite)
    print(f"{int(source.lengths.sum())} steps of {len(source)} episodes -> {file}")
    return 0
