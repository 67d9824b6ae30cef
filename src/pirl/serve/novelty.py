"""Novelty: the distance of an observation's prefix features from those of the training data.

    z(x) = Vᵀ((x - mean)/std)/√λ          the K largest principal components, whitened
    novelty(x) = min_i ‖z(x) - z_i‖ / limit

The z_i are some thousand frames of the training data. For each episode, take its largest distance to a fit without it;
`limit` is the 95 % quantile of these over episodes. So one in twenty episodes like the data has a frame with novelty
above 1. Of the densities and distances tried, this one separates unseen conditions best (docs/serving.md).

The file is an .npz without pickled objects. It contains the checksum of its checkpoint's weights and is refused with
other weights, whose features differ.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from pirl.checkpoints.checksums import read_checksums, sha256
from pirl.data.recorded import Recorded
from pirl.errors import CheckpointError, DataError
from pirl.files import read_arrays, write_arrays
from pirl.names import ASSETS_ITEM, PARAMS_ITEM
from pirl.training.acting import Acting
from pirl.training.features import Features

FILE = "extra/novelty.npz"
"""Its file in the checkpoint's folder."""
COMPONENTS, KEPT, FOLDS, QUANTILE = 128, 4096, 5, 0.95
"""K; number of stored frames; cross-validation folds of episodes; share of episodes within the limit."""
LEAST = 20
"""Fewest episodes for that quantile."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Novelty:
    """The training data in one checkpoint's feature space."""

    mean: Float[np.ndarray, "D"]
    """Mean of the features."""
    directions: Float[np.ndarray, "D K"]
    """Projection from centred features to whitened components."""
    rows: Float[np.ndarray, "N K"]
    """Components of the stored frames."""
    limit: float
    """Distance of novelty 1."""
    weights: str
    """Checksum of the checkpoint's weights and statistics."""

    def of(self, features: Float[np.ndarray, "B D"]) -> Float[np.ndarray, "B"]:
        """Novelty of each row: its distance to the nearest frame, in units of `limit`."""
        return nearest((features - self.mean) @ self.directions, self.rows, self._squares) / self.limit

    @cached_property
    def _squares(self) -> Float[np.ndarray, "N"]:
        return (self.rows * self.rows).sum(1)

    def save(self, file: Path) -> None:
        """Write one .npz file."""
        write_arrays(file, {name: np.asarray(value) for name, value in asdict(self).items()})


def nearest(
    z: Float[np.ndarray, "B K"], rows: Float[np.ndarray, "N K"], squares: Float[np.ndarray, "N"]
) -> Float[np.ndarray, "B"]:
    """Distance of each point to the nearest of `rows`; `squares` are the rows' squared norms."""
    rest = (squares - 2 * z @ rows.T).min(axis=1)
    return np.sqrt(np.maximum((z * z).sum(1) + rest, 0))


def fit(features: Float[np.ndarray, "N D"], episode: Int[np.ndarray, "N"], *, weights: str) -> Novelty:
    """Fit to the features of frames, given each frame's episode number."""
    numbers = np.unique(episode)
    if len(numbers) < LEAST:
        raise DataError(f"{len(numbers)} episodes tell little about novelty", hint=f"at least {LEAST}")
    fold = np.random.default_rng(0).permutation(len(numbers))[np.searchsorted(numbers, episode)] % FOLDS
    distances = np.zeros(len(features))
    for part in range(FOLDS):
        mean, directions, rows = frames(features[fold != part])
        points = (features[fold == part] - mean) @ directions
        distances[fold == part] = nearest(points, rows, (rows * rows).sum(1))
    largest = [distances[episode == number].max() for number in numbers]
    limit = float(np.quantile(largest, QUANTILE, method="higher"))
    if not limit > 0:
        raise DataError("every frame is also in another episode", hint="the dataset repeats itself")
    mean, directions, rows = (x.astype(np.float32) for x in frames(features))
    return Novelty(mean=mean, directions=directions, rows=rows, limit=limit, weights=weights)


def frames(
    features: Float[np.ndarray, "N D"], components: int = COMPONENTS
) -> tuple[Float[np.ndarray, "D"], Float[np.ndarray, "D K"], Float[np.ndarray, "R K"]]:
    """(mean, directions, stored rows)."""
    known = features.astype(np.float64)
    mean, std = known.mean(0), known.std(0)
    std = np.where(std > 1e-6 * std.max(), std, np.inf)  # drop constant features
    scaled = (known - mean) / std
    strength, axes = np.linalg.eigh(scaled.T @ scaled / len(scaled))
    strength, axes = strength[::-1][:components], axes[:, ::-1][:, :components]
    real = strength > 1e-6 * strength[0]
    directions = axes[:, real] / np.sqrt(strength[real]) / std[:, None]
    return mean, directions, np.random.default_rng(1).permutation((known - mean) @ directions)[:KEPT]


def fit_dataset(acting: Acting, dataset: str, *, stride: int | None = None, episodes: int | None = None) -> Novelty:
    """Fit to every `stride`-th frame of a recorded dataset; by default to about `KEPT` frames."""
    features = Features(acting)
    recorded = Recorded(features.transform.robot, dataset, size=features.transform.image_size[0])
    used = recorded.meta.episodes[:episodes]
    stride = stride or max(1, sum(one.length for one in used) // KEPT)
    steps = [range(0, one.length, stride) for one in used]

    def seen() -> Iterator[dict[str, Any]]:
        for one, at in zip(used, steps, strict=True):
            yield from recorded.observations(one, at)

    owner = np.repeat(np.arange(len(used)), [len(at) for at in steps])
    return fit(features.of(seen()), owner, weights=weights_checksum(acting.found.folder))


def weights_checksum(folder: Path) -> str:
    """One checksum of a checkpoint's weights and statistics, on which its features depend."""
    parts = (PARAMS_ITEM, ASSETS_ITEM)
    sums = {name: text for name, text in read_checksums(folder).items() if name.split("/")[0] in parts}
    if not sums:  # OpenPI's checkpoints have no checksums
        files = [file for part in parts for file in (folder / part).rglob("*")] if folder.is_dir() else [folder]
        sums = {str(file.relative_to(folder.parent)): sha256(file) for file in files if file.is_file()}
    return hashlib.sha256("".join(f"{name} {sums[name]}\n" for name in sorted(sums)).encode()).hexdigest()


def load_novelty(folder: Path, file: Path | None = None) -> Novelty:
    """Load a checkpoint's novelty file; raises if it was made with other weights."""
    file, hint = file or folder / FILE, f"pirl serve {folder} --fit-novelty DATASET"
    try:
        found = read_arrays(file)
        novelty = Novelty(
            mean=found["mean"],
            directions=found["directions"],
            rows=found["rows"],
            limit=float(found["limit"]),
            weights=str(found["weights"]),
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"the safety file asks for novelty, and there is no {file}", hint=hint) from error
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}", hint=hint) from error
    if novelty.weights != weights_checksum(folder):
        raise CheckpointError(f"{file} was made with other weights than those in {folder}", hint=hint)
    return novelty
