"""Safety limits on actions, off by default: defined per robot, checked on every chunk, counted per rule.

They bound the actions sent to the robot, in its own units (positions for a position-controlled robot). A chunk beyond a
limit is clipped or refused. This is a net under a policy, not a replacement for the robot's own limits.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from pirl.errors import ConfigError
from pirl.ranges import Checked, Positive

TINY = 1e-6
"""Rounding in float32, relative to the limit, is no violation."""
ROUNDS = 8
"""Passes over all rules before a chunk is refused: clipping to one limit may violate another."""


@dataclass(frozen=True, kw_only=True)
class Box(Checked):
    """A workspace: where some part of the robot may be."""

    actions: tuple[int, ...]
    """Action dimensions with its coordinates, or with steps in them."""
    low: tuple[float, ...]
    """Smallest coordinates."""
    high: tuple[float, ...]
    """Largest coordinates."""
    state: tuple[int, ...] | None = None
    """For actions that are steps: state dimensions with the coordinates now. None: actions are coordinates."""
    scale: Positive = 1.0
    """Coordinates per unit of such a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {len(part) for part in (self.actions, self.low, self.high, self.state) if part is not None}
        if len(sizes) != 1 or not all(low < high for low, high in zip(self.low, self.high, strict=True)):
            raise ConfigError(
                f"safety: a workspace of {len(self.actions)} actions from {self.low} to {self.high}",
                hint="as many dimensions in actions, low, high (and state); low below high",
            )


@dataclass(frozen=True, kw_only=True)
class NoveltyConfig(Checked):
    """What happens where the policy sees what it has not seen in training."""

    mode: Literal["refuse", "warn"] = "refuse"
    """Refuse the request with the reason, or count it and say so in the log."""
    limit: Positive = 1.0
    """Largest novelty. 1: as far from the data as the most distant frame of one in twenty held-out episodes."""
    file: Path | None = None
    """The file of `pirl serve --fit-novelty`, if it is not beside the weights."""


