"""Checks that an environment keeps the contract of `RobotEnv`, by stepping it.

    report = check(MyEnv())                          # the contract alone
    report = check(MyEnv(), Expected(...))           # and what a robot's policy reads; see `rollout.check.check_env`

The first fault raises an error that names the key, its value and the expected one. Suspicious findings go into the
report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import Float

from pirl.envs.env import Outcome, RobotEnv
from pirl.errors import EnvError
from pirl.names import PROMPT
from pirl.nested import flatten
from pirl.records import Array, Context


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The parts of an observation that a policy's robot reads; "/" separates the levels of nested keys."""

    robot: str
    """The robot's name, for messages."""
    state_keys: tuple[tuple[str, ...], ...]
    """Possible keys of the state, best first; the values of one entry's keys are joined."""
    state_dim: int
    """Size of the state."""
    action_dim: int
    """Size of an action."""
    cameras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Camera slot -> candidate image keys in order of preference."""
    optional_cameras: tuple[str, ...] = ()
    """Slots whose image may be missing."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings; `str` gives them in words."""

    tasks: int
    """Number of tasks."""
    observation: Mapping[str, str]
    """Type and shape of each key of an observation."""
    steps: int
    """Number of executed actions."""
    notes: tuple[str, ...]
    """Things that are allowed but probably not intended."""

    def __str__(self) -> str:
        lines = [f"{self.tasks} task(s), {self.steps} steps, no fault found"]
        lines += [f"  {key}: {value}" for key, value in self.observation.items()]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def check(env: gymnasium.Env, expected: Expected | None = None, *, steps: int = 20) -> Report:
    """Step an environment for a few episodes of up to `steps` actions; raises `EnvError` at the first fault.

    Only environments with a time limit of at most `steps` are checked to truncate.
    """
    if not isinstance(env, RobotEnv):
        raise EnvError(
            f"{type(env).__name__} is a plain gymnasium environment, expected a RobotEnv",
            hint="bring it to the contract: GymEnv(GymConfig(id=..., robot=...), env)",
        )
    _check_attributes(env, expected)
    notes: list[str] = []
    context = Context(env.tasks[0], 0)
    first = _start(env, context)
    _check_observation(first, expected)
    described = {key: _describe_value(value) for key, value in flatten(first).items()}
    _check_blind_look(env, first)
    kept = _copied(first)
    actions = _actions(env, steps)
    taken, ended = _play(env, actions)
    _compare(kept, first, "changed after it was handed out", "return copies: what was seen must stay as it was")
    _check_observation(env.observe(), expected)
    _compare(
        kept,
        _start(env, context),
        f"differs between two episodes of the same context {context}",
        "`begin` must set everything that the context decides, whatever happened before",
    )
    replayed, _ = _play(env, actions[::-1])  # any actions must work, not only plausible ones
    for other in _other_contexts(env):
        seen = _start(env, other)
        _check_observation(seen, expected)
        if other.task == context.task and _same(kept, seen):
            notes.append(f"initial states {context.init} and {other.init} look the same")
    if taken > env.max_steps or (taken == env.max_steps and not ended):
        raise EnvError(
            f"no end after {env.max_steps} steps, which are max_steps",
            hint="`act` must return truncated=True when time is over",
        )
    flat = flatten(first)
    notes += [f"picture {key!r} has one colour throughout" for key in _pictures(flat) if np.ptp(flat[key]) == 0]
    return Report(tasks=len(env.tasks), observation=described, steps=taken + replayed, notes=tuple(notes))


