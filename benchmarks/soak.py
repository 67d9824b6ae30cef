"""Training, evaluation, checkpoints and collection for hours: do memory, descriptors, threads, disk grow?

    python benchmarks/soak.py --hours 24 --out soak
    python benchmarks/soak.py --hours 0.1 --every 2      a try

Records demonstrations on the tabletop, computes their statistics, and trains `acrlpd_tabletop_online` in one process
until the time is over: it collects episodes into a replay buffer, evaluates and saves all the time. Then it asks the
run to stop (SIGTERM; so do SIGTERM and Ctrl-C of this script). The same command again adds a piece: the run goes on.
A line in OUT/samples.jsonl says every few seconds what the process holds. OUT/report.json, renewed with every line,
covers all pieces: hours, steps, and how each quantity grows within pieces, after the warm-up of each (`WARM_UP` hours
or half of it), in which caches and the replay buffer fill.
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
WARM_UP = 0.5
"""Hours at the start of a piece that do not count, at most half of it."""
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=float, default=24.0, help="how long this piece trains (default 24)")
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
    file, end = out / "samples.jsonl", time.monotonic() + 3600 * args.hours
    piece = 1 + max((one["piece"] for one in read(file)), default=0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (out / "said.log").open("ab") as log, file.open("a") as samples:
        process = subprocess.Popen([sys.executable, "-m", "pirl", *command], stdout=log, stderr=subprocess.STDOUT)
        try:
            while time.monotonic() < end and process.poll() is None:
                time.sleep(args.every)
                samples.write(json.dumps({"piece": piece} | sample(process.pid, run)) + "\n")
                samples.flush()
                write_report(out, command, None)
        except KeyboardInterrupt:
            print("asked to stop")
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(600)
    print(json.dumps(write_report(out, command, code), indent=2))
    return 0 if code == 130 else 1


def read(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write_report(out: Path, command: list[str], code: int | None) -> dict[str, object]:
    """The figures of all pieces so far, and how the last one ended (None: it goes on)."""
    figures = {"exit_code": code, **growth(read(out / "samples.jsonl"))}
    (out / "report.json").write_text(json.dumps({"command": command, **figures}, indent=2) + "\n")
    return figures


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


def growth(samples: list[dict[str, float]]) -> dict[str, object]:
    """Hours and steps of all pieces; of each quantity its range, and its growth within pieces past their warm-up."""
    pieces = [[one for one in samples if one["piece"] == piece] for piece in sorted({one["piece"] for one in samples})]
    late = [kept for kept in map(past_warm_up, pieces) if len(kept) > 2]
    found: dict[str, object] = {
        "pieces": len(pieces),
        "hours": round(sum(span(piece, "time") for piece in pieces) / 3600, 3),
        "steps": int(sum(span(piece, "step") for piece in pieces)),
        "hours_past_warm_up": round(sum(span(piece, "time") for piece in late) / 3600, 3),
        "steps_past_warm_up": int(sum(span(piece, "step") for piece in late)),
    }
    for name in [name for name in samples[0] if name not in ("piece", "time", "step")] if late else []:
        values = [one[name] for piece in late for one in piece]
        found[name] = {
            "first": round(values[0], 2),
            "last": round(values[-1], 2),
            "least": round(min(values), 2),
            "most": round(max(values), 2),
            "per_hour": round(slope(late, "time", name) * 3600, 3),
            "per_1000_steps": round(slope(late, "step", name) * 1000, 4),
        }
    return found


def past_warm_up(piece: list[dict[str, float]]) -> list[dict[str, float]]:
    warm = piece[0]["time"] + min(3600 * WARM_UP, span(piece, "time") / 2)
    return [one for one in piece if one["time"] >= warm]


def span(piece: list[dict[str, float]], name: str) -> float:
    return piece[-1][name] - piece[0][name]


def slope(pieces: list[list[dict[str, float]]], over: str, name: str) -> float:
    """Least squares: one slope for all pieces, a level of its own for each."""

    def centred(name: str) -> np.ndarray:
        columns = [np.array([one[name] for one in piece]) for piece in pieces]
        return np.concatenate([column - column.mean() for column in columns])

    x, y = centred(over), centred(name)
    return float(x @ y / max(x @ x, 1e-12))


if __name__ == "__main__":
    raise SystemExit(main())
