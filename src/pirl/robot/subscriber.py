"""Records OpenPI's own `Runtime`: add a `RecordingSubscriber` to its subscribers.

    broker = ChunkBroker(PolicyClient("10.0.0.5", 8000), execute=10)
    policy = Takeover(broker, corrector)                                     # or the broker itself
    recorder = Recorder("recordings/fold", fps=50, horizon=20)
    subscriber = RecordingSubscriber(recorder, policy, outcome=ask_operator, task="fold the box")
    Runtime(environment, PolicyAgent(policy), [subscriber], max_hz=50, num_episodes=20).run()

If your robot has its own loop, call `Recorder.step` there.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from pirl.errors import DataError
from pirl.names import ACTIONS, PROMPT
from pirl.robot.keys import INTERVENTION, POLICY
from pirl.robot.recorder import Recorder

Outcome = bool | Literal["timeout"] | tuple[bool | Literal["timeout"], str] | None
"""Success, failure (False) or "timeout", alone or with a note; None discards the episode. A failure ends the task: its
last actions get the value 0. After a time-out the task could still have succeeded."""


@runtime_checkable
class Planner(Protocol):
    """Knows the chunk in force: a broker, or a takeover around one."""

    @property
    def intended(self) -> tuple[Float[np.ndarray, "H A"], int] | None:
        """The current chunk and the index of its step that was due."""


class RecordingSubscriber:
    """Implements OpenPI's `Subscriber` structurally; openpi-client need not be installed."""

    def __init__(
        self, recorder: Recorder, planner: Planner, *, outcome: Callable[[], Outcome], task: str | None = None
    ) -> None:
        """`outcome` is called after every episode; `task` defaults to the observation's prompt."""
        self.recorder, self._planner, self._outcome, self._task = recorder, planner, outcome, task

    def on_episode_start(self) -> None:
        """Discard an unfinished episode; the next step begins a new one."""
        self.recorder.discard()

    def on_step(self, observation: Mapping[str, Any], action: Mapping[str, Any]) -> None:
        """Record the observation and the executed action."""
        if not self.recorder.running:
            self.recorder.start(task=self._find_task(observation))
        self.recorder.step(
            observation,
            np.asarray(action[ACTIONS], np.float32),
            intended=self._planner.intended,
            intervention=bool(action.get(INTERVENTION, False)),
            policy=str(action.get(POLICY, "")),
        )

    def on_episode_end(self) -> None:
        """Ask for the outcome and save the episode, or discard it."""
        said = self._outcome()
        if said is None or not self.recorder.running:
            self.recorder.discard()
            return
        outcome, note = said if isinstance(said, tuple) else (said, "")
        if not isinstance(outcome, bool) and outcome != "timeout":
            raise DataError(f"the episode's outcome is {outcome!r}", hint='answer True, False, "timeout" or None')
        self.recorder.end(outcome is True, truncated=outcome == "timeout", note=note)

    def _find_task(self, observation: Mapping[str, Any]) -> str:
        task = self._task or observation.get(PROMPT)
        if not isinstance(task, str):
            raise DataError("the observation has no prompt", hint="give the subscriber a task")
        return task
