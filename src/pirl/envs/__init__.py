"""Environments: robots in simulation. No jax here, so that a worker process starts fast and stays small.

Exports what you need to write your own environment. Names load lazily, because processes that never step a simulator
read configurations, too.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Context": "pirl.records",
    "Expected": "pirl.envs.checker",
    "GymConfig": "pirl.envs.config",
    "GymEnv": "pirl.envs.gym",
    "Outcome": "pirl.envs.env",
    "RobotEnv": "pirl.envs.env",
    "check": "pirl.envs.checker",
    "make_batch": "pirl.envs.make",
    "make_env": "pirl.envs.make",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
