"""Line charts as HTML: curves are a stretched SVG, all labels are text of the page.

So a chart fills any width with readable labels, on a phone as on a wide screen. Strokes keep their width
(`non-scaling-stroke`), and dots are zero-length strokes with round caps, which do not become ellipses.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int

from pirl.report.markup import Child, Markup, element, join
from pirl.report.scales import Axis, axis, number, tick

COLOURS = 6
"""Number of colours in the style sheet; further lines repeat them with another dash."""
MOST_POINTS = 400
"""Longer curves are thinned out, keeping their extremes."""
DOTS_UP_TO = 24
"""Curves of at most this many points show each point as a dot."""
SMOOTH_FROM = 40
"""Curves of at least this many points also get a smoothed curve."""
SIZE = 1000
"""Side of the SVG view box."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    """Name in the legend."""
    steps: Float64[np.ndarray, "n"]
    """Steps of its points."""
    x: Float64[np.ndarray, "n"]
    """Positions on the x axis: steps, or percentage of the run."""
    y: Float64[np.ndarray, "n"]
    """Values; NaN makes a gap."""
    band: tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]] | None = None
    """Lower and upper ends of an interval."""
    run: int = 0
    """Index of its run."""
    colour: int = 0
    dash: int = 0
    """Dash pattern; 0 is solid."""
    thin: bool = False
    """Whether it is drawn thin, for curves shown only for comparison."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one axis."""

    title: str
    lines: Sequence[Line]
    x_axis: Axis
    y_axis: Axis | None = None
    """None: fitted to the curves."""
    hint: str = ""
    """Its meaning, or what to look for."""
    unit: str = ""
    x_unit: str = ""
    x_word: str = "step"
    """Name of the x axis's unit."""
    large: bool = False
    """Whether it spans the whole width."""
    legend: bool = True
    """Whether to show a legend; otherwise the title shows the latest value."""


def render(chart: Chart) -> Markup:
    """The chart as an HTML figure."""
    lines = chart.lines
    seen = [values for line in lines for values in (line.y, *(line.band or ()))]
    y_axis = chart.y_axis or axis(np.concatenate(seen) if seen else np.zeros(0))
    last = None if chart.legend else join(_last(line, chart.unit) for line in chart.lines)
    runs = {line.run for line in lines}
    hidden_with = f" r{runs.pop()}" if len(runs) == 1 else ""  # a chart of a single run is hidden with the run
    counted = "" if chart.x_unit else f"{chart.x_word} "
    return element(
        "figure",
        element("figcaption", element("b", chart.title), last, element("small", chart.hint) if chart.hint else None),
        plot(
            labels(_ticks(y_axis, chart.unit), y_axis, "bottom"),
            _svg(lines, chart.x_axis, y_axis),
            labels(_ticks(chart.x_axis, chart.x_unit), chart.x_axis, "left", counted),
            role="img",
            aria_label=_summary(chart),
        ),
        _legend(chart) if chart.legend else None,
        class_=f"chart{' large' if chart.large else ''}{hidden_with}",
        data_tips=_tips(lines, chart),
    )


def plot(y_labels: Iterable[Markup], drawn: Markup, x_labels: Iterable[Markup], **attributes: str) -> Markup:
    """An SVG with HTML labels beside and below it."""
    return element(
        "div",
        element("div", y_labels, class_="ylabels", aria_hidden="true"),
        element("div", drawn, class_="canvas"),
        element("div", x_labels, class_="xlabels", aria_hidden="true"),
        class_="plot",
        **attributes,
    )


