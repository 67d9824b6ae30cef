"""Data structures shared between packages: episode, episode source, Q-chunking batch, rollout. NumPy only."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from pirl.names import TOKENIZED_PROMPT, TOKENIZED_PROMPT_MASK

Array = np.ndarray

DEMONSTRATED, AUTONOMOUS, BLAMED, CORRECTED = range(4)
"""Who chose an action (`ChunkBatch.acted_by`): a demonstrator (all actions of episodes without `intervention`), the
policy, the policy shortly before a takeover (`data.takeover_window`), or the operator who took over."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The low-dimensional data of one episode, in the robot's own units.

    Row t holds the observation before action t, and the outcome of action t. Terminated (the task ended) and truncated
    (the recording ended) are different things and never merged: only the first forbids bootstrapping.
    """

    task: str
    """The instruction, as text."""
    state: Float[Array, "T S"]
    """Proprioception."""
    actions: Float[Array, "T A"]
    """Commanded actions."""
    rewards: Float[Array, "T"]
    """Reward of action t."""
    terminated: Bool[Array, "T"]
    """Whether the task ended with action t (success, or a failure that ends it)."""
    truncated: Bool[Array, "T"]
    """Whether the recording ended with action t for another reason (time limit, operator)."""
    success: bool | None = None
    """Whether the episode succeeded; None if unlabelled."""
    intended: Float[Array, "T H A"] | None = None
    """For rollouts: the policy's planned actions from t on, including those past the end of the episode. Rows between
    plans hold the rest of the current plan, padded with NaN."""
    intervention: Bool[Array, "T"] | None = None
    """True where an operator (or a scripted corrector) chose action t instead of the policy. None if unknown."""
    observed: Bool[Array, "T"] | None = None
    """False where state and images repeat those of an earlier row, as in recordings at a server. None: all rows are
    observed."""
    number: int | None = None
    """Its number among those a run collected; with it, what an episode is for does not depend on its last bits."""

    def __len__(self) -> int:
        return len(self.rewards)


class EpisodeSource(ABC):
    """A source of episodes: a LeRobot dataset, a mixture of them, a replay buffer, or your own class.

    Subclass it and define the first five; the others have defaults.
    """

    @property
    @abstractmethod
    def lengths(self) -> Int[Array, "E"]:
        """Number of steps of each episode."""

    @property
    @abstractmethod
    def cameras(self) -> tuple[str, ...]:
        """The cameras `frames` returns."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of episodes."""

    @abstractmethod
    def episode(self, index: int) -> Episode:
        """Low-dimensional data of one episode; cheap, from memory."""

    @abstractmethod
    def frames(self, index: int) -> Mapping[str, UInt8[Array, "T h w 3"]]:
        """Images of one episode at the model's size, without letterbox rows; may decode."""

    @property
    def weights(self) -> Float[Array, "E"] | None:
        """Probability of drawing each episode, including its length. None: every step is equally likely."""
        return None

    @property
    def letterbox(self) -> bool:
        """Whether images include the black borders that make them square."""
        return False

    def frame_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Height and width of each camera's images; by default those of the first episode."""
        return {camera: frames.shape[1:3] for camera, frames in self.frames(0).items()} if self.cameras else {}

    def prepare(self) -> bool:
        """Decode ahead if possible; True if `frames` still decodes at each call and should be called ahead."""
        return False


class Observations(TypedDict, total=False):
    """OpenPI's model input, batched. Images are uint8 and carry no letterbox; the model pads and scales on device."""

    image: dict[str, UInt8[Array, "B h w 3"]]
    image_mask: dict[str, Bool[Array, "B"]]
    state: Float[Array, "B S"]
    tokenized_prompt: Int[Array, "B L"]
    tokenized_prompt_mask: Bool[Array, "B L"]


class Prompts(TypedDict):
    """V prompts of each observation, which differ in the text after the instruction."""

    tokenized_prompt: Int[Array, "B V L"]
    tokenized_prompt_mask: Bool[Array, "B V L"]


class ChunkBatch(TypedDict, total=False):
    """A Q-chunking batch: B chunks of H actions with their outcomes. A plain dict, hence a pytree."""

    observations: Observations
    """At the first step t of the chunk."""
    next_observations: Observations
    """At t + length, where the target bootstraps; the last observation if the episode ended before."""
    actions: Float[Array, "B H A"]
    """Normalised, padded to the model's action dimension; `valid` masks steps outside the episode."""
    critic_actions: Float[Array, "B h A"]
    """The chunk the critic scores: like `actions`, but padded after an end such that the padding does not reveal it."""
    rewards: Float[Array, "B H"]
    """Zero outside the episode, so that nothing is counted twice."""
    masks: Float[Array, "B H"]
    """1 while no step so far terminated: bootstrapping is allowed."""
    valid: Float[Array, "B H"]
    """1 inside the episode, in chunks that the actor may imitate (not all of the policy's own chunks)."""
    terminals: Float[Array, "B H"]
    """1 from the last step of the episode on, whether terminated or truncated."""
    next_terminal: Float[Array, "B"]
    """1 if the target's steps end in termination; the target is then the reward alone."""
    sequence_mask: Float[Array, "B"]
    """1 if the critic trains on this sample: with `pad` all but the last step of a truncated recording, with `drop`
    only full chunks."""
    length: Int[Array, "B"]
    """L: steps in the target, up to `n_step` times the critic's; it bootstraps with discount**L."""
    reward_sum: Float[Array, "B"]
    """Σ_{l<L} discount^l r_l."""
    mc_return: Float[Array, "B"]
    """Discounted return to the end of the episode; NaN if unknown because the episode was truncated."""
    acted_by: Int[Array, "B H"]
    """Who chose each step: `DEMONSTRATED`, `AUTONOMOUS`, `BLAMED` or `CORRECTED`. For algorithms that use corrections;
    steps outside the episode repeat the last one."""
    episode: Int[Array, "B"]
    """An identifier of the episode, a function of its actions alone."""
    task: Int[Array, "B"]
    """An identifier of the instruction within the dataset. For algorithms that treat each task separately."""
    task_steps: Int[Array, "B"]
    """Length of the longest episode with that instruction."""
    suffixed_prompts: Prompts
    """The prompts of `observations` with further text after the instruction, for algorithms with `prompt_suffixes`."""


