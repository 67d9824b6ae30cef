"""Runs that act, on one process and on two: the same episodes, batches and weights; stopped and killed together."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collecting_runs import ACRLPD, ROLLOUT, VARIABLE, online_run, ript_run, saving, traced_once
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml
from pirl.rollout.config import EvalConfig
from pirl.training.config import SGD, ConstantSchedule, MeshConfig
from pirl.training.loop import train
from several_processes import start_together
from small_runs import assert_close, compiled_once, position_of, records, restored, steps_of

PROCESS = """
import json, os, sys
from pathlib import Path

import jax

from collecting_runs import ACRLPD, ROLLOUT, VARIABLE, online_run, ript_run, saving, traced_once
from pirl import recipes
from pirl.parallel import distributed, sharding
from pirl.rollout import hosts
from pirl.training import loop

folder = Path(sys.argv[1])
sharding.MIN_SHARDED_BYTES = 512  # what is small here stands for what is large elsewhere
distributed.HEARTBEAT_SECONDS = 10
collect, acted, out = hosts.collect, [], {}

def counted(pool, policy, jobs, **settings):
    acted[-1].append([job.number for job in jobs])
    return collect(pool, policy, jobs, **settings)

hosts.collect = counted
with traced_once():
    for name, trouble in json.loads(sys.argv[2]).items():
        os.environ[VARIABLE] = trouble
        acted.append([])
        code = loop.train(recipes.load(str(folder / f"{name}.yaml")))
        out[name] = {"code": code, "acted": acted[-1]}
        (folder / f"{jax.process_index()}.json").write_text(json.dumps(out))
