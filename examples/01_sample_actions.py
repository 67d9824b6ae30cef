"""Load an OpenPI checkpoint and sample a chunk of actions for one observation, in the robot's units.

    python examples/01_sample_actions.py

Without a checkpoint it writes one first: OpenPI's layout, a π₀ of 270,000 parameters, random weights. For a released
checkpoint, also name a recipe with its model and robot (not tried: it needs the download):

    python examples/01_sample_actions.py gs://openpi-assets/checkpoints/pi0_aloha_sim --recipe ript_aloha_transfer
"""

import argparse
from dataclasses import replace

import jax
import numpy as np

import pirl

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint", nargs="?", help="a step's folder, or a gs:// or hf:// address")
parser.add_argument("--recipe", default="bc_tabletop", help="says which model and robot it is for")
args = parser.parse_args()
config = pirl.get_config(args.recipe)
robot = config.robot

if args.checkpoint is None:
    sizes = {"state": robot.state_dim, "actions": robot.action_dim}
    stats = {key: {"mean": np.zeros(size), "std": np.ones(size)} for key, size in sizes.items()}
    weights = jax.jit(pirl.Pi0(config.model).init)(jax.random.key(0))
    args.checkpoint = pirl.save_openpi(
        weights, "example_runs/tiny_pi0", norm_stats={"demos/tabletop": stats}, overwrite=True
    )

# The policy is compiled for `num_envs` observations per call: here, one.
config = replace(config, rollout=replace(config.rollout, num_envs=1))
acting = pirl.open_checkpoint(args.checkpoint, config=config)

# An observation has the robot's own keys, units and image sizes; the policy resizes and normalises.
pictures = {robot.cameras[slot][0]: np.zeros((224, 224, 3), np.uint8) for slot in config.cameras}
observation = {"state": np.zeros(robot.state_dim), "prompt": "red block to left zone", **pictures}
chunk = acting.chunk(observation, seed=0)

print(f"{acting.found.folder}: {config.horizon} actions of {robot.action_dim} numbers for robot {robot.name!r}")
print(np.round(chunk, 3))
print("the same seed, the same chunk:", np.array_equal(chunk, acting.chunk(observation, seed=0)))
print("another seed, another chunk:", not np.array_equal(chunk, acting.chunk(observation, seed=1)))
