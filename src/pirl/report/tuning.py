"""The page of a search: success over trials and against each searched setting. One HTML file without scripts."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pirl.report.curves import SIZE, drawing, labels, plot
from pirl.report.evaluations import RateShown
from pirl.report.markup import Child, Markup, element, join
from pirl.report.page import cards_row, document
from pirl.report.scales import Axis, axis, duration, nice_ticks, number, span, tick
from pirl.report.tables import Cell, bar, table

SHARE = "eval/success_rate"
"""The metric shown in per cent, on an axis from 0 to 1."""
DONE, PRUNED, BEST = "c0", "c5", "c1"


def build_tuning_page(results: Mapping[str, Any], commands: Sequence[str] = ()) -> str:
    """The page about a search's results.json; deterministic. `commands`: next steps to show."""
    trials = results["trials"]
    title = f"{results['recipe']} · {results['study']}"
    counts = {state: sum(trial["state"] == state for trial in trials) for state in ("done", "pruned", "failed", "open")}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    body = [
        element("h1", title),
        element("p", f"{len(trials)} trials of {results['steps']:,} steps: {told}. Seed {results['seed']}."),
        _cards(results),
        element("section", element("h2", "Over the trials"), element("p", _about(results)), _over_trials(results)),
        element(
            "section",
            element("h2", "Against each setting"),
            element("p", "Settings change together, and a few trials say little about one of them alone."),
            element("div", (_against(results, path) for path in results["space"]), class_="charts"),
        ),
        element("section", element("h2", "Trials"), element("div", _table(results), class_="box")),
    ]
    if commands:
        lines = join(*(element("p", element("code", command)) for command in commands))
        body.append(element("section", element("h2", "Next"), element("div", lines, class_="box")))
    return document(f"{title} – pirl tune", body)


def _about(results: Mapping[str, Any]) -> str:
    episodes = f"{results['episodes']} " if results["episodes"] else ""
    return (
        f"{results['metric']} of the last evaluation, on {episodes}validation states, with its 95 % interval where "
        "there is one. Grey: pruned, at the evaluation that ended it. The line is the best so far. The best of many is "
        "partly luck: measure it on test states."
    )


