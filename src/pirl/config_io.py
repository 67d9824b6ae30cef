"""Configurations as YAML: dataclasses to plain data and back, driven by annotations, with strict checks.

Unknown keys, values of a wrong type and duplicate keys are errors that name the dotted path, because a silently ignored
setting costs a training run. If a field may hold one of several dataclasses, the key `type` names it, without "Config"
(`type: ACRLPD`). Only plain YAML is read; nothing in a file is executed.
"""

import ast
import inspect
import os
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from pirl.errors import ConfigError, did_you_mean
from pirl.files import write_text
from pirl.nested import flatten, nest
from pirl.ranges import OutOfRangeError
from pirl.trust import load_object, main_module

TAG = "type"
"""The key that names a mapping's dataclass where several are possible."""
ABSENT = "(not set)"
"""`diff`'s value for a setting that only one of the configurations has."""

T = TypeVar("T")


class Change(NamedTuple):
    """A setting that differs between two configurations."""

    path: str
    """Dotted path."""
    old: Any
    """Value in the first configuration, as plain data."""
    new: Any
    """Value in the second."""


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain data: nested dicts, lists, strings, numbers."""
    hints = _hints(type(config))
    return {f.name: _plain(getattr(config, f.name), hints[f.name]) for f in fields(config)}


def from_dict(cls: type[T], data: Mapping[str, Any], *, base: T | None = None) -> T:
    """A dataclass from plain data. Missing settings come from `base`, or else from the defaults."""
    return _read_dataclass(cls, data, base, "")


def with_settings(config: T, settings: Mapping[str, Any]) -> T:
    """The dataclass with these values at dotted paths."""
    return from_dict(type(config), nest(settings, "."), base=config)


def to_yaml(config: Any, *, comments: bool = False) -> str:
    """A dataclass as YAML; with `comments`, each setting's docstring above it."""
    return "\n".join(_yaml_lines(config, comments, "")) + "\n"


def parse_yaml(text: str) -> dict[str, Any]:
    """Parse YAML text to a mapping; raises on duplicate keys."""
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"not YAML: {' '.join(str(error).split())}", hint="compare with `pirl recipes show`"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"found {_described(data)}, expected settings", hint="one `key: value` a line")
    return data


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file as a mapping; errors name the file."""
    file = Path(path).expanduser()
    try:
        return parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="name a YAML file, or a recipe") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", hint=error.hint) from None


def write_yaml(
    path: str | os.PathLike[str], config: Any, *, comments: bool = False, header: str = "", overwrite: bool = False
) -> Path:
    """Write a dataclass as YAML atomically, with `header` as a comment on top; refuses to overwrite by default."""
    file = Path(path).expanduser()
    if file.exists() and not overwrite:
        raise ConfigError(f"{file} exists", hint="give another name, or remove it")
    above = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    write_text(file, above + to_yaml(config, comments=comments))
    return file


def diff(old: Any, new: Any) -> list[Change]:
    """The settings that differ between two configurations (dataclasses or plain data), in field order."""
    before, after = (flatten(one if isinstance(one, Mapping) else to_dict(one), ".") for one in (old, new))
    pairs = ((path, before.get(path, ABSENT), after.get(path, ABSENT)) for path in before | after)
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def tag(cls: type) -> str:
    """A dataclass's name in files: without "Config"; for an algorithm outside pirl, `module:Class`."""
    if hasattr(cls, "kinds") and not cls.__module__.startswith("pirl."):
        module = main_module() if cls.__module__ == "__main__" else cls.__module__
        return f"{module}:{cls.__qualname__}"
    return cls.__name__.removesuffix("Config")


def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; any other annotation is its own only member."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _dataclasses(annotation: Any) -> dict[str, type]:
    """The dataclasses a field may hold, by tag."""
    options = [option for option in _options(annotation) if _is_dataclass(option)]
    return {tag(kind): kind for option in options for kind in kinds(option)}


def kinds(cls: type) -> tuple[type, ...]:
    """The members of an open family (such as the algorithms' configs); otherwise the class itself."""
    members: tuple[type, ...] = cls.kinds() if hasattr(cls, "kinds") and not getattr(cls, "agent", "") else (cls,)
    return members


def _is_dataclass(annotation: Any) -> TypeGuard[type]:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _plain(value: Any, annotation: Any) -> Any:
    if is_dataclass(value):
        tagged = {TAG: tag(type(value))} if len(_dataclasses(annotation)) > 1 else {}
        return tagged | to_dict(value)
    return [_plain(item, None) for item in value] if isinstance(value, tuple) else value


def _read(annotation: Any, value: Any, base: Any, path: str) -> Any:
    """Convert plain data to an instance of the annotation."""
    options, classes = _options(annotation), _dataclasses(annotation)
    if value is None and types.NoneType in options:
        return None
    if classes and isinstance(value, Mapping):
        return _read_one_of(classes, value, base, path)
    simple = [option for option in options if option is not types.NoneType and not _is_dataclass(option)]
    for option in simple:
        try:
            return _read_simple(option, value, path)
        except ConfigError:
            if simple == [option] and not classes:
                raise  # more specific than "nothing fits"
    raise _mismatch(path, value, annotation)


