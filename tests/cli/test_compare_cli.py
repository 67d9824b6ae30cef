"""`pirl compare`: mistakes on its command line, and a real comparison in an environment."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from collecting_runs import ENV, ROLLOUT
from pirl.agents.config import BCConfig
from pirl.cli import app
from pirl.config_io import write_yaml
from small_runs import compiled_once, small_run


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    capsys.readouterr()
    assert app.main(["compare", *words]) == code
    return capsys.readouterr().err


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    both = ("--agents", "BC", "--seeds", "0")
    assert "--agents names at least one" in refused(capsys, "bc_tabletop", code=2)
    assert "--seeds names at least one" in refused(capsys, "bc_tabletop", "--agents", "BC", code=2)
    assert "seeded by the comparison" in refused(capsys, "bc_tabletop", *both, "--seed", "3", code=2)
    assert "debug has no environment" in refused(capsys, "bc_tabletop", "debug", *both)
    assert "--name is 'a/b'" in refused(capsys, "bc_tabletop", *both, "--name", "a/b")
    assert "did you mean: BC" in refused(capsys, "bc_tabletop", "--agents", "BCC", "--seeds", "0")
    assert "name each one once" in refused(capsys, "bc_tabletop", *both, "0")
    assert not list(tmp_path.iterdir())


def test_a_comparison_in_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real run in its own process, then `pirl eval` in another; the same command starts neither again."""
    config = replace(small_run(tmp_path, BCConfig(augment=False)), name="walk", env=ENV, num_train_steps=4)
    write_yaml(tmp_path / "walk.yaml", replace(config, rollout=replace(ROLLOUT, num_workers=1)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PIRL_TRUST", "collecting_runs")  # as --trust does
    words = ["compare", "walk.yaml", "--agents", "BC", "--seeds", "7", "--episodes", "6"]
    with compiled_once(tmp_path / "compiled") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert app.main(words) == 0
        folder = tmp_path / "compare" / "walk"
        run = folder / "walk" / "BC-seed-7"
        (result,) = json.loads((folder / "results.json").read_text())["runs"]
        evaluated = json.loads((run / "evaluations" / "compare" / "eval.json").read_text())
        assert result["result"]["value"] == evaluated["result"]["success"]["rate"]
        assert (evaluated["evaluation"]["split"], evaluated["evaluation"]["episodes"]) == ("test", 6)
        assert (folder / "curves.html").read_text().startswith("<!doctype html>")
        said = (folder / "walk" / "BC-seed-7.log").read_bytes()
        capsys.readouterr()
        assert app.main(words) == 0
        assert (folder / "table.md").read_text() in capsys.readouterr().out
        assert (folder / "walk" / "BC-seed-7.log").read_bytes() == said
