"""Fixtures: a small checkpoint with a critic, compiled once, behind a server."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from acting_runs import save_run, walking
from pirl.agents.config import ACRLPDConfig
from pirl.serve.planner import Planner
from pirl.serve.server import PolicyServer
from serving_runs import load, running


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a critic and two checkpoints."""
    config = walking(tmp_path_factory.mktemp("served"), ACRLPDConfig(actor="best_of_n", num_action_samples=3))
    return save_run(replace(config, exp_name="served"), {5: 0.5, 9: 0.7})


@pytest.fixture(scope="session")
def planner(run_folder: Path) -> Planner:
    """The first checkpoint, compiled once for all tests."""
    return load(run_folder / "5", best_of=3)(None)


@pytest.fixture
def server(planner: Planner) -> Iterator[PolicyServer]:
    with running(planner) as found:
        yield found
