"""`import pirl` is an API: lazy, typed, complete."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pirl

ROOT = Path(__file__).parents[1]


def test_import_is_light_and_names_come_when_used() -> None:
    program = (
        "import sys, pirl\n"
        "def loaded(): return [m for m in ('jax', 'numpy', 'gymnasium', 'pirl.config') if m in sys.modules]\n"
        "print(loaded(), 'train' in dir(pirl)); pirl.RLTrainConfig; print(loaded())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[] True", "['numpy', 'pirl.config']"], done.stderr


def test_every_name_is_there() -> None:
    for name in pirl.__all__:
        value = getattr(pirl, name)
        if name != "__version__":
            assert value.__doc__
            assert value.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = pirl.trian


def test_type_checkers_see_the_names_that_there_are() -> None:
    tree = ast.parse(Path(pirl.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    typed = {alias.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert typed == pirl._NAMES
    assert {*pirl.__all__} == {*typed, "__version__"}


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda file: file.name)
def test_an_example_needs_few_imports(file: Path) -> None:
    assert len(re.findall(r"^(?:import|from) pirl", file.read_text(), re.MULTILINE)) <= 4
