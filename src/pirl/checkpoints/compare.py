"""Compares weights with a model: one error lists all differences and guesses the cause."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pirl.errors import CheckpointError, listing
from pirl.models.params import Params, flatten, nest

LORA = r".*lora.*"
"""Leaves that a checkpoint may lack: adapters, which start fresh on weights trained without them."""

Shape = tuple[int, ...]
Init = Callable[[str], Any] | Mapping[str, Any]
"""Initial values of missing leaves: a function of the "/"-joined path, or a tree."""


def leaf_shapes(tree: Mapping[str, Any]) -> dict[str, Shape]:
    """Path -> shape of every leaf."""
    return {path: tuple(leaf.shape) for path, leaf in flatten(tree).items()}


def compare(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], *, source: str, allow_missing: str = LORA
) -> list[str]:
    """Return the missing leaves that match `allow_missing`; raises one error that lists all other differences."""
    missing = sorted(set(expected) - set(found))
    allowed = [path for path in missing if re.fullmatch(allow_missing, path)]
    refused = [path for path in missing if path not in set(allowed)]
    unexpected = sorted(set(found) - set(expected))
    misshapen = [path for path in sorted(set(found) & set(expected)) if tuple(found[path]) != tuple(expected[path])]
    if not (refused or unexpected or misshapen):
        return allowed
    groups = {
        "missing": [f"{path} {list(expected[path])}" for path in refused],
        "unexpected": [f"{path} {list(found[path])}" for path in unexpected],
        "of another shape": [
            f"{path}: found {list(found[path])}, expected {list(expected[path])}" for path in misshapen
        ],
    }
    lines = "\n".join(f"  {len(items)} {kind}:\n{listing(items)}" for kind, items in groups.items() if items)
    raise CheckpointError(
        f"the weights in {source} do not fit the model ({len(found)} leaves found, {len(expected)} expected)\n{lines}",
        hint=_guess(refused, unexpected, misshapen),
    )


def fit(
    params: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    init: Init | None = None,
    allow_missing: str = LORA,
    source: str = "the checkpoint",
) -> Params:
    """The parameters with exactly the reference's structure, shapes, dtypes and shardings.

    Missing leaves that match `allow_missing` come from `init`; any other difference raises.
    """
    found, expected = flatten(params), flatten(reference)
    missing = compare(leaf_shapes(params), leaf_shapes(reference), source=source, allow_missing=allow_missing)
    found |= _fresh(missing, expected, init, source)
    return nest({path: place(found[path], like) for path, like in expected.items()})


def place(leaf: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The leaf with the dtype and sharding of `like`; not copied if it already has them."""
    if not isinstance(leaf, jax.Array):
        host = np.asarray(leaf).astype(like.dtype, copy=False)
        if like.sharding is None:
            return jax.device_put(host)
        return jax.make_array_from_callback(host.shape, like.sharding, lambda index: host[index])
    leaf = leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)
    if like.sharding is None or leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):
        return leaf
    return jax.device_put(leaf, like.sharding)


def check_finite(params: Mapping[str, Any], *, source: str = "the weights") -> None:
    """Raise if weights contain NaN or infinity, naming the leaves. Counts on the device of each leaf, one at a time."""
    leaves = flatten(params)
    counts = {path: _count_non_finite(leaf) for path, leaf in leaves.items()}
    bad = [f"{path}: {int(n)} of {leaves[path].size} values" for path, n in counts.items() if int(n)]
    if bad:
        raise CheckpointError(
            f"{source}: {len(bad)} of {len(counts)} leaves hold NaN or infinite values\n{listing(bad)}",
            hint="the run that wrote them diverged, or the files are damaged: take an earlier checkpoint",
        )


@jax.jit
def _count_on_device(leaf: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32)


def _count_non_finite(leaf: Any) -> Any:
    """Number of NaN and infinite values. Uses NumPy for host memory, to avoid a compilation per shape."""
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable or any(device.platform != "cpu" for device in leaf.devices()):
            return _count_on_device(leaf)
        return sum(_count_non_finite(np.asarray(s.data)) for s in leaf.addressable_shards if s.replica_id == 0)
    # Layer by layer, so that the mask stays small.
    return sum(int(np.count_nonzero(~np.isfinite(part))) for part in (leaf if np.ndim(leaf) > 1 else [leaf]))


def _fresh(missing: Sequence[str], expected: Mapping[str, Any], init: Init | None, source: str) -> dict[str, Any]:
    if not missing:
        return {}
    if init is None:
        raise CheckpointError(
            f"{source} lacks {len(missing)} leaves the model has\n{listing(missing)}",
            hint="pass init=... to start them afresh",
        )
    values = flatten(init) if isinstance(init, Mapping) else {path: init(path) for path in missing}
    compare(
        {path: tuple(values[path].shape) for path in missing if path in values},
        {path: tuple(expected[path].shape) for path in missing},
        source="the initial values",
        allow_missing="(?!)",
    )
    return {path: values[path] for path in missing}


def _guess(missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]) -> str:
    """The most likely cause of the differences, from our paths or PyTorch's names."""

    def some(pattern: str, names: Sequence[str]) -> bool:
        return any(re.match(pattern, name) for name in names)

    pi0, pi05 = r"(state_proj|action_time_mlp)", r"time_mlp_"
    if some(pi05, unexpected) and some(pi0, missing):
        return "these are π₀.₅ weights and the model is π₀: set pi05=True, or take π₀ weights"
    if some(pi0, unexpected) and some(pi05, missing):
        return "these are π₀ weights and the model is π₀.₅: set pi05=False, or take π₀.₅ weights"
    if some(LORA, unexpected):
        return (
            "the weights carry LoRA adapters and the model has none: give the model LoRA, or merge the adapters first"
        )
    if misshapen and all(re.fullmatch(LORA, path) for path in misshapen):
        return "the LoRA rank differs"
    if misshapen and all(re.match(r"(state_proj|action_(in|out)_proj)", path) for path in misshapen):
        return "action_dim differs: it is the size states and actions are padded to, 32 in released weights"
    if misshapen:
        return "another model size: compare width, depth, heads and vocabulary with what `pirl inspect` shows"
    if missing and all(re.match(r"PaliGemma/llm/.*_1/|.*gemma_expert|.*_proj|.*time_mlp", path) for path in missing):
        return "there is no action expert: PaliGemma's own weights (.npz) are loaded with fresh values for the rest"
    return "`pirl inspect` shows what the checkpoint holds"
