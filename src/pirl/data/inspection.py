"""A human-readable summary of a dataset before training."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int
from PIL import Image, ImageDraw

from pirl import text
from pirl.data import journal, labels, lerobot, outcomes, video
from pirl.data.config import DataConfig
from pirl.data.dataset import MODEL_SIZE, read_interventions, read_outcomes, read_tasks
from pirl.data.fit import fitting_discount, median_length
from pirl.data.outcomes import OutcomeRule
from pirl.data.rows import read_dataset
from pirl.data.schema import Feature
from pirl.data.takeovers import actors, takeovers
from pirl.errors import DataError
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED

_CAPTION = 16  # pixels above each image


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A dataset's summary."""

    root: Path
    """Its folder."""
    version: str
    """LeRobot format version."""
    robot: str
    """Robot type, as declared."""
    fps: int | float
    """Frames per second."""
    lengths: Int[np.ndarray, "E"]
    """Frames of each episode."""
    indices: tuple[int, ...]
    """`episode_index` of each episode."""
    features: Mapping[str, Feature]
    """Features by key."""
    cameras: tuple[str, ...]
    """Keys of the image features."""
    tasks: Mapping[str, int]
    """Number of episodes by instruction."""
    outcomes: str
    """Result of the outcome rule, or why none applies."""
    labels: str
    """Labels of `pirl label` by annotator, and conflicts; empty without labels."""
    interventions: str
    """How often operators acted in place of the policy, and the effect on training; empty without the column."""
    success: tuple[bool | None, ...]
    """Success of each episode; None if unlabelled."""
    stored_bytes: int
    """Size of its data and video files."""
    decoded_bytes: int
    """Size of all frames, decoded to the model's size."""

    @property
    def steps(self) -> float:
        """Length of a median success; of a median episode if no success is known."""
        return median_length(self.lengths, self.success)

    def __str__(self) -> str:
        frames = int(self.lengths.sum())
        stored, decoded = text.size(self.stored_bytes), text.size(self.decoded_bytes)
        width = max(map(len, self.features))
        rows = [f"  {key:<{width}}  {one.dtype:<8} {one.shape}" for key, one in self.features.items()]
        return "\n".join(
            [
                f"{self.root}: LeRobot {self.version}, robot {self.robot or 'unknown'}, {self.fps} fps",
                f"{len(self.lengths)} episodes of {self.lengths.min()} to {self.lengths.max()} frames, {frames} in all "
                f"({frames / self.fps:.1f} s)",
                "features:",
                *rows,
                "tasks:",
                *(f"  {count:>5} episodes  {task}" for task, count in self.tasks.items()),
                f"cameras: {', '.join(self.cameras) or 'none'}",
                *([self.labels] if self.labels else []),
                self.outcomes,
                f"a discount that fits: {fitting_discount(self.steps):.4g} "
                f"(1 - 1/N for a median of {self.steps:.0f} steps)",
                *([self.interventions] if self.interventions else []),
                f"{stored} on disk, {decoded} decoded for a model that sees {MODEL_SIZE}x{MODEL_SIZE}",
            ]
        )


