"""Two processes over the loopback train one sharded model, and write and read its checkpoints together."""

import json
import os
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from pirl.agents.agent import TrainState
from pirl.checkpoints.run import Checkpoints
from pirl.errors import CheckpointError, ConfigError
from pirl.parallel import failures
from pirl.parallel.distributed import (
    Place,
    barrier,
    find_place,
    host_slice,
    initialize,
    is_main,
)
from pirl.parallel.failures import LostProcessError, all_alive
from pirl.parallel.sharding import make_mesh, sharded_shapes
from pirl.training.config import CheckpointConfig

PROCESS = """
import json, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from pirl.agents.agent import TrainState
from pirl.errors import PirlError
from pirl.parallel import distributed
from pirl.checkpoints.run import Checkpoints
from pirl.checkpoints.run_directory import prepare_directory
from pirl.training.config import CheckpointConfig
from pirl.parallel.sharding import (
    check_batch, make_mesh, replicated, shard_batch, sharded_shapes, state_shardings, validate_fsdp_sharding,
)

run = Path(sys.argv[1])
place = distributed.initialize(timeout=60)
out = {"place": [place.launcher, place.num_processes, place.process_id], "main": distributed.is_main()}
out["cache"] = jax.config.jax_enable_compilation_cache
mesh = make_mesh(8)
out["devices"] = [len(jax.devices()), len(jax.local_devices())]

def init():
    wave = jnp.sin(jnp.arange(2048 * 512, dtype=jnp.float32)).reshape(2048, 512)
    return TrainState(step=jnp.int32(0), params={"policy": {"w": wave}}, ema={"policy": {"w": wave * 0.5}})

def step(state, batch):
    value, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state.params["policy"]["w"])
    w = state.params["policy"]["w"] - 0.1 * grad
    return TrainState(step=state.step + 1, params={"policy": {"w": w}}, ema=state.ema), value

where = state_shardings(mesh, jax.eval_shape(init))
state = jax.jit(init, out_shardings=where)()
report = validate_fsdp_sharding(state, mesh)
out["share"] = [report.largest_share, len(report.device_bytes)]
whole = {"x": np.random.default_rng(0).normal(size=(16, 2048)).astype(np.float32)}
check_batch(16, mesh)
mine = distributed.host_slice(whole, mesh)
out["rows"] = [int(np.flatnonzero((whole["x"] == mine["x"][i]).all(1))[0]) for i in (0, -1)] + [len(mine["x"])]
jitted = jax.jit(step, out_shardings=(where, replicated(mesh)), donate_argnums=0)
out["resuming"] = prepare_directory(run)
with Checkpoints(run, CheckpointConfig(keep_last=1, keep_period=None)) as checkpoints:
    out["losses"] = []
    for number in (1, 2, 3):
        state, loss = jitted(state, shard_batch(mine, mesh))
        out["losses"].append(float(loss))
        checkpoints.save(number, state, extra={"from": jax.process_index()}, metrics={"loss": loss})
    checkpoints.wait()
    distributed.barrier("deleted", 30)
    out["steps"] = checkpoints.all_steps()
    # The same two processes, weights whole on every device: read back onto another mesh.
    other = checkpoints.restore(sharded_shapes(make_mesh(4), jax.eval_shape(init)))
    same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: jnp.all(x == y), a, b), out_shardings=replicated(mesh))
    again = checkpoints.restore(sharded_shapes(mesh, jax.eval_shape(init)))
    out["same"] = [bool(x) for x in jax.tree.leaves(same(again, state))]
    out["four"] = [list(s.data.shape) for s in other.params["policy"]["w"].addressable_shards][0]
    out["extra"] = checkpoints.extra()
try:
    prepare_directory(run)
except PirlError as error:
    out["exists"] = str(error)
if distributed.is_main():
    try:
        distributed.barrier("alone", 1.0)
    except PirlError as error:
        out["alone"] = str(error)
else:
    time.sleep(2)
Path(f"{sys.argv[1]}.{jax.process_index()}.json").write_text(json.dumps(out))
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    run = tmp_path_factory.mktemp("two") / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for index in (0, 1):
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
        }
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(run)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [child.communicate(timeout=240)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(error[-3000:] for error in errors)
    return run, [json.loads(Path(f"{run}.{index}.json").read_text()) for index in (0, 1)]


def test_two_processes_make_one_mesh(two: tuple[Path, list[dict]]) -> None:
    first, second = two[1]
    assert first["place"] == ["the environment", 2, 0]
    assert second["place"] == ["the environment", 2, 1]
    assert [first["main"], second["main"]] == [True, False]
    assert first["devices"] == second["devices"] == [8, 4]
    assert first["rows"] == [0, 7, 8]
    assert second["rows"] == [8, 15, 8]
    assert not first["cache"]  # see test_kills_processes: from the cache, collectives run in any order
    for process in (first, second):
        share, devices = process["share"]
        assert share == pytest.approx(1 / 8, rel=0.05)
        assert devices == 4


def test_two_processes_train_as_one(two: tuple[Path, list[dict]]) -> None:
    first, second = two[1]
    assert first["losses"] == second["losses"]
    w = np.sin(np.arange(2048 * 512, dtype=np.float32)).reshape(2048, 512)
    x = np.random.default_rng(0).normal(size=(16, 2048)).astype(np.float32)
    for loss in first["losses"]:
        y = x @ w
        assert loss == pytest.approx(float(np.mean(y**2)), rel=1e-3)
        w = w - 0.1 * x.T @ (2 * y / y.size)
    with Checkpoints(two[0], CheckpointConfig()) as checkpoints:  # what both wrote, in one process
        leaf = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
        reference = TrainState(
            step=jax.ShapeDtypeStruct((), jnp.int32), params={"policy": {"w": leaf}}, ema={"policy": {"w": leaf}}
        )
        state = checkpoints.restore(sharded_shapes(make_mesh(), reference))
        assert int(state.step) == 3
        np.testing.assert_allclose(state.params["policy"]["w"], w, atol=2e-3)


def test_two_processes_share_their_checkpoints(two: tuple[Path, list[dict]]) -> None:
    for process in two[1]:
        assert process["resuming"] is False
        assert process["steps"] == [3]
        assert process["same"] == [True, True, True]
        assert process["four"] == [512, 512]
        assert process["extra"] == {"from": 0}
        assert "existing run with checkpoints of steps 3" in process["exists"]
    assert sorted(child.name for child in two[0].iterdir()) == [".lock", "3", "metadata.json"]


def test_who_waits_in_vain_is_told(two: tuple[Path, list[dict]]) -> None:
    assert "process 0 waited 1 s at 'alone' for all 2 processes" in two[1][0]["alone"]


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2"}, None),  # a batch script, outside srun
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            Place(launcher="SLURM", num_processes=2, process_id=1),
        ),
        (
            {**SLURM, "SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            Place(launcher="SLURM", num_processes=16, process_id=1, all_local_devices=False),
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            Place(launcher="Open MPI", num_processes=4, process_id=3, all_local_devices=False),
        ),
        (
            {**SLURM, "JAX_COORDINATOR_ADDRESS": "head:99", "JAX_NUM_PROCESSES": "3", "JOB_COMPLETION_INDEX": "2"},
            Place(launcher="the environment", coordinator="head:99", num_processes=3, process_id=2),
        ),
    ],
)
def test_the_launcher_is_recognised(environment: dict[str, str], place: Place | None) -> None:
    assert find_place(environment) == place


def test_arguments_come_before_the_environment() -> None:
    expected = Place(launcher="the arguments", coordinator="a:1", num_processes=2, process_id=0)
    assert find_place(SLURM, "a:1", 2, 0) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a:1", 2, None), "but not process_id"),
        ((None, 2, 0), "but not coordinator"),
        (("a", 2, 0), "an address as host:port"),
        (("a:1", 2, 2), "process 2 of 2"),
    ],
)
def test_incomplete_or_wrong_arguments_are_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_place({}, *arguments)
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES"):
        find_place({"JAX_COORDINATOR_ADDRESS": "a:1"})


class Service:
    """What processes tell each other."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.words[key] = value

    def key_value_dir_get(self, place: str) -> list[tuple[str, str]]:
        return [(key, word) for key, word in self.words.items() if key.startswith(f"{place}/")]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("UNKNOWN: Gloo all-reduce failed: Read error [127.0.0.1]:44243: Connection reset by peer"),
        CheckpointError("step 40 could not be saved: Gloo AllGather failed: Connection closed by peer", hint="disk?"),
        RuntimeError("UNAVAILABLE: Task 1 heartbeat timeout. This indicates that the remote task has failed"),
    ],
)
def test_what_fails_because_another_process_is_gone_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)), all_alive():  # alone, nobody can be lost
        raise error
    service = Service()
    service.key_value_set("pirl.failures/0/left/000001", "")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(failures, "_numbers", count())
    monkeypatch.setattr(failures, "_LAST_SECONDS", 0.0)
    monkeypatch.setattr(ocp.multihost, "get_jax_distributed_client", lambda: service)
    with pytest.raises(LostProcessError, match="process 0 of 2 lost another one") as caught, all_alive():
        raise error
    assert "--resume auto" in caught.value.hint
    service.key_value_set("pirl.failures/1/left/000001", "")
    with pytest.raises(ZeroDivisionError), all_alive():
        raise ZeroDivisionError
    assert "ZeroDivisionError" in service.words["pirl.failures/1/failed/000000"]
    service.key_value_set("pirl.failures/2/failed/000001", "process 1 failed: the cable was pulled")
    service.key_value_set("pirl.failures/2/left/000001", "")
    with pytest.raises(LostProcessError, match="process 0 of 2: process 1 failed: the cable was pulled"), all_alive():
        raise error
    assert "pirl.failures/2/failed/000000" not in service.words


def test_one_process_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SLURM, "JAX_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert initialize() is None
    assert is_main()
    barrier("nobody else")
    batch = {"x": np.arange(6).reshape(3, 2)}
    np.testing.assert_array_equal(host_slice(batch, make_mesh())["x"], batch["x"])
