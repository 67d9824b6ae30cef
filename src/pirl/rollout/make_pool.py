"""Builds a pool of environments from a configuration."""

from pirl.envs.config import EnvConfig
from pirl.rollout.config import RolloutConfig
from pirl.rollout.pool import EnvPool, LocalPool
from pirl.rollout.ray import RayPool
from pirl.rollout.workers import ProcessPool


def make_pool(env: EnvConfig, rollout: RolloutConfig) -> EnvPool:
    """Environments on the configured `rollout.backend`."""
    if rollout.backend == "local":
        return LocalPool(env, rollout.num_envs)
    pool: type[ProcessPool] | type[RayPool] = ProcessPool if rollout.backend == "process" else RayPool
    times = {"timeout": rollout.worker_timeout, "start_timeout": rollout.worker_start_timeout}
    return pool(env, size=rollout.num_envs, num_workers=rollout.num_workers, **times)
