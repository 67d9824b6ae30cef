"""LeRobot's statistics: per episode and column, and merged over episodes.

LeRobot estimates quantiles from histograms of 5000 bins and merges episodes by averaging their quantiles, weighted by
length. This module keeps both approximations, because its numbers are compared with and merged into LeRobot's.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int, Num, Shaped, UInt8

ColumnStats = dict[str, np.ndarray]
Stats = dict[str, ColumnStats]

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_BINS = 5000
_MARGIN = 1e-10


def column_stats(column: Shaped[np.ndarray, "T *shape"], *, quantiles: bool) -> ColumnStats:
    """Statistics over the steps of a numeric or boolean column.

    For multi-dimensional features, format v3.0 (with quantiles) pools all axes but the last; v2.1 keeps them.
    """
    rows = column[:, None] if column.ndim == 1 else column
    if quantiles:
        rows = rows.reshape(-1, rows.shape[-1])
    wide = rows.astype(np.float64)
    stats = {"min": rows.min(0), "max": rows.max(0), "mean": wide.mean(0), "std": wide.std(0)}
    stats["count"] = np.array([len(column)])
    if quantiles:
        numbers = rows.astype(np.uint8) if rows.dtype == bool else rows
        ones = np.ones(len(rows))
        columns = [_quantiles(numbers[:, i], ones) for i in range(numbers.shape[1])]
        stats |= dict(zip(QUANTILES, np.array(columns).T, strict=True))
    return stats


def image_histogram(frame: UInt8[np.ndarray, "h w 3"]) -> Int[np.ndarray, "3 256"]:
    """The histogram of each channel, which suffices for the statistics of an image.

    Large images are subsampled to about 150 pixels a side, as in LeRobot.
    """
    height, width = frame.shape[:2]
    step = 1 if max(height, width) < 300 else max(height, width) // 150
    small = frame[::step, ::step]
    return np.stack([np.bincount(small[..., c].ravel(), minlength=256) for c in range(3)]).astype(np.int32)


def image_stats(histograms: Sequence[Int[np.ndarray, "3 256"]], *, quantiles: bool) -> ColumnStats:
    """Per-channel statistics of an episode's images in [0, 1], shape (3, 1, 1), from the frames LeRobot would sample.

    LeRobot 0.4.4 squares uint8 pixels, which overflows, and stores a standard deviation of 0; ours is correct (and
    equal to that of LeRobot's v2.1 writer).
    """
    chosen = sampled_frames(len(histograms))
    counts = np.stack([histograms[i] for i in chosen]).sum(0, dtype=np.int64)
    values = np.arange(256.0)
    total = counts.sum(1)
    mean = counts @ values / total
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / total
    present = counts > 0
    stats = {
        "min": present.argmax(1),
        "max": 255 - present[:, ::-1].argmax(1),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": np.array([len(chosen)]),
    }
    if quantiles:
        channels = [
            _quantiles(values[seen], n[seen].astype(np.float64)) for seen, n in zip(present, counts, strict=True)
        ]
        stats |= dict(zip(QUANTILES, np.array(channels).T, strict=True))
    return {name: value if name == "count" else (value / 255.0).reshape(3, 1, 1) for name, value in stats.items()}


def sampled_frames(length: int) -> list[int]:
    """The frames that LeRobot samples: all up to 100, then length^0.75 evenly spread, at most 10000."""
    samples = max(min(length, 100), min(int(length**0.75), 10_000))
    return [int(i) for i in np.round(np.linspace(0, length - 1, samples))]


def _quantiles(values: Num[np.ndarray, "N"], weights: Float[np.ndarray, "N"]) -> Float[np.ndarray, "Q"]:
    if weights.sum() < 2:
        return np.full(len(QUANTILES), values[0], np.float64)
    # Edges in the column's own precision as in LeRobot, since it decides on which side of an edge a value falls.
    edges = np.linspace(values.min() - _MARGIN, values.max() + _MARGIN, _BINS + 1)
    cumulative = np.cumsum(np.histogram(values, bins=edges, weights=weights)[0])
    targets = np.array(list(QUANTILES.values())) * weights.sum()
    bins = np.minimum(np.searchsorted(cumulative, targets), _BINS - 1)
    before = np.where(bins > 0, cumulative[bins - 1], 0.0)
    inside = np.maximum(cumulative[bins] - before, 1e-300)
    fraction = np.where(bins > 0, (targets - before) / inside, 0.0)  # the first bin counts as its lower edge
    return (edges[bins] + fraction * (edges[bins + 1] - edges[bins])).astype(np.float64)


def merge_stats(parts: Sequence[Mapping[str, ColumnStats]]) -> Stats:
    """Merged statistics; a column (or quantile) that only some parts have is merged over those parts."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: _merge_column([part[key] for part in parts if key in part]) for key in keys}


def _merge_column(parts: Sequence[ColumnStats]) -> ColumnStats:
    counts = np.array([part["count"][0] for part in parts])
    total = counts.sum()

    def average(name: str) -> np.ndarray:
        return np.tensordot(counts, np.stack([part[name] for part in parts]).astype(np.float64), 1) / total

    mean = average("mean")
    spread = np.stack([part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in parts])
    merged = {
        "min": np.stack([part["min"] for part in parts]).min(0),
        "max": np.stack([part["max"] for part in parts]).max(0),
        "mean": mean,
        "std": np.sqrt(np.tensordot(counts, spread, 1) / total),
        "count": np.array([total]),
    }
    return merged | {q: average(q) for q in QUANTILES if all(q in part for part in parts)}
