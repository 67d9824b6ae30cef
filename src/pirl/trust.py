"""User code named in a configuration: robots, environments and algorithms, as `module:NAME`.

A user's own configuration may name any module. One that comes with a checkpoint may not, because importing a module
runs its code: it is refused unless the user trusts the module (`--trust MODULE` or `PIRL_TRUST`) or has already
imported it.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pirl.errors import ConfigError

VARIABLE = "PIRL_TRUST"
"""Environment variable with the trusted modules, comma-separated; worker processes inherit it."""
_KEYS = ("type", "robot", "id", "eval_fn")
_NAME = re.compile(r"(\w[\w.]*):[\w./-]+")


def allow(*modules: str) -> None:
    """Trust these modules in this process and its children."""
    os.environ[VARIABLE] = ",".join(sorted({*trusted(), *modules}))


def trusted() -> set[str]:
    """The modules that the user trusts."""
    return {name for name in os.environ.get(VARIABLE, "").split(",") if name}


def check(config: Mapping[str, Any], *, source: object) -> None:
    """Raise if a foreign configuration names untrusted modules."""
    strangers = sorted({name for name in _modules(config) if not _known(name)})
    if strangers:
        flags = " ".join(f"--trust {name}" for name in strangers)
        raise ConfigError(
            f"{source} names code outside pirl: {', '.join(strangers)}; importing it would run it",
            hint=f"if you know it: {flags} (or {VARIABLE}={','.join(strangers)})",
        )


def load_object(name: str, *, what: str) -> Any:
    """Import and return the object that `module:NAME` names; the working directory is on the path."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = sys.modules["__main__"] if module == main_module() else import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} {name}: the module cannot be imported: {error}",
            hint="its folder must be on the path: PYTHONPATH=FOLDER pirl ...",
        ) from error
    if not hasattr(found, attribute):
        raise ConfigError(
            f"{what} {name}: {module} has no {attribute}",
            hint=f"it has {', '.join(sorted(one for one in vars(found) if one.isupper() or one[:1].isupper())) or '-'}",
        )
    return getattr(found, attribute)


def main_module() -> str | None:
    """The running script's module name, or None at a prompt."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).stem if file else None


def _known(module: str) -> bool:
    return module.partition(".")[0] == "pirl" or module in (*sys.modules, main_module(), *trusted())


def _modules(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _modules(value)
        elif key in _KEYS and isinstance(value, str) and (match := _NAME.fullmatch(value)):
            yield match[1]
