"""Key and file names of OpenPI, LeRobot and pirl, each defined once."""

import re

# OpenPI's camera slots, in the order the model reads them.
BASE_CAMERA = "base_0_rgb"
LEFT_WRIST_CAMERA = "left_wrist_0_rgb"
RIGHT_WRIST_CAMERA = "right_wrist_0_rgb"
CAMERAS = (BASE_CAMERA, LEFT_WRIST_CAMERA, RIGHT_WRIST_CAMERA)

# OpenPI's model-input dictionary.
IMAGE = "image"
IMAGE_MASK = "image_mask"
STATE = "state"
ACTIONS = "actions"
PROMPT = "prompt"
TOKENIZED_PROMPT = "tokenized_prompt"
TOKENIZED_PROMPT_MASK = "tokenized_prompt_mask"

# LeRobot's columns.
LEROBOT_STATE = "observation.state"
LEROBOT_ACTION = "action"
LEROBOT_IMAGES = "observation.images"
NEXT_REWARD = "next.reward"
NEXT_SUCCESS = "next.success"
NEXT_DONE = "next.done"
NEXT_TRUNCATED = "next.truncated"
INTERVENTION = "intervention"

# pirl's own columns: the policy's current chunk, the index of its current step, the actor, the operator's notes.
INTENDED = "intended"
INTENDED_STEP = "intended_step"
POLICY = "policy"
NOTE = "note"
# Recordings at the server: whether the row has its own observation or repeats the previous request's.
OBSERVED = "observed"

# OpenPI's checkpoint layout: <step>/{params,train_state,assets/<asset_id>/norm_stats.json}.
PARAMS_ITEM = "params"
TRAIN_STATE_ITEM = "train_state"
ASSETS_ITEM = "assets"
NORM_STATS_FILE = "norm_stats.json"
CONFIG_FILE = "config.yaml"
HANDOVER_FILE = "openpi_config.py"
SAFETENSORS_FILE = "model.safetensors"
CHECKSUMS_FILE = "checksums.sha256"

# A collected episode beside a checkpoint: its number, a hash of its content. Also matches a killed process's leftovers.
EPISODE_FILE = re.compile(r"\d{8,}-[0-9a-f]{16}\.npz|\.\d{8,}-[0-9a-f]{16}\.npz\.[0-9a-f]+\.tmp(\.npz)?")
