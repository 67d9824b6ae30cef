"""Charts show what was measured: places, gaps, intervals, extremes; axes are round; colours can be told apart."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pirl.report.curves import Chart, Line, render, smooth, thin_out
from pirl.report.markup import Markup, element, escape
from pirl.report.scales import axis, duration, nice_ticks, number, percent, span, tick
from pirl.report.style import DARK, LIGHT


def line(y: list[float], **options: object) -> Line:
    steps = np.arange(len(y), dtype=np.float64) * 10
    return Line(name="loss", steps=steps, x=steps, y=np.array(y, np.float64), **options)  # type: ignore[arg-type]


def drawn(*lines: Line, high: float = 100.0) -> str:
    last = max(float(one.x[-1]) for one in lines)
    return render(Chart(title="t", lines=lines, x_axis=span(0.0, last), y_axis=span(0.0, high), legend=False))


def strokes(page: str, kind: str) -> list[str]:
    return re.findall(rf'<path d="([^"]*)" class="{kind}[ "]', page)


def test_points_lie_where_their_values_are() -> None:
    assert strokes(drawn(line([0.0, 100.0, 25.0])), "line") == ["M0 1000L500 0L1000 750"]


def test_what_is_not_finite_is_a_gap_and_a_lone_point_a_dot() -> None:
    page = drawn(line([0.0, 50.0, math.nan, 50.0, math.nan, 0.0, 100.0] + [100.0] * 24))
    assert [part.count("L") for part in strokes(page, "line")[0].split("M")[1:]] == [1, 25]
    assert strokes(page, "dot") == ["M100 500h0"]
    assert "nan" not in page.lower()


def test_an_interval_is_an_area_around_the_curve() -> None:
    ends = (np.array([10.0, 20.0]), np.array([30.0, 60.0]))
    assert strokes(drawn(line([20.0, 40.0], band=ends)), "band") == ["M0 700L1000 400L1000 800L0 900Z"]


def test_smoothing_is_an_extra_behind_the_raw_curve() -> None:
    y = [float(i % 2) * 100 for i in range(60)]
    page = drawn(line(y))
    assert page.index('class="smooth') < page.index('class="line')
    heights = [float(point.split()[1]) for point in strokes(page, "smooth")[0][1:].split("L")]
    assert all(300 < height < 700 for height in heights)
    assert len(strokes(page, "line")[0].split("L")) == 60
    assert not strokes(drawn(line(y[:30])), "smooth")
    dense = drawn(line(y * 20))
    assert dense.index('class="line dense') < dense.index('class="smooth'), "else the extremes would bury it"


def test_smoothing_keeps_a_constant_and_gaps() -> None:
    y = np.full(100, 3.0)
    y[50] = np.nan
    np.testing.assert_allclose(smooth(y), y)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(20, 200))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float], limit: int) -> None:
    y = np.array(values)
    kept = thin_out(y, limit)
    assert len(kept) <= max(limit, 1)
    assert (np.diff(kept) > 0).all()
    assert {0, len(y) - 1} <= set(kept.tolist())
    assert (y[kept].min(), y[kept].max()) == (y.min(), y.max())


def test_thinning_keeps_gaps() -> None:
    y = np.arange(2000.0)
    y[700:1300] = np.nan
    kept = thin_out(y, 100)
    gap = np.flatnonzero(np.isnan(y[kept]))
    assert len(gap) >= 9
    assert np.isfinite(y[kept[gap[0] - 1]])


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-9 * abs(low):
        return
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    slack = 1e-6 * (high - low)
    assert all(low - slack <= value <= high + slack for value in ticks)
    step = np.diff(ticks)
    np.testing.assert_allclose(step, step[:1].repeat(len(step)), rtol=1e-3)


def test_ticks_of_an_everyday_range() -> None:
    assert nice_ticks(0, 60) == (0, 20, 40, 60)
    assert nice_ticks(0, 1200) == (0, 250, 500, 750, 1000)
    assert nice_ticks(0.003, 0.011) == (0.004, 0.006, 0.008, 0.01)


def test_an_axis_is_logarithmic_only_where_positive_values_span_decades() -> None:
    decades = axis(np.array([2e-5, 0.5]))
    assert decades.log
    assert decades.ticks == (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    np.testing.assert_allclose(decades.place(np.array([1e-5, 1e-3, 1.0])), [0, 0.4, 1])
    assert not axis(np.array([1.0, 900.0])).log
    assert not axis(np.array([0.0, 1e6])).log
    assert not axis(np.array([-1.0, 1e6])).log


def test_an_axis_holds_what_it_is_for() -> None:
    constant = axis(np.array([1.0, 1.0]))
    assert constant.low < 1 < constant.high
    assert axis(np.array([np.nan])).low == 0
    assert axis(np.array([0.0, 10.0])).low == 0, "what is never negative gets no negative axis"
    assert axis(np.array([-5.0, 5.0])).low < -5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (0.93512, "0.935"), (12.345, "12.3"), (-0.0613, "-0.0613"), (1234.6, "1,235"), (3.2e-5, "3.2e-5")),
        *((24_500_000, "24.5M"), (math.nan, "–"), (0.1, "0.1"), (150, "150"), (999.9, "1000")),
    ],
)
def test_numbers_have_the_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text


def test_other_words_for_numbers() -> None:
    assert [tick(v) for v in (0, 0.25, 2500, 1e6, 2e-5)] == ["0", "0.25", "2.5k", "1M", "2e-5"]
    assert [percent(v) for v in (0.525, 1.0, math.nan)] == ["52.5 %", "100 %", "–"]
    assert [duration(s) for s in (45, 200, 7500, 273_600)] == ["45 s", "3 min 20 s", "2 h 05 min", "3 d 04 h"]


def test_the_chart_is_told_in_words_and_to_the_pointer() -> None:
    page = drawn(line([10.0, math.nan, 30.04001]))
    assert 'aria-label="t: loss goes from 10 at step 0 to 30 at step 20"' in page
    tips = json.loads(re.findall(r'data-tips="([^"]*)"', page)[0].replace("&quot;", '"'))
    assert tips["lines"] == [["loss", 0, 0, [0, 0.5, 1], [0, 10, 20], [10, None, 30.04]]]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_their_background(colours: dict[str, str]) -> None:
    for background in ("--page", "--card"):
        for name in set(colours) - {"--page", "--card", "--line"}:
            bright, dark = sorted((luminance(colours[name]), luminance(colours[background])), reverse=True)
            # Colours of curves are those of the numbers beside them as well; on the page itself only text stands.
            if background == "--card" or name in ("--text", "--soft", "--good", "--bad"):
                assert (bright + 0.05) / (dark + 0.05) >= 4.5, (name, background)


def test_markup_escapes_text_once_and_drops_what_is_not_there() -> None:
    inner = element("b", "<&>")
    assert inner == "<b>&lt;&amp;&gt;</b>"
    assert element("p", inner, None, ["x", None], title='"', hidden=None, class_="c") == (
        '<p title="&quot;" class="c"><b>&lt;&amp;&gt;</b>x</p>'
    )
    assert element("meta", name="n") == '<meta name="n">'
    assert escape("a\x00b\ud800") == "a\N{REPLACEMENT CHARACTER}b?"
    assert isinstance(inner, Markup)
