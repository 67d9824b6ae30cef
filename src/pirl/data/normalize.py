"""Normalisation statistics: OpenPI's file, OpenPI's arithmetic, OpenPI's way of collecting them.

A checkpoint is served with the `norm_stats.json` beside it, so both programs read each other's files. Any difference in
arithmetic would change the robot's motion.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from pirl.data.schema import parse_json
from pirl.errors import DataError
from pirl.files import write_text
from pirl.names import ACTIONS, NORM_STATS_FILE, STATE
from pirl.records import Array

EPSILON = 1e-6
"""Avoids division by zero in constant dimensions. Part of OpenPI's formula in both directions."""

QUANTILE_BINS = 5000
_LARGEST = float(np.finfo(np.float32).max)

_ORIGIN = "computed_for"
_HINT = (
    "compute them with `pirl norm-stats DATASET --robot NAME`, "
    "or copy assets/<asset_id>/norm_stats.json of an OpenPI checkpoint"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class NormStats:
    """Per-dimension statistics of `state` or `actions`, after the robot's own transforms and before padding."""

    mean: Float[Array, "D"]
    """Mean."""
    std: Float[Array, "D"]
    """Population standard deviation."""
    q01: Float[Array, "D"] | None = None
    """1 % quantile; π₀.₅ maps it to -1."""
    q99: Float[Array, "D"] | None = None
    """99 % quantile; π₀.₅ maps it to +1."""

    def __len__(self) -> int:
        return len(self.mean)


@dataclass(frozen=True, kw_only=True)
class StatsOrigin:
    """Robot, horizon and datasets of statistics; in `norm_stats.json` beside them, where OpenPI does not look."""

    robot: str
    """The robot's name."""
    horizon: int
    """Actions per chunk; statistics of relative actions depend on it."""
    datasets: tuple[str, ...] = ()
    """The datasets' names as given."""


def normalize(x: Float[Array, "*B D"], stats: NormStats, *, quantile: bool = False) -> Float[Array, "*B D"]:
    """Z-score, or map [q01, q99] to [-1, 1]. Statistics with more dimensions than x (padding) are truncated."""
    dim = x.shape[-1]
    if len(stats) < dim:
        raise DataError(f"normalisation statistics of {len(stats)} dimensions for data of {dim}", hint=_HINT)
    if quantile:
        low, high = _quantiles(stats)
        return (x - low[:dim]) / (high[:dim] - low[:dim] + EPSILON) * 2.0 - 1.0
    return (x - stats.mean[:dim]) / (stats.std[:dim] + EPSILON)


def unnormalize(x: Float[Array, "*B D"], stats: NormStats, *, quantile: bool = False) -> Float[Array, "*B D"]:
    """Inverse of `normalize`. Dimensions beyond the statistics are padding: mean 0, std 1; unchanged with quantiles."""
    dim = x.shape[-1]
    known = min(dim, len(stats))
    out = np.array(x, dtype=np.result_type(x, stats.mean))
    if quantile:
        low, high = (q[:known] for q in _quantiles(stats))
        out[..., :known] = (x[..., :known] + 1.0) / 2.0 * (high - low + EPSILON) + low
        return out
    out[..., :known] = x[..., :known] * (stats.std[:known] + EPSILON) + stats.mean[:known]
    out[..., known:] *= 1.0 + EPSILON
    return out


def _quantiles(stats: NormStats) -> tuple[Array, Array]:
    if stats.q01 is None or stats.q99 is None:
        raise DataError("normalisation statistics without q01 and q99, which quantile normalisation needs", hint=_HINT)
    return stats.q01, stats.q99


def load_norm_stats(path: str | Path) -> dict[str, NormStats]:
    """Read OpenPI's `norm_stats.json`; `path` is the file or its folder."""
    file, text = _read_text(path)
    return parse_norm_stats(text, where=str(file), needed=(STATE, ACTIONS))


def parse_norm_stats(text: str, *, where: str, needed: Sequence[str] = ()) -> dict[str, NormStats]:
    """The statistics in the text of a `norm_stats.json`, checked: broken ones would move a robot wrongly."""
    content = _parse(text, where)
    entries = content.get("norm_stats") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise DataError(f"{where} has no 'norm_stats' object at its top", hint=_HINT)
    for key in needed:
        if key not in entries:
            raise DataError(f"{where} has no statistics of {key!r}; it has {sorted(entries)}", hint=_HINT)
    return {key: _parse_entry(entry, f"{where}: {key}") for key, entry in entries.items()}


def load_origin(path: str | Path) -> StatsOrigin | None:
    """Robot, horizon and datasets of the statistics in a file or folder; None if unknown, as in OpenPI's files."""
    file, text = _read_text(path)
    content = _parse(text, str(file))
    found = content.get(_ORIGIN) if isinstance(content, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("horizon"), int):
        return None
    names = found.get("datasets")
    datasets = tuple(map(str, names)) if isinstance(names, list) else ()
    return StatsOrigin(robot=str(found.get("robot")), horizon=found["horizon"], datasets=datasets)


def _read_text(path: str | Path) -> tuple[Path, str]:
    path = Path(path)
    file = path if path.suffix == ".json" else path / NORM_STATS_FILE
    try:
        return file, file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"no normalisation statistics at {file}", hint=_HINT) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}", hint=_HINT) from error


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text, where=where)
    except DataError as error:
        raise DataError(f"not JSON: {error.message}", hint=_HINT) from error


