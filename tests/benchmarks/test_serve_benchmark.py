"""The benchmark of the server measures real requests."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_row_is_of_requests_that_were_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serve

    words = ["--preset", "pi0_tiny", "--requests", "9", "--best-of", "1", "--no-real-time"]
    assert serve.main([*words, "--robots", "2", "--hz", "10", "--seconds", "1", "--max-batch", "1"]) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [line[1].strip() for line in lines] == [
        "one robot",
        "2 robots at 10 Hz",
    ]
    assert lines[0][5].strip() == "4"  # nine, without the first five
    for line in lines:
        half, most, model = (float(cell) for cell in line[2:5])
        assert 0 < model < half <= most
