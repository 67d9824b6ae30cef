"""The memory pool: which episodes are resident, and which of their rows a batch starts from.

Random draws are functions of counters, never of earlier draws: the rows of batch k depend on (seed, k), the episodes of
pool p on (seed, epoch seed, p), and p on k. So resumed and uninterrupted runs draw the same batches, and every host of
a job computes the same draw and reads only its share.
"""

import hashlib
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int, UInt8

from pirl.data.chunks import EpisodeTable, tabulate
from pirl.data.config import Imitated
from pirl.data.takeovers import NO_MEANING, TakeoverRule
from pirl.errors import ConfigError, DataError
from pirl.records import Array, Episode, EpisodeSource

Frames = Mapping[str, UInt8[Array, "_ _ _ 3"]]
"""One episode's images by camera."""

_POOLS, _ROWS = 0, 1  # stream numbers: keep the draws of pools and rows independent


def row_generator(seed: int, step: int) -> np.random.Generator:
    """The random generator of batch `step`."""
    return _generator(seed, _ROWS, step)


def _generator(*counter: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(counter)))


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Episodes in memory, ready for sampling. Immutable, hence safe to read from any thread."""

    indices: Int[Array, "E"]
    """Positions of the episodes in the source."""
    table: EpisodeTable
    """Their low-dimensional rows."""
    frames: Callable[[int], Frames]
    """Images of episode i of the table."""
    mass: Float[Array, "E"]
    """Cumulative sum of the episodes' sampling weights."""

    def draw(self, rng: np.random.Generator, count: int) -> Int[Array, "B"]:
        """Draw start rows: an episode by its weight, then a step uniformly, moved back to its last observed row."""
        point = rng.random(count) * self.mass[-1]
        episode = np.searchsorted(self.mass, point, side="right")
        before = np.where(episode > 0, self.mass[episode - 1], 0.0)
        share = (point - before) / (self.mass[episode] - before)
        lengths = self.table.lengths[episode]
        rows = self.table.starts[episode] + np.minimum((share * lengths).astype(np.int64), lengths - 1)
        return self.table.seen_at[rows]

    @cached_property
    def imitable(self) -> Int[Array, "n"]:
        """Rows that an actor may imitate."""
        return np.flatnonzero(self.table.imitated & (self.table.seen_at == np.arange(len(self.table))))

    def draw_imitable(self, rng: np.random.Generator, count: int) -> Int[Array, "B"]:
        """Draw start rows uniformly from `imitable`."""
        return self.imitable[rng.integers(len(self.imitable), size=count)]


def copy_frames(
    resident: Resident,
    positions: Int[Array, "m"],
    rows: Sequence[Int[Array, "n"]],
    images: Sequence[dict[str, UInt8[Array, "_ _ _ 3"]]],
    *,
    cameras: Sequence[str],
    allocate: Callable[[tuple[int, ...]], UInt8[Array, "_ _ _ 3"]],
) -> None:
    """Copy the images of samples `positions` into `images`: `images[k][camera][i]` is the image at `rows[k][i]`.

    All rows of a sample belong to one episode; each episode's frames are requested once. Missing arrays are allocated.
    """
    table = resident.table
    episodes = table.episode[rows[0][positions]]
    order = np.argsort(episodes, kind="stable")
    for group in np.split(positions[order], np.flatnonzero(np.diff(episodes[order])) + 1):
        episode = int(table.episode[rows[0][group[0]]])
        frames, first = resident.frames(episode), table.starts[episode]
        for camera in cameras:
            pixels = frames[camera]
            for image, at in zip(images, rows, strict=True):
                if camera not in image:
                    image[camera] = allocate((len(at), *pixels.shape[1:]))
                target = image[camera]
                _check_pixels(resident, episode, camera, pixels, size=target.shape[1:])
                for position, step in zip(group.tolist(), (at[group] - first).tolist(), strict=True):
                    target[position] = pixels[step]


def _check_pixels(resident: Resident, episode: int, camera: str, pixels: Array, *, size: tuple[int, ...]) -> None:
    """Raise unless there is one image per step, all of a camera's images of one size."""
    steps = int(resident.table.lengths[episode])
    if pixels.dtype != np.uint8 or pixels.shape != (steps, *size):
        raise DataError(
            f"episode {resident.indices[episode]} ({resident.table.tasks[episode]!r}): camera {camera} has pictures "
            f"{pixels.dtype}{list(pixels.shape)}, expected uint8{[steps, *size]} as in other episodes",
            hint="all datasets must be read at one picture size; rebuild the frame cache",
        )


