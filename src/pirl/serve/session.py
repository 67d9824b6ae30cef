"""State of one robot's connection: its episode, its policy, its last chunk."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.errors import WireError
from pirl.robot.keys import DELAY, EPISODE, EXECUTED, PREFIX, STEP
from pirl.serve.planner import Planner

_LARGEST = 2**32 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """One request and its reply, as a recording hook gets them."""

    session: int
    """Number of the connection."""
    episode: int | str
    """The episode's name, or its number within the connection."""
    step: int
    """The observation's control step if the client sends it; otherwise the request's number in the episode."""
    observation: Mapping[str, Any]
    """The request without pirl's keys; nesting as received. Arrays are read-only."""
    chunk: Float[np.ndarray, "H A"]
    """The reply's actions."""
    policy: str
    """Name of the policy that planned them."""
    value: float | None
    """The critic's value of the chunk."""
    told: bool
    """Whether the client sent its control step."""
    early: bool
    """Whether the client prefetches: it asked before its chunk was used up."""


class Session:
    """The server's state of a connection."""

    def __init__(self, number: int, planner: Planner, *, gap: float) -> None:
        """`gap`: seconds of silence after which a new episode begins, for clients that do not name episodes."""
        self.number, self.planner, self._gap = number, planner, gap
        self.chunk: Float[np.ndarray, "H A"] | None = None
        self.observation: Mapping[str, Any] = {}
        self.step = 0
        self.told = self.early = False
        self._name: int | str | None = None
        self._count = self._requests = 0
        self._last: float | None = None
        self.allowed_at = 0.0

    @property
    def episode(self) -> int | str:
        """The client's name of the episode, or the number of this connection's earlier ones."""
        return self._count if self._name is None else self._name

    @property
    def noise_number(self) -> tuple[int, int]:
        """Seed of the noise: the named episode and step, or the numbers of connection and request."""
        if self._name is None:
            return self.number & _LARGEST, self._requests - 1
        name = self._name
        return (name if isinstance(name, int) else zlib.crc32(name.encode())), self.step

    def begin(self, message: Any, current: Planner, now: float) -> bool:
        """Read pirl's keys of a request; returns whether it begins an episode, which then uses planner `current`."""
        if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
            raise WireError("a request is a map with text as keys", hint="send one observation per request")
        name = _episode(message.get(EPISODE))
        paused = name is None and self._last is not None and now - self._last > self._gap
        fresh = self._last is None or paused or name != self._name
        if fresh:
            self._count += self._last is not None
            self.planner, self.chunk, self.step = current, None, 0
        elif self._last is not None:
            self.step += 1
        self.told = STEP in message
        self.early = DELAY in message and _whole(message, DELAY) > 0
        if self.told:
            self.step = _whole(message, STEP)
        self._name, self._last = name, now
        self._requests += 1
        self.observation = {key: value for key, value in message.items() if not key.startswith(PREFIX)}
        return fresh

    def before(self, message: Mapping[str, Any]) -> tuple[Float[np.ndarray, "P A"] | None, int]:
        """(rest of the last chunk, steps of it executed before the reply arrives), if the client reports them."""
        if EXECUTED not in message or self.chunk is None:
            return None, 0
        executed = _whole(message, EXECUTED)
        delay = _whole(message, DELAY) if DELAY in message else 0
        return (self.chunk[executed:], delay) if executed < len(self.chunk) else (None, 0)


def _episode(name: Any) -> int | str | None:
    if isinstance(name, np.integer | np.ndarray) and np.ndim(name) == 0:
        name = name.item()
    if name is None or (type(name) is int and 0 <= name <= _LARGEST) or (isinstance(name, str) and len(name) <= 200):
        return name
    raise WireError(f"{EPISODE} is {repr(name)[:60]}", hint=f"a number from 0 to {_LARGEST}, or up to 200 characters")


def _whole(message: Mapping[str, Any], key: str) -> int:
    value = message[key]
    if isinstance(value, np.integer | np.ndarray) and np.ndim(value) == 0:
        value = value.item()
    if type(value) is int and 0 <= value <= _LARGEST:
        return value
    raise WireError(f"{key} is {repr(value)[:60]}", hint=f"a whole number from 0 to {_LARGEST}")
