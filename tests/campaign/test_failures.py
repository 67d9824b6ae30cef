"""An error in one of several processes, wherever it happens: the others end within a minute and say why."""

import os
import sys
import time
from pathlib import Path

import pytest

from pirl.agents.config import BCConfig
from pirl.config_io import write_yaml
from several_processes import start_together
from small_runs import small_run

PROCESS = """
import sys

import jax

from pirl.checkpoints.run import Checkpoints
from pirl.cli import app
from pirl.data.loader import ACRLPDDataLoader
from pirl.training.evaluator import Evaluations
from pirl.training.metrics import MetricLog

file, place, victim = sys.argv[1:]
owner, name = {
    "data": (ACRLPDDataLoader, "sample_batch"),
    "evaluation": (Evaluations, "due"),
    "checkpoint": (Checkpoints, "save"),
    "sink": (MetricLog, "log"),
}[place]
work, calls = getattr(owner, name), []

def fails(*args, **settings):
    calls.append(None)
    if len(calls) == 3 and jax.process_index() == int(victim):
        raise OSError("the cable was pulled")
    return work(*args, **settings)

setattr(owner, name, fails)
sys.argv = ["pirl", "train", file]
sys.exit(app.main())
"""
CASES = [("data", 1), ("checkpoint", 0)]
if os.environ.get("CAMPAIGN"):
    CASES = [(place, victim) for place in ("data", "evaluation", "checkpoint", "sink") for victim in (0, 1)]


@pytest.mark.parametrize(("place", "victim"), CASES)
def test_an_error_in_one_process_ends_the_others_with_its_words(place: str, victim: int, tmp_path: Path) -> None:
    config = small_run(tmp_path / "runs", BCConfig(), num_train_steps=10**6)
    file = write_yaml(tmp_path / "run.yaml", config)
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    children = start_together(
        ["-c", PROCESS, str(file), place, str(victim)], 2, devices=1, environment=paths, logs=tmp_path
    )
    said = ["", ""]
    try:
        while all(child.poll() is None for child in children):
            time.sleep(0.1)
        assert [child.wait(60) for child in children] == [1, 1]
    finally:
        for index, child in enumerate(children):
            child.kill()
            said[index] = (tmp_path / f"{index}.log").read_text()
            print(said[index][-2000:])
    assert "the cable was pulled" in said[victim]
    assert f"process {victim} failed: " in said[1 - victim]
    assert "the cable was pulled" in said[1 - victim]
    assert "--resume auto" in said[1 - victim]
