"""Record your own episodes, successes and failures, as a LeRobot dataset.

    python examples/03_record_dataset.py

The loop is that of a real robot: observe, decide, write the frame, act. Training needs `next.success` (or
`next.reward`); `next.truncated` distinguishes a time-out from a failure that ended the task. Other columns are
optional. Episodes are written atomically.
"""

import gymnasium
import my_simulator
import numpy as np

import pirl

FOLDER = "example_runs/reach"
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "goal_x", "goal_y"]},
    "observation.images.front": {"dtype": "image", "shape": (32, 32, 3)},  # "video" for real cameras
    "action": {"dtype": "float32", "shape": (2,)},
    "next.success": {"dtype": "bool", "shape": (1,)},
    "next.truncated": {"dtype": "bool", "shape": (1,)},
}
env, rng = gymnasium.make("Reach-v0", render_mode="rgb_array"), np.random.default_rng(0)

with pirl.LeRobotWriter(FOLDER, fps=10, features=FEATURES, robot_type="point", existing="overwrite") as writer:
    for number in range(20):
        state, _ = env.reset(seed=number)
        aim = rng.choice([1.0, -1.0], p=[0.7, 0.3])  # this operator sometimes walks away from the goal
        over = False
        while not over:
            action = np.clip(aim * (state[2:] - state[:2]) * 5, -1, 1).astype(np.float32)
            frame = {"observation.state": state, "observation.images.front": env.render(), "action": action}
            state, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
            writer.add_frame({**frame, "next.success": info["is_success"], "next.truncated": truncated})
        if number == 13:
            writer.discard_episode()  # a person stumbled over the cable
        else:
            writer.save_episode(task="reach the goal")

print(pirl.inspect_dataset(FOLDER), end="\n\n")

# Read it back as training does. Failures are time-outs by `next.truncated`, so the critic bootstraps there. Without
# that column a labelled failure ends the task, and its last actions have value 0 (`data.failure`).
source = pirl.open_dataset(FOLDER, my_simulator.POINT, outcome="columns")
for index in range(6):
    episode = source.episode(index)
    print(f"episode {index}: {len(episode)} steps, success {episode.success}, terminated {episode.terminated[-1]}")
