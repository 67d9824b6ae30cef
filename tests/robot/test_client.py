"""The client does what OpenPI's does, survives a lost server, and executes chunks without standing still."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from websockets.sync.server import serve

from pirl.errors import ConfigError, WireError
from pirl.robot.broker import ChunkBroker
from pirl.robot.client import PolicyClient, ServerError
from policy_server import HORIZON, plan, policy_server


def seen(step: float) -> dict[str, Any]:
    return {"observation/state": np.array([step], np.float32), "prompt": "go"}


def test_it_answers_like_openpis_client() -> None:
    with policy_server(metadata={"reset_pose": [0, 1.5]}) as server, PolicyClient("127.0.0.1", server.port) as client:
        assert client.get_server_metadata() == {"reset_pose": [0, 1.5]}
        reply = client.infer(seen(3))
        np.testing.assert_array_equal(reply["actions"][:, 0], 3 + np.arange(HORIZON))
        assert server.requests[0]["prompt"] == "go"
        assert server.keys == [None]


def test_a_reset_gives_the_next_episode_another_name() -> None:
    with policy_server() as server, PolicyClient(f"ws://127.0.0.1:{server.port}") as client:
        for _ in range(2):
            client.infer(seen(0))
        client.reset()
        client.infer(seen(0))
    names = [request["pirl/episode"] for request in server.requests]
    assert names[0] == names[1] != names[2]


def test_without_extras_nothing_is_added() -> None:
    with policy_server() as server, PolicyClient("127.0.0.1", server.port, extras=False) as client:
        ChunkBroker(client, 2, extras=False).infer(seen(0))
    assert sorted(server.requests[0]) == ["observation/state", "prompt"]


def test_the_key_is_sent_and_a_wrong_one_refused_at_once() -> None:
    with policy_server(key="secret") as server:
        with PolicyClient("127.0.0.1", server.port, "secret") as client:
            client.infer(seen(0))
        assert server.keys == ["Api-Key secret"]
        with pytest.raises(ServerError, match=r"refused \(401\)"):
            PolicyClient("127.0.0.1", server.port, "wrong")


def test_a_lost_connection_is_made_again_and_the_request_repeated() -> None:
    with policy_server() as server, PolicyClient("127.0.0.1", server.port) as client:
        client.infer(seen(0))
        server.drop()
        assert client.infer(seen(5))["actions"][0, 0] == 5
        assert client.reconnects == 1


def test_a_server_that_starts_late_is_waited_for() -> None:
    with policy_server() as server:
        port = server.port
    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(PolicyClient, "127.0.0.1", port, patience=120.0)
        assert not wait([connecting], timeout=0.3).done
        with policy_server(port=port), connecting.result() as client:
            assert client.infer(seen(1))["actions"][0, 0] == 1


def test_no_server_is_said_after_patience() -> None:
    with policy_server() as server:
        port = server.port
    with pytest.raises(ServerError, match="no policy server"):
        PolicyClient("127.0.0.1", port, patience=0.0)


def test_a_server_that_says_nothing_is_left_again() -> None:
    left = threading.Event()

    def silent(connection: Any) -> None:
        for _ in connection:
            pass
        left.set()

    with serve(silent, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with pytest.raises(ServerError, match="no policy server"):
            PolicyClient("127.0.0.1", server.socket.getsockname()[1], timeout=0.1, patience=0.0)
        assert left.wait(30)


def test_an_error_of_the_server_is_raised_and_the_next_request_works() -> None:
    def answer(request: Mapping[str, Any]) -> dict[str, Any] | str:
        return plan(request) if request["observation/state"][0] else "Traceback: no such camera"

    with policy_server(answer) as server, PolicyClient("127.0.0.1", server.port) as client:
        with pytest.raises(RuntimeError, match="no such camera"):
            client.infer(seen(0))
        assert client.infer(seen(2))["actions"][0, 0] == 2


def test_a_reply_that_never_comes_is_given_up_and_not_taken_for_the_next() -> None:
    release = threading.Event()

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        if request["observation/state"][0] == 7:
            release.wait()
        return plan(request)

    with policy_server(answer) as server, PolicyClient("127.0.0.1", server.port, timeout=0.2) as client:
        with pytest.raises(ServerError, match=r"no reply for 0\.2 s"):
            client.infer(seen(7))
        release.set()
        client._timeout = 60.0
        assert client.infer(seen(1))["actions"][0, 0] == 1


def test_a_reply_without_actions_is_refused() -> None:
    with policy_server(lambda _: {"text": "hello"}) as server, PolicyClient("127.0.0.1", server.port) as client:
        with pytest.raises(WireError, match="no actions"):
            client.infer(seen(0))


class Planned:
    """A policy in this thread: plans (state + k); a gate can hold its answers back."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(obs)
        self.gate.wait()
        return {**plan(obs), "policy_timing": {"infer_ms": 1.0}}

    def reset(self) -> None:
        pass


