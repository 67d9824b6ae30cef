"""Read a LeRobot dataset and look at Q-chunking batches: the critic's training data, also at the end of an episode.

    python examples/02_q_chunks.py
    python examples/02_q_chunks.py --dataset recordings/fold_box --robot aloha --tokenizer byte

Without a dataset it records one first, with the scripted expert of the embedded tabletop, which sometimes fails.
"""

import argparse

import jax
import numpy as np

import pirl

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", help="a LeRobot dataset: a folder, or a repo id")
parser.add_argument("--robot", default="tabletop", help="whose data it is")
parser.add_argument("--tokenizer", default="word", help="paligemma, word, byte, none, or a file")
args = parser.parse_args()

if args.dataset is None:
    args.dataset, table = "example_runs/tabletop", pirl.TabletopConfig(level="easy")
    with pirl.LocalPool(table, 1) as pool:
        info = pool.info
    contexts = pirl.recording_contexts(info, 20, "train")
    with pirl.RolloutRecorder(args.dataset, info=info, existing="overwrite") as recorder:
        for rollout in pirl.expert_rollouts(table, contexts, dials=None, seed=0):
            recorder.add(rollout)
print(pirl.inspect_dataset(args.dataset), end="\n\n")

HORIZON = 4  # actions of a chunk; the critic scores all of them
robot = pirl.get_robot(args.robot)
config = pirl.DataConfig(repo_ids=(args.dataset,), robot=args.robot, tokenizer=args.tokenizer, outcome="columns")
stats = pirl.compute_norm_stats(pirl.create_source(config, robot), robot, HORIZON)
transform = pirl.create_transform(config, horizon=HORIZON, norm_stats=stats, image_size=64)
sizes = {"horizon": HORIZON, "batch_size": 64}
with pirl.create_acrlpd_data_loader(config, transform=transform, discount=0.99, **sizes) as loader:
    batch = loader.sample_batch()

for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    print(f"{jax.tree_util.keystr(path):55} {leaf.dtype!s:8} {leaf.shape}")

# A chunk that runs past the end of an episode: steps after the end are not valid, and the target does not bootstrap.
ends = np.flatnonzero((batch["valid"].sum(1) < HORIZON) & (batch["next_terminal"] == 1))
for row in ends[:1]:
    for name in ("valid", "rewards", "masks"):
        print(f"{name:8} of a chunk that ends early: {batch[name][row]}")
    print(f"its target is the reward alone: {batch['reward_sum'][row]:.3f} over {batch['length'][row]} step(s)")
