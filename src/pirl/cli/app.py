"""The `pirl` command: dispatches to one verb module and returns an exit code.

A verb is one module of this package, named in `VERBS`. It has `NAME`, `HELP` (what it does, in full sentences),
`EXAMPLES`, `add_arguments(parser)` and `run(args) -> int`. Its top level and `add_arguments` import nothing heavy, so
`--help` answers at once, even if jax is broken; `run` imports what it needs.

Exit codes: 0 done, 1 an error (message and hint; `PIRL_DEBUG=1` adds the traceback), 2 usage, 130 interrupted.
"""

import argparse
import difflib
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn, TextIO

import pirl
from pirl import trust
from pirl.errors import PirlError, PirlWarning, did_you_mean
from pirl.paths import pirl_home
from pirl.processes import follow_parent

VERBS = {
    "demo": "run the whole pipeline on a laptop: record, imitate, improve, evaluate, report",
    "train": "train a policy from a recipe or YAML file, with overrides",
    "tune": "search hyper-parameters with pruned trials",
    "compare": "compare algorithms under the same conditions, with intervals over seeds",
    "eval": "measure a checkpoint's success rate in its environment, with videos",
    "serve": "serve a checkpoint to robots over OpenPI's protocol",
    "report": "write one HTML page about one or several runs",
    "record": "record a dataset with a scripted expert or a checkpoint",
    "improve": "improve a robot's policy in generations: collect, train, compare blindly, promote",
    "plan": "check whether a run fits into device memory",
    "recipes": "list, show or copy the configurations that come with pirl",
    "doctor": "check this machine: jax and its devices, memory, disk, video, simulators",
    "inspect": "show the contents of a recipe, a checkpoint or a dataset",
    "label": "label a dataset's episodes as success or failure in the browser",
    "norm-stats": "compute a dataset's normalisation statistics",
    "export": "export a checkpoint for OpenPI (JAX or PyTorch)",
    "verify": "check every byte of a run's checkpoints, or of an export",
    "completion": "print a shell completion script",
}

DESCRIPTION = """\
Reinforcement learning for π₀ and π₀.₅ robot policies: LeRobot data in, OpenPI checkpoints out."""

EPILOG = """\
examples:
  pirl doctor                                   is this machine ready?
  pirl train debug --exp-name first             a complete run on a laptop, no files needed
  pirl eval checkpoints/my_run --episodes 100   its success rate
  pirl inspect data lerobot/aloha_sim_insertion_human
  pirl inspect checkpoint checkpoints/my_run/20000
  pirl VERB --help                              arguments and examples

Every verb takes --trust MODULE (repeat for several): a checkpoint may then name robots, environments or algorithms of
this module. Without it nothing that a foreign configuration names is imported."""

TRAINING_SHARE = "0.9"
"""Share of GPU memory that `pirl train` uses and `pirl plan` assumes; jax's default is 0.75."""
MEMORY_SETTINGS = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
"""The user's environment variables for it, which win; jax refuses GPUs if both are set."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit code that shells report after SIGPIPE, when the reader closes the pipe early."""


