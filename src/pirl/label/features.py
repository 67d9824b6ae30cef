"""Features of the end of an episode: the policy's prefix features, pooled, and the state. One row per episode."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pirl.agents.agent import TrainState
from pirl.build import build_agent
from pirl.data.recorded import Recorded
from pirl.models.critic import CriticInputs
from pirl.models.observation import Observation
from pirl.rollout.policy import model_inputs
from pirl.training import compiler
from pirl.training.acting import Acting

LAST = 3
"""Frames of each episode that are looked at: the last ones."""
_BATCH = 16


def pooled(inputs: CriticInputs) -> Float[Array, "B D"]:
    """Mean and largest of the real tokens' features, and the state."""
    if inputs.features is None or inputs.mask is None:
        return inputs.state
    features, real = inputs.features.astype(jnp.float32), inputs.mask[..., None]
    mean = (features * real).sum(1) / jnp.maximum(real.sum(1), 1)
    largest = jnp.where(real, features, -jnp.inf).max(1)
    return jnp.concatenate([mean, largest, inputs.state], axis=-1)


class EpisodeFeatures:
    """One checkpoint, for any number of datasets; compiled once."""

    def __init__(self, acting: Acting) -> None:
        """The checkpoint's own robot reads the datasets."""
        self._config, self._transform = acting.found.config, acting.policy.transform
        self._state, policy = acting.state, build_agent(acting.found.config).policy

        def features(state: TrainState, inputs: dict[str, Any]) -> Array:
            return pooled(CriticInputs.of(policy.encode(state.policy, Observation.from_dict(inputs))))

        self._program = jax.jit(features, compiler_options=compiler.for_acting() or None)

    def of(self, dataset: str | Path) -> tuple[tuple[int, ...], Float[np.ndarray, "E D"]]:
        """(the dataset's numbers of its episodes, the mean features of each one's last frames)."""
        recorded = Recorded(self._transform.robot, dataset, size=self._transform.image_size[0])
        seen, owner = [], []
        found: list[np.ndarray] = []
        for place, episode in enumerate(recorded.meta.episodes):
            steps = range(max(0, episode.length - LAST), episode.length)
            seen += list(recorded.observations(episode, steps))
            owner += [place] * len(steps)
            while len(seen) >= _BATCH:
                found.append(self._run(seen[:_BATCH]))
                seen = seen[_BATCH:]
        if seen:
            found.append(self._run([*seen, *[seen[-1]] * (_BATCH - len(seen))])[: len(seen)])
        rows, places = np.concatenate(found).astype(np.float64), np.array(owner)
        each = np.stack([rows[places == place].mean(0) for place in range(len(recorded.meta.episodes))])
        return tuple(one.index for one in recorded.meta.episodes), each

    def _run(self, seen: list[dict[str, Any]]) -> Float[np.ndarray, "B D"]:
        _, inputs = model_inputs(self._transform, seen, self._config.cameras)
        return np.asarray(jax.device_get(self._program(self._state, inputs)), np.float32)
