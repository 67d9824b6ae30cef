"""Generates docs/cli.md, docs/recipes.md and docs/api.md from the code.

    python docs/generate.py              write them (`make docs` runs this first)
    python docs/generate.py --check      write nothing; exit with 1 if they are out of date

tests/test_docs_site.py checks the same. Change the code, never the pages. The text comes from argparse's actions,
because its printed help differs between Python versions.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pirl
from pirl import recipes
from pirl.cli import app
from pirl.config import RLTrainConfig
from pirl.config_io import tag
from pirl.models.config import Pi0Config

DOCS = Path(__file__).parent

MARK = "<!-- Written by docs/generate.py from the code. Change the code, then: make docs -->\n"

CLI_INTRO = """\
Every verb has `--help`, which works even if jax is broken. Every setting of a run is a flag, such as
`--agent.discount 0.995` or `--mesh.fsdp 8`: `pirl train RECIPE --help` lists all with their values,
`pirl recipes show RECIPE` explains each.

| exit code | means |
|---|---|
| 0 | done |
| 1 | an error: a message and a hint; `PIRL_DEBUG=1` adds the traceback |
| 2 | wrong usage |
| 130 | interrupted; training has saved a checkpoint |
"""

RECIPES_INTRO = """\
A recipe is a named, complete configuration. Override any setting with a flag or in a YAML file:
[training](training.md#configuration).

```bash
pirl recipes ls                                # a shorter table
pirl recipes show acrlpd_libero                # every setting, explained
pirl recipes cp acrlpd_libero my.yaml          # a file to edit; then: pirl train my.yaml --exp-name first
pirl train acrlpd_tabletop --variant quick     # a few steps of the real model; --debug uses a tiny one
pirl plan acrlpd_libero_lora --device-gb 24    # does it fit?
```

Chunk is `model.horizon`, the actions per plan; in parentheses how many of them the critic scores
(`data.critic_horizon`). A RIPT step is one iteration: collect groups of rollouts, then learn from them.
"""

API_INTRO = """\
`import pirl` is enough for a script. It imports nothing heavy: jax, the simulators and the decoders load with the first
name that needs them.

```python
import pirl

config = pirl.get_config("debug_bc")  # a recipe; change it with dataclasses.replace
pirl.train(config)  # what `pirl train debug_bc` does
policy = pirl.open_checkpoint(config.run_dir)  # the latest step; best=True: the best
chunk = policy.chunk({"state": ..., "image": ...})  # actions in the robot's units
```

Programs to start from: [examples](examples.md). Names that are not listed here may change between versions.
"""

PURPOSES = {
    "debug": "a complete ACRLPD run without files",
    "debug_bc": "the same for imitation, as a baseline",
    "bc_tabletop": "imitate imperfect demonstrations; start of those below",
    "bc_aloha_transfer_small": "imitate imperfect demonstrations of gym-aloha's TransferCube, from scratch on one GPU",
    "acrlpd_aloha_fold": "improve a policy offline on your own ALOHA recordings, several large GPUs",
    "bc_aloha_fold": "OpenPI's fine-tuning on your own ALOHA recordings; warm start",
    "ript_aloha_transfer": "improve a released policy in gym-aloha's TransferCube",
    "acrlpd_libero": "improve π₀.₅ offline on LIBERO and rollouts, several large GPUs",
    "bc_libero": "OpenPI's pi05_libero",
    "ript_libero_goal": "improve a policy in LIBERO's goal suite",
    "bc_metaworld_mt10": "imitate imperfect demonstrations of ten tasks; start of those below",
    "bc_metaworld_mt10_state": "imitate ten tasks from Meta-World's observations, without pictures, on a CPU",
    "bc_aloha_transfer_state": "imitate gym-aloha's TransferCube from joints and cube, without pictures, on a CPU",
    "acrlpd_droid": "improve π₀.₅ offline on your own DROID recordings, several large GPUs",
    "bc_droid": "fine-tune π₀.₅ on your own DROID recordings",
}
"""Purposes of recipes for which the algorithm's is not specific enough."""

OF_ALGORITHMS = {
    "ACRLPD": "improve it offline, from the same demonstrations",
    "CriticNFT": "move towards chunks with positive advantages and away from negative ones",
    "DAgger": "imitate demonstrations and corrections, not the policy's own actions",
    "DSRL": "choose the noise that the frozen policy starts from",
    "Filtered": "imitate the chunks with the best returns: the baseline without a value",
    "FlowPPO": "improve it by PPO over the denoising path",
    "QCFQL": "distil the policy into a one-step student that maximises the critic",
    "RECAP": "condition the policy on whether a chunk was better than usual",
    "RIPT": "improve it with group rollouts, without a critic",
    "RLToken": "edit the chunks of the frozen policy",
}
"""Purpose by algorithm, for all other recipes."""


def purpose(config: RLTrainConfig) -> str:
    """A recipe's purpose in one line."""
    if config.name.endswith("_lora"):
        return f"{config.name.removesuffix('_lora')} on one card of 24 GB"
    if config.name.endswith("_online"):
        return "the same, then online with a replay buffer"
    return PURPOSES.get(config.name) or OF_ALGORITHMS[tag(type(config.agent))]


MEASURED = {
    "tabletop": "Results over three seeds: [what works today](status.md#does-it-learn).\n",
}
"""Links to results, by module."""

TITLES = {
    "debug": "Without files",
    "tabletop": "Tabletop",
    "aloha": "ALOHA",
    "aloha_sim": "ALOHA in simulation, small",
    "libero": "LIBERO",
    "metaworld": "Meta-World",
    "state": "Simulators from their state",
    "droid": "DROID",
}
"""A heading for each module of recipes."""

COLUMNS = ("recipe", "for", "algorithm", "model, what trains", "data", "environment", "chunk", "batch", "steps")


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    return {DOCS / "cli.md": cli_page(), DOCS / "recipes.md": recipes_page(), DOCS / "api.md": api_page()}


def cli_page() -> str:
    """The reference of the `pirl` command."""
    verbs = [f"| [`pirl {name}`](#pirl-{name}) | {summary} |" for name, summary in app.VERBS.items()]
    parts = ["# Command line\n", MARK, CLI_INTRO, "\n".join(["| verb | does |", "|---|---|", *verbs]) + "\n"]
    for name in app.VERBS:
        parts += describe(subparsers(app.build_parser([name]))[name], f"pirl {name}", level=2)
    return "\n".join(parts)


def describe(parser: argparse.ArgumentParser, title: str, *, level: int) -> Iterator[str]:
    """A parser as Markdown: what it does, usage, arguments, examples; then its own verbs, one level down."""
    yield f"{'#' * level} {title}\n"
    yield from paragraphs(parser.description or "")
    actions = subparsers(parser)
    usage = parser.usage % {"prog": title} if parser.usage else usage_of(parser, title)
    yield f"```text\n{usage}\n```\n"
    if rows := [row for action in parser._actions if (row := argument(action)) is not None]:
        yield "\n".join(["| argument | |", "|---|---|", *rows]) + "\n"
    yield from examples(parser.epilog or "")
    for name, action in actions.items():
        yield from describe(action, f"{title} {name}", level=level + 1)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's own verbs, by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def paragraphs(text: str) -> Iterator[str]:
    """Text with indented lines, which are tables, fenced as plain text."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        yield f"```text\n{part}\n```\n" if part.startswith("  ") else f"{part}\n"


def usage_of(parser: argparse.ArgumentParser, title: str) -> str:
    """The usage line: positional arguments, required flags, optional flags."""
    shown = [action for action in parser._actions if argument(action) is not None]
    words = [f"{spelled(a)}" if not a.option_strings or a.required else f"[{spelled(a)}]" for a in shown]
    words.sort(key=lambda word: (word.startswith("["), word.startswith("--")))
    metavars = [str(a.metavar).upper() for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return " ".join([title, *metavars, *words])


def argument(action: argparse.Action) -> str | None:
    """A table row for an argument; None for --help and hidden arguments."""
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
        return None
    needed = " (required)" if action.option_strings and action.required else ""
    about = (action.help or "").replace("|", "\\|").replace("%%", "%").replace("%(default)s", str(action.default))
    return f"| `{spelled(action)}`{needed} | {about} |"


def spelled(action: argparse.Action) -> str:
    """An argument as typed: `--video [N]`, `DATASET ...`, `--split {test,validation}`."""
    names = action.metavar if isinstance(action.metavar, tuple) else (action.metavar,)
    if action.choices is not None and action.metavar is None:
        names = ("{" + ",".join(map(str, action.choices)) + "}",)
    value = " ".join(str(name or action.dest.upper()) for name in names)
    if action.nargs == 0:
        value = ""
    elif action.nargs == "?":
        value = f"[{value}]"
    elif action.nargs in ("*", "+", argparse.REMAINDER):
        value = f"{value} ..."
    return " ".join(filter(None, [", ".join(action.option_strings), value]))


def examples(epilog: str) -> Iterator[str]:
    """A help text's examples as commands to copy; the text after a command becomes its comment."""
    head, _, body = epilog.partition("\n")
    if head != "examples:":
        yield from paragraphs(epilog) if epilog else ()
        return
    lines = [re.fullmatch(r"  (\S.*?)(?: {2,}(\S.*))?", line) for line in body.splitlines()]
    if None in lines:
        yield f"```text\n{body}\n```\n"
        return
    yield shell([tuple(filter(None, line.groups())) for line in lines if line is not None])


def recipes_page() -> str:
    """The page of all recipes by robot, with their modules' docstrings."""
    parts = ["# Recipes\n", MARK, RECIPES_INTRO]
    for module in recipes._MODULES:
        name = module.__name__.rpartition(".")[2]
        about, block, *prose = (module.__doc__ or "").strip().split("\n\n")
        rows = [COLUMNS, ("---",) * len(COLUMNS), *map(recipe_row, module.RECIPES)]
        commands = [tuple(re.split(r" {3,}", line.strip())) for line in block.splitlines()]
        commands += [(command,) for command in missing_commands(module.RECIPES, block)]
        parts += [
            f"## {TITLES.get(name, name)}\n",
            f"{about}\n",
            "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n",
            *([MEASURED[name]] if name in MEASURED else []),
            shell(commands),
            "\n\n".join(prose) + "\n",
        ]
    return "\n".join(parts)


def missing_commands(group: Sequence[RLTrainConfig], block: str) -> Iterator[str]:
    """A command for each recipe missing in the module's examples, with the data of those examples."""
    path = re.search(r"--data-path \S+", block)
    for config in group:
        if f"pirl train {config.name} " not in block:
            data = "" if path is None or config.data.repo_ids or config.acts else f" {path[0]}"
            yield f"pirl train {config.name} --exp-name first{data}"


def recipe_row(config: RLTrainConfig) -> tuple[str, ...]:
    """A table row with a recipe's main settings."""
    family = "MLP" if not isinstance(config.model, Pi0Config) else "π₀.₅" if config.model.pi05 else "π₀"
    size = " tiny" if isinstance(config.model, Pi0Config) and config.model.vlm.width < 256 else ""
    data = ", ".join(f"`{name}`" for name in config.data.repo_ids)
    if not data:
        data = "none" if config.acts else f"yours, of robot `{config.data.robot}`"
    chunk = f"{config.horizon} ({config.critic_horizon})" if config.has_critic else f"{config.horizon}"
    aliases = "".join(f" (or `{alias}`)" for alias, name in recipes.ALIASES.items() if name == config.name)
    return (
        f"`{config.name}`{aliases}",
        purpose(config),
        tag(type(config.agent)) + (" online" if config.online else ""),
        f"{family}{size}, `{config.freeze_rule}`",
        data,
        "–" if config.env is None else f"`{tag(type(config.env))}`",
        chunk,
        str(config.batch_size),
        f"{config.num_train_steps:,}",
    )


def shell(commands: Sequence[tuple[str, ...]]) -> str:
    """Commands to copy, each with its comment if it has one."""
    width = max((len(command) for command, *comment in commands if comment), default=0)
    lines = [f"{command:{width}}  # {comment[0]}" if comment else command for command, *comment in commands]
    return "\n".join(["```bash", *lines, "```"]) + "\n"


def api_page() -> str:
    """The names of `import pirl`, by the sections of its table, with their signatures and docstrings."""
    source = Path(pirl.__file__).read_text(encoding="utf-8")
    table = source.partition("_NAMES = {\n")[2].partition("\n}\n")[0]
    parts = ["# Python API\n", MARK, API_INTRO]
    for line in table.splitlines():
        if heading := re.fullmatch(r" +# (.+)\.", line):
            parts.append(f"## {heading[1]}\n")
        elif entry := re.fullmatch(r' +"(\w+)": "([\w.]+)",', line):
            parts += api_entry(*entry.groups())
        else:
            raise ValueError(f"neither a section nor a name: {line}")
    return "\n".join(parts)


def api_entry(name: str, module: str) -> Iterator[str]:
    """A function or class, read from its source: the annotations as they are written."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    if not found:  # re-exported: read where it is defined
        (source,) = (n for n in tree.body if isinstance(n, ast.ImportFrom) and name in {a.name for a in n.names})
        assert source.module is not None
        yield from api_entry(name, source.module)
        return
    (node,) = found
    yield f"### {name}\n"
    if isinstance(node, ast.FunctionDef):
        yield f"```text\n{signature(node)}\n```\n"
        yield documented(node)
        return
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    if "__init__" in methods:
        yield f"```text\n{signature(methods['__init__'], name)}\n```\n"
    yield documented(node)
    if "__init__" in methods and ast.get_docstring(methods["__init__"]):
        yield documented(methods["__init__"])
    if module.endswith("config"):
        yield "Its fields are the settings of a run: `pirl recipes show RECIPE` explains each.\n"
        return
    if rows := list(fields(node)):
        yield "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows]) + "\n"
    public = [n for n in methods.values() if not n.name.startswith("_") and ast.get_docstring(n)]
    if public:
        yield "\n".join(["| method | |", "|---|---|", *map(method, public)]) + "\n"


def signature(node: ast.FunctionDef, name: str = "") -> str:
    """`name(arguments) -> result`, with one argument per line if long."""
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    result = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    short = f"{name or node.name}({arguments}){result}"
    if len(short) <= 100:
        return short
    lines = re.split(r", (?![^\[({]*[\])}])", arguments)
    return "\n".join([f"{name or node.name}(", *(f"    {line}," for line in lines), f"){result}"])


def documented(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The docstring as a paragraph."""
    return (ast.get_docstring(node) or "") + "\n"


def fields(node: ast.ClassDef) -> Iterator[str]:
    """A row for each field of a dataclass, protocol or typed dictionary that has a docstring."""
    for field, text in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        about = " ".join(ast.literal_eval(text.value).split())
        value = "" if field.value is None else ast.unparse(field.value)
        default = re.sub(r"field\(default_factory=(\w+)\)", r"\1()", value)
        yield table_row(
            f"`{ast.unparse(field.target)}`", f"`{ast.unparse(field.annotation)}`", default and f"`{default}`", about
        )


def method(node: ast.FunctionDef) -> str:
    """A row for a method or property."""
    is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
    shown = node.name if is_property else signature(node).replace("\n", "").replace("    ", " ")
    return table_row(f"`{shown}`", " ".join((ast.get_docstring(node) or "").split()))


def table_row(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    """Write the pages, or list those that are out of date."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.name}: {'out of date; run: python docs/generate.py' if check else 'written'}")
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