def _parse_entry(entry: object, where: str) -> NormStats:
    if not isinstance(entry, dict):
        raise DataError(f"{where} is {type(entry).__name__}, expected an object with mean and std", hint=_HINT)
    fields: dict[str, Array] = {}
    for name in ("mean", "std", "q01", "q99"):
        values = entry.get(name)
        if values is None:
            if name in ("mean", "std"):
                raise DataError(f"{where} has no {name!r}", hint=_HINT)
            continue
        if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
            raise DataError(f"{where}.{name} is not a list of numbers", hint=_HINT)
        fields[name] = np.array([float(value) if abs(value) < _LARGEST else np.nan for value in values])
        _check_dimensions(f"{where}.{name}", values, np.isfinite(fields[name]), "expected a finite number (float32)")
    lengths = {name: len(array) for name, array in fields.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"{where} has statistics of different lengths: {lengths}", hint=_HINT)
    if not lengths["mean"]:
        raise DataError(f"{where} has statistics of no dimensions", hint=_HINT)
    _check_dimensions(f"{where}.std", fields["std"].tolist(), fields["std"] >= 0, "a deviation is never negative")
    if "q01" in fields and "q99" in fields:
        pairs = list(zip(fields["q01"].tolist(), fields["q99"].tolist(), strict=True))
        _check_dimensions(f"{where}.q01, q99", pairs, fields["q01"] <= fields["q99"], "q01 is above q99")
    return NormStats(**fields)


def _check_dimensions(where: str, values: Sequence[object], good: Bool[Array, "D"], problem: str) -> None:
    """Raise and name the dimensions whose statistics are invalid."""
    wrong = np.flatnonzero(~good).tolist()
    if wrong:
        told = ", ".join(f"{values[i]} in dimension {i}" for i in wrong[:8]) + (", ..." if len(wrong) > 8 else "")
        raise DataError(f"{where}: {told}: {problem}", hint=_HINT)


def check_absent(directory: str | Path) -> None:
    """Raise if the folder already has statistics."""
    if (file := Path(directory) / NORM_STATS_FILE).exists():
        raise DataError(f"{file} exists", hint="--overwrite replaces the statistics; --out writes others elsewhere")


def save_norm_stats(
    directory: str | Path,
    stats: Mapping[str, NormStats],
    *,
    origin: StatsOrigin | None = None,
    overwrite: bool = False,
) -> Path:
    """Write `norm_stats.json` in OpenPI's format, with `origin` if given; returns the file."""
    file = Path(directory) / NORM_STATS_FILE
    if not overwrite:
        check_absent(directory)
    names = ("mean", "std", "q01", "q99")
    entries = {
        key: {name: None if (value := getattr(entry, name)) is None else value.tolist() for name in names}
        for key, entry in stats.items()
    }
    content = {"norm_stats": entries} | ({} if origin is None else {_ORIGIN: asdict(origin)})
    created = [folder for folder in file.parents if not folder.exists()]
    try:
        write_text(file, json.dumps(content, indent=2, allow_nan=False))
    except OSError as error:
        with suppress(OSError):
            for folder in created:
                folder.rmdir()
        raise DataError(
            f"{file} cannot be written ({error})", hint="free some space on the disk, or give another folder"
        ) from error
    return file


