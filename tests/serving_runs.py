"""A small checkpoint behind a server, and clients that do not use pirl's library."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from websockets.sync.client import ClientConnection, connect

from pirl.serve.config import ServeConfig
from pirl.serve.load import loader
from pirl.serve.planner import Planner
from pirl.serve.server import PolicyServer, in_background

SETTINGS = ServeConfig(port=0, max_batch=4, real_time=True, batch_window=0.02)
SEEN = {"observation/state": np.array([0.3, -0.2], np.float32), "prompt": "go right"}


class Client:
    """openpi_client.WebsocketClientPolicy, reimplemented with websockets and msgpack."""

    def __init__(self, port: int, *, scheme: str = "ws", **options: Any) -> None:
        address, limits = f"{scheme}://127.0.0.1:{port}", {"open_timeout": 30, "close_timeout": 5}
        opened = connect(address, compression=None, max_size=None, **limits, **options)
        self.connection: ClientConnection = opened.__enter__()
        self.metadata = self.read()

    def read(self) -> Any:
        answer = self.connection.recv(timeout=60)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return msgpack.unpackb(answer, object_hook=_array)

    def ask(self, observation: dict[str, Any]) -> Any:
        self.connection.send(packed(observation))
        return self.read()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def packed(observation: Any) -> bytes:
    return msgpack.packb(observation, default=_map)


def _map(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def _array(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" in found:
        return np.ndarray(buffer=found[b"data"], dtype=np.dtype(found[b"dtype"]), shape=found[b"shape"])
    return found


def load(location: Path, *, best_of: int = 1, settings: dict[str, Any] | None = None) -> Any:
    """A function that loads and compiles a checkpoint."""

    def change(config: Any) -> Any:
        return replace(config, rollout=replace(config.rollout, best_of=best_of))

    return loader(str(location), replace(SETTINGS, **(settings or {})), change=change)


@contextmanager
def running(planner: Planner | Callable[..., Planner], **changes: Any) -> Iterator[PolicyServer]:
    """Run a server with a planner, or with a function that loads one."""
    options = {name: changes.pop(name) for name in ("safety", "on_exchange", "on_close") if name in changes}
    loads = (lambda replaced: planner) if isinstance(planner, Planner) else planner
    with in_background(PolicyServer(loads, replace(SETTINGS, **changes), **options)) as server:
        yield server
