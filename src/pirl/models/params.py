"""Parameter trees: OpenPI's nested dict, and its flat "/"-joined view for rules and messages."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pirl.nested import flatten as flatten
from pirl.nested import nest as nest

Params = dict[str, Any]
"""A nested dict of arrays (or of ShapeDtypeStructs), exactly as OpenPI stores it."""

Initializer = Callable[[Array, tuple[int, ...]], Array]


@dataclass(frozen=True)
class Leaf:
    """One parameter: its shape and initializer."""

    shape: tuple[int, ...]
    init: Initializer


def zeros(key: Array, shape: tuple[int, ...]) -> Array:
    """All zeros."""
    return jnp.zeros(shape, jnp.float32)


def ones(key: Array, shape: tuple[int, ...]) -> Array:
    """All ones."""
    return jnp.ones(shape, jnp.float32)


def normal(stddev: float) -> Initializer:
    """Gaussian with the given standard deviation."""
    return jax.nn.initializers.normal(stddev)


def lecun_normal(fan_in: int) -> Initializer:
    """Truncated Gaussian of variance 1/fan_in. `fan_in` is explicit because leaves may have layer and head axes."""

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        # 0.8796 is the standard deviation of a unit Gaussian truncated at ±2, as in jax.nn.initializers.
        return jax.random.truncated_normal(key, -2, 2, shape) * (fan_in**-0.5 / 0.87962566103423978)

    return init


def xavier_uniform(fan_in: int, fan_out: int) -> Initializer:
    """Uniform of variance 2/(fan_in + fan_out)."""
    bound = math.sqrt(6 / (fan_in + fan_out))
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def prefixed(prefix: str, leaves: Mapping[str, Leaf], *, stack: int | None = None) -> dict[str, Leaf]:
    """The leaves under a path prefix; `stack` adds a leading layer axis of that size."""
    axis = () if stack is None else (stack,)
    return {f"{prefix}/{path}": Leaf((*axis, *leaf.shape), leaf.init) for path, leaf in leaves.items()}


def shapes_of(leaves: Mapping[str, Leaf]) -> Params:
    """The tree of shapes, without allocating."""
    return nest({path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for path, leaf in leaves.items()})


def initialize(leaves: Mapping[str, Leaf], key: Array) -> Params:
    """Fresh parameters. Each leaf's key derives from its path, so adding a leaf changes no other."""
    return nest(
        {p: leaf.init(jax.random.fold_in(key, zlib.crc32(p.encode())), leaf.shape) for p, leaf in leaves.items()}
    )


def count(leaves: Iterable[Any]) -> int:
    """Total number of elements."""
    return sum(math.prod(leaf.shape) for leaf in leaves)
