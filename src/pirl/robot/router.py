"""A router between a robot and two policy servers that blinds the operator.

It speaks OpenPI's protocol on both sides, so it works with any OpenPI server. Before each request it asks which
policy's turn it is (0 or 1), and removes what would reveal it from the reply: the policy's name and pirl's values.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from pirl.errors import MissingExtraError, WireError
from pirl.robot import wire
from pirl.robot.client import PolicyClient, ServerError
from pirl.robot.keys import POLICY, PREFIX

BLIND = "blind"
"""The policy's name as the robot sees it."""
TIMINGS = ("policy_timing", "server_timing")
"""Left out of replies: a policy that compares candidates takes longer."""


class BlindRouter:
    """Forwards a robot's requests to one of two policies. Listens from `__enter__` to `__exit__`."""

    def __init__(
        self,
        servers: tuple[str, str],
        turn: Callable[[], int],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
    ) -> None:
        """`servers`: addresses of the two policies, ws://host:port. `turn` is called before each request.

        Robots must send the `api_key`, if any; it is also sent to both servers.
        """
        self._servers, self._turn, self._api_key = servers, turn, api_key
        self._listen = (host, port)
        self.port = port
        """The port in use once it listens."""

    def __enter__(self) -> "BlindRouter":
        try:
            from websockets.sync.server import serve
        except ModuleNotFoundError as error:
            raise MissingExtraError("websockets", "serve", "the blind comparison") from error
        self._server = serve(
            self._converse, *self._listen, compression=None, max_size=None, process_request=self._admit
        )
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="router")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()

    def _admit(self, connection: Any, request: Any) -> Any:
        if request.path == "/healthz":
            return connection.respond(200, "OK\n")
        if self._api_key and request.headers.get("Authorization") != f"Api-Key {self._api_key}":
            return connection.respond(401, "the API key is missing or wrong\n")
        return None

    def _converse(self, connection: Any) -> None:
        """Serve one robot's connection: forward each request to the policy whose turn it is."""
        policies: list[PolicyClient] = []
        try:
            for address in self._servers:  # `extras` would overwrite the robot's own episode names
                policies.append(PolicyClient(address, api_key=self._api_key, extras=False))
            connection.send(wire.pack(hidden(policies[0].get_server_metadata())))
            for message in connection:
                observation = wire.unpack(message)
                reply = policies[self._turn()].infer(observation)
                connection.send(wire.pack({**hidden(reply), POLICY: BLIND}))
        except (ServerError, WireError) as error:
            connection.send(str(error))
            connection.close(1011)
        finally:
            for policy in policies:
                policy.close()


def hidden(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The reply without what differs between policies: pirl's own values and the timings."""
    shared = {f"{PREFIX}{name}" for name in ("execute", "horizon", "robot", "real_time")}
    return {key: value for key, value in reply.items() if key in shared or not key.startswith((PREFIX, *TIMINGS))}
