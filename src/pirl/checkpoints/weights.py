"""Loads weights into a parameter tree: OpenPI checkpoints, PaliGemma's .npz and OpenPI's PyTorch files.

Every loader compares names and shapes with the reference before it reads any value, then reads leaf by leaf into the
reference's dtypes and shardings, so that a host never holds a second copy of the model.
"""

import logging
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from etils import epath

from pirl.checkpoints.checksums import verifying
from pirl.checkpoints.compare import LORA, Init, check_finite, compare, fit, leaf_shapes, place
from pirl.checkpoints.fetch import fetch
from pirl.checkpoints.ocdbt import check_files, read_json
from pirl.checkpoints.restore import concurrent_gb, damaged, orbax_reader, restore_args, stored_tree
from pirl.checkpoints.torch_names import EMBED_TOKENS, EXPERT_LM_HEAD, LM_HEAD, TorchTensor, torch_tensors
from pirl.errors import CheckpointError, listing
from pirl.models.params import Params, flatten, nest
from pirl.names import ASSETS_ITEM, PARAMS_ITEM, SAFETENSORS_FILE

__all__ = ["check_finite", "fit", "load", "load_openpi", "load_paligemma_npz", "load_pytorch"]

logger = logging.getLogger(__name__)

NOT_IN_PALIGEMMA = rf"{LORA}|PaliGemma/llm/.*_1/.*|(state_proj|action_|time_mlp_).*"
"""Weights that PaliGemma lacks: the action expert, the state and action heads, adapters."""


def load(
    location: str | os.PathLike[str],
    reference: Mapping[str, Any],
    *,
    init: Init | None = None,
    dtype: Any = None,
    allow_missing: str = LORA,
) -> Params:
    """Load the whole tree of `reference` from a path, `gs://` or `hf://` address, in any supported format.

    Leaves that may be missing (adapters; for PaliGemma's .npz also the expert and the heads) come from `init`.
    `dtype` overrides the reference's dtypes.
    """
    path = fetch(location)
    if dtype is not None:
        dtype = np.dtype(dtype)
        reference = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), dict(reference))
    kind = kind_of(path)
    if kind == "npz":
        found, _ = load_paligemma_npz(path, reference)
        allow_missing = NOT_IN_PALIGEMMA
    elif kind == "pytorch":
        found = load_pytorch(path, reference)
    else:
        found = load_openpi(path, reference, allow_missing=allow_missing)
    return fit(found, reference, init=init, allow_missing=allow_missing, source=str(path))


def check_fits(location: str | os.PathLike[str], reference: Mapping[str, Any]) -> None:
    """Raise if `load` would fail on names or shapes; reads headers only, no values."""
    path = fetch(location)
    kind = kind_of(path)
    if kind == "npz":
        _paligemma_keys(path, npz_headers(path), flatten(reference))
    elif kind == "pytorch":
        with open_safetensors(_safetensors(path)) as stored:
            _torch_keys(path, stored, _without_lora(reference))
    else:
        folder = find_params(path)
        compare(leaf_shapes(openpi_leaves(folder)[0]), leaf_shapes(reference), source=str(folder))


def kind_of(path: Path) -> str:
    """Format of the weights: "npz", "pytorch" or "openpi", detected from the files, never from the folder's name."""
    if path.is_file() and path.suffix == ".npz":
        return "npz"
    if (path.is_file() and path.suffix == ".safetensors") or (path / SAFETENSORS_FILE).is_file():
        return "pytorch"
    find_params(path)
    return "openpi"


def find_params(path: str | os.PathLike[str]) -> Path:
    """The `params` folder of an OpenPI checkpoint; `path` is that folder, its step, or a folder of steps (latest)."""
    path = Path(path).expanduser()
    for candidate in (path / PARAMS_ITEM, path):
        if (candidate / "_METADATA").is_file():
            return candidate
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is {'a file that holds no known weights' if path.exists() else 'not there'}",
            hint=f"expected an OpenPI checkpoint folder, a folder with {SAFETENSORS_FILE}, or a PaliGemma .npz",
        )
    names = sorted(child.name for child in path.iterdir())
    steps = sorted(
        int(name) for name in names if name.isdigit() and (path / name / PARAMS_ITEM / "_METADATA").is_file()
    )
    if not steps:
        unfinished = any(".orbax-checkpoint-tmp" in name for name in names)
        raise CheckpointError(
            f"{path} is not a checkpoint: it holds {', '.join(names[:8]) or 'nothing'}{' ...' if names[8:] else ''}; "
            f"expected {PARAMS_ITEM}/_METADATA, {SAFETENSORS_FILE}, or step folders",
            hint="a save was interrupted here: take another step" if unfinished else "give the step folder itself",
        )
    if len(steps) > 1:
        logger.info("%s holds steps %s; taking the latest, %d", path, steps, steps[-1])
    return path / str(steps[-1]) / PARAMS_ITEM


