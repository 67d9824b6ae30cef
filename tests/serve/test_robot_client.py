"""pirl's own client drives pirl's own server: named episodes repeat exactly, and real-time chunking is asked for."""

from typing import Any

import numpy as np

from pirl.robot.broker import ChunkBroker
from pirl.robot.client import PolicyClient
from pirl.robot.router import BlindRouter
from pirl.serve.server import PolicyServer
from serving_runs import SEEN


def test_a_named_episode_repeats_exactly(server: PolicyServer) -> None:
    plans: list[Any] = []
    for session in ("one", "one", "two"):
        with PolicyClient("127.0.0.1", server.port, session=session) as client:
            plans.append(ChunkBroker(client, 1).infer(SEEN)["actions"])
    np.testing.assert_array_equal(plans[0], plans[1])
    assert (plans[0] != plans[2]).any()


def test_chunks_are_asked_for_early_and_continued(server: PolicyServer) -> None:
    with PolicyClient("127.0.0.1", server.port) as client:
        told = client.get_server_metadata()
        broker = ChunkBroker(client, told["pirl/execute"], prefetch=True)
        actions = [broker.infer(SEEN)["actions"] for _ in range(4 * told["pirl/horizon"])]
        broker.reset()
        assert broker.intended is None
        actions.append(broker.infer(SEEN)["actions"])
    assert np.isfinite(np.stack(actions)).all()


def test_a_router_hides_which_policy_acts(server: PolicyServer) -> None:
    address = f"ws://127.0.0.1:{server.port}"
    with BlindRouter((address, address), lambda: 1) as router, PolicyClient("127.0.0.1", router.port) as client:
        assert client.get_server_metadata()["pirl/execute"] >= 1
        reply = client.infer(SEEN)
    assert reply["pirl/policy"] == "blind"
    assert "pirl/value" not in reply
