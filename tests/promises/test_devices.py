"""One device, eight devices, two processes of four: the same run, the same weights, and a fair share for each."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest

from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml
from pirl.models.config import MLPFlowConfig
from pirl.training.config import SGD, ConstantSchedule, MeshConfig
from pirl.training.loop import train
from small_runs import assert_close, compiled_once, records, restored, small_run, steps_of

PROCESS = """
import json, os, signal, sys
from dataclasses import replace
from pathlib import Path

from pirl import recipes
from pirl.data import loader
from pirl.errors import ConfigError
from pirl.training import loop, sharding

folder = Path(sys.argv[1])
rows, kill = [], []
put_on_devices, save, large = loader.put_on_devices, loop.Checkpoints.save, sharding.MIN_SHARDED_BYTES

def counted(batch, where):
    rows.append(len(batch["actions"]))
    if kill and len(rows) > 3:
        os.kill(os.getpid(), kill.pop())
    return put_on_devices(batch, where)

def measured(self, step, state, **settings):
    mesh = state.step.sharding.mesh
    placed = sharding.validate_fsdp_sharding(state, mesh)
    report["share"] = placed.largest_share
    report["bytes"] = sorted(placed.device_bytes.values())
    return save(self, step, state, **settings)

loader.put_on_devices, loop.Checkpoints.save = counted, measured
out = {}
for name in sys.argv[2:]:
    config = recipes.load(str(folder / f"{name}.yaml"))
    # What is small here stands for what is large elsewhere.
    sharding.MIN_SHARDED_BYTES = 512 if name.startswith("rl") else large
    report = out[name] = {}
    rows.clear()
    report["code"] = loop.train(config)
    report["rows"] = sorted(set(rows))

import jax

try:
    loop.train(replace(config, exp_name="odd", batch_size=12))
except ConfigError as error:
    out["odd"] = str(error)
rows.clear()
if jax.process_index() == jax.process_count() - 1:
    kill.append(signal.SIGTERM)
