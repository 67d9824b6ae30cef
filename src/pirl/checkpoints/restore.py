"""Restores a tree of arrays into the structure, dtypes and shardings of a reference."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from pirl.checkpoints.compare import compare, leaf_shapes
from pirl.errors import CheckpointError, listing
from pirl.models.params import Params, flatten, nest


@contextmanager
def orbax_reader(folder: Path, **options: Any) -> Iterator[ocp.PyTreeCheckpointHandler]:
    """Orbax's reader of one item; whatever it trips over is a damaged checkpoint."""
    handler = ocp.PyTreeCheckpointHandler(**options)
    try:
        yield handler
    except CheckpointError:
        raise
    except Exception as error:
        raise damaged(folder, error) from error
    finally:
        handler.close()


def stored_tree(folder: Path) -> Any:
    """Shapes and types of an Orbax item, from its metadata alone."""
    with orbax_reader(folder) as handler:
        return handler.metadata(epath.Path(folder.absolute())).tree


def restore_tree(folder: Path, reference: Any) -> Any:
    """Restore an Orbax item leaf by leaf into the reference (any pytree of ShapeDtypeStructs).

    Leaves are matched by name, so named tuples, lists and empty nodes need no counterpart on disk. Every name, shape
    and dtype must match: this is for exact resuming, not for fitting one model's weights to another.
    """
    likes, structure = _named(reference)
    tree = stored_tree(folder)
    _check(tree, likes, folder)
    arguments = jax.tree_util.tree_map_with_path(lambda key, _: restore_args(likes[_name(key)]), tree)
    largest = max((math.prod(like.shape) * np.dtype(like.dtype).itemsize for like in likes.values()), default=0)
    with orbax_reader(folder, restore_concurrent_gb=concurrent_gb(largest)) as handler:
        request = ocp.args.PyTreeRestore(item=tree, restore_args=arguments)
        restored, _ = _named(handler.restore(epath.Path(folder.absolute()), args=request))
    return jax.tree.unflatten(structure, [restored[name] for name in likes])


def restore_part(folder: Path, reference: Params) -> Params:
    """The leaves of an Orbax item that the reference has, in its types and shardings; the others are not read."""
    likes, stored = flatten(reference), flatten(stored_tree(folder))
    wanted = {name: stored[name] for name in likes if name in stored}
    compare(leaf_shapes(wanted), leaf_shapes(likes), source=str(folder), allow_missing="(?!)")
    arguments = nest({name: restore_args(like) for name, like in likes.items()})
    with orbax_reader(folder) as handler:
        request = ocp.args.PyTreeRestore(item=nest(wanted), restore_args=arguments, partial_restore=True)
        restored: Params = handler.restore(epath.Path(folder.absolute()), args=request)
        return restored


def check_tree(folder: Path, reference: Any) -> None:
    """Refuse an Orbax item whose names, shapes or types are not the reference's; reads its metadata alone."""
    _check(stored_tree(folder), _named(reference)[0], folder)


def _check(tree: Any, likes: Mapping[str, Any], folder: Path) -> None:
    stored, _ = _named(tree)
    compare(leaf_shapes(stored), leaf_shapes(likes), source=str(folder), allow_missing="(?!)")
    check_types(stored, likes, folder)


def check_types(stored: Mapping[str, Any], likes: Mapping[str, Any], source: Path) -> None:
    """Raise if stored dtypes differ from the reference's. Both arguments map path to leaf."""
    retyped = [
        f"{name}: found {np.dtype(leaf.dtype).name}, expected {np.dtype(likes[name].dtype).name}"
        for name, leaf in stored.items()
        if name in likes and np.dtype(leaf.dtype) != np.dtype(likes[name].dtype)
    ]
    if retyped:
        raise CheckpointError(
            f"{source}: {len(retyped)} leaves are of another type\n{listing(retyped)}",
            hint="which leaves are frozen (bfloat16) must not change within a run",
        )


def damaged(path: Path, error: Exception) -> CheckpointError:
    """The error for weights that cannot be read."""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return CheckpointError(
        f"{path} cannot be read: {reason[:300]}",
        hint="the files are incomplete or damaged: copy or download the checkpoint again, or take another step",
    )


def restore_args(like: Any, dtype: Any = None) -> ocp.RestoreArgs:
    """How Orbax restores a leaf: in the type and sharding of `like`; None: a NumPy array as stored."""
    if like is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    sharding = like.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, dtype=like.dtype if dtype is None else dtype)


def concurrent_gb(largest: int) -> int:
    """Gigabytes that Orbax may read at once. It would take 96: twice the largest leaf keeps the disk busy and the host
    small.
    """
    return 1 + math.ceil(2 * largest / 1e9)


def _named(tree: Any) -> tuple[dict[str, Any], Any]:
    """(path -> leaf in tree order, tree structure)."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): leaf for path, leaf in leaves}, structure


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