"""
KINDS = {"ript": ript_run, "online": online_run}
SHARED = {"ript": 4, "online": 2}
"""Devices that share weights: those of both processes, or those of one."""


def configuration(kind: str, folder: Path, **changes: Any) -> RLTrainConfig:
    """Plain gradient descent: Adam would blow the last bits of a vanishing gradient up to a whole step."""
    rate = ConstantSchedule(lr=0.02)
    own: dict[str, Any] = dict(policy_optimizer=SGD(), critic_optimizer=SGD(), policy_schedule=rate)
    own |= dict(critic_schedule=rate, rollout=replace(ROLLOUT, num_envs=2))
    own |= dict(evaluation=EvalConfig(interval=2, episodes=5, films=int(kind == "online")))
    if kind == "online":  # which half of the episodes a critic learns from hangs on the last bit of their actions
        own["agent"] = replace(ACRLPD, members="all")
    return KINDS[kind](folder, exp_name=kind, **(own | changes))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RLTrainConfig]]:
    """Trained by this process."""
    with traced_once(), compiled_once(tmp_path_factory.mktemp("programs")):
        configs = {kind: configuration(kind, tmp_path_factory.mktemp("alone")) for kind in KINDS}
        assert [train(config) for config in configs.values()] == [0, 0]
        yield configs


class Together:
    """What two processes of two devices did, one run after the other: two whole ones, one that one of them was asked
    to stop, one in which one of them was killed.
    """

    def __init__(self, folder: Path) -> None:
        runs = {kind: configuration(kind, folder / "runs", mesh=MeshConfig(fsdp=SHARED[kind])) for kind in KINDS}
        runs["stopped"] = replace(runs["ript"], exp_name="stopped")
        runs["killed"] = saving(replace(runs["ript"], exp_name="killed"), save_interval=1, async_save=False)
        self.configs = runs
        counters = {name: folder / f"episodes-{name}" for name in runs}
        for name, config in runs.items():
            counters[name].touch()
            write_yaml(folder / f"{name}.yaml", config)
        # Episode 18 begins in the second iteration, when another one of its process is over.
        trouble = {"stopped": f"{counters['stopped']}|terminate:18:19", "killed": f"{counters['killed']}|kill:18:19"}
        plan = json.dumps({name: trouble.get(name, "") for name in runs})
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), VARIABLE: ""}
        children = start_together(["-c", PROCESS, str(folder), plan], 2, devices=2, environment=paths, logs=folder)
        try:
            self.codes = [child.wait(300) for child in children]
        finally:
            for child in children:
                child.kill()
        self.said = [(folder / f"{index}.log").read_text() for index in (0, 1)]
        assert sorted(code == -signal.SIGKILL for code in self.codes) == [False, True], "\n\n".join(
            text[-3000:] for text in self.said
        )
        self.reports = [json.loads((folder / f"{index}.json").read_text()) for index in (0, 1)]


@pytest.fixture(scope="module")
def together(alone: dict[str, RLTrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(tmp_path_factory.mktemp("together"))


def assert_same_run(found: RLTrainConfig, expected: RLTrainConfig) -> None:
    """The same records, episodes and weights, up to rounding."""
    for left, right in zip(records(found.run_dir), records(expected.run_dir), strict=True):
        assert left["values"] == pytest.approx(right["values"], rel=1e-5, abs=1e-5)
    assert_close(restored(found), restored(expected), rtol=1e-5, atol=1e-5)
    left, right = (position_of(config)["stream"] for config in (found, expected))
    assert {name: left[name] for name in left if name != "replay"} == {n: right[n] for n in right if n != "replay"}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_learn_what_one_learns(kind: str, together: Together, alone: dict[str, RLTrainConfig]) -> None:
    assert [report[kind]["code"] for report in together.reports] == [0, 0]
    assert_same_run(together.configs[kind], alone[kind])
    rates = [
        x["values"][f"{kind}/success_rate"]
        for x in records(alone[kind].run_dir)
        if f"{kind}/success_rate" in x["values"]
    ]
    assert 0.1 < np.mean(rates) < 0.95  # or nothing would be compared


@pytest.mark.parametrize("kind", KINDS)
def test_each_acts_in_its_share(kind: str, together: Together) -> None:
    """Of every collection and every evaluation, and together in each episode once."""
    first, second = (report[kind]["acted"] for report in together.reports)
    assert len(first) == len(second) > 5
    for mine, theirs in zip(first, second, strict=True):
        assert not set(mine) & set(theirs)
        assert 0 <= len(mine) - len(theirs) <= 1
        assert sorted([*mine, *theirs]) == list(range(min(mine), min(mine) + len(mine) + len(theirs)))


def test_process_0_alone_writes(together: Together) -> None:
    for kind in KINDS:
        config = together.configs[kind]
        assert list((config.run_dir / "rollouts").glob("*")) == []
        assert len({line["step"] for line in records(config.run_dir)}) > 3
    assert (together.configs["online"].run_dir / "films" / "2" / "filmstrip.png").exists()
    replay = position_of(together.configs["online"])["stream"]["replay"]["episodes"]
    assert len(list((together.configs["online"].run_dir / "replay").iterdir())) == len(replay)


def test_one_is_asked_to_stop_while_they_collect(together: Together, alone: dict[str, RLTrainConfig]) -> None:
    """All stop, what was finished is saved, and one process goes on with it."""
    config = together.configs["stopped"]
    assert [report["stopped"]["code"] for report in together.reports] == [130, 130]
    position = position_of(config)
    finished = position["stream"]["collector"]["rollouts"]
    assert position["step"] == 1
    assert {path.name for path in (config.run_dir / "rollouts").iterdir()} == set(finished)
    assert finished
    go_on(config)
    assert_same_run(config, alone["ript"])


def test_one_is_killed_while_they_collect(together: Together, alone: dict[str, RLTrainConfig]) -> None:
    """The other ends and says why; one process goes on from the last checkpoint."""
    config = together.configs["killed"]
    (survivor,) = [index for index, code in enumerate(together.codes) if code != -signal.SIGKILL]
    assert together.codes[survivor] not in (0, 130)
    assert any(text in together.said[survivor] for text in ("lost another one", "another task died"))
    assert steps_of(config) == [1]
    go_on(config)
    assert_same_run(config, alone["ript"])


def go_on(config: RLTrainConfig) -> None:
    assert train(replace(config, mesh=MeshConfig()), resume=True) == 0
