"""Embedded videos: the same initial states side by side, up to a size budget."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pirl.report.evaluations import Evaluation, FilmFile
from pirl.report.markup import Markup, element
from pirl.report.naming import Names
from pirl.report.run import Run
from pirl.text import size

BUDGET = 8_000_000
"""Most bytes of video on a page; base64 makes them a third larger."""
MOST_FILMS = 24
"""Most videos on a page; they play at once, and more would stutter on a phone."""
LARGEST_PICTURE = 2_000_000
"""Most bytes of a single image."""
_PNG, _MP4 = b"\x89PNG\r\n\x1a\n", b"ftyp"


@dataclass(frozen=True, kw_only=True)
class Take:
    """A film with its evaluation and run."""

    film: FilmFile
    evaluation: Evaluation
    run: int
    """Index of its run on the page."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Films to show side by side."""

    title: str
    takes: tuple[Take, ...]

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(take.film.size for take in self.takes)


def choose(runs: Sequence[Run], budget: int = BUDGET) -> tuple[list[Row], list[Row], int]:
    """(rows of one initial state by several policies, single films, number of films that did not fit).

    Rows with several policies have priority, then smaller ones. Films of a policy that a run was compared with are
    included, unless that policy is on the page itself.
    """
    own = [(i, evaluation) for i, run in enumerate(runs) for evaluation in run.evaluations]
    asked = [evaluation.asked for _, evaluation in own]
    others = [(i, one.other) for i, one in own if one.other is not None and one.other.asked not in asked]
    takes = [
        Take(film=film, evaluation=evaluation, run=i) for i, evaluation in [*others, *own] for film in evaluation.films
    ]
    by_state: dict[tuple[str, str, int], list[Take]] = {}
    for take in takes:
        by_state.setdefault(take.film.state, []).append(take)
    rows = [
        Row(title=f"{state[1]} (episode {group[0].film.number})", takes=tuple(group))
        for state, group in by_state.items()
    ]
    fitting: list[Row] = []
    left, room = budget, MOST_FILMS
    for row in sorted(rows, key=lambda row: (len(row.takes) == 1, row.size)):
        if row.size <= left and len(row.takes) <= room:
            fitting.append(row)
            left, room = left - row.size, room - len(row.takes)
    shown = [row for row in rows if row in fitting]  # in the order of the evaluations
    paired = [row for row in shown if len(row.takes) > 1]
    alone = [row for row in shown if len(row.takes) == 1]
    return paired, alone, len(takes) - sum(len(row.takes) for row in shown)


def show(row: Row, names: Names, notes: list[str]) -> Markup:
    """A row of videos under its title."""
    alike = len({take.film.state for take in row.takes}) == 1
    return element(
        "div",
        element("h3", row.title),
        element("div", (_take(take, names, alike, notes) for take in row.takes), class_="reel"),
        class_="row" if alike else "row alone",
    )


def _take(take: Take, names: Names, alike: bool, notes: list[str]) -> Markup | None:
    """One video. Its caption adds what the row's title does not say: the policy or the task."""
    film, whose = take.film, names.policy(take.evaluation)
    outcome = "success" if film.success else "failure"
    source = _embed(film.file, "video/mp4", notes)
    if source is None:
        return None
    video = element(
        "video",
        src=source,
        autoplay=True,
        muted=True,
        loop=True,
        playsinline=True,
        controls=True,
        preload="auto",
        aria_label=f"{whose}: {outcome} after {film.length} steps",
    )
    caption = element(
        "figcaption",
        element("span", whose if alike else film.state[1], class_="whose"),
        element("span", f"{'✓' if film.success else '✗'} {outcome}, {film.length} steps", class_=f"badge {outcome}"),
    )
    return element("figure", video, caption, class_=f"film r{take.run}")


def picture(file: Path, description: str, notes: list[str]) -> Markup | None:
    """An embedded PNG; None, with a note, if it is unreadable or too large."""
    try:
        large = file.stat().st_size > LARGEST_PICTURE
    except OSError as error:
        notes.append(f"{file.name} cannot be read: {error.strerror}")
        return None
    if large:
        notes.append(f"{file.name} is larger than {size(LARGEST_PICTURE)} and was left out")
        return None
    source = _embed(file, "image/png", notes)
    return None if source is None else element("img", src=source, alt=description)


def _embed(file: Path, kind: str, notes: list[str]) -> Markup | None:
    """The file as a data URI; None, with a note, if its content is not of this type."""
    try:
        content = file.read_bytes()
    except OSError as error:
        notes.append(f"{file.name} cannot be read: {error.strerror}")
        return None
    fine = content.startswith(_PNG) if kind == "image/png" else content[4:8] == _MP4
    if not fine:
        notes.append(f"{file.parent.name}/{file.name} is not a file of type {kind} and was left out")
        return None
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")


def by_policy(rows: Sequence[Row], names: Names) -> Iterator[Row]:
    """Rows of single films, grouped by policy."""
    gathered: dict[str, list[Take]] = {}
    for row in rows:
        gathered.setdefault(names.policy(row.takes[0].evaluation), []).extend(row.takes)
    for label, takes in gathered.items():
        yield Row(title=label, takes=tuple(takes))