class Spec(NamedTuple):
    """One array of a batch."""

    shape: tuple[int, ...]
    """Its shape; the batch axis comes first."""
    dtype: str
    """NumPy's dtype name."""


BatchSpec = Mapping[str, Any]
"""A batch as nested mappings of `Spec`."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The sizes that determine every batch's shapes."""

    batch: int
    """Number of samples."""
    horizon: int
    """Actions per chunk."""
    critic_horizon: int
    """Actions the critic scores."""
    action_dim: int
    """Size of an action at the model's input."""
    state_dim: int
    """Size of a state at the model's input."""
    cameras: tuple[str, ...] = ()
    """Camera slots."""
    image_size: int = 224
    """Side of an image, letterbox included."""
    token_len: int = 0
    """Prompt tokens; 0 without a prompt."""


def observation_spec(sizes: BatchSizes) -> BatchSpec:
    """The spec of `Observations`."""
    size, side = sizes.batch, sizes.image_size
    spec: dict[str, Any] = {
        "image": {slot: Spec((size, side, side, 3), "uint8") for slot in sizes.cameras},
        "image_mask": {slot: Spec((size,), "bool") for slot in sizes.cameras},
        "state": Spec((size, sizes.state_dim), "float32"),
    }
    if sizes.token_len:
        spec[TOKENIZED_PROMPT] = Spec((size, sizes.token_len), "int32")
        spec[TOKENIZED_PROMPT_MASK] = Spec((size, sizes.token_len), "bool")
    return spec


def chunk_spec(
    sizes: BatchSizes,
    *,
    next_observations: bool = True,
    corrections: bool = False,
    tasks: bool = False,
    suffixes: int = 0,
) -> BatchSpec:
    """The spec of `ChunkBatch`; `suffixes` is the number of prompts with text after the instruction."""
    size, observations = sizes.batch, observation_spec(sizes)
    prompts = {
        TOKENIZED_PROMPT: Spec((size, suffixes, sizes.token_len), "int32"),
        TOKENIZED_PROMPT_MASK: Spec((size, suffixes, sizes.token_len), "bool"),
    }
    steps, number = Spec((size, sizes.horizon), "float32"), Spec((size,), "float32")
    return {
        "observations": observations,
        **({"next_observations": observations} if next_observations else {}),
        "actions": Spec((size, sizes.horizon, sizes.action_dim), "float32"),
        "critic_actions": Spec((size, sizes.critic_horizon, sizes.action_dim), "float32"),
        **dict.fromkeys(("rewards", "masks", "valid", "terminals"), steps),
        **dict.fromkeys(("next_terminal", "sequence_mask", "reward_sum", "mc_return"), number),
        **dict.fromkeys(("length", "episode"), Spec((size,), "int32")),
        **({"acted_by": Spec((size, sizes.horizon), "int32")} if corrections else {}),
        **(dict.fromkeys(("task", "task_steps"), Spec((size,), "int32")) if tasks else {}),
        **({"suffixed_prompts": prompts} if suffixes else {}),
    }


@dataclass(frozen=True, order=True)
class Context:
    """Initial state of an episode in an environment. The same context starts bit-identically."""

    task: str
    """The environment's task."""
    init: int
    """The task's initial state: a seed, or an index if their number is limited."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One episode of a policy or a scripted expert."""

    context: Context
    """The initial state."""
    number: int
    """Number of the episode in the collection; with the collection's seed it determines the policy's noise."""
    episode: Episode
    """The recorded episode, in the robot's units; `intended` holds the policy's chunks."""
    starts: Int[Array, "k"]
    """The steps at which the policy planned."""
    frames: Mapping[str, UInt8[Array, "n h w 3"]]
    """The environment's images by observation key, at the steps in `frame_steps`."""
    frame_steps: Int[Array, "n"]
    """Steps with images: all of them, or those in `starts`."""
    notes: Mapping[str, Array] = field(default_factory=dict)
    """An exploring policy's notes, one entry per plan in the order of `starts`. If the policy values the last
    observation of a truncated episode, there is one extra entry for it."""
