"""Writes OpenPI checkpoints: the folder that OpenPI's `serve_policy.py` and weight loaders read."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from pirl import __version__
from pirl.checkpoints.export_folder import StatsSource, fresh_directory, write_norm_stats, write_texts
from pirl.errors import CheckpointError
from pirl.models.params import flatten, nest
from pirl.names import PARAMS_ITEM


def save_openpi(
    params: Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    norm_stats: Mapping[str, StatsSource],
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
    value_suffix: bool = True,
) -> Path:
    """Write `directory/{_CHECKPOINT_METADATA,params,assets/<asset_id>/norm_stats.json}`; returns the folder.

    Every process writes its shards, in the arrays' dtypes. `value_suffix` names leaves as OpenPI's trainer does
    (`.../kernel/value`); without it as in OpenPI's released weights. OpenPI reads both. `texts` are further files by
    name. The write is atomic: nothing is visible at `directory` until it is complete.
    """
    leaves = flatten(params)
    if not leaves:
        raise CheckpointError("there are no parameters to save")
    suffix = "/value" if value_suffix else ""
    tree = {PARAMS_ITEM: nest({path + suffix: _as_jax(leaf) for path, leaf in leaves.items()})}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
    with fresh_directory(directory, overwrite=overwrite) as temporary:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**{PARAMS_ITEM: handler})) as checkpointer:
            checkpointer.save(
                epath.Path(temporary),
                args=ocp.args.Composite(**{PARAMS_ITEM: ocp.args.PyTreeSave(tree)}),
                custom_metadata={"written_by": f"pirl {__version__}"},
            )
        if jax.process_index() == 0:
            # Remove Orbax 0.12's marker files, which OpenPI's checkpoints do not have.
            for marker in temporary.rglob("commit_success.txt"):
                marker.unlink()
            write_norm_stats(temporary, norm_stats)
            write_texts(temporary, texts or {})
    return Path(directory).expanduser().absolute()


def _as_jax(leaf: Any) -> jax.Array:
    """Wrap NumPy arrays (in host memory if possible): Orbax records dtype and sharding only of jax arrays."""
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        device = jax.local_devices()[0]
    return jax.device_put(np.asarray(leaf), device)
