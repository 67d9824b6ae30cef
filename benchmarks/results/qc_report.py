"""Success over updates, compared with the paper's: a table with intervals over seeds, and a figure."""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

DOCS = Path(__file__).parents[2] / "docs/results"
PAGE, PICTURE, RAW = "q-chunking.md", "q-chunking.svg", "q-chunking.jsonl"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

PAPER = {
    "cube-double": {
        0: "11.8/9.6/14, 23/18.8/27.2, 38.2/23.9/46, 43.3/31.6/54.6, 47.8/28/60",
        1: "45.9/36/56, 68.8/57/81, 74/56.5/88, 78/68/88, 75.2/52.5/91.5",
        2: "2.5/1/4, 8.5/5/13.5, 31/12.5/45, 41/16/59, 46.5/24.5/64",
        3: "5.5/4/7, 14.4/10.5/18, 36.5/32/40.5, 40.6/30.5/47, 48.1/26.5/60.5",
        4: "2/0/4.5, 4.5/1.5/7, 12.9/4/21, 11.1/5/18, 14.1/6/23",
        5: "4/1.5/6, 24.6/19/28, 48.9/40.5/56, 52.5/43.5/61, 68/59.5/76.5",
    },
    "puzzle-3x3": {
        0: "98.5/97.4/99.4, 100/100/100, 100/100/100, 100/100/100, 99.9/99.7/100",
        1: "100/100/100, 100/100/100, 100/100/100, 100/100/100, 100/100/100",
        2: "100/100/100, 100/100/100, 100/100/100, 100/100/100, 100/100/100",
        3: "97/93.5/99.5, 100/100/100, 100/100/100, 100/100/100, 99.5/98.5/100",
        4: "95/92/98, 100/100/100, 100/100/100, 100/100/100, 100/100/100",
        5: "100/100/100, 100/100/100, 100/100/100, 100/100/100, 100/100/100",
    },
    "scene": {
        0: "58.5/51.1/65.8, 70.5/68.6/71.6, 74/70.6/78, 80.3/77.4/83.2, 79.5/77.4/81.6",
        1: "98.5/98/99.5, 99.5/98.5/100, 99.5/98.5/100, 97/96/99, 99/97/100",
        2: "97.5/96/99, 97.5/95/99.5, 96/94/98, 99.5/98.5/100, 98/95.5/100",
        3: "47/25.5/61.5, 75.4/68/83, 76/74.5/77.5, 90.9/82/98, 81/71.5/90.5",
        4: "57.4/36/75, 76.5/63/90, 83.5/76/91, 86.5/77/92, 92.5/89.5/95",
        5: "0/0/0, 7.5/1/14, 26.1/9.5/43.5, 35/11/60, 28.9/14/48",
    },
}
"""QC in the paper's released plot data (`plot_data/ogbench-*.pkl` of github.com/ColinQiyangLi/qc): mean/low/high of
success in per cent after 100k, 200k ... 500k updates; 0 is the mean over the five tasks."""
INTERVAL = 100_000
"""Updates between the paper's data points."""


class Estimate(NamedTuple):
    """A mean success rate with its interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        mean, low, high = (f"{100 * x:.1f}".removesuffix(".0") for x in self)
        return f"{mean} [{low}, {high}]"


def paper(name: str, task: int, step: int) -> Estimate | None:
    """The paper's result; None if there is none."""
    figures = PAPER.get(name, {}).get(task, "").split(", ")
    place, rest = divmod(step, INTERVAL)
    if rest or not 1 <= place <= len(figures) or not figures[0]:
        return None
    return Estimate(*(float(x) / 100 for x in figures[place - 1].split("/")))


