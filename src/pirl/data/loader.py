"""From sources of episodes to Q-chunk batches: drawn by counter, prefetched, put on devices.

Batch k is a function of (seed, k), the data, and for online runs of what the replay buffer holds when the batch is
asked for. Every host of a job computes the draw of the whole batch and gathers only its rows, so the batch does not
depend on how many hosts there are.
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
"""A batch, and the replay buffer's contents it may have been drawn from."""


class ACRLPDDataLoader:
    """Endless Q-chunk batches. Use as a context manager: it owns threads.

    `source` is the fixed (offline) data, `replay` what a run collects; at least one of them. Once `replay` holds
    something, `config.online_fraction` of each batch is drawn from it, after the share that is the actor's alone
    (`config.online_actor_share`). A batch prepared before an `append` is thrown
    away and drawn again, so batches never depend on thread timing.

    With `tasks` batches also number their rows' tasks, with `suffixes` they have `transform.suffixed_prompts`.

    With `sharding` batches are global device arrays; the processes' rows follow each other in `host_id`'s order.
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
        """Episodes kept apart from these batches, where there are any."""
        self._step = 0
        self._ahead: _Prefetcher | None = None
        self._fingerprint: str | None = None
        self._began: float | None = None
        self._waited = 0.0

    @property
    def step(self) -> int:
        """How many batches have been handed out."""
        return self._step

    @property
    def has_borders(self) -> bool:
        """Are the dataset's pictures held with the borders that make them square? Replayed ones must be as well."""
        return self._pool is not None and self._pool.source.letterbox

    @property
    def stall_fraction(self) -> float:
        """Share of the time since the first batch (or `reset_stall`) that the caller spent waiting for batches."""
        return 0.0 if self._began is None else self._waited / max(time.perf_counter() - self._began, 1e-9)

    def reset_stall(self) -> None:
        """Measure `stall_fraction` from now on, for example after compilation."""
        self._began, self._waited = time.perf_counter(), 0.0

    def sample_batch(self) -> ChunkBatch:
        """The next batch. An error of the preparing thread is raised here, with its traceback."""
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
        """The batch whose samples start at these rows, for measuring on always the same ones."""
        known = known_steps(resident.table, rows, critic_horizon=self.critic_horizon)
        batch = self._gatherer.gather(
            Draw(residents=[resident], part=np.zeros(len(rows), np.int64), rows=rows, known=known)
        )
        return batch if self._sharding is None else put_on_devices(batch, self._sharding)

    def __iter__(self) -> Iterator[ChunkBatch]:
        while True:
            yield self.sample_batch()

    def refresh_memory_pool(self, epoch_seed: int) -> None:
        """Shuffle the episodes into memory pools anew, from the next batch on; the same epoch seed, the same pools."""
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
        """Everything needed to continue with the same batches, as plain JSON; the replay buffer saves itself."""
        return {
            "seed": self.config.seed,
            "step": self._step,
            "epoch_seed": 0 if self._pool is None else self._pool.epoch_seed,
            "fingerprint": self._source_fingerprint(),
            "replay": 0 if self._replay is None else self._replay.replay.appended,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. The replay buffer, if any, is restored before."""
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
            self._ahead.stop()  # before the pool: what it is waiting for will not come
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
        """Decide the whole batch, the same on every host.

        Streams are mixed at random, so that every host and every micro-batch gets its share of both.
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
    """Global arrays from each process's rows; every leaf is split along its first axis."""
    import jax

    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


class _Prefetcher:
    """A thread that prepares items in order, at most `depth` ahead."""

    def __init__(self, prepare: Callable[[int], _Prepared], *, first: int, depth: int) -> None:
        self._ready: queue.Queue[_Prepared | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(prepare, first), name="pirl-prefetch", daemon=True)
        self._thread.start()

    def get(self) -> _Prepared:
        """The next item; raises what its preparation raised."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """Ask the thread to end, without waiting."""
        self._stop.set()

    def close(self) -> None:
        """End the thread, after the item at hand."""
        self.stop()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # it may be waiting for room
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