class _Lease:
    """The owner of an array's memory. NumPy keeps it alive exactly as long as the array or any view of it."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = array.__array_interface__


class FrameMemory:
    """An allocator of image arrays that reuses memory once an array, its views and its device aliases are gone.

    Touching fresh pages costs more than copying into them, and a batch takes hundreds of megabytes.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Array]] = defaultdict(list)

    def take(self, shape: tuple[int, ...]) -> UInt8[Array, "_ _ _ 3"]:
        """An uninitialised array."""
        size = int(np.prod(shape))
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)
        lease = _Lease(memory.reshape(shape))
        weakref.finalize(lease, free.append, memory).atexit = False
        return np.asarray(lease)


def make_resident(
    source: EpisodeSource,
    indices: Int[Array, "E"],
    *,
    frames: Callable[[int], Frames],
    discount: float,
    weights: Float[Array, "E"] | None = None,
    balance: bool = False,
    imitated: Imitated = "all",
    takeovers: TakeoverRule = NO_MEANING,
) -> Resident:
    """Tabulate episodes and set their sampling weights: `weights`, or the number of steps (uniform over rows).

    `balance` makes successes and failures equally likely. This biases the critic's values towards an even chance of
    success, whatever the policy's rate is: useful to study rare outcomes, off by default.
    """
    episodes = [source.episode(int(index)) for index in indices]
    mass = np.array([len(episode) for episode in episodes], np.float64) if weights is None else weights
    if balance:
        mass = mass * _balancing([episode.success for episode in episodes], mass)
    if not mass.sum() > 0:
        raise DataError(f"all {len(indices)} episodes have weight 0", hint="give at least one source a positive weight")
    table = tabulate(episodes, discount=discount, imitated=imitated, takeovers=takeovers)
    return Resident(indices=indices, table=table, frames=frames, mass=np.cumsum(mass))


def _balancing(outcomes: list[bool | None], mass: Float[Array, "E"]) -> Float[Array, "E"]:
    """Factors that give successes and failures the same total mass; all 1 unless there are both."""
    factors = np.ones(len(mass))
    groups = [np.array([outcome is kind for outcome in outcomes]) for kind in (True, False)]
    totals = [mass[group].sum() for group in groups]
    if all(total > 0 for total in totals):
        for group, total in zip(groups, totals, strict=True):
            factors[group] = sum(totals) / (2 * total)
    return factors


