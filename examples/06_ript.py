"""Improve a policy by groups of rollouts (RIPT) in your own simulator.

    python examples/06_ript.py --iterations 20

The policy is a small network on the state with random initial weights, because in this simulator random actions reach
the goal often enough to learn from. A π₀ needs a checkpoint that sometimes succeeds: set `model=get_preset("pi0")` and
`init_weights="..."` in the configuration; the rest stays.
"""

import argparse

import numpy as np
from my_simulator import REACH

import pirl

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
args = parser.parse_args()

# Statistics usually come from a dataset (example 04); here the ranges of states and actions are known.
sizes = {"state": 4, "actions": 2}
stats = {name: pirl.NormStats(mean=np.zeros(size), std=np.ones(size)) for name, size in sizes.items()}
pirl.save_norm_stats("example_runs/assets/point", stats, overwrite=True)

config = pirl.RLTrainConfig(
    name="ript_reach",
    exp_name="first",
    model=pirl.MLPFlowConfig(state_dim=4, action_dim=2, horizon=4, hidden=(64, 64)),
    agent=pirl.RIPTConfig(group_size=8, groups_per_iteration=16, max_attempts=1.0, epochs=4, drift_limit=None),
    data=pirl.DataConfig(robot=REACH.robot, asset_id="point", assets_dir="example_runs/assets", tokenizer="none"),
    env=REACH,
    rollout=pirl.RolloutConfig(num_envs=128, flow_steps=5),
    evaluation=pirl.EvalConfig(interval=10, episodes=128),
    policy_schedule=pirl.ConstantSchedule(lr=2e-3),
    checkpoint=pirl.CheckpointConfig(base_dir="example_runs/checkpoints", save_interval=1, keep_last=args.iterations),
    batch_size=128,
    num_train_steps=args.iterations,
    log_interval=5,
)
pirl.train(config, overwrite=True)
print(f"checkpoints, metrics.jsonl and config.yaml are in {config.run_dir}; compare two of them: example 09")