def _read_one_of(classes: Mapping[str, type], value: Mapping[str, Any], base: Any, path: str) -> Any:
    if len(classes) == 1:
        return _read_dataclass(next(iter(classes.values())), value, base, path)
    named = value.get(TAG, None if base is None else tag(type(base)))
    if not isinstance(named, str):
        what = "is missing" if named is None else f"is {_described(named)}"
        raise ConfigError(f"{path}.{TAG} {what}", hint=f"say which one it is: {', '.join(classes)}")
    cls = classes.get(named) or _imported(named, classes, path)
    rest = {key: item for key, item in value.items() if key != TAG}
    return _read_dataclass(cls, rest, base if type(base) is cls else None, path)


def _imported(name: str, classes: Mapping[str, type], path: str) -> type:
    """Import the open family's member that `module:Class` names."""
    family = next((base for kind in classes.values() for base in kind.__mro__ if "kinds" in vars(base)), None)
    if ":" not in name or family is None:
        raise did_you_mean(name, classes, kind=f"{path}.{TAG}")
    found = load_object(name, what=f"{path}.{TAG}")
    if not (isinstance(found, type) and issubclass(found, family)):
        raise ConfigError(f"{path}.{TAG}: {name} is not a {family.__name__}", hint=f"subclass pirl's {family.__name__}")
    return found


def _read_dataclass(cls: type[T], data: Mapping[str, Any], base: T | None, path: str) -> T:
    hints, prefix = _hints(cls), f"{path}." if path else ""
    for key in data:
        if key not in hints:
            raise did_you_mean(f"{prefix}{key}", [f"{prefix}{name}" for name in hints], kind="setting")
    values: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        default = _default(field) if base is None else getattr(base, field.name)
        if field.name in data:
            known = None if default is MISSING else default
            values[field.name] = _read(hints[field.name], data[field.name], known, prefix + field.name)
        elif default is not MISSING:
            values[field.name] = default
        else:
            raise ConfigError(
                f"{prefix}{field.name} is missing", hint="a complete file sets it; `recipe: NAME` starts from a recipe"
            )
    try:
        return cls(**values)
    except OutOfRangeError as error:
        raise error.inside(prefix) from None


def _default(field: Field) -> Any:
    """A field's default; MISSING if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _read_simple(annotation: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        if isinstance(value, str) and value not in arguments:
            raise did_you_mean(value, map(str, arguments), kind=f"value of {path}:")
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, list):
        if len(arguments) == 2 and arguments[1] is ...:
            arguments = (arguments[0],) * len(value)
        if len(arguments) == len(value):
            items = zip(arguments, value, strict=True)
            return tuple(_read(kind, item, None, f"{path}[{i}]") for i, (kind, item) in enumerate(items))
    elif annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(annotation, type) and type(value) is annotation:
        return value
    raise _mismatch(path, value, annotation)


def _mismatch(path: str, value: Any, annotation: Any) -> ConfigError:
    return ConfigError(f"{path}: found {_described(value)}, expected {_expected(annotation)}", hint=_advice(value))


def _advice(value: Any) -> str:
    if isinstance(value, bool):
        return 'YAML reads yes, no, on and off as true and false; quote them to mean text: "no"'
    return "text may be quoted; numbers, true, false and null may not; lists are [a, b]"


def _described(value: Any) -> str:
    kinds: dict[type, str] = {
        bool: "true or false",
        int: "the whole number",
        float: "the number",
        str: "the text",
        list: "the list",
        dict: "the settings",
    }
    return "nothing (null)" if value is None else f"{kinds.get(type(value), 'the ' + type(value).__name__)} {value!r}"


def _expected(annotation: Any) -> str:
    kinds: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is types.NoneType:
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_expected, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list of {_expected(arguments[0])}" if arguments[-1] is ... else f"a list of {len(arguments)}"
    return f"the settings of {tag(annotation)}" if _is_dataclass(annotation) else kinds.get(annotation, str(annotation))


def _yaml_lines(config: Any, comments: bool, indent: str, annotation: Any = None) -> Iterator[str]:
    explained = field_docs(type(config)) if comments else {}
    if len(_dataclasses(annotation)) > 1:
        options = f"  # one of {', '.join(_dataclasses(annotation))}" if comments else ""
        yield f"{indent}{TAG}: {tag(type(config))}{options}"
    for field in fields(config):
        value, hint = getattr(config, field.name), _hints(type(config))[field.name]
        if text := explained.get(field.name):
            yield from textwrap.wrap(text, 116, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _yaml_lines(value, comments, f"{indent}  ", hint)
        else:
            yield f"{indent}{field.name}: {_yaml_value(_plain(value, hint))}"


def _yaml_value(plain: Any) -> str:
    """A value as one line of YAML."""
    text = yaml.dump(plain, Dumper=_StrictDumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def field_docs(cls: type) -> dict[str, str]:
    """Each field's docstring on one line, with YAML's null for None; includes inherited fields."""
    inherited = [field_docs(base) for base in reversed(cls.__bases__) if is_dataclass(base)]
    found = {name: text for docs in inherited for name, text in docs.items()}
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # defined in a notebook or at a prompt: no source
        return found
    if not isinstance(body, ast.ClassDef):
        return found
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            text = " ".join(str(following.value.value).split())
            found[statement.target.id] = re.sub(r"\bNone\b", "null", text)
    return found


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML, with unique keys and 1e-5 read as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Like PyYAML's, but raises on duplicate keys, of which PyYAML silently takes the last."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is set twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _StrictDumper(yaml.SafeDumper):
    """Quotes text that `_StrictLoader` would read as a number."""


# YAML 1.1 requires a decimal point in floats: without this, 1e-5 would be text.
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
for _class in (_StrictLoader, _StrictDumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
