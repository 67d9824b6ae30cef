"""A client of OpenPI's policy servers, a drop-in for `openpi_client.WebsocketClientPolicy`.

    client = PolicyClient("10.0.0.5", 8000, api_key="...")
    client.reset()
    actions = client.infer(observation)["actions"]

Beyond the original it reconnects, times out, and tells the server where episodes begin (`robot.keys`), which stock
servers ignore.
"""

import contextlib
import http
import itertools
import ssl
import time
import uuid
from collections.abc import Mapping
from typing import Any

from pirl.errors import MissingExtraError, PirlError, WireError
from pirl.robot import wire
from pirl.robot.keys import EPISODE

_LIMITS = wire.Limits(max_bytes=2**31)
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
"""Exponential backoff between connection attempts, in seconds."""


class ServerError(PirlError, RuntimeError):
    """An error of the policy server, or no server. OpenPI's client raises RuntimeError here."""


class PolicyClient:
    """Requests action chunks from a policy server. Not thread-safe."""

    def __init__(
        self,
        host: str = "0.0.0.0",
        port: int | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = 120.0,
        patience: float | None = 60.0,
        extras: bool = True,
        session: str | None = None,
    ) -> None:
        """Connect, as OpenPI's client does: `host` is a name, or a whole address (`wss://...`).

        `timeout`: longest wait for one reply, in seconds. `patience`: how many seconds to try to connect, now and after
        a lost connection; None: forever. `extras`: send pirl's own keys. `session`: prefix of episode names; the noise
        of `pirl serve` depends on these, so the same names give the same actions.
        """
        address = host if host.startswith(("ws://", "wss://")) else f"ws://{host}"
        self._uri = address if port is None else f"{address}:{port}"
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._timeout, self._patience, self._extras = timeout, patience, extras
        self._session, self._count = session or uuid.uuid4().hex[:12], itertools.count()
        self._episode = self._name()
        self.reconnects = 0
        """Number of reconnections after a lost connection."""
        self._socket, self._metadata = self._connect()

    @property
    def episode(self) -> str:
        """Name of the running episode, as sent to the server."""
        return self._episode

    def get_server_metadata(self) -> dict[str, Any]:
        """The server's metadata."""
        return self._metadata

    def infer(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """The server's reply to an observation: `actions` [H, A] and timings.

        Reconnects and repeats the request after a lost connection. Raises the server's errors without retrying.
        """
        from websockets.exceptions import ConnectionClosed

        data = wire.pack({**obs, EPISODE: self._episode} if self._extras else dict(obs))
        until = None if self._patience is None else time.monotonic() + self._patience
        while True:
            try:
                self._socket.send(data)
                reply = self._socket.recv(timeout=self._timeout)
                break
            except TimeoutError:
                self._drop()
                self._socket, self._metadata = self._connect()  # so that a late reply is not taken for the next one
                raise ServerError(
                    f"{self._uri}: no reply for {self._timeout:g} s", hint="is the server overloaded or compiling?"
                ) from None
            except (ConnectionClosed, OSError) as error:
                if until is not None and time.monotonic() > until:
                    raise ServerError(
                        f"{self._uri}: the connection is lost ({error})", hint="is the server up?"
                    ) from error
                self._drop()
                self._socket, self._metadata = self._connect()
                self.reconnects += 1
        if isinstance(reply, str):  # OpenPI's server closes the connection after it
            raise ServerError(f"Error in inference server:\n{reply}", hint="see the server's log")
        answer = wire.unpack(reply, _LIMITS)
        if not isinstance(answer, dict) or "actions" not in answer:
            raise WireError(f"{self._uri}: the reply holds no actions", hint="is this a policy server?")
        return answer

    def reset(self) -> None:
        """Begin a new episode."""
        self._episode = self._name()

    def close(self) -> None:
        """Close the connection."""
        self._drop()

    def __enter__(self) -> "PolicyClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _name(self) -> str:
        return f"{self._session}-{next(self._count)}"

    def _drop(self) -> None:
        with contextlib.suppress(Exception):  # it may be closed already, or broken
            self._open.close()

    def _connect(self) -> tuple[Any, dict[str, Any]]:
        """(connection, server metadata); retries for `patience` seconds, but not if the API key is refused."""
        try:
            from websockets.exceptions import InvalidStatus, WebSocketException
            from websockets.sync.client import connect
        except ModuleNotFoundError as error:
            raise MissingExtraError("websockets", "serve", "the policy client") from error
        until = None if self._patience is None else time.monotonic() + self._patience
        wait = _FIRST_WAIT
        while True:
            try:
                self._open = contextlib.ExitStack()
                socket = self._open.enter_context(
                    connect(self._uri, compression=None, max_size=None, additional_headers=self._headers)
                )
                first = socket.recv(timeout=self._timeout)
                return socket, dict(wire.unpack(first if isinstance(first, bytes) else first.encode(), _LIMITS))
            except InvalidStatus as error:
                status = error.response.status_code
                if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
                    raise ServerError(f"{self._uri}: refused ({status})", hint="check the API key") from error
                problem: Exception = error
            except ssl.SSLCertVerificationError as error:
                hint = "trust the server's certificate: SSL_CERT_FILE=cert.pem"
                raise ServerError(f"{self._uri}: {error.verify_message}", hint=hint) from error
            except (OSError, WebSocketException, WireError) as error:
                problem = error
            self._drop()  # a server that accepted and then said nothing
            if until is not None and time.monotonic() + wait > until:
                raise ServerError(
                    f"{self._uri}: no policy server ({problem})", hint="start `pirl serve`, or check host and port"
                ) from problem
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
