"""The loop that the benchmark writes is a loop, corrects where it says so, and its table holds what was measured."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "results"))
import improve
from pirl.improve.config import LoopConfig
from pirl.improve.processes import fill


def measured(folder: Path, rates: Sequence[float], corrected: int) -> None:
    """What a finished loop leaves."""
    finished = []
    for number, rate in enumerate(rates, 1):
        part = folder / "generations" / f"{number:03d}" / "evaluation"
        part.mkdir(parents=True)
        (part / "eval.json").write_text(success(rate))
        finished.append({"number": number, "decision": "promote", "collected": {"corrected": corrected}})
    (folder / "state.json").write_text(json.dumps({"finished": finished}))


def success(rate: float) -> str:
    return json.dumps({"result": {"success": {"rate": rate, "low": rate - 0.1, "high": rate + 0.1}}})


def test_loops_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[Sequence[str]] = []
    monkeypatch.setattr(improve, "run", lambda product, words: called.append(words))
    start = tmp_path / "7" / "start"
    start.mkdir(parents=True)
    (start / "eval.json").write_text(success(0.5))
    measured(tmp_path / "7" / "corrected", [0.8, 0.95], 9)
    measured(tmp_path / "7" / "control", [0.45, 0.5], 0)
    assert improve.main(["--seeds", "7", "--folder", str(tmp_path)]) == 0
    assert [words[0] for words in called] == ["record", "norm-stats", "train", "eval", "improve", "improve"]
    table = capsys.readouterr().out.splitlines()[-2:]
    assert table[0].startswith("| 7 | corrected | 0.500 (0.40 to 0.60) | 0.800 (0.70 to 0.90), promote | 0.950")
    assert table[0].endswith("| 18 episodes |")
    assert table[1].startswith("| 7 | control | 0.500")

    for name, supervised in (("corrected", "0.5"), ("control", "0.0")):
        config: dict[str, Any] = yaml.safe_load((tmp_path / "7" / f"{name}.yaml").read_text())
        lists = {one: tuple(config[one]) for one in ("demonstrations", "train", "serve")}
        loop = LoopConfig(**config | lists)
        assert loop.start.endswith("7/runs/bc_tabletop/start/2400")
        assert loop.robot is not None
        values = dict(server="ws://x", dataset="D", episodes="2", inits="1,2", seed="7", purpose="compare")
        said = " ".join(fill(loop.robot, values))
        assert f"--server ws://x --record D --inits 1,2 --seed 7 --purpose compare --supervise {supervised}" in said
    recipes = [yaml.safe_load((tmp_path / f"7/{name}.yaml").read_text())["recipe"] for name in ("corrected", "control")]
    assert recipes == ["acrlpd_tabletop", "bc_tabletop"]
