"""The environment interface, single and vectorised.

A `RobotEnv` is a `gymnasium.Env` that declares its tasks, starts deterministically from a `Context`, and separates
acting from observing: rendering takes most of a simulator's time, and a policy that executes chunks observes only at
their ends.

An `EnvBatch` steps several environments in one process for rollouts. It is not gymnasium's vector API, which renders
after every step, steps all or none, and loses all environments when one worker dies. There is no automatic reset
(gymnasium's `AutoresetMode.DISABLED`): an ended episode stays ended until its slot begins a new context.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium
import numpy as np
from jaxtyping import Bool, Float

from pirl.errors import EnvError
from pirl.records import Array, Context

RawObservation = Mapping[str, Any]
"""One observation in the robot's own keys and units, the input of `data.transforms.Transform.observation`: `state`,
images (uint8, height x width x 3) and the instruction under `prompt`."""


class Outcome(NamedTuple):
    """Result of one action."""

    reward: float
    terminated: bool
    """The task ended: success, or a failure that ends it."""
    truncated: bool
    """The time limit is reached."""
    success: bool


class RobotEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """One simulated robot. A subclass declares its attributes and implements `begin`, `act` and `observe`."""

    robot: str
    """Name of the robot that reads the observations, as in `pirl.data.robots`."""
    tasks: tuple[str, ...]
    """Task names, the values of `Context.task`; success is counted per task."""
    num_inits: int | None = None
    """Number of initial states of each task. None: any seed is an initial state."""
    max_steps: int
    """Time limit of an episode, in steps."""
    fps: int
    """Control steps per second, for videos."""
    action_dim: int
    """Size of an action."""

    @abstractmethod
    def begin(self, context: Context) -> None:
        """Start an episode; the same context always starts identically."""

    @abstractmethod
    def act(self, action: Float[Array, "A"]) -> Outcome:
        """Execute one action, in the robot's units, without rendering."""

    @abstractmethod
    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        """Return state and prompt, and images on request."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gymnasium's reset: `seed` is the initial state, `options["task"]` the task (drawn by the seed if absent)."""
        super().reset(seed=seed)
        init = int(self.np_random.integers(self.num_inits or 2**31)) if seed is None else seed
        task = (options or {}).get("task") or self.tasks[init % len(self.tasks)]
        self.begin(self.check_context(Context(task, init if self.num_inits is None else init % self.num_inits)))
        return self.observe(), {"task": task}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Gymnasium's step: act, then observe."""
        outcome = self.act(self.check_action(action))
        return self.observe(), outcome.reward, outcome.terminated, outcome.truncated, {"success": outcome.success}

    def check_context(self, context: Context) -> Context:
        """Return the context, or raise if the environment does not have it."""
        if context.task not in self.tasks:
            raise EnvError(f"unknown task {context.task!r}", hint=f"the tasks are: {'; '.join(self.tasks)}")
        if context.init < 0 or (self.num_inits is not None and context.init >= self.num_inits):
            limit = "0 or more" if self.num_inits is None else f"0 to {self.num_inits - 1}"
            raise EnvError(f"task {context.task!r} has no initial state {context.init}", hint=f"it is {limit}")
        return context

    def check_action(self, action: Any) -> Float[Array, "A"]:
        """Return the action as an array, or raise if it is invalid."""
        array = np.asarray(action, np.float32)
        if array.shape != (self.action_dim,) or not np.isfinite(array).all():
            raise EnvError(
                f"action {np.array2string(array, threshold=20)} of shape {array.shape}; "
                f"expected {self.action_dim} finite numbers",
                hint="is the policy for this robot, and was its output brought to the robot's units?",
            )
        return array


class Outcomes(NamedTuple):
    """`Outcome` for several slots."""

    reward: Float[Array, "n"]
    terminated: Bool[Array, "n"]
    truncated: Bool[Array, "n"]
    success: Bool[Array, "n"]


@runtime_checkable
class EnvBatch(Protocol):
    """Several environments of one kind in this process, each in its slot."""

    size: int
    """Number of slots."""
    tasks: tuple[str, ...]
    num_inits: int | None
    max_steps: int
    fps: int
    action_dim: int
    robot: str

    def begin(self, slots: Sequence[int], contexts: Sequence[Context]) -> None:
        """Start an episode in each of the slots."""

    def act(self, slots: Sequence[int], actions: Float[Array, "n A"]) -> Outcomes:
        """Execute one action in each of the slots; other slots do not change."""

    def observe(self, slots: Sequence[int], *, pictures: bool = True) -> list[dict[str, Any]]:
        """Observation of each of the slots."""

    def close(self) -> None:
        """Free the simulators' resources."""


class SeparateEnvs:
    """An `EnvBatch` of independent environments, stepped one after the other."""

    def __init__(self, envs: Sequence[RobotEnv]) -> None:
        first = envs[0]
        self.envs = list(envs)
        self.size = len(envs)
        self.tasks, self.num_inits, self.robot = first.tasks, first.num_inits, first.robot
        self.max_steps, self.fps, self.action_dim = first.max_steps, first.fps, first.action_dim

    def begin(self, slots: Sequence[int], contexts: Sequence[Context]) -> None:
        """Start an episode in each of the slots."""
        for slot, context in zip(slots, contexts, strict=True):
            self.envs[slot].begin(self.envs[slot].check_context(context))

    def act(self, slots: Sequence[int], actions: Float[Array, "n A"]) -> Outcomes:
        """Execute one action in each of the slots; other slots do not change."""
        outcomes = [
            self.envs[slot].act(self.envs[slot].check_action(action))
            for slot, action in zip(slots, actions, strict=True)
        ]
        columns = list(zip(*outcomes, strict=True)) or [(), (), (), ()]
        flags = (np.array(column, bool) for column in columns[1:])
        return Outcomes(np.array(columns[0], np.float32), *flags)

    def observe(self, slots: Sequence[int], *, pictures: bool = True) -> list[dict[str, Any]]:
        """Observation of each of the slots."""
        return [self.envs[slot].observe(pictures=pictures) for slot in slots]

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()
