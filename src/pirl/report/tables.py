"""Tables of the page: success before and after, evaluations by task, changed settings."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pirl.config_io import diff
from pirl.report.curves import COLOURS
from pirl.report.evaluations import Evaluation, RateShown
from pirl.report.markup import Child, Markup, element, join
from pirl.report.naming import Names
from pirl.report.run import Run
from pirl.report.scales import duration, percent

Cell = tuple[str, Child]
"""(column name, content)."""


def table(rows: Sequence[tuple[Child, Sequence[Cell]]], first: str) -> Markup:
    """A table; in a narrow window each row becomes a block whose cells name their column."""
    columns = [name for name, _ in rows[0][1]] if rows else []
    return element(
        "table",
        element("thead", element("tr", (element("th", name, scope="col") for name in (first, *columns)))),
        element("tbody", (_row(name, cells) for name, cells in rows)),
    )


def _row(name: Child, cells: Sequence[Cell]) -> Markup:
    content = (element("td", element("div", child), data_label=column) for column, child in cells)
    return element("tr", element("th", name, scope="row"), content)


def rate(of: RateShown | None, colour: int = 0) -> Markup:
    """A success rate with its interval, as numbers and as a bar from 0 to 100 %."""
    if of is None or not math.isfinite(of.value):
        return Markup("–")
    counted = f" ({of.successes}/{of.trials})" if of.trials is not None else ""
    return join(element("b", percent(of.value)), element("small", f"{counted} {interval(of)}"), bar(of, colour))


def interval(of: RateShown) -> str:
    """Such as `48.1 to 56.9 %`; "" if unknown."""
    known = math.isfinite(of.low) and math.isfinite(of.high)
    return f"{percent(of.low).removesuffix(' %')} to {percent(of.high)}" if known else ""


def bar(of: RateShown, colour: int = 0) -> Markup:
    """The interval on a track from 0 to 100 %, with a mark at the value."""
    ends = (of.low, of.high) if math.isfinite(of.low) and math.isfinite(of.high) else (of.value, of.value)
    low, high, here = (100 * min(max(value, 0.0), 1.0) for value in (*ends, of.value))
    return element(
        "span",
        element("i", style=f"left:{low:.2f}%;width:{high - low:.2f}%"),
        element("em", style=f"left:{here:.2f}%"),
        class_=f"range c{colour}",
        aria_hidden="true",
    )


def change(before: RateShown, after: RateShown) -> Markup:
    """The change of success in percentage points, coloured only if the intervals do not overlap."""
    points = 100 * (after.value - before.value)
    text = f"{points:+.1f} points"
    if after.low > before.high:
        return element("b", text, class_="good")
    if after.high < before.low:
        return element("b", text, class_="bad")
    return join(element("span", text), element("small", " intervals overlap"))


def date(seconds: float) -> str:
    """Date and time in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "–"


def steps(run: Run) -> str:
    """Such as `800 of 800`."""
    total = run.total_steps
    return f"{run.last_step:,}" + (f" of {total:,}" if total is not None else "")


def run_rows(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[Child, list[Cell]]]:
    """One row per run: success before and after, steps, episodes, time."""
    rows: list[tuple[Child, list[Cell]]] = []
    evaluated = any(run.success(0) for run in runs)
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        first, last = run.success(0), run.success(-1)
        cells: list[Cell] = [("algorithm", run.algorithm or "–")]
        if evaluated:
            cells += [("before", _at(first, i)), ("after", _at(last, i))]
            both = first is not None and last is not None and last[0] > first[0]
            cells.append(("change", change(first[1], last[1]) if first and last and both else "–"))
        cells.append(("steps", steps(run)))
        cells.append(("episodes", "–" if run.episodes is None else f"{run.episodes:,}"))
        cells.append(("time", "–" if run.seconds is None else duration(run.seconds)))
        rows.append((element("span", name, class_=f"r{i}"), cells))
    return rows


