"""Shapes and types are checked at run time in every package that handles arrays."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from pirl.data.normalize import NormStats, normalize

ROOT = Path(__file__).parents[1]
WITHOUT = {"cli", "planning", "recipes", "tune"}
"""Packages of plain Python, which mypy checks."""


def test_a_new_package_is_checked_too() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (listed,) = (option.partition("=")[2].split(",") for option in options if "jaxtyping" in option)
    packages = {path.parent.name for path in (ROOT / "src/pirl").glob("*/__init__.py")}
    assert packages - WITHOUT == {name.removeprefix("pirl.") for name in listed} - {"records", "beartype.beartype"}


def test_a_wrong_shape_is_told() -> None:
    stats = NormStats(mean=np.zeros(2), std=np.ones(2))
    with pytest.raises(Exception, match=r"[Tt]ype-?check"):
        normalize(np.zeros(2, np.int64), stats)
