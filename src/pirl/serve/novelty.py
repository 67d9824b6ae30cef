"""Has the policy seen anything like this in training? The distance of its prefix features to those of the data.

    z(x) = Vᵀ((x - mean)/std)/√λ          the K largest principal components, whitened
    novelty(x) = min_i ‖z(x) - z_i‖ / limit

The z_i are some thousand frames of the training data. `limit` is a quantile over episodes, of the largest distance in
each to a fit without it: 1 is as far as the most distant frame of one in twenty episodes that are like the data. Of the
densities and distances tried, this one tells unseen conditions apart best (docs/serving.md).

The file is NumPy's .npz without pickled objects. It holds the checksum of the weights it was made with, and is refused
with others: their features mean something else.
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
"""Where it is, in the folder of the checkpoint."""
COMPONENTS, KEPT, FOLDS, QUANTILE = 128, 4096, 5, 0.95
"""K; frames that are kept; parts that the episodes are dealt out to; the share of episodes within the limit."""
LEAST = 20
"""Episodes below which there is no such quantile."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Novelty:
    """The data as one checkpoint sees them."""

    mean: Float[np.ndarray, "D"]
    """Of the features."""
    directions: Float[np.ndarray, "D K"]
    """From centred features to whitened components."""
    rows: Float[np.ndarray, "N K"]
    """Components of the frames that are kept."""
    limit: float
    """Distance that counts as 1."""
    weights: str
    """Checksum of the checkpoint's weights and statistics."""

    def of(self, features: Float[np.ndarray, "B D"]) -> Float[np.ndarray, "B"]:
        """How far each row is from the nearest frame, in limits."""
        return nearest((features - self.mean) @ self.directions, self.rows, self._squares) / self.limit

    @cached_property
    def _squares(self) -> Float[np.ndarray, "N"]:
        return (self.rows * self.rows).sum(1)

    def save(self, file: Path) -> None:
        """As one file."""
        write_arrays(file, {name: np.asarray(value) for name, value in asdict(self).items()})


def nearest(
    z: Float[np.ndarray, "B K"], rows: Float[np.ndarray, "N K"], squares: Float[np.ndarray, "N"]
) -> Float[np.ndarray, "B"]:
    """Distance of each point to the nearest of the rows, whose squared lengths are known."""
    rest = (squares - 2 * z @ rows.T).min(axis=1)
    return np.sqrt(np.maximum((z * z).sum(1) + rest, 0))


def fit(features: Float[np.ndarray, "N D"], episode: Int[np.ndarray, "N"], *, weights: str) -> Novelty:
    """From the features of frames and the number of each one's episode."""
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
    """(mean, directions, the frames that are kept)."""
    known = features.astype(np.float64)
    mean, std = known.mean(0), known.std(0)
    std = np.where(std > 1e-6 * std.max(), std, np.inf)  # a constant says nothing
    scaled = (known - mean) / std
    strength, axes = np.linalg.eigh(scaled.T @ scaled / len(scaled))
    strength, axes = strength[::-1][:components], axes[:, ::-1][:, :components]
    real = strength > 1e-6 * strength[0]
    directions = axes[:, real] / np.sqrt(strength[real]) / std[:, None]
    return mean, directions, np.random.default_rng(1).permutation((known - mean) @ directions)[:KEPT]


def fit_dataset(acting: Acting, dataset: str, *, stride: int | None = None, episodes: int | None = None) -> Novelty:
    """From every `stride`-th frame of a recorded dataset; by default from about as many as are kept."""
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
    """One for the weights and statistics of a checkpoint: what its features depend on."""
    parts = (PARAMS_ITEM, ASSETS_ITEM)
    sums = {name: text for name, text in read_checksums(folder).items() if name.split("/")[0] in parts}
    if not sums:  # of OpenPI, which writes none
        files = [file for part in parts for file in (folder / part).rglob("*")] if folder.is_dir() else [folder]
        sums = {str(file.relative_to(folder.parent)): sha256(file) for file in files if file.is_file()}
    return hashlib.sha256("".join(f"{name} {sums[name]}\n" for name in sorted(sums)).encode()).hexdigest()


def load_novelty(folder: Path, file: Path | None = None) -> Novelty:
    """That of the checkpoint in this folder."""
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