def _at(found: tuple[int, RateShown] | None, colour: int) -> Markup:
    if found is None:
        return Markup("–")
    return join(rate(found[1], colour % COLOURS), element("small", f"step {found[0]:,}"))


def subtitle(runs: Sequence[Run]) -> str:
    """One line: algorithm or number of runs, time of the latest record, code revision."""
    latest = max((float(run.times.max()) for run in runs if len(run.times)), default=None)
    revisions = list(dict.fromkeys(str(run.metadata["revision"])[:12] for run in runs if run.metadata.get("revision")))
    told = [
        f"{len(runs)} runs" if len(runs) > 1 else f"{runs[0].algorithm} step {steps(runs[0])}".strip(),
        "" if latest is None else f"last record {date(latest)}",
        f"code {', '.join(revisions)}" if revisions else "",
    ]
    return " · ".join(text for text in told if text)


def facts(run: Run) -> Markup:
    """Recipe, run, time, code revision, versions and machine."""
    told: list[tuple[str, str]] = [("recipe", run.recipe), ("run", run.exp_name), ("algorithm", run.algorithm)]
    told.append(("steps", steps(run)))
    if len(run.times):
        told.append(("last record", date(float(np.max(run.times)))))
    told.append(("code", str(run.metadata.get("revision") or "")))
    versions = run.metadata.get("versions")
    if isinstance(versions, Mapping):
        told.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    told.append(("machine", str(run.metadata.get("platform") or "")))
    return element("dl", (join(element("dt", name), element("dd", text)) for name, text in told if text))


def evaluation_tables(evaluations: Sequence[tuple[int, Evaluation]], called: Names) -> Iterator[Markup]:
    """One table (tasks × policies) for each set of comparable evaluations, then the paired comparisons.

    `evaluations` are (colour, evaluation).
    """
    groups: dict[tuple[str, ...], list[tuple[int, Evaluation]]] = {}
    for colour, evaluation in evaluations:
        groups.setdefault(evaluation.question, []).append((colour, evaluation))
    for group in groups.values():
        asked = group[0][1].asked
        env = asked.get("env")
        where = env.get("type", "") if isinstance(env, Mapping) else ""
        yield element("h3", f"{where} {asked.get('split', '')} states, {asked.get('episodes', '?')} episodes".strip())
        columns = list(zip(called.policies([evaluation for _, evaluation in group]), group, strict=True))
        tasks = list(dict.fromkeys(task for _, evaluation in group for task in evaluation.tasks))
        rows: list[tuple[Child, list[Cell]]] = [
            ("all tasks", [(name, rate(one.success, colour)) for name, (colour, one) in columns])
        ]
        for task in tasks if len(tasks) > 1 else ():
            rows.append((task, [(name, rate(one.tasks.get(task), colour)) for name, (colour, one) in columns]))
        yield element("div", table(rows, "task"), class_="box")
    for _, evaluation in evaluations:
        if evaluation.comparison is not None and evaluation.other is not None:
            one, other = called.policy(evaluation), called.policy(evaluation.other)
            yield element("p", _compared(one, other, evaluation.comparison))


def _compared(one: str, other: str, found: Mapping[str, float]) -> str:
    def count(name: str) -> str:
        return f"{found.get(name, math.nan):.0f}"

    return (
        f"{one} against {other}, state by state: {100 * found.get('difference', math.nan):+.1f} points, "
        f"p = {found.get('p_value', math.nan):.2g} (McNemar, exact). Both succeed on {count('both')}, neither on "
        f"{count('neither')}, only the first on {count('only_this')}, only the second on {count('only_other')}."
    )


def config_changes(recipe: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(setting, the recipe's value, the run's value) for each setting that differs, except the run's name."""
    changes = [change for change in diff(recipe, config) if change.path not in ("exp_name", "name")]
    return [(path, _shown(before), _shown(after)) for path, before, after in changes]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
