"""`pirl completion`: shell completion of verbs, flags, recipes and settings.

The shell calls the command with `_ARGCOMPLETE` set (argcomplete's protocol). `complete` answers from the command line's
parser, extended by a flag for every setting of the named recipe.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pirl.cli.app import Parser, build_parser

NAME = "completion"
HELP = """\
Prints a completion script for verbs, flags, recipes, a recipe's settings (`pirl train acrlpd_libero --agent.<TAB>`),
their values and run folders. Try it in the current shell:

  source <(pirl completion bash)                  bash, zsh
  pirl completion fish | source                   fish

Install it permanently:

  pirl completion bash > ~/.local/share/bash-completion/completions/pirl
  pirl completion zsh > ~/.zfunc/_pirl            with fpath+=~/.zfunc before compinit in ~/.zshrc
  pirl completion fish > ~/.config/fish/completions/pirl.fish"""
EXAMPLES = """\
examples:
  pirl completion bash
  pirl completion zsh
  pirl completion fish"""

RECIPE, CHECKPOINT = "RECIPE", "CHECKPOINT"
SUFFIXES = (".yaml", ".yml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["pirl"], shell=args.shell).strip())
    return 0


def complete(stream: Any = None, leave: Callable[[int], Any] = os._exit) -> None:
    """Print completions for the shell, then exit. `stream` and `leave` replace output and exit in tests."""
    import argcomplete
    from argcomplete.lexers import split_line

    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    before = words[int(os.environ["_ARGCOMPLETE"]) :]  # skip the words `python -m pirl` or `pirl`
    argcomplete.autocomplete(
        completing_parser(before), always_complete_options=False, exit_method=leave, output_stream=stream
    )


def completing_parser(words: Sequence[str]) -> Parser:
    """The parser for the typed words, with a flag for each setting of the named recipe or checkpoint."""
    parser = build_parser(words)
    verb = next((word for word in words if not word.startswith("-")), "")
    for one in _below(parser, verb):
        remainder = [action for action in one._actions if action.nargs == argparse.REMAINDER]
        for action in remainder:  # it would consume all following words
            one._actions.remove(action)
            one._positionals._group_actions.remove(action)
        for action in one._actions:
            if action.metavar == RECIPE or action.dest == "recipe":
                action.completer = _recipes  # type: ignore[attr-defined]
        if remainder or one.takes_settings:
            with suppress(Exception):  # with an unreadable file, complete the verb's own flags only
                _add_settings(one, words[1:], all_of_them=bool(remainder))
        one.takes_settings = False
    return parser


def _below(parser: Parser, verb: str) -> Iterator[Parser]:
    """The parser of a verb and its subparsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, one in action.choices.items():
                if verb in (name, ""):
                    yield one
                    yield from _below(one, "")


def _recipes(prefix: str, **_: Any) -> list[str]:
    """Recipes that start with the prefix, or else YAML files."""
    from argcomplete.completers import FilesCompleter

    from pirl.recipes import ALIASES, list_configs

    names = [name for name in (*list_configs(), *ALIASES) if name.startswith(prefix)]
    return names or FilesCompleter(SUFFIXES)(prefix)


def _add_settings(parser: Parser, words: Sequence[str], *, all_of_them: bool) -> None:
    """Add a flag per setting; `all_of_them` includes settings without a dot and short names."""
    from pirl.recipes.flags import short_names
    from pirl.recipes.settings import part_kinds, settings

    config = _named(parser, words)
    for action in short_names("")._actions if all_of_them else ():
        parser._add_action(action)
    for path, kinds in part_kinds(config).items():
        parser.add_argument(f"--{path.replace('_', '-')}", choices=kinds)
    for setting in settings(config).values():
        flags = [flag for flag in (setting.flag, setting.off) if flag is not None]
        if setting.flag in parser._option_string_actions or not (all_of_them or "." in setting.path):
            continue
        if setting.off is not None:
            parser.add_argument(*flags, action="store_true")
            continue
        action = parser.add_argument(*flags, choices=setting.choices or None, nargs="+" if setting.many else None)
        if not setting.choices and str not in setting.kinds and not setting.many:
            action.completer = _value(setting.value)  # type: ignore[attr-defined]


def _value(value: Any) -> Callable[..., list[str]]:
    """A completer that offers the current value."""
    return lambda **_: [str(value)]


def _named(parser: Parser, words: Sequence[str]) -> Any:
    """The configuration of the recipe, file or checkpoint on the command line."""
    from pirl.recipes import load

    name = next(word for word in words if not word.startswith("-"))
    if any(action.metavar == CHECKPOINT for action in parser._actions):
        folder = Path(name).expanduser()
        name = next(str(file) for file in (folder / "config.yaml", folder.parent / "config.yaml") if file.is_file())
    return load(name)
