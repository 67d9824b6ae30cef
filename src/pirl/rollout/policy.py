"""A policy for environments: raw observations in, action chunks in robot units out.

Observations go through the same transform as training batches. One jitted call serves all environments: the batch size
is fixed and unused rows are padded, which avoids recompilation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Key, UInt8

from pirl.agents.agent import Choice, TrainState
from pirl.data.resize import fit, pad
from pirl.data.transforms import Transform, parse_image
from pirl.envs.env import RawObservation
from pirl.errors import ConfigError
from pirl.models.observation import Observation
from pirl.names import IMAGE, IMAGE_MASK
from pirl.nested import flatten

Act = Callable[[Any, Observation, Key[Array, "B"]], Float[Array, "B H A"] | Choice]
"""An agent's `act` or `explore`, called with a `TrainState`, observations and one key per row."""


class Plan(NamedTuple):
    """A planned chunk and the policy's notes on how it was chosen."""

    chunk: Float[np.ndarray, "H A"]
    """In robot units."""
    notes: Mapping[str, np.ndarray]
    """Arrays by name; empty for policies that do not explore."""


class ChunkPolicy:
    """Plans for up to `batch_size` environments at a time.

    A plan's noise depends on the policy's key, the episode's number and the step, not on timing or batch neighbours, so
    episodes can be repeated and collected in any order.
    """

    def __init__(
        self,
        act: Act,
        transform: Transform,
        *,
        batch_size: int,
        execute: int,
        cameras: Sequence[str],
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`execute`: steps of a chunk to execute; `cameras`: the slots the model was trained on."""
        if execute < 1:
            raise ConfigError(f"{execute} executed steps per chunk", hint="execute at least one")
        self.transform, self.batch_size, self.execute, self.cameras = transform, batch_size, execute, tuple(cameras)
        self._act = jax.jit(
            lambda weights, observation, key, rows: _with_notes(act(weights, observation, row_keys(key, rows))),
            compiler_options=dict(compiler_options or {}) or None,
        )
        self._weights: Any = None
        self._key = jax.random.key(0)

    def use(self, weights: Any, key: Key[Array, ""]) -> "ChunkPolicy":
        """Set weights and key for later calls; holds a reference to the weights, not a copy."""
        self._weights, self._key = weights, key
        return self

    def plan(
        self, observations: Mapping[int, RawObservation], rows: Mapping[int, tuple[int, int]]
    ) -> dict[int, Float[np.ndarray, "H A"]]:
        """A chunk per slot; `rows` maps each slot to (episode number, step)."""
        return {slot: plan.chunk for slot, plan in self.choose(observations, rows).items()}

    def choose(
        self, observations: Mapping[int, RawObservation], rows: Mapping[int, tuple[int, int]]
    ) -> dict[int, Plan]:
        """Like `plan`, with the policy's notes."""
        if not observations:
            return {}
        slots = list(observations)
        if len(slots) > self.batch_size:
            raise ConfigError(f"{len(slots)} observations for a policy compiled for {self.batch_size}")
        asked = [slots[min(i, len(slots) - 1)] for i in range(self.batch_size)]
        states, batch = model_inputs(self.transform, [observations[slot] for slot in slots], self.cameras)
        fill = np.minimum(np.arange(self.batch_size), len(slots) - 1)
        batch = jax.tree.map(lambda x: x[fill], batch)
        numbers = np.array([rows[slot] for slot in asked], np.uint32)
        found = self._act(self._weights, Observation.from_dict(batch), self._key, numbers)
        chunks, notes = jax.tree.map(np.asarray, found)
        actions = self.transform.robot_actions(chunks[: len(slots)].astype(np.float32), states)
        return {
            slot: Plan(actions[i], {name: values[i] for name, values in notes.items()}) for i, slot in enumerate(slots)
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class WithWeights:
    """A policy with the weights to act with, for use without an environment."""

    state: TrainState
    """The weights of every group that acts."""
    policy: ChunkPolicy
    """Acts in up to `rollout.num_envs` environments per call."""
    _calls: Iterator[int] = field(default_factory=count, init=False, repr=False)

    def chunk(self, observation: RawObservation, *, seed: int | None = None) -> Float[np.ndarray, "H A"]:
        """A chunk for one observation (in the robot's own keys), in robot units.

        `seed` fixes the noise. By default each call draws new noise, the same sequence after each loading: with equal
        noise in every chunk, a policy would always choose alike where its data allow several ways.
        """
        step = next(self._calls) if seed is None else 0
        acting = self.policy.use(self.state, jax.random.key(seed or 0))
        return acting.plan({0: observation}, {0: (0, step)})[0]


def _with_notes(found: Float[Array, "B H A"] | Choice) -> tuple[Float[Array, "B H A"], dict[str, Array]]:
    return (found.chunk, found.notes or {}) if isinstance(found, Choice) else (found, {})


def row_keys(key: Key[Array, ""], rows: Any) -> Key[Array, "B"]:
    """One key per row, from its (episode number, step)."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row[0]), row[1]))(rows)


def model_inputs(
    transform: Transform, observations: Sequence[RawObservation], cameras: Sequence[str]
) -> tuple[Float[np.ndarray, "B S"], dict[str, Any]]:
    """(robot states, OpenPI's model inputs) of several observations, with the images of `cameras` only.

    Images are fitted to the model's size without borders; the device adds the letterbox, as in training.
    """
    raws = [flatten(raw) for raw in observations]
    robot = transform.robot
    states = np.stack([robot.find_state(raw) for raw in raws])
    found = _find_cameras(transform, raws[0], cameras)
    images = {
        slot: np.stack([fit(parse_image(raw[key], key), transform.image_size) for raw in raws])
        for slot, key in found.items()
    }
    masks = {slot: np.ones(len(raws), bool) for slot in images}
    return states, {IMAGE: images, IMAGE_MASK: masks, **transform.low_dim(states, None, transform.acting_prompts(raws))}


def _find_cameras(transform: Transform, raw: Mapping[str, Any], cameras: Sequence[str]) -> dict[str, str]:
    """The observation key of each camera slot's image."""
    pictures = [key for key, value in raw.items() if np.ndim(value) == 3]
    found = transform.robot.find_cameras(raw, pictures) if cameras else {}
    for slot in cameras:
        if slot not in found:
            raise ConfigError(
                f"the policy looks through camera {slot}, which the environment does not have "
                f"(its pictures: {', '.join(pictures) or 'none'})",
                hint="turn that camera on in the environment, or train without it (--data.cameras)",
            )
    return {slot: found[slot] for slot in cameras}


def replay_frames(
    transform: Transform, frames: Mapping[str, UInt8[np.ndarray, "T h w 3"]], cameras: Sequence[str], *, borders: bool
) -> dict[str, UInt8[np.ndarray, "T h2 w2 3"]]:
    """An episode's images by camera slot, fitted like a dataset's; `borders` adds the letterbox."""
    found = transform.robot.find_cameras(frames)
    fitted = {slot: np.stack([fit(image, transform.image_size) for image in frames[found[slot]]]) for slot in cameras}
    return {slot: pad(images, transform.image_size) if borders else images for slot, images in fitted.items()}
