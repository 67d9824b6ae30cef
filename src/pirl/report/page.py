"""The report page: one self-contained HTML file."""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pirl.errors import ConfigError
from pirl.files import write_text
from pirl.report import films, tables
from pirl.report.curves import COLOURS
from pirl.report.evaluations import Evaluation
from pirl.report.held_out import held_out_charts
from pirl.report.markup import Child, Markup, element
from pirl.report.naming import Names
from pirl.report.panels import sections
from pirl.report.plots import Steps, metric_chart, success_chart
from pirl.report.run import Run, read_runs
from pirl.report.scales import duration, percent
from pirl.report.style import SCRIPT, style
from pirl.text import size

GENERATOR = "pirl report"
"""Marks a page as pirl's, so that it may be overwritten."""
Part = tuple[str, str, Sequence[Markup | None]]
"""(id, title, content) of a section."""


def build_page(runs: Sequence[Run], recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """The page about one or several runs; deterministic given their files.

    `recipes` maps recipe names to configurations (plain data) with which the runs' own are compared.
    """
    names = Names(runs)
    found: list[str] = []
    body = [part for part in _parts(runs, names, recipes, found) if part[2]]
    noted = [f"{name}: {text}" for name, run in zip(names.runs, runs, strict=True) for text in run.notes] + found
    if noted:
        body.append(("notes", "Notes", [element("ul", (element("li", text) for text in noted))]))
    title = " · ".join(names.runs)
    return document(
        f"{title} – pirl report",
        [
            element("h1", title),
            element("p", tables.subtitle(runs)),
            element("nav", (element("a", heading, href=f"#{id}") for id, heading, _ in body), aria_label="Sections"),
            _switches(names.runs) if len(runs) > 1 else _cards(runs[0]),
            *(element("section", element("h2", heading), *parts, id=id) for id, heading, parts in body),
        ],
        runs=len(runs),
        script=SCRIPT,
    )


def write_report(runs: Sequence[Path], file: Path) -> Path:
    """Write a report about one or several run folders, as `pirl report` does; returns the file."""
    return write_page(file, build_page(read_runs(runs), {}))


def write_page(file: Path, page: str) -> Path:
    """Write a page atomically; overwrites an earlier report, but no other file."""
    file = file.expanduser()
    try:
        if file.exists() and not is_report(file):
            raise ConfigError(f"{file} exists and is not a report of pirl", hint="name another file with --out")
        write_text(file, page)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}", hint="name another file with --out") from error
    return file


def is_report(file: Path) -> bool:
    """Whether pirl wrote the file."""
    with file.open("rb") as opened:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in opened.read(1000)


def _parts(
    runs: Sequence[Run], names: Names, recipes: Mapping[str, Mapping[str, Any]], notes: list[str]
) -> Iterator[Part]:
    """All possible sections; the caller drops those without content."""
    over = Steps(runs)
    if len(runs) > 1:
        heading = "Before and after" if any(run.success(0) for run in runs) else "Runs"
        yield "runs", heading, [element("div", tables.table(tables.run_rows(runs, names.runs), "run"), class_="box")]
    yield "success", "Success", list(success_chart(runs, names.runs, over))
    yield "evaluations", "Evaluations", list(tables.evaluation_tables(_evaluations(runs), names))
    yield "films", "Films", list(_films(runs, names, notes))
    yield "held-out", "Held-out episodes", list(held_out_charts(runs, names.runs, notes))
    for section in sections(name for run in runs for name in run.series):
        charts = (metric_chart(panel, runs, names.runs, over) for panel in section.panels)
        content = [element("p", section.about) if section.about else None, element("div", charts, class_="charts")]
        if section.folded:
            content = [element("details", element("summary", f"{len(section.panels)} more"), *content)]
        yield section.id, section.title, content
    yield "settings", "Settings", list(_settings(runs, names.runs, recipes))
    yield "pictures", "First batch", list(_first_batches(runs, names.runs, notes))
    yield "about", "About", list(_about(runs, names.runs))


def _cards(run: Run) -> Markup:
    """The headline numbers: success, steps, episodes, time."""
    cards: list[tuple[str, Markup | None, str]] = []
    first, last = run.success(0), run.success(-1)
    if first is not None and last is not None:
        single = first[0] == last[0]
        value = percent(last[1].value) if single else f"{percent(first[1].value)} → {percent(last[1].value)}"
        when = f"at step {last[0]:,}" if single else f"success at step {first[0]:,} → {last[0]:,}"
        known = tables.interval(last[1])
        cards.append((value, tables.bar(last[1]), f"{when}{f'; now {known}' if known else ''}"))
    cards.append((f"{run.last_step:,}", None, "steps" + (f" of {run.total_steps:,}" if run.total_steps else "")))
    if run.episodes is not None:
        cards.append((f"{run.episodes:,}", None, "episodes practised"))
    if run.seconds is not None:
        cards.append((duration(run.seconds), None, "from start to last record"))
    return cards_row(cards)


