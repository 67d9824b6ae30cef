"""Checks of pytrees: contents, agreement of two trees, optimizer against parameters, divisibility for sharding.

Every check takes arrays or shapes, in a `TrainState`, nested dicts or optax states, and returns a report: `ok`, the
findings as data, and readable text from `str(report)`. Leaves are named by "/"-joined paths.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import optax
from numpy.typing import DTypeLike

from pirl.errors import ConfigError, listing
from pirl.parallel.sharding import FSDP_AXIS, MIN_SHARDED_BYTES, fsdp_spec
from pirl.planning.memory import gib, leaf_bytes, shard_bytes

Kind = Literal["missing", "unexpected", "shape", "dtype", "sharding"]

LIKE_PARAMETERS = frozenset({"mu", "nu", "trace", "acc_grads", "sum_of_squares"})
"""Fields of optax states whose arrays have the parameters' shapes (Adafactor's factors do not)."""
NOT_PER_PARAMETER = frozenset({"hyperparams", "hyperparams_states"})


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One leaf on which two trees disagree."""

    path: str
    """Path of the leaf."""
    kind: Kind
    """missing: only in the first tree. unexpected: only in the second. Otherwise the property that differs."""
    left: str
    """The first tree's value of it."""
    right: str
    """The second tree's."""

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.path}: missing ({self.left} in the first tree)"
        if self.kind == "unexpected":
            return f"{self.path}: unexpected ({self.right}, not in the first tree)"
        return f"{self.path}: {self.kind} {self.left} against {self.right}"


@dataclass(frozen=True, kw_only=True)
class TreeComparison:
    """Differences between two trees."""

    differences: tuple[Difference, ...]
    """Sorted by path."""
    compared: int
    """Number of leaves in both trees."""

    @property
    def ok(self) -> bool:
        """Whether the trees agree."""
        return not self.differences

    def of(self, kind: Kind) -> tuple[str, ...]:
        """Paths with one kind of difference."""
        return tuple(difference.path for difference in self.differences if difference.kind == kind)

    def __str__(self) -> str:
        if self.ok:
            return f"the trees agree in all {self.compared} leaves"
        counts = ", ".join(f"{count} {kind}" for kind, count in Counter(d.kind for d in self.differences).items())
        return f"the trees differ ({counts}; {self.compared} leaves in both):\n" + listing(
            [str(difference) for difference in self.differences], limit=20
        )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of a check."""

    title: str
    """Summary in one line."""
    problems: tuple[str, ...] = ()
    """Problems, one line each."""
    details: tuple[str, ...] = ()
    """Further facts, one line each."""
    numbers: Mapping[str, int]
    """The counts behind the title."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __str__(self) -> str:
        lines = [self.title, *(f"  {detail}" for detail in self.details)]
        if self.problems:
            lines += [f"  {len(self.problems)} problems:", listing(self.problems, limit=20)]
        return "\n".join(lines)


