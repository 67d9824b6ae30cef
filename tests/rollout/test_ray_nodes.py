"""A machine of a Ray cluster dies while episodes are collected on it: the run goes on, and ends in the same state."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collecting_runs import ript_run
from pirl.errors import PirlWarning
from pirl.rollout.ray import RayPool
from pirl.training.loop import train
from small_runs import assert_same_bits, compiled_once, records, restored

HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs nothing, and three machines with room for one worker each: one more than is needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray = pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = [made.add_node(num_cpus=1) for _ in range(3)]
            ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
            yield made, nodes
        finally:
            ray.shutdown()
            made.shutdown()


def busy_one(nodes: list[Any]) -> Any:
    """A machine on which a worker lives."""
    from ray._private.state import actors  # the public call needs Ray's dashboard

    homes = {actor["Address"]["NodeID"] for actor in actors().values() if actor["State"] == "ALIVE"}
    return next(node for node in nodes if node.node_id in homes)


def iterations(run: Path) -> int:
    """How many the run has logged."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def test_a_machine_dies_while_it_collects(
    cluster: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched = ript_run(tmp_path, exp_name="untouched", num_train_steps=3)
    config = replace(untouched, exp_name="ray", rollout=replace(untouched.rollout, backend="ray"))
    made, nodes = cluster
    advance, asked = RayPool.advance, []

    def kill_one(pool: RayPool, *args: Any, **options: Any) -> Any:
        """In the middle of the second iteration's collection, a machine with a worker goes."""
        asked.append(iterations(config.run_dir))
        if asked.count(1) == 2:
            made.remove_node(busy_one(nodes), allow_graceful=False)
        return advance(pool, *args, **options)

    monkeypatch.setattr(RayPool, "advance", kill_one)
    with compiled_once(tmp_path_factory.mktemp("programs")):
        assert train(untouched) == 0
        with pytest.warns(PirlWarning, match="is restarted") as said:
            assert train(config) == 0
    assert asked.count(1) >= 2
    assert any("its Ray actor is gone" in str(one.message) for one in said)
    assert_same_bits(restored(config), restored(untouched))
    assert records(config.run_dir) == records(untouched.run_dir)
