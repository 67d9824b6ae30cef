"""Human outcome labels: JSON lines, next to the dataset's own metadata.

The file is append-only and durable: `append` returns after fsync. A person's newest line about an episode is their
label. A line cut off by a crash was never acknowledged and is dropped. LeRobot ignores the file; `label_columns` turns
it into `next.success`, which LeRobot reads.
"""

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from pirl.data.schema import parse_json
from pirl.errors import DataError, listing
from pirl.files import sync

LABELS_FILE = "meta/pirl_labels.jsonl"
MAX_NAME = 80
BEST_QUALITY = 5

Choice = Literal["success", "failure", "unsure"]
"""A judgement of an episode."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """One person's label of one episode."""

    episode_index: int
    """The dataset's index of the episode."""
    by: str
    """Name of the annotator."""
    outcome: Choice | None
    """The judgement. None withdraws this annotator's earlier label."""
    moment: int | None = None
    """First frame at which the task is done. None: the last frame."""
    quality: int | None = None
    """0 (useless) to 5 (perfect)."""
    at: str = ""
    """Time of the label, ISO 8601 in UTC."""
    score: float | None = None
    """A classifier's probability of success. None: a person's label."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The combined labels of one episode. Labels of people override those of classifiers."""

    labels: tuple[Label, ...]
    """The newest label of each annotator (person or classifier)."""

    @property
    def by_people(self) -> tuple[Label, ...]:
        """Labels by people."""
        return tuple(label for label in self.labels if label.score is None)

    @property
    def counted(self) -> tuple[Label, ...]:
        """Labels that decide."""
        return self.by_people or self.labels

    @property
    def conflict(self) -> bool:
        """Whether annotators disagree."""
        return {"success", "failure"} <= {label.outcome for label in self.counted}

    @property
    def success(self) -> bool | None:
        """The outcome; None if annotators disagree or all are unsure."""
        said = {label.outcome for label in self.counted} - {"unsure"}
        return None if len(said) != 1 else said == {"success"}

    @property
    def moment(self) -> int | None:
        """The earliest labelled first frame of success, if any."""
        return min((label.moment for label in self.counted if label.moment is not None), default=None)

    def __str__(self) -> str:
        return ", ".join(f"{label.by} {label.outcome}" for label in self.labels)


def parse(entry: Any, *, where: str, lengths: Mapping[int, int]) -> Label:
    """Parse a label from JSON and validate it against the episodes' lengths."""

    def refuse(problem: str) -> DataError:
        hint = '{"episode_index": 3, "by": "ann", "outcome": "success", "moment": 41, "quality": 4}; moment and quality'
        return DataError(f"{where}: {problem}", hint=f"expected {hint} may be null")

    if not isinstance(entry, dict) or not {"episode_index", "by", "outcome"} <= set(entry):
        raise refuse("not a label")
    index, by, outcome = entry["episode_index"], entry["by"], entry["outcome"]
    moment, quality, at = entry.get("moment"), entry.get("quality"), entry.get("at", "")
    score = entry.get("score")
    if type(index) is not int or index not in lengths:
        raise refuse(f"episode {index!r} is not in the dataset, which has {len(lengths)} episodes")
    if not isinstance(by, str) or not by.strip() or len(by) > MAX_NAME or not by.isprintable():
        raise refuse(f"by is {by!r}, expected a name of 1 to {MAX_NAME} printable characters")
    if outcome is not None and outcome not in get_args(Choice):
        raise refuse(f"outcome is {outcome!r}, expected one of {', '.join(get_args(Choice))}")
    if moment is not None and (type(moment) is not int or not 0 <= moment < lengths[index] or outcome != "success"):
        raise refuse(f"moment is {moment!r}, expected a frame of a success, 0 to {lengths[index] - 1}")
    if quality is not None and (type(quality) is not int or not 0 <= quality <= BEST_QUALITY):
        raise refuse(f"quality is {quality!r}, expected 0 to {BEST_QUALITY}")
    if not isinstance(at, str):
        raise refuse(f"at is {at!r}, expected a time")
    if score is not None and (not isinstance(score, int | float) or isinstance(score, bool) or not 0 <= score <= 1):
        raise refuse(f"score is {score!r}, expected a probability")
    return Label(
        episode_index=index, by=by.strip(), outcome=outcome, moment=moment, quality=quality, at=at, score=score
    )


