"""`pirl report`: one file, in the place of nothing but an earlier report, without jax."""

import subprocess
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest

from pirl import text
from pirl.cli import app
from pirl.config_io import write_yaml
from pirl.recipes import get_config

MakeRun = Callable[..., Path]

WITHOUT_JAX = """
import sys
sys.modules["jax"] = None
from pirl.cli.app import main
code = main(sys.argv[1:])
print("HEAVY", [name for name in ("jaxlib", "pyarrow", "av", "PIL", "orbax", "matplotlib") if name in sys.modules])
sys.exit(code)
"""


def test_a_report_is_written_into_its_run_and_may_be_replaced(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run()
    assert app.main(["report", str(folder)]) == 0
    file = folder / "report.html"
    size = file.stat().st_size
    assert capsys.readouterr() == (f"{file} ({text.size(size)})\n", "")
    (folder / "metrics.jsonl").write_text("")
    assert app.main(["report", str(folder)]) == 0
    assert file.stat().st_size < size
    assert [child.name for child in folder.iterdir() if child.name.startswith(".")] == []


def test_other_files_are_not_replaced(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "thesis.html"
    target.write_text("<!doctype html><p>mine")
    assert app.main(["report", str(make_run()), "--out", str(target)]) == 1
    assert "is not a report of pirl" in capsys.readouterr().err
    assert target.read_text() == "<!doctype html><p>mine"
    assert app.main(["report", str(tmp_path / "debug/first"), "--out", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_several_runs_are_reported_here(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert app.main(["report", str(make_run("a/x")), str(make_run("b/x")), "--open"]) == 0
    assert capsys.readouterr().out.startswith("report.html (")
    assert "a · b" in (tmp_path / "report.html").read_text()
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_the_real_recipe_is_compared_and_damage_is_told(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    (folder / "config.yaml").unlink()
    write_yaml(folder / "config.yaml", get_config("debug"))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7')
    assert app.main(["report", str(folder)]) == 0
    assert "warning: first: metrics.jsonl: the last line is cut off and was ignored" in capsys.readouterr().err
    page = (folder / "report.html").read_text()
    assert "All as in the recipe debug." in page
    assert "the last line is cut off and was ignored" in page


def test_what_is_no_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["report", str(tmp_path)]) == 1
    assert "holds none of metrics.jsonl, config.yaml, eval.json" in capsys.readouterr().err


def test_jax_is_not_needed(make_run: MakeRun) -> None:
    command = [sys.executable, "-c", WITHOUT_JAX, "report", str(make_run())]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("HEAVY []\n")
