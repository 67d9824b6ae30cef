"""Speed of the data layer: cost of a sample, compared with decoding it and with copying its bytes.

    python benchmarks/data.py --quick            under a minute
    python benchmarks/data.py --dir /data/bench --json data.json

A dataset of three noisy AV1 cameras is written with pirl's writer, then read in several ways. A sample is one row of a
Q-chunking batch: images of three cameras at the start of a chunk of 20 steps and where its target bootstraps, with
states, actions and outcomes. Costs are CPU time of all threads, which does not depend on the number of cores or other
processes; compare them with the yardsticks of the same run.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from pirl.data import lerobot
from pirl.data.config import DataConfig, Tier
from pirl.data.create import create_acrlpd_data_loader, create_source, create_transform
from pirl.data.dataset import LeRobotSource
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.normalize import save_norm_stats
from pirl.data.pool import FrameMemory, copy_frames, make_resident, row_generator
from pirl.data.replay import MemorySource
from pirl.data.robots import get_robot
from pirl.data.schema import INFO_FILE
from pirl.data.stats import compute_norm_stats
from pirl.data.writer import LeRobotWriter
from pirl.records import Episode

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
ROBOT, DIMS, FPS, HORIZON, DISCOUNT = "aloha", 14, 50, 20, 0.99


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurement."""

    episodes: int = 12
    """Episodes in the dataset."""
    frames: int = 300
    """Frames per episode."""
    height: int = 480
    """Height of the recorded images."""
    width: int = 640
    """Width of the recorded images."""
    batch_size: int = 32
    """Samples per batch."""
    batches: int = 200
    """Batches per measurement."""
    random_reads: int = 40
    """Samples read by seeking in the videos."""
    consumer_ms: float = 50.0
    """Duration of the simulated training step."""
    stats_episodes: int = 100
    """Episodes for the normalisation statistics."""
    stats_steps: int = 500
    """Steps in each of them."""


QUICK = Sizes(episodes=4, frames=150, batches=60, random_reads=10)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    what: str
    """What was measured."""
    value: float
    """The number."""
    unit: str
    """Its unit."""
    target: float | None = None
    """Upper limit, if any."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.value <= self.target


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small dataset: under a minute")
    parser.add_argument("--dir", type=Path, help="keep the dataset here, and use it again the next time")
    parser.add_argument("--json", type=Path, help="write the numbers to this file as well")
    args = parser.parse_args(argv)
    sizes = QUICK if args.quick else Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(sizes, dataset_dir=args.dir or Path(scratch), scratch=Path(scratch))
    machine = {"python": sys.version.split()[0], "numpy": np.__version__, "av": av.__version__, "cores": os.cpu_count()}
    print(table(results))
    print(f"\n{', '.join(f'{name} {value}' for name, value in machine.items())}; {describe(sizes)}")
    if args.json:
        numbers = [asdict(result) | {"met": result.met} for result in results]
        args.json.write_text(json.dumps({"machine": machine, "sizes": asdict(sizes), "results": numbers}, indent=2))
    return 0


def measure(sizes: Sizes, *, dataset_dir: Path, scratch: Path) -> list[Result]:
    """All numbers, in the order of the table."""
    root = dataset_dir / describe(sizes).replace(" ", "_")
    results = write_dataset(root, sizes)
    meta = lerobot.read_meta(root)
    decode = random_reads(meta, sizes)
    results.append(decode)

    def config(tier: Tier, **options: Any) -> DataConfig:
        return DataConfig(
            repo_ids=(str(root),),
            robot=ROBOT,
            tokenizer="byte",
            assets_dir=str(scratch / "assets"),
            cache=tier,
            cache_dir=str(scratch / "frames"),
            outcome="sparse_success",
            **options,
        )

    numbers = create_source(config("ram", cameras=()), get_robot(ROBOT))
    save_norm_stats(scratch / "assets" / root.name, compute_norm_stats(numbers, get_robot(ROBOT), HORIZON))
    results += cold(config("disk"))
    for tier in ("ram", "disk"):
        with loader(config(tier), sizes) as batches:
            warm = warm_samples(batches, sizes, f"warm sample, tier {tier}", target=0.25)
        results += [
            warm,
            Result(what=f"  against random access, tier {tier}", value=decode.value / warm.value, unit="x"),
        ]
    results += gather(config("ram"), sizes)
    with loader(config("ram", cameras=()), sizes) as batches:
        results.append(warm_samples(batches, sizes, "warm sample, numbers only"))
    with loader(config("ram"), sizes) as batches:
        results.append(stall(batches, sizes))
    results.append(norm_stats(sizes))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "linux" else 1e9)
    results.append(Result(what="peak resident memory", value=peak, unit="GB"))
    return results


def describe(sizes: Sizes) -> str:
    """The dataset's sizes as text."""
    return f"{sizes.episodes} episodes of {sizes.frames} frames {sizes.height}x{sizes.width}"


