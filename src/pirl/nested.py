"""Conversion between nested and flat mappings: parameters and observations by "a/b", settings by "a.b"."""

from collections.abc import Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """{"a": {"b": x}} -> {"a/b": x}; empty mappings are dropped."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}{separator}{path}": leaf for path, leaf in flatten(value, separator).items()}
        else:
            flat[name] = value
    return flat


def nest(flat: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(separator)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree
