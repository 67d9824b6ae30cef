"""`pirl serve` as a process: what it prints, signals, and its flags."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acting_runs import save_run, walking
from pirl.agents.config import ACRLPDConfig, BCConfig, RECAPConfig, RIPTConfig
from pirl.cli import app
from pirl.cli.serve import KEY_VARIABLE, _changed
from pirl.data.writer import LeRobotWriter
from pirl.errors import PirlWarning
from serving_runs import SEEN, Client
from small_runs import compiled_once

TRUSTED = {"PIRL_TRUST": "acting_runs"}
"""The module whose environments the runs name."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A run, and an environment in which processes find its programs compiled."""
    folder = tmp_path_factory.mktemp("runs")
    with compiled_once(tmp_path_factory.mktemp("programs")) as environment:
        run = save_run(walking(folder, BCConfig()), {5: 0.5})
        yield run, environment


class Served:
    """The process, and the lines it has printed."""

    def __init__(self, *words: str, **environment: str) -> None:
        command = [sys.executable, "-m", "pirl", "serve", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | TRUSTED | environment
        )
        self.lines: list[str] = []
        self.more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.more:
                self.lines.append(line)
                self.more.notify_all()

    def wait_for(self, part: str) -> str:
        with self.more:
            assert self.more.wait_for(lambda: any(part in line for line in self.lines), 300), "".join(self.lines)
            return next(line for line in self.lines if part in line)

    @property
    def port(self) -> int:
        return int(self.wait_for("serving ").rpartition(":")[2])


@contextmanager
def served(*words: str, **environment: str) -> Iterator[Served]:
    process = Served(*words, **environment)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def test_a_process_serves_reloads_and_ends_on_signals(runs: tuple[Path, dict[str, str]]) -> None:
    run, environment = runs
    words = [str(run), "--port", "0", "--max-batch", "1", "--latency", "--rollout.flow-steps", "2"]
    with served(*words, **environment, **{KEY_VARIABLE: "sesame"}) as server:
        assert "serving walk_bc/run/5 on ws://127.0.0.1:" in server.wait_for("serving")
        with Client(server.port, additional_headers={"Authorization": "Api-Key sesame"}) as client:
            assert client.ask(SEEN)["actions"].shape == (3, 2)
            server.process.send_signal(signal.SIGUSR1)
            server.wait_for("prepare")
            server.process.send_signal(signal.SIGHUP)
            assert server.wait_for("new episodes get walk_bc/run/5").startswith("20"), "with the time"
            assert client.ask(SEEN)["actions"].shape == (3, 2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(300) == 0
        assert server.wait_for("stopped after 2 requests")
        assert sum(line.startswith("total ") for line in server.lines) == 2  # at SIGUSR1, and at the end


def test_shadow_mode(runs: tuple[Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = {name: {"dtype": "float32", "shape": [2], "names": None} for name in ("observation.state", "action")}
    with LeRobotWriter(tmp_path / "walks", fps=5, features=features) as writer:
        columns = {"observation.state": np.zeros((9, 2), np.float32), "action": np.ones((9, 2), np.float32)}
        writer.add_episode(columns, task="go")
    words = ["serve", str(runs[0]), "--shadow", str(tmp_path / "walks"), "--max-batch", "1", "--stride", "4"]
    assert app.main(words) == 0
    shown = capsys.readouterr().out
    assert "3 chunks of 1 episodes" in shown
    assert "holding still" in shown
    assert app.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert np.array(found["error"]).shape == (3, 2)
    assert found["policy"] == "walk_bc/run/5"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["RUN", "--best-of", "4"], "without a critic"),
        (["RUN", "--guidance", "2"], "without a condition"),
        (["RUN", "--port", "99999"], "port is 99999"),
        (["RUN", "--api-key-file", "nowhere.txt"], "cannot be read"),
        (["RUN", "--port", "0", "--max-batch", "1", "--safety", "nowhere.yaml"], "nowhere.yaml"),
        (["RUN", "--port", "0", "--max-batch", "1", "--tls-cert", "nowhere.pem"], "cannot be used"),
        (["RUN", "--metadata", "nowhere.yaml"], "nowhere.yaml"),
        (["RUN", "--shadow", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    runs: tuple[Path, dict[str, str]],
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["serve", *(str(runs[0]) if word == "RUN" else word for word in words)]) == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert "hint" in shown
    assert "Traceback" not in shown


def test_a_policy_that_needs_its_critic_says_so(tmp_path: Path) -> None:
    config = walking(tmp_path, ACRLPDConfig(actor="best_of_n"))
    args = argparse.Namespace(guidance=None, best_of=None, flow_steps=None, settings=[])
    with pytest.warns(PirlWarning, match="--best-of"):
        assert _changed(config, args).rollout.best_of == 1
    args.best_of = 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _changed(config, args).rollout.best_of == 4


@pytest.mark.parametrize("agent", [RIPTConfig(loss="cfg", guidance=1.5), RECAPConfig()], ids=["cfg", "recap"])
def test_guidance_is_a_flag_where_the_policy_has_a_condition(agent: Any, tmp_path: Path) -> None:
    config = replace(walking(tmp_path, BCConfig()), agent=agent)
    changed = _changed(config, argparse.Namespace(guidance=3.0, best_of=None, flow_steps=4, settings=[]))
    assert changed.agent == replace(config.agent, guidance=3.0)
    assert changed.rollout.flow_steps == 4
