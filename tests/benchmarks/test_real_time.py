"""The benchmark of real-time chunking: a late chunk is taken up where the world is, and a continued one jumps less."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acting_runs import save_run
from pirl.data.normalize import NormStats
from pirl.recipes import get_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def stats(size: int) -> NormStats:
    return NormStats(mean=np.zeros(size), std=np.full(size, 0.3), q01=-np.ones(size), q99=np.ones(size))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fresh weights: every chunk is noise, so chunks that do not continue one another contradict."""
    recipe = get_config("bc_tabletop")
    model: Any = recipe.model
    small = {part: replace(getattr(model, part), depth=1) for part in ("vlm", "expert", "vision")}
    config = replace(
        recipe,
        model=replace(model, horizon=8, **small),
        data=replace(recipe.data, repo_ids=("me/walks",), critic_horizon=4),
        checkpoint=replace(recipe.checkpoint, base_dir=str(tmp_path_factory.mktemp("real_time"))),
    )
    return save_run(config, {1: 0.5}, stats={"state": stats(4), "actions": stats(3)})


def test_a_continued_chunk_jumps_less(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import real_time

    monkeypatch.setattr("sys.argv", ["real_time.py", str(checkpoint), "--episodes", "3", "--latencies", "0", "200"])
    assert real_time.main() == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    jumps = {(line[1].strip(), line[2].strip()): float(line[5]) for line in lines}
    assert list(jumps) == [(f"{ms} ms", way) for ms in (0, 200) for way in ("waits", "takes up", "guided")]
    assert jumps["0 ms", "guided"] < jumps["0 ms", "takes up"]
    assert jumps["200 ms", "guided"] < jumps["200 ms", "takes up"] / 2, "the steps until the reply arrives are kept"
    monkeypatch.setattr("sys.argv", ["real_time.py", str(checkpoint), "--episodes", "1", "--latencies", "400"])
    with pytest.raises(SystemExit, match="runs out"):
        real_time.main()
