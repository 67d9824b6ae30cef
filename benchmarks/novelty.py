"""Whether the novelty score separates unseen conditions from training conditions, on the simulated tabletop.

    python benchmarks/novelty.py checkpoints/bc_tabletop/first demos/tabletop --out docs/results/novelty.json

Every fifth of the dataset's episodes is kept from the fit, and changed in ways that a camera or a person might. The
last rows are first frames of new episodes with a block where or as it never was, against those as in training. AUC: how
often a changed frame is farther from the data than one that is not. Refused: the share of frames beyond the limit, and
of episodes with such a frame.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from pirl.data.recorded import Recorded
from pirl.envs.config import TabletopConfig
from pirl.envs.tabletop import IMAGE, Tabletop
from pirl.envs.tabletop_render import NUMBERS
from pirl.label.classifier import auc
from pirl.records import Context
from pirl.serve import novelty
from pirl.training.acting import open_checkpoint
from pirl.training.features import Features

Seen = list[dict[str, Any]]
Score = Callable[[Any], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="a run or step of a policy for the tabletop")
    parser.add_argument("dataset", help="what it was trained on")
    parser.add_argument("--starts", type=int, default=300, help="new initial states per row")
    parser.add_argument("--frames", type=int, default=6000, help="most frames of the dataset")
    parser.add_argument("--out", type=Path, help="JSON file with the table")
    args = parser.parse_args()
    features = Features(open_checkpoint(args.checkpoint))
    seen, episode = frames(features, args.dataset, args.frames)
    x = features.of(seen).astype(np.float64)
    apart = episode % 5 == 0
    ways = ways_to_judge(x[~apart], episode[~apart])
    usual = [one for one, kept in zip(seen, apart, strict=True) if kept]
    old, new = x[apart], features.of(starts(args.starts))
    judged = [(name, old, features.of([change(one) for one in usual])) for name, change in changes().items()]
    judged += [(name, new, features.of(starts(args.starts, **how))) for name, how in LAYOUTS.items()]
    found = []
    for way, (score, limit) in ways.items():
        start = perf_counter()
        score(old)
        row = {"way": way, "us_per_row": 1e6 * (perf_counter() - start) / len(old)}
        row["refused_unchanged"] = float((score(old) > limit).mean())
        owner = episode[apart]
        row["refused_episodes"] = float(np.mean([(score(old[owner == one]) > limit).any() for one in np.unique(owner)]))
        for name, negative, positive in judged:
            scores = np.concatenate([score(negative), score(positive)])
            unseen = np.arange(len(scores)) >= len(negative)
            beyond = scores[unseen] > limit
            row[name] = {"auc": auc(scores, unseen), "refused": float(beyond.mean())}
            if len(beyond) == len(owner):
                row[name]["refused_episodes"] = float(np.mean([beyond[owner == one].any() for one in np.unique(owner)]))
        found.append(row)
        print(row, flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def frames(features: Features, dataset: str, most: int) -> tuple[Seen, Any]:
    """(observations of whole episodes, episode number of each)."""
    recorded = Recorded(features.transform.robot, dataset, size=features.transform.image_size[0])
    seen: Seen = []
    owner: list[int] = []
    for number, one in enumerate(recorded.meta.episodes):
        if len(seen) >= most:
            break
        seen += list(recorded.observations(one, range(one.length)))
        owner += [number] * one.length
    return seen, np.array(owner)


def ways_to_judge(x: Any, episode: Any) -> dict[str, tuple[Score, float]]:
    """(score, limit) by name: pirl's own, and alternatives fitted to the same frames with the same rule for limits."""
    found: dict[str, tuple[Score, float]] = {"nearest frame": (novelty.fit(x, episode, weights="").of, 1.0)}
    fold = np.random.default_rng(0).permutation(episode.max() + 1)[episode] % novelty.FOLDS
    others: dict[str, Callable[[Any], Score]] = {
        "nearest frame, 64 components": lambda known: nearest(known, 64),
        "Mahalanobis, shrunk by 0.1 %": lambda known: mahalanobis(known, 0.001),
        "Mahalanobis, shrunk by 10 %": lambda known: mahalanobis(known, 0.1),
        "fifth nearest frame": lambda known: nearest(known, novelty.COMPONENTS, place=4),
    }
    for name, make in others.items():
        distance = np.zeros(len(x))
        for part in range(novelty.FOLDS):
            distance[fold == part] = make(x[fold != part])(x[fold == part])
        largest = [distance[episode == number].max() for number in np.unique(episode)]
        found[name] = make(x), float(np.quantile(largest, novelty.QUANTILE, method="higher"))
    return found


def mahalanobis(known: Any, share: float) -> Score:
    """Mahalanobis distance to the mean, with the covariance shrunk towards a multiple of the identity."""
    mean, std = known.mean(0), known.std(0)
    std = np.where(std > 1e-6 * std.max(), std, np.inf)
    covariance = np.cov(((known - mean) / std).T)
    size = len(covariance)
    inverse = np.linalg.inv((1 - share) * covariance + share * np.trace(covariance) / size * np.eye(size))
    return lambda rows: np.sqrt(np.einsum("ni,ij,nj->n", (rows - mean) / std, inverse, (rows - mean) / std))


def nearest(known: Any, components: int, place: int = 0) -> Score:
    """pirl's score with this many components, to the frame at this place among the nearest."""
    mean, directions, kept = novelty.frames(known, components)

    def score(rows: Any) -> Any:
        z = (rows - mean) @ directions
        squares = (z * z).sum(1)[:, None] + (kept * kept).sum(1) - 2 * z @ kept.T
        return np.sqrt(np.maximum(np.partition(squares, place, axis=1)[:, place], 0))

    return score


def changes() -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Alterations of an observation, by name."""
    rng = np.random.default_rng(0)

    def picture(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda one: {**one, IMAGE: np.clip(change(one[IMAGE].astype(np.float64)), 0, 255).astype(np.uint8)}

    def covered(image: Any) -> Any:
        top, left = rng.integers(0, image.shape[0] - 8, 2)
        image[top : top + 8, left : left + 8] = 128
        return image

    return {
        "another instruction": lambda one: {**one, "prompt": "open the drawer"},
        "camera black": picture(lambda image: 0 * image),
        "30 % darker": picture(lambda image: 0.7 * image),
        "30 % less green": picture(lambda image: image * [1, 0.7, 1]),
        "a ninth covered": picture(covered),
        "camera moved by a twelfth": picture(lambda image: np.roll(image, 2, axis=1)),
        "noise, deviation 20": picture(lambda image: image + rng.normal(0, 20, image.shape)),
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "a green block": {"colour": "green"},
    "block below its area": {"area": ((0.05, 0.05), (0.95, 0.14))},
    "block right of its area": {"area": ((0.74, 0.2), (0.95, 0.34))},
}


def starts(count: int, *, colour: str | None = None, area: Any = None) -> Seen:
    """First frames of new episodes, optionally with another block colour or area."""

    def look() -> Iterator[dict[str, Any]]:
        table = Tabletop(TabletopConfig(), 1)
        if area is not None:
            table.level = replace(table.level, area=area)
        for number in range(count):
            table.begin([0], [Context(table.tasks[number % len(table.tasks)], 500_000 + number)])
            if colour is not None:
                table.state.colours[:] = NUMBERS[colour]
            yield table.observe([0])[0]

    return list(look())


if __name__ == "__main__":
    raise SystemExit(main())
