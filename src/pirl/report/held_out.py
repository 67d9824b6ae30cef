"""Charts of the latest held-out metrics: calibration, values and action errors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from pirl.report.curves import Chart, Line, render
from pirl.report.markup import Markup, element
from pirl.report.run import Run
from pirl.report.scales import axis, span

_KINDS = {"not_failed": "episodes that did not fail", "failures": "failures"}
_OUTCOMES = {True: "success", False: "failure"}


def held_out_charts(runs: Sequence[Run], names: Sequence[str], notes: list[str]) -> Iterator[Markup]:
    """The charts of each run that has a held-out measurement."""
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        if not run.held_out:
            continue
        try:
            said, charts = _said(run.held_out), [render(chart) for chart in _charts(run.held_out, i)]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            notes.append(f"{name}: held_out.json is not what training writes and was left out")
            continue
        if len(runs) > 1:
            yield element("h3", name)
        yield element("p", said)
        yield element("div", charts, class_="charts")


def _said(found: Mapping[str, Any]) -> str:
    outcomes = [one["success"] for one in found["episodes"]]
    counts = f"{outcomes.count(True)} successes, {outcomes.count(False)} failures, {outcomes.count(None)} unlabelled"
    return f"At step {int(found['step']):,}, on {int(found['rows'])} rows of {len(outcomes)} episodes ({counts})."


def _charts(found: Mapping[str, Any], run: int) -> Iterator[Chart]:
    if bins := found.get("calibration"):
        yield _calibration(bins, run)
    if phases := found.get("auc_by_phase"):
        yield _auc(phases, found["metrics"].get("held_out/auc_by_chance"), run)
    for kind, word in _OUTCOMES.items():
        traced = next((one for one in found["episodes"] if one["success"] is kind and "q" in one), None)
        if traced is not None:
            yield _trace(traced, word, run)
    errors = found["action_error"]
    yield _errors("action error by dimension", "in the robot's units", "dimension", errors, "robot_units", run)
    yield _errors("action error by step of the chunk", "in normalised units", "step", errors, "by_step", run)


def _calibration(bins: Sequence[Mapping[str, Any]], run: int) -> Chart:
    """Mean return against value; on the diagonal they agree."""
    x, y = (_numbers([one[key] for one in bins]) for key in ("predicted", "returned"))
    both = axis(np.concatenate([x, y]))
    ends = np.array([both.low, both.high])
    return Chart(
        title="calibration",
        hint="mean return of rows with such a value, where the task ended; above the diagonal the critic is too low",
        lines=[
            _line("return", x, y, run=run),
            _line("perfect", ends, ends, run=run, colour=1, dash=1, thin=True),
        ],
        x_axis=span(both.low, both.high),
        y_axis=span(both.low, both.high),
        x_word="value",
    )


def _auc(phases: Sequence[int | float | None], by_chance: int | float | None, run: int) -> Chart:
    x = (np.arange(len(phases)) + 0.5) / len(phases) * 100
    lines = [_line("success above failure", x, _numbers(phases), run=run)]
    if by_chance is not None:
        ends = np.array([0.0, 100.0])
        lines.append(
            _line("chance stays below", ends, np.full(2, float(by_chance)), run=run, colour=1, dash=1, thin=True)
        )
    return Chart(
        title="successes against failures",
        hint="share of pairs at the same phase in which the success is worth more; 0.5 is chance",
        lines=lines,
        x_axis=span(0.0, 100.0),
        y_axis=span(0.0, 1.0),
        x_unit=" %",
        x_word="phase",
    )


def _trace(one: Mapping[str, Any], word: str, run: int) -> Chart:
    """Values and returns along one episode, with the ensemble's spread."""
    x, q, spread = (_numbers(one[key]) for key in ("steps", "q", "q_spread"))
    lines = [_line("value", x, q, run=run, band=(q - spread, q + spread))]
    returns = _numbers(one["returns"])
    if np.isfinite(returns).any():
        lines.append(_line("return", x, returns, run=run, colour=1, dash=1, thin=True))
    return Chart(
        title=f"value along a {word}",
        hint=f"episode {int(one['episode'])}; the band is the spread of the ensemble",
        lines=lines,
        x_axis=span(0.0, float(one["length"])),
    )


def _errors(title: str, hint: str, word: str, errors: Mapping[str, Any], key: str, run: int) -> Chart:
    lines = [
        _line(_KINDS[kind], np.arange(len(one[key]), dtype=np.float64), _numbers(one[key]), run=run, colour=i)
        for i, (kind, one) in enumerate(errors.items())
    ]
    last = max(max((len(line.x) for line in lines), default=1) - 1, 1)
    return Chart(title=title, hint=hint, lines=lines, x_axis=span(0.0, float(last)), x_word=word)


def _line(
    name: str,
    x: Float64[np.ndarray, "n"],
    y: Float64[np.ndarray, "n"],
    *,
    run: int,
    colour: int = 0,
    dash: int = 0,
    thin: bool = False,
    band: tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]] | None = None,
) -> Line:
    return Line(name=name, steps=x, x=x, y=y, run=run, colour=colour, dash=dash, thin=thin, band=band)


def _numbers(values: Sequence[int | float | None]) -> Float64[np.ndarray, "n"]:
    return np.array([np.nan if x is None else float(x) for x in values], np.float64)
