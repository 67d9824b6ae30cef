"""Builds environments from a configuration."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from pirl.envs.config import (
    AlohaConfig,
    EnvConfig,
    GymConfig,
    LiberoConfig,
    MetaWorldConfig,
    OGBenchConfig,
    TabletopConfig,
)
from pirl.envs.env import EnvBatch, RobotEnv, SeparateEnvs
from pirl.errors import MissingExtraError

_SIMULATORS: dict[type, tuple[str, str]] = {
    TabletopConfig: ("pirl.envs.tabletop", "TabletopEnv"),
    AlohaConfig: ("pirl.envs.aloha", "AlohaEnv"),
    OGBenchConfig: ("pirl.envs.ogbench", "OGBenchEnv"),
    LiberoConfig: ("pirl.envs.libero", "LiberoEnv"),
    MetaWorldConfig: ("pirl.envs.metaworld", "MetaWorldEnv"),
    GymConfig: ("pirl.envs.gym", "GymEnv"),
}
"""Module and class of each simulator; imported on demand, as each is an extra."""

_PACKAGES: dict[type, tuple[tuple[str, str], ...]] = {
    AlohaConfig: (("gym_aloha", "aloha"), ("dm_control", "aloha")),
    MetaWorldConfig: (("metaworld", "metaworld"),),
    OGBenchConfig: (("ogbench", "ogbench"),),
}
"""Required packages, and the extra that brings each."""


def make_env(config: EnvConfig) -> RobotEnv:
    """Build one environment."""
    module, name = _SIMULATORS[type(config)]
    build: Callable[[EnvConfig], RobotEnv] = getattr(import_module(module), name)
    return build(config)


def check_installed(config: EnvConfig) -> None:
    """Raise if an environment's packages or assets are missing; imports no simulator."""
    if isinstance(config, LiberoConfig):
        from pirl.envs.libero_setup import check_packages, find_assets

        check_packages()
        find_assets(config.assets)
    for package, extra in _PACKAGES.get(type(config), ()):
        if find_spec(package) is None:
            raise MissingExtraError(package, extra, f"the environment {type(config).__name__.removesuffix('Config')}")


def make_batch(config: EnvConfig, size: int) -> EnvBatch:
    """Build `size` environments in this process; some simulators share work or memory between them."""
    if isinstance(config, TabletopConfig):
        from pirl.envs.tabletop import Tabletop

        return Tabletop(config, size)
    if isinstance(config, MetaWorldConfig):
        from pirl.envs.metaworld import MetaWorldEnv, Worlds

        worlds = Worlds(config)
        return SeparateEnvs([MetaWorldEnv(config, worlds) for _ in range(size)])
    return SeparateEnvs([make_env(config) for _ in range(size)])