def inspect_dataset(
    path: str | Path, outcome: OutcomeRule | None = None, settings: DataConfig | None = None
) -> Inspection:
    """Read and check everything but the images. `settings` only supplies the rules for takeovers."""
    meta, columns = read_dataset(lerobot.resolve(path))
    lerobot.check_files(meta, meta.cameras)
    tasks = read_tasks(meta, columns)
    verdicts = labels.newest(labels.read(meta.root, {one.index: one.length for one in meta.episodes}))
    success: tuple[bool | None, ...] = (None,) * len(meta.episodes)
    ended = [np.zeros(episode.length, bool) for episode in meta.episodes]
    try:
        rule, found = read_outcomes(meta, columns, outcome or OutcomeRule())
        said = outcomes.describe(rule, found, columns)
        success = tuple(one.success for one in found)
        ended = [one.terminated | one.truncated for one in found]
    except DataError as error:
        said = f"outcomes: {error}"
    flags = read_interventions(meta, columns)
    by_episode = [] if flags is None else [flags[one.start : one.start + one.length] for one in meta.episodes]
    spans = [span for episode in meta.episodes for span in (episode.data, *episode.cameras.values())]
    pixels = sum(np.prod(video.frame_size(meta, camera, MODEL_SIZE)) for camera in meta.cameras)
    return Inspection(
        root=meta.root,
        version=meta.version,
        robot=meta.robot,
        fps=meta.fps,
        lengths=meta.lengths,
        indices=tuple(one.index for one in meta.episodes),
        features=meta.features,
        cameras=meta.cameras,
        tasks={task: tasks.count(task) for task in dict.fromkeys(tasks)},
        outcomes=said,
        labels=labels.describe(verdicts, [one.index for one in meta.episodes]),
        interventions=describe_interventions(by_episode, ended, settings or DataConfig()),
        success=success,
        stored_bytes=sum(journal.opened(meta.root, one, os.stat).st_size for one in {span.path for span in spans}),
        decoded_bytes=int(pixels) * 3 * int(meta.lengths.sum()),
    )


def describe_interventions(
    flags: Sequence[Bool[np.ndarray, "_"]], ended: Sequence[Bool[np.ndarray, "_"]], settings: DataConfig
) -> str:
    """Counts of corrections (runs of flagged frames), and how imitation and critics use them."""
    if not flags:
        return ""
    corrections = sum(int(np.diff(part.astype(np.int8), prepend=0).clip(0).sum()) for part in flags)
    touched = sum(bool(part.any()) for part in flags)
    window, reward = settings.takeover_window, settings.takeover_cost
    who = np.concatenate([actors(part, ends, window) for part, ends in zip(flags, ended, strict=True)])
    mine, own, blamed = (int((who == kind).sum()) for kind in (CORRECTED, AUTONOMOUS, BLAMED))
    taken = sum(len(takeovers(part)) for part in flags)
    meaning = {
        "ignore": "every frame is an ordinary transition",
        "failure": f"the policy loses the task in the first blamed frame, with a reward of {reward:g}; "
        "what the person does is an ordinary transition",
    }
    return "\n".join(
        [
            f"interventions: {corrections} in {touched} of {len(flags)} episodes, "
            f"{mine} of {len(who)} frames ({mine / len(who):.1%})",
            f"  blamed on the policy (data.takeover_window {window}): {blamed} frames before {taken} takeovers",
            f"  DAgger imitates {mine} corrected frames, the policy's other {own} with agent.policy_weight",
            f"  critics (data.takeover {settings.takeover}): {meaning[settings.takeover]}",
        ]
    )


def draw_ends(path: str | Path, success: Sequence[bool | None], *, rows: int = 4, size: int = 160) -> Image.Image:
    """First and last frames of the first `rows` episodes of each outcome, every camera, to check outcomes by eye."""
    meta = lerobot.read_meta(lerobot.resolve(path))
    if not meta.cameras:
        raise DataError(f"{meta.root}: has no cameras, so there is nothing to draw", hint="leave out --pictures")
    groups = {"success": True, "failure": False, "unlabelled": None}
    chosen = [
        (word, episode)
        for word, kind in groups.items()
        for episode in [one for one, found in zip(meta.episodes, success, strict=True) if found is kind][:rows]
    ]
    sheet = Image.new("RGB", (2 * len(meta.cameras) * size, len(chosen) * (size + _CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (word, episode) in enumerate(chosen):
        top = row * (size + _CAPTION)
        for column, camera in enumerate(meta.cameras):
            frames = video.read_frames(meta, episode, camera, size=size, letterbox=True)
            for side, number in enumerate((0, len(frames) - 1)):
                left = (2 * column + side) * size
                name = camera.removeprefix("observation.images.")
                draw.text((left + 3, top + 2), f"{episode.index} {word}, {name} {number}", fill="black")
                sheet.paste(Image.fromarray(frames[number]), (left, top + _CAPTION))
    return sheet
