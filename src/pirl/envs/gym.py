"""Any gymnasium environment as a `RobotEnv`: one task, whose initial states are the seeds of `reset`.

`GymConfig` declares how environments differ: the keys of the observation, the entry of `info` that means success,
whether images are in the observation or must be rendered. A mismatch raises an error instead of producing an evaluation
that never counts a success.
"""

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import Float

from pirl.envs.config import GymConfig
from pirl.envs.env import Outcome, RobotEnv
from pirl.errors import EnvError
from pirl.names import PROMPT, STATE
from pirl.nested import flatten
from pirl.records import Array, Context


class GymEnv(RobotEnv):
    """Wraps a gymnasium environment, made from its id or passed as `env`."""

    def __init__(self, config: GymConfig, env: gymnasium.Env | None = None) -> None:
        self.env = _make(config) if env is None else env
        self.robot, self.fps = config.robot, config.fps
        self.tasks = (config.prompt or config.id,)
        spec = self.env.spec
        limit = config.max_steps or (None if spec is None else spec.max_episode_steps)
        if limit is None:
            raise EnvError(f"{config.id} has no time limit", hint="set the episode length: env.max_steps")
        self.max_steps = limit
        space = self.env.action_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise EnvError(
                f"{config.id} takes actions of {space}; expected a vector of numbers, Box(..., (n,), float32)",
                hint="wrap the environment so that its action is one vector (gymnasium.ActionWrapper)",
            )
        self.action_space, self.action_dim = space, space.shape[0]
        self._config = config
        self._seen: Any = None
        self._steps = 0
        self._solved = False

    def begin(self, context: Context) -> None:
        """Reset with the context's initial state as the seed."""
        self._seen, _ = self.env.reset(seed=context.init)
        self._steps, self._solved = 0, False

    def act(self, action: Float[Array, "A"]) -> Outcome:
        """Execute one action. Success is sticky: the environment may continue after it and undo it."""
        if self._seen is None:
            raise EnvError("an action before the first episode", hint="call `begin` or `reset` first")
        self._seen, reward, terminated, truncated, info = self.env.step(action.astype(self.action_space.dtype))
        self._steps += 1
        truncated = bool(truncated) or (self._steps >= self.max_steps and not terminated)
        self._solved |= self._success(info, bool(terminated), ended=bool(terminated) or truncated)
        return Outcome(float(reward), bool(terminated), truncated, self._solved)

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        """The environment's observation in the robot's keys."""
        if self._seen is None:
            raise EnvError("an observation before the first episode", hint="call `begin` or `reset` first")
        found = flatten(self._seen) if isinstance(self._seen, Mapping) else {STATE: self._seen}
        seen = {key: value for key, value in found.items() if key != PROMPT}
        if self._config.observation_keys:
            seen = {}
            for ours, theirs in self._config.observation_keys:
                if theirs not in found:
                    raise EnvError(
                        f"{self._config.id}: the observation has no {theirs!r}; it has {', '.join(sorted(found))}",
                        hint="env.observation_keys are pairs of the robot's key and the environment's",
                    )
                seen[ours] = found[theirs]
        if not pictures:
            seen = {key: value for key, value in seen.items() if np.ndim(value) != 3}
        elif self._config.render_key is not None:
            seen[self._config.render_key] = self.render()
        # Copy: environments may return an array that they keep writing to.
        copies = {key: np.array(value) for key, value in seen.items()}
        return {**copies, PROMPT: found.get(PROMPT) or self.tasks[0]}

    def render(self) -> Any:
        """The environment's picture."""
        picture = self.env.render()
        if not isinstance(picture, np.ndarray):
            raise EnvError(
                f"{self._config.id} renders {type(picture).__name__}, expected a picture",
                hint="it needs the render mode rgb_array: give an environment of your own with it",
            )
        return picture

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _success(self, info: Mapping[str, Any], terminated: bool, *, ended: bool) -> bool:
        key = self._config.success_key
        if key is None:
            return terminated
        entries = flatten(info)
        if key in entries:
            return bool(np.asarray(entries[key]).item())
        if not ended:
            return False
        # Otherwise a misspelt key would look like a policy that never succeeds.
        raise EnvError(
            f"{self._config.id}: the episode ended without {key!r} in info; it has {', '.join(entries) or 'nothing'}",
            hint="set env.success_key to the entry that reports success, or to None if termination means success",
        )


def _make(config: GymConfig) -> gymnasium.Env:
    module, _, name = config.id.rpartition(":")
    try:
        if module:
            import_module(module)
    except ImportError as error:
        raise EnvError(
            f"{config.id}: module {module!r} cannot be imported: {error}", hint="install what registers it"
        ) from None
    options: dict[str, Any] = dict(config.options)
    if config.render_key is not None:
        options.setdefault("render_mode", "rgb_array")
    try:
        # gymnasium's checker warns about things that are fine here; `envs.check` looks for real faults.
        return gymnasium.make(name, max_episode_steps=config.max_steps, disable_env_checker=True, **options)
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound, gymnasium.error.VersionNotFound):
        near = difflib.get_close_matches(name, gymnasium.registry, n=3)
        raise EnvError(
            f"no environment {name!r} is registered",
            hint=f"write `module:{name}` to import the module that registers it"
            + (f"; similar are: {', '.join(near)}" if near else ""),
        ) from None
    except (gymnasium.error.Error, TypeError) as error:
        raise EnvError(f"{config.id} cannot be made: {error}", hint="check env.options and what it needs") from error
