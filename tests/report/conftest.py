"""Fixtures: run folders to report on."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from run_folders import write_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a run folder of a given name."""
    return partial(write_run, tmp_path)