def _check_attributes(env: RobotEnv, expected: Expected | None) -> None:
    def wrong(name: str, needed: str) -> EnvError:
        return EnvError(
            f"{name} is {getattr(env, name, 'missing')!r}, expected {needed}", hint=f"set {name} in __init__"
        )

    tasks = getattr(env, "tasks", None)
    if not isinstance(tasks, tuple) or not tasks or not all(isinstance(task, str) and task for task in tasks):
        raise wrong("tasks", "a tuple of texts")
    if len(set(tasks)) < len(tasks):
        raise wrong("tasks", "names that differ, as success is counted by them")
    if not isinstance(getattr(env, "robot", None), str):
        raise wrong("robot", "the name of a robot")
    for name in ("max_steps", "fps", "action_dim"):
        if not _is_count(getattr(env, name, None)):
            raise wrong(name, "a whole number of at least 1")
    if env.num_inits is not None and not _is_count(env.num_inits):
        raise wrong("num_inits", "None or a whole number of at least 1")
    space = getattr(env, "action_space", None)
    if space is not None and space.shape != (env.action_dim,):
        raise EnvError(
            f"action_space has shape {space.shape}, action_dim is {env.action_dim}; expected ({env.action_dim},)",
            hint="make them agree",
        )
    if expected is not None and env.action_dim != expected.action_dim:
        raise EnvError(
            f"the environment takes actions of shape ({env.action_dim},); robot {expected.robot!r} has "
            f"({expected.action_dim},)",
            hint="is this the right robot for the environment?",
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _start(env: RobotEnv, context: Context) -> Any:
    env.begin(env.check_context(context))
    return env.observe()


def _other_contexts(env: RobotEnv) -> list[Context]:
    others = [Context(env.tasks[0], 1)] if env.num_inits is None or env.num_inits > 1 else []
    return others + ([Context(env.tasks[-1], 0)] if len(env.tasks) > 1 else [])


def _check_observation(observation: object, expected: Expected | None) -> None:
    """Raise unless every entry is valid and those a robot needs are present."""
    if not isinstance(observation, Mapping):
        raise EnvError(
            f"observe returns {type(observation).__name__}, expected a dict", hint="see pirl.envs.env.RawObservation"
        )
    flat = flatten(observation)
    if not isinstance(flat.get(PROMPT), str) or not flat[PROMPT]:
        raise EnvError(
            f"{PROMPT!r} is {_describe_value(flat.get(PROMPT))}, expected a text that is not empty",
            hint="the instruction is part of every observation, with or without pictures",
        )
    for key, value in flat.items():
        if key != PROMPT:
            _check_entry(key, value)
    if expected is not None:
        _check_state(flat, expected)
        _check_cameras(flat, expected)


def _check_entry(key: str, value: object) -> None:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise EnvError(f"{key!r} is {_describe_value(value)}, expected an array of numbers", hint="convert it")
    if value.ndim == 3:
        if value.shape[-1] != 3:
            first = "channels come last here; " if value.shape[0] == 3 else ""
            raise EnvError(
                f"picture {key!r} has shape {value.shape}, expected [height, width, 3]",
                hint=f"{first}give RGB without transparency",
            )
        if value.dtype != np.uint8:
            raise EnvError(f"picture {key!r} is {value.dtype}, expected uint8", hint="bytes from 0 to 255")
    elif not np.isfinite(value).all():
        where = tuple(np.argwhere(~np.isfinite(value))[0].tolist())
        raise EnvError(
            f"{key!r} of shape {value.shape} is not finite, first at index {where}", hint="see the simulator"
        )


def _check_state(flat: Mapping[str, Any], expected: Expected) -> None:
    keys = next((keys for keys in expected.state_keys if all(key in flat for key in keys)), None)
    if keys is None:
        wanted = " or ".join(" + ".join(keys) for keys in expected.state_keys)
        raise EnvError(
            f"no state for robot {expected.robot!r}: looked for {wanted}; found {', '.join(sorted(flat))}",
            hint="rename the keys, or declare them in the robot's state_keys",
        )
    shapes = [flat[key].shape for key in keys]
    size = sum(int(np.prod(shape)) for shape in shapes)
    if any(len(shape) > 1 for shape in shapes) or size != expected.state_dim:
        raise EnvError(
            f"state {' + '.join(keys)} has shape {' + '.join(map(str, shapes))}; robot {expected.robot!r} needs "
            f"({expected.state_dim},)",
            hint="is this the right robot for the environment?",
        )


def _check_cameras(flat: Mapping[str, Any], expected: Expected) -> None:
    for slot, keys in expected.cameras.items():
        key = next((key for key in keys if key in flat), None)
        if key is None and slot not in expected.optional_cameras:
            raise EnvError(
                f"no picture for camera {slot} of robot {expected.robot!r}: looked for {', '.join(keys)}; found "
                f"{', '.join(_pictures(flat)) or 'no picture'}",
                hint="rename the picture, or declare where it is in the robot's cameras",
            )
        if key is not None and flat[key].ndim != 3:
            raise EnvError(
                f"picture {key!r} has shape {flat[key].shape}, expected [height, width, 3]", hint="for " + slot
            )


def _check_blind_look(env: RobotEnv, first: Mapping[str, Any]) -> None:
    """Raise unless observing without images returns the rest unchanged."""
    blind, full = flatten(env.observe(pictures=False)), flatten(first)
    if pictures := _pictures(blind):
        raise EnvError(
            f"observe(pictures=False) still gives picture {pictures[0]!r}", hint="leave it out, and do not render it"
        )
    rest = {key: value for key, value in full.items() if key not in _pictures(full)}
    _compare(rest, blind, "differs with observe(pictures=False)", "looking must not change anything")


def _actions(env: RobotEnv, steps: int) -> list[Float[Array, "A"]]:
    """The middle of the action range, then draws around it; declared ranges may be infinite or wrong, so clip them."""
    rng = np.random.default_rng(0)
    space = getattr(env, "action_space", None)
    low, high = np.full(env.action_dim, -1.0), np.full(env.action_dim, 1.0)
    if isinstance(space, gymnasium.spaces.Box):
        low, high = np.clip(space.low, -1e3, 1e3), np.clip(space.high, -1e3, 1e3)
        if not (low < high).all():
            raise EnvError(f"action_space has an empty range: {space}", hint="every dimension needs low < high")
    middle, half = (low + high) / 2, (high - low) / 2
    draws = rng.uniform(-0.5, 0.5, (steps, env.action_dim))
    draws[0] = 0
    return list((middle + half * draws).astype(np.float32))


def _play(env: RobotEnv, actions: list[Float[Array, "A"]]) -> tuple[int, bool]:
    """Execute actions until the episode ends; returns (number of actions, whether it ended)."""
    for step, action in enumerate(actions):
        outcome = env.act(env.check_action(action))
        if not isinstance(outcome, Outcome):
            raise EnvError(
                f"act returns {type(outcome).__name__}, expected an Outcome", hint="see pirl.envs.env.Outcome"
            )
        if not isinstance(outcome.reward, int | float | np.number) or not np.isfinite(outcome.reward):
            raise EnvError(
                f"the reward of step {step} is {outcome.reward!r}, expected a finite number", hint="see `act`"
            )
        for name in ("terminated", "truncated", "success"):
            if not isinstance(getattr(outcome, name), bool | np.bool_):
                raise EnvError(
                    f"{name} of step {step} is {getattr(outcome, name)!r}, expected a bool", hint="see `act`"
                )
        if outcome.terminated or outcome.truncated:
            return step + 1, True
    return len(actions), False


def _pictures(flat: Mapping[str, Any]) -> list[str]:
    return [key for key, value in flat.items() if np.ndim(value) == 3]


def _copied(observation: Mapping[str, Any]) -> dict[str, Any]:
    return {key: np.array(value) if key != PROMPT else value for key, value in flatten(observation).items()}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    other = flatten(other)
    return all(key in other and np.array_equal(value, other[key]) for key, value in one.items())


def _compare(kept: Mapping[str, Any], seen: Mapping[str, Any], what: str, hint: str) -> None:
    """Raise unless both observations are bit-identical."""
    seen = flatten(seen)
    if kept.keys() != seen.keys():
        raise EnvError(f"key {min(kept.keys() ^ seen.keys())!r} {what}: it is not always there", hint=hint)
    for key, value in kept.items():
        if np.shape(value) != np.shape(seen[key]):
            raise EnvError(f"{key!r} {what}: shape {np.shape(value)}, then {np.shape(seen[key])}", hint=hint)
        if not np.array_equal(value, seen[key]):
            numbers = isinstance(value, np.ndarray)
            by = f" by up to {np.abs(value.astype(np.float64) - seen[key]).max():.3g}" if numbers else ""
            raise EnvError(f"{key!r} {what}{by}", hint=hint)


def _describe_value(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return "missing" if value is None else f"{type(value).__name__} {value!r}"