class RunningStats:
    """Running statistics over batches of vectors, bit-identical to OpenPI's.

    Quantiles come from histograms that are re-binned whenever the range of the data grows: each old bin moves as a
    whole, by its left edge. So they are approximate and depend on the order of batches. The first edges lie 1e-10
    outside the data and later ones on it, so the first re-binning drops the lowest bin's count: kept on purpose, so
    that both programs compute the same statistics.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._mean_of_squares = self._min = self._max = np.zeros(0)
        self._histograms = np.zeros((0, QUANTILE_BINS))
        self._edges = np.zeros((0, QUANTILE_BINS + 1))

    def update(self, batch: Float[Array, "*B D"]) -> None:
        """Add a batch; all axes but the last are batch axes."""
        batch = batch.reshape(-1, batch.shape[-1])
        low, high = batch.min(axis=0), batch.max(axis=0)
        mean, mean_of_squares = batch.mean(axis=0), (batch**2).mean(axis=0)
        if self._count == 0:
            self._mean, self._mean_of_squares, self._min, self._max = mean.copy(), mean_of_squares.copy(), low, high
            self._edges = np.stack([_edges(a - 1e-10, b + 1e-10) for a, b in zip(low, high, strict=True)])
            self._histograms = np.zeros((len(low), QUANTILE_BINS))
        elif len(low) != len(self._mean):
            raise ValueError(f"a batch of {len(low)} dimensions after batches of {len(self._mean)}")
        else:
            grown = bool((low < self._min).any() or (high > self._max).any())
            self._min, self._max = np.minimum(self._min, low), np.maximum(self._max, high)
            if grown:
                self._rebin()
        self._count += len(batch)
        share = len(batch) / self._count
        self._mean += (mean - self._mean) * share
        self._mean_of_squares += (mean_of_squares - self._mean_of_squares) * share
        self._histograms += histograms(batch, self._edges)

    def statistics(self) -> NormStats:
        """Statistics of everything seen so far."""
        if self._count < 2:
            raise DataError(f"statistics of {self._count} vectors; expected at least 2", hint="is the dataset empty?")
        std = np.sqrt(np.maximum(0, self._mean_of_squares - self._mean**2))
        return NormStats(mean=self._mean.copy(), std=std, q01=self._quantile(0.01), q99=self._quantile(0.99))

    def _rebin(self) -> None:
        for i, (low, high) in enumerate(zip(self._min, self._max, strict=True)):
            if (low, high) == (self._edges[i, 0], self._edges[i, -1]):  # this dimension's range did not grow
                continue
            edges = _edges(low, high)
            self._histograms[i] = np.histogram(self._edges[i][:-1], bins=edges, weights=self._histograms[i])[0]
            self._edges[i] = edges

    def _quantile(self, share: float) -> Array:
        target = share * self._count
        pairs = zip(self._histograms, self._edges, strict=True)
        return np.array([edges[np.searchsorted(np.cumsum(histogram), target)] for histogram, edges in pairs])


def _edges(low: float, high: float) -> Array:
    return np.linspace(low, high, QUANTILE_BINS + 1)


def histograms(batch: Float[Array, "N D"], edges: Float[Array, "D E"]) -> Int[Array, "D K"]:
    """`np.histogram` of every column over its own evenly spaced edges: same counts, but faster.

    Computes the bin from the spacing and corrects it by comparing with its edges. Where rounding is coarser than the
    spacing a check detects the failure and `np.histogram` counts that column.
    """
    dims, last = len(edges), edges.shape[1] - 2
    low, width = edges[:, 0], (edges[:, -1] - edges[:, 0]) / (last + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = (batch - low) / width
    bins = np.clip(np.where(width > 0, steps, last), 0, last).astype(np.int64)
    first = np.arange(dims) * edges.shape[1]
    flat = edges.ravel()
    bins -= batch < flat[bins + first]
    bins += (batch >= flat[bins + first + 1]) & (bins < last)
    below, above = flat[np.maximum(bins, 0) + first], flat[bins + first + 1]
    right = (bins >= 0) & (below <= batch) & ((batch < above) | ((bins == last) & (batch == above)))
    counts = np.bincount((np.maximum(bins, 0) + np.arange(dims) * (last + 1)).ravel(), minlength=dims * (last + 1))
    counts = counts.reshape(dims, last + 1)
    for column in np.flatnonzero(~right.all(axis=0)):
        counts[column] = np.histogram(batch[:, column], bins=edges[column])[0]
    return counts
