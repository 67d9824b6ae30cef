"""Training runs small enough for tests (a state-only policy, compiled once), and readers of their results."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from pirl.agents.agent import TrainState
from pirl.agents.agent_config import AgentConfig
from pirl.build import build_agent
from pirl.checkpoints.run import Checkpoints
from pirl.config import RLTrainConfig
from pirl.models.config import MLPFlowConfig
from pirl.parallel.sharding import make_mesh, sharded_shapes
from pirl.recipes import get_config

_CACHE = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextmanager
def compiled_once(folder: Path) -> Iterator[dict[str, str]]:
    """Use a persistent compile cache, because every run jits anew; yields environment variables for child processes."""
    settings = {**_CACHE, "jax_compilation_cache_dir": str(folder)}
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        _configure(settings)
        yield {name.upper(): str(value) for name, value in settings.items()}
    finally:
        _configure(before)


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # jax reads the folder setting only once


def small_run(folder: Path, agent: AgentConfig, **changes: Any) -> RLTrainConfig:
    """The debug recipe with a two-layer policy without images, and a critic with dropout."""
    recipe = get_config("debug")
    steps = 1 if agent.one_step else getattr(agent, "flow_steps", recipe.rollout.flow_steps)
    small = replace(
        recipe,
        rollout=replace(recipe.rollout, flow_steps=steps),
        model=MLPFlowConfig(state_dim=2, action_dim=2, horizon=3, hidden=(16, 16)),
        agent=agent,
        critic=replace(recipe.critic, hidden=(16,), dropout=0.2),
        data=replace(recipe.data, cameras=(), tokenizer="none"),
        checkpoint=replace(recipe.checkpoint, base_dir=str(folder), save_interval=5, keep_last=100),
        batch_size=8,
        num_train_steps=11,
        log_interval=4,
    )
    return replace(small, **changes)


def restored(config: RLTrainConfig, step: int | None = None) -> TrainState:
    """A run's saved state (default: of its latest step), on this process's devices."""
    with Checkpoints(config.run_dir, config.checkpoint, read_only=True) as checkpoints:
        shapes = jax.eval_shape(build_agent(config).init, jax.random.key(0))
        return checkpoints.restore(sharded_shapes(make_mesh(), shapes), step)


def steps_of(config: RLTrainConfig) -> list[int]:
    """Steps of a run's complete checkpoints."""
    with Checkpoints(config.run_dir, config.checkpoint, read_only=True) as checkpoints:
        return checkpoints.all_steps()


def position_of(config: RLTrainConfig) -> dict[str, Any]:
    """The latest checkpoint's position (data, metrics, patience), without times."""
    with Checkpoints(config.run_dir, config.checkpoint, read_only=True) as checkpoints:
        return {name: value for name, value in checkpoints.extra().items() if name != "closing"}


def records(run: Path) -> list[dict[str, Any]]:
    """The deterministic part of metrics.jsonl: without times and memory. Empty before the first record."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = [
        {"step": line["step"], "values": {name: x for name, x in line["values"].items() if _decided(name)}}
        for line in lines
    ]
    return [record for record in found if record["values"]]


def table(run: Path) -> list[list[str]]:
    """The deterministic part of metrics.csv, header first."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    kept = [i for i, name in enumerate(rows[0]) if _decided(name)]
    found = [[row[i] for i in kept] for row in rows]
    return [row for row in found if any(row[1:])]  # drop rows that only hold watchdog alarms about a busy machine


def _decided(name: str) -> bool:
    # These depend on the machine's load, memory and disk.
    machine = ("time", "health/stall", "health/memory", "health/disk")
    return name not in machine and not name.startswith(("time/", "memory/"))


def assert_same_bits(found: Any, expected: Any) -> None:
    """Assert the same structure, dtypes and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, left), right in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        assert right.dtype == left.dtype, path
        assert np.asarray(right).tobytes() == np.asarray(left).tobytes(), path


def assert_close(found: Any, expected: Any, *, rtol: float, atol: float) -> None:
    """Assert the same structure, and numbers equal within tolerances."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, left), right in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(
            np.asarray(right, np.float64), np.asarray(left, np.float64), rtol=rtol, atol=atol, err_msg=str(path)
        )
