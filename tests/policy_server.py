"""A policy server like OpenPI's, in a thread; its plans encode the request."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.sync.server import serve

from pirl.robot import wire

HORIZON, SIZE = 6, 2


def plan(request: Mapping[str, Any]) -> dict[str, Any]:
    """The action of step k is (state + k, request number)."""
    start = float(np.asarray(request["observation/state"])[0])
    return {"actions": np.stack([start + np.arange(HORIZON), np.zeros(HORIZON)], 1).astype(np.float32), "value": 0.5}


@dataclass
class Server:
    """A test's handle on the server."""

    port: int
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def drop(self) -> None:
        """Cut all connections, like a server that dies."""
        for connection in self.connections:
            connection.socket.close()
        self.connections.clear()


@contextmanager
def policy_server(
    answer: Callable[[Mapping[str, Any]], dict[str, Any] | str] = plan,
    *,
    metadata: Mapping[str, Any] | None = None,
    port: int = 0,
    key: str | None = None,
) -> Iterator[Server]:
    """Serve inside the context. Text answers are sent as errors, and close the connection."""

    def converse(connection: Any) -> None:
        running.connections.append(connection)
        running.keys.append(connection.request.headers.get("Authorization"))
        connection.send(wire.pack(dict(metadata or {})))
        for message in connection:
            request = wire.unpack(message)
            running.requests.append(request)
            reply = answer(request)
            if isinstance(reply, str):
                connection.send(reply)
                connection.close(1011)
                return
            connection.send(wire.pack(reply))

    def check(connection: Any, request: Any) -> Any:
        if request.path == "/healthz":
            return connection.respond(200, "OK\n")
        wrong = key is not None and request.headers.get("Authorization") != f"Api-Key {key}"
        return connection.respond(401, "no\n") if wrong else None

    server = serve(converse, "127.0.0.1", port, compression=None, max_size=None, process_request=check)
    running = Server(port=server.socket.getsockname()[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        running.drop()
        thread.join()