def write_dataset(root: Path, sizes: Sizes) -> list[Result]:
    """Write a dataset of three cameras unless it exists; its bit rate shows how hard it is to decode."""
    results = []
    if not (root / INFO_FILE).exists():
        shape = [sizes.height, sizes.width, 3]
        features = {f"observation.images.{camera}": {"dtype": "video", "shape": shape} for camera in CAMERAS}
        features |= {key: {"dtype": "float32", "shape": [DIMS]} for key in ("observation.state", "action")}
        rng = np.random.default_rng(0)
        texture = noisy_texture(rng, sizes.height + 2 * sizes.frames, sizes.width + 2 * sizes.frames)
        began = cpu_seconds()
        with LeRobotWriter(root, fps=FPS, features=features, robot_type=ROBOT) as writer:
            for _ in range(sizes.episodes):
                state = random_walk(rng, sizes.frames)
                for t in range(sizes.frames):
                    views = {
                        f"observation.images.{camera}": noisy_view(rng, texture, (1 + n) * t, sizes)
                        for n, camera in enumerate(CAMERAS)
                    }
                    writer.add_frame({"observation.state": state[t], "action": state[t] + 0.01, **views})
                writer.save_episode(task="transfer the red cube")
        frames = sizes.episodes * sizes.frames * len(CAMERAS)
        results.append(Result(what="writing, per frame", value=1e3 * (cpu_seconds() - began) / frames, unit="CPU-ms"))
    files = list((root / "videos").rglob("*.mp4"))
    stored = sum(file.stat().st_size for file in files) / (sizes.episodes * sizes.frames * len(CAMERAS))
    return [*results, Result(what="video, per frame", value=stored / 1e3, unit="kB")]


