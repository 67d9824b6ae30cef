"""Error rate and power of the blind comparison and of the earlier e-process, by simulation.

    python benchmarks/blind_comparison.py --out docs/results/blind-comparison.json

Each row simulates `--runs` comparisons of two policies with success rates a and b, checked after every pair. The sign
test is planned for the column's number of episodes; the e-process is anytime-valid, one test for all columns.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from pirl.robot.compare import first_decision, log_wealth

ALPHA, PLANS = 0.05, (50, 100, 200, 400)
EQUAL = ((0.1, 0.1), (0.5, 0.5), (0.9, 0.9))
RATES = ((0.5, 0.6), (0.5, 0.7), (0.5, 0.8), (0.5, 0.9), (0.3, 0.7), (0.7, 0.9), (0.8, 0.95))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000, help="comparisons per row")
    parser.add_argument("--out", type=Path, help="JSON file with the table")
    args = parser.parse_args()
    rows = []
    for a, b in (*EQUAL, *RATES):
        rng = np.random.default_rng(0)
        solved = [rng.random((args.runs, PLANS[-1] // 2)) < rate for rate in (b, a)]
        rows.append({"a": a, "b": b, **row(solved[0].astype(np.int64) - solved[1])})
        print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        args.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0


def row(differences: Any) -> dict[str, Any]:
    """Shares of comparisons decided, and decided for B, within each planned number of episodes."""
    before = e_process(differences)
    found: dict[str, Any] = {}
    for episodes in PLANS:
        pairs = differences[:, : episodes // 2]
        first, better = first_decision(pairs, alpha=ALPHA)
        old = (before >= 0) & (before < episodes // 2)
        found[str(episodes)] = {
            "decided": float((first >= 0).mean()),
            "better": float(better.mean()),
            "mean_episodes": float(np.where(first < 0, episodes, 2 * (first + 1)).mean()),
            "e_process_decided": float(old.mean()),
            "e_process_better": float((old & (differences.cumsum(axis=1)[np.arange(len(old)), before] > 0)).mean()),
        }
    return found


def e_process(differences: Any) -> Any:
    """Index of the pair after which the wealth of a bet against "no difference" reaches 1/alpha, or -1."""
    wins, losses = (differences > 0).cumsum(axis=1), (differences < 0).cumsum(axis=1)
    counts = np.arange(int(max(wins.max(), losses.max())) + 1, dtype=np.float64)
    wealth = log_wealth(np.zeros((1, 1)), counts[:, None], counts[None], np.zeros((1, 1)))
    decided = wealth[wins, losses] >= -np.log(ALPHA)
    return np.where(decided.any(axis=1), decided.argmax(axis=1), -1)


if __name__ == "__main__":
    raise SystemExit(main())
