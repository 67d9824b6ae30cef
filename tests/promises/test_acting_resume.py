"""Runs that act are decided by their seeds as well: stopped between updates, in the middle of a collection, killed, or
with environments that die, hang and lie, they end in the same state as one that nobody touched.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from collecting_runs import make_trouble, online_run, ppo_run, ript_run, saving, traced_once
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml
from pirl.errors import EnvError, PirlWarning
from pirl.rollout.config import EvalConfig
from pirl.training.loop import train
from small_runs import assert_same_bits, compiled_once, position_of, records, restored, steps_of, table

RUNS = {"ript": (ript_run, 4, 2), "online": (online_run, 8, 4), "ppo": (ppo_run, 4, 2)}
"""The run, its steps, and the step it is saved at before the last."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with traced_once(), compiled_once(tmp_path_factory.mktemp("programs")) as environment:
        yield environment


def straight(kind: str, folder: Path) -> RLTrainConfig:
    """A run that was never stopped, evaluated every second step."""
    make, _, saved = RUNS[kind]
    config = saving(make(folder, exp_name="straight"), save_interval=saved)
    config = replace(config, evaluation=EvalConfig(interval=2, episodes=3, films=0))
    assert train(config) == 0
    return config


@pytest.fixture(scope="module")
def ript(tmp_path_factory: pytest.TempPathFactory, cache: dict) -> RLTrainConfig:
    return straight("ript", tmp_path_factory.mktemp("ript"))


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory, cache: dict) -> RLTrainConfig:
    return straight("online", tmp_path_factory.mktemp("online"))


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory, cache: dict) -> RLTrainConfig:
    return straight("ppo", tmp_path_factory.mktemp("ppo"))


@pytest.fixture(params=["ript", "online", "ppo"])
def untouched(request: pytest.FixtureRequest) -> RLTrainConfig:
    return request.getfixturevalue(request.param)


def assert_same_run(found: RLTrainConfig, expected: RLTrainConfig) -> None:
    """State, records, and where data, replay, curriculum and counters stand."""
    assert_same_bits(restored(found), restored(expected))
    assert records(found.run_dir) == records(expected.run_dir)
    assert table(found.run_dir) == table(expected.run_dir)
    assert position_of(found) == position_of(expected)


def test_the_run_is_worth_comparing(untouched: RLTrainConfig) -> None:
    """Everything moves: weights, averages, optimizers; both outcomes occur, and several collections."""
    first, last = restored(untouched, steps_of(untouched)[0]), restored(untouched)
    for name in ("params", "ema", "opt"):
        for group, tree in getattr(last, name).items():
            pairs = zip(jax.tree.leaves(getattr(first, name)[group]), jax.tree.leaves(tree), strict=True)
            assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in pairs), f"{name}/{group}"
    lines = [line["values"] for line in records(untouched.run_dir)]
    kind = "ript" if untouched.online is None else "online"
    rates = [line[f"{kind}/success_rate"] for line in lines if f"{kind}/success_rate" in line]
    assert len(rates) >= 3
    assert 0.1 < np.mean(rates) < 0.9
    assert position_of(untouched)["stream"]["episodes"] >= 15


def test_in_pieces(untouched: RLTrainConfig) -> None:
    config = replace(untouched, exp_name="pieces")
    for stop in (2, untouched.num_train_steps):
        assert train(replace(config, num_train_steps=stop), resume=stop > 2) == 0
    assert_same_run(config, untouched)


def test_evaluation_changes_nothing(ript: RLTrainConfig) -> None:
    config = replace(ript, exp_name="unwatched", evaluation=None)
    assert train(config) == 0
    assert_same_bits(restored(config), restored(ript))
    assert position_of(config) == position_of(ript)
    trained = [line for line in records(ript.run_dir) if "eval/success_rate" not in line["values"]]
    assert records(config.run_dir) == trained


@pytest.mark.parametrize(("kind", "moments"), [("ript", (16, 3)), ("online", (21, 3)), ("ppo", (16, 3))])
def test_stopped_in_the_middle_of_a_collection(
    kind: str, moments: tuple[int, int], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in the same one: the second time the weights are saved already, and only the episodes are new."""
    untouched: RLTrainConfig = request.getfixturevalue(kind)
    config = saving(replace(untouched, exp_name="stopped"), keep_last=1)
    finished, reached = [], []
    for number, moment in enumerate(moments):
        make_trouble(monkeypatch, tmp_path, terminate=moment)
        assert train(config, resume=number > 0) == 130
        position = position_of(config)
        reached.append(position["step"])
        finished.append(position["stream"]["collector"]["rollouts"])
        assert {path.name for path in (config.run_dir / "rollouts").iterdir()} == set(finished[-1])
    assert 0 < reached[0] == reached[1] < config.num_train_steps
    assert 0 < len(finished[0]) < len(finished[1])
    assert set(finished[0]) < set(finished[1])
    monkeypatch.undo()
    assert train(config, resume=True) == 0
    assert_same_run(config, untouched)
    assert list((config.run_dir / "rollouts").iterdir()) == []


def test_killed_while_collecting(ript: RLTrainConfig, cache: dict, tmp_path: Path) -> None:
    config = saving(replace(ript, exp_name="killed"), save_interval=1, async_save=False)
    with pytest.MonkeyPatch.context() as trouble:
        make_trouble(trouble, tmp_path, kill=30)
        paths = os.pathsep.join(path for path in sys.path if path)
        child = subprocess.run(
            [sys.executable, "-m", "pirl", "train", str(write_yaml(tmp_path / "run.yaml", config))],
            env=os.environ | cache | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert child.returncode == -signal.SIGKILL, child.stderr[-3000:]
    assert 0 < steps_of(config)[-1] < config.num_train_steps
    assert train(config, resume=True) == 0
    assert_same_run(config, ript)


def test_environments_that_misbehave(ript: RLTrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own. Each of these episodes is repeated, with a warning, and nothing else is different."""
    rollout = replace(ript.rollout, backend="process", worker_timeout=6.0)
    config = replace(ript, exp_name="misbehaved", rollout=rollout, num_train_steps=2)
    make_trouble(monkeypatch, tmp_path, fail=4, nan=7, kill=10, hang=18)
    with pytest.warns(PirlWarning) as warned:
        assert train(config) == 0
    said = [str(warning.message) for warning in warned]
    for reason in (
        "OSError: the cable was pulled",
        "observation 'state' of shape (2,) is not finite",
        "its worker was killed by SIGKILL (out of memory?)",
        "its worker gave no answer for 6 s",
    ):
        assert any(message.endswith(f"was lost: {reason}; it is repeated") for message in said), (reason, said)
    assert sum("worker is restarted" in message for message in said) == 2
    assert_same_bits(restored(config), restored(ript, 2))
    assert records(config.run_dir) == [line for line in records(ript.run_dir) if line["step"] <= 2]


def test_broken_environments_do_not_cost_what_was_learned(
    ript: RLTrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saving(replace(ript, exp_name="broken"), save_interval=10**6)
    make_trouble(monkeypatch, tmp_path, fail=range(12, 10**6))
    with pytest.warns(PirlWarning), pytest.raises(EnvError, match="the cable was pulled"):
        train(config)
    assert 0 < steps_of(config)[-1] < config.num_train_steps
    monkeypatch.undo()
    assert train(config, resume=True) == 0
    assert_same_run(config, ript)
