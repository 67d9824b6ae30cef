"""The protocol as OpenPI's clients see it: metadata, replies, errors, HTTP, several robots, another checkpoint."""

import gc
import http.client
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from pirl.errors import CheckpointError, ConfigError
from pirl.robot.broker import ChunkBroker
from pirl.robot.client import PolicyClient
from pirl.serve.planner import Planner, Row
from pirl.serve.safety import SafetyConfig, SafetyNet
from pirl.serve.server import PolicyServer
from pirl.serve.session import Exchange
from pirl.training.acting import find_checkpoint, load_acting
from serving_runs import SEEN, Client, load, running


def request(port: int, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def until(true: Any) -> None:
    """Wait for something that another thread does."""
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 30 s")


def test_metadata_comes_first_and_replies_are_openpis(planner: Planner) -> None:
    with running(planner, metadata={"reset_pose": [0, -1.5, 1.5, 0, 0, 0]}) as server, Client(server.port) as client:
        assert client.metadata["reset_pose"] == [0, -1.5, 1.5, 0, 0, 0]
        assert client.metadata["pirl/policy"] == "walk_q/served/5"
        first, second = client.ask(SEEN), client.ask(SEEN)
    assert first["actions"].shape == (3, 2)
    assert first["actions"].dtype == np.float32
    assert "state" not in first
    assert set(first["policy_timing"]) == {"infer_ms"}
    assert set(first["server_timing"]) == {"infer_ms"}
    assert set(second["server_timing"]) == {"infer_ms", "prev_total_ms"}
    # Chunk brokers cut every array by the step: what is not per step is a plain number or text.
    extras = {key: type(value) for key, value in first.items() if key.startswith("pirl/")}
    assert extras == {"pirl/policy": str, "pirl/candidates": int, "pirl/value": float, "pirl/spread": float}
    assert first["pirl/candidates"] == 3
    assert np.abs(first["actions"] - second["actions"]).max() > 1e-3  # noise of its own for every request


def test_actions_are_those_of_the_checkpoint(planner: Planner, run_folder: Path) -> None:
    found = find_checkpoint(run_folder / "5")
    rollout = replace(found.config.rollout, best_of=3)
    acting = load_acting(replace(found, config=replace(found.config, rollout=rollout)))
    policy = acting.use(0)  # the server's seed
    with running(planner) as server, Client(server.port) as client, Client(server.port) as other:
        replies = [client.ask(SEEN)["actions"] for _ in range(2)]
        third = other.ask(SEEN)["actions"]
        named = client.ask(SEEN | {"pirl/episode": 7, "pirl/step": 4})["actions"]
    for reply, number in ((replies[0], (0, 0)), (replies[1], (0, 1)), (third, (1, 0)), (named, (7, 4))):
        np.testing.assert_allclose(reply, policy.plan({0: SEEN}, {0: number})[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(replies[0], acting.chunk(SEEN), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"\xc1", "no value begins so"),
        ("text", "came as text"),
        (b"\x93\x01\x02\x03", "a map with text as keys"),
        (b"\x81\xc4\x01x\x01", "a map with text as keys"),
        (b"\x80", "no state"),
        (b"\x82\xa5state\xa3abc\xa6prompt\xa1x", "expected numbers"),
        (b"\x81\xacpirl/episode\x90", "pirl/episode"),
    ],
)
def test_a_wrong_message_is_told_of_as_text_and_closes_its_connection_alone(
    server: PolicyServer, message: Any, said: str
) -> None:
    with Client(server.port) as other, Client(server.port) as client:
        client.connection.send(message)
        with pytest.raises(RuntimeError, match=said):
            client.read()
        with pytest.raises(ConnectionClosed) as closed:
            client.read()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert other.ask(SEEN)["actions"].shape == (3, 2)


def test_http(server: PolicyServer) -> None:
    assert request(server.port, "/healthz") == (200, "OK\n")
    with Client(server.port) as client:
        client.ask(SEEN)
        until(lambda: server.metrics.counted("requests") == 1)
        status, text = request(server.port, "/metrics")
    assert status == 200
    assert "pirl_requests_total 1\n" in text
    assert "pirl_open_connections 1\n" in text
    assert 'pirl_batches_total{size="1"} 1\n' in text
    assert 'pirl_latency_seconds_count{stage="total"} 1\n' in text
    assert 'pirl_policy_info{policy="walk_q/served/5"} 1\n' in text
    assert request(server.port, "/")[0] == 426
    assert request(server.port, "/healthz", method="DELETE")[0] == 405
    assert request(server.port, "/reload", method="POST")[0] == 403  # nobody said who may


def test_only_who_has_the_key_is_let_in(planner: Planner) -> None:
    right = {"Authorization": "Api-Key sesame"}
    with running(planner, api_key="sesame") as server:
        for wrong in ({}, {"Authorization": "Api-Key sesam"}, {"Authorization": "Basic sesame"}):
            with pytest.raises(InvalidStatus) as refused:
                Client(server.port, additional_headers=wrong)
            assert refused.value.response.status_code == 401
            for path, method in (("/metrics", "GET"), ("/reload", "GET"), ("/reload", "POST")):
                assert request(server.port, path, method=method, **wrong)[0] == 401
        assert request(server.port, "/healthz")[0] == 200
        assert request(server.port, "/metrics", **right)[0] == 200
        with Client(server.port, additional_headers=right) as client:
            assert client.ask(SEEN)["actions"].shape == (3, 2)
        assert server.metrics.counted("refused", "key") == 12
        assert server.metrics.counted("reloads") == 0


def test_pages_in_a_browser_are_not_let_in(server: PolicyServer) -> None:
    with pytest.raises(InvalidStatus) as refused:
        Client(server.port, origin="http://evil.example")
    assert refused.value.response.status_code == 403


def test_robots_that_ask_together_share_a_batch_and_get_what_each_would_alone(planner: Planner) -> None:
    seen = [SEEN | {"observation/state": np.array([0.1 * i, -0.2], np.float32), "pirl/episode": i} for i in range(3)]
    with running(planner) as server, Client(server.port) as client:
        alone = [client.ask(one)["actions"] for one in seen]
    with running(planner, batch_window=5.0) as server, ThreadPoolExecutor(3) as threads:
        clients = [Client(server.port) for _ in seen]
        together = list(threads.map(lambda client, one: client.ask(one)["actions"], clients, seen))
        assert server.metrics.counted("batches", "3") == 1
        for client in clients:
            client.connection.close()
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


def test_connections_beyond_the_limit_are_refused(planner: Planner) -> None:
    with running(planner, max_connections=2) as server, Client(server.port), Client(server.port) as second:
        with pytest.raises(InvalidStatus) as refused:
            Client(server.port)
        assert refused.value.response.status_code == 503
        second.connection.close()
        until(lambda: "pirl_open_connections 1\n" in request(server.port, "/metrics")[1])
        with Client(server.port) as third:
            assert third.ask(SEEN)["actions"].shape == (3, 2)


def test_requests_beyond_the_rate_wait(planner: Planner) -> None:
    with running(planner, max_rate=5.0) as server, Client(server.port) as client:
        start = time.monotonic()
        for _ in range(7):
            client.ask(SEEN)
        assert time.monotonic() - start > 0.1
        assert server.metrics.counted("throttled") > 0


def test_a_request_under_way_is_answered_before_the_server_ends(planner: Planner) -> None:
    entered, release = threading.Event(), threading.Event()

    class Slow(Planner):
        def plan(self, rows: Any) -> Any:
            entered.set()
            release.wait()
            return super().plan(rows)

    slow = object.__new__(Slow)
    slow.__dict__ |= planner.__dict__
    with ThreadPoolExecutor(1) as threads, running(slow) as server:
        client, idle = Client(server.port), Client(server.port)
        answer = threads.submit(client.ask, SEEN)
        entered.wait()
        server.stop()
        with pytest.raises(ConnectionClosed) as closed:
            idle.read()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        release.set()
        assert answer.result()["actions"].shape == (3, 2)
        with pytest.raises(ConnectionClosed):
            client.read()


def test_another_checkpoint_is_taken_up_between_episodes(run_folder: Path, planner: Planner) -> None:
    loads = iter([planner, load(run_folder, best_of=3), CheckpointError("the disk is full"), planner])

    def next_one(replaced: Planner | None) -> Planner:
        found = next(loads)
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, Planner) else found(replaced)

    key = {"Authorization": "Api-Key k"}
    with running(next_one, api_key="k") as server, Client(server.port, additional_headers=key) as client:
        ask = lambda episode: client.ask(SEEN | {"pirl/episode": episode})["pirl/policy"]  # noqa: E731
        assert ask("one") == "walk_q/served/5"
        assert request(server.port, "/reload", method="POST", **key)[0] == 202
        until(lambda: server.metrics.counted("reloads", "done") == 1)
        assert server._planner._programs is planner._programs  # nothing is compiled anew for other weights
        assert ask("one") == "walk_q/served/5"
        assert ask("two") == "walk_q/served/9"
        assert '"reloading": false' in request(server.port, "/reload", **key)[1]
        server._loop.call_soon_threadsafe(server.reload)
        until(lambda: server.metrics.counted("reloads", "failed") == 1)
        assert "the disk is full" in request(server.port, "/reload", **key)[1]
        assert ask("three") == "walk_q/served/9"


