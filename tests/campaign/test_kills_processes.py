"""One of several processes is killed: the others end within a minute and say so, and the run goes on with fewer."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pirl.agents.config import BCConfig
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml
from small_runs import small_run, steps_of

pytestmark = pytest.mark.skipif(not os.environ.get("CAMPAIGN"), reason="takes a minute: make campaign")


def start(file: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pirl", "train", str(file), "--resume", "auto", *words]
    log = (file.parent / f"{environment.get('JAX_PROCESS_ID', 'alone')}.log").open("w")
    return subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def start_two(file: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    return [start(file, **together, JAX_PROCESS_ID=str(index)) for index in (0, 1)]


def wait_for_step(config: RLTrainConfig, children: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + 300
    while not (config.run_dir / "20").exists():
        assert all(child.poll() is None for child in children)
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_within_a_minute_and_the_run_goes_on(victim: int, tmp_path: Path) -> None:
    config = small_run(tmp_path / "runs", BCConfig(), num_train_steps=10**6)
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=20, keep_last=2))
    file = write_yaml(tmp_path / "run.yaml", config)
    children = start_two(file)
    try:
        wait_for_step(config, children)
        children[victim].send_signal(signal.SIGKILL)
        code = children[1 - victim].wait(60)
    finally:
        for child in children:
            child.kill()
    said = (tmp_path / f"{1 - victim}.log").read_text()
    assert code != 0
    # With process 0 the service is gone through which processes hear of each other, and jax itself ends the others.
    words = ("lost another one", "another task died") if victim == 0 else ("lost another one",)
    assert any(text in said for text in words), said[-3000:]
    reached = steps_of(config)[-1]
    assert start(file, "--max-steps", str(reached + 3)).wait(300) == 0, (tmp_path / "alone.log").read_text()[-3000:]
    assert steps_of(config)[-1] == reached + 3
