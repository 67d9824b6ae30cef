"""Device memory, now and at named moments, and the training state's share of it.

GPUs and TPUs report their allocator's counters. The CPU backend reports none, so there the process's memory is used.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from pirl.agents.agent import TrainState
from pirl.parallel.sharding import fsdp_spec
from pirl.text import table

GIB = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Allocator statistics of one device."""

    device: str
    """Kind and number."""
    in_use: int
    """Bytes allocated now."""
    peak: int
    """Most bytes allocated at once so far by this process."""
    limit: int | None
    """Bytes the allocator may use, if known."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Memory use at one moment."""

    label: str
    """Name of the moment."""
    seconds: float
    """Seconds since the monitor was made (0 for a single reading)."""
    host: int
    """Resident bytes of this process."""
    devices: tuple[DeviceMemory, ...]
    """Local devices that report their memory; none on the CPU backend."""

    @property
    def in_use(self) -> int:
        """Bytes on the fullest device, or of the process if no device reports."""
        return max((device.in_use for device in self.devices), default=self.host)

    @property
    def peak(self) -> int:
        """Highest peak over devices, or the process's current bytes if no device reports."""
        return max((device.peak for device in self.devices), default=self.host)

    def __str__(self) -> str:
        where = f"on the fullest of {len(self.devices)} devices (peak {gib(self.peak)})" if self.devices else "(host)"
        return f"{self.label}: {gib(self.in_use)} {where}, process {gib(self.host)}"


def read_memory(label: str = "now", *, devices: Sequence[Any] | None = None, seconds: float = 0.0) -> Mark:
    """The memory in use now; does not wait for the device."""
    found = []
    for device in jax.local_devices() if devices is None else devices:
        stats = device.memory_stats() or {}
        if "bytes_in_use" in stats:
            in_use = int(stats["bytes_in_use"])
            found.append(
                DeviceMemory(
                    device=f"{device.device_kind} {device.id}",
                    in_use=in_use,
                    peak=int(stats.get("peak_bytes_in_use", in_use)),
                    limit=int(stats["bytes_limit"]) if "bytes_limit" in stats else None,
                )
            )
    host = psutil.Process().memory_info().rss
    return Mark(label=label, seconds=seconds, host=host, devices=tuple(found))


def log_memory_usage(label: str) -> Mark:
    """Read the memory and log it on one line."""
    mark = read_memory(label)
    logger.info("memory %s", mark)
    return mark


def memory_values() -> dict[str, float]:
    """Metrics in GiB: in use and peak of the fullest device, and of the process."""
    mark = read_memory()
    values = {"memory/host_gib": mark.host / GIB}
    if mark.devices:
        values |= {"memory/device_gib": mark.in_use / GIB, "memory/device_peak_gib": mark.peak / GIB}
    return values