@dataclass(frozen=True, kw_only=True)
class SafetyConfig(Checked):
    """The limits of one robot; a limit that is None is not checked. Lists have one value per action dimension."""

    rate: Positive
    """Control steps per second."""
    mode: Literal["clip", "refuse"] = "refuse"
    """What happens to a chunk beyond a limit: it is clipped, or refused with the reason. A chunk that cannot be clipped
    to all limits at once is refused."""
    low: tuple[float, ...] | None = None
    """Smallest action."""
    high: tuple[float, ...] | None = None
    """Largest action."""
    velocity: tuple[Positive, ...] | None = None
    """Largest change of the action, per second."""
    jerk: tuple[Positive, ...] | None = None
    """Largest third difference of the action, per second³."""
    workspace: Box | None = None
    """Allowed positions of a part of the robot."""
    jump: tuple[Positive, ...] | None = None
    """Largest distance between a chunk's first action and the chunk before, at the step it continues."""
    novelty: NoveltyConfig | None = None
    """The rule for observations unlike the training data."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LimitedChunk:
    """A chunk after the safety net."""

    chunk: Float[np.ndarray, "H A"] | None
    """The actions that may be sent; None if none may."""
    rules: tuple[str, ...]
    """Rules that the chunk violated."""
    reason: str = ""
    """The first violation, in words."""


class SafetyNet:
    """Checks chunks of one robot."""

    def __init__(self, config: SafetyConfig, *, action_dim: int, state_dim: int) -> None:
        self.config = config
        for name in ("low", "high", "velocity", "jerk", "jump"):
            limit = getattr(config, name)
            if limit is not None and len(limit) != action_dim:
                raise ConfigError(
                    f"safety: {name} has {len(limit)} values, the robot's actions have {action_dim}",
                    hint="one value per action dimension; .inf for no limit",
                )
        box = config.workspace
        if box is not None and (max(box.actions) >= action_dim or max(box.state or (0,)) >= state_dim):
            raise ConfigError(
                f"safety: workspace names actions {box.actions} and state {box.state}, the robot has {action_dim} "
                f"action and {state_dim} state dimensions",
                hint="dimensions count from 0",
            )

    def check(
        self,
        chunk: Float[np.ndarray, "H A"],
        *,
        state: Float[np.ndarray, "S"],
        last: Float[np.ndarray, "P A"] | None = None,
        expected: Float[np.ndarray, "R A"] | None = None,
        novelty: float | None = None,
    ) -> LimitedChunk:
        """Apply all rules to a chunk. `last` is the previous chunk, `expected` the rest of it, if known.

        If it is unknown how far the robot got in `last`, the jump is measured from its nearest step.
        """
        if not np.isfinite(chunk).all():
            return LimitedChunk(chunk=None, rules=("finite",), reason="the actions are not finite")
        config = self.config.novelty
        if config is None or novelty is None or novelty <= config.limit:
            return self._within(chunk, state, last, expected)
        reason = f"novelty: {novelty:.3g} exceeds the limit {config.limit:.3g}: nothing similar in the training data"
        if config.mode == "refuse":
            return LimitedChunk(chunk=None, rules=("novelty",), reason=reason)
        found = self._within(chunk, state, last, expected)
        return found if found.chunk is None else replace(found, rules=("novelty", *found.rules), reason=reason)

    def _within(self, chunk: np.ndarray, state: np.ndarray, last: Any, expected: Any) -> LimitedChunk:
        """The chunk within all limits on actions at once, or none if `ROUNDS` passes of clipping do not get there."""
        out = np.asarray(chunk, np.float64)
        out, rules, reason = self._clipped(out, state, last, expected)
        if not rules:
            return LimitedChunk(chunk=chunk, rules=())
        if self.config.mode == "refuse":
            return LimitedChunk(chunk=None, rules=rules[:1], reason=reason)
        for _ in range(ROUNDS):
            sent = out.astype(chunk.dtype)
            out, violated, _ = self._clipped(np.asarray(sent, np.float64), state, last, expected)
            if not violated:
                return LimitedChunk(chunk=sent, rules=rules, reason=reason)
            rules += tuple(rule for rule in violated if rule not in rules)
        return LimitedChunk(
            chunk=None, rules=rules, reason=f"{reason}; clipping cannot meet {', '.join(rules)} at once"
        )

    def _clipped(
        self, out: np.ndarray, state: np.ndarray, last: Any, expected: Any
    ) -> tuple[np.ndarray, tuple[str, ...], str]:
        """The chunk after one pass over the rules, the violated rules, and the first violation in words."""
        rules: list[str] = []
        reason = ""
        for rule, limited in (
            ("jump", lambda x: self._jump(x, last, expected)),
            ("velocity", self._velocity),
            ("jerk", self._jerk),
            ("limits", self._limits),
            ("workspace", lambda x: self._workspace(x, state)),
        ):
            within = limited(out)
            excess = np.abs(within - out)
            if (excess > TINY * (1 + np.abs(out))).any():
                rules.append(rule)
                step, dim = np.unravel_index(int(excess.argmax()), excess.shape)
                reason = reason or (
                    f"{rule}: step {step}, dimension {dim} is {out[step, dim]:.4g}, within the limit "
                    f"{within[step, dim]:.4g}"
                )
                out = within
        return out, tuple(rules), reason

    def _jump(self, x: np.ndarray, last: np.ndarray | None, expected: np.ndarray | None) -> np.ndarray:
        """Shift the chunk towards the previous one, by the excess at its first step and less towards its end."""
        if self.config.jump is None or last is None:
            return x
        limit = np.array(self.config.jump)
        known = expected if expected is not None and len(expected) else last
        steps = known[:1] if known is expected else known
        nearest = steps[np.argmin((np.abs(steps - x[0]) / limit).max(axis=1))]
        excess = x[0] - np.clip(x[0], nearest - limit, nearest + limit)
        fading = 1 - np.arange(len(x)) / len(x)
        return x - fading[:, None] * excess

    def _limits(self, x: np.ndarray) -> np.ndarray:
        low, high = self.config.low, self.config.high
        return np.clip(x, None if low is None else np.array(low), None if high is None else np.array(high))

    def _workspace(self, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        box = self.config.workspace
        if box is None:
            return x
        out, dims = x.copy(), list(box.actions)
        if box.state is None:
            out[:, dims] = np.clip(x[:, dims], box.low, box.high)
            return out
        place = np.asarray(state, np.float64)[list(box.state)]
        for step in range(len(x)):  # positions accumulate over the clipped steps
            there = np.clip(place + box.scale * x[step, dims], np.minimum(box.low, place), np.maximum(box.high, place))
            out[step, dims] = (there - place) / box.scale
            place = there
        return out

    def _velocity(self, x: np.ndarray) -> np.ndarray:
        """Limit the change between consecutive steps."""
        if self.config.velocity is None:
            return x
        out, limit = x.copy(), np.array(self.config.velocity) / self.config.rate
        for step in range(1, len(x)):
            out[step] = np.clip(x[step], out[step - 1] - limit, out[step - 1] + limit)
        return out

    def _jerk(self, x: np.ndarray) -> np.ndarray:
        """Limit the third difference of each step with its predecessors."""
        if self.config.jerk is None:
            return x
        out, limit = x.copy(), np.array(self.config.jerk) / self.config.rate**3
        for step in range(3, len(x)):
            smooth = 3 * out[step - 1] - 3 * out[step - 2] + out[step - 3]
            out[step] = np.clip(x[step], smooth - limit, smooth + limit)
        return out


def read_safety(file: Path) -> SafetyConfig:
    """Read the limits from a YAML file."""
    from pirl.config_io import from_dict, read_yaml

    data: dict[str, Any] = read_yaml(file)
    try:
        return from_dict(SafetyConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", hint=error.hint) from error


def load_safety(file: Path, *, action_dim: int, state_dim: int) -> SafetyNet:
    """The safety net defined by a YAML file."""
    config = read_safety(file)
    try:
        return SafetyNet(config, action_dim=action_dim, state_dim=state_dim)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", hint=error.hint) from error
