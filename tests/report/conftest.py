"""Runs to report on."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from run_folders import write_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder of a run, by its name."""
    return partial(write_run, tmp_path)