class GPUMemoryMonitor:
    """Records memory at named moments of a run, to find where it goes and when it peaks."""

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        """`devices`: by default all local ones."""
        self._devices = devices
        self._start = time.perf_counter()
        self._marks: list[Mark] = []

    @property
    def marks(self) -> tuple[Mark, ...]:
        """All marks so far, in order."""
        return tuple(self._marks)

    @property
    def peak(self) -> Mark | None:
        """The first mark at which the highest peak had been reached."""
        return max(self._marks, key=lambda mark: mark.peak, default=None)

    def mark(self, label: str) -> Mark:
        """Record the memory in use now."""
        seconds = time.perf_counter() - self._start
        self._marks.append(read_memory(label, devices=self._devices, seconds=seconds))
        return self._marks[-1]

    def report(self) -> str:
        """A table of all marks: in use, change since the previous mark, peak, process."""
        if not self._marks:
            return "memory: nothing was marked"
        rows = [("mark", "time", "in use", "change", "peak", "process")]
        before = self._marks[0].in_use
        for mark in self._marks:
            change = f"{(mark.in_use - before) / GIB:+.2f} GiB"
            rows.append((mark.label, f"{mark.seconds:.1f} s", gib(mark.in_use), change, gib(mark.peak), gib(mark.host)))
            before = mark.in_use
        lines = [*table(rows, "<>>>>>"), *self._by_device()]
        if (peak := self.peak) is not None:
            devices = ", ".join(
                f"{device.device} {gib(device.peak)}" + (f" of {gib(device.limit)}" if device.limit else "")
                for device in peak.devices
            )
            lines.append(f"highest by {peak.label!r}: {devices or gib(peak.peak) + ' (process)'}")
        return "\n".join(lines)

    def _by_device(self) -> list[str]:
        """A table of use by mark and device, if there are several devices."""
        names = [device.device for device in self._marks[0].devices]
        if len(names) < 2:
            return []
        rows = [("in use by device", *names)]
        rows += [(mark.label, *(gib(device.in_use) for device in mark.devices)) for mark in self._marks]
        return table(rows, "<" + ">" * len(names))


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One part of a training state."""

    name: str
    """Its field and group, such as `params/policy` or `opt/critic`."""
    values: int
    """Number of elements."""
    total: int
    """Bytes of the part, replicas counted once."""
    per_device: int
    """Bytes on one device."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Bytes of a training state by part."""

    parts: tuple[StatePart, ...]
    """In the order of the state's fields; groups sorted by name."""

    @property
    def total(self) -> int:
        """Bytes of the state, replicas counted once."""
        return sum(part.total for part in self.parts)

    @property
    def per_device(self) -> int:
        """Bytes on one device."""
        return sum(part.per_device for part in self.parts)

    def __getitem__(self, name: str) -> StatePart:
        return next(part for part in self.parts if part.name == name)

    def __str__(self) -> str:
        rows = [("part", "values", "total", "per device")]
        rows += [(part.name, f"{part.values:,}", gib(part.total), gib(part.per_device)) for part in self.parts]
        rows.append(("total", f"{sum(p.values for p in self.parts):,}", gib(self.total), gib(self.per_device)))
        return "\n".join(table(rows, "<>>>"))


def breakdown(state: TrainState | Mapping[str, Any], *, shardings: Any = None, fsdp: int | None = None) -> Breakdown:
    """Bytes of each part of a state of arrays or shapes.

    Placement comes from `shardings` (a tree like the state), else from OpenPI's rule for `fsdp` devices, else from the
    arrays' own shardings; a leaf with none of these is replicated.
    """
    where = {} if shardings is None else _parts(shardings)
    parts = []
    for name, tree in _parts(state).items():
        leaves = jax.tree.leaves(tree)
        placed = jax.tree.leaves(where[name]) if shardings is not None else [None] * len(leaves)
        parts.append(
            StatePart(
                name=name,
                values=sum(math.prod(leaf.shape) for leaf in leaves),
                total=sum(leaf_bytes(leaf) for leaf in leaves),
                per_device=sum(shard_bytes(x, s, fsdp) for x, s in zip(leaves, placed, strict=True)),
            )
        )
    return Breakdown(parts=tuple(parts))


def leaf_bytes(leaf: Any) -> int:
    """Bytes of an array or ShapeDtypeStruct; a PRNG key counts as its key data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def shard_bytes(leaf: Any, sharding: Any = None, fsdp: int | None = None) -> int:
    """Bytes of a leaf on one device."""
    if sharding is None and fsdp is not None:
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        spec = fsdp_spec(leaf.shape, leaf.dtype, fsdp) if leaf.shape and not key else ()
        return leaf_bytes(leaf) // (fsdp if any(axis is not None for axis in spec) else 1)
    sharding = getattr(leaf, "sharding", None) if sharding is None else sharding
    if sharding is None or not leaf.shape:
        return leaf_bytes(leaf)
    return leaf_bytes(leaf) * math.prod(sharding.shard_shape(leaf.shape)) // math.prod(leaf.shape)


def _parts(state: Any) -> dict[str, Any]:
    """`field/group` -> subtree; a field that is not a dict of groups is one part."""
    if isinstance(state, TrainState):
        whole = {f.name: getattr(state, f.name) for f in fields(state) if not f.metadata.get("static")}
    else:
        whole = dict(state)
    parts: dict[str, Any] = {}
    for name, value in whole.items():
        if isinstance(value, Mapping):
            parts |= {f"{name}/{group}": tree for group, tree in sorted(value.items())}
        else:
            parts[name] = value
    return parts


def gib(count: int | float) -> str:
    """Bytes as text with a binary unit."""
    if count >= GIB / 10:
        return f"{count / GIB:.2f} GiB"
    if count >= 2**20 / 10:
        return f"{count / 2**20:.2f} MiB"
    return f"{count / 2**10:.1f} KiB" if count >= 2**10 else f"{count:.0f} B"
