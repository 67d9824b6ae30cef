"""A machine of a Ray cluster dies while episodes are collected on it: the run goes on, and ends in the same state."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collecting_runs import ript_run
from pirl.errors import PirlWarning
from pirl.rollout.pool import LocalPool
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


def homes() -> set[str]:
    """The machines on which workers live."""
    from ray._private.state import actors  # the public call needs Ray's dashboard

    return {actor["Address"]["NodeID"] for actor in actors().values() if actor["State"] == "ALIVE"}


def lose_a_machine(cluster: Any, nodes: list[Any]) -> None:
    """One with a worker goes. The worker ends a moment later: wait, since a run may be over by then."""
    node = next(node for node in nodes if node.node_id in homes())
    cluster.remove_node(node, allow_graceful=False)
    while node.node_id in homes():
        time.sleep(0.05)


def test_a_machine_dies_while_it_collects(
    cluster: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched = ript_run(tmp_path, exp_name="untouched", num_train_steps=3)
    config = replace(untouched, exp_name="ray", rollout=replace(untouched.rollout, backend="ray"))
    made, nodes = cluster
    advanced = {LocalPool: 0, RayPool: 0}

    def counted(pool: LocalPool | RayPool, *args: Any, **options: Any) -> Any:
        """When it has collected half of what the untouched run did, a machine with a worker goes."""
        advanced[type(pool)] += 1
        if advanced[RayPool] == advanced[LocalPool] // 2 and type(pool) is RayPool:
            lose_a_machine(made, nodes)
        return advance[type(pool)](pool, *args, **options)

    advance = {kind: kind.advance for kind in advanced}
    for kind in advanced:
        monkeypatch.setattr(kind, "advance", counted)
    with compiled_once(tmp_path_factory.mktemp("programs")):
        assert train(untouched) == 0
        with pytest.warns(PirlWarning, match="is restarted") as said:
            assert train(config) == 0
    assert advanced[RayPool] >= advanced[LocalPool] > 10
    assert any("its Ray actor is gone" in str(one.message) for one in said)
    assert_same_bits(restored(config), restored(untouched))
    assert records(config.run_dir) == records(untouched.run_dir)