def _last(trial: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The last evaluation of a finished or pruned trial, else None."""
    judged = trial["state"] in ("done", "pruned") and trial["evaluations"]
    return trial["evaluations"][-1] if judged else None


def _best(results: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((trial for trial in results["trials"] if trial["number"] == results["best"]), None)


def _shown(results: Mapping[str, Any], value: int | float) -> str:
    return f"{number(100 * value)} %" if results["metric"] == SHARE else number(value)


def _cards(results: Mapping[str, Any]) -> Markup:
    cards: list[tuple[str, Markup | None, str]] = []
    best = _best(results)
    last = None if best is None else _last(best)
    if best is not None and last is not None:
        text = f"{results['metric']} of trial {best['number']}, the best"
        cards.append((_shown(results, last["value"]), _bar(results, last, 1), text))
    first = _last(results["trials"][0]) if results["trials"] else None
    if first is not None:
        cards.append((_shown(results, first["value"]), _bar(results, first, 0), "of trial 0: the recipe as it is"))
    spent = sum(trial["seconds"] or 0.0 for trial in results["trials"])
    cards.append((duration(spent), None, "over all trials"))
    return cards_row(cards)


def _bar(results: Mapping[str, Any], last: Mapping[str, Any], colour: int) -> Markup | None:
    if results["metric"] != SHARE or last["low"] is None:
        return None
    return bar(RateShown(value=last["value"], low=last["low"], high=last["high"]), colour)


def _values_axis(results: Mapping[str, Any]) -> Axis:
    """The y axis: 0 to 1 for the success rate, else fitted to the values."""
    if results["metric"] == SHARE:
        return span(0.0, 1.0)
    return axis(np.array([last["value"] for trial in results["trials"] if (last := _last(trial))], np.float64))


def _over_trials(results: Mapping[str, Any]) -> Markup:
    trials = results["trials"]
    y_axis = _values_axis(results)
    x_axis = Axis(low=-0.5, high=max(len(trials) - 0.5, 0.5), ticks=_whole_ticks(len(trials)))
    steps, top = "", -math.inf
    for trial in trials:
        if trial["state"] == "done" and (last := _last(trial)) is not None and last["value"] > top:
            x, y = _place(x_axis, trial["number"]), _flip(y_axis, last["value"])
            steps += f"H{x}V{y}" if steps else f"M{x} {y}"
            top = last["value"]
    line = element("path", d=f"{steps}H{SIZE}", class_=f"line {BEST}") if steps else None
    marks = [_mark(results, trial, x_axis, trial["number"], y_axis) for trial in trials]
    x_labels = [(tick(value), value) for value in x_axis.ticks]
    figure = _figure(results["metric"], "trial ", x_labels, x_axis, y_axis, [line, *marks], large=True)
    return element("div", figure, class_="charts")


def _whole_ticks(count: int) -> tuple[float, ...]:
    return tuple(value for value in nice_ticks(0, max(count - 1, 1), 10) if float(value).is_integer() and value < count)


def _against(results: Mapping[str, Any], path: str) -> Markup:
    """The chart of one setting: ranges on a numeric axis, choices side by side."""
    item, y_axis = results["space"][path], _values_axis(results)
    values = item.get("values")
    if values is not None:
        x_axis = Axis(low=-0.5, high=len(values) - 0.5, ticks=tuple(map(float, range(len(values)))))
        x_labels = [(_text(value), float(i)) for i, value in enumerate(values)]
    else:
        x_axis = _range_axis(item["low"], item["high"], log=item["log"])
        x_labels = [(tick(value), value) for value in x_axis.ticks]
    marks = []
    for trial in results["trials"]:
        if path in trial["settings"]:
            value = trial["settings"][path]
            at = (
                value
                if values is None
                else next(i for i, one in enumerate(values) if one == value and type(one) is type(value))
            )
            marks.append(_mark(results, trial, x_axis, at, y_axis))
    return _figure(path, "", x_labels, x_axis, y_axis, marks)


def _range_axis(low: int | float, high: int | float, *, log: bool) -> Axis:
    """An axis over exactly the range. A logarithmic one labels 1, 2 and 5 of each decade, or else its ends."""
    if not log:
        return span(float(low), float(high))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_ones = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    ticks = tuple(value for value in round_ones if low <= value <= high)
    every = -(-len(ticks) // 5) or 1
    return Axis(low=float(low), high=float(high), log=True, ticks=ticks[::every] or (low, high))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _mark(
    results: Mapping[str, Any], trial: Mapping[str, Any], x_axis: Axis, at: int | float, y_axis: Axis
) -> Markup | None:
    """A dot with its interval and a tooltip."""
    last = _last(trial)
    if last is None:
        return None
    colour = BEST if trial["number"] == results["best"] else DONE if trial["state"] == "done" else PRUNED
    x, y = _place(x_axis, at), _flip(y_axis, last["value"])
    settings = ", ".join(f"{path} {_text(value)}" for path, value in trial["settings"].items())
    told = element("title", f"trial {trial['number']}, {trial['state']}: {_shown(results, last['value'])}\n{settings}")
    ends = None
    if last["low"] is not None:
        d = f"M{x} {_flip(y_axis, last['low'])}V{_flip(y_axis, last['high'])}"
        ends = element("path", d=d, class_=f"line thin {colour}")
    return join(ends, element("path", told, d=f"M{x} {y}h0", class_=f"dot {colour}"))


def _figure(
    title: str,
    counted: str,
    x_labels: Sequence[tuple[str, int | float]],
    x_axis: Axis,
    y_axis: Axis,
    marks: Iterable[Markup | None],
    *,
    large: bool = False,
) -> Markup:
    """A chart in the style of reports."""
    grid = "".join(f"M0 {_flip(y_axis, value)}H{SIZE}" for value in y_axis.ticks)
    y_labels = [(tick(value), value) for value in y_axis.ticks]
    drawn = drawing(element("path", d=grid, class_="grid"), marks)
    shown = plot(labels(y_labels, y_axis, "bottom"), drawn, labels(x_labels, x_axis, "left", counted))
    kind = f"chart{' large' if large else ''}"
    return element("figure", element("figcaption", element("b", title)), shown, class_=kind)


def _place(on: Axis, value: int | float) -> str:
    return f"{SIZE * float(on.place(np.array([value], np.float64))[0]):.4g}"


def _flip(on: Axis, value: int | float) -> str:
    """A y position; SVG's y axis points down."""
    return f"{SIZE * (1 - float(on.place(np.array([value], np.float64))[0])):.4g}"


def _table(results: Mapping[str, Any]) -> Markup:
    rows: list[tuple[Child, list[Cell]]] = []
    for trial in results["trials"]:
        last = _last(trial)
        value = (
            Markup("–") if last is None else join(element("b", _shown(results, last["value"])), _bar(results, last, 0))
        )
        cells: list[Cell] = [("value", value), ("state", trial["state"])]
        cells += [(path, element("code", _text(trial["settings"].get(path)))) for path in results["space"]]
        cells.append(("time", "–" if trial["seconds"] is None else duration(trial["seconds"])))
        cells.append(("why", trial["reason"]))
        name = f"{trial['number']}" + (", the best" if trial["number"] == results["best"] else "")
        rows.append((name, cells))
    return table(rows, "trial")
