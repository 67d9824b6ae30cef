"""The device mesh, OpenPI's FSDP rule for parameters, and a check that it took effect.

The rule depends only on shape and dtype and is applied to the whole train state, so a parameter's moments, EMA and
target have the parameter's sharding; small arrays, such as the critic's, are replicated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from pirl.errors import ConfigError, listing

DATA_AXIS, FSDP_AXIS = "batch", "fsdp"
"""Mesh axes, named as in OpenPI; a batch is split over both."""
MIN_SHARDED_BYTES = 4 * 2**20


def make_mesh(fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices of all processes (or the given ones) as (devices / fsdp, fsdp).

    The fsdp axis is the inner one: devices that share weights are neighbours, within a node if fsdp permits.
    """
    devices = jax.devices() if devices is None else devices
    if fsdp < 1 or len(devices) % fsdp:
        divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise ConfigError(
            f"fsdp is {fsdp} and there are {len(devices)} devices",
            hint=f"fsdp divides the number of devices: {', '.join(map(str, divisors))}",
        )
    shape = (len(devices) // fsdp, fsdp)
    return jax.make_mesh(shape, (DATA_AXIS, FSDP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices)


def fsdp_spec(shape: Sequence[int], dtype: DTypeLike, fsdp: int) -> PartitionSpec:
    """Shard the largest axis that the device count divides; vectors and arrays under 4 MiB are replicated.

    Among equal axes the later one is taken, as OpenPI's reversed argsort does.
    """
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if fsdp == 1 or len(shape) < 2 or nbytes < MIN_SHARDED_BYTES:
        return PartitionSpec()
    for axis in np.argsort(shape, kind="stable")[::-1]:
        if shape[axis] % fsdp == 0:
            return PartitionSpec(*(FSDP_AXIS if i == axis else None for i in range(len(shape))))
    return PartitionSpec()


def shards(shape: Sequence[int], dtype: DTypeLike, fsdp: int) -> bool:
    """Whether an array is sharded over `fsdp` devices, or too small to need it."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return fsdp == 1 or len(shape) < 2 or nbytes < MIN_SHARDED_BYTES or any(fsdp_spec(shape, dtype, fsdp))


def state_shardings(mesh: Mesh, shapes: Any) -> Any:
    """A sharding for every leaf of a tree of arrays or ShapeDtypeStructs, such as a whole TrainState."""
    fsdp = mesh.shape[FSDP_AXIS]
    return jax.tree.map(lambda leaf: NamedSharding(mesh, fsdp_spec(leaf.shape, leaf.dtype, fsdp)), shapes)


def sharded_shapes(mesh: Mesh, shapes: Any) -> Any:
    """The tree as ShapeDtypeStructs with shardings, for restoring and initialising."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, shapes),
    )


def data_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: split over all devices along its first axis."""
    return NamedSharding(mesh, PartitionSpec((DATA_AXIS, FSDP_AXIS)))


def replicated(mesh: Mesh) -> NamedSharding:
    """The replicated sharding, for keys, steps and metrics."""
    return NamedSharding(mesh, PartitionSpec())


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Move a batch from host memory to the devices. With several processes each passes its own rows (`host_slice`)."""
    sharding = data_sharding(mesh)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), batch)


def on_this_host(tree: Any) -> Any:
    """The arrays on this process's devices alone, for computing without the other processes.

    Arrays that every process's devices hold completely are not copied. Arrays sharded across processes are gathered
    first, which all processes must do together. With a single process, the tree itself.
    """
    if jax.process_count() == 1:
        return tree
    arrays: list[jax.Array] = jax.tree.leaves(tree)
    apart = list({id(array): array for array in arrays if _is_apart(array)}.values())  # a state has frozen ones twice
    shardings = state_shardings(make_mesh(jax.local_device_count()), apart)
    # One program for all: with several, processes could run them in different orders and exchange the wrong arrays.
    gathered = _gather_to(tuple(shardings))(apart) if apart else []
    whole = {id(array): found for array, found in zip(apart, gathered, strict=True)}
    return jax.tree.unflatten(jax.tree.structure(tree), [_local(whole.get(id(array), array)) for array in arrays])


