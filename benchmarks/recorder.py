"""Effect of a recorder on a robot's control loop: the same loop with and without it, camera images as video.

    python benchmarks/recorder.py --seconds 20 --fps 50 --cameras 3

Prints how late steps begin, and how long `Recorder.step` takes. The loop sleeps between steps, like a robot's.
"""

import argparse
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from pirl.robot.recorder import Recorder


def control_loop(recorder: Recorder | None, *, steps: int, fps: float, pictures: list[dict]) -> tuple[np.ndarray, ...]:
    """(lateness of each step, duration of each `Recorder.step`), in milliseconds."""
    late, took = np.zeros(steps), np.zeros(steps)
    action, chunk = np.zeros(14, np.float32), np.zeros((50, 14), np.float32)
    begin = time.perf_counter() + 0.1
    for step in range(steps):
        due = begin + step / fps
        while (now := time.perf_counter()) < due:
            time.sleep(max(0.0, due - now))
        late[step] = now - due
        observation = {"state": action, "images": pictures[step % len(pictures)]}
        if recorder is not None:
            before = time.perf_counter()
            recorder.step(observation, action, intended=(chunk, step % 50))
            took[step] = time.perf_counter() - before
    return 1e3 * late, 1e3 * took


def describe(values: np.ndarray) -> str:
    """Median, 99th percentile and maximum."""
    return f"p50 {np.percentile(values, 50):6.2f}  p99 {np.percentile(values, 99):6.2f}  max {values.max():6.2f} ms"


def main() -> None:
    """Run the loop twice and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--fps", type=int, default=50)
    parser.add_argument("--cameras", type=int, default=3)
    parser.add_argument("--size", type=int, nargs=2, default=(480, 640), metavar=("H", "W"))
    parser.add_argument("--codec", default="av1")
    args = parser.parse_args()
    steps = int(args.seconds * args.fps)
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (8, args.cameras, args.size[0] // 16, args.size[1] // 16, 3), dtype=np.uint8)
    fine = coarse.repeat(16, axis=2).repeat(16, axis=3)
    pictures = [{f"cam_{number}": picture for number, picture in enumerate(one)} for one in fine]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("without", "with"):
            recorder = Recorder(Path(folder) / "data", fps=args.fps, horizon=50, codec=args.codec, max_pending_gb=8)
            with recorder if name == "with" else nullcontext() as one:
                if one is not None:
                    one.start(task="measure")
                late, took = control_loop(one, steps=steps, fps=args.fps, pictures=pictures)
                print(f"{name:>8} recorder: steps begin late by {describe(late)}")
                if one is not None:
                    print(f"          Recorder.step takes       {describe(took)}")
                    began = time.perf_counter()
                    one.end(True)
                    print(f"          end() waits {time.perf_counter() - began:.2f} s for {steps} steps")


if __name__ == "__main__":
    main()
