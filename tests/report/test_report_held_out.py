"""What training measured on held-out episodes, as pictures."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pirl.report.curves import Chart
from pirl.report.held_out import _charts
from pirl.report.page import build_page
from pirl.report.run import read_run

FOUND = {
    "step": 60,
    "rows": 6,
    "metrics": {"held_out/auc": 0.9, "held_out/auc_by_chance": 0.8},
    "episodes": [
        {
            "episode": number,
            "success": success,
            "length": 30,
            "steps": [5, 15, 25],
            "q": [0.2, 0.5, 0.9],
            "q_spread": [0.1, 0.1, 0.1],
            "returns": [0.3, None, 1.0],
        }
        for number, success in ((4, True), (9, False), (11, True))
    ],
    "action_error": {
        "not_failed": {"robot_units": [0.1, 0.2], "normalised": [1.0, 1.0], "by_step": [0.5, None]},
        "failures": {"robot_units": [0.3, 0.4], "normalised": [1.0, 1.0], "by_step": [0.7, 0.8]},
    },
    "auc_by_phase": [None, 0.6, 0.7, 0.8, 1.0],
    "calibration": [{"predicted": 0.1, "returned": 0.3, "count": 3}, {"predicted": 0.9, "returned": 0.8, "count": 3}],
}


def charts() -> dict[str, Chart]:
    return {chart.title: chart for chart in _charts(FOUND, 0)}


def test_every_picture_is_there(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "held_out.json").write_text(json.dumps(FOUND))
    page = build_page([read_run(folder)], {})
    assert "At step 60, on 6 rows of 3 episodes (2 successes, 1 failures, 0 unlabelled)." in page
    for title in charts():
        assert f"<b>{title}</b>" in page


def test_calibration_draws_returns_over_values() -> None:
    line, diagonal = charts()["calibration"].lines
    assert (line.x.tolist(), line.y.tolist()) == ([0.1, 0.9], [0.3, 0.8])
    assert diagonal.x.tolist() == diagonal.y.tolist()


def test_phases_without_pairs_are_gaps() -> None:
    line, chance = charts()["successes against failures"].lines
    assert line.x.tolist() == pytest.approx([10, 30, 50, 70, 90])
    assert line.y.tolist()[1:] == [0.6, 0.7, 0.8, 1.0]
    assert line.y[0] != line.y[0]
    assert set(chance.y) == {0.8}


def test_the_first_of_each_outcome_is_traced() -> None:
    found = charts()
    assert found["value along a success"].hint.startswith("episode 4;")
    assert found["value along a failure"].hint.startswith("episode 9;")
    value, returned = found["value along a success"].lines
    assert value.band is not None
    assert value.band[0].tolist() == pytest.approx([0.1, 0.4, 0.8])
    assert returned.y.tolist()[::2] == [0.3, 1.0]


def test_errors_are_told_by_dimension_and_by_step() -> None:
    good, bad = charts()["action error by dimension"].lines
    assert (good.y.tolist(), bad.y.tolist()) == ([0.1, 0.2], [0.3, 0.4])
    assert charts()["action error by step of the chunk"].x_word == "step"


@pytest.mark.parametrize("content", ["[]", "{", json.dumps({"step": "x"}), json.dumps({**FOUND, "episodes": 3})])
def test_a_damaged_file_is_named_and_left_out(content: str, make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "held_out.json").write_text(content)
    page = build_page([read_run(folder)], {})
    assert "held_out.json" in page.partition('id="notes"')[2]


def test_a_policy_without_a_critic_has_errors_alone() -> None:
    episodes = [{key: one[key] for key in ("episode", "success", "length", "steps")} for one in FOUND["episodes"]]  # type: ignore[attr-defined]
    found = {key: FOUND[key] for key in ("step", "rows", "metrics", "action_error")} | {"episodes": episodes}
    assert [chart.title for chart in _charts(found, 0)] == [
        "action error by dimension",
        "action error by step of the chunk",
    ]
