"""Training, evaluation, checkpoints and collection for hours: do memory, descriptors, threads, disk grow?

    python benchmarks/soak.py --hours 24 --out soak
    python benchmarks/soak.py --hours 0.1 --every 2      a try

Records demonstrations on the tabletop, computes their statistics, and trains `acrlpd_tabletop_online` in one process
until the time is over: it collects episodes into a replay buffer, evaluates and saves all the time. Then it asks the
run to stop (SIGTERM); the same command goes on with it. A line in OUT/samples.jsonl says every few seconds what the
process holds; OUT/report.json has the growth per hour, by a line through the second half: the first one fills caches
and the replay buffer.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

RECIPE = "acrlpd_tabletop_online"
SETTINGS = (
    *("--exp-name", "soak", "--max-steps", "1000000000", "--log-interval", "5", "--batch-size", "16"),
    *("--online.start-step", "5", "--online.episodes", "8", "--data.replay-episodes", "64"),
    *("--checkpoint.save-interval", "20", "--checkpoint.keep-last", "2"),
    *("--evaluation.interval", "20", "--evaluation.episodes", "4", "--rollout.num-envs", "8"),
)
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=float, default=24.0, help="how long to train (default 24)")
    parser.add_argument("--every", type=float, default=30.0, metavar="S", help="seconds between samples (default 30)")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="output folder (default soak)")
    parser.add_argument("--backend", choices=("local", "process"), default="process", help="where environments run")
    parser.add_argument("settings", nargs="*", help="further settings of the run, after --")
    args = parser.parse_args()
    out = args.out.absolute()
    demos, run = out / "demos", out / "runs" / RECIPE / "soak"
    if not demos.exists():
        pirl("record", RECIPE, "--root", demos, "--episodes", 40)
        pirl("norm-stats", demos, "--robot", "tabletop", "--horizon", horizon(), "--out", out / "assets")
    command = [
        *("train", RECIPE, "--resume", "auto", *SETTINGS, "--rollout.backend", args.backend),
        *("--data-path", str(demos), "--data.assets-dir", str(out), "--data.asset-id", "assets"),
        *("--checkpoint.base-dir", str(out / "runs"), *args.settings),
    ]
    end = time.monotonic() + 3600 * args.hours
    with (out / "said.log").open("ab") as log, (out / "samples.jsonl").open("w") as samples:
        process = subprocess.Popen([sys.executable, "-m", "pirl", *command], stdout=log, stderr=subprocess.STDOUT)
        try:
            while time.monotonic() < end and process.poll() is None:
                time.sleep(args.every)
                samples.write(json.dumps(sample(process.pid, run)) + "\n")
                samples.flush()
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(600)
    report = {"command": command, "hours": args.hours, "exit_code": code, **growth(out / "samples.jsonl")}
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "command"}, indent=2))
    return 0 if code == 130 else 1


def pirl(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "pirl", *map(str, words)], check=True)


def horizon() -> int:
    from pirl.recipes import get_config

    return get_config(RECIPE).horizon


def sample(pid: int, run: Path) -> dict[str, float]:
    """What the training process, and its workers, hold now."""
    family = [pid, *children(pid)]
    steps = [int(child.name) for child in entries(run) if child.name.isdecimal()]
    files = [Path(folder) / name for folder, _, names in os.walk(run) for name in names]  # folders may go meanwhile
    return {
        "time": time.time(),
        "step": max(steps, default=0),
        "rss_mib": rss(pid) / MIB,
        "workers_rss_mib": sum(rss(one) for one in family[1:]) / MIB,
        "descriptors": sum(1 for _ in entries(Path(f"/proc/{pid}/fd"))),
        "threads": sum(1 for _ in entries(Path(f"/proc/{pid}/task"))),
        "processes": len(family),
        "files": len(files),
        "disk_mib": sum(size(path) for path in files) / MIB,
    }


def children(pid: int) -> list[int]:
    found = []
    for task in entries(Path(f"/proc/{pid}/task")):
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found + [one for child in found for one in children(child)]


def rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # removed meanwhile
        return 0


def growth(file: Path) -> dict[str, object]:
    """First, last and largest value of each quantity, and its growth per hour over the second half."""
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    late = samples[len(samples) // 2 :]
    hours = np.array([one["time"] for one in late]) / 3600
    found: dict[str, object] = {"samples": len(samples)}
    for name in [name for name in samples[0] if name != "time"] if len(late) > 2 else []:
        values = np.array([one[name] for one in late])
        slope = float(np.polyfit(hours - hours[0], values, 1)[0])
        found[name] = {
            "half": round(float(values[0]), 2),
            "last": round(float(values[-1]), 2),
            "most": round(max(one[name] for one in samples), 2),
            "per_hour": round(slope, 2),
        }
    return found


if __name__ == "__main__":
    raise SystemExit(main())