class Parser(argparse.ArgumentParser):
    """argparse that suggests the nearest match for a mistyped verb, choice or flag."""

    takes_settings = False
    """Whether to collect dotted flags with their values in the namespace's `settings`."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._given: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's, but raises for unknown arguments here, so that the message shows the verb's usage."""
        self._given = list(sys.argv[1:] if args is None else args)
        own, settings = split_settings(self._given) if self.takes_settings else (self._given, [])
        parsed, unknown = super().parse_known_args(own, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if self.takes_settings:
            parsed.settings, parsed.usage_error = settings, self.error
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self.error(str(did_you_mean(str(value), map(str, action.choices), kind=str(action.metavar or action.dest))))

    def error(self, message: str) -> NoReturn:
        """Print usage, message and suggested flags; exit with 2."""
        flags = {word.split("=")[0] for word in self._given if word.startswith("--") and word != "--"}
        known = list(self._option_string_actions)
        for flag in sorted(flags.difference(known)):
            if near := difflib.get_close_matches(flag, known, n=1):
                message += f"\n  hint: {flag}: did you mean {near[0]}?"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    """argparse type: a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def console(width: int = 160) -> Any:
    """A rich console without markup; without a terminal it is `width` wide, so that table lines do not wrap."""
    from rich.console import Console

    shown = Console(markup=False, emoji=False)
    return shown if shown.is_terminal else Console(width=width, markup=False, emoji=False)


def split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the verb's own words and dotted settings with their values."""
    own: list[str] = []
    settings: list[str] = []
    kind = own
    for word in words:
        if word.startswith("--"):
            kind = settings if "." in word.partition("=")[0] else own
        kind.append(word)
    return own, settings


def recipe_first(words: Sequence[str]) -> list[str]:
    """Rewrite `train --config NAME ...`, as in other trainers, to `train NAME ...`."""
    words = list(words)
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--config"), None)
    if at is None or not words or words[0] not in ("train", "plan"):
        return words
    _, sign, name = words.pop(at).partition("=")
    if not sign and at < len(words):
        name = words.pop(at)
    return [words[0], name, *words[1:]] if name else words


def take_trust(words: Sequence[str]) -> list[str]:
    """Trust the modules given by `--trust MODULE` (for every verb); returns the other words."""
    rest, following = [], iter(words)
    for word in following:
        flag, sign, name = word.partition("=")
        if flag == "--trust":
            trust.allow(name if sign else next(following, ""))
        else:
            rest.append(word)
    return rest


def load_verb(name: str) -> ModuleType:
    """Import a verb's module."""
    return importlib.import_module(f"pirl.cli.{name.replace('-', '_')}")


def build_parser(argv: Sequence[str]) -> Parser:
    """The parser for this command line: all verbs, but arguments only for the chosen one."""
    parser = Parser(prog="pirl", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"pirl {pirl.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", title="verbs")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in VERBS.items():
        if name == chosen:
            verb = load_verb(name)
            verb.add_arguments(verbs.add_parser(name, help=summary, description=verb.HELP, epilog=verb.EXAMPLES))
        else:
            verbs.add_parser(name, help=summary)
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse and run one command line; errors propagate."""
    try:
        argv = take_trust(recipe_first(argv))
        parser = build_parser(argv)
        args = parser.parse_args(argv)
        if args.verb is None:
            parser.print_help(sys.stderr)
            return 2
        return int(load_verb(args.verb).run(args))
    except SystemExit as stop:  # raised by argparse after --help or a usage error
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """The console script: runs one command line and returns its exit code."""
    if argv is None and "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from pirl.cli.completion import complete

        complete()
    if argv is None:  # the console script: follow a parent process, and keep compiled programs on disk
        follow_parent()
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pirl_home() / "compiled"))
        if sys.argv[1:2] == ["train"] and not MEMORY_SETTINGS & os.environ.keys():
            os.environ["XLA_CLIENT_MEM_FRACTION"] = TRAINING_SHARE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # do not fail on terminals that lack a character
            stream.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            code = run(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()  # here, where a closed pipe can be handled
        except BrokenPipeError:
            # The interpreter flushes stdout again at exit: redirect it to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = BROKEN_PIPE
        except KeyboardInterrupt:
            _say("interrupted", style="yellow")
            code = INTERRUPTED
        except PirlError as error:
            _fail("error", error.message, error.hint)
            code = 1
        except Exception as error:
            hint = "" if _debugging() else "run again with PIRL_DEBUG=1 for the traceback"
            _fail("internal error", f"{type(error).__name__}: {error}", hint)
            code = 1
    if code == 1 and argv is None and _one_of_several():
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # jax would wait for the others at its exit
    return code


def _one_of_several() -> bool:
    """Whether this process trains with others."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _debugging() -> bool:
    return os.environ.get("PIRL_DEBUG", "0") not in ("", "0")


def _fail(kind: str, message: str, hint: str) -> None:
    """Print an error for the exception being handled."""
    if _debugging():
        traceback.print_exc()
    _say(kind, message, style="bold red")
    if hint:
        _say("  hint", hint, style="cyan")


def _say(label: str, message: str = "", *, style: str) -> None:
    """Print a labelled message on stderr: coloured on a terminal, plain and unwrapped elsewhere."""
    rest = f": {message}" if message else ""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:  # report a broken installation as well
        print(label + rest, file=sys.stderr)
    else:
        Console(stderr=True).print(Text.assemble((label, style), rest), soft_wrap=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show pirl's warnings without a source line, and libraries' warnings in Python's format."""
    if issubclass(category, PirlWarning):
        _say("warning", str(message), style="yellow")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))
