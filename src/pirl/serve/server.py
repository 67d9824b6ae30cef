"""OpenPI's websocket server, for many robots at once.

On connect the client gets the metadata, then one reply per request. A failed request gets the reason as text, and its
connection is closed with 1011, as in OpenPI; the server and other connections continue. Everything slow runs in
threads: reading observations, the model, loading another checkpoint.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from itertools import count
from time import perf_counter
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

import pirl
from pirl.data.robots import Robot
from pirl.errors import ConfigError, PirlError, WireError
from pirl.robot import wire
from pirl.robot.keys import CANDIDATES, NOVELTY, POLICY, SPREAD, VALUE
from pirl.serve.access import has_key, limited_sockets, tls_context
from pirl.serve.batching import Batcher
from pirl.serve.config import ServeConfig
from pirl.serve.metrics import Metrics
from pirl.serve.planner import PlannedChunk, Planner
from pirl.serve.safety import SafetyNet
from pirl.serve.session import Exchange, Session

log = logging.getLogger("pirl.serve")

Load = Callable[[Planner | None], Planner]
"""Loads and compiles the checkpoint. The argument is the planner to replace, if any, whose programs can be reused."""
HALF_OPEN = 32
"""Sockets beyond `max_connections` that may be in the handshake."""
INTERNAL_ERROR, GOING_AWAY = 1011, 1001
LONGEST_ERROR = 1000
"""Longest error sent to a client, in characters; it may quote the client's own text."""


