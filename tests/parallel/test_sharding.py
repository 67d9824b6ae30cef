"""The mesh, the sharding of a train state, and eight simulated devices that hold an eighth each."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pirl.agents.agent import TrainState
from pirl.agents.optim import make_optimizer
from pirl.errors import ConfigError
from pirl.models.config import get_preset
from pirl.models.params import flatten
from pirl.models.pi0 import param_shapes
from pirl.parallel.sharding import (
    check_batch,
    data_sharding,
    fsdp_spec,
    make_mesh,
    shard_batch,
    sharded_shapes,
    state_shardings,
    validate_fsdp_sharding,
)
from pirl.training.config import AdamW

ON_EIGHT_DEVICES = """
import json
import jax, jax.numpy as jnp, numpy as np
from pirl.errors import ConfigError
from pirl.training.config import AdamW
from pirl.agents.optim import make_optimizer
from pirl.parallel import sharding as sh

assert len(jax.devices()) == 8
out = {}
for fsdp in (3, 16):
    try:
        sh.make_mesh(fsdp)
    except ConfigError as error:
        out[f"mesh {fsdp}"] = str(error)
mesh = sh.make_mesh(4)
out["mesh shape"] = list(mesh.devices.shape)
out["neighbours"] = [[d.id for d in row] for row in mesh.devices]
try:
    sh.check_batch(12, mesh)
except ConfigError as error:
    out["batch 12"] = str(error)
batch = sh.shard_batch({"x": np.arange(16.0).reshape(16, 1)}, mesh)
out["rows"] = [float(s.data[0, 0]) for s in sorted(batch["x"].addressable_shards, key=lambda s: s.device.id)]

tx = make_optimizer(AdamW(eps=1e-2), 1e-5)  # Adam without eps blows rounding up

def init():
    # Two matrices over 4 MiB (one is sharded along its second axis), a bias and a small critic.
    wave = lambda *shape: jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)
    w = {"a": wave(2048, 512), "b": wave(129, 8192), "bias": jnp.ones(512)}
    return {"w": w, "opt": tx.init(w), "ema": jax.tree.map(jnp.copy, w), "critic": jnp.ones((64, 64))}

def step(state, x):
    def loss(w):
        return jnp.mean(jnp.square(x @ w["b"][:, :2048] @ w["a"] + w["bias"]))
    value, grads = jax.value_and_grad(loss)(state["w"])
    updates, opt = tx.update(grads, state["opt"], state["w"])
    w = jax.tree.map(jnp.add, state["w"], updates)
    return state | {"w": w, "opt": opt}, value

shapes = jax.eval_shape(init)
losses, final = {}, {}
for fsdp in (1, 8):
    mesh = sh.make_mesh(fsdp)
    where = sh.state_shardings(mesh, shapes)
    state = jax.jit(init, out_shardings=where)()
    jitted = jax.jit(step, in_shardings=(where, sh.data_sharding(mesh)), out_shardings=(where, sh.replicated(mesh)))
    x = sh.shard_batch(np.random.default_rng(0).normal(size=(8, 129)).astype(np.float32), mesh)
    losses[fsdp] = []
    for _ in range(2):
        state, value = jitted(state, x)
        losses[fsdp].append(float(value))
    report = sh.validate_fsdp_sharding(state, mesh)
    planned = sh.validate_fsdp_sharding(sh.sharded_shapes(mesh, shapes), mesh)
    sizes = len(set(report.device_bytes.values()))
    out[f"report {fsdp}"] = [report.largest_share, sizes, report.sharded, report.replicated]
    out[f"plan {fsdp}"] = report == planned
    out[f"large {fsdp}"] = list(report.replicated_large)
    final[fsdp] = jax.tree.map(np.asarray, state["w"])
out["losses"] = losses
out["difference"] = max(float(np.abs(final[1][k] - final[8][k]).max()) for k in final[1])

replicated = jax.device_put(jnp.ones((2048, 512)), sh.replicated(sh.make_mesh(8)))
for name, array in (("replicated", replicated), ("one device", jnp.ones((2048, 512)))):
    try:
        sh.validate_fsdp_sharding({"w": array}, sh.make_mesh(8))
    except ConfigError as error:
        out[name] = str(error)
odd = sh.sharded_shapes(sh.make_mesh(8), {"odd": jax.ShapeDtypeStruct((1331, 1331), jnp.float32)})
try:
    sh.validate_fsdp_sharding(odd, sh.make_mesh(8))