def flat_leaves(tree: Any) -> dict[str, Any]:
    """Path -> leaf of any pytree; optax's MaskedNodes are not leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def compare_pytree_structures(first: Any, second: Any) -> TreeComparison:
    """Every difference in paths, shapes, dtypes and, if both leaves have one, shardings."""
    left, right = flat_leaves(first), flat_leaves(second)
    differences = []
    for path in sorted(left | right):
        if path not in right:
            differences.append(Difference(path=path, kind="missing", left=_describe(left[path]), right=""))
        elif path not in left:
            differences.append(Difference(path=path, kind="unexpected", left="", right=_describe(right[path])))
        else:
            differences += _differences(path, left[path], right[path])
    return TreeComparison(differences=tuple(differences), compared=len(left.keys() & right.keys()))


def _differences(path: str, left: Any, right: Any) -> Iterator[Difference]:
    if np.shape(left) != np.shape(right):
        yield Difference(path=path, kind="shape", left=str(np.shape(left)), right=str(np.shape(right)))
    if _dtype(left) != _dtype(right):
        yield Difference(path=path, kind="dtype", left=_dtype(left), right=_dtype(right))
    ours: Any = getattr(left, "sharding", None)
    theirs: Any = getattr(right, "sharding", None)
    comparable = ours is not None and theirs is not None and np.shape(left) == np.shape(right)
    if comparable and not ours.is_equivalent_to(theirs, len(np.shape(left))):
        yield Difference(path=path, kind="sharding", left=_sharding(ours), right=_sharding(theirs))


def diagnose_pytree_structure(tree: Any) -> Diagnosis:
    """Size and composition of a tree, and leaves that would fail in a jitted step or a checkpoint."""
    leaves = flat_leaves(tree)
    arrays = {path: leaf for path, leaf in leaves.items() if _is_array(leaf)}
    groups: dict[str, list[Any]] = {}
    for path, leaf in arrays.items():
        groups.setdefault("/".join(path.split("/")[:2]), []).append(leaf)
    problems = [f"{path}: {type(leaf).__name__}, not an array" for path, leaf in leaves.items() if path not in arrays]
    problems += [f"{path}: was donated and deleted" for path, leaf in arrays.items() if _deleted(leaf)]
    problems += _shared(arrays) + _slashed_keys(tree)
    size = sum(map(leaf_bytes, arrays.values()))
    values = sum(leaf.size for leaf in arrays.values())
    return Diagnosis(
        title=f"{len(leaves)} leaves, {values:,} values, {gib(size)}",
        problems=tuple(problems),
        details=tuple(
            f"{name}: {len(members)} leaves, {gib(sum(map(leaf_bytes, members)))}, "
            + ", ".join(f"{count} {dtype}" for dtype, count in sorted(Counter(map(_dtype, members)).items()))
            for name, members in groups.items()
        ),
        numbers={"leaves": len(leaves), "values": values, "bytes": size},
    )


def _shared(arrays: Mapping[str, Any]) -> list[str]:
    """Arrays that occur at several paths; they cannot be donated twice."""
    places: dict[int, list[str]] = {}
    for path, leaf in arrays.items():
        if isinstance(leaf, jax.Array):
            places.setdefault(id(leaf), []).append(path)
    return [f"{' and '.join(paths)}: one and the same array" for paths in places.values() if len(paths) > 1]


def _slashed_keys(tree: Any) -> list[str]:
    """Keys that contain "/", which make joined paths ambiguous."""
    keys = (
        str(key.key)
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
        for key in path
        if isinstance(key, jax.tree_util.DictKey)
    )
    return [f"the key {key!r} has a slash in it" for key in sorted({key for key in keys if "/" in key})]


def check_optimizer_consistency(params: Any, opt_state: Any) -> Diagnosis:
    """Check that the optimizer's per-parameter trees (such as Adam's mu and nu) match the trainable parameters.

    `params` holds only the trainable ones. Leaves masked out by optax.masked are not problems.
    """
    expected = flat_leaves(params)
    problems: list[str] = []
    names: list[str] = []
    for name, field, tree in _per_parameter(opt_state, ""):
        names.append(name)
        found = flat_leaves(tree)
        masked = _masked(tree)
        missing = [p for p in sorted(expected.keys() - found) if not any(f"{p}/".startswith(f"{m}/") for m in masked)]
        problems += [f"{name}/{p}: missing, though the parameter trains" for p in missing]
        problems += [f"{name}/{p}: there is no such trainable parameter" for p in sorted(found.keys() - expected)]
        if field in LIKE_PARAMETERS:
            problems += [
                f"{name}/{p}: shape {found[p].shape}, but the parameter's is {expected[p].shape}"
                for p in sorted(found.keys() & expected)
                if found[p].shape != expected[p].shape
            ]
    return Diagnosis(
        title=f"{len(names)} per-parameter trees in the optimizer state, {len(expected)} trainable leaves",
        problems=tuple(problems),
        details=tuple(names),
        numbers={"trees": len(names), "leaves": len(expected)},
    )


def _per_parameter(node: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """(path, field name, tree) of every tree in an optax state with the parameters' structure."""
    if hasattr(node, "_fields"):
        children = [(name, getattr(node, name)) for name in node._fields]
    elif isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, Sequence) and not isinstance(node, str):
        children = [(str(index), child) for index, child in enumerate(node)]
    else:
        return
    for name, child in children:
        here = f"{path}/{name}" if path else str(name)
        if name in NOT_PER_PARAMETER:
            continue
        if hasattr(node, "_fields") and isinstance(child, Mapping) and not _holds_states(child):
            yield here, str(name), child
        else:
            yield from _per_parameter(child, here)


