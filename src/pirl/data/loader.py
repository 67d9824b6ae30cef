"""From sources of episodes to Q-chunk batches: drawn by counter, prefetched, put on devices.

Batch k is a function of (seed, k), the data and, online, the replay buffer's contents when the batch is requested.
Every host of a job computes the draw of the whole batch and gathers only its rows, so batches do not depend on the
number of hosts.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Int

from pirl.data.chunks import known_steps
from pirl.data.config import DataConfig
from pirl.data.gather import Draw, Gatherer, LowDimTransform
from pirl.data.pool import DatasetStatistics, MemoryPool, Resident, dataset_statistics, fingerprint, row_generator
from pirl.data.replay import MemorySource, ReplayBuffer, ReplayStream
from pirl.data.takeovers import TakeoverRule
from pirl.data.tasks import Tasks
from pirl.errors import ConfigError, DataError
from pirl.records import Array, ChunkBatch, EpisodeSource

_Prepared = tuple[MemorySource | None, ChunkBatch]
"""The replay snapshot before the batch was drawn, and the batch."""


class ACRLPDDataLoader:
    """Endless Q-chunk batches. Owns threads: use it as a context manager.

    `source` is the fixed (offline) data, `replay` what a run collects; at least one is required. Once `replay` is not
    empty, `config.online_actor_share` of each batch is drawn from it for the actor alone, and `config.online_fraction`
    of the rest. Batches prefetched before an `append` are discarded and drawn again, so batches never depend on thread
    timing.

    `tasks` adds task numbers to batches, `suffixes` the prompts of `transform.suffixed_prompts`.

    With `sharding` batches are global device arrays; the hosts' rows follow each other in order of `host_id`.
    """

    def __init__(
        self,
        source: EpisodeSource | None,
        transform: LowDimTransform,
        *,
        config: DataConfig,
        batch_size: int = 128,
        horizon: int,
        discount: float,
        replay: ReplayBuffer | None = None,
        next_observations: bool = True,
        corrections: bool = False,
        tasks: bool = False,
        suffixes: bool = False,
        sharding: Any = None,
        host_id: int = 0,
        host_count: int = 1,
    ) -> None:
        self.critic_horizon = horizon if config.critic_horizon is None else config.critic_horizon
        _check_arguments(source, replay, batch_size, horizon, self.critic_horizon, host_id, host_count)
        self.config = config
        self.batch_size = batch_size
        self.horizon = horizon
        self.cameras = (source if source is not None else replay).cameras  # type: ignore[union-attr]
        self.takeovers = TakeoverRule.of(config)
        self._pool: MemoryPool | None = None
        if source is not None:
            ahead = source.prepare() or config.cache == "pool"
            self._pool = MemoryPool(
                source,
                discount=discount,
                seed=config.seed,
                episodes_per_memory_pool=config.episodes_per_memory_pool if ahead else None,
                steps_per_memory_pool=config.steps_per_memory_pool,
                balance=config.balance,
                takeovers=self.takeovers,
            )
        rules: dict[str, Any] = {"balance": config.balance, "imitated": config.online_imitated}
        rules["takeovers"] = self.takeovers
        self._replay = None if replay is None else ReplayStream(replay, discount=discount, **rules)
        self._sharding = sharding
        self._gatherer = Gatherer(
            transform=transform,
            cameras=self.cameras,
            horizon=horizon,
            critic_horizon=self.critic_horizon,
            boundary=config.boundary,
            n_step=config.n_step,
            next_observations=next_observations,
            corrections=corrections,
            tasks=Tasks.of(source) if tasks else None,
            suffixes=suffixes,
            mine=np.arange(batch_size).reshape(host_count, -1)[host_id],
        )
        self.held_out: EpisodeSource | None = None
        """Validation episodes excluded from the batches, if any. Set by the caller."""
        self._step = 0
        self._ahead: _Prefetcher | None = None
        self._fingerprint: str | None = None
        self._began: float | None = None
        self._waited = 0.0

    @property
    def step(self) -> int:
        """Number of batches returned so far."""
        return self._step

    @property
    def has_borders(self) -> bool:
        """Whether the dataset's images include letterbox borders. Replayed images must then include them, too."""
        return self._pool is not None and self._pool.source.letterbox

    @property
    def stall_fraction(self) -> float:
        """Share of the time since the first batch (or `reset_stall`) that the caller spent waiting for batches."""
        return 0.0 if self._began is None else self._waited / max(time.perf_counter() - self._began, 1e-9)

    def reset_stall(self) -> None:
        """Restart the measurement of `stall_fraction`, for example after compilation."""
        self._began, self._waited = time.perf_counter(), 0.0

    def sample_batch(self) -> ChunkBatch:
        """The next batch. Re-raises errors of the prefetching thread."""
        asked = time.perf_counter()
        if self._began is None:
            self._began = asked
        contents, batch = self._next()
        while contents is not self._replay_contents():
            self._stop_prefetching()
            contents, batch = self._next()
        self._step += 1
        self._waited += time.perf_counter() - asked
        return batch

    def batch_at(self, resident: Resident, rows: Int[Array, "B"]) -> ChunkBatch:
        """The batch whose samples start at the given rows, for validation on fixed samples."""
        known = known_steps(resident.table, rows, critic_horizon=self.critic_horizon)
        batch = self._gatherer.gather(
            Draw(residents=[resident], part=np.zeros(len(rows), np.int64), rows=rows, known=known)
        )
        return batch if self._sharding is None else put_on_devices(batch, self._sharding)

    def __iter__(self) -> Iterator[ChunkBatch]:
        while True:
            yield self.sample_batch()

    def refresh_memory_pool(self, epoch_seed: int) -> None:
        """Reshuffle episodes into memory pools from the next batch on; deterministic in `epoch_seed`."""
        self._stop_prefetching()
        if self._pool is not None:
            self._pool.refresh_memory_pool(epoch_seed)

    def get_dataset_statistics(self) -> dict[str, DatasetStatistics]:
        """Statistics of the whole sources, not only of the pool: `offline` and `online`."""
        statistics = {}
        if self._pool is not None:
            statistics["offline"] = dataset_statistics(self._pool.source)
        if self._replay is not None:
            statistics["online"] = dataset_statistics(self._replay.replay.snapshot())
        return statistics

    def state(self) -> dict[str, Any]:
        """The position in the data as plain JSON, for `restore`. The replay buffer is saved separately."""
        return {
            "seed": self.config.seed,
            "step": self._step,
            "epoch_seed": 0 if self._pool is None else self._pool.epoch_seed,
            "fingerprint": self._source_fingerprint(),
            "replay": 0 if self._replay is None else self._replay.replay.appended,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; raises if the data changed. Restore the replay buffer first, if any."""
        mine = self.state()
        wanted = {
            "seed": "resume with the seed the run began with",
            "fingerprint": "datasets, labels, weights or data.held_out have changed; resume with the same data",
            "replay": "restore the replay buffer of the same checkpoint first",
        }
        for key, hint in wanted.items():
            if state[key] != mine[key]:
                raise DataError(
                    f"data position was saved with {key} {state[key]!r}, here it is {mine[key]!r}", hint=hint
                )
        self.refresh_memory_pool(int(state["epoch_seed"]))
        self._step = int(state["step"])

    def close(self) -> None:
        """Stop all threads; the loader cannot be used afterwards."""
        if self._ahead is not None:
            self._ahead.stop()  # first: closing the pool cancels the decoding it may wait for
        if self._pool is not None:
            self._pool.close()
        self._stop_prefetching()

    def __enter__(self) -> "ACRLPDDataLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _source_fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = "" if self._pool is None else fingerprint(self._pool.source)
        return self._fingerprint

    def _replay_contents(self) -> MemorySource | None:
        return None if self._replay is None else self._replay.replay.snapshot()

    def _next(self) -> _Prepared:
        if self.config.prefetch == 0:
            return self._prepare(self._step)
        if self._ahead is None:
            self._ahead = _Prefetcher(self._prepare, first=self._step, depth=self.config.prefetch)
        try:
            return self._ahead.get()
        except BaseException:
            self._stop_prefetching()
            raise

    def _stop_prefetching(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _prepare(self, step: int) -> _Prepared:
        contents = self._replay_contents()
        batch = self._gatherer.gather(self._draw(step))
        return contents, batch if self._sharding is None else put_on_devices(batch, self._sharding)

    def _draw(self, step: int) -> Draw:
        """Draw the whole batch, identically on every host.

        Offline and online samples are shuffled, so that every host and micro-batch gets a mix of both.
        """
        rng = row_generator(self.config.seed, step)
        offline = None if self._pool is None else self._pool.resident(step)
        online = None if self._replay is None else self._replay.resident(step)
        if offline is None and online is None:
            raise DataError("the replay buffer is empty and there is no dataset", hint="collect episodes first")
        share = 0 if online is None else 1 if offline is None else self.config.online_fraction
        apart = (
            0 if online is None or not len(online.imitable) else round(self.config.online_actor_share * self.batch_size)
        )
        count = round(share * (self.batch_size - apart))
        streams = [(offline, self.batch_size - apart - count), (online, count)]
        drawn = [(resident, resident.draw(rng, n)) for resident, n in streams if resident is not None and n]
        if online is not None and apart:
            drawn.append((online, online.draw_imitable(rng, apart)))
        part = np.repeat(np.arange(len(drawn)), [len(rows) for _, rows in drawn])
        rows = np.concatenate([rows for _, rows in drawn])
        h = self.critic_horizon
        known = np.concatenate([known_steps(resident.table, rows, critic_horizon=h) for resident, rows in drawn])
        for_actor = np.arange(self.batch_size) >= self.batch_size - apart
        order = rng.permutation(self.batch_size)
        return Draw(
            residents=[resident for resident, _ in drawn],
            part=part[order],
            rows=rows[order],
            known=known[order],
            for_actor=for_actor[order] if apart else None,
        )


def put_on_devices(batch: Any, sharding: Any) -> Any:
    """Global device arrays from each process's rows; leaves are sharded along axis 0."""
    import jax

    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


class _Prefetcher:
    """A thread that prepares items in order and queues up to `depth` of them."""

    def __init__(self, prepare: Callable[[int], _Prepared], *, first: int, depth: int) -> None:
        self._ready: queue.Queue[_Prepared | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(prepare, first), name="pirl-prefetch", daemon=True)
        self._thread.start()

    def get(self) -> _Prepared:
        """The next item; re-raises errors of its preparation."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """Signal the thread to end, without waiting."""
        self._stop.set()

    def close(self) -> None:
        """End the thread after its current item, and wait for it."""
        self.stop()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # unblocks a thread that waits on a full queue
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, prepare: Callable[[int], _Prepared], step: int) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(prepare(step))
            except BaseException as error:
                self._ready.put(error)
                return
            step += 1


def _check_arguments(
    source: EpisodeSource | None,
    replay: ReplayBuffer | None,
    batch_size: int,
    horizon: int,
    critic_horizon: int,
    host_id: int,
    host_count: int,
) -> None:
    if source is None and replay is None:
        raise ConfigError("the loader has neither a dataset nor a replay buffer", hint="give it at least one of them")
    if source is not None and replay is not None and set(source.cameras) != set(replay.cameras):
        raise ConfigError(
            f"the dataset has the cameras {source.cameras}, the replay buffer {replay.cameras}",
            hint="record and collect with the same cameras, or select those both have",
        )
    if not 1 <= critic_horizon <= horizon:
        raise ConfigError(
            f"critic_horizon is {critic_horizon}, horizon is {horizon}",
            hint="the critic scores at least one step and at most the whole chunk",
        )
    if batch_size < 1 or batch_size % host_count or not 0 <= host_id < host_count:
        raise ConfigError(
            f"a batch of {batch_size} on host {host_id} of {host_count}",
            hint="the batch size must be a positive multiple of the number of hosts",
        )
