"""A robot behind the router cannot tell which of two policies acts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pirl.robot.client import PolicyClient, ServerError
from pirl.robot.router import BlindRouter
from policy_server import policy_server


def seen(step: float) -> dict[str, Any]:
    return {"observation/state": np.array([step], np.float32), "prompt": "go"}


def of(name: str, value: float) -> Any:
    def answer(request: Mapping[str, Any]) -> dict[str, Any] | str:
        if request["observation/state"][0] < 0:
            return "Traceback: no such state"
        timings = {"policy_timing": {"infer_ms": value}, "server_timing": {"infer_ms": value}}
        return {"actions": np.full((3, 2), value, np.float32), "pirl/policy": name, "pirl/value": value, **timings}

    return answer


def test_each_request_goes_to_the_policy_whose_turn_it_is_and_replies_do_not_tell() -> None:
    turns = iter([0, 1, 1, 0])
    metadata = {"reset_pose": [1], "pirl/execute": 3, "pirl/version": "9"}
    with policy_server(of("old", 1.0), metadata=metadata) as a, policy_server(of("new", 2.0), metadata=metadata) as b:
        servers = (f"ws://127.0.0.1:{a.port}", f"ws://127.0.0.1:{b.port}")
        with BlindRouter(servers, lambda: next(turns)) as router, PolicyClient("127.0.0.1", router.port) as client:
            assert client.get_server_metadata() == {"reset_pose": [1], "pirl/execute": 3}
            replies = [client.infer(seen(step)) for step in range(4)]
    assert [float(reply["actions"][0, 0]) for reply in replies] == [1, 2, 2, 1]
    assert all(sorted(reply) == ["actions", "pirl/policy"] for reply in replies)
    assert {reply["pirl/policy"] for reply in replies} == {"blind"}
    assert {request["pirl/episode"] for request in (*a.requests, *b.requests)} == {client.episode}


def test_an_error_of_a_policy_reaches_the_robot_and_ends_nothing_else() -> None:
    with policy_server(of("old", 1.0)) as a, policy_server(of("new", 2.0)) as b:
        servers = (f"ws://127.0.0.1:{a.port}", f"ws://127.0.0.1:{b.port}")
        with BlindRouter(servers, lambda: 1) as router, PolicyClient("127.0.0.1", router.port) as client:
            with pytest.raises(ServerError, match="no such state"):
                client.infer(seen(-1))
            assert client.infer(seen(0))["actions"][0, 0] == 2


def test_a_key_is_asked_of_robots_and_sent_to_the_policies() -> None:
    with policy_server(of("old", 1.0), key="secret") as a, policy_server(of("new", 2.0), key="secret") as b:
        servers = (f"ws://127.0.0.1:{a.port}", f"ws://127.0.0.1:{b.port}")
        with BlindRouter(servers, lambda: 0, api_key="secret") as router:
            with pytest.raises(ServerError, match="refused"):
                PolicyClient("127.0.0.1", router.port, "other")
            with PolicyClient("127.0.0.1", router.port, "secret") as client:
                assert client.infer(seen(0))["actions"][0, 0] == 1