def noisy_texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Blobs of several sizes, so that the encoder's motion search has features."""
    layers = [rng.integers(0, 256, (height // n + 1, width // n + 1, 3), np.uint8) for n in (64, 16, 4)]
    images = [np.asarray(Image.fromarray(layer).resize((width, height), Image.Resampling.BICUBIC)) for layer in layers]
    return np.mean(images, axis=0).astype(np.uint8)


def noisy_view(rng: np.random.Generator, texture: np.ndarray, offset: int, sizes: Sizes) -> np.ndarray:
    """A window moving over the texture, with camera noise."""
    y, x = offset % (texture.shape[0] - sizes.height), offset // 2 % (texture.shape[1] - sizes.width)
    view = texture[y : y + sizes.height, x : x + sizes.width]
    noise = np.frombuffer(rng.bytes(view.size), np.uint8).reshape(view.shape) >> 4
    return np.minimum(view, 239) + noise


def random_walk(rng: np.random.Generator, steps: int) -> np.ndarray:
    """Plausible robot states; the grippers stay within [0, 1]."""
    walk = np.cumsum(rng.normal(size=(steps, DIMS)) * 0.02, axis=0)
    walk[:, [6, 13]] = np.clip(np.abs(walk[:, [6, 13]]), 0, 1)
    return walk.astype(np.float32)


def random_reads(meta: lerobot.DatasetMeta, sizes: Sizes) -> Result:
    """The yardstick: seek, decode and resize a sample's six images, from open files."""
    rng = np.random.default_rng(1)
    cameras = [f"observation.images.{camera}" for camera in CAMERAS]
    opened = {path: av.open(str(path)) for path in {e.cameras[c].path for e in meta.episodes for c in cameras}}
    for container in opened.values():
        container.streams.video[0].codec_context.thread_count = 1

    def read(path: Path, number: int) -> np.ndarray:
        container, stream = opened[path], opened[path].streams.video[0]
        ticks = round(1 / (meta.fps * (stream.time_base or 1)))
        container.seek(number * ticks, stream=stream, backward=True)
        frame = next(frame for frame in container.decode(stream) if (frame.pts or 0) >= number * ticks)
        picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
        scale = 224 / max(picture.size)
        return np.asarray(picture.resize([int(side * scale) for side in picture.size], Image.Resampling.BILINEAR))

    def sample() -> None:
        episode = meta.episodes[rng.integers(len(meta.episodes))]
        t = int(rng.integers(max(episode.length - HORIZON, 1)))
        for camera in cameras:
            span = episode.cameras[camera]
            for step in (t, min(t + HORIZON, episode.length - 1)):
                read(span.path, span.first + step)

    cost = cpu_ms(sample, sizes.random_reads)
    for container in opened.values():
        container.close()
    return Result(what="random-access PyAV, per sample", value=cost, unit="CPU-ms")


def cold(config: DataConfig) -> list[Result]:
    """The first pass, which decodes and stores every frame once, in order."""
    source = create_source(config, get_robot(ROBOT))
    assert isinstance(source, LeRobotSource)
    began = cpu_seconds()
    source.prepare()
    spent = 1e3 * (cpu_seconds() - began) / int(source.lengths.sum())
    return [
        Result(what="first pass, per time step", value=spent, unit="CPU-ms", target=20.0),
        Result(what="first pass, per frame", value=spent / len(CAMERAS), unit="CPU-ms"),
    ]


def loader(config: DataConfig, sizes: Sizes) -> ACRLPDDataLoader:
    """The loader, as training makes it."""
    transform = create_transform(config, horizon=HORIZON)
    return create_acrlpd_data_loader(
        config, transform=transform, horizon=HORIZON, discount=DISCOUNT, batch_size=sizes.batch_size
    )


def warm_samples(batches: ACRLPDDataLoader, sizes: Sizes, what: str, target: float | None = None) -> Result:
    """Cost of a sample once everything is decoded."""
    for _ in range(5):
        batches.sample_batch()
    cost = cpu_ms(batches.sample_batch, sizes.batches) / sizes.batch_size
    return Result(what=what, value=cost, unit="CPU-ms", target=target)


def gather(config: DataConfig, sizes: Sizes) -> list[Result]:
    """Gathering a batch's images, compared with one memcpy of as many bytes."""
    source = create_source(config, get_robot(ROBOT))
    resident = make_resident(source, np.arange(len(source)), frames=source.frames, discount=DISCOUNT)
    memory, steps = FrameMemory(), iter(range(10**9))

    def gather_once() -> list[dict[str, np.ndarray]]:
        rows = resident.draw(row_generator(0, next(steps)), sizes.batch_size)
        later = np.minimum(rows + HORIZON, resident.table.end[rows] - 1)
        images: list[dict[str, np.ndarray]] = [{}, {}]
        positions = np.arange(sizes.batch_size)
        copy_frames(resident, positions, [rows, later], images, cameras=source.cameras, allocate=memory.take)
        return images

    pictures = [picture for image in gather_once() for picture in image.values()]
    count = sum(picture.nbytes for picture in pictures)
    blocks = [np.concatenate([p.ravel() for p in pictures]) for _ in range(4)]
    target = np.empty(count, np.uint8)
    np.copyto(target, blocks[0])  # touch every page
    copying = cpu_ms(lambda: np.copyto(target, blocks[next(steps) % len(blocks)]), sizes.batches)
    gathering = cpu_ms(gather_once, sizes.batches)
    return [
        Result(what="memcpy, per CPU-second", value=count / copying / 1e6, unit="GB"),
        Result(what="gather against memcpy", value=gathering / copying, unit="x", target=2.0),
    ]


def stall(batches: ACRLPDDataLoader, sizes: Sizes) -> Result:
    """Share of the time that a training step waits for data."""
    batches.sample_batch()
    batches.reset_stall()
    for _ in range(min(sizes.batches, 60)):
        time.sleep(sizes.consumer_ms / 1e3)
        batches.sample_batch()
    what = f"waiting for batches of {sizes.batch_size}, step of {sizes.consumer_ms:.0f} ms"
    return Result(what=what, value=100 * batches.stall_fraction, unit="%")


def norm_stats(sizes: Sizes) -> Result:
    """Cost of normalisation statistics over chunks of 50 actions."""
    rng = np.random.default_rng(2)
    source = MemorySource(
        cameras=(), items=[(episode(rng, sizes.stats_steps), {}) for _ in range(sizes.stats_episodes)]
    )
    began = cpu_seconds()
    compute_norm_stats(source, get_robot(ROBOT), 50)
    what = f"normalisation statistics of {sizes.stats_episodes} x {sizes.stats_steps} steps"
    return Result(what=what, value=cpu_seconds() - began, unit="CPU-s")


def episode(rng: np.random.Generator, steps: int) -> Episode:
    """An episode without images."""
    state, never = random_walk(rng, steps), np.zeros(steps, bool)
    rewards = np.zeros(steps, np.float32)
    return Episode(task="walk", state=state, actions=state, rewards=rewards, terminated=never, truncated=never)


def cpu_seconds() -> float:
    """CPU time of all threads of this process."""
    return time.process_time()


def cpu_ms(work: Callable[[], Any], count: int) -> float:
    """CPU milliseconds of one call, mean of `count`."""
    began = cpu_seconds()
    for _ in range(count):
        work()
    return 1e3 * (cpu_seconds() - began) / count


def table(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    verdicts: Mapping[bool | None, str] = {None: "", True: "met", False: "missed"}
    rows = [
        (r.what, f"{r.value:.3g} {r.unit}", "" if r.target is None else f"≤ {r.target:g} {r.unit}", verdicts[r.met])
        for r in results
    ]
    rows.insert(0, ("what", "measured", "target", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