except ConfigError as error:
    out["odd"] = str(error)
print("RESULT " + json.dumps(out))
"""


@pytest.fixture(scope="module")
def eight() -> dict:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT ", 1)[1])


def test_each_of_eight_devices_holds_an_eighth(eight: dict) -> None:
    share, sizes, sharded, replicated = eight["report 8"]
    assert 1 / 8 <= share <= 1.05 / 8
    assert sizes == 1, "even"
    assert (sharded, replicated) == (8, 6)  # a, b, their two moments and their average; the rest is small
    assert eight["large 8"] == []
    share, _, sharded, replicated = eight["report 1"]
    assert (share, sharded, replicated) == (1, 0, 14)
    assert sorted(eight["large 1"])[0] == "ema/a"
    assert len(eight["large 1"]) == 8
    assert eight["plan 1"]
    assert eight["plan 8"]


def test_sharded_training_is_the_same_training(eight: dict) -> None:
    one, sharded = eight["losses"]["1"], eight["losses"]["8"]
    assert one[1] < one[0]
    np.testing.assert_allclose(sharded, one, rtol=1e-5)
    assert eight["difference"] < 1e-5


def test_the_mesh_puts_devices_that_share_weights_side_by_side(eight: dict) -> None:
    assert eight["mesh shape"] == [2, 4]
    assert eight["neighbours"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert eight["rows"] == [0, 2, 4, 6, 8, 10, 12, 14]


def test_impossible_meshes_and_batches_are_refused_with_what_would_do(eight: dict) -> None:
    assert "fsdp is 3 and there are 8 devices" in eight["mesh 3"]
    assert "1, 2, 4, 8" in eight["mesh 3"]
    assert "fsdp is 16" in eight["mesh 16"]
    assert "take 8 or 16" in eight["batch 12"]


def test_silent_replication_is_an_error_that_names_the_array(eight: dict) -> None:
    for case in ("replicated", "one device"):
        assert "fsdp is 8, yet 1 large arrays are whole on every device\n    w [2048, 512], 4 MiB" in eight[case]
    assert "odd [1331, 1331]" in eight["odd"]
    assert "divides one of their axes" in eight["odd"]


def test_the_rule_covers_the_whole_train_state() -> None:
    """π₀ at full size, as shapes: moments, average and target lie where their parameter does; the critic is small."""
    mesh = make_mesh(1)
    policy = param_shapes(get_preset("pi0"))
    critic = {"layer": {"kernel": jax.ShapeDtypeStruct((512, 512), jnp.float32)}}
    tx = make_optimizer(AdamW(), 1e-3)
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params={"policy": policy, "critic": critic},
        target={"critic": critic},
        ema={"policy": policy},
        opt={"policy": jax.eval_shape(tx.init, policy)},
    )
    assert jax.tree.structure(state_shardings(mesh, state)) == jax.tree.structure(state)
    # That these specs are OpenPI's is tests/parity/test_trees.py.
    specs = {path: fsdp_spec(leaf.shape, leaf.dtype, 8) for path, leaf in flatten(policy).items()}
    assert len(specs) == 50
    assert specs["PaliGemma/llm/embedder/input_embedding"] == PartitionSpec("fsdp", None)
    moments = state.opt["policy"][1][0].mu
    assert {p: fsdp_spec(x.shape, x.dtype, 8) for p, x in flatten(moments).items()} == specs
    assert all(fsdp_spec(x.shape, x.dtype, 8) == PartitionSpec() for x in jax.tree.leaves(critic))


def test_one_device() -> None:
    mesh = make_mesh()
    assert dict(mesh.shape) == {"batch": 1, "fsdp": 1}
    check_batch(7, mesh)
    with pytest.raises(ConfigError, match="the batch size is 0"):
        check_batch(0, mesh)
    batch = shard_batch({"x": np.arange(6, dtype=np.uint8).reshape(3, 2)}, mesh)
    assert batch["x"].dtype == np.uint8
    assert batch["x"].sharding.is_equivalent_to(data_sharding(mesh), 2)
    report = validate_fsdp_sharding(sharded_shapes(mesh, {"w": jnp.ones((2048, 1024))}), mesh)
    assert report.total_bytes == 8 * 2**20
    assert report.replicated_large == ("w",)
    with pytest.raises(ConfigError, match="fsdp is 0"):
        make_mesh(0)
