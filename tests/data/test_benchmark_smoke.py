"""The benchmark runs from end to end; how fast things are is not a test's business."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pirl.data.lerobot import read_meta


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks/data.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_measures_what_it_says(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = dict(episodes=2, frames=25, height=48, width=64, batch_size=4, batches=3, random_reads=2)
    tiny = benchmark.Sizes(**sizes, consumer_ms=1.0, stats_episodes=2, stats_steps=20)
    monkeypatch.setattr(benchmark, "QUICK", tiny)
    words = ["--quick", "--dir", str(tmp_path / "data"), "--json", str(tmp_path / "numbers.json")]
    assert benchmark.main(words) == 0
    (root,) = (tmp_path / "data").iterdir()
    assert read_meta(root).lengths.tolist() == [25, 25]
    stored = json.loads((tmp_path / "numbers.json").read_text())
    results = {result["what"]: result for result in stored["results"]}
    assert stored["sizes"]["episodes"] == 2
    targets = {what: result["target"] for what, result in results.items() if result["target"] is not None}
    assert targets == {
        "first pass, per time step": 20.0,
        "warm sample, tier ram": 0.25,
        "warm sample, tier disk": 0.25,
        "gather against memcpy": 2.0,
    }
    assert all(result["value"] >= 0 for result in results.values())
    assert all(
        result["met"] == (result["value"] <= result["target"]) for what, result in results.items() if what in targets
    )
    shown = capsys.readouterr().out
    assert all(f"| {what} " in shown for what in results)
    # The dataset that was kept is used again.
    written = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    assert benchmark.main(words) == 0
    assert "writing, per frame" not in capsys.readouterr().out
    assert written == {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
