"""Access control: connection limit, API key, TLS."""

import asyncio
import hmac
import ssl
from collections.abc import Callable

from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request

from pirl.errors import ConfigError
from pirl.serve.config import ServeConfig


def limited_sockets(most: int, refused: Callable[[], None]) -> type[ServerConnection]:
    """A connection class that limits open sockets to `most`, including half-open ones; `refused` counts the rest."""
    number = 0

    class Connection(ServerConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal number
            super().connection_made(transport)
            number += 1
            if number > most:
                refused()
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            nonlocal number
            number -= 1
            super().connection_lost(exc)

    return Connection


def has_key(request: Request, api_key: str | None) -> bool:
    """Whether the request has the API key, if one is required. Compares in constant time."""
    if api_key is None:
        return True
    given = request.headers.get_all("Authorization")
    scheme, _, key = (given[0] if len(given) == 1 else "").partition(" ")
    right = hmac.compare_digest(key.strip().encode(errors="replace"), api_key.encode())
    return right and scheme.lower() in ("api-key", "bearer")


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """The TLS context with the server's certificate; None without one."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"the certificate {config.tls_cert} cannot be used: {error}", hint="PEM files, without a pass phrase"
        ) from error
    return context
