"""Multi-process training: start-up, barriers, sharing a batch.

A process takes its rank from the first of these:

1. the arguments of `initialize`;
2. `JAX_COORDINATOR_ADDRESS` (host:port of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. On Kubernetes the
   manifest of an indexed job or JobSet sets the first two; `JOB_COMPLETION_INDEX` stands in for the third;
3. SLURM's `srun`: `SLURM_JOB_ID`, `SLURM_STEP_NODELIST`, `SLURM_NTASKS`, `SLURM_PROCID`, `SLURM_LOCALID`;
4. Open MPI's `mpirun`: `OMPI_COMM_WORLD_SIZE`, `OMPI_COMM_WORLD_RANK` and what else JAX reads there.

Otherwise there is one process and nothing to do. One task per node drives all devices of the node; with several tasks
per node each drives one (`JAX_LOCAL_DEVICE_IDS` says otherwise).
"""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from pirl.errors import ConfigError
from pirl.parallel.failures import DistributedError
from pirl.parallel.sharding import check_batch, data_sharding

logger = logging.getLogger(__name__)

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_barriers: Counter[str] = Counter()


HEARTBEAT_SECONDS = 40
"""JAX ends all processes when one is silent for this long."""
_ASK_SECONDS = 0.1
"""Processes that wait for others look for news this often."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Rank and number of processes; JAX asks the launcher for fields that are None."""

    launcher: str
    """The launcher."""
    coordinator: str | None = None
    """host:port of process 0."""
    num_processes: int
    """How many there are."""
    process_id: int
    """Which one this is."""
    all_local_devices: bool = True
    """Does it drive every device of its node, or one?"""