class MemoryPool:
    """Rotating sets of resident episodes: the next pool is decoded in the background while the current one is used.

    Each pass shuffles the source and splits it into pools of nearly equal size, so every episode is resident once per
    pass. Two pools are in memory at a time. With `episodes_per_memory_pool` None all episodes stay resident and images
    are requested from the source for each batch: right for sources that hold or memory-map them.
    Every pool serves the same number of steps and sampling weights apply within a pool, so with few episodes per pool a
    source's share of all batches only approximates its weight. For one thread at a time; any thread may `close` it.
    """

    def __init__(
        self,
        source: EpisodeSource,
        *,
        discount: float,
        seed: int = 0,
        episodes_per_memory_pool: int | None = 64,
        steps_per_memory_pool: int = 500,
        balance: bool = False,
        takeovers: TakeoverRule = NO_MEANING,
    ) -> None:
        if len(source) == 0:
            raise DataError("the source has no episodes", hint="check the dataset's path and its episode filter")
        if steps_per_memory_pool < 1 or (episodes_per_memory_pool is not None and episodes_per_memory_pool < 1):
            raise ConfigError(
                f"a memory pool of {episodes_per_memory_pool} episodes for {steps_per_memory_pool} steps is empty",
                hint="both must be at least 1; episodes_per_memory_pool = None keeps everything resident",
            )
        self.source = source
        self.seed = seed
        self.epoch_seed = 0
        self._size = episodes_per_memory_pool
        self._steps = steps_per_memory_pool
        self._discount = discount
        self._balance = balance
        self._takeovers = takeovers
        self._pools: dict[int, Future[Resident]] = {}
        self._stop = threading.Event()
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="pirl-memory-pool")

    @property
    def pools_per_pass(self) -> int:
        """Number of pools that hold every episode once."""
        return 1 if self._size is None else -(-len(self.source) // self._size)

    def episodes(self, pool: int) -> Int[Array, "E"]:
        """Indices of the episodes in pool number `pool`, sorted."""
        if self.pools_per_pass == 1:
            return np.arange(len(self.source))
        shuffle, part = divmod(pool, self.pools_per_pass)
        order = _generator(self.seed, _POOLS, self.epoch_seed, shuffle).permutation(len(self.source))
        return np.sort(np.array_split(order, self.pools_per_pass)[part])

    def resident(self, step: int) -> Resident:
        """The pool that batch `step` is drawn from. Blocks until it is decoded and starts decoding the next one."""
        pool = 0 if self.pools_per_pass == 1 else step // self._steps
        wanted = [pool] if self.pools_per_pass == 1 else [pool, pool + 1]
        for number in [number for number in self._pools if number not in wanted]:
            self._pools.pop(number).cancel()
        for number in wanted:
            if number not in self._pools:
                self._pools[number] = self._decoder.submit(self._load, self.episodes(number), self._stop)
        return self._pools[pool].result()

    def refresh_memory_pool(self, epoch_seed: int) -> None:
        """Reshuffle episodes into pools from the next batch on; deterministic in `epoch_seed`."""
        self._stop.set()
        self._stop = threading.Event()
        self._pools.clear()
        self.epoch_seed = epoch_seed

    def close(self) -> None:
        """Stop decoding after the current episode, and wait for it."""
        self._stop.set()
        self._decoder.shutdown(wait=True, cancel_futures=True)

    def _load(self, indices: Int[Array, "E"], stop: threading.Event) -> Resident:
        weights = episode_weights(self.source)
        frames = self._decode(indices, stop) if self._size is not None else self.source.frames
        return make_resident(
            self.source,
            indices,
            frames=frames,
            discount=self._discount,
            weights=None if weights is None else weights[indices],
            balance=self._balance,
            takeovers=self._takeovers,
        )

    def _decode(self, indices: Int[Array, "E"], stop: threading.Event) -> Callable[[int], Frames]:
        decoded = []
        for index in indices:
            if stop.is_set():
                raise CancelledError("this memory pool is no longer wanted")
            decoded.append(dict(self.source.frames(int(index))))
        return decoded.__getitem__


def episode_weights(source: EpisodeSource) -> Float[Array, "E"] | None:
    """The source's validated `weights` (which account for episode lengths); None if it has none."""
    weights = source.weights
    if weights is None:
        return None
    weights = np.asarray(weights, np.float64)
    if weights.shape != (len(source),) or not np.all(np.isfinite(weights) & (weights >= 0)):
        raise DataError(
            f"weights of shape {weights.shape} for {len(source)} episodes, or one that is negative or not finite",
            hint="a source's `weights` has one number >= 0 per episode",
        )
    return weights


@dataclass(frozen=True, kw_only=True)
class DatasetStatistics:
    """Statistics of a source over all its episodes."""

    episodes: int
    """Number of episodes."""
    transitions: int
    """Number of steps."""
    shortest: int
    """Steps of the shortest episode."""
    longest: int
    """Steps of the longest episode."""
    successes: int
    """Episodes labelled successful."""
    failures: int
    """Episodes labelled failed."""
    terminated: int
    """Episodes with a terminated step."""
    truncated: int
    """Episodes whose last step is not terminated: the critic bootstraps there."""
    mean_return: float
    """Undiscounted sum of rewards, mean over episodes."""
    tasks: Mapping[str, int]
    """Number of episodes by instruction."""


def dataset_statistics(source: EpisodeSource) -> DatasetStatistics:
    """Compute statistics from every episode's low-dimensional data."""
    episodes = [source.episode(index) for index in range(len(source))]
    terminated = sum(bool(episode.terminated.any()) for episode in episodes)
    return DatasetStatistics(
        episodes=len(episodes),
        transitions=sum(map(len, episodes)),
        shortest=min(map(len, episodes), default=0),
        longest=max(map(len, episodes), default=0),
        successes=sum(episode.success is True for episode in episodes),
        failures=sum(episode.success is False for episode in episodes),
        terminated=terminated,
        truncated=sum(not bool(episode.terminated[-1]) for episode in episodes),
        mean_return=float(np.mean([episode.rewards.sum() for episode in episodes])) if episodes else float("nan"),
        tasks=dict(Counter(episode.task for episode in episodes)),
    )


def fingerprint(source: EpisodeSource) -> str:
    """A hash of the source's weights and low-dimensional data (not images), to check the data of a resumed run."""
    digest = hashlib.blake2b(digest_size=16)
    weights = episode_weights(source)
    digest.update(repr(source.cameras).encode() + (b"" if weights is None else weights.tobytes()))
    for index in range(len(source)):
        digest.update(low_dim_digest(source.episode(index)))
    return digest.hexdigest()


def low_dim_digest(episode: Episode) -> bytes:
    """A hash of one episode's task, outcome and columns with their dtypes and shapes."""
    digest = hashlib.blake2b(repr((episode.task, episode.success)).encode(), digest_size=16)
    columns = (episode.state, episode.actions, episode.rewards, episode.terminated, episode.truncated)
    for column in (*columns, episode.intended, episode.intervention, episode.observed):
        if column is not None:
            digest.update(f"{column.dtype.str}{column.shape}".encode())
            digest.update(np.ascontiguousarray(column).data.cast("B") if column.size else b"")
    return digest.digest()