def test_weights_that_nobody_uses_any_more_are_freed(run_folder: Path) -> None:
    small = {"max_batch": 1, "real_time": False}
    loaded: list[weakref.ref[Planner]] = []

    def fresh(replaced: Planner | None) -> Planner:
        found = load(run_folder, settings=small)(replaced)
        loaded.append(weakref.ref(found))
        return found

    with running(fresh, **small) as server, Client(server.port) as client:
        client.ask(SEEN | {"pirl/episode": 1})
        server._loop.call_soon_threadsafe(server.reload)
        until(lambda: server.metrics.counted("reloads", "done") == 1)
        gc.collect()
        assert loaded[0]() is not None  # the episode goes on with it
        client.ask(SEEN | {"pirl/episode": 2})
        until(lambda: (gc.collect(), loaded[0]() is None)[1])
        assert loaded[1]() is not None


def test_a_strangers_text_does_not_reach_the_log_as_it_is(
    server: PolicyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(server.port) as client, pytest.raises(RuntimeError) as told:
        client.ask({"\x1b[31mFAKE\nserver stopped": 1} | {f"key {i}": 1 for i in range(500)})
    assert len(str(told.value)) <= 1000
    (record,) = (record.getMessage() for record in caplog.records if "request refused" in record.getMessage())
    assert "\x1b" not in record
    assert "\n" not in record


def test_a_pause_begins_an_episode_for_clients_that_name_none(run_folder: Path, planner: Planner) -> None:
    loads = iter([planner, load(run_folder, best_of=3)(planner)])
    with running(lambda _: next(loads), episode_gap=0.3) as server, Client(server.port) as client:
        assert client.ask(SEEN)["pirl/policy"] == "walk_q/served/5"
        server._loop.call_soon_threadsafe(server.reload)
        until(lambda: server.metrics.counted("reloads") == 1)
        time.sleep(0.5)
        assert client.ask(SEEN)["pirl/policy"] == "walk_q/served/9"


def test_a_chunk_continues_the_one_before(planner: Planner, server: PolicyServer) -> None:
    moved = SEEN | {"observation/state": np.array([0.6, 0.4], np.float32)}
    with Client(server.port) as client:
        first = client.ask(SEEN | {"pirl/episode": 1})["actions"]
        plain = client.ask(moved | {"pirl/episode": 2})["actions"]
        client.ask(SEEN | {"pirl/episode": 1})
        again = client.ask(SEEN | {"pirl/episode": 1, "pirl/step": 0})["actions"]
        following = client.ask(moved | {"pirl/episode": 1, "pirl/executed": 1, "pirl/delay": 2})["actions"]
    np.testing.assert_allclose(again, first, rtol=0, atol=1e-5)
    gap, was = np.abs(following[:2] - again[1:]).mean(), np.abs(plain[:2] - again[1:]).mean()
    assert gap < 0.2 * was


def test_pirls_own_client_asks_early_and_its_chunks_are_continued(planner: Planner) -> None:
    rows: list[Row] = []

    class Watched(Planner):
        def row(self, *args: Any, **more: Any) -> Row:
            rows.append(super().row(*args, **more))
            return rows[-1]

    watched = object.__new__(Watched)
    watched.__dict__ |= planner.__dict__
    with running(watched) as server, PolicyClient("127.0.0.1", server.port, session="me") as client:
        broker = ChunkBroker(client, 2, prefetch=True)
        actions = [broker.infer(SEEN)["actions"] for _ in range(12)]
        broker.replan()  # waits for what was asked for
        asked = len(rows)
        broker.reset()
        broker.infer(SEEN)
    assert np.shape(actions) == (12, 2)
    assert asked > 2
    assert rows[0].before is None
    assert all(row.before is not None and row.overlap > 0 for row in rows[1:asked])
    assert rows[asked].before is None  # another episode continues nothing
    assert rows[0].number[0] == zlib.crc32(b"me-0")
    assert server.metrics.counted("errors") == 0


def test_relative_actions_are_compared_from_where_the_robot_is_now(planner: Planner) -> None:
    """What is left of a chunk means the same places, seen from another state: y = (places - state) / std."""
    robot = replace(planner.robot, delta_mask=(True, False))
    transform = replace(planner.transform, robot=robot)
    before, state = np.array([[1.0, 2.0], [1.5, 2.5]], np.float32), np.array([0.5, 0.25], np.float32)
    other = object.__new__(Planner)
    other.__dict__ |= planner.__dict__ | {"transform": transform}
    row = other.row(SEEN | {"observation/state": state}, number=(0, 0), before=before, delay=1)
    stats = transform.norm_stats["actions"]
    expected = np.zeros((3, 2))
    expected[:2] = (before - [0.5, 0.0] - stats.mean) / (stats.std + 1e-6)
    np.testing.assert_allclose(row.before, expected, atol=1e-5)
    assert (row.overlap, row.frozen) == (2, 1)


def test_the_safety_net_clips_and_refuses(planner: Planner) -> None:
    limits = {"rate": 10.0, "low": (-0.01, -0.01), "high": (0.01, 0.01)}
    sizes = {"action_dim": 2, "state_dim": 2}
    with running(planner, safety=SafetyNet(SafetyConfig(mode="clip", **limits), **sizes)) as server:
        with Client(server.port) as client:
            assert np.abs(client.ask(SEEN)["actions"]).max() <= 0.01 + 1e-6
        assert server.metrics.counted("limited", "limits") == 1
    with running(planner, safety=SafetyNet(SafetyConfig(**limits), **sizes)) as server:
        with Client(server.port) as client, pytest.raises(RuntimeError, match="refused: limits: step"):
            client.ask(SEEN)


def test_every_request_reaches_the_recording_hook(planner: Planner) -> None:
    seen: list[Exchange] = []

    def record(exchange: Exchange) -> None:
        seen.append(exchange)
        if len(seen) == 2:
            raise OSError("the disk is full")

    with running(planner, on_exchange=record) as server, Client(server.port) as client:
        chunks = [client.ask(SEEN | {"pirl/episode": name})["actions"] for name in ("a", "a", "b")]
        until(lambda: server.metrics.counted("records") == 3)
        assert server.metrics.counted("records", "failed") == 1
    assert [(one.session, one.episode, one.step) for one in seen] == [(0, "a", 0), (0, "a", 1), (0, "b", 0)]
    np.testing.assert_array_equal([one.chunk for one in seen], chunks)
    assert set(seen[0].observation) == set(SEEN)
    assert isinstance(seen[0].value, float)


def test_a_taken_port_is_said(server: PolicyServer, planner: Planner) -> None:
    with pytest.raises(ConfigError, match="cannot listen"), running(planner, port=server.port):
        pass


def test_nothing_is_compiled_while_serving(planner: Planner) -> None:
    compiled: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)  # it stays, and does nothing more
    with running(planner) as server, Client(server.port) as client:
        for episode in range(3):
            client.ask(SEEN | {"pirl/episode": episode})
            client.ask(SEEN | {"pirl/episode": episode, "pirl/executed": 1})
    assert not compiled
    jax.jit(lambda x: x + 41.5)(1.0)
    assert compiled  # it would have been seen
