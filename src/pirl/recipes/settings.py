"""Every setting of a configuration by dotted path: types, value, help."""

import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pirl.config_io import TAG, field_docs, tag
from pirl.config_io import kinds as members


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value of a configuration."""

    path: str
    """Dotted path, as in YAML and error messages."""
    kinds: tuple[Any, ...]
    """Allowed types, including NoneType if optional."""
    value: Any
    """Current value, or the default if its part is not set."""
    owner: type
    """The dataclass that defines it."""

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return f"--{self.path.replace('_', '-')}"

    @property
    def off(self) -> str | None:
        """The flag that turns a boolean off; None for other types."""
        head, dot, name = self.flag.removeprefix("--").rpartition(".")
        return f"--{head}{dot}no-{name}" if self.kinds == (bool,) else None

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words, if they are a fixed list; for a tuple, its members' words."""
        kinds = [kind for member in self.kinds for kind in (get_args(member) if _is_tuple(member) else (member,))]
        words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        words += ["True", "False"] if bool in kinds else []
        return (*words, "None") if words and types.NoneType in kinds else tuple(words)

    def words(self, value: Any) -> list[str]:
        """Command-line words that set it to a value."""
        if self.off is not None:
            return [self.flag if value else self.off]
        return [self.flag, str(value)]

    @property
    def many(self) -> bool:
        """Whether it holds several values."""
        return any(_is_tuple(kind) for kind in self.kinds)

    @property
    def help(self) -> str:
        """Help text: the field's docstring."""
        return _docs(self.owner).get(self.path.rpartition(".")[2], "")


def settings(config: Any) -> dict[str, Setting]:
    """The settings of a configuration; for a part with several kinds, those of its current kind."""
    return {one.path: one for one in _settings(config, "")}


def part_kinds(config: Any) -> dict[str, tuple[str, ...]]:
    """`PART.type` -> names of the possible kinds, for each part that has several."""
    return {path: tuple(map(tag, kinds)) for path, kinds in _parts(config, "") if len(kinds) > 1}


@cache
def _docs(owner: type) -> dict[str, str]:
    return field_docs(owner)


def _settings(config: Any, prefix: str) -> Iterator[Setting]:
    for name, kinds, value in _fields(config):
        if not _dataclasses(kinds):
            yield Setting(path=prefix + name, kinds=kinds, value=value, owner=type(config))
        elif value is not None:
            yield from _settings(value, f"{prefix}{name}.")


def _parts(config: Any, prefix: str) -> Iterator[tuple[str, tuple[type, ...]]]:
    for name, kinds, value in _fields(config):
        if found := _dataclasses(kinds):
            yield f"{prefix}{name}.{TAG}", found
            if value is not None:
                yield from _parts(value, f"{prefix}{name}.")


def _fields(config: Any) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Name, types and value of each field; an unset part uses its defaults if it has only one kind."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        unset = _dataclasses(kinds) if value is None else ()
        yield field.name, kinds, unset[0]() if len(unset) == 1 and _has_defaults(unset[0]) else value


def _dataclasses(kinds: tuple[Any, ...]) -> tuple[type, ...]:
    found = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
    return tuple(member for kind in found for member in members(kind))


def _has_defaults(cls: Any) -> bool:
    return all(field.default is not MISSING or field.default_factory is not MISSING for field in fields(cls))


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple
