"""`tools/docs_check.py`: what it finds in pages, makes of it, and what it answers when a command fails."""

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = """
# A page

```bash
echo "one" > file   # a comment
git clone <this repository>
cat file
```

```python
from pathlib import Path

assert Path("file").read_text() == "one\\n"
```

```
pirl inspect recipe debug
not a command
```

1. In a list

    ```bash
    {last}
    ```
"""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import docs_check

    return docs_check


def checked(check: ModuleType, tmp_path: Path, last: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a check of the page that ends with `last`."""
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE.replace("{last}", last))
    (tmp_path / "work").mkdir()
    one = check.Check(tmp_path)
    one.page("page.md", tmp_path / "work")
    return int(check.report(one.results))


def test_a_page_is_run_in_order(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(check, tmp_path, "test -f file", monkeypatch) == 0
    said = capsys.readouterr().out
    assert "run as it stands: 5" in said
    assert "not run: 1\npage.md: git clone <this repository>\n    there is a clone already" in said


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("cat no_such_file", "No such file"),
        ("pirl train no_such_recipe", "unknown recipe"),
        ("pirl eval checkpoints/bc_tabletop/first/2500", "the last step of bc_tabletop is 2400"),
        ("ls no_such_file | cat", "cannot access"),
    ],
)
def test_what_fails_is_told(
    check: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    last: str,
    message: str,
) -> None:
    assert checked(check, tmp_path, last, monkeypatch) == 1
    failed = capsys.readouterr().out.partition("== FAILED: 1\n")[2]
    assert last in failed
    assert message in failed


@pytest.mark.parametrize(
    ("command", "run"),
    [
        ("pirl doctor", "pirl doctor"),
        ("pirl train debug --exp-name a", "pirl train debug --exp-name a --variant quick --max-steps 3"),
        ("pirl train checkpoints/debug/first --max-steps 400", "pirl train checkpoints/debug/first --max-steps 4"),
        ("pirl train debug --resume --max-steps 400", "pirl train debug --resume --max-steps 4 --variant quick"),
        (
            "pirl train bc_aloha_fold --exp-name a --init-weights gs://somewhere/pi0",
            "pirl train bc_aloha_fold --exp-name a  --debug --max-steps 2",
        ),
        (
            "pirl train ript_tabletop --init-weights checkpoints/bc_tabletop/first/2400",
            "pirl train ript_tabletop --init-weights checkpoints/bc_tabletop/first --variant quick --max-steps 1",
        ),
        ("pirl eval checkpoints/debug/a --episodes 200", "pirl eval checkpoints/debug/a --episodes 8"),
    ],
)
def test_what_is_run_is_small(check: ModuleType, tmp_path: Path, command: str, run: str) -> None:
    assert check.smaller(command, tmp_path) == run


def test_pages_have_their_commands(check: ModuleType) -> None:
    assert "pirl inspect data recordings/fold_box" in check.commands("README.md")
    assert "pirl inspect data demos/tabletop" in check.commands("docs/quickstart.md")  # in a list
    assert any("GymEnv(" in block for block in check.commands("docs/environments.md"))
    assert not any("import" in block for block in check.commands("docs/extending.md"))  # which another test runs


def test_what_others_go_on_from_is_run_on_every_page(check: ModuleType) -> None:
    train, other = "pirl train debug --exp-name a --variant quick", "pirl train debug --exp-name b"
    assert check.leads_nowhere(train, [other, "pirl inspect checkpoint checkpoints/debug/b"])
    assert not check.leads_nowhere(train, [other, "pirl inspect checkpoint checkpoints/debug/a"])
    assert not check.leads_nowhere(train, ["pirl train debug --exp-name a --resume"])
    assert check.leads_nowhere("pirl inspect data me/practice", [])
    assert not check.leads_nowhere("pirl export openpi checkpoints/debug/a --out to_robot", [])
