"""The fork of the benchmark: who changes sides hits the post, and who goes on as the chunk before began passes it."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def undecided(params: Any, delay: int) -> Any:
    """Chunks to one side, by a coin; a given step decides. `delay`: without one the whole rest of a chunk is given."""

    def sample(inputs: Any, before: Any, frozen: int, overlap: int, key: Any) -> Any:
        coin = np.asarray(jax.random.bernoulli(key, shape=(len(before),)))
        side = np.where(coin, 1.0, -1.0)
        given = min(frozen, delay) if delay else overlap
        if given:
            side = np.sign(before[:, 0, 0])
        return np.tile(side[:, None, None], (1, 8, 1))

    return sample


def test_only_chunks_that_go_on_pass_the_post(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import real_time_fork

    monkeypatch.setattr(real_time_fork, "cloned", lambda *_: None)
    monkeypatch.setattr(real_time_fork, "sampler", undecided)
    out = tmp_path / "fork.json"
    monkeypatch.setattr("sys.argv", ["real_time_fork.py", "--episodes", "100", "--out", str(out)])
    assert real_time_fork.main() == 0
    rows = {(row["latency_ms"], row["way"]): row for row in json.loads(out.read_text())}
    assert capsys.readouterr().out.count("\n") == len(rows) + 2 == 18
    for late in (0, 100, 200, 300):
        asynchronous, guided, trained = (rows[late, way] for way in ("asynchronous", "guided", "trained"))
        assert guided["success"]["successes"] == 100
        assert guided["switches"] == 0
        assert asynchronous["success"]["successes"] < 70
        assert trained["success"]["successes"] == (100 if late else asynchronous["success"]["successes"])
    assert rows[0, "asynchronous"]["switches"] > 4 > rows[300, "asynchronous"]["switches"] > 0.5


def test_a_late_chunk_is_taken_up_where_the_point_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that count their own steps: each move is the step of the chunk in force since it was asked for."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import real_time_fork

    def counting(inputs: Any, before: Any, frozen: int, overlap: int, key: Any) -> Any:
        assert (frozen, overlap) == (0, 0)
        return np.tile(np.arange(8)[None, :, None] / 10, (len(before), 1, 1))

    for late, waits, steps in (
        (0, False, [0] * 12),
        (2, False, [0, 1, 2, 2, 3, 4, 2, 3, 4, 2, 3, 4]),
        (3, True, [0, 1, 2, 3] * 3),
    ):
        _, moves = real_time_fork.drive(counting, 2, 0, late=late, told=False, waits=waits)
        np.testing.assert_allclose(moves[0] * 10, steps, err_msg=str((late, waits)))
