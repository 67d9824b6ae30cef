"""The policy's observation: OpenPI's model input as a pytree."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8

from pirl import names
from pirl.errors import ConfigError

AnyArray = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Observation:
    """One batch of observations. Cameras the robot does not have are absent."""

    images: dict[str, Float[AnyArray, "B ..."] | UInt8[AnyArray, "B ..."]]
    """Per camera slot [B, h, w, 3]: uint8, or float in [-1, 1]."""
    image_masks: dict[str, Bool[AnyArray, "B"]]
    """Per camera slot: whether the image is real. Slots without a mask are."""
    state: Float[AnyArray, "B S"]
    """Proprioception, normalised and padded to the model's action dimension."""
    tokenized_prompt: Int[AnyArray, "B L"] | None = None
    """Prompt tokens, padded on the right."""
    tokenized_prompt_mask: Bool[AnyArray, "B L"] | None = None
    """Which prompt tokens are real."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Observation":
        """From OpenPI's model-input dictionary; other keys, such as actions, are ignored."""
        if names.STATE not in data:
            raise ConfigError(f"an observation has the keys {sorted(data)}, but {names.STATE!r} is not among them")
        prompt, mask = data.get(names.TOKENIZED_PROMPT), data.get(names.TOKENIZED_PROMPT_MASK)
        if (prompt is None) != (mask is None):
            raise ConfigError("tokenized_prompt and tokenized_prompt_mask go together; one of them is missing")
        return cls(
            images=dict(data.get(names.IMAGE, {})),
            image_masks=dict(data.get(names.IMAGE_MASK, {})),
            state=data[names.STATE],
            tokenized_prompt=prompt,
            tokenized_prompt_mask=mask,
        )


def batch_size(observation: Observation) -> int:
    """Number of samples."""
    state: Shaped[AnyArray, "B S"] = observation.state
    return state.shape[0]


def with_prompt(observation: Observation, prompts: Mapping[str, Array], which: Int[Array, "B"]) -> Observation:
    """The observations with prompt `which[b]` of the V in `prompts` (a batch's `suffixed_prompts`)."""
    tokens, mask = (
        jnp.take_along_axis(prompts[name], which[:, None, None], axis=1)[:, 0]
        for name in (names.TOKENIZED_PROMPT, names.TOKENIZED_PROMPT_MASK)
    )
    return replace(observation, tokenized_prompt=tokens, tokenized_prompt_mask=mask)
