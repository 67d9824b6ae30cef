"""Operator takeover at any step; corrected steps are flagged.

    hand = KeySwitch()                      # the space bar takes over and hands back
    policy = Takeover(broker, lambda observation: leader.read() if hand.on else None)
    action = policy.infer(observation)      # action["pirl/intervention"]: whether a person chose it

`Takeover` is a policy like the broker it wraps; the recorder stores its flag as LeRobot's column `intervention`.
"""

import contextlib
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.robot.broker import ChunkBroker
from pirl.robot.keys import INTERVENTION, POLICY

Corrector = Callable[[Mapping[str, Any]], Float[np.ndarray, "A"] | None]
"""Maps an observation to the person's action, or None while the policy acts."""
OPERATOR = "operator"
"""The `policy` of steps chosen by a person."""


class Takeover:
    """A policy whose actions a corrector can override; overridden steps are flagged.

    An override drops the broker's chunk, so the policy replans from a new observation when it gets the robot back.
    """

    def __init__(self, broker: ChunkBroker, corrector: Corrector) -> None:
        self.broker, self._corrector = broker, corrector

    @property
    def intended(self) -> tuple[Float[np.ndarray, "H A"], int] | None:
        """The policy's chunk and step at the last step; None where a person acted."""
        return self.broker.intended

    def infer(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """The person's action if there is one, else the policy's."""
        action = self._corrector(obs)
        if action is None:
            return {**self.broker.infer(obs), INTERVENTION: False}
        self.broker.replan()
        self.broker.skip()
        return {"actions": np.asarray(action), POLICY: OPERATOR, INTERVENTION: True}

    def reset(self) -> None:
        """Begin a new episode."""
        self.broker.reset()


class KeySwitch:
    """A switch toggled by a terminal key, without Enter. Use as a context manager: it changes the terminal's mode."""

    def __init__(self, key: str = " ", *, stream: Any = None) -> None:
        self._key = key
        self._file = (sys.stdin if stream is None else stream).fileno()
        self.on = False
        """Whether a person controls the robot."""
        self._changed: Callable[[bool], None] = lambda on: None
        self._stop, self._wake = os.pipe()

    def on_change(self, told: Callable[[bool], None]) -> None:
        """Set a callback for every change, for a sound or a light."""
        self._changed = told

    def __enter__(self) -> "KeySwitch":
        self._mode = termios.tcgetattr(self._file)
        tty.setcbreak(self._file)
        self._thread = threading.Thread(target=self._watch, name="keys", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        os.write(self._wake, b"x")
        self._thread.join()
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._mode)
        for end in (self._stop, self._wake):
            with contextlib.suppress(OSError):
                os.close(end)

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._file, self._stop], [], [])
            if self._stop in ready or not (typed := os.read(self._file, 64)):
                return
            for key in typed.decode(errors="ignore"):
                if key == self._key:
                    self.on = not self.on
                    self._changed(self.on)
