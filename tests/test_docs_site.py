"""The documentation's site builds without a warning and needs nothing from elsewhere; what is generated is fresh."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH = {path.name for path in (ROOT / "docs").glob("*.md") if not path.name.endswith(".zh.md")}
CHINESE = {path.name for path in (ROOT / "docs").glob("*.zh.md")}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return script("generate")


@pytest.fixture(scope="module")
def translations() -> ModuleType:
    return script("translations")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every page of the built site; dead links, dead anchors and pages outside of the navigation are errors."""
    folder = tmp_path_factory.mktemp("site")
    # (Not --quiet: with it mkdocs does not see the warnings that --strict is to fail on.)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}


def test_generated_pages_are_what_the_code_says(generate: ModuleType) -> None:
    for path, text in generate.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: python docs/generate.py"


def test_the_reference_shows_what_argparse_knows(generate: ModuleType) -> None:
    """One parser of each kind of argument, rendered."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="x", description="Does it.\n\n  a  table", epilog="examples:\n  x one   why\n  x two"
    )
    parser.add_argument("data", metavar="DATA", nargs="+", help="what")
    parser.add_argument("--film", type=int, nargs="?", metavar="N", help="a | b")
    parser.add_argument("--side", choices=("left", "right"), help="which, %(default)s")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    text = "\n".join(generate.describe(parser, "x", level=2))
    assert "## x\n\nDoes it.\n\n```text\n  a  table\n```" in text
    assert "x DATA ... --out DIR [--film [N]] [--side {left,right}]\n" in text
    assert "| `DATA ...` | what |" in text
    assert "| `--film [N]` | a \\| b |" in text
    assert "| `--side {left,right}` | which, None |" in text
    assert "| `--out DIR` (required) |" in text
    assert "hidden" not in text
    assert "```bash\nx one  # why\nx two\n```" in text


def test_the_navigation_lists_every_page_once() -> None:
    listed = re.findall(r"^ +- .+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(ENGLISH)


def test_the_site_has_every_page_in_both_languages(site: dict[str, str]) -> None:
    pages = {name.replace(".md", ".html") for name in ENGLISH}
    assert pages | {f"zh/{name}" for name in pages} <= set(site)
    for name in CHINESE:
        page = name.replace(".zh.md", ".html")
        assert f'href="zh/{page}" hreflang="zh"' in site[page]
        assert re.search(r"<h1[^>]*>[^<]*[\u4e00-\u9fff]", site[f"zh/{page}"]), name


def test_a_page_that_falls_behind_is_noticed(translations: ModuleType, tmp_path: Path) -> None:
    english, chinese = tmp_path / "a.md", tmp_path / "a.zh.md"
    english.write_text("# A\n\nIt takes 52 s.\n\n```bash\npirl doctor    # look\n```\n\n* `seed`\n* [b](b.md)\n")
    same = "# 甲\n\n需要 52 秒。\n\n```bash\npirl doctor    # 看\n```\n\n* `seed`\n* [乙](b.md)\n"
    chinese.write_text(same)
    assert not translations.behind(english, chinese)
    for old, new, told in (
        ("52", "36", "lacks 52"),
        ("pirl doctor", "pirl plan", "lacks pirl doctor"),
        ("`seed`", "`steps`", "lacks seed"),
        ("* [乙](b.md)\n", "", "lacks b.md"),
        ("需要", "一\n\n需要", "2 paragraph"),
        ("# 甲", "# 甲\n\n## 乙", "other headings"),
    ):
        chinese.write_text(same.replace(old, new))
        assert told in "\n".join(translations.behind(english, chinese))


def test_the_site_asks_nothing_of_any_other_place(site: dict[str, str]) -> None:
    for name, html in site.items():
        assert not re.search(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//", html), name


def test_markdown_is_all_rendered(site: dict[str, str]) -> None:
    """Tables, blocks and lists that Python-Markdown takes for prose show as their signs."""
    for name, html in site.items():
        prose = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
        assert "```" not in prose, name
        assert not re.search(r"^(<p>)?\|.*\|", prose, re.MULTILINE), name
        assert not re.search(r"^(<p>)?(\* |- |\d+\. )", prose, re.MULTILINE), name
        assert not re.search(r"\]\([\w/#.-]+\)", prose), name
