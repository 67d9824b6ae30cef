"""One of several processes is killed: the others end within a minute and say so, and the run goes on with fewer."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collecting_runs import VARIABLE, online_run, ript_run, saving
from pirl.agents.config import BCConfig
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml
from several_processes import start_together
from small_runs import small_run, steps_of

pytestmark = pytest.mark.skipif(not os.environ.get("CAMPAIGN"), reason="takes a minute: make campaign")


def start(file: Path, processes: int, *words: str, **environment: str) -> list[subprocess.Popen[str]]:
    command = ["-m", "pirl", "train", str(file), "--resume", "auto", *words]
    return start_together(command, processes, environment=environment, logs=file.parent)


def check_the_others(children: list[subprocess.Popen[str]], victim: int, folder: Path) -> None:
    """They end within a minute and say why."""
    end = time.monotonic() + 60
    for index, child in enumerate(children):
        if index == victim:
            continue
        code = child.wait(max(end - time.monotonic(), 0.1))
        said = (folder / f"{index}.log").read_text()
        assert code not in (0, 130)
        # Without process 0 there is no service through which processes hear of each other; jax itself then ends those
        # that wait, as it does with one that is busy with something else.
        assert any(text in said for text in ("lost another one", "another task died")), said[-3000:]


def wait_for_step(config: RLTrainConfig, children: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + 300
    while not (config.run_dir / "20").exists():
        assert all(child.poll() is None for child in children)
        assert time.monotonic() < end
        time.sleep(0.1)


def kill_all(children: list[subprocess.Popen[str]]) -> None:
    for child in children:
        child.kill()


@pytest.mark.parametrize(("victim", "before", "after"), [(0, 2, 1), (1, 2, 2), (3, 4, 4), (0, 4, 2)])
def test_the_others_end_within_a_minute_and_the_run_goes_on(
    victim: int, before: int, after: int, tmp_path: Path
) -> None:
    config = small_run(tmp_path / "runs", BCConfig(), num_train_steps=10**6)
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=20, keep_last=2))
    file = write_yaml(tmp_path / "run.yaml", config)
    children = start(file, before)
    try:
        wait_for_step(config, children)
        children[victim].send_signal(signal.SIGKILL)
        check_the_others(children, victim, tmp_path)
    finally:
        kill_all(children)
    reached = steps_of(config)[-1]
    children = start(file, after, "--max-steps", str(reached + 3))
    try:
        assert [child.wait(300) for child in children] == [0] * after, (tmp_path / "0.log").read_text()[-3000:]
    finally:
        kill_all(children)
    assert steps_of(config)[-1] == reached + 3


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 4)])
@pytest.mark.parametrize("make", [ript_run, online_run])
def test_killed_while_collecting_it_goes_on_with_fewer_or_more(
    make: Any, before: int, after: int, tmp_path: Path
) -> None:
    config = saving(make(tmp_path / "runs"), save_interval=1, async_save=False)
    file = write_yaml(tmp_path / "run.yaml", config)
    (tmp_path / "episodes").touch()
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    children = start(file, before, **paths, **{VARIABLE: f"{tmp_path / 'episodes'}|kill:20:21"})
    try:
        while all(child.poll() is None for child in children):
            time.sleep(0.1)
        (victim,) = [index for index, child in enumerate(children) if child.poll() is not None]
        assert children[victim].returncode == -signal.SIGKILL, (tmp_path / f"{victim}.log").read_text()[-3000:]
        check_the_others(children, victim, tmp_path)
    finally:
        kill_all(children)
    assert 0 < steps_of(config)[-1] < config.num_train_steps
    children = start(file, after, **paths)
    try:
        assert [child.wait(300) for child in children] == [0] * after, (tmp_path / "0.log").read_text()[-3000:]
    finally:
        kill_all(children)
    assert steps_of(config)[-1] == config.num_train_steps
