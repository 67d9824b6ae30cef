"""A cache of decoded frames: each video is decoded once instead of once per sample.

Stores uint8 frames at the model's size, one `.npy` per episode and camera, in a folder named by a hash of everything
they depend on, so a changed dataset or setting never reads stale images. Writes are atomic: builders may be killed, and
several may run at once. Every process verifies a file's checksum when it first opens it.
"""

import contextlib
import errno
import hashlib
import io
import math
import os
import random
import resource
import shutil
import threading
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil
from jaxtyping import UInt8
from rich.console import Console

from pirl import paths
from pirl.data import journal, lerobot, video, witness
from pirl.data.config import Tier
from pirl.data.lerobot import DatasetMeta
from pirl.data.schema import INFO_FILE
from pirl.errors import DataError, PirlWarning
from pirl.files import LEFTOVERS, replacing
from pirl.progress import Progress
from pirl.text import size

CODE_VERSION = 1  # raise it whenever the same key would mean other pixels
_SMALL = 2**30  # decoding this much takes seconds; not worth a file
_DAY = 24 * 3600
_CHECKSUM = 8  # bytes behind the frames; CRC-32, which reads memory as fast as it is copied
_MOST_MAPS = 32_768  # half of what Linux lets a process map by default


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Storage of decoded frames."""

    tier: Tier = "auto"
    """ram, disk, pool, or auto."""
    folder: str | None = None
    """Folder of the disk tier. None: $PIRL_HOME/frames."""
    workers: int = 0
    """Decoding threads. 0: one per core."""
    pool_bytes: int = 4 * 2**30
    """Bytes of recently decoded frames the pool tier keeps, beyond those its caller holds."""


def cache_key(
    meta: DatasetMeta, camera: str, size: int | None, method: video.Resize, *, letterbox: bool = False
) -> str:
    """A hash of everything that determines one camera's pixels: metadata, files, size, resize method, code version."""
    digest = hashlib.sha256(journal.opened(meta.root, meta.root / INFO_FILE, Path.read_bytes))
    digest.update(repr((CODE_VERSION, camera, size, method, letterbox)).encode())
    files: dict[Path, None] = {}
    for episode in meta.episodes:
        span = episode.cameras[camera]
        digest.update(repr((episode.index, episode.length, os.path.relpath(span.path, meta.root), span.first)).encode())
        files |= {episode.data.path: None, span.path: None}
    for path in files:
        stat = journal.opened(meta.root, path, os.stat)
        digest.update(repr((os.path.relpath(path, meta.root), stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()[:20]


def choose_tier(*, total: int, missing: int, memory: int, disk: int) -> tuple[Tier, str]:
    """The tier for `total` bytes of frames, `missing` of them not on disk yet, and the reason in words."""
    if missing == 0:
        return "disk", "they are on disk already"
    if total <= min(_SMALL, memory // 2):
        return "ram", "they are few"
    if missing <= 0.9 * disk:
        return "disk", f"they fit into the {size(disk)} free there, and the next run finds them"
    if total <= memory // 2:
        return "ram", f"the disk has {size(disk)} free, the memory {size(memory)}"
    return "pool", f"neither the disk ({size(disk)} free) nor the memory ({size(memory)}) holds them"


class RecentArrays:
    """An LRU cache of arrays, bounded by the sum of their costs. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[Hashable, tuple[np.ndarray, int]] = OrderedDict()
        self._cost = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> np.ndarray | None:
        """The array, marked as most recently used; None on a miss."""
        with self._lock:
            if (found := self._kept.get(key)) is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, array: np.ndarray, cost: int) -> None:
        """Add or replace an array and evict the least recently used ones beyond the limit."""
        with self._lock:
            self._cost += cost - self._kept.pop(key, (None, 0))[1]
            self._kept[key] = array, cost
            while self._cost > self.limit:
                self._cost -= self._kept.popitem(last=False)[1][1]


def map_limit() -> int:
    """How many maps may stay open. Each holds a file descriptor: their soft limit is raised as far as is useful and
    allowed, and half of them are left to the rest of the program.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = 2 * _MOST_MAPS if hard == resource.RLIM_INFINITY else min(hard, 2 * _MOST_MAPS)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return allowed // 2
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):  # some systems refuse values within the reported hard limit
        return soft // 2
    return allowed // 2


_MAPS = RecentArrays(limit=0)  # shared by all datasets, because the limit on open files is per process
_CHECKED: set[tuple[str, int, int]] = set()


class FrameCache:
    """Decoded frames of one dataset's cameras. Thread-safe and lazy: nothing is decoded before `build` or `frames`."""

    def __init__(
        self,
        meta: DatasetMeta,
        cameras: Sequence[str],
        *,
        size: int | None,
        method: video.Resize = "fast",
        letterbox: bool = False,
        config: CacheConfig | None = None,
    ) -> None:
        lerobot.check_files(meta, cameras)
        self.meta, self.size, self.method, self.letterbox = meta, size, method, letterbox
        self.config = config or CacheConfig()
        self.tier: Tier = self.config.tier
        """As configured; after `build` the chosen tier (`pool` if the disk was full)."""
        root = Path(self.config.folder) if self.config.folder else paths.pirl_home() / "frames"
        self.folders = {
            camera: root.expanduser() / meta.root.name / f"{camera}-{key}"
            for camera in cameras
            if (key := cache_key(meta, camera, size, method, letterbox=letterbox))
        }
        """Folder of each camera's files in the disk tier."""
        self._places = {camera: str(folder) for camera, folder in self.folders.items()}
        self._decoded = RecentArrays(self.config.pool_bytes)
        self._building, self._built = threading.Lock(), not self.folders

    @property
    def nbytes(self) -> int:
        """Decoded size of all frames."""
        return sum(self._bytes(key) for key in self._keys())

    def path(self, position: int, camera: str) -> Path:
        """The cache file of one camera of the episode at `position`."""
        return self.folders[camera] / f"episode_{self.meta.episodes[position].index:06d}.npy"

    def frame_size(self, camera: str) -> tuple[int, int]:
        """Height and width of a camera's frames."""
        return video.frame_size(self.meta, camera, self.size, letterbox=self.letterbox)

    def frames(self, position: int, camera: str) -> UInt8[np.ndarray, "T h w 3"]:
        """The frames of one camera of the episode at `position` (not its episode_index)."""
        if not self._built:
            self.build()
        key = (position, camera)
        if (array := self._decoded.get(key)) is None and (array := self._map(key)) is None:
            array = self._decode(key)
            self._decoded.put(key, array, array.nbytes)
        return array

    def build(self) -> None:
        """Choose the tier and, unless it is `pool`, decode missing frames. Idempotent."""
        with self._building:
            if self._built:
                return
            missing = [key for key in self._keys() if not self._is_complete(key)]
            to_write = sum(map(self._bytes, missing))
            disk, memory = free_bytes(next(iter(self.folders.values()))), psutil.virtual_memory().available
            if self.tier == "auto":
                self.tier, why = choose_tier(total=self.nbytes, missing=to_write, memory=memory, disk=disk)
                _say(f"frames of {self.meta.root.name}: {size(self.nbytes)}, tier {self.tier!r} because {why}")
            if self.tier == "ram":
                self._build_memory(missing, memory)
            elif self.tier == "disk" and to_write > disk:
                self._fall_back(f"{size(to_write)} to write, {size(disk)} free")
            elif self.tier == "disk":
                self._build_disk(missing, disk)
            if self.tier != "ram":
                _MAPS.limit = map_limit()
            self._built = True

    def _build_memory(self, missing: Sequence[tuple[int, str]], memory: int) -> None:
        if self.nbytes > memory:
            raise DataError(
                f"{self.meta.root}: the frames take {size(self.nbytes)}, the memory has {size(memory)}",
                hint="use cache tier disk, pool or auto, or a smaller image size",
            )

        def keep(key: tuple[int, str]) -> None:
            stored = self._stored(key) if self._is_complete(key) else None
            self._decoded.put(key, self._decode(key) if stored is None else stored.copy(), 0)  # cost 0: never evicted

        self._run(self._keys(), keep, "memory", doing="decoding" if missing else "loading")

    def _build_disk(self, missing: Sequence[tuple[int, str]], free: int) -> None:
        try:
            for folder in self.folders.values():
                folder.mkdir(parents=True, exist_ok=True)
                _remove_leftovers(folder)
            if missing:
                # A random starting point per builder, so that concurrent builders share most of the work.
                begin = random.randrange(len(missing))
                where = f"{next(iter(self.folders.values())).parent} ({size(free)} free)"
                self._run([*missing[begin:], *missing[:begin]], self._decode_to_disk, where)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"the frame cache cannot be written ({error})",
                    hint="set PIRL_HOME (or the cache folder) to a folder you may write to, or use cache tier pool",
                ) from error
            self._fall_back(str(error))

    def _fall_back(self, why: str) -> None:
        folder = next(iter(self.folders.values())).parent
        self.tier = "pool"
        warnings.warn(
            f"the disk is too full for the frame cache in {folder} ({why}): frames are decoded when needed, which is "
            "slower. Free some space or set PIRL_HOME to a larger disk, and the next run continues here",
            PirlWarning,
            stacklevel=2,
        )

    def _decode_to_disk(self, key: tuple[int, str]) -> None:
        if not self._is_complete(key):  # another builder may have written it meanwhile
            write_array(self.path(*key), self._decode(key))

    def _run(
        self,
        keys: Sequence[tuple[int, str]],
        work: Callable[[tuple[int, str]], None],
        where: str,
        *,
        doing: str = "decoding",
    ) -> None:
        frames = sum(self._shape(key)[0] for key in keys)
        total = size(sum(map(self._bytes, keys)))
        _say(f"frames of {self.meta.root.name}: {doing} {frames} frames, {total}, into {where}")
        pool = ThreadPoolExecutor(self.config.workers or os.cpu_count() or 1, thread_name_prefix="decode")
        try:
            submitted = {pool.submit(work, key): self._shape(key)[0] for key in keys}
            with Progress(doing, frames, unit="frames") as progress:
                for future in as_completed(submitted):
                    future.result()
                    progress.advance(submitted[future])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _keys(self) -> list[tuple[int, str]]:
        return [(position, camera) for camera in self.folders for position in range(len(self.meta.episodes))]

    def _shape(self, key: tuple[int, str]) -> tuple[int, ...]:
        position, camera = key
        return (self.meta.episodes[position].length, *self.frame_size(camera), 3)

    def _bytes(self, key: tuple[int, str]) -> int:
        return math.prod(self._shape(key))

    def _is_complete(self, key: tuple[int, str]) -> bool:
        try:
            return self.path(*key).stat().st_size == len(_header(self._shape(key))) + self._bytes(key) + _CHECKSUM
        except OSError:
            return False

    def _map(self, key: tuple[int, str]) -> np.ndarray | None:
        """The memory-mapped frames; None if they are not on disk."""
        position, camera = key
        place = (self._places[camera], position)
        array = _MAPS.get(place)
        if array is None and self._is_complete(key):
            array = self._stored(key)
            _MAPS.put(place, array, 1)
        return array

    def _stored(self, key: tuple[int, str]) -> UInt8[np.ndarray, "T h w 3"]:
        """The frames in a file. Verifies the checksum on this process's first open; decodes again if damaged."""
        path, shape = self.path(*key), self._shape(key)
        # A plain view of the map: indexing a memmap itself is slow.
        content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        stat = path.stat()
        version = (str(path), stat.st_ino, stat.st_mtime_ns)
        if version not in _CHECKED:
            if zlib.crc32(content[:-_CHECKSUM].data) != int.from_bytes(content[-_CHECKSUM:].tobytes(), "little"):
                return self._decode_again(key)
            _CHECKED.add(version)
        return content[len(_header(shape)) : -_CHECKSUM].reshape(shape)

    def _decode_again(self, key: tuple[int, str]) -> UInt8[np.ndarray, "T h w 3"]:
        path, array = self.path(*key), self._decode(key)
        try:
            write_array(path, array)
            done = "it is replaced"
        except OSError as error:
            done = f"it could not be replaced ({error})"
        warnings.warn(
            f"{path} in the frame cache is damaged: decoded again, {done}. Check the disk if this happens often",
            PirlWarning,
            stacklevel=2,
        )
        return array

    def _decode(self, key: tuple[int, str]) -> np.ndarray:
        position, camera = key
        episode = self.meta.episodes[position]
        frames = video.read_frames(
            self.meta, episode, camera, size=self.size, method=self.method, letterbox=self.letterbox
        )
        content = video.frame_size(self.meta, camera, self.size)
        witness.check_pictures(
            episode, camera, frames, self._recorded, content=math.prod(content) / math.prod(frames.shape[1:3])
        )
        return frames

    @cached_property
    def _recorded(self) -> witness.Recorded:
        return witness.recorded(self.meta, self.meta.cameras)


def write_array(path: Path, array: UInt8[np.ndarray, "..."]) -> None:
    """Write an `.npy` file atomically, also against power cuts, with a checksum appended."""
    header, pixels = _header(array.shape), np.ascontiguousarray(array)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(header)
        file.write(pixels.data)
        file.write(zlib.crc32(pixels.data, zlib.crc32(header)).to_bytes(_CHECKSUM, "little"))


def _header(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _remove_leftovers(folder: Path) -> None:
    """Delete temporary files of killed builders: those older than a day, since one episode takes far less."""
    for leftover in folder.glob(LEFTOVERS):
        with contextlib.suppress(FileNotFoundError):  # another builder has finished it meanwhile
            if time.time() - leftover.stat().st_mtime > _DAY:
                leftover.unlink()


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder that may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