out["stopped"] = loop.train(replace(config, exp_name="stopped", num_train_steps=1000))
out["devices"] = [len(jax.devices()), len(jax.local_devices())]
(folder / f"{jax.process_index()}.json").write_text(json.dumps(out))
"""
RUNS = ("bc_copies", "bc_shared", "rl_copies", "rl_shared")
STEPS = 3


def configurations(folder: Path) -> dict[str, RLTrainConfig]:
    """Behaviour cloning with matrices over 4 MiB; ACRLPD with all it has, small. Weights copied or shared.

    Plain gradient descent: Adam would blow the last bits of a vanishing gradient up to a whole step.
    """
    common: dict[str, Any] = dict(
        batch_size=16,
        num_train_steps=STEPS,
        log_interval=1,
        policy_optimizer=SGD(),
        critic_optimizer=SGD(),
        policy_schedule=ConstantSchedule(lr=0.02),
        critic_schedule=ConstantSchedule(lr=0.02),
    )
    wide = MLPFlowConfig(state_dim=2, action_dim=2, horizon=3, hidden=(2048, 2048, 2048))
    agent = ACRLPDConfig(discount=0.9, actor="distill", num_action_samples=2, flow_steps=2, accumulate=2)
    bc = small_run(folder, BCConfig(), **common, model=wide)
    rl = small_run(folder, agent, **common)
    shared = MeshConfig(fsdp=8)
    made = (bc, replace(bc, mesh=shared), rl, replace(rl, mesh=shared))
    return {name: replace(config, exp_name=name) for name, config in zip(RUNS, made, strict=True)}


@dataclass(frozen=True)
class Group:
    """What the processes of a run left."""

    configs: dict[str, RLTrainConfig]
    reports: list[dict]


def run_group(folder: Path, processes: int) -> Group:
    """Train everything on eight simulated devices, over so many processes."""
    configs = configurations(folder / "runs")
    for name, config in configs.items():
        write_yaml(folder / f"{name}.yaml", config)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={8 // processes} --xla_backend_optimization_level=0"
    children = []
    for index in range(processes):
        place = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(index),
        }
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(folder), *RUNS],
                env=environment | (place if processes > 1 else {}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [child.communicate(timeout=300)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * processes, "\n".join(e[-3000:] for e in errors)
    return Group(configs, [json.loads((folder / f"{index}.json").read_text()) for index in range(processes)])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RLTrainConfig]]:
    """The two algorithms on one device."""
    assert len(jax.devices()) == 1
    with compiled_once(tmp_path_factory.mktemp("programs")):
        configs = configurations(tmp_path_factory.mktemp("one"))
        for name in ("bc_copies", "rl_copies"):
            assert train(configs[name]) == 0
        yield {name: configs[f"{name.split('_')[0]}_copies"] for name in RUNS}


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Group:
    return run_group(tmp_path_factory.mktemp("eight"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Group:
    return run_group(tmp_path_factory.mktemp("two"), 2)


def assert_same_run(found: RLTrainConfig, expected: RLTrainConfig, *, tolerance: float) -> None:
    """Same records, and the same states, read onto this one device."""
    lines = records(expected.run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for left, right in zip(records(found.run_dir), lines, strict=True):
        assert left["values"] == pytest.approx(right["values"], rel=tolerance, abs=tolerance)
    assert_close(restored(found), restored(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", RUNS)
def test_eight_devices_train_as_one(name: str, one: dict[str, RLTrainConfig], eight: Group) -> None:
    assert eight.reports[0]["devices"] == [8, 8]
    assert eight.reports[0][name]["code"] == 0
    assert_same_run(eight.configs[name], one[name], tolerance=1e-5)


def test_shared_weights_take_an_eighth(eight: Group) -> None:
    """Of a state whose matrices are 16 MiB, without help; copied weights are whole on each."""
    copied, shared = (eight.reports[0][name] for name in ("bc_copies", "bc_shared"))
    assert copied["share"] == 1
    assert shared["share"] <= 1.05 / 8
    assert len(shared["bytes"]) == 8
    assert min(shared["bytes"]) == max(shared["bytes"])
    assert eight.reports[0]["rl_shared"]["share"] < 0.5  # most of it: vectors and odd sizes stay whole


def test_eight_devices_checkpoint_goes_on_on_one(one: dict[str, RLTrainConfig], eight: Group) -> None:
    more = replace(eight.configs["rl_shared"], mesh=MeshConfig(), num_train_steps=STEPS + 2)
    alone = replace(one["rl_shared"], num_train_steps=STEPS + 2)
    assert train(more, resume=True) == train(alone, resume=True) == 0
    assert_close(restored(more), restored(alone), rtol=1e-5, atol=1e-5)
    assert [line["step"] for line in records(more.run_dir)] == list(range(1, STEPS + 3))


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(name: str, eight: Group, two: Group) -> None:
    for report in two.reports:
        assert report["devices"] == [8, 4]
        assert report[name]["code"] == 0
        assert report[name]["rows"] == [8]  # of sixteen
        assert len(report[name]["bytes"]) == 4
    assert eight.reports[0][name]["rows"] == [16]
    assert two.reports[0][name]["share"] == eight.reports[0][name]["share"]
    assert_close(restored(two.configs[name], STEPS), restored(eight.configs[name], STEPS), rtol=1e-5, atol=1e-5)
    for left, right in zip(records(two.configs[name].run_dir), records(eight.configs[name].run_dir), strict=False):
        assert left["values"] == pytest.approx(right["values"], rel=1e-5, abs=1e-5)


def test_two_processes_write_one_checkpoint(two: Group) -> None:
    run = two.configs["bc_shared"].run_dir
    assert steps_of(two.configs["bc_shared"]) == [STEPS]
    written = [sum(f.stat().st_size for f in (run / str(STEPS)).rglob(f"ocdbt.process_{i}/d/*")) for i in (0, 1)]
    assert min(written) > 0.4 * sum(written)  # each wrote its half
    assert len(records(run)) == STEPS  # and process 0 alone the metrics


def test_all_processes_stop_after_the_same_step(eight: Group, two: Group) -> None:
    """A signal to one of them ends the run for all, with one checkpoint."""
    assert [report["stopped"] for report in (*eight.reports, *two.reports)] == [130, 130, 130]
    (step,) = steps_of(replace(two.configs["rl_shared"], exp_name="stopped"))
    assert 1 <= step < 10


def test_a_batch_that_cannot_be_shared_is_refused(eight: Group, two: Group) -> None:
    for report in (*eight.reports, *two.reports):
        assert "the batch size is 12 and there are 8 devices" in report["odd"]
        assert "take 8 or 16, or fewer devices" in report["odd"]
    assert not replace(eight.configs["rl_shared"], exp_name="odd").run_dir.exists()
