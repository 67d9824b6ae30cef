"""The documentation is true: its commands parse, its links lead somewhere, what it names exists, its examples run."""

import dataclasses
import importlib
import json
import os
import re
import runpy
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any

import pytest
import yaml

from pirl import recipes
from pirl.cli import app
from pirl.cli.inspect import policy_of
from pirl.config import RLTrainConfig
from pirl.config_io import kinds, write_yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("README*.md"), ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OPERATORS = set(";&|><()")
GROUPS = "actor|critic|policy|data|time|memory|ript|rollout|curriculum|online|eval|held_out|bc|value|advantage|filter"
GROUPS += "|ppo"
METRIC = re.compile(rf"(?:{GROUPS})/\w+")


def of_page(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


def inline(page: Path) -> list[str]:
    """What stands in backticks, outside of fenced blocks."""
    return CODE.findall(FENCE.sub("", page.read_text()))


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `pirl ...` in the page's shell blocks, and of lines that begin with it in plain ones."""
    lines = [line for block in blocks(page, "bash", "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += [line for block in blocks(page, "") for line in block.splitlines() if line.startswith("pirl ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        start = next((i for i, word in enumerate(words) if re.fullmatch(r"(.*/bin/)?pirl", word)), len(words))
        rest = words[start + 1 :]
        end = next((i for i, word in enumerate(rest) if set(word) <= OPERATORS), len(rest))
        if rest[:end]:
            yield rest[:end]


COMMANDS = {shlex.join(words): of_page(page) for page in PAGES for words in commands(page)}


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 40
    assert {command.split()[0] for command in COMMANDS} == set(app.VERBS)


class _UnderstoodError(Exception):
    """A command line was read to its end, and something would now begin."""


@dataclasses.dataclass(frozen=True)
class _Found:
    """A checkpoint that says how it was trained."""

    config: RLTrainConfig


def test_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command line is understood as it stands: verbs, flags, recipes and the settings' values."""
    import pirl.cli.compare
    import pirl.cli.eval
    import pirl.cli.eval_data
    import pirl.cli.record
    import pirl.cli.tune
    import pirl.planning.plan
    import pirl.training.acting
    import pirl.training.loop

    trained: list[RLTrainConfig] = []
    checkpoint = _Found(config=recipes.get_config("acrlpd_tabletop"))
    monkeypatch.setattr(pirl.training.acting, "find_checkpoint", lambda *_, **__: checkpoint)
    monkeypatch.setattr(pirl.cli.eval, "_asked", lambda *_: (_ for _ in ()).throw(_UnderstoodError))
    monkeypatch.setattr(pirl.cli.eval_data, "_asked", lambda *_: (_ for _ in ()).throw(_UnderstoodError))
    monkeypatch.setattr(pirl.cli.record, "_record", lambda *_: (_ for _ in ()).throw(_UnderstoodError))
    monkeypatch.setattr(pirl.cli.compare, "_compare", lambda *_: (_ for _ in ()).throw(_UnderstoodError))
    monkeypatch.setattr(pirl.cli.tune, "_search", lambda *_: (_ for _ in ()).throw(_UnderstoodError))
    monkeypatch.setattr(pirl.training.loop, "train", lambda config, **_: trained.append(config) or 0)
    monkeypatch.setattr(pirl.planning.plan, "plan", lambda *_, **__: SimpleNamespace(accumulate=None))
    monkeypatch.chdir(tmp_path)
    refused = []
    for command, page in COMMANDS.items():
        words = shlex.split(command)
        for word in (word for word in words if word.endswith(".yaml")):
            Path(word).unlink(missing_ok=True)
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            if "--space" in words and word == words[words.index("--space") + 1]:
                capsys.readouterr()
                assert app.main(["tune", words[1], "--show-space"]) == 0
                Path(word).write_text(capsys.readouterr().out)
            elif words[:2] != ["recipes", "cp"]:  # which writes it itself
                Path(word).write_text("recipe: acrlpd_libero\n")
        if (
            words[0] == "train" and words[1].startswith("checkpoints/") and not words[1].endswith(".yaml")
        ):  # a run that goes on
            write_yaml(Path(words[1]) / "config.yaml", recipes.get_config(words[1].split("/")[1]), overwrite=True)
        if words[0] in ("train", "plan", "recipes"):
            code = app.main(words)
        else:
            code = 0
            try:
                args = app.build_parser(words).parse_args(words)
                if words[:2] == ["inspect", "recipe"]:
                    code = int(policy_of(args.name) is None)
                elif words[0] in (
                    "eval",
                    "record",
                    "tune",
                    "compare",
                ):  # these parse settings themselves
                    importlib.import_module(f"pirl.cli.{words[0]}").run(args)
            except _UnderstoodError:
                pass
            except SystemExit as stop:
                code = int(stop.code or 0)
        if code:
            refused.append(f"{page}: pirl {command}\n{capsys.readouterr().err}")
    assert not refused, "\n".join(refused)
    assert len(trained) > 10


def test_commands_that_do_not_exist_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["train", "debug", "--agent.no-such-setting", "1"]) == 2
    assert app.main(["fly", "checkpoints/debug/first"]) == 2


def anchors(page: Path) -> set[str]:
    """Headings as GitHub links to them, and places that are named."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_links(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


def test_translations_say_what_their_originals_say() -> None:
    """A page.zh.md that falls behind its page.md; `python docs/translations.py` lists the same."""
    problems = runpy.run_path(str(ROOT / "docs/translations.py"))["check"]()
    assert not problems, "\n".join(problems)


def test_lists_hold_their_code() -> None:
    """GitHub takes three spaces for the inside of a list, the site wants four: a block at less would end the list."""
    for page in PAGES:
        assert not re.search(r"^ {1,3}```", page.read_text(), re.MULTILINE), of_page(page)


def resolves(name: str) -> bool:
    """Is `pirl.a.b.C.d` a module, or something in one?"""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if part in getattr(found, "__dataclass_fields__", {}):
                return True
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def settings(cls: Any = RLTrainConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted setting of a configuration, over all kinds a part may be of."""
    for name, hint in typing.get_type_hints(cls).items():
        yield prefix + name
        for option in typing.get_args(hint) if isinstance(hint, UnionType) else (hint,):
            for kind in kinds(option) if dataclasses.is_dataclass(option) else ():
                yield from settings(kind, f"{prefix}{name}.")


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_what_is_named_exists(page: Path) -> None:
    known = set(settings())
    parts = {name.partition(".")[0] for name in known if "." in name}
    missing = []
    for text in inline(page):
        name = text.removesuffix("()")
        if re.fullmatch(r"pirl(\.\w+)+", name):
            missing += [] if resolves(name) else [text]
        elif re.fullmatch(r"(src|tests|docs|benchmarks|examples)/[\w./-]*|[\w./-]+/[\w-]+\.py", text):
            if not any((base / text).exists() for base in (ROOT, ROOT / "src", ROOT / "src/pirl")):
                missing.append(text)
        elif re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", text) and text.partition(".")[0] in parts:
            missing += [] if text in known or text.endswith((".json", ".py", ".yaml", ".safetensors")) else [text]
        for flag in re.findall(r"--([a-z0-9-]+(?:\.[a-z0-9-]+)+)", text):
            setting = flag.replace("-", "_").removesuffix(".type").replace(".no_", ".")
            missing += [] if setting in known else [text]
    assert not missing


def test_every_metric_is_explained() -> None:
    """What the code logs and what stands in the pages' tables of metrics is the same."""
    code = ROOT / "src/pirl"
    sources = [path for part in ("agents", "planning", "training", "rollout") for path in (code / part).glob("*.py")]
    sources.append(code / "build.py")
    logged = {name for path in sources for name in re.findall(rf'"({METRIC.pattern})"', path.read_text())}
    assert {name.partition("/")[0] for name in logged} == set(GROUPS.split("|"))
    cells = re.compile(rf"^\| ((?:(?:, )?`{METRIC.pattern}`)+) \|", re.MULTILINE)
    explained, mentioned = set[str](), set[str]()
    for page in (ROOT / "docs").glob("*.md"):
        explained |= {name for cell in cells.findall(page.read_text()) for name in METRIC.findall(cell)}
        mentioned |= {text for text in inline(page) if METRIC.fullmatch(text)}
    assert explained == logged
    assert mentioned <= logged


def test_every_alarm_is_explained() -> None:
    """What the watchdog says under `health/`, and its warnings."""
    code = (ROOT / "src/pirl/training/watchdog.py").read_text()
    said = set(re.findall(r'(?:yield \(?|_say\()\s*"(\w+)"', code))
    section = (ROOT / "docs/training.md").read_text().partition("| `health/` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == said
    assert len(said) > 4


VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_variables_are_read(page: Path) -> None:
    """Environment variables (and constants) that a page names stand in the code."""
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").glob("*.py"), ROOT / "Makefile"]
    known = set(VARIABLE.findall("".join(path.read_text() for path in places)))
    assert {name for text in inline(page) if VARIABLE.fullmatch(name := text.partition("=")[0])} <= known


def test_files_of_settings_are_understood(tmp_path: Path) -> None:
    """Blocks of YAML and JSON can be read; those that name a recipe are configurations."""
    read = 0
    for page in PAGES:
        for code in blocks(page, "json"):
            json.loads(code)
        for code in blocks(page, "yaml"):
            for document in yaml.safe_load_all(code):
                if "recipe" in document:
                    (tmp_path / "my.yaml").write_text(code)
                    recipes.load(str(tmp_path / "my.yaml"))
                    read += 1
    assert read


def test_messages_are_those_of_the_code() -> None:
    """Messages in the left column of the troubleshooting tables stand in the code, word for word."""
    code = "".join(path.read_text() for path in (ROOT / "src/pirl").rglob("*.py"))
    put_together = {"unknown recipe", "unknown setting", "process 0 failed:"}
    foreign = {"Unrecognized options", "RESOURCE_EXHAUSTED", "first_batch.png", "time/stall_fraction"}
    rows = re.findall(r"^\| (.+?) \| .+ \|$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    quoted = {text for row in rows for text in CODE.findall(row)} - foreign - put_together
    assert len(quoted) > 40
    assert not sorted(text for text in quoted if text not in code)


EXAMPLES = blocks(ROOT / "docs/extending.md", "python")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[number], f"docs/extending.md, example {number}", "exec"), {"__name__": "example"})


def test_other_examples_are_python() -> None:
    """Examples that need files of the reader's are compiled, and what they import is there."""
    for page in PAGES:
        for code in blocks(page, "python"):
            compile(code, of_page(page), "exec")
            imports = [line for line in code.splitlines() if re.match(r"(from|import) ", line)]
            exec("\n".join(imports), {})


def test_success_rates_agree() -> None:
    """Rates with three digits in short tables stand in the full one."""
    rates = re.compile(r"(?<![\d.])0\.\d{3}(?!\d| s| %)")
    table = set(rates.findall((ROOT / "docs/status.md").read_text().partition("## Features")[0]))
    for page in (ROOT / "README.md", ROOT / "README.zh-CN.md"):
        shown = set(rates.findall(page.read_text().partition("jax 0.10.2")[0]))
        assert len(shown) > 15
        assert shown <= table, of_page(page)


def test_no_page_names_a_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(root|work|tmp)/", page.read_text()), of_page(page)
    assert os.environ.get("HOME", "/nowhere") not in (ROOT / "docs/install.md").read_text()


def test_recipes_and_verbs_are_all_documented() -> None:
    """In the pages that are written from the code (which tests/test_docs_site.py compares)."""
    table, command = ((ROOT / "docs" / name).read_text() for name in ("recipes.md", "cli.md"))
    assert not [name for name in (*recipes.list_configs(), *recipes.ALIASES) if f"`{name}`" not in table]
    assert not [name for name in recipes.list_configs() if f"pirl train {name} " not in table]
    assert not [name for name in app.VERBS if f"## pirl {name}\n" not in command]