def load_openpi(
    path: str | os.PathLike[str],
    reference: Mapping[str, Any] | None = None,
    *,
    dtype: Any = None,
    allow_missing: str = LORA,
    verify: bool = True,
) -> Params:
    """Load an OpenPI checkpoint, released or trained, directly into the reference's dtypes and shardings.

    Without a reference: NumPy arrays as stored. `dtype` overrides both. Leaves that may be and are missing are omitted
    from the tree. `verify` checks the files against their checksums, if pirl wrote them.
    """
    folder = find_params(path)
    stored, suffix = openpi_leaves(folder)
    dtype = None if dtype is None else np.dtype(dtype)
    likes: dict[str, Any] = {}
    if reference is not None:
        likes = flatten(reference)
        compare(leaf_shapes(stored), leaf_shapes(reference), source=str(folder), allow_missing=allow_missing)
    arguments = {name + suffix: restore_args(likes.get(name), dtype) for name in stored}
    item = nest({name + suffix: leaf for name, leaf in stored.items()})
    largest = max(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in stored.values())
    with (
        verifying(folder.parent, PARAMS_ITEM, ASSETS_ITEM) if verify else nullcontext(),
        orbax_reader(folder, restore_concurrent_gb=concurrent_gb(largest)) as handler,
    ):
        restored = handler.restore(
            epath.Path(folder.absolute()),
            args=ocp.args.PyTreeRestore(item={PARAMS_ITEM: item}, restore_args={PARAMS_ITEM: nest(arguments)}),
        )
    return nest({name.removesuffix(suffix): leaf for name, leaf in flatten(restored[PARAMS_ITEM]).items()})


def openpi_leaves(folder: Path) -> tuple[dict[str, Any], str]:
    """Metadata of every leaf of a `params` folder, and the suffix of its stored names ("/value" or "").

    OpenPI's trainer saves an nnx state, whose leaf paths end in `value`; those of released weights do not.
    """
    check_files(folder)
    read_json(folder / "_METADATA")
    tree = stored_tree(folder)
    if not isinstance(tree, Mapping) or set(tree) != {PARAMS_ITEM} or not tree[PARAMS_ITEM]:
        raise CheckpointError(
            f"{folder} holds the item {sorted(tree) if isinstance(tree, Mapping) else type(tree).__name__}, "
            f"expected one tree named {PARAMS_ITEM!r}",
            hint="give the step folder; `train_state` is for resuming a run, not for loading weights",
        )
    leaves = flatten(tree[PARAMS_ITEM])
    # Look only at the last part: attention has a module named `value` further up.
    bare = [name for name in leaves if not name.endswith("/value")]
    if bare and len(bare) < len(leaves):
        raise CheckpointError(
            f"{folder}: {len(leaves) - len(bare)} leaf paths end in `value` and {len(bare)} do not\n{listing(bare)}",
            hint="two trees were mixed when this was saved; OpenPI cannot read it either: save it again from one tree",
        )
    suffix = "" if bare else "/value"
    return {name.removesuffix(suffix): leaf for name, leaf in leaves.items()}, suffix


def load_pytorch(path: str | os.PathLike[str], reference: Mapping[str, Any]) -> Params:
    """Load OpenPI's PyTorch weights (model.safetensors), one leaf at a time, without torch.

    Names must match the reference's model, π₀ or π₀.₅. The output heads are skipped: the VLM's is tied to the token
    embedding, the expert's is unused. LeRobot's copies prefix every name with `model.`. PyTorch weights have no
    adapters, so the reference's are omitted from the tree.
    """
    file, likes = _safetensors(Path(path).expanduser()), _without_lora(reference)
    with open_safetensors(file) as stored:
        keys, tensors = _torch_keys(file, stored, likes)
        leaves: dict[str, Any] = {}
        for name, like in likes.items():
            leaf = np.empty(like.shape, like.dtype)
            for tensor in (t for t in tensors if t.path == name):
                part = tensor.from_torch(stored.get_tensor(keys[tensor.name]), like.shape[len(tensor.index) :])
                leaf[tensor.index] = part
            leaves[name] = place(leaf, like)
    return nest(leaves)


