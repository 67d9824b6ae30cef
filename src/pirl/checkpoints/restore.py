"""Restores a tree of arrays into the structure, dtypes and shardings of a reference."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from pirl.checkpoints.compare import compare
from pirl.errors import CheckpointError, listing


def restore_tree(folder: Path, reference: Any) -> Any:
    """Restore an Orbax item leaf by leaf into the reference (any pytree of ShapeDtypeStructs).

    Leaves are matched by name, so named tuples, lists and empty nodes need no counterpart on disk. Every name, shape
    and dtype must match: this is for exact resuming, not for fitting one model's weights to another.
    """
    likes, structure = _named(reference)
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=1 + math.ceil(2 * _largest(likes) / 1e9))
    path = epath.Path(folder.absolute())
    try:
        tree = handler.metadata(path).tree
        stored, _ = _named(tree)
        compare(_shapes(stored), _shapes(likes), source=str(folder), allow_missing="(?!)")
        check_types(stored, likes, folder)
        arguments = jax.tree_util.tree_map_with_path(lambda key, _: _restore_args(likes[_name(key)]), tree)
        restored, _ = _named(handler.restore(path, args=ocp.args.PyTreeRestore(item=tree, restore_args=arguments)))
    except CheckpointError:
        raise
    except Exception as error:
        raise _unreadable(folder, error) from error
    finally:
        handler.close()
    return jax.tree.unflatten(structure, [restored[name] for name in likes])


def check_tree(folder: Path, reference: Any) -> None:
    """Raise if an Orbax item's names, shapes or dtypes differ from the reference's; reads only its metadata."""
    likes, _ = _named(reference)
    handler = ocp.PyTreeCheckpointHandler()
    try:
        stored, _ = _named(handler.metadata(epath.Path(folder.absolute())).tree)
    except Exception as error:
        raise _unreadable(folder, error) from error
    finally:
        handler.close()
    compare(_shapes(stored), _shapes(likes), source=str(folder), allow_missing="(?!)")
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


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return CheckpointError(f"{folder} cannot be read: {reason[:300]}", hint="the files are damaged: take another step")


def _shapes(leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in leaves.items()}


def _named(tree: Any) -> tuple[dict[str, Any], Any]:
    """(path -> leaf in tree order, tree structure)."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): leaf for path, leaf in leaves}, structure


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _largest(likes: dict[str, Any]) -> int:
    return max((math.prod(like.shape) * np.dtype(like.dtype).itemsize for like in likes.values()), default=0)


def _restore_args(like: Any) -> ocp.ArrayRestoreArgs:
    sharding = like.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, dtype=like.dtype)
