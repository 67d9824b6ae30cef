"""The share of a training step spent waiting for data: files on disk, memory pool, loader and a full-size update.

    PYTHONPATH=src python benchmarks/stall.py --augment              BC, pictures in the frame cache's files
    PYTHONPATH=src python benchmarks/stall.py --row awr --decode     ACRLPD, the pool decodes PNGs while training
    PYTHONPATH=src python benchmarks/stall.py --gap 750              a pause instead of the update: needs no GPU

First writes a dataset of noisy images and drops it from the page cache, as if it did not fit into memory. A pool's
episodes serve as many batches as by default (500 for 64), but pools are small, so that several are swapped in while
measuring. Batches hold the images of s and s', also for BC, which does not need s'.

Two numbers measure the cost of data. `stall_fraction` is training's metric: the host's waiting time for batches, during
which the device may still be busy with the previous step. `lost` is the extra time of a step compared with a batch that
is already on the device. Needs what `gpu.py` needs, and the data layer's packages except PyAV: no video is read.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import gpu
import jax
import numpy as np
import pyarrow.parquet as pq

if find_spec("av") is None:  # the data layer imports it for videos, and there are none
    for part in ("av", "av.container", "av.video", "av.video.reformatter", "av.video.stream"):
        sys.modules[part] = MagicMock(__version__="0")

from pirl import names, text
from pirl.data.cache import CacheConfig, write_array
from pirl.data.columns import STANDARD_FEATURES, V21, make_table, parse_features
from pirl.data.config import DataConfig
from pirl.data.create import create_transform
from pirl.data.dataset import LeRobotSource
from pirl.data.episode_files import DATA_PATH
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.robots import Robot, make_robot
from pirl.data.schema import INFO_FILE
from pirl.data.stats import compute_norm_stats
from pirl.models.config import Pi0Config, get_preset
from pirl.parallel.sharding import data_sharding, make_mesh, state_shardings
from pirl.training.step import Step as TrainingStep

FPS, TASK, DISCOUNT = 50, "move the red cube", 0.99
HELD = 10
"""Updates on a batch that is already on the device."""
LONGEST = 30.0
"""Most seconds for measuring the loader alone."""

Step = Callable[[Any], Any]
"""Trains on a batch; returns arrays to wait for."""


def pictures(episode: int, camera: int, steps: int, size: int) -> np.ndarray:
    """Images of moving colour blocks with camera noise."""
    rng = np.random.default_rng([episode, camera])
    blocks = rng.integers(0, 224, ((size + steps) // 8 + 1, size // 8 + 1, 3), np.uint8)
    texture = blocks.repeat(8, 0).repeat(8, 1)[: size + steps, :size]
    views = np.lib.stride_tricks.sliding_window_view(texture, size, axis=0)[:steps]
    noise = rng.integers(0, 32, (steps, size, size, 3), np.uint8)
    return np.add(noise, views.transpose(0, 3, 1, 2), out=noise)


def png(picture: np.ndarray) -> bytes:
    """Encode a PNG by hand, because zlib releases the GIL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    height, width, _ = picture.shape
    differences = np.diff(picture.reshape(height, -1), axis=0, prepend=np.uint8(0))  # to the row above: PNG's filter 2
    data = zlib.compress(np.pad(differences, ((0, 0), (1, 0)), constant_values=2).tobytes(), 1)
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def write_dataset(root: Path, keys: Sequence[str], dims: int, args: argparse.Namespace) -> None:
    """Write a LeRobot dataset with these cameras. Its files hold images only with --decode."""
    columns = (names.LEROBOT_STATE, names.LEROBOT_ACTION)
    features: dict[str, Any] = {key: {"dtype": "image", "shape": [args.size, args.size, 3]} for key in keys}
    features |= {key: {"dtype": "float32", "shape": [dims]} for key in columns}
    features |= {names.NEXT_SUCCESS: {"dtype": "bool", "shape": [1]}, **STANDARD_FEATURES}
    stored = parse_features({key: value for key, value in features.items() if args.decode or key not in keys})

    def write(episode: int) -> None:
        rng, steps = np.random.default_rng([episode, len(keys)]), np.arange(args.steps)
        state = np.cumsum(rng.normal(0, 0.02, (args.steps, dims)), axis=0)
        values: dict[str, Any] = dict(zip(columns, (state, state + rng.normal(0, 0.01, state.shape)), strict=True))
        values[names.NEXT_SUCCESS] = (steps == args.steps - 1) & (episode % 2 == 0)
        values |= {"timestamp": steps / FPS, "frame_index": steps, "index": steps + episode * args.steps}
        values |= {"episode_index": np.full_like(steps, episode), "task_index": np.zeros_like(steps)}
        for camera, key in enumerate(keys if args.decode else ()):
            values[key] = [png(picture) for picture in pictures(episode, camera, args.steps, args.size)]
        file = root / DATA_PATH[V21].format(episode_chunk=0, episode_index=episode)
        pq.write_table(make_table(stored, values, version=V21), file, compression="none")

    (root / "data/chunk-000").mkdir(parents=True, exist_ok=True)
    (root / "meta").mkdir(exist_ok=True)
    for_all(write, range(args.episodes))
    episodes = [{"episode_index": n, "tasks": [TASK], "length": args.steps} for n in range(args.episodes)]
    info = {"codebase_version": V21, "fps": FPS, "features": features, "data_path": DATA_PATH[V21]}
    (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, episodes)))
    (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": TASK}))
    (root / INFO_FILE).write_text(json.dumps(info | {"chunks_size": args.episodes}))  # last: marks completion


def open_dataset(folder: Path, config: Pi0Config, args: argparse.Namespace) -> tuple[LeRobotSource, Robot]:
    """The dataset in the pool tier; written if missing, and dropped from the page cache."""
    dims = gpu.real_dim(config)
    cameras = {slot: f"{names.LEROBOT_IMAGES}.{slot}" for slot in config.cameras[: args.cameras]}
    robot = make_robot(name="arm", state_dim=dims, action_dim=dims, cameras=cameras)
    root = folder / f"{args.episodes}x{args.steps}x{len(cameras)}x{args.size}-{dims}{'-png' if args.decode else ''}"
    if not (root / INFO_FILE).exists():
        write_dataset(root, list(cameras.values()), dims, args)
    # Keep no episode for the next pass, as in a dataset much larger than memory.
    cache = CacheConfig(tier="pool", folder=str(folder / "frames"), pool_bytes=0)
    source = LeRobotSource(root, cameras=cameras, image_size=config.image_size, cache=cache)

    def decoded(place: tuple[int, tuple[int, str]]) -> None:
        episode, (camera, key) = place
        path = source.cache.path(episode, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_array(path, pictures(episode, camera, args.steps, config.image_size))

    if not args.decode:
        for_all(decoded, product(range(len(source)), enumerate(cameras.values())))
    os.sync()
    for path in (*folder.rglob("*.npy"), *folder.rglob("*.parquet")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return source, robot


def for_all(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Map over items with one thread per core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(work, items))


def make_loader(source: LeRobotSource, robot: Robot, config: Pi0Config, args: argparse.Namespace) -> ACRLPDDataLoader:
    """The loader, as training makes it for ACRLPD."""
    data = DataConfig(
        tokenizer="word",
        cache="pool",
        critic_horizon=gpu.critic_horizon(config),
        episodes_per_memory_pool=args.pool,
        steps_per_memory_pool=args.repeats,
    )
    transform = create_transform(
        data,
        horizon=config.horizon,
        robot=robot,
        norm_stats=compute_norm_stats(source, robot, config.horizon),
        action_dim=config.action_dim,
        token_len=config.token_len,
        quantile=config.pi05,
        discrete_state=config.discrete_state,
        image_size=config.image_size,
    )
    sizes: dict[str, Any] = {"batch_size": args.batch, "horizon": config.horizon, "discount": DISCOUNT}
    return ACRLPDDataLoader(source, transform, config=data, sharding=data_sharding(make_mesh()), **sizes)


def make_step(config: Pi0Config, row: gpu.Row, args: argparse.Namespace) -> Step:
    """The update, compiled in its first call as in training; with --gap a pause."""
    if args.gap is not None:
        return lambda _: time.sleep(args.gap / 1e3)
    agent, mesh, key = gpu.make_agent(config, row, augment=args.augment), make_mesh(), jax.random.key(0)
    shapes = jax.eval_shape(agent.init, key)
    update, init = TrainingStep(agent, mesh, shapes), jax.jit(agent.init, out_shardings=state_shardings(mesh, shapes))
    held, numbers = [update.shared(init(key))], count()

    def step(batch: Any) -> Any:
        state, metrics = update(held.pop(), batch, jax.random.fold_in(key, next(numbers)))
        held.append(state)
        return metrics

    return step


def repeat(sample: Callable[[], Any], step: Step, updates: int, ahead: int) -> tuple[list[float], list[float], Any]:
    """(waiting seconds per batch, seconds per step, the last result). At most `ahead` steps are in flight when the next
    batch is requested, none at the end.
    """
    waits, ends, running, result = [], [time.perf_counter()], deque[Any](), None
    for number in range(updates):
        asked = time.perf_counter()
        batch = sample()
        waits.append(time.perf_counter() - asked)
        running.append(step(batch))
        del batch  # freeing its memory must not count as waiting
        while len(running) > (ahead if number < updates - 1 else 0):
            result = jax.block_until_ready(running.popleft())
        ends.append(time.perf_counter())
    return waits, np.diff(ends).tolist(), result


def measure(loader: ACRLPDDataLoader, step: Step, args: argparse.Namespace) -> dict[str, Any]:
    """Measure loader and update together, then the loader alone, then the update alone."""
    began, batch = time.perf_counter(), loader.sample_batch()
    jax.block_until_ready(step(batch))
    found: dict[str, Any] = {"first_step_s": time.perf_counter() - began, "updates": args.updates}
    pool, disk, cpu = (loader.step - 1) // args.repeats, disk_bytes(), time.process_time()
    loader.reset_stall()  # the first step compiles: not a data stall
    waits, times, metrics = repeat(loader.sample_batch, step, args.updates, args.ahead)
    found |= {
        "stall_fraction": loader.stall_fraction,
        "step_ms": {"median": 1e3 * np.median(times), "mean": 1e3 * np.mean(times)},
        "wait_ms": {"mean": 1e3 * np.mean(waits), "p99": 1e3 * np.quantile(waits, 0.99), "max": 1e3 * max(waits)},
        "refreshes": (loader.step - 1) // args.repeats - pool,
        "batch_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) / 1e6,
        "disk_mb": (disk_bytes() - disk) / args.updates / 1e6,
        "cpu_s": (time.process_time() - cpu) / args.updates,
        "metrics": {name: float(value) for name, value in (metrics or {}).items()},
    }
    began, cpu, drawn = time.perf_counter(), time.process_time(), 0
    while drawn < args.updates and time.perf_counter() - began < LONGEST:
        jax.block_until_ready(loader.sample_batch())
        drawn += 1
    found |= {"loader_rate": drawn / (time.perf_counter() - began), "loader_cpu_s": (time.process_time() - cpu) / drawn}
    loader.close()
    alone = 1e3 * np.mean(repeat(lambda: batch, step, HELD, args.ahead)[1])
    return found | {"alone_ms": alone, "lost": 1 - alone / found["step_ms"]["mean"]}


def disk_bytes() -> int:
    """Bytes that this process has read from disk, including memory maps."""
    return 512 * resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def table(found: dict[str, Any]) -> Iterator[str]:
    """The results as Markdown."""

    def several(numbers: dict[str, float]) -> str:
        return ", ".join(f"{name} {number:.2f}" for name, number in numbers.items())

    yield f"| {found['updates']} updates | first one {found['first_step_s']:.1f} s |\n|---|---|"
    yield f"| step, ms | {several(found['step_ms'])} |"
    yield f"| step on a batch that is on the device, ms | {found['alone_ms']:.2f} |"
    yield f"| lost to the data | {found['lost']:.2%} |"
    yield f"| `stall_fraction` | {found['stall_fraction']:.2%} |"
    yield f"| host's wait for a batch, ms | {several(found['wait_ms'])} |"
    yield f"| pools that took over | {found['refreshes']} |"
    yield f"| MB a batch, read from disk for it | {found['batch_mb']:.1f}, {found['disk_mb']:.1f} |"
    yield f"| CPU-seconds of the process a step | {found['cpu_s']:.3f} |"
    yield f"| loader alone, batches/s, CPU-seconds a batch | {found['loader_rate']:.1f}, {found['loader_cpu_s']:.3f} |"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    rows = [row.name for row in gpu.ROWS if row.what in ("bc", "awr", "distill")]
    parser.add_argument("--row", default="bc", choices=rows, help="which update, as in gpu.py")
    parser.add_argument("--preset", default="pi0", help="model preset (pi0, pi0_small, pi0_tiny, ...)")
    parser.add_argument("--remat", default="names", choices=("none", "names", "dots", "full"))
    parser.add_argument("--attention", default="auto", choices=("auto", "plain", "xla", "cudnn"))
    parser.add_argument("--augment", action="store_true", help="augment pictures (needs augmax)")
    parser.add_argument("--gap", type=float, metavar="MS", help="pause so long instead of the update")
    parser.add_argument("--batch", type=int, help="samples in a batch; the row's if not given")
    parser.add_argument("--updates", type=int, default=60, help="how many are measured")
    parser.add_argument(
        "--ahead", type=int, default=1, help="updates under way when a batch is asked for; training: 100"
    )
    parser.add_argument("--episodes", type=int, default=60, help="of the dataset")
    parser.add_argument("--steps", type=int, default=400, help="of an episode")
    parser.add_argument("--cameras", type=int, default=3)
    parser.add_argument("--size", type=int, help="side of the dataset's pictures; the model's if not given")
    parser.add_argument("--pool", type=int, default=2, help="episodes in a memory pool")
    parser.add_argument("--repeats", type=int, default=15, help="batches drawn from a pool")
    parser.add_argument(
        "--decode", action="store_true", help="the pool decodes PNGs, and does not map the cache's files"
    )
    parser.add_argument("--dir", type=Path, help="keep the dataset here, and use it again the next time")
    parser.add_argument("--cache", type=Path, help="keep compiled programs in this folder, for a second run")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args(words)
    if args.pool >= args.episodes:
        parser.error(f"a pool of {args.pool} episodes holds all {args.episodes}, so that none ever takes over")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Make the dataset, measure, print."""
    args = arguments(words)
    base, row = get_preset(args.preset), next(row for row in gpu.ROWS if row.name == args.row)
    pi05, remat = row.pi05 or base.pi05, row.remat or args.remat
    config = replace(base, pi05=pi05, remat=remat, attention=args.attention)
    args.batch, args.size = args.batch or row.size, args.size or config.image_size
    args.cameras = min(args.cameras, row.cameras, len(config.cameras))
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache))
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        source, robot = open_dataset(args.dir or Path(scratch), config, args)
        size, seconds = text.size(source.cache.nbytes), time.perf_counter() - began
        print(f"{len(source)} episodes, {size} decoded, ready after {seconds:.0f} s", flush=True)
        with make_loader(source, robot, config, args) as loader:
            found = measure(loader, make_step(config, row, args), args)
    step = args.preset if args.gap is None else f"a pause of {args.gap:g} ms"
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {os.cpu_count()} cores"
    print(f"{device}: {step}, {replace(row, size=args.batch, cameras=args.cameras)}\n\n" + "\n".join(table(found)))
    if args.json:
        told = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"device": device, "arguments": told, **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
