"""Named configurations. `get_config` returns one by name, `load` also reads YAML files, `cli` also applies flags.

A recipe is Python: one `RLTrainConfig` in the module of its robot. The module's docstring has the commands, the
hardware requirements and the known results.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pirl import trust
from pirl.config import RLTrainConfig
from pirl.config_io import from_dict, read_yaml
from pirl.errors import ConfigError, did_you_mean
from pirl.recipes import aloha, aloha_sim, aloha_state, debug, droid, foreign, libero, metaworld, state, tabletop
from pirl.recipes.foreign import ALIASES as ALIASES

_MODULES = (debug, tabletop, aloha, aloha_sim, aloha_state, libero, metaworld, state, droid)

RECIPES: Mapping[str, RLTrainConfig] = {recipe.name: recipe for module in _MODULES for recipe in module.RECIPES}
"""All recipes by name."""


def get_config(name: str) -> RLTrainConfig:
    """A recipe by name; an unknown name raises with the nearest matches."""
    if name in foreign.COMMANDS:
        raise ConfigError(f"{name!r} is no recipe", hint=f"type: {foreign.COMMANDS[name]}")
    if ALIASES.get(name, name) not in RECIPES:
        raise did_you_mean(name, [*RECIPES, *ALIASES], kind="recipe")
    return RECIPES[ALIASES.get(name, name)]


def is_known(source: str) -> bool:
    """Whether a word is a recipe's name or a YAML file, as opposed to a folder."""
    return ALIASES.get(source, source) in RECIPES or Path(source).suffix in (".yaml", ".yml")


def list_configs() -> list[str]:
    """The names of all recipes."""
    return list(RECIPES)


def about(name: str) -> str:
    """A recipe's description: its module's docstring."""
    module = next(module for module in _MODULES if get_config(name) in module.RECIPES)
    return (module.__doc__ or "").strip()


def load(source: str) -> RLTrainConfig:
    """A recipe by name, from your own module (`module:RECIPE`), or from a YAML file.

    A file is a complete configuration, or `recipe: NAME` with overrides.
    """
    if Path(source).suffix not in (".yaml", ".yml"):
        return _own(source) if ":" in source else get_config(source)
    data = read_yaml(source)
    try:
        if foreign.is_foreign(data):
            return _load_foreign(data, source)
        recipe = data.pop("recipe", None)
        if not isinstance(recipe, str | None):
            raise ConfigError(f"recipe is {recipe!r}", hint=f"name one of {', '.join(RECIPES)}")
        return from_dict(RLTrainConfig, data, base=None if recipe is None else get_config(recipe))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}", hint=error.hint) from error


def _load_foreign(data: Mapping[str, Any], source: str) -> RLTrainConfig:
    """Read a file in another trainer's style and print the equivalent pirl command."""
    from pirl.recipes.flags import apply_flags

    recipe, words = foreign.translate(data, RECIPES)
    print(f"{source} says, in pirl's words: {shlex.join(['pirl', 'train', recipe, *words])}")
    return apply_flags(get_config(recipe), words, prog=f"{source}:")


def _own(name: str) -> RLTrainConfig:
    """A recipe of your own: `module:RECIPE`."""
    trust.allow(name.partition(":")[0])
    found = trust.load_object(name, what="recipe")
    if not isinstance(found, RLTrainConfig):
        raise ConfigError(f"recipe {name} is a {type(found).__name__}", hint="it is a pirl.config.RLTrainConfig")
    return found


def cli(args: Sequence[str], *, prog: str = "pirl train", about: str = "") -> RLTrainConfig:
    """The configuration for a command line: a recipe or a YAML file, then flags such as `--agent.discount 0.995`.

    `about` introduces the help. Usage errors and `--help` raise SystemExit, as in argparse.
    """
    from pirl.recipes.flags import apply_flags  # imports tyro

    if not args:
        raise ConfigError("no recipe is named", hint=f"name a YAML file or one of {', '.join(RECIPES)}")
    source, *flags = args
    return apply_flags(load(source), flags, prog=f"{prog} {source}", about=about)
