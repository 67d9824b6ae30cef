"""PyTorch weights for OpenPI's torch port: model.safetensors, config.json and assets, written without torch.

The file's layout follows from shapes; it is then filled one layer of one parameter at a time. Besides the model the
host needs memory for the largest part and its converted copy: the token embedding, 2.1 GB in float32 at full size.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pirl import __version__
from pirl.checkpoints.compare import leaf_shapes
from pirl.checkpoints.export_folder import StatsSource, fresh_directory, write_norm_stats, write_texts
from pirl.checkpoints.torch_names import (
    EMBED_TOKENS,
    EXPERT_LM_HEAD,
    LM_HEAD,
    expert_lm_head_shape,
    model_dtype,
    torch_tensors,
)
from pirl.errors import CheckpointError
from pirl.models.params import Params, flatten, nest
from pirl.names import SAFETENSORS_FILE

Precision = Literal["mixed", "bfloat16", "float32"]
_SAFETENSORS_NAMES = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}

Layout = dict[str, tuple[np.dtype, tuple[int, ...]]]
"""Tensor name -> (dtype, shape)."""


def save_pytorch(
    params: Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    action_horizon: int,
    paligemma_variant: str = "gemma_2b",
    action_expert_variant: str = "gemma_300m",
    dtype: Precision = "mixed",
    norm_stats: Mapping[str, StatsSource] | None = None,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a folder OpenPI recognises as a PyTorch checkpoint; returns it.

    `mixed` stores each tensor in the dtype OpenPI's model uses for it, so the model loses nothing; `bfloat16` rounds
    every tensor, as OpenPI's own converter does; `float32` is exact. Merge adapters first (`merge_lora`): the torch
    port has none. `texts` are further files by name.
    """
    shapes = leaf_shapes(params)
    tensors = torch_tensors(shapes)
    layout = state_dict_layout(shapes, dtype=dtype)
    # PyTorch ties these two and saves one; OpenPI's strict loader rejects a file with both.
    layout.pop(EMBED_TOKENS)
    metadata = {EMBED_TOKENS: LM_HEAD, "written_by": f"pirl {__version__}", "format": "pt"}
    leaves = flatten(params)
    parts = (
        (LM_HEAD if t.name == EMBED_TOKENS else t.name, t.to_torch(host_part(leaves[t.path], t.index))) for t in tensors
    )
    config = {
        "action_dim": shapes["action_in_proj/kernel"][0],
        "action_horizon": action_horizon,
        "paligemma_variant": paligemma_variant.removesuffix("_lora"),
        "action_expert_variant": action_expert_variant.removesuffix("_lora"),
        "precision": "float32" if dtype == "float32" else "bfloat16",
    }
    with fresh_directory(directory, overwrite=overwrite) as temporary:
        temporary.mkdir()
        # The expert's unused output head stays zero, as in a new file.
        write_safetensors(temporary / SAFETENSORS_FILE, layout, parts, metadata)
        (temporary / "config.json").write_text(json.dumps(config, indent=2))
        write_norm_stats(temporary, norm_stats or {})
        write_texts(temporary, texts or {})
    return Path(directory).expanduser().absolute()


def state_dict_layout(shapes: Mapping[str, tuple[int, ...]], *, dtype: Precision = "mixed") -> Layout:
    """Names, dtypes and shapes of the whole PyTorch state dict for a tree given as path -> shape."""
    named = {tensor.name: tensor.shape for tensor in torch_tensors(shapes)}
    named[LM_HEAD] = named[EMBED_TOKENS]
    named[EXPERT_LM_HEAD] = expert_lm_head_shape(shapes)
    types = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
    return {name: (types[model_dtype(name) if dtype == "mixed" else dtype], shape) for name, shape in named.items()}


def write_safetensors(
    file: Path, layout: Layout, parts: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file tensor by tensor, in any order; tensors missing from `parts` are zero."""
    # Wider dtypes first, which keeps every tensor aligned to its item size, as in the safetensors library.
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets, end = {}, 0
    for name in names:
        dtype, shape = layout[name]
        offsets[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [offsets[name], end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        start = stream.tell()
        stream.truncate(start + end)
        for name, tensor in parts:
            dtype, shape = layout[name]
            if tensor.shape != shape:
                raise CheckpointError(f"{name}: found shape {list(tensor.shape)}, expected {list(shape)}")
            stream.seek(start + offsets[name])
            stream.write(np.ascontiguousarray(tensor, dtype).reshape(-1).view(np.uint8).data)


def host_part(leaf: Any, index: tuple[int, ...]) -> np.ndarray:
    """`leaf[index]` in host memory, assembled from the devices' shards.

    Converting a whole jax array would cache its host copy for the array's lifetime; converting parts does not.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[index]
    if not leaf.is_fully_addressable:
        raise CheckpointError(
            "the parameters are spread over several hosts",
            hint="save an OpenPI checkpoint from all of them and export that from one host",
        )
    part = np.empty(leaf.shape[len(index) :], leaf.dtype)
    for shard in leaf.addressable_shards:
        starts = [where.start or 0 for where in shard.index]
        local = tuple(i - start for i, start in zip(index, starts, strict=False))
        if shard.replica_id == 0 and all(0 <= i < n for i, n in zip(local, shard.data.shape, strict=False)):
            part[shard.index[len(index) :]] = np.asarray(shard.data[local])
    return part


def merge_lora(params: Mapping[str, Any], *, attn: tuple[float, float], ffn: tuple[float, float]) -> Params:
    """Merge adapters: each adapted matrix plus its scaled low-rank product, in float32.

    The factors are (VLM, expert). OpenPI scales attention's adapters by alpha / rank and does not scale the
    feed-forward's: pass ffn=(1.0, 1.0) for its checkpoints.
    """
    leaves = flatten(params)
    merged = {path: leaf for path, leaf in leaves.items() if "lora" not in path}
    for path, down in leaves.items():
        if not path.endswith("lora_a"):
            continue
        up = leaves[path[:-1] + "b"]
        base = path.removesuffix("_lora_a") if path.endswith("_lora_a") else path.removesuffix("lora_a") + "w"
        expert = int(path.split("/")[-2].endswith("_1"))
        scale = (attn if "/attn/" in path else ffn)[expert]
        merged[base] = _merged(merged[base], down, up, scale, heads_summed="attn_vec_einsum" in path)
    return nest({path: merged[path] for path in leaves if path in merged})


def _merged(base: Any, down: Any, up: Any, scale: float, *, heads_summed: bool) -> Any:
    base, down, up = (x.astype(np.float32) for x in (base, down, up))
    if heads_summed:
        # OpenPI's output projection sums over heads in the down-projection, so every head passes through the sum of
        # all heads' up-projections.
        up = up.sum(axis=-3, keepdims=True)
    if isinstance(base, jax.Array):
        return base + scale * jnp.matmul(down, up, precision=jax.lax.Precision.HIGHEST)
    return base + np.float32(scale) * np.matmul(down, up)
