"""Read a LeRobot dataset and look at Q-chunk batches: what a critic is shown, also where an episode ends.

    python examples/02_q_chunks.py
    python examples/02_q_chunks.py --dataset recordings/fold_box --robot aloha --tokenizer byte

Without a dataset it records one first: the scripted expert of the embedded tabletop, which fails now and then.
"""

import argparse

import jax
import numpy as np

from pirl.data.config import DataConfig
from pirl.data.create import create_acrlpd_data_loader, create_source, create_transform
from pirl.data.inspection import inspect
from pirl.data.robots import get_robot
from pirl.data.stats import compute_norm_stats
from pirl.envs.config import TabletopConfig
from pirl.rollout.pool import LocalPool
from pirl.rollout.record import RolloutRecorder, expert_rollouts, recording_contexts

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", help="a LeRobot dataset: a folder, or a repo id")
parser.add_argument("--robot", default="tabletop", help="whose data it is")
parser.add_argument("--tokenizer", default="word", help="paligemma, word, byte, none, or a file")
args = parser.parse_args()

if args.dataset is None:
    args.dataset, table = "example_runs/tabletop", TabletopConfig(level="easy")
    with LocalPool(table, 1) as pool:
        info = pool.info
    with RolloutRecorder(args.dataset, info=info, existing="overwrite") as recorder:
        for rollout in expert_rollouts(table, recording_contexts(info, 20, "train"), dials=None, seed=0):
            recorder.add(rollout)
print(inspect(args.dataset), end="\n\n")

HORIZON = 4  # actions of a chunk; the critic scores all of them
robot = get_robot(args.robot)
config = DataConfig(repo_ids=(args.dataset,), robot=args.robot, tokenizer=args.tokenizer, outcome="columns")
stats = compute_norm_stats(create_source(config, robot), robot, HORIZON)
transform = create_transform(config, horizon=HORIZON, norm_stats=stats, image_size=64)
with create_acrlpd_data_loader(config, transform=transform, horizon=HORIZON, discount=0.99, batch_size=64) as loader:
    batch = loader.sample_batch()

for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    print(f"{jax.tree_util.keystr(path):55} {leaf.dtype!s:8} {leaf.shape}")

# A chunk that runs over the end of an episode: steps after the end are not valid, and nothing is bootstrapped there.
ends = np.flatnonzero((batch["valid"].sum(1) < HORIZON) & (batch["next_terminal"] == 1))
for row in ends[:1]:
    for name in ("valid", "rewards", "masks"):
        print(f"{name:8} of a chunk that ends early: {batch[name][row]}")
    print(f"its target is the reward alone: {batch['reward_sum'][row]:.3f} over {batch['length'][row]} step(s)")