def append(path: Path, name: str, seed: int, step: int, solved: np.ndarray, dtype: str, seconds: float) -> None:
    """Append one evaluation's results by task."""
    with path.open("a") as file:
        for task, episodes in enumerate(solved, 1):
            row = {"domain": name, "task": task, "seed": seed, "step": step, "episodes": len(episodes)}
            row |= {"successes": int(episodes.sum()), "dtype": dtype, "seconds": round(seconds, 1)}
            file.write(json.dumps(row | {"time": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")


def read(paths: list[Path]) -> dict[tuple[str, int, int, int], float]:
    """Success rate by domain, task, seed and step; the later of two evaluations of the same."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    rows = sorted((json.loads(line) for line in lines), key=lambda row: row["time"])
    return {(r["domain"], r["task"], r["seed"], r["step"]): r["successes"] / r["episodes"] for r in rows}


def bootstrap(seeds: np.ndarray, resamples: int = 5000) -> Estimate:
    """Mean over seeds with its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    means = seeds[rng.integers(len(seeds), size=(resamples, len(seeds)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(seeds.mean()), float(low), float(high))


def estimates(rates: dict[tuple[str, int, int, int], float]) -> dict[tuple[str, int, int], tuple[Estimate, int]]:
    """(mean and interval, number of seeds) by domain, task (0: all) and step."""
    by_seed: dict[tuple[str, int, int], dict[int, float]] = defaultdict(dict)
    for (name, task, seed, step), rate in rates.items():
        by_seed[name, task, step][seed] = rate
    for name, step in sorted({(name, step) for name, _, step in by_seed}):
        tasks = [seeds for (n, task, s), seeds in by_seed.items() if (n, s) == (name, step) and task]
        shared = set.intersection(*(set(seeds) for seeds in tasks))
        by_seed[name, 0, step] = {seed: float(np.mean([seeds[seed] for seeds in tasks])) for seed in shared}
    order = sorted((key for key, seeds in by_seed.items() if seeds), key=lambda key: (key[0], key[2], key[1]))
    return {key: (bootstrap(np.array(list(by_seed[key].values()))), len(by_seed[key])) for key in order}


def verdict(ours: Estimate, theirs: Estimate | None) -> str:
    """Whether our mean lies in the paper's interval, or how the two intervals relate."""
    if theirs is None:
        return "no figure"
    if theirs.low <= ours.mean <= theirs.high:
        return "inside"
    if ours.low <= theirs.high and theirs.low <= ours.high:
        return "intervals overlap"
    return "above" if ours.mean > theirs.mean else "below"


def table(found: dict[tuple[str, int, int], tuple[Estimate, int]]) -> str:
    """The comparison as a Markdown table."""
    lines = ["| domain | updates | task | seeds | pirl, % | paper, % | pirl's mean |", "|---|---|---|---|---|---|---|"]
    for (name, task, step), (ours, seeds) in found.items():
        theirs = paper(name, task, step)
        which = f"task {task}" if task else "**all**"
        cells = (name, f"{step // 1000}k", which, seeds, ours, theirs or "-", verdict(ours, theirs))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def picture(found: dict[tuple[str, int, int], tuple[Estimate, int]]) -> str:
    """An SVG with one panel per domain: mean over tasks with interval, ours and the paper's."""
    names = sorted({name for name, _, _ in found})
    width, height, left, top = 300, 200, 40, 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(names) * (width + 60)} {height + 80}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for panel, name in enumerate(names):
        steps = [step for n, task, step in found if n == name and task == 0]
        last = max(INTERVAL, *steps)

        def x(step: float, panel: int = panel, last: int = last) -> float:
            return panel * (width + 60) + left + width * step / last

        def y(rate: float) -> float:
            return top + height * (1 - rate)

        parts.append(f'<text x="{x(0):.0f}" y="18" font-size="13">{name}, mean of five tasks</text>')
        for tick in (0, 0.25, 0.5, 0.75, 1):
            parts.append(f'<path d="M{x(0):.1f} {y(tick):.1f}H{x(last):.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{x(0) - 6:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
        for tick in range(0, last + 1, max(50_000, last // 4 // 50_000 * 50_000)):
            parts.append(f'<text x="{x(tick):.1f}" y="{top + height + 16}" text-anchor="middle">{tick // 1000}k</text>')
        published = {s: p for s in range(INTERVAL, last + 1, INTERVAL) if (p := paper(name, 0, s))}
        measured = {step: ours for (n, task, step), (ours, _) in found.items() if n == name and task == 0}
        for points, colour, shift in ((published, "#d9730d", 3), (measured, "#2f5fd0", 0)):
            line = " ".join(f"{x(s) + shift:.1f},{y(e.mean):.1f}" for s, e in {0: Estimate(0, 0, 0), **points}.items())
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            for s, e in points.items():
                at = f"{x(s) + shift:.1f}"
                parts.append(f'<path d="M{at} {y(e.low):.1f}V{y(e.high):.1f}" stroke="{colour}" stroke-width="4"/>')
                parts.append(f'<circle cx="{at}" cy="{y(e.mean):.1f}" r="3" fill="{colour}"/>')
        parts.append(f'<text x="{x(0):.0f}" y="{top + height + 34}" fill="#2f5fd0">pirl</text>')
        parts.append(f'<text x="{x(0) + 40:.0f}" y="{top + height + 34}" fill="#d9730d">paper (QC)</text>')
    return "\n".join([*parts, "</svg>", ""])


def report(paths: list[Path], docs: Path) -> None:
    """Add new results to the page's raw file, and write table and figure from all of them."""
    docs.mkdir(parents=True, exist_ok=True)
    raw = docs / RAW
    known = raw.read_text().splitlines() if raw.exists() else []
    new = [line for path in paths if path.exists() for line in path.read_text().splitlines() if line not in known]
    if new:
        with raw.open("a") as file:
            file.write("\n".join(new) + "\n")
    found = estimates(read([raw]))
    if not found:
        print("no results yet")
        return
    (docs / PICTURE).write_text(picture(found))
    block = (
        f"![Success against updates, with 95 % intervals over seeds, beside the paper's]({PICTURE})\n\n{table(found)}"
    )
    page = docs / PAGE
    text = page.read_text() if page.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}")
    print(block)
