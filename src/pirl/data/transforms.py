"""Robot space to model space and back: one transform for training batches and acting.

The order is OpenPI's: convert the robot's units to the model's, make actions relative to the current state, normalise,
write the state into the prompt (π₀.₅), pad to the model's dimensions. Computes in float64 like OpenPI, so that a state
on the border between two of the prompt's bins gets the same token; returns float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, UInt8

from pirl.data.normalize import NormStats, normalize, unnormalize
from pirl.data.resize import letterbox
from pirl.data.robots import Robot
from pirl.data.tokenizer import PromptEncoder, Tokenizer
from pirl.errors import ConfigError, DataError
from pirl.names import ACTIONS, CAMERAS, IMAGE, IMAGE_MASK, STATE, TOKENIZED_PROMPT, TOKENIZED_PROMPT_MASK
from pirl.nested import flatten
from pirl.records import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Transform:
    """The conversion between a robot and a model, in both directions."""

    robot: Robot
    """Keys, dimensions and units."""
    norm_stats: Mapping[str, NormStats] | None
    """Statistics of "state" and "actions"; None: no normalisation."""
    tokenizer: Tokenizer | None
    """Tokenizer of the instruction; None for policies without a prompt."""
    action_dim: int = 32
    """The model's action dimension; shorter actions are padded with zeros."""
    state_dim: int | None = None
    """The model's state dimension. None: `action_dim`, as in π₀."""
    token_len: int = 48
    """Length of the tokenized prompt."""
    quantile: bool = False
    """Normalise by quantiles (π₀.₅) instead of mean and standard deviation (π₀)."""
    discrete_state: bool = False
    """Write the normalised state into the prompt (π₀.₅)."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width of the model's images."""
    default_prompt: str | None = None
    """Instruction for observations without one; overrides the robot's default."""
    suffixes: tuple[str, ...] = ()
    """Texts that may follow the instruction: acting appends the first, training uses all of them."""

    def __post_init__(self) -> None:
        robot = self.robot
        for key, dim, room in (
            (STATE, robot.state_dim, self.model_state_dim),
            (ACTIONS, robot.action_dim, self.action_dim),
        ):
            if dim > room:
                raise ConfigError(f"{key} of robot {robot.name!r} have {dim} dimensions, the model has room for {room}")
            if self.norm_stats is None:
                continue
            stats = self.norm_stats.get(key)
            if stats is None or len(stats) < dim or (self.quantile and (stats.q01 is None or stats.q99 is None)):
                found = "are missing" if stats is None else f"have {len(stats)} dimensions"
                raise DataError(
                    f"normalisation statistics of {key} {found}; robot {robot.name!r} needs {dim}"
                    + (" with q01 and q99" if self.quantile else ""),
                    hint="compute them for this dataset with `pirl norm-stats DATASET --robot NAME`",
                )
        if self.discrete_state and self.tokenizer is None:
            raise ConfigError("a state in the prompt needs a tokenizer", hint="set tokenizer, or discrete_state=False")

    @property
    def model_state_dim(self) -> int:
        """Size of the padded state."""
        return self.action_dim if self.state_dim is None else self.state_dim

    @property
    def real_action_dim(self) -> int:
        """Action dimensions without padding, as the critic sees them."""
        return self.robot.action_dim

    @cached_property
    def _prompts(self) -> PromptEncoder | None:
        if self.tokenizer is None:
            return None
        return PromptEncoder(self.tokenizer, self.token_len, whole=bool(self.suffixes))

    def low_dim(
        self, state: Float[Array, "B S"], actions: Float[Array, "B H A"] | None, prompts: Sequence[str]
    ) -> dict[str, Array]:
        """OpenPI's model-input entries except images, from a batch in the robot's units."""
        robot = self.robot
        encoded = robot.encode_state(robot.check(state, STATE, robot.state_dim))
        normal = self._normalize(encoded, STATE)
        out = {STATE: _pad(normal, self.model_state_dim)}
        if actions is not None:
            robot.check(actions, ACTIONS, robot.action_dim)
            relative = robot.encode_actions(actions, encoded)
            out[ACTIONS] = _pad(self._normalize(relative, ACTIONS), self.action_dim)
        if self._prompts is not None:
            if len(prompts) != len(state):
                raise DataError(f"{len(prompts)} prompts for {len(state)} states", hint="give one prompt per sample")
            tokens, mask = self._prompts(prompts, normal if self.discrete_state else None)
            out[TOKENIZED_PROMPT], out[TOKENIZED_PROMPT_MASK] = tokens, mask
        return out

    def suffixed_prompts(self, state: Float[Array, "B S"], prompts: Sequence[str]) -> dict[str, Array]:
        """The prompts of these states with each suffix: tokens and masks [B, V, L]."""
        each = [self.low_dim(state, None, [suffixed(prompt, suffix) for prompt in prompts]) for suffix in self.suffixes]
        return {key: np.stack([low[key] for low in each], axis=1) for key in (TOKENIZED_PROMPT, TOKENIZED_PROMPT_MASK)}

    def acting_prompts(self, raws: Sequence[Mapping[str, Any]]) -> list[str]:
        """The prompt of each flat observation for acting, with the first suffix; empty without a tokenizer."""
        if self.tokenizer is None:
            return []
        prompts = [self.robot.find_prompt(raw, self.default_prompt) for raw in raws]
        return [suffixed(prompt, self.suffixes[0]) for prompt in prompts] if self.suffixes else prompts

    def images(self, raw: Mapping[str, Any]) -> tuple[dict[str, UInt8[Array, "h w 3"]], dict[str, np.bool_]]:
        """One observation's images by camera slot, letterboxed to the model's size, and masks of the real ones."""
        if not self.robot.cameras:
            return {}, {}
        raw = flatten(raw)
        found = self.robot.find_cameras(raw, [key for key, value in raw.items() if np.ndim(value) == 3])
        height, width = self.image_size
        images = {
            slot: letterbox(parse_image(raw[found[slot]], found[slot]), self.image_size)
            if slot in found
            else np.zeros((height, width, 3), np.uint8)
            for slot in CAMERAS
        }
        return images, {slot: np.bool_(slot in found) for slot in CAMERAS}

    def observation(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """OpenPI's model input for one observation of a robot or environment, without a batch axis."""
        return self._sample(flatten(raw), with_actions=False)

    def train_sample(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Like `observation` for one training sample with its action chunk; no suffix is added to the prompt."""
        return self._sample(flatten(raw), with_actions=True)

    def _sample(self, raw: Mapping[str, Any], *, with_actions: bool) -> dict[str, Any]:
        robot = self.robot
        actions, prompts = None, self.acting_prompts([raw])
        if with_actions:
            actions = robot.find_actions(raw)[None]
            prompts = [robot.find_prompt(raw, self.default_prompt)] if prompts else []
        low = self.low_dim(robot.find_state(raw)[None], actions, prompts)
        images, masks = self.images(raw)
        return {IMAGE: images, IMAGE_MASK: masks, **{key: value[0] for key, value in low.items()}}

    def robot_actions(
        self, model_actions: Float[Array, "*B H M"], state: Float[Array, "*B S"]
    ) -> Float32[Array, "*B H A"]:
        """Convert the model's actions to the robot's units; `state` is the raw state the model was given."""
        robot = self.robot
        if model_actions.shape[-1] < robot.action_dim:
            raise DataError(
                f"model actions of shape {model_actions.shape} for robot {robot.name!r}; "
                f"expected at least {robot.action_dim} in the last axis",
                hint="is this checkpoint for this robot?",
            )
        actions = np.asarray(model_actions[..., : robot.action_dim], np.float64)
        robot.check(actions, "model actions", robot.action_dim)
        if self.norm_stats is not None:
            actions = unnormalize(actions, self.norm_stats[ACTIONS], quantile=self.quantile)
        encoded = robot.encode_state(robot.check(state, STATE, robot.state_dim))
        return robot.decode_actions(actions, encoded).astype(np.float32)

    def _normalize(self, x: Array, key: str) -> Array:
        return x if self.norm_stats is None else normalize(x, self.norm_stats[key], quantile=self.quantile)


def suffixed(prompt: str, suffix: str) -> str:
    """The instruction with its suffix."""
    return f"{prompt.strip()}{suffix}"


def _pad(x: Float[Array, "*B D"], dim: int) -> Float32[Array, "*B M"]:
    out = np.zeros((*x.shape[:-1], dim), np.float32)
    out[..., : x.shape[-1]] = x
    return out


def parse_image(value: Any, key: str) -> UInt8[Array, "h w 3"]:
    """An image as uint8, channels last. Accepts channels first (LeRobot, ALOHA) and floats in [0, 1]."""
    image = np.asarray(value)
    if image.ndim != 3 or 3 not in (image.shape[0], image.shape[-1]):
        raise DataError(
            f"picture {key} has shape {image.shape}, expected [height, width, 3] or [3, height, width]",
            hint="observations are given one at a time, without a batch axis, in RGB",
        )
    if np.issubdtype(image.dtype, np.floating):
        low, high = image.min(), image.max()
        if not (low >= -1e-3 and high <= 1.0 + 1e-3):
            raise DataError(
                f"picture {key} has values from {low} to {high}, expected floats in [0, 1] or uint8",
                hint="scale it, or convert it to uint8",
            )
        image = (255 * np.clip(image, 0.0, 1.0)).astype(np.uint8)
    elif image.dtype != np.uint8:
        raise DataError(f"picture {key} is {image.dtype}, expected uint8 or floats in [0, 1]", hint="convert it")
    if image.shape[0] == 3:
        return np.stack(tuple(image), axis=-1)  # three times as fast as a contiguous copy of the moved axis
    return np.ascontiguousarray(image)