def _safetensors(path: Path) -> Path:
    return path / SAFETENSORS_FILE if path.is_dir() else path


def _without_lora(reference: Mapping[str, Any]) -> dict[str, Any]:
    return {name: like for name, like in flatten(reference).items() if not re.fullmatch(LORA, name)}


def _torch_keys(file: Path, stored: Any, likes: Mapping[str, Any]) -> tuple[dict[str, str], list[TorchTensor]]:
    """(stored key by tensor name in OpenPI's port, the tensors' places in our tree); raises for mismatches."""
    tensors = torch_tensors({name: tuple(like.shape) for name, like in likes.items()})
    keys = {key.removeprefix("model."): key for key in stored.keys()}  # noqa: SIM118 (not a mapping)
    if EMBED_TOKENS not in keys and LM_HEAD in keys:
        keys[EMBED_TOKENS] = keys[LM_HEAD]
    found = {
        name: tuple(stored.get_slice(key).get_shape())
        for name, key in keys.items()
        if name not in (LM_HEAD, EXPERT_LM_HEAD)
    }
    compare(found, {t.name: t.shape for t in tensors}, source=str(file), allow_missing="(?!)")
    return keys, tensors


def load_paligemma_npz(path: str | os.PathLike[str], reference: Mapping[str, Any]) -> tuple[Params, list[str]]:
    """(PaliGemma's own weights from big_vision's .npz, loaded one leaf at a time; the reference's missing paths).

    Layers may be stacked, as in the released files, or numbered (`encoderblock_0`). Arrays the model does not have are
    ignored, as in OpenPI.
    """
    file = Path(path).expanduser()
    likes = flatten(reference)
    known, missing = _paligemma_keys(file, npz_headers(file), likes)
    leaves = {}
    with _npz(file) as archive:
        for name, keys in known.items():
            parts = [_as_float(archive[key]) for key in keys.values()]
            leaves[name] = place(parts[0] if -1 in keys else np.stack(parts), likes[name])
    return nest(leaves), missing


def _paligemma_keys(
    file: Path, headers: Mapping[str, tuple[tuple[int, ...], str]], likes: Mapping[str, Any]
) -> tuple[dict[str, dict[int, str]], list[str]]:
    """(stored keys by path and layer (-1: stacked), paths missing from the file); raises for shape mismatches."""
    sources: dict[str, dict[int, str]] = {}  # path -> layer -> key; a stacked array is layer -1
    for key in headers:
        layer = re.search(r"(encoderblock|layers)_(\d+)/", key)
        name = key if layer is None else key.replace(layer[0], f"{layer[1]}/")
        if name.startswith("params/"):
            path_in_tree = "PaliGemma/" + name.removeprefix("params/")
            sources.setdefault(path_in_tree, {})[-1 if layer is None else int(layer[2])] = key
    known = {name: dict(sorted(keys.items())) for name, keys in sources.items() if name in likes}
    found = {
        name: (() if -1 in keys else (len(keys),)) + headers[next(iter(keys.values()))][0]
        for name, keys in known.items()
    }
    expected = {name: tuple(like.shape) for name, like in likes.items()}
    missing = compare(found, expected, source=str(file), allow_missing=NOT_IN_PALIGEMMA)
    if extra := sorted(set(sources) - set(known)):
        logger.info("%s holds %d arrays the model does not have:\n%s", file, len(extra), listing(extra))
    return known, missing


def npz_headers(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Key -> (shape, dtype) of every array of an .npz; reads headers only."""
    headers = {}
    with _npz(file) as archive:
        for member in archive.zip.namelist():
            with archive.zip.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(stream)
                headers[member.removesuffix(".npy")] = tuple(shape), "bfloat16" if _is_bfloat16(dtype) else dtype.name
    return headers


def _is_bfloat16(dtype: np.dtype) -> bool:
    """Whether it is NumPy's form of stored bfloat16: two opaque bytes."""
    return dtype.kind == "V" and dtype.itemsize == 2


def _as_float(array: np.ndarray) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16) if _is_bfloat16(array.dtype) else array


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(file, framework="np") as stored:
            yield stored
    except (OSError, safetensors.SafetensorError) as error:
        raise damaged(file, error) from error


@contextmanager
def _npz(file: Path) -> Iterator[Any]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("not a zip of arrays")
            yield archive
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise damaged(file, error) from error
