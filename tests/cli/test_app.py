"""The command's frame: verbs are lazy, mistakes are answered with what was meant, exceptions become exit codes."""

import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import pirl
from pirl.cli import app
from pirl.errors import DataError, PirlWarning

HELPS = [
    [],
    *([verb] for verb in app.VERBS),
    *(["inspect", what] for what in ("recipe", "checkpoint", "data")),
    *(["export", form] for form in ("openpi", "pytorch")),
]

# Runs the command in this process with every import of jax failing, and tells which heavy packages were imported.
WITHOUT_JAX = """
import sys
sys.modules["jax"] = None
from pirl.cli.app import main
code = main(sys.argv[1:])
print("HEAVY", [name for name in ("numpy", "jaxlib", "pyarrow", "av", "orbax", "rich") if name in sys.modules])
sys.exit(code)
"""


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_needs_nothing_heavy_and_shows_examples(words: list[str]) -> None:
    before = cpu_of_children()
    command = [sys.executable, "-c", WITHOUT_JAX, *words, "--help"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "HEAVY []" in done.stdout
    usage, examples = done.stdout.split("examples:\n")
    assert usage.startswith(f"usage: {' '.join(['pirl', *words])} ")
    shown = [line for line in examples.splitlines() if line.startswith("  pirl ")]
    assert len(shown) >= 2
    assert all(line.startswith(f"  {' '.join(['pirl', *words])}") for line in shown)
    assert cpu_of_children() - before < 0.5


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_the_examples_in_the_help_are_accepted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([*words, "--help"]) == 0
    for line in capsys.readouterr().out.split("examples:\n")[1].splitlines():
        example = line.strip().split("   ")[0].split()
        if example[:1] == ["pirl"] and "VERB" not in example:
            args = app.build_parser(example[1:]).parse_args(example[1:])
            assert args.verb == example[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pirl {pirl.__version__}\n"


def test_every_verb_module_answers_to_its_name() -> None:
    for name in app.VERBS:
        assert name == app.load_verb(name).NAME


def test_no_verb_shows_the_verbs_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(verb in shown.err for verb in app.VERBS)


@pytest.mark.parametrize(
    ("words", "usage", "hint"),
    [
        (["docter"], "pirl", "did you mean: doctor"),
        (["zzz"], "pirl", f"known are: {', '.join(sorted(app.VERBS))}"),
        (["--versoin"], "pirl", "--versoin: did you mean --version?"),
        (["doctor", "--jsno"], "pirl doctor", "--jsno: did you mean --json?"),
        (["doctor", "--time-out=3"], "pirl doctor", "--time-out: did you mean --timeout?"),
        (["inspect", "chekpoint"], "pirl inspect", "did you mean: checkpoint"),
        (["export", "openpi", "folder", "--uot", "x"], "pirl export openpi", "--uot: did you mean --out?"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(
    words: list[str], usage: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"usage: {usage} [")
    assert f"\n{usage}: error: " in shown.err
    assert f"  hint: {hint}\n" in shown.err


def test_an_abbreviated_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["doctor", "--js"]) == 2
    assert "unrecognized arguments: --js" in capsys.readouterr().err


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A verb `try` whose `run` a test replaces."""
    module = ModuleType("pirl.cli.try")
    vars(module).update(NAME="try", HELP="", EXAMPLES="", add_arguments=lambda parser: None, run=lambda args: 0)
    monkeypatch.setitem(app.VERBS, "try", "a verb to try")
    monkeypatch.setitem(sys.modules, "pirl.cli.try", module)
    monkeypatch.delenv("PIRL_DEBUG", raising=False)
    return module


def raising(error: BaseException):
    def run(args: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DataError("file [x] is bad", hint="mend it"), 1, "error: file [x] is bad\n  hint: mend it\n"),
        (DataError("no hint here"), 1, "error: no hint here\n"),
        (
            KeyError("x"),
            1,
            "internal error: KeyError: 'x'\n  hint: run again with PIRL_DEBUG=1 for the traceback\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(2), 2, ""),
        (SystemExit("text"), 1, ""),
        (SystemExit(), 0, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_exception_becomes_a_message_and_an_exit_code(
    error: BaseException, code: int, text: str, verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(error)
    assert app.main(["try"]) == code
    assert capsys.readouterr() == ("", text)


@pytest.mark.parametrize("error", [DataError("bad", hint="mend it"), KeyError("x")])
def test_the_traceback_comes_with_pirl_debug(
    error: Exception, verb: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIRL_DEBUG", "1")
    verb.run = raising(error)
    assert app.main(["try"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert "PIRL_DEBUG" not in shown


def test_a_long_message_is_not_wrapped_away_from_a_terminal(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(DataError("x" * 300))
    app.main(["try"])
    assert capsys.readouterr().err == f"error: {'x' * 300}\n"


def test_errors_are_told_without_rich(
    verb: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    verb.run = raising(DataError("bad", hint="mend it"))
    assert app.main(["try"]) == 1
    assert capsys.readouterr().err == "error: bad\n  hint: mend it\n"


def test_our_warnings_name_no_source_line(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: object) -> int:
        warnings.simplefilter("always")
        warnings.warn("look here", PirlWarning, stacklevel=1)
        warnings.warn("somebody else's", UserWarning, stacklevel=1)
        return 0

    verb.run = run
    before = warnings.showwarning
    assert app.main(["try"]) == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "warning: look here"
    assert "UserWarning: somebody else's" in rest[0]
    assert warnings.showwarning is before


@pytest.mark.parametrize("words", [["--help"], ["doctor"]], ids=" ".join)
def test_a_reader_that_went_away_is_no_traceback(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "pirl", *words]
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(command, env=environment, check=False, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_signs_a_terminal_cannot_show_are_no_error() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [Path(sys.executable).parent / "pirl", "--help"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "robot policies" in done.stdout


@pytest.mark.parametrize(
    ("words", "given", "share"),
    [
        (["train", "debug"], {}, "0.9"),
        (["train", "debug"], {"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        (["train", "debug"], {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, None),
        (["eval", "run"], {}, None),
    ],
)
def test_training_takes_most_of_the_memory_and_keeps_its_programs(
    words: list[str], given: dict[str, str], share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*app.MEMORY_SETTINGS, "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: dict[str, str] = {}
    monkeypatch.setattr(sys, "argv", ["pirl", *words])
    monkeypatch.setattr(app, "run", lambda _: seen.update(os.environ) or 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        assert app.main() == 0
    assert seen.get("XLA_CLIENT_MEM_FRACTION") == share
    assert Path(seen["JAX_COMPILATION_CACHE_DIR"]).name == "compiled"
