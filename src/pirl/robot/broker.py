"""From chunks to single steps: a drop-in for `openpi_client.ActionChunkBroker` that can prefetch the next chunk.

Synchronous (the default): after `execute` steps the robot waits for the next chunk. With `prefetch` it keeps moving:
the broker requests the next chunk during the current one, early enough to arrive in time. The request reports the
robot's progress (`robot.keys`), so that a server with real-time chunking plans a continuation of the current chunk.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from pirl.errors import ConfigError
from pirl.robot.keys import DELAY, EXECUTED, STEP

Array = np.ndarray
_REMEMBERED = 10
"""Number of past delays to keep; their maximum predicts the next one, as in the paper on real-time chunking."""


@runtime_checkable
class Policy(Protocol):
    """OpenPI's `BasePolicy`."""

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        """The reply to an observation."""

    def reset(self) -> None:
        """Begin a new episode."""


class ChunkBroker:
    """A policy that returns one step at a time."""

    def __init__(self, policy: Policy, execute: int, *, prefetch: bool = False, extras: bool = True) -> None:
        """`execute`: steps of a chunk before the next one takes over. With `prefetch`, the rest of the current chunk
        bridges a late one; the robot waits only when it is used up.

        `extras`: report steps and delays to the server.
        """
        if execute < 1:
            raise ConfigError(f"{execute} executed steps per chunk", hint="execute at least one")
        self._policy, self._execute, self._prefetch, self._extras = policy, execute, prefetch, extras
        self._thread = ThreadPoolExecutor(1, "prefetch") if prefetch else None
        self._delays: deque[int] = deque([0], maxlen=_REMEMBERED)
        self.waits = 0
        """Number of times the robot waited for a late chunk."""
        self._reply: dict[str, Any] | None = None
        self._asked: tuple[Future[dict[str, Any]], int] | None = None
        self._stale: Future[dict[str, Any]] | None = None
        self._index = self._step = 0

    @property
    def intended(self) -> tuple[Float[Array, "H A"], int] | None:
        """(current chunk, index of the step returned last); None before the first."""
        return None if self._reply is None else (np.asarray(self._reply["actions"]), self._index - 1)

    @property
    def delay(self) -> int:
        """Expected steps between a request and its reply."""
        return max(self._delays)

    def infer(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """The current step of the reply: arrays are indexed by it, numbers and text stay."""
        self._take()
        if self._reply is None or (self._index >= self._execute and self._asked is None and self._late()):
            self._settle()
            self._use(self._policy.infer(self._request(obs, delay=0)), passed=0)
        elif self._prefetch and self._asked is None and self._index + self.delay >= self._execute:
            self._ask(obs)
        if self._asked is not None and self._index >= self._horizon:
            self.waits += 1
            self._asked[0].exception()  # wait; `_take` re-raises errors
            self._take()
        assert self._reply is not None
        now = {key: _cut(value, self._index) for key, value in self._reply.items()}
        self._index += 1
        self._step += 1
        return now

    def reset(self) -> None:
        """Begin a new episode; drops the last one's chunk."""
        self.replan()
        self._settle()
        self._policy.reset()
        self._step = 0

    def replan(self) -> None:
        """Forget the current chunk and the one asked for: the world has changed, as after a takeover. Does not wait."""
        if self._asked is not None:
            self._stale = self._asked[0]
        self._asked, self._reply, self._index = None, None, 0

    def _settle(self) -> None:
        """Wait for a request whose reply is no longer wanted: the policy takes one at a time."""
        if self._stale is not None:
            self._stale.exception()
            self._stale = None

    def skip(self) -> None:
        """Count a control step in which the policy did not act."""
        self._step += 1

    @property
    def _horizon(self) -> int:
        return 0 if self._reply is None else len(self._reply["actions"])

    def _late(self) -> bool:
        """Whether the current chunk must not be continued: after `execute` steps, or with prefetching at its end."""
        return not self._prefetch or self._index >= self._horizon

    def _request(self, obs: Mapping[str, Any], *, delay: int) -> dict[str, Any]:
        if not self._extras:
            return dict(obs)
        told = {STEP: self._step, EXECUTED: self._index if self._reply is not None else 0, DELAY: delay}
        return {**obs, **told}

    def _ask(self, obs: Mapping[str, Any]) -> None:
        """Request the next chunk in the background. Copies the observation, because robots reuse their buffers."""
        assert self._thread is not None
        request = _copied(self._request(obs, delay=max(self.delay, 1)))  # the old chunk executes at least this step
        self._asked = (self._thread.submit(self._policy.infer, request), self._step)

    def _take(self) -> None:
        """Switch to the requested chunk if it has arrived, skipping the steps that passed meanwhile."""
        if self._asked is None or not self._asked[0].done():
            return
        (future, step), self._asked = self._asked, None
        passed = self._step - step
        self._delays.append(passed)
        self._use(future.result(), passed=passed)

    def _use(self, reply: dict[str, Any], *, passed: int) -> None:
        horizon = len(reply["actions"])
        if self._execute > horizon:
            raise ConfigError(f"execute is {self._execute}, the server's chunks have {horizon} steps")
        self._reply, self._index = reply, min(passed, horizon - 1)


def _cut(value: Any, index: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(one, index) for key, one in value.items()}
    return value[index] if isinstance(value, np.ndarray) and value.ndim else value


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value
