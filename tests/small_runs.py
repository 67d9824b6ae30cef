"""Training runs small enough for tests: a policy on states alone, compiled once, and what they leave behind."""

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
    """Programs are kept in a folder, since every run jits anew; gives the environment in which processes use it too."""
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
    compilation_cache.reset_cache()  # jax looks at the folder's name once


def small_run(folder: Path, agent: AgentConfig, **changes: Any) -> RLTrainConfig:
    """The debug recipe with a policy of two small layers and no pictures; a critic with dropout."""
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
    """The state a run left (of its latest step, if none is named), on this process's devices."""
    with Checkpoints(config.run_dir, config.checkpoint, read_only=True) as checkpoints:
        shapes = jax.eval_shape(build_agent(config).init, jax.random.key(0))
        return checkpoints.restore(sharded_shapes(make_mesh(), shapes), step)


def steps_of(config: RLTrainConfig) -> list[int]:
    """Its complete checkpoints."""
    with Checkpoints(config.run_dir, config.checkpoint, read_only=True) as checkpoints:
        return checkpoints.all_steps()


def position_of(config: RLTrainConfig) -> dict[str, Any]:
    """What is stored beside the latest state: where the data, the metrics and the patience stand, without clocks."""
    with Checkpoints(config.run_dir, config.checkpoint, read_only=True) as checkpoints:
        return {name: value for name, value in checkpoints.extra().items() if name != "closing"}


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without clocks and memory: what the run alone decides. Empty before the first record."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = [
        {"step": line["step"], "values": {name: x for name, x in line["values"].items() if _decided(name)}}
        for line in lines
    ]
    return [record for record in found if record["values"]]


def table(run: Path) -> list[list[str]]:
    """metrics.csv without clocks and memory, header first."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    kept = [i for i, name in enumerate(rows[0]) if _decided(name)]
    found = [[row[i] for i in kept] for row in rows]
    return [row for row in found if any(row[1:])]  # a row of its own tells that the watchdog found the machine busy


def _decided(name: str) -> bool:
    # A busy machine delivers data late; a full one has little memory or disk left.
    machine = ("time", "health/stall", "health/memory", "health/disk")
    return name not in machine and not name.startswith(("time/", "memory/"))


def assert_same_bits(found: Any, expected: Any) -> None:
    """Same structure, types and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, left), right in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        assert right.dtype == left.dtype, path
        assert np.asarray(right).tobytes() == np.asarray(left).tobytes(), path


def assert_close(found: Any, expected: Any, *, rtol: float, atol: float) -> None:
    """Same structure, and every number within the tolerances."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, left), right in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(
            np.asarray(right, np.float64), np.asarray(left, np.float64), rtol=rtol, atol=atol, err_msg=str(path)
        )
