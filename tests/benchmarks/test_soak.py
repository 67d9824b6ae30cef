"""Figures of a soak in pieces."""

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import soak

    return soak


def piece(number: int, *, minutes: int, level: float, growth: float, step: int) -> list[dict[str, float]]:
    """Memory that leaps while caches fill, in the first quarter of an hour, and then grows by so much a minute."""
    return [
        {
            "piece": number,
            "time": 1e9 * number + 60.0 * minute,
            "step": step + 50 * minute,
            "rss_mib": level + growth * minute - (400 - 20 * minute if minute < 15 else 0),
        }
        for minute in range(minutes + 1)
    ]


def test_growth_is_measured_within_pieces_after_their_warm_up(soak: ModuleType) -> None:
    """Levels differ between pieces by more than memory grows, and the leap at the start of each is larger still."""
    samples = [
        *piece(1, minutes=120, level=700.0, growth=0.1, step=0),
        *piece(2, minutes=90, level=650.0, growth=0.1, step=6000),
        *piece(3, minutes=1, level=10.0, growth=5.0, step=10500),  # too short to count
    ]
    found = soak.growth(samples)
    assert (found["pieces"], found["hours"], found["steps"]) == (3, 3.517, 10550)
    assert (found["hours_past_warm_up"], found["steps_past_warm_up"]) == (2.5, 7500)
    assert found["rss_mib"]["per_hour"] == pytest.approx(6.0)
    assert found["rss_mib"]["per_1000_steps"] == pytest.approx(2.0)
    assert found["rss_mib"]["first"] == pytest.approx(703.0)
    assert found["rss_mib"]["least"] == pytest.approx(653.0)


def test_nothing_is_said_of_growth_before_there_are_samples(soak: ModuleType) -> None:
    assert soak.growth([])["hours"] == 0
    assert "rss_mib" not in soak.growth(piece(1, minutes=1, level=1.0, growth=1.0, step=0))


def test_pieces_are_counted_from_the_samples_that_are_there(soak: ModuleType, tmp_path: Path) -> None:
    assert soak.read(tmp_path / "samples.jsonl") == []
    (tmp_path / "samples.jsonl").write_text('{"piece": 1, "time": 0.0, "step": 0, "rss_mib": 1.0}\n' * 3)
    assert [one["piece"] for one in soak.read(tmp_path / "samples.jsonl")] == [1, 1, 1]
    figures = soak.write_report(tmp_path, ["train"], 130)
    assert (figures["pieces"], figures["exit_code"]) == (1, 130)
    assert (tmp_path / "report.json").read_text().startswith("{")
