"""A thousand wrong messages, clients that vanish or do not read, and too many connections: the server stays up."""

import gc
import random
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import psutil
import pytest
from websockets.exceptions import ConnectionClosed, WebSocketException

from pirl.robot.client import PolicyClient, ServerError
from pirl.serve.planner import Planner
from pirl.serve.server import HALF_OPEN
from serving_runs import SEEN, Client, packed, running

STATE = SEEN["observation/state"]


def hostile() -> Iterator[bytes | str]:
    """Messages that are no observation of this robot; none may be answered with a chunk."""
    whole = packed(SEEN)
    yield from (whole[:end] for end in range(len(whole)))
    yield from ("", "text", "{}", "\x00" * 100)
    yield from (b"\x91" * depth for depth in (10, 100, 10_000, 1_000_000))
    yield from (b"\xdd" + struct.pack(">I", 2**n) for n in (8, 16, 24, 31))
    yield from (b"\xdf" + struct.pack(">I", 2**n) for n in (8, 16, 24, 31))
    yield from (b"\xc6" + struct.pack(">I", 2**n) + b"x" for n in (8, 16, 24, 31))
    yield b"\xdd" + struct.pack(">I", 1_000_000) + b"\x80" * 1_000_000
    for value in (
        None,
        True,
        1,
        1.5,
        "x",
        b"x",
        [],
        {},
        [1],
        ["a", "b"],
        [[1, 2]],
        [1, None],
        {"x": 1},
        [float("nan"), 1],
    ):
        yield packed(SEEN | {"observation/state": value})
    for shape in ((), (0,), (1,), (3,), (2, 1), (1, 2), (1000,), (2,) * 20):
        yield packed(SEEN | {"observation/state": np.zeros(shape, np.float32)})
    for bad in (np.inf, -np.inf, np.nan):
        yield packed(SEEN | {"observation/state": np.array([bad, 0.0])})
    for dtype in ("S4", "M8[s]", "m8[s]"):
        yield packed(SEEN | {"observation/state": np.zeros(2, dtype)})
    array = {b"__ndarray__": True, b"data": STATE.tobytes(), b"dtype": "<f4", b"shape": [2]}
    for change in (
        {b"shape": [3]}, {b"shape": [-1]}, {b"shape": [2**62, 2**62]}, {b"shape": None}, {b"shape": "2"},
        {b"shape": [1] * 70}, {b"dtype": "|O"}, {b"dtype": "<c8"}, {b"dtype": "V8"}, {b"dtype": "f4,f4"},
        {b"dtype": 7}, {b"dtype": "<f4" * 1000}, {b"data": b""}, {b"data": "text"}, {b"data": None}, {b"more": 1},
    ):  # fmt: skip
        yield packed(SEEN | {"observation/state": array | change})
    for key, values in {
        "pirl/episode": (-1, 2**40, 1.5, "x" * 300, b"x", [1], {}, True),
        "pirl/step": (-1, 2**40, "x", 1.5, [1], None, True, np.zeros(2)),
    }.items():
        yield from (packed(SEEN | {key: value}) for value in values)
    for wrong in ([SEEN], [], 1, None, "x", {1: 2}, {b"state": STATE}, {"batch": [SEEN]}):
        with suppress(Exception):
            yield packed(wrong)
    rng = random.Random(0)
    yield from (rng.randbytes(rng.randrange(1, 200)) for _ in range(900))


def test_no_wrong_message_gets_a_chunk_or_ends_the_server(planner: Planner) -> None:
    messages = list(hostile())
    assert len(messages) > 1000
    with running(planner) as server, Client(server.port) as robot:
        robot.ask(SEEN)

        def attack(message: bytes | str) -> None:
            with suppress(ConnectionClosed), Client(server.port) as client:
                client.connection.send(message)
                with pytest.raises((RuntimeError, ConnectionClosed)):
                    pytest.fail(f"{message[:300]!r} got {client.read()}")

        for message in messages[:100]:
            attack(message)
        gc.collect()
        before = psutil.Process().memory_info().rss
        for message in messages:
            attack(message)
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 64 * 2**20
        assert robot.ask(SEEN)["actions"].shape == (3, 2)
        assert server.metrics.counted("requests") == 2
        assert server.metrics.counted("errors") == len(messages) + 100
        assert (
            server.metrics.counted("errors", "WireError") + server.metrics.counted("errors", "DataError")
            == len(messages) + 100
        )  # each was understood to be wrong; none fell through


def test_a_message_beyond_the_limit_ends_its_connection_alone(planner: Planner) -> None:
    with running(planner, max_message=10_000) as server, Client(server.port) as robot, Client(server.port) as client:
        client.connection.send(packed(SEEN | {"more": np.zeros(20_000, np.uint8)}))
        with pytest.raises(ConnectionClosed) as closed:
            client.read()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        assert robot.ask(SEEN)["actions"].shape == (3, 2)


def test_clients_that_vanish_or_do_not_read_keep_nobody_waiting(planner: Planner) -> None:
    with running(planner) as server, Client(server.port) as robot, ExitStack() as parts:
        for _ in range(20):
            gone = Client(server.port)
            gone.connection.send(packed(SEEN))
            gone.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.connection.socket.close()
        deaf = parts.enter_context(Client(server.port))
        for _ in range(50):
            deaf.connection.send(packed(SEEN))
        for _ in range(5):
            assert robot.ask(SEEN)["actions"].shape == (3, 2)
        assert [deaf.read()["actions"].shape for _ in range(50)] == [(3, 2)] * 50
        garbage = parts.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        garbage.sendall(b"\x16\x03\x01\x02\x00" + bytes(200) + b"\r\n\r\n")
        assert robot.ask(SEEN)["actions"].shape == (3, 2)


def test_64_connections_at_once(planner: Planner) -> None:
    with running(planner, max_batch=4) as server, ExitStack() as clients:
        robots = [clients.enter_context(Client(server.port)) for _ in range(64)]
        shapes: list[Any] = []
        threads = [threading.Thread(target=lambda r=r: shapes.append(r.ask(SEEN)["actions"].shape)) for r in robots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shapes == [(3, 2)] * 64
        with pytest.raises(WebSocketException):
            Client(server.port)


def test_sockets_that_never_shake_hands_are_limited(planner: Planner) -> None:
    with running(planner, max_connections=2) as server, ExitStack() as parts:
        idle = [
            parts.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(HALF_OPEN + 10)
        ]
        idle[-1].settimeout(30)
        assert idle[-1].recv(1) == b""  # closed at once
        assert server.metrics.counted("refused", "sockets") == 8


def test_tls(planner: Planner, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("tls")
    made = subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem",
        shell=True,
        check=False,
        cwd=folder,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("openssl is not installed, which makes the certificate of this test")
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    with running(planner, tls_cert=folder / "cert.pem", tls_key=folder / "key.pem") as server:
        with Client(server.port, scheme="wss", ssl=context) as client:
            assert client.ask(SEEN)["actions"].shape == (3, 2)
        address = f"wss://127.0.0.1:{server.port}"
        with pytest.raises(ServerError, match="self-signed certificate") as caught:
            PolicyClient(address, patience=None)  # trying again would not help
        assert "SSL_CERT_FILE" in caught.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))
        with PolicyClient(address) as robot:
            assert robot.infer(SEEN)["actions"].shape == (3, 2)
        with pytest.raises((OSError, WebSocketException, EOFError)):
            Client(server.port)
