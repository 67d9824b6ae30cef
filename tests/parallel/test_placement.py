"""On eight devices that share the weights every device keeps its samples: weights travel, activations do not."""

import json
import os
import subprocess
import sys

import pytest

ON_EIGHT = """
import json, re
from dataclasses import replace

import jax, numpy as np
from pirl.models.config import get_preset
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.parallel.placement import batch_on
from pirl.parallel import sharding

sharding.MIN_SHARDED_BYTES = 512  # what is small here stands for what is large elsewhere
model = replace(get_preset("pi0_tiny"), horizon=7, max_token_len=11)
policy, mesh, rng = Pi0(model), sharding.make_mesh(8), np.random.default_rng(0)


def inputs(size):
    pictures = (size, model.image_size, model.image_size, 3)
    observation = Observation(
        images={name: rng.integers(0, 256, pictures).astype(np.uint8) for name in model.cameras},
        image_masks={name: np.ones(size, bool) for name in model.cameras},
        state=rng.normal(size=(size, model.action_dim)).astype(np.float32),
        tokenized_prompt=rng.integers(1, 200, (size, 11)).astype(np.int32),
        tokenized_prompt_mask=np.ones((size, 11), bool),
    )
    chunks = rng.normal(size=(size, 1, 7, model.action_dim)).astype(np.float32)
    return observation, chunks, rng.uniform(size=(size, 1)).astype(np.float32)


def velocity(params, observation, chunks, time):
    return policy.velocity(params, policy.encode(params, observation), chunks, time)


rows = sharding.data_sharding(mesh)
shapes = jax.eval_shape(policy.init, jax.random.key(0))
params = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), shapes)
where = sharding.state_shardings(mesh, shapes)
params, data = jax.device_put(params, where), jax.device_put(inputs(24), rows)
out = {}
for name, function in (("left alone", velocity), ("told", batch_on(rows)(velocity))):
    step = jax.jit(function, in_shardings=(where, rows, rows, rows), out_shardings=rows)
    program = step.lower(params, *data).compile()
    moved = re.findall(r"= .*?f32\\[([\\d,]+)\\].*? (?:all-gather|all-reduce|all-to-all)\\(", program.as_text())
    out[name] = {
        "moved": sorted({tuple(map(int, dims.split(","))) for dims in moved}),
        "result": np.asarray(jax.block_until_ready(program(params, *data))).ravel().tolist(),
    }
# A part of a batch that the devices cannot share is computed as it comes.
out["odd"] = jax.eval_shape(batch_on(rows)(velocity), params, *inputs(3)).shape
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def eight() -> dict:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT],
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def activations(moved: list[list[int]]) -> list[list[int]]:
    """Arrays of 24 samples, or as many pictures, by tokens and more; no weight has such a shape.

    The 11 tokens of a prompt may be looked up elsewhere: they are smaller than the vocabulary.
    """
    return [shape for shape in moved if shape[0] in (24, 72) and len(shape) > 2 and shape[1] != 11]


def test_activations_stay_where_their_samples_are(eight: dict) -> None:
    assert activations(eight["told"]["moved"]) == []
    assert activations(eight["left alone"]["moved"])  # what this is about
    assert eight["told"]["moved"]  # weights do travel


def test_numbers_stay_the_same(eight: dict) -> None:
    result = eight["told"]["result"]
    assert len(set(result)) == len(result) > 0
    assert result == pytest.approx(eight["left alone"]["result"], rel=1e-4, abs=1e-5)
    assert eight["odd"][0] == 3