def drawing(*parts: Child) -> Markup:
    """An SVG that stretches to fill its place on the page."""
    return element("svg", *parts, viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", aria_hidden="true")


def labels(of: Iterable[tuple[str, int | float]], on: Axis, side: str, first: str = "") -> Iterator[Markup]:
    """Labels at values of an axis; `first` is prepended to the first one and names the unit."""
    for text, value in of:
        place = float(on.place(np.array([value], np.float64))[0])
        yield element("span", first + text, style=f"{side}:{100 * place:.2f}%")
        first = ""


def _ticks(on: Axis, unit: str) -> list[tuple[str, float]]:
    return [(tick(value) + unit, value) for value in on.ticks]


def _svg(lines: Sequence[Line], x_axis: Axis, y_axis: Axis) -> Markup:
    grid = "".join(f"M0 {_flip(place)}H{SIZE}" for place in y_axis.place(np.array(y_axis.ticks)))
    zero = y_axis.place(np.zeros(1))[0] if not y_axis.log and y_axis.low < 0 < y_axis.high else None
    return drawing(
        element("path", d=grid, class_="grid") if grid else None,
        element("path", d=f"M0 {_flip(zero)}H{SIZE}", class_="zero") if zero is not None else None,
        (_band(line, x_axis, y_axis) for line in lines),
        (_curves(line, x_axis, y_axis) for line in lines),
    )


def _curves(line: Line, x_axis: Axis, y_axis: Axis) -> Markup:
    """The curve, its dots, and its smoothed version: pale and behind it, or in front of a very dense curve."""
    style, dash = f"c{line.colour % COLOURS} r{line.run}", f"d{(line.dash + line.colour // COLOURS) % 4}"
    kept = thin_out(line.y)
    x, y = x_axis.place(line.x[kept]), y_axis.place(line.y[kept])
    dots = [part[0] for part in _parts(y) if len(part) == 1]  # isolated points, which no stroke shows
    if len(y) <= DOTS_UP_TO and not line.thin:
        dots = np.flatnonzero(np.isfinite(y)).tolist()
    soft = _path(x, y_axis.place(smooth(line.y)[kept]), "smooth", style) if len(line.y) >= SMOOTH_FROM else None
    dense = len(kept) < len(line.y)
    kind = f"line{' thin' if line.thin else ''}{' dense' if dense else ''}"
    return join(
        None if dense else soft,
        _path(x, y, kind, f"{dash} {style}"),
        soft if dense else None,  # in front: a thinned curve of extremes would cover it
        element("path", d="".join(f"M{_point(x[i], y[i])}h0" for i in dots), class_=f"dot {style}") if dots else None,
    )


def _path(x: Float64[np.ndarray, "n"], y: Float64[np.ndarray, "n"], kind: str, style: str) -> Markup | None:
    """A stroke through the finite points."""
    parts = [f"M{'L'.join(_point(x[i], y[i]) for i in part)}" for part in _parts(y) if len(part) > 1]
    return element("path", d="".join(parts), class_=f"{kind} {style}") if parts else None


def _band(line: Line, x_axis: Axis, y_axis: Axis) -> Markup | None:
    """The area of the interval."""
    if line.band is None:
        return None
    low, high = (y_axis.place(end) for end in line.band)
    x = x_axis.place(line.x)
    d = ""
    for part in _parts(low + high):
        there = [_point(x[i], high[i]) for i in part]
        back = [_point(x[i], low[i]) for i in reversed(part)]
        d += f"M{'L'.join([*there, *back])}Z"
    return element("path", d=d, class_=f"band c{line.colour % COLOURS} r{line.run}") if d else None


def _parts(y: Float64[np.ndarray, "n"]) -> Iterator[list[int]]:
    """Runs of consecutive finite points, as indices."""
    part: list[int] = []
    for i, fine in enumerate(np.isfinite(y)):
        if fine:
            part.append(i)
        elif part:
            yield part
            part = []
    if part:
        yield part


def smooth(y: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Moving average over about a fifteenth of the curve; gaps stay gaps."""
    half = max(1, len(y) // 30)
    fine = np.isfinite(y)
    window = np.ones(2 * half + 1)
    total = np.convolve(np.where(fine, y, 0.0), window)[half:-half]
    return np.where(fine, total / np.maximum(np.convolve(fine, window)[half:-half], 1.0), np.nan)


def thin_out(y: Float64[np.ndarray, "n"], limit: int = MOST_POINTS) -> Int[np.ndarray, "m"]:
    """Indices of at most about `limit` points that preserve a curve's look: its ends, and minimum, maximum and first
    gap of equal stretches.
    """
    if len(y) <= limit:
        return np.arange(len(y))
    keep = {0, len(y) - 1}
    for stretch in np.array_split(np.arange(len(y)), (limit - 2) // 3):
        fine = stretch[np.isfinite(y[stretch])]
        if len(fine) < len(stretch):
            keep.add(int(stretch[~np.isfinite(y[stretch])][0]))
        if len(fine):
            keep |= {int(fine[np.argmin(y[fine])]), int(fine[np.argmax(y[fine])])}
    return np.array(sorted(keep))


def _legend(chart: Chart) -> Markup:
    return element("ul", (_entry(line, chart.unit) for line in chart.lines), class_="key")


def _entry(line: Line, unit: str) -> Markup:
    return element("li", _swatch(line), element("span", line.name), _last(line, unit), class_=f"r{line.run}")


def _last(line: Line, unit: str) -> Markup | None:
    """The latest finite value, if any."""
    fine = line.y[np.isfinite(line.y)]
    return element("output", number(float(fine[-1])) + unit, class_=f"c{line.colour % COLOURS}") if len(fine) else None


def _swatch(line: Line) -> Markup:
    dash = f"d{(line.dash + line.colour // COLOURS) % 4}"
    style = f"line{' thin' if line.thin else ''} {dash} c{line.colour % COLOURS}"
    stroke = element("path", d="M0 5H22", class_=style)
    return element("svg", stroke, viewBox="0 0 22 10", class_="swatch", aria_hidden="true")


def _summary(chart: Chart) -> str:
    """The chart as text, for screen readers."""

    def point(line: Line, i: int) -> str:
        return f"{number(float(line.y[i]))}{chart.unit} at {chart.x_word} {number(float(line.steps[i]))}"

    told = []
    for line in chart.lines:
        fine = np.flatnonzero(np.isfinite(line.y)).tolist()
        if fine:
            told.append(f"{line.name} goes from {point(line, fine[0])} to {point(line, fine[-1])}")
        else:
            told.append(f"{line.name} has no finite value")
    return f"{chart.title}: " + "; ".join(told)


def _tips(lines: Sequence[Line], chart: Chart) -> str:
    """Data that the script shows at the pointer, as JSON."""
    told = []
    for line in lines:
        kept = thin_out(line.y)
        places = [round(float(x), 4) for x in chart.x_axis.place(line.x[kept])]
        steps, values = ([_digits(x) for x in numbers[kept]] for numbers in (line.steps, line.y))
        told.append([line.name, line.colour % COLOURS, line.run, places, steps, values])
    return json.dumps({"unit": chart.unit, "word": chart.x_word, "lines": told}, separators=(",", ":"))


def _digits(value: float) -> float | int | None:
    """Four significant digits; None if not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _point(x: float, y: float) -> str:
    return f"{x * SIZE:.4g} {_flip(y)}"


def _flip(y: float) -> str:
    """A y position, clipped to the chart; SVG's y axis points down."""
    return f"{(1 - min(max(y, -0.02), 1.02)) * SIZE:.4g}"