def find_place(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Place | None:
    """Rank and number of processes; None for a single process."""
    given = dict(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
    if any(value is not None for value in given.values()):
        return _complete("the arguments", given, ("coordinator", "num_processes", "process_id"))
    if "JAX_COORDINATOR_ADDRESS" in environment:
        variables = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        index = environment.get(variables[2], environment.get("JOB_COMPLETION_INDEX"))
        values = (environment[variables[0]], environment.get(variables[1]), index)
        return _complete("the environment", dict(zip(variables, values, strict=True)), variables)
    if all(name in environment for name in _SLURM) and int(environment["SLURM_NTASKS"]) > 1:
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_NTASKS_PER_NODE", ""))
        return Place(
            launcher="SLURM",
            num_processes=int(environment["SLURM_NTASKS"]),
            process_id=int(environment["SLURM_PROCID"]),
            # "2(x3),1" is two tasks on each of three nodes, then one
            all_local_devices={part.split("(")[0] for part in per_node.split(",")} == {"1"},
        )
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return Place(
            launcher="Open MPI",
            num_processes=int(environment["OMPI_COMM_WORLD_SIZE"]),
            process_id=int(environment["OMPI_COMM_WORLD_RANK"]),
            all_local_devices=environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1",
        )
    return None


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int | float = 300,
) -> Place | None:
    """Join the other processes; call it before anything else touches JAX. One process alone: nothing happens.

    Once is enough: a process that has joined stays where it is.
    """
    place = find_place(os.environ, coordinator, num_processes, process_id)
    if place is None:
        return None
    if place.num_processes == 1:
        logger.info("%s: one process, nothing to join", place.launcher)
        return place
    if jax.distributed.is_initialized():
        return place
    try:
        jax.distributed.initialize(
            coordinator_address=place.coordinator,
            num_processes=place.num_processes,
            process_id=place.process_id,
            # Under a launcher JAX would give each process one device; an empty list lets it see all of them.
            local_device_ids=[] if place.all_local_devices and "JAX_LOCAL_DEVICE_IDS" not in os.environ else None,
            cluster_detection_method=None if place.coordinator is None else "deactivate",
            initialization_timeout=int(timeout),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:
        address = place.coordinator or f"the first node of {place.launcher}"
        raise DistributedError(
            f"process {place.process_id} of {place.num_processes} could not join the others at {address}: "
            f"{str(error).splitlines()[0][:300]}",
            hint="all processes must be started, with one coordinator address that each can reach, ids 0 to "
            f"{place.num_processes - 1}, and before anything else uses jax; proxies (http_proxy) can block them",
        ) from error
    if jax.default_backend() == "cpu":
        # A program that XLA reads back from the cache runs its collectives in any order: Gloo aborts over the mismatch.
        jax.config.update("jax_enable_compilation_cache", False)
    return place


def is_main() -> bool:
    """Whether this process writes logs and files for all."""
    return jax.process_index() == 0


def barrier(name: str, timeout: int | float = 600) -> None:
    """Wait for all processes; raises after `timeout` seconds.

    Every process must pass its barriers in the same order.
    """
    if jax.process_count() == 1:
        return
    _barriers[name] += 1  # the runtime lets a key be used once
    try:
        ocp.multihost.get_barrier_sync_fn()(key=f"pirl.{name}.{_barriers[name]}", timeout_ms=int(timeout * 1000))
    except Exception as error:
        raise DistributedError(
            f"process {jax.process_index()} waited {timeout:g} s at {name!r} for all {jax.process_count()} processes: "
            f"{str(error).splitlines()[0][:300]}",
            hint="another process failed or is slower: see its log; a longer timeout only helps slow processes",
        ) from error


class Meeting:
    """One piece of work that all processes share: each can ask the others to stop, and says in the end what it did.

    The words are short JSON and go through the service that the processes found each other by, so a process can work
    or wait as long as it needs. All processes must hold the same meetings in the same order.
    """

    _last: str | None = None
    """The previous meeting; all processes have read it."""

    def __init__(self, name: str) -> None:
        _barriers[name] += 1
        self._place = f"pirl.meeting/{name}.{_barriers[name]}/"
        self._client = ocp.multihost.get_jax_distributed_client()

    def stop(self, asked: bool) -> bool:
        """Whether any process was asked to stop; `asked` tells the others that this one was."""
        if asked:
            self._client.key_value_set(f"{self._place}stop/asked", "", allow_overwrite=True)
        return bool(self._client.key_value_dir_get(f"{self._place}stop"))

    def gather(self, word: Any, *, meanwhile: Callable[[], object] = lambda: None) -> list[Any]:
        """What each process says, in their order; waits until all have, and calls `meanwhile` now and then."""
        said = f"{self._place}said"
        self._client.key_value_set(f"{said}/{jax.process_index():06}", json.dumps(word))
        while len(words := self._client.key_value_dir_get(said)) < jax.process_count():
            meanwhile()
            time.sleep(_ASK_SECONDS)
        if is_main() and Meeting._last is not None:
            self._client.key_value_delete(Meeting._last)
        Meeting._last = self._place
        return [json.loads(text) for _, text in sorted(words)]


def host_slice(batch: Any, mesh: Mesh) -> Any:
    """The rows of this process out of a whole batch that every process can make: what `shard_batch` takes."""

    def rows(leaf: Any) -> Any:
        size = len(leaf)
        check_batch(size, mesh)
        places = data_sharding(mesh).addressable_devices_indices_map((size,))
        spans = sorted({index[0].indices(size)[:2] for index in places.values() if index is not None})
        first, last = spans[0][0], spans[-1][1]
        if sum(stop - start for start, stop in spans) != last - first:
            raise ConfigError("this process's rows of a batch are not contiguous", hint="make the mesh with make_mesh")
        return leaf[first:last]

    return jax.tree.map(rows, batch)


def _complete(source: str, given: dict[str, Any], names: tuple[str, str, str]) -> Place:
    """All three or an error: two out of three is a typo."""
    missing = [name for name in names if given[name] is None]
    if missing:
        raise ConfigError(
            f"{source} name {', '.join(sorted(set(names) - set(missing)))} but not {', '.join(missing)}",
            hint="several processes need all three: host:port of process 0, how many there are, and which one this is",
        )
    coordinator, count, index = (given[name] for name in names)
    try:
        num_processes, process_id = int(count), int(index)
        _, port = str(coordinator).rsplit(":", 1)
        int(port)
    except ValueError as error:
        raise ConfigError(
            f"{source}: {names[0]} {coordinator!r}, {names[1]} {count!r}, {names[2]} {index!r}",
            hint="an address as host:port, and two whole numbers",
        ) from error
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"{source}: process {process_id} of {num_processes}",
            hint=f"processes are numbered 0 to {num_processes - 1}",
        )
    return Place(launcher=source, coordinator=str(coordinator), num_processes=num_processes, process_id=process_id)