class PolicyServer:
    """Serves one checkpoint until stopped."""

    def __init__(
        self,
        load: Load,
        config: ServeConfig,
        *,
        safety: SafetyNet | None = None,
        on_exchange: Callable[[Exchange], None] | None = None,
        on_close: Callable[[int], None] | None = None,
    ) -> None:
        """Load the checkpoint.

        `on_exchange` is called in a thread after every reply; only that connection waits for it. `on_close` is called
        with the number of a connection that ended.
        """
        self.config, self.metrics = config, Metrics()
        self.port, self.safety = config.port, safety
        self._load, self.on_exchange, self.on_close = load, on_exchange, on_close
        self._planner = load(None)
        self._numbers = count()
        self._sessions: dict[Session, ServerConnection] = {}
        self._busy: set[Session] = set()
        self._stopping = False
        self._reloading: asyncio.Task[None] | None = None
        self._reload_error: str | None = None
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="pirl-prepare")

    @property
    def policy(self) -> str:
        """Name of the policy that new episodes get."""
        return self._planner.name

    @property
    def robot(self) -> Robot:
        """The robot whose observations the server reads."""
        return self._planner.robot

    @property
    def execute(self) -> int:
        """Steps of a chunk that robots execute, as in training."""
        return self._planner.config.execute

    # Life

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Listen until `stop`, then answer pending requests and return."""
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        limits = {"max_batch": self.config.max_batch, "window": self.config.batch_window}
        self._batcher = Batcher(**limits, expected=lambda: len(self._sessions), metrics=self.metrics)  # type: ignore[arg-type]
        batching = asyncio.create_task(self._batcher.run())
        batching.add_done_callback(lambda _: self._stop.set())  # without the batcher no request gets an answer
        try:
            server = await self._listen()
            self.port = server.sockets[0].getsockname()[1]
            ready()
            await self._stop.wait()
            await self._drain(server)
        finally:
            batching.cancel()
            with suppress(asyncio.CancelledError):
                await batching
            self._threads.shutdown(wait=False)

    def stop(self) -> None:
        """Request a stop; callable from any thread."""
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _listen(self) -> Server:
        config, refused = self.config, partial(self.metrics.count, "refused", "reason", "sockets")
        try:
            return await serve(
                self._converse,
                config.host,
                config.port,
                process_request=self._before_upgrade,
                create_connection=limited_sockets(config.max_connections + HALF_OPEN, refused),
                compression=None,
                max_size=config.max_message,
                max_queue=1,
                origins=[None],  # refuse browsers, which send an Origin header; robots do not
                logger=logging.getLogger("pirl.serve.websockets"),
                ssl=tls_context(config),
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host} port {config.port}: {error.strerror or error}",
                hint="another server may be running there: choose another --port",
            ) from error

    async def _drain(self, server: Server) -> None:
        """Stop accepting connections, answer pending requests for up to `drain` seconds, and close."""
        self._stopping = True
        server.close(close_connections=False)
        deadline = self._loop.time() + self.config.drain
        idle = [connection for session, connection in self._sessions.items() if session not in self._busy]
        closing = [asyncio.create_task(one.close(GOING_AWAY, "the server is stopping")) for one in idle]
        while self._sessions and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self._sessions.values()):
            connection.transport.abort()
        await asyncio.gather(*closing, return_exceptions=True)
        await server.wait_closed()

    # HTTP, before a connection is upgraded

    async def _before_upgrade(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer plain HTTP; reject unauthorised connections."""
        path = request.path.partition("?")[0]
        if path == "/healthz" and request.method in ("GET", "HEAD"):
            return connection.respond(HTTPStatus.OK, "OK\n")
        if not has_key(request, self.config.api_key):
            self.metrics.count("refused", "reason", "key")
            response = connection.respond(HTTPStatus.UNAUTHORIZED, "the API key is missing or wrong\n")
            response.headers["WWW-Authenticate"] = "Api-Key"
            return response
        if path == "/reload" and request.method in ("GET", "POST"):
            return self._reload_over_http(connection, start=request.method == "POST")
        if request.method != "GET":
            return connection.respond(HTTPStatus.METHOD_NOT_ALLOWED, "only /reload takes a POST\n")
        if path == "/metrics":
            text = self.metrics.prometheus(open_connections=len(self._sessions), policy=self.policy)
            response = connection.respond(HTTPStatus.OK, text)
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
            return response
        if len(self._sessions) >= self.config.max_connections or self._stopping:
            self.metrics.count("refused", "reason", "connections")
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "the server has all the connections it takes\n")
        return None

    def _reload_over_http(self, connection: ServerConnection, *, start: bool) -> Response:
        if start and self.config.api_key is None:
            text = "reloading over HTTP needs an API key; send the process SIGHUP, or start it with a key\n"
            return connection.respond(HTTPStatus.FORBIDDEN, text)
        if start:
            self.reload()
        said = {"policy": self.policy, "reloading": self._reloading is not None, "error": self._reload_error}
        return connection.respond(HTTPStatus.ACCEPTED if start else HTTPStatus.OK, json.dumps(said) + "\n")

    # Another checkpoint

    def reload(self) -> None:
        """Reload the checkpoint in the background; episodes that begin after that use it."""
        if self._reloading is None:
            self._reloading = asyncio.create_task(self._reload())

    async def _reload(self) -> None:
        """Load in a thread. If that fails, keep serving the current checkpoint."""
        try:
            planner = await asyncio.to_thread(self._load, self._planner)
        except Exception as error:
            self._reload_error = str(error) if isinstance(error, PirlError) else f"{type(error).__name__}: {error}"
            self.metrics.count("reloads", "result", "failed")
            log.error("still serving %s: %s", self.policy, self._reload_error)
        else:
            log.info("new episodes get %s instead of %s", planner.name, self.policy)
            self._planner, self._reload_error = planner, None
            self.metrics.count("reloads", "result", "done")
        finally:
            self._reloading = None

    # One connection

    async def _converse(self, connection: ServerConnection) -> None:
        """Send the metadata, then answer requests until either end closes."""
        if len(self._sessions) >= self.config.max_connections or self._stopping:  # concurrent handshakes
            await connection.close(GOING_AWAY, "the server has all the connections it takes")
            return
        session = Session(next(self._numbers), self._planner, gap=self.config.episode_gap)
        self._sessions[session] = connection
        self.metrics.count("connections")
        try:
            await connection.send(wire.pack(self._metadata()))
            await self._serve_session(session, connection)
        except ConnectionClosed:
            pass
        finally:
            self._sessions.pop(session, None)
            if self.on_close is not None:
                self.on_close(session.number)

    async def _serve_session(self, session: Session, connection: ServerConnection) -> None:
        previous: float | None = None
        while not self._stopping:
            begun = perf_counter()
            message = await connection.recv()
            arrived = perf_counter()
            self._busy.add(session)
            try:
                await self._throttle(session)
                reply, plan = await self._answer(session, message, arrived)
                if previous is not None:
                    reply["server_timing"]["prev_total_ms"] = 1000 * previous
                with self.metrics.timed("send"):
                    await connection.send(wire.pack(reply))
                self.metrics.took("total", perf_counter() - arrived)
                self.metrics.count("requests")
                await self._tell(session, plan)
            except ConnectionClosed:
                return
            except Exception as error:
                await self._refuse(connection, error)
                return
            finally:
                self._busy.discard(session)
            previous = perf_counter() - begun
        await connection.close(GOING_AWAY, "the server is stopping")

    async def _answer(
        self, session: Session, message: str | bytes, arrived: float
    ) -> tuple[dict[str, Any], PlannedChunk]:
        """(OpenPI's reply to a request, the plan in it)."""
        if isinstance(message, str):
            raise WireError("a request came as text", hint="send binary messages, as openpi_client does")
        current = self._planner

        def prepare() -> Any:
            request = wire.unpack(message, wire.Limits(max_bytes=self.config.max_message))
            session.begin(request, current, arrived)
            before, delay = session.before(request) if self.config.real_time else (None, 0)
            number = session.noise_number
            return request, session.planner.row(session.observation, number=number, before=before, delay=delay)

        request, row = await self._loop.run_in_executor(self._threads, prepare)
        self.metrics.took("prepare", perf_counter() - arrived)
        plan, seconds = await self._batcher.plan(session.planner, row)
        if plan.novelty is not None:
            self.metrics.novel(plan.novelty)
        if self.safety is not None:
            plan = self._limited(self.safety, session, plan, row.state, request)
        session.chunk = plan.chunk
        reply: dict[str, Any] = {
            "actions": plan.chunk,
            "policy_timing": {"infer_ms": 1000 * seconds},
            "server_timing": {"infer_ms": 1000 * (perf_counter() - arrived)},
            POLICY: session.planner.name,
            CANDIDATES: session.planner.candidates,
        }
        if plan.value is not None:
            reply |= {VALUE: plan.value, SPREAD: plan.spread}
        if plan.novelty is not None:
            reply[NOVELTY] = plan.novelty
        return reply, plan

    def _limited(self, net: SafetyNet, session: Session, plan: PlannedChunk, state: Any, request: Any) -> PlannedChunk:
        """The plan within the safety limits; raises if the net refuses it."""
        before, _ = session.before(request)
        found = net.check(plan.chunk, state=state, last=session.chunk, expected=before, novelty=plan.novelty)
        for rule in found.rules:
            self.metrics.count("limited", "rule", rule)
        if found.chunk is None:
            raise ConfigError(
                f"the chunk is refused: {found.reason}", hint="the robot should stop; see the safety file"
            )
        if "novelty" in found.rules:
            log.warning("connection %d: %s", session.number, found.reason)
        return plan._replace(chunk=found.chunk)

    async def _throttle(self, session: Session) -> None:
        """Delay requests beyond `max_rate`; allows short bursts."""
        every, now = 1 / self.config.max_rate, self._loop.time()
        session.allowed_at = max(session.allowed_at, now - 4 * every) + every
        if session.allowed_at > now:
            self.metrics.count("throttled")
            await asyncio.sleep(session.allowed_at - now)

    async def _refuse(self, connection: ServerConnection, error: Exception) -> None:
        """Send the error as text and close the connection, as OpenPI does."""
        kind = type(error).__name__
        self.metrics.count("errors", "kind", kind)
        if isinstance(error, PirlError):
            said = str(error)[:LONGEST_ERROR]
            log.warning("request refused: %s", _printable(said))
        else:
            said = f"internal error: {kind}: {error}"[:LONGEST_ERROR]
            log.error("request failed", exc_info=error)
        with suppress(ConnectionClosed):
            await connection.send(said)
            await connection.close(INTERNAL_ERROR, "the reason is in the previous frame")

    async def _tell(self, session: Session, plan: PlannedChunk) -> None:
        """Call the recording hook; its errors are logged and do not reach the robot."""
        if self.on_exchange is None:
            return
        exchange = Exchange(
            session=session.number,
            episode=session.episode,
            step=session.step,
            observation=session.observation,
            chunk=plan.chunk,
            policy=session.planner.name,
            value=plan.value,
            told=session.told,
            early=session.early,
        )
        try:
            await asyncio.to_thread(self.on_exchange, exchange)
            self.metrics.count("records", "result", "done")
        except Exception:
            self.metrics.count("records", "result", "failed")
            log.exception("the recording hook failed")

    def _metadata(self) -> dict[str, Any]:
        planner = self._planner
        return {
            **self.config.metadata,
            POLICY: planner.name,
            "pirl/version": pirl.__version__,
            "pirl/robot": planner.robot.name,
            "pirl/horizon": planner.config.horizon,
            "pirl/execute": self.execute,
            "pirl/real_time": self.config.real_time,
        }


def _printable(text: str) -> str:
    """Escape untrusted text for the log: no line breaks, no terminal control characters."""
    return "".join(sign if sign.isprintable() else " " if sign == "\n" else repr(sign)[1:-1] for sign in text)


@contextmanager
def in_background(server: PolicyServer) -> Iterator[PolicyServer]:
    """Run the server in a background thread, for tests and for programs with other work."""
    ready, failed = threading.Event(), []

    def run() -> None:
        try:
            asyncio.run(server.run(ready.set))
        except Exception as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="pirl-serve", daemon=True)
    thread.start()
    ready.wait()
    if failed:
        raise failed[0]
    try:
        yield server
    finally:
        server.stop()
        thread.join()
