"""Labels episodes with a success classifier on a checkpoint's features, where its held-out precision allows it.

It trains on all episodes whose outcome was recorded or labelled by a person, and labels the others. Thresholds come
only from episodes of the same origin (a policy's or not), because demonstrations do not show how a policy fails.

Human labels are never replaced or outvoted: where one exists, the classifier's labels do not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from pirl.data import labels, lerobot
from pirl.data.inspection import inspect_dataset
from pirl.data.labels import Choice, Label
from pirl.label import classifier
from pirl.label.classifier import Thresholds
from pirl.label.features import EpisodeFeatures
from pirl.names import POLICY
from pirl.rollout.evaluate import Rate
from pirl.training.acting import open_checkpoint

ENOUGH = 20
"""With fewer known episodes of the same origin than this, nothing is labelled."""
BY = "classifier"
"""Annotator name of these labels; a later run replaces them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Classified:
    """A classifier's held-out quality and its labels."""

    scores: Float[np.ndarray, "E"]
    """Held-out scores of its training episodes."""
    known: Bool[np.ndarray, "E"]
    """Whether each of them succeeded."""
    alike: Bool[np.ndarray, "E"]
    """Whether each has the same origin (a policy or not) as the episodes to label; only these set the thresholds."""
    limits: Thresholds
    """Score thresholds for success and failure."""
    said: Mapping[int, tuple[float, bool | None]]
    """(score, label or None) of each unlabelled episode of the dataset."""

    def __str__(self) -> str:
        won, lost = int(self.known.sum()), int((~self.known).sum())
        called = [verdict for _, verdict in self.said.values()]
        count = int(self.alike.sum())
        enough = f"precision is judged on {count} of them, made as those to label were"
        few = f"only {count} of them were made as those to label were: label {ENOUGH} yourself; nothing is labelled"
        lines = [
            f"learned from {won} successes and {lost} failures, "
            f"held-out AUC {classifier.auc(self.scores, self.known):.3f}",
            few if count < ENOUGH else enough,
            *(self._side(kind) for kind in (True, False)),
            f"labelled {called.count(True)} successes and {called.count(False)} failures; left {called.count(None)} of "
            f"{len(called)} episodes to people",
        ]
        return "\n".join(lines)

    def _side(self, kind: bool) -> str:
        word, limit = ("success", self.limits.success) if kind else ("failure", self.limits.failure)
        if limit is None:
            return f"{word}: no score is trusted that far"
        over = self.alike & (self.scores >= limit if kind else self.scores <= limit)
        rate = Rate(successes=int((self.known[over] == kind).sum()), trials=int(over.sum()))
        low, high = rate.interval
        side = "from" if kind else "up to"
        return (
            f"{word} {side} {limit:.3f}: {rate.successes} of {rate.trials} held-out episodes are "
            f"({rate.value:.3f}, 95 % interval {low:.2f} to {high:.2f})"
        )


def classify(
    dataset: str, checkpoint: str, *, learn: Sequence[str] = (), precision: float = 0.95, write: bool = True
) -> Classified:
    """Label the episodes of `dataset` without an outcome; `learn` names further training datasets."""
    features = EpisodeFeatures(open_checkpoint(checkpoint))
    x, y, policies, asked = [], [], [], {}
    for name in dict.fromkeys([*(name for name in learn if name != dataset), dataset]):
        indices, rows = features.of(name)
        outcomes, open_, by_policy = known_outcomes(name)
        for index, row in zip(indices, rows, strict=True):
            if index in outcomes:
                x.append(row)
                y.append(outcomes[index])
                policies.append(by_policy)
            elif name == dataset and index in open_:
                asked[index] = row
    known, learned, alike = np.array(y, bool), np.array(x), np.array(policies, bool) == by_policy
    scores, limits = classifier.held_out_scores(learned, known), Thresholds(None, None)
    if alike.sum() >= ENOUGH:
        limits = classifier.thresholds(scores[alike], known[alike], precision)
    said: dict[int, tuple[float, bool | None]] = {}
    if asked:
        found = classifier.fit(learned, known).scores(np.stack(list(asked.values())))
        said = {index: (float(score), limits.call(score)) for index, score in zip(asked, found, strict=True)}
    if write:
        _write(lerobot.resolve(dataset), said)
    return Classified(scores=scores, known=known, alike=alike, limits=limits, said=said)


def known_outcomes(dataset: str) -> tuple[dict[int, bool], set[int], bool]:
    """(recorded or human outcomes by episode, episodes without either, whether a policy recorded them)."""
    found = inspect_dataset(dataset)
    verdicts = labels.newest(labels.read(found.root, dict(zip(found.indices, map(int, found.lengths), strict=True))))
    outcomes, open_ = {}, set()
    for index, success in zip(found.indices, found.success, strict=True):
        verdict = verdicts.get(index)
        if verdict is not None and not verdict.by_people:
            open_.add(index)
        elif success is not None:
            outcomes[index] = bool(success)
        elif verdict is None:
            open_.add(index)
    return outcomes, open_, POLICY in found.features


def _write(root: Path, said: Mapping[int, tuple[float, bool | None]]) -> None:
    """Write the labels, and withdraw earlier classifier labels of episodes that now get none."""
    lengths = {one.index: one.length for one in lerobot.read_meta(root).episodes}
    before = {index for index, one in labels.newest(labels.read(root, lengths)).items() if not one.by_people}
    for index, (score, success) in said.items():
        outcome: Choice | None = None if success is None else "success" if success else "failure"
        if outcome is not None or index in before:
            labels.append(root, Label(episode_index=index, by=BY, outcome=outcome, score=round(score, 4)))