def cards_row(cards: Iterable[tuple[str, Markup | None, str]]) -> Markup:
    """A row of cards, each with a large value, an optional bar, and a description."""
    shown = (
        element("div", element("b", value), more, element("span", text), class_="card") for value, more, text in cards
    )
    return element("div", shown, class_="cards")


def _switches(names: Sequence[str]) -> Markup:
    """Checkboxes that hide and show runs, in CSS alone."""
    boxes = (
        element("label", element("input", type="checkbox", id=f"show{i}", checked=True), name, class_=f"c{i % COLOURS}")
        for i, name in enumerate(names)
    )
    return element("div", boxes, class_="runs", role="group", aria_label="Runs shown")


def _evaluations(runs: Sequence[Run]) -> list[tuple[int, Evaluation]]:
    """(colour, evaluation), each once: in its run's colour, or grey for evaluations of runs not on this page."""
    own = [(i % COLOURS, evaluation) for i, run in enumerate(runs) for evaluation in run.evaluations]
    asked = [evaluation.asked for _, evaluation in own]
    others = []
    for _, evaluation in own:
        if evaluation.other is not None and evaluation.other.asked not in asked:
            asked.append(evaluation.other.asked)
            others.append((COLOURS - 1, evaluation.other))
    return [*others, *own]


def _films(runs: Sequence[Run], names: Names, notes: list[str]) -> Iterator[Markup]:
    paired, alone, missing = films.choose(runs)
    if paired:
        yield element("p", "Each row starts from the same initial state.")
    rows = [*paired, *films.by_policy(alone, names)]
    if rows:
        yield element("div", (films.show(row, names, notes) for row in rows), class_="rows")
    if missing:
        yield element(
            "p", f"{missing} more were left out: a page holds {films.MOST_FILMS} films, {size(films.BUDGET)}."
        )
    for evaluation in (evaluation for run in runs for evaluation in run.evaluations):
        whose = names.policy(evaluation)
        strip = evaluation.strip and films.picture(evaluation.strip, f"films of {whose}, time to the right", notes)
        if strip:
            yield element("details", element("summary", f"{whose}, as pictures"), strip, class_="wide")


def _settings(runs: Sequence[Run], names: Sequence[str], recipes: Mapping[str, Mapping[str, Any]]) -> Iterator[Markup]:
    for run, name in zip(runs, names, strict=True):
        if not run.config:
            continue
        if len(runs) > 1:
            yield element("h3", name)
        if run.recipe not in recipes:
            yield element("p", f"There is no recipe {run.recipe} here to compare with.")
            continue
        changes = tables.config_changes(recipes[run.recipe], run.config)
        if not changes:
            yield element("p", f"All as in the recipe {run.recipe}.")
            continue
        rows = [
            (element("code", path), [("recipe", element("code", old)), ("this run", element("code", new))])
            for path, old, new in changes
        ]
        yield element("p", f"What differs from the recipe {run.recipe}.")
        yield element("div", tables.table(rows, "setting"), class_="box")


def _first_batches(runs: Sequence[Run], names: Sequence[str], notes: list[str]) -> Iterator[Markup]:
    shown = []
    for run, name in zip(runs, names, strict=True):
        if run.first_batch is not None:
            image = films.picture(run.first_batch, f"first batch of {name}", notes)
            shown += [
                element("h3", name) if len(runs) > 1 else None,
                element("div", image, class_="wide") if image else None,
            ]
    pictures = [one for one in shown if one is not None]
    if pictures:
        yield element("p", "What the model was shown: a column per sample, a row per camera.")
        yield from pictures


def _about(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Markup]:
    for run, name in zip(runs, names, strict=True):
        if len(runs) > 1:
            yield element("h3", name)
        yield element("div", tables.facts(run), class_="box")


def document(title: str, body: Iterable[Child], *, runs: int = 0, script: str = "") -> str:
    """The HTML document of a page about `runs` runs. Its security policy forbids requests and all other scripts."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'; img-src data:; media-src data:"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(style(runs))),
    )
    page = element("body", element("main", *body), element("script", Markup(script)) if script else None)
    return f"<!doctype html>\n{element('html', head, page, lang='en')}\n"