def append(root: Path, label: Label) -> Label:
    """Append a label durably: it is on disk when this returns. Safe with concurrent processes."""
    label = Label(**{**asdict(label), "at": label.at or datetime.now(UTC).isoformat(timespec="milliseconds")})
    line = json.dumps(asdict(label), ensure_ascii=False) + "\n"
    path = root / LABELS_FILE
    with _locked(path) as file:
        end = _mend(file)
        try:
            _write(file, line.encode())
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, end)
            raise DataError(
                f"{path}: the label of episode {label.episode_index} was not stored ({error})",
                hint="free some space on the disk, then label the episode again; earlier labels are safe",
            ) from error
    return label


def read(root: Path, lengths: Mapping[int, int]) -> list[Label]:
    """All labels in file order; empty without a file."""
    path = root / LABELS_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})", hint="check its permissions") from error
    lines = content.split(b"\n")
    if not _whole(lines[-1]):
        lines.pop()  # cut off by a crash before it was acknowledged
    labels = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                entry = parse_json(line.decode(), where=where)
            except (UnicodeDecodeError, DataError) as error:
                raise DataError(f"{where}: not JSON ({error})", hint="repair or remove that line") from error
            labels.append(parse(entry, where=where, lengths=lengths))
    return labels


def newest(labels: Sequence[Label]) -> dict[int, Verdict]:
    """The verdict of each episode from every annotator's newest label; omits episodes with all labels withdrawn."""
    latest: dict[tuple[int, str], Label] = {}
    for label in labels:
        latest[label.episode_index, label.by] = label
    found: dict[int, list[Label]] = {}
    for label in latest.values():
        if label.outcome is not None:
            found.setdefault(label.episode_index, []).append(label)
    return {index: Verdict(labels=tuple(sorted(found[index], key=lambda one: one.by))) for index in sorted(found)}


def describe(verdicts: Mapping[int, Verdict], episodes: Collection[int]) -> str:
    """Labels per annotator, their results, and conflicts; empty if there are none."""
    if not verdicts:
        return ""
    people: dict[str, int] = {}
    for verdict in verdicts.values():
        for label in verdict.labels:
            people[label.by] = people.get(label.by, 0) + 1
    conflicts = {index: verdict for index, verdict in verdicts.items() if verdict.conflict}
    won, lost = (sum(one.success is kind for one in verdicts.values()) for kind in (True, False))
    unsure = len(verdicts) - won - lost - len(conflicts)
    lines = [
        f"labels ({LABELS_FILE}) by {', '.join(f'{by} ({count})' for by, count in sorted(people.items()))}: "
        f"{won} successes, {lost} failures, {unsure} unsure, {len(conflicts)} conflicts, "
        f"{len(set(episodes) - set(verdicts))} episodes without a label"
    ]
    if conflicts:
        lines += ["conflicts:", listing([f"episode {index}: {verdict}" for index, verdict in conflicts.items()])]
    return "\n".join(lines)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open the file for reading and appending, under an exclusive lock."""
    try:
        new = not path.exists()
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise DataError(
            f"{path}: labels cannot be stored there ({error})",
            hint="copy the dataset to a folder you may write to, and label that copy",
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        if new:
            sync(path.parent)
        yield file
    finally:
        os.close(file)


def _mend(file: int) -> int:
    """Complete or cut off an unfinished last line; returns the file's length."""
    content = os.pread(file, os.fstat(file).st_size, 0)
    tail = content[content.rfind(b"\n") + 1 :]
    if not tail:
        return len(content)
    if _whole(tail):  # an editor omitted the last newline
        _write(file, b"\n")
        return len(content) + 1
    os.ftruncate(file, len(content) - len(tail))
    return len(content) - len(tail)


def _whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