@lru_cache
def _gather_to(shardings: tuple[NamedSharding, ...]) -> Any:
    return jax.jit(lambda arrays: arrays, out_shardings=list(shardings))


def _is_apart(array: Any) -> bool:
    """Whether an array is sharded across processes."""
    mesh = array.sharding.mesh
    return any(array.sharding.spec) and mesh.local_mesh.shape[FSDP_AXIS] < mesh.shape[FSDP_AXIS]


def _local(array: Any) -> jax.Array:
    """The shards of this process as one array."""
    sharding = NamedSharding(array.sharding.mesh.local_mesh, array.sharding.spec)
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def check_batch(batch_size: int, mesh: Mesh) -> None:
    """Raise if a batch does not divide evenly among the devices."""
    devices = mesh.size
    if batch_size < 1 or batch_size % devices:
        below, above = batch_size // devices * devices, (batch_size // devices + 1) * devices
        near = str(above) if below < 1 else f"{below} or {above}"
        raise ConfigError(
            f"the batch size is {batch_size} and there are {devices} devices",
            hint=f"every device gets the same number of samples: take {near}, or fewer devices",
        )


@dataclass(frozen=True, kw_only=True)
class ShardingReport:
    """Placement of a tree on the devices of a mesh."""

    total_bytes: int
    """Size of the tree, replicas counted once."""
    device_bytes: dict[int, int]
    """Device id -> bytes, for the devices of this process."""
    sharded: int
    """Number of sharded arrays."""
    replicated: int
    """Number of replicated arrays."""
    replicated_large: tuple[str, ...]
    """Replicated arrays of 4 MiB or more, by path, largest first."""

    @property
    def largest_share(self) -> float:
        """Share of the tree on the fullest device: about 1 / fsdp if sharding works."""
        return max(self.device_bytes.values()) / max(self.total_bytes, 1)


def validate_fsdp_sharding(state: Any, mesh: Mesh) -> ShardingReport:
    """Measure a state's actual placement; raise if large matrices are replicated although fsdp is above 1.

    Takes arrays, or ShapeDtypeStructs with shardings (a plan, before anything is allocated).
    """
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    device_bytes = {device.id: 0 for device in devices}
    whole: list[tuple[int, str]] = []
    total, sharded, silent = 0, 0, []
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        itemsize = np.dtype(leaf.dtype).itemsize
        nbytes = int(np.prod(leaf.shape)) * itemsize
        total += nbytes
        parts = _bytes_by_device(leaf, itemsize, device_bytes)
        for device, part in parts.items():
            device_bytes[device] += part
        if max(parts.values()) < nbytes:
            sharded += 1
        elif nbytes >= MIN_SHARDED_BYTES:
            whole.append((nbytes, name))
            if len(leaf.shape) > 1:
                silent.append(f"{name} {list(leaf.shape)}, {nbytes / 2**20:.0f} MiB")
    fsdp = mesh.shape[FSDP_AXIS]
    if fsdp > 1 and silent:
        raise ConfigError(
            f"fsdp is {fsdp}, yet {len(silent)} large arrays are whole on every device\n{listing(silent)}",
            hint="take an fsdp that divides one of their axes (a power of two divides the released models'), "
            "and give the jitted step the shardings of state_shardings",
        )
    return ShardingReport(
        total_bytes=total,
        device_bytes=device_bytes,
        sharded=sharded,
        replicated=len(leaves) - sharded,
        replicated_large=tuple(name for _, name in sorted(whole, reverse=True)),
    )


def _bytes_by_device(leaf: Any, itemsize: int, devices: dict[int, int]) -> dict[int, int]:
    """Bytes of a leaf per device: actual for an array, planned for a ShapeDtypeStruct."""
    if isinstance(leaf, jax.Array):
        held = {shard.device.id: shard.data.nbytes for shard in leaf.addressable_shards}
    else:
        part = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        held = {device: int(np.prod(part)) * itemsize for device in devices}
    if stray := sorted(set(held) - set(devices)):
        raise ConfigError(f"an array lies on devices {stray}, outside the mesh", hint="put the state on the mesh first")
    return held
