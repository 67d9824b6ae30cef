"""Makes charts from runs: colours and dashes per run and metric, on one shared axis."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from pirl.report.curves import Chart, Line, render
from pirl.report.markup import Markup, element
from pirl.report.panels import EVALUATED, SUCCESS_RATES, Panel
from pirl.report.run import SUCCESS, SUCCESS_HIGH, SUCCESS_LOW, Run
from pirl.report.scales import Axis, span

UNEQUAL = 4
"""Runs whose lengths differ by more than this factor are drawn over their percentage of steps."""


class Steps:
    """The shared x axis: steps, or the percentage of each run if lengths differ too much."""

    def __init__(self, runs: Sequence[Run]) -> None:
        lengths = [run.last_step for run in runs if run.last_step > 0]
        self.shares = bool(lengths) and max(lengths) > UNEQUAL * min(lengths)
        self.unit = " %" if self.shares else ""
        self.axis: Axis = span(0.0, 100.0 if self.shares else float(max(lengths, default=1)))
        self.remark = (
            f" The runs took {min(lengths):,} to {max(lengths):,} steps: they are drawn over the share of each."
            if self.shares
            else ""
        )

    def place(self, run: Run, steps: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """Steps in the axis's units."""
        return 100 * steps / max(run.last_step, 1) if self.shares else steps


def success_chart(runs: Sequence[Run], names: Sequence[str], over: Steps) -> Iterator[Markup]:
    """Success over steps with its interval, and success during collection as thin lines; empty without data."""
    lines = _lines(SUCCESS_RATES, runs, names, over, scale=100.0)
    if not lines:
        return
    evaluations = [run.config.get("evaluation") for run in runs]
    asked = {(e.get("episodes"), e.get("split")) for e in evaluations if isinstance(e, Mapping)}
    how = "".join(f", on {count} {split} states, always the same" for count, split in asked) if len(asked) == 1 else ""
    yield element("p", f"Evaluations during training{how}; the band is the 95 % Wilson interval.{over.remark}")
    chart = Chart(
        title="success rate",
        lines=lines,
        x_axis=over.axis,
        y_axis=span(0.0, 100.0),
        unit=" %",
        x_unit=over.unit,
        large=True,
        legend=len(runs) > 1 or len(lines) > 1,
    )
    others = [panel for panel in EVALUATED if any(panel.metrics[0] in run.series for run in runs)]
    more = (metric_chart(panel, runs, names, over) for panel in others)
    yield element("div", render(chart), more, class_="charts")


def metric_chart(panel: Panel, runs: Sequence[Run], names: Sequence[str], over: Steps) -> Markup:
    """The chart of one panel, with all runs."""
    lines = _lines(panel.metrics, runs, names, over, scale=100.0 if panel.share else 1.0)
    chart = Chart(
        title=panel.heading,
        hint=panel.hint,
        lines=lines,
        x_axis=over.axis,
        unit=" %" if panel.share else "",
        x_unit=over.unit,
        legend=len(runs) > 1 or len(lines) > 1,
    )
    return render(chart)


def _lines(
    metrics: Sequence[str], runs: Sequence[Run], names: Sequence[str], over: Steps, *, scale: float
) -> list[Line]:
    """The curves. With one run, colours distinguish metrics; with several, colours runs and dashes metrics."""
    several = len(runs) > 1
    there = [metric for metric in metrics if any(metric in run.series for run in runs)]
    lines = []
    for i, run in enumerate(runs):
        for place, metric in enumerate(there):
            if metric not in run.series:
                continue
            series = run.series[metric]
            line = Line(
                name=metric if not several else names[i] if len(there) == 1 else f"{names[i]} {metric}",
                steps=series.steps,
                x=over.place(run, series.steps),
                y=series.values * scale,
                band=_band(run, scale) if metric == SUCCESS else None,
                run=i,
                colour=i if several else place,
                dash=place if several else 0,
                thin=metric in SUCCESS_RATES[1:],
            )
            lines.append(line)
    return lines


def _band(run: Run, scale: float) -> tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]] | None:
    """The interval of each evaluation during training."""
    if SUCCESS_LOW not in run.series or SUCCESS_HIGH not in run.series:
        return None
    low, high = (
        np.array([run.at(name, step) for step in run.series[SUCCESS].steps], np.float64) * scale
        for name in (SUCCESS_LOW, SUCCESS_HIGH)
    )
    return low, high
