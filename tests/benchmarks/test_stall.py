"""The benchmark feeds the update what it takes, and runs where PyAV and tyro are not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from pirl.models.config import get_preset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = ["--preset", "pi0_tiny", "--episodes", "5", "--steps", "6", "--batch", "4", "--repeats", "2", "--updates", "6"]


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import stall

    return stall


@pytest.mark.parametrize("decode", [False, True])
def test_batches_of_the_dataset_fit_the_update(stall: ModuleType, tmp_path: Path, decode: bool) -> None:
    args, config = stall.arguments([*SIZES, *(["--decode"] if decode else [])]), get_preset("pi0_tiny")
    args.size = config.image_size
    source, robot = stall.open_dataset(tmp_path, config, args)
    assert [bool(list(tmp_path.rglob("*.npy"))), source.prepare()] == [not decode, True]
    for episode in range(len(source)):
        found, expected = source.frames(episode)["base_0_rgb"], stall.pictures(episode, 0, 6, config.image_size)
        np.testing.assert_array_equal(found, expected)
    assert [source.episode(index).success for index in range(5)] == [True, False, True, False, True]
    with stall.make_loader(source, robot, config, args) as loader:
        batch, key = loader.sample_batch(), jax.random.key(0)
    agent = stall.gpu.make_agent(config, next(row for row in stall.gpu.ROWS if row.name == "awr"), augment=False)
    state = jax.eval_shape(agent.init, key)
    after, _ = jax.eval_shape(agent.update, state, batch, key)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_runs_without_the_packages_of_videos_and_flags(tmp_path: Path) -> None:
    words = [*SIZES, "--gap", "20", "--dir", str(tmp_path), "--json", str(tmp_path / "numbers.json")]
    code = f"import sys; sys.modules.update(av=None, tyro=None); import stall; sys.exit(stall.main({words}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "numbers.json").read_text())
    # Batch 0 is drawn before; batches 1 to 6 are of pools 0 to 3.
    assert (found["updates"], found["refreshes"]) == (6, 3)
    assert found["step_ms"]["median"] >= 20
    assert 0 <= found["stall_fraction"] < 1
    assert found["loader_rate"] > 0
    assert "| pools that took over | 3 |" in done.stdout
