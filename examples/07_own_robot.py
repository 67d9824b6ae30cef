"""Describe your own robot, and check that the transform to the model's units and back is lossless.

    python examples/07_own_robot.py

An SO-100 arm: five joints and a gripper, two cameras. Joint actions are relative to the state, the gripper's absolute.
`data.robot` names such a robot as `module:NAME`, in Python, in YAML and on the command line:

    PYTHONPATH=. pirl norm-stats recordings/so100 --robot my_robots:SO100 --horizon 10 --out assets/so100
"""

from typing import Any

import numpy as np

import pirl

SO100 = pirl.make_robot(
    name="so100",
    state_dim=6,
    action_dim=6,
    cameras={  # the model's camera slot -> keys of its image: at inference, then in a dataset
        "base_0_rgb": ("images/front", "observation.images.front"),
        "left_wrist_0_rgb": ("images/wrist", "observation.images.wrist"),
    },
    relative=(5, -1),
    prompt="pick up the block",
)
HORIZON, rng = 10, np.random.default_rng(0)


def episode() -> pirl.Episode:
    """A synthetic recording, in which joints follow the commands of the previous step."""
    actions = np.cumsum(rng.normal(0, 0.05, (40, 6)), 0).astype(np.float32)
    state, last = np.concatenate([np.zeros((1, 6), np.float32), actions[:-1]]), np.arange(40) == 39
    ends: dict[str, Any] = {"terminated": last, "truncated": np.zeros(40, bool), "success": True}
    ends |= {"rewards": last.astype(np.float32)}
    return pirl.Episode(task="pick up the block", state=state, actions=actions, **ends)


episodes = [episode() for _ in range(5)]
stats = pirl.compute_norm_stats(pirl.MemorySource(cameras=(), items=[(one, {}) for one in episodes]), SO100, HORIZON)
print("joints relative, gripper absolute; spread of the actions:", np.round(stats["actions"].std, 3))

# The robot's observation at one moment and its next actions. Recordings go through the same transform in the loader.
pictures = {name: np.full((480, 640, 3), 90, np.uint8) for name in ("front", "wrist")}
raw = {"state": episodes[0].state[7], "images": pictures, "actions": episodes[0].actions[7 : 7 + HORIZON]}
transform = pirl.create_transform(pirl.DataConfig(tokenizer="byte"), horizon=HORIZON, robot=SO100, norm_stats=stats)
sample = transform.train_sample(raw)
for name, image in sample["image"].items():
    print(f"{name}: {image.shape}, {'there' if sample['image_mask'][name] else 'not on this robot: masked'}")
print("state", sample["state"].shape, "actions", sample["actions"].shape, "of which 6 are real, the rest is padding")

back = transform.robot_actions(sample["actions"], raw["state"])
print(f"back in the robot's units, largest difference: {np.abs(back - raw['actions']).max():.1e}")
