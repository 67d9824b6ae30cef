"""pirl ("pearl": π + RL): reinforcement learning for π₀ and π₀.₅ robot policies.

`import pirl` is cheap: it imports neither jax nor a simulator until a name that needs it is used. Every name here is
also importable from the module that defines it; docs/api.md describes them all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
    from pirl.build import build_agent
    from pirl.checkpoints.openpi import save_openpi
    from pirl.checkpoints.pytorch import save_pytorch
    from pirl.config import RLTrainConfig
    from pirl.data.config import DataConfig
    from pirl.data.create import create_acrlpd_data_loader, create_source, create_transform, open_dataset
    from pirl.data.inspection import inspect_dataset
    from pirl.data.normalize import NormStats, load_norm_stats, save_norm_stats
    from pirl.data.replay import MemorySource
    from pirl.data.robots import Robot, get_robot, make_robot
    from pirl.data.stats import compute_norm_stats
    from pirl.data.transforms import Transform
    from pirl.data.writer import LeRobotWriter
    from pirl.envs.config import AlohaConfig, GymConfig, LiberoConfig, OGBenchConfig, TabletopConfig
    from pirl.envs.env import RobotEnv
    from pirl.envs.gym import GymEnv
    from pirl.errors import PirlError
    from pirl.models.config import MLPFlowConfig, Pi0Config, get_preset
    from pirl.models.observation import Observation
    from pirl.models.pi0 import Pi0
    from pirl.recipes import get_config, list_configs
    from pirl.records import Context, Episode, EpisodeSource, Rollout
    from pirl.report.page import write_report
    from pirl.rollout.check import check_env
    from pirl.rollout.config import EvalConfig, OnlineConfig, RolloutConfig
    from pirl.rollout.contexts import fixed_contexts
    from pirl.rollout.evaluate import compare, evaluate
    from pirl.rollout.policy import ChunkPolicy
    from pirl.rollout.pool import LocalPool
    from pirl.rollout.record import RolloutRecorder, expert_rollouts, recording_contexts
    from pirl.rollout.workers import ProcessPool
    from pirl.training.acting import open_checkpoint
    from pirl.training.build import build_pool
    from pirl.training.config import CheckpointConfig, ConstantSchedule, CosineSchedule
    from pirl.training.recovery import train

_NAMES = {
    # Train.
    "train": "pirl.training.recovery",
    "get_config": "pirl.recipes",
    "list_configs": "pirl.recipes",
    "RLTrainConfig": "pirl.config",
    "BCConfig": "pirl.agents.config",
    "ACRLPDConfig": "pirl.agents.config",
    "RIPTConfig": "pirl.agents.config",
    "Pi0Config": "pirl.models.config",
    "MLPFlowConfig": "pirl.models.config",
    "get_preset": "pirl.models.config",
    "Pi0": "pirl.models.pi0",
    "DataConfig": "pirl.data.config",
    "CheckpointConfig": "pirl.training.config",
    "ConstantSchedule": "pirl.training.config",
    "CosineSchedule": "pirl.training.config",
    "RolloutConfig": "pirl.rollout.config",
    "EvalConfig": "pirl.rollout.config",
    "OnlineConfig": "pirl.rollout.config",
    "build_agent": "pirl.build",
    # Act.
    "open_checkpoint": "pirl.training.acting",
    "ChunkPolicy": "pirl.rollout.policy",
    "Observation": "pirl.models.observation",
    "save_openpi": "pirl.checkpoints.openpi",
    "save_pytorch": "pirl.checkpoints.pytorch",
    # Evaluate.
    "evaluate": "pirl.rollout.evaluate",
    "compare": "pirl.rollout.evaluate",
    "fixed_contexts": "pirl.rollout.contexts",
    "write_report": "pirl.report.page",
    # Environments.
    "check_env": "pirl.rollout.check",
    "RobotEnv": "pirl.envs.env",
    "GymEnv": "pirl.envs.gym",
    "GymConfig": "pirl.envs.config",
    "TabletopConfig": "pirl.envs.config",
    "AlohaConfig": "pirl.envs.config",
    "LiberoConfig": "pirl.envs.config",
    "OGBenchConfig": "pirl.envs.config",
    "LocalPool": "pirl.rollout.pool",
    "ProcessPool": "pirl.rollout.workers",
    "build_pool": "pirl.training.build",
    # Record.
    "LeRobotWriter": "pirl.data.writer",
    "RolloutRecorder": "pirl.rollout.record",
    "expert_rollouts": "pirl.rollout.record",
    "recording_contexts": "pirl.rollout.record",
    "Context": "pirl.records",
    "Rollout": "pirl.records",
    # Data.
    "open_dataset": "pirl.data.create",
    "inspect_dataset": "pirl.data.inspection",
    "create_source": "pirl.data.create",
    "create_transform": "pirl.data.create",
    "create_acrlpd_data_loader": "pirl.data.create",
    "Episode": "pirl.records",
    "EpisodeSource": "pirl.records",
    "MemorySource": "pirl.data.replay",
    "Transform": "pirl.data.transforms",
    "NormStats": "pirl.data.normalize",
    "compute_norm_stats": "pirl.data.stats",
    "load_norm_stats": "pirl.data.normalize",
    "save_norm_stats": "pirl.data.normalize",
    # Robots.
    "Robot": "pirl.data.robots",
    "get_robot": "pirl.data.robots",
    "make_robot": "pirl.data.robots",
    # Errors.
    "PirlError": "pirl.errors",
}
"""Public name -> the module that defines it, in the order of docs/api.md. A comment starts a section there."""

__all__ = [
    "ACRLPDConfig",
    "AlohaConfig",
    "BCConfig",
    "CheckpointConfig",
    "ChunkPolicy",
    "ConstantSchedule",
    "Context",
    "CosineSchedule",
    "DataConfig",
    "Episode",
    "EpisodeSource",
    "EvalConfig",
    "GymConfig",
    "GymEnv",
    "LeRobotWriter",
    "LiberoConfig",
    "LocalPool",
    "MLPFlowConfig",
    "MemorySource",
    "NormStats",
    "OGBenchConfig",
    "Observation",
    "OnlineConfig",
    "Pi0",
    "Pi0Config",
    "PirlError",
    "ProcessPool",
    "RIPTConfig",
    "RLTrainConfig",
    "Robot",
    "RobotEnv",
    "Rollout",
    "RolloutConfig",
    "RolloutRecorder",
    "TabletopConfig",
    "Transform",
    "__version__",
    "build_agent",
    "build_pool",
    "check_env",
    "compare",
    "compute_norm_stats",
    "create_acrlpd_data_loader",
    "create_source",
    "create_transform",
    "evaluate",
    "expert_rollouts",
    "fixed_contexts",
    "get_config",
    "get_preset",
    "get_robot",
    "inspect_dataset",
    "list_configs",
    "load_norm_stats",
    "make_robot",
    "open_checkpoint",
    "open_dataset",
    "recording_contexts",
    "save_norm_stats",
    "save_openpi",
    "save_pytorch",
    "train",
    "write_report",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"module 'pirl' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_NAMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_NAMES})
