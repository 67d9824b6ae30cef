"""From a configuration to environments."""

from collections.abc import Callable
from importlib import import_module

from pirl.envs.config import AlohaConfig, EnvConfig, GymConfig, LiberoConfig, OGBenchConfig, TabletopConfig
from pirl.envs.env import EnvBatch, RobotEnv, SeparateEnvs

_SIMULATORS: dict[type, tuple[str, str]] = {
    TabletopConfig: ("pirl.envs.tabletop", "TabletopEnv"),
    AlohaConfig: ("pirl.envs.aloha", "AlohaEnv"),
    OGBenchConfig: ("pirl.envs.ogbench", "OGBenchEnv"),
    LiberoConfig: ("pirl.envs.libero", "LiberoEnv"),
    GymConfig: ("pirl.envs.gym", "GymEnv"),
}
"""Where each simulator lives; imported only when it is asked for, as each is an extra."""


def make_env(config: EnvConfig) -> RobotEnv:
    """One environment."""
    module, name = _SIMULATORS[type(config)]
    build: Callable[[EnvConfig], RobotEnv] = getattr(import_module(module), name)
    return build(config)


def make_batch(config: EnvConfig, size: int) -> EnvBatch:
    """`size` environments in this process; those that can be vectorised are."""
    if isinstance(config, TabletopConfig):
        from pirl.envs.tabletop import Tabletop

        return Tabletop(config, size)
    return SeparateEnvs([make_env(config) for _ in range(size)])