def test_a_broker_returns_steps_and_looks_again_after_execute() -> None:
    policy = Planned()
    broker = ChunkBroker(policy, execute=4)
    actions = [broker.infer(seen(10 * step)) for step in range(6)]
    assert [action["actions"][0] for action in actions] == [0, 1, 2, 3, 40, 41]
    assert actions[0]["value"] == 0.5
    assert actions[0]["policy_timing"] == {"infer_ms": 1.0}
    assert [(r["pirl/step"], r["pirl/executed"], r["pirl/delay"]) for r in policy.requests] == [(0, 0, 0), (4, 4, 0)]
    assert broker.intended is not None
    assert broker.intended[1] == 1


def test_prefetching_bridges_a_late_chunk_and_goes_on_where_the_world_is() -> None:
    """States count steps, and a plan continues its state: whatever chunk is in force, step t's action is t."""
    policy = Planned()
    broker = ChunkBroker(policy, execute=3, prefetch=True)
    first = [broker.infer(seen(step))["actions"][0] for step in range(3)]
    policy.gate.clear()
    late = [broker.infer(seen(step))["actions"][0] for step in (3, 4)]  # asked at 3, not answered yet
    asked = broker._asked
    assert asked is not None
    policy.gate.set()
    asked[0].result()
    after = broker.infer(seen(5))["actions"][0]
    assert [*first, *late, after] == [0, 1, 2, 3, 4, 5]
    assert broker.intended is not None
    assert (broker.intended[0][0, 0], broker.intended[1]) == (3, 2)  # planned at step 3, in force from its step 2 on
    assert broker.delay == 2
    assert broker._asked is not None  # two steps of delay are expected now, so the next chunk is asked for at once
    broker._asked[0].result()
    told = [(r["pirl/step"], r["pirl/executed"], r["pirl/delay"]) for r in policy.requests]
    assert told == [(0, 0, 0), (3, 3, 1), (5, 2, 2)]
    assert broker.waits == 0


def test_a_chunk_that_runs_out_is_waited_for() -> None:
    policy = Planned()
    broker = ChunkBroker(policy, execute=2, prefetch=True)
    broker.infer(seen(0))
    policy.gate.clear()
    for step in range(1, HORIZON):
        assert broker.infer(seen(step))["actions"][0] == step
    with ThreadPoolExecutor(1) as thread:
        standing = thread.submit(broker.infer, seen(HORIZON))
        assert not wait([standing], timeout=0.1).done
        policy.gate.set()
        assert standing.result()["actions"][0] == HORIZON
    assert broker.waits == 1


def test_an_error_while_prefetching_is_raised() -> None:
    policy = Planned()
    broker = ChunkBroker(policy, execute=1, prefetch=True)
    broker.infer(seen(0))
    del policy.requests  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = [broker.infer(seen(step)) for step in range(1, HORIZON + 2)]


def test_more_steps_than_a_chunk_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"chunks have {HORIZON} steps"):
        ChunkBroker(Planned(), execute=HORIZON + 1).infer(seen(0))
    with pytest.raises(ConfigError, match="at least one"):
        ChunkBroker(Planned(), execute=0)
