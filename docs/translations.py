"""Finds translated pages that fell behind: page.zh.md must say what page.md says, section by section.

    python docs/translations.py          name every difference; exit with 1 if there is one

Prose may be worded freely. A section must have the same shape (paragraphs, list items, table rows, code blocks), the
same commands, the same names in backticks and the same numbers. tests/test_docs_site.py runs the same check.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).parent
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"(?<![\w.])[0-9][0-9.,]*[0-9]")
"""At least two digits: small numbers are often words."""
COMMENT = re.compile(r"(^|\s+)#\s.*")
RUN = ("bash", "sh", "python", "yaml", "json")
"""Blocks that are compared as code; others hold output or drawings, which may be translated."""


@dataclass
class Section:
    """What one heading covers."""

    title: str
    level: int
    shape: list[str] = field(default_factory=list)
    facts: set[str] = field(default_factory=set)


def sections(text: str) -> list[Section]:
    """A page, cut at its headings."""
    found = [Section("", 0)]
    lines = iter(text.splitlines())
    inside = ""
    """The block that the next line continues, if it is not a new one."""
    for line in lines:
        bare = line.strip()
        if bare.startswith("```"):
            found[-1].shape.append("code")
            found[-1].facts |= _block(bare[3:], lines)
            inside = ""
        elif heading := re.match(r"(#+) (.+)", line):
            found.append(Section(heading[2], len(heading[1])))
            found[-1].facts |= set(CODE.findall(line))
            inside = ""
        elif not bare or bare.startswith(("<!--", "<a id=")):
            inside = ""
        else:
            kind = _kind(bare)
            if kind != "paragraph" or not inside:
                found[-1].shape.append(kind)
                inside = kind
            found[-1].facts |= _facts(bare)
    return found


def _kind(line: str) -> str:
    if line.startswith("|"):
        return "row"
    return "item" if re.match(r"([*-]|\d+\.) ", line) else "paragraph"


def _block(language: str, lines: Iterator[str]) -> set[str]:
    code = set()
    for line in lines:
        if line.strip().startswith("```"):
            break
        code.add(COMMENT.sub("", line).strip())
    return code - {""} if language in RUN else set()


def _facts(line: str) -> set[str]:
    prose = CODE.sub("", LINK.sub("", line))
    return {*CODE.findall(line), *LINK.findall(line), *NUMBER.findall(prose)}


def behind(original: Path, translation: Path) -> list[str]:
    """Where a translation differs from its original in more than words."""
    ours, theirs = sections(original.read_text(encoding="utf-8")), sections(translation.read_text(encoding="utf-8"))
    if [section.level for section in ours] != [section.level for section in theirs]:
        titles = " / ".join(section.title for section in ours)
        return [f"{translation.name}: other headings than {original.name}, which has: {titles}"]
    problems = []
    for english, other in zip(ours, theirs, strict=True):
        where = f"{translation.name}, {other.title!r} ({english.title!r})"
        if missing := english.facts - other.facts:
            problems.append(f"{where}: lacks {', '.join(sorted(missing))}")
        if extra := other.facts - english.facts:
            problems.append(f"{where}: has what {original.name} lacks: {', '.join(sorted(extra))}")
        if english.shape != other.shape:
            problems.append(f"{where}: blocks are {_counted(other.shape)}, expected {_counted(english.shape)}")
    return problems


def _counted(shape: list[str]) -> str:
    return ", ".join(f"{shape.count(kind)} {kind}" for kind in dict.fromkeys(shape)) or "none"


def check() -> list[str]:
    """Every difference of every translated page."""
    return [
        problem
        for translation in sorted(DOCS.glob("*.zh.md"))
        for problem in behind(translation.with_name(translation.name.replace(".zh.md", ".md")), translation)
    ]


if __name__ == "__main__":
    problems = check()
    print("\n".join(problems) or "every translated page says what its original says")
    sys.exit(1 if problems else 0)