def _holds_states(tree: Mapping[str, Any]) -> bool:
    """Whether a dict holds optimizer states (as in multi_transform) rather than arrays."""
    values = [value for value in tree.values() if not isinstance(value, optax.MaskedNode)]
    return any(isinstance(x, tuple) or (isinstance(x, Mapping) and _holds_states(x)) for x in values)


def _masked(tree: Any) -> set[str]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if isinstance(leaf, optax.MaskedNode)
    }


def validate_fsdp_compatibility(tree: Any, mesh: jax.sharding.Mesh | int) -> Diagnosis:
    """Check that the tree can be sharded over the mesh's FSDP devices (or over this number of devices).

    A large leaf without an axis divisible by that number is a problem: it would be replicated. Small leaves are
    replicated on purpose.
    """
    fsdp = mesh if isinstance(mesh, int) else _fsdp_size(mesh)
    if fsdp < 1:
        raise ConfigError(
            f"an FSDP size of {fsdp}", hint="give the number of devices that share the weights, 1 or more"
        )
    leaves = {path: leaf for path, leaf in flat_leaves(tree).items() if _is_array(leaf)}
    sharded = {p: x for p, x in leaves.items() if x.shape and any(fsdp_spec(x.shape, x.dtype, fsdp))}
    stuck = [
        f"{path}: {gib(leaf_bytes(leaf))} whole on every device, no axis of {leaf.shape} is divisible by {fsdp}"
        for path, leaf in leaves.items()
        if fsdp > 1 and path not in sharded and len(leaf.shape) >= 2 and leaf_bytes(leaf) >= MIN_SHARDED_BYTES
    ]
    total = sum(leaf_bytes(leaf) for leaf in leaves.values())
    here = sum(shard_bytes(leaf, fsdp=fsdp) for leaf in leaves.values())
    return Diagnosis(
        title=f"fsdp {fsdp}: {len(sharded)} of {len(leaves)} leaves sharded, {gib(here)} of {gib(total)} per device",
        problems=tuple(stuck),
        numbers={"fsdp": fsdp, "sharded": len(sharded), "leaves": len(leaves), "bytes": total, "per_device": here},
    )


def _fsdp_size(mesh: jax.sharding.Mesh) -> int:
    if FSDP_AXIS not in mesh.shape:
        raise ConfigError(
            f"the mesh has the axes {tuple(mesh.shape)}, none of them is {FSDP_AXIS!r}",
            hint="make it with pirl.parallel.sharding",
        )
    return int(mesh.shape[FSDP_AXIS])


def check_pytree_leaf_dtypes(
    tree: Any,
    *,
    allowed: Sequence[str] = ("float32", "bfloat16", "int32", "uint32", "bool"),
    expected: Mapping[str, DTypeLike] | None = None,
) -> Diagnosis:
    """Count dtypes and report leaves whose dtype is not `allowed`, or not the one in `expected`.

    `expected` maps path patterns to dtypes; the first full match wins. A float64 leaf doubles memory, a Python number
    or weakly typed leaf causes a second compilation.
    """
    leaves = flat_leaves(tree)
    rules = [(re.compile(pattern), np.dtype(dtype).name) for pattern, dtype in (expected or {}).items()]
    problems = []
    for path, leaf in leaves.items():
        dtype = _dtype(leaf)
        wanted = next((name for pattern, name in rules if pattern.fullmatch(path)), None)
        if wanted is not None and dtype != wanted:
            problems.append(f"{path}: {dtype}, expected {wanted}")
        elif wanted is None and dtype not in allowed and not dtype.startswith("key<"):
            problems.append(f"{path}: {dtype}, expected one of {', '.join(allowed)}")
        elif getattr(leaf, "weak_type", False):
            problems.append(f"{path}: weakly typed {dtype}, which changes its type in the first step")
    counts = Counter(map(_dtype, leaves.values()))
    return Diagnosis(
        title=", ".join(f"{count} {dtype}" for dtype, count in counts.most_common()) or "no leaves",
        problems=tuple(problems),
        numbers=dict(counts),
    )


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype) if _is_array(leaf) else type(leaf).__name__


def _describe(leaf: Any) -> str:
    return f"{_dtype(leaf)}{list(np.shape(leaf))}"


def _sharding(sharding: Any) -> str:
    return str(getattr(sharding, "spec", sharding))


def _deleted(leaf: Any) -> bool:
    check: Callable[[], bool] | None = getattr(leaf, "is_deleted", None)
    return check is not None and check()
