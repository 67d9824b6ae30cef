"""Environments as a rollout sees them: slots that are given a context, then one chunk of actions after another.

A chunk is one message, whether the environments are in this process (`LocalPool`), in others (`rollout.workers`) or on
other machines (`rollout.ray`). Where an environment or its worker fails, the slot answers `Lost`: what it was doing is
gone, the slot itself is ready for the next context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32

from pirl.envs.config import EnvConfig
from pirl.envs.env import EnvBatch, RawObservation
from pirl.envs.make import make_batch
from pirl.errors import EnvError
from pirl.records import Array, Context


@dataclass(frozen=True, kw_only=True)
class Started:
    """A slot's answer to a context."""

    observation: RawObservation
    """The first one, with pictures."""


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """A slot's answer to a chunk: what happened until its end, or until the episode's."""

    observations: Sequence[RawObservation]
    """After each executed action; the last one has pictures, the others only if every picture is kept."""
    rewards: Float32[Array, "k"]
    """Of each executed action."""
    terminated: bool
    """The last action ended the task."""
    truncated: bool
    """Time was over with the last action."""
    success: bool
    """The episode has succeeded."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A slot's answer when its episode is gone."""

    reason: str
    """In words for the log."""


@dataclass(frozen=True, kw_only=True)
class EnvInfo:
    """What is known of the environments without running them."""

    robot: str
    tasks: tuple[str, ...]
    num_inits: int | None
    max_steps: int
    fps: int
    action_dim: int

    @classmethod
    def of(cls, batch: EnvBatch) -> "EnvInfo":
        """What a batch says of itself."""
        return cls(**{name: getattr(batch, name) for name in cls.__dataclass_fields__})


@runtime_checkable
class EnvPool(Protocol):
    """Slots with environments, wherever they are. Use as a context manager."""

    size: int
    """Number of slots."""
    info: EnvInfo
    """What the environments are."""

    def start(self, contexts: Mapping[int, Context]) -> dict[int, Started | Lost]:
        """Begin an episode in each of the slots."""

    def advance(self, chunks: Mapping[int, Float[Array, "h A"]], *, every_picture: bool) -> dict[int, Advanced | Lost]:
        """Execute a chunk in each of the slots, stopping where an episode ends."""

    def close(self) -> None:
        """End all workers."""

    def __enter__(self) -> "EnvPool": ...

    def __exit__(self, *exc: object) -> None: ...


def start_episodes(batch: EnvBatch, contexts: Mapping[int, Context]) -> dict[int, Started | Lost]:
    """`EnvPool.start` for environments in this process. A slot that fails does not touch the others."""
    answers: dict[int, Started | Lost] = {}
    for slot, context in contexts.items():
        try:
            batch.begin([slot], [context])
        except Exception as error:  # a simulator may raise anything
            answers[slot] = Lost(reason=_describe(error))
    begun = [slot for slot in contexts if slot not in answers]
    for slot, seen in _look(batch, begun, pictures=True).items():
        answers[slot] = seen if isinstance(seen, Lost) else Started(observation=seen)
    return answers


def execute_chunks(
    batch: EnvBatch, chunks: Mapping[int, Float[Array, "h A"]], *, every_picture: bool
) -> dict[int, Advanced | Lost]:
    """`EnvPool.advance` for environments in this process."""
    answers: dict[int, Advanced | Lost] = {}
    seen: dict[int, list[RawObservation]] = {slot: [] for slot in chunks}
    rewards: dict[int, list[float]] = {slot: [] for slot in chunks}
    over: dict[int, tuple[bool, bool, bool]] = dict.fromkeys(chunks, (False, False, False))
    live = list(chunks)
    for step in range(max((len(chunk) for chunk in chunks.values()), default=0)):
        acting = [slot for slot in live if step < len(chunks[slot])]
        outcomes = _act(batch, acting, {slot: chunks[slot][step] for slot in acting})
        for slot, outcome in outcomes.items():
            if isinstance(outcome, Lost):
                answers[slot] = outcome
            else:
                rewards[slot].append(outcome[0])
                over[slot] = outcome[1:]
        acting = [slot for slot in acting if slot not in answers]
        ended = [slot for slot in acting if any(over[slot][:2])]
        last = [slot for slot in acting if slot in ended or step == len(chunks[slot]) - 1]
        for pictures, slots in ((True, last), (every_picture, [slot for slot in acting if slot not in last])):
            for slot, observation in _look(batch, slots, pictures=pictures).items():
                if isinstance(observation, Lost):
                    answers[slot] = observation
                else:
                    seen[slot].append(observation)
        live = [slot for slot in live if slot not in answers and slot not in ended]
    for slot in chunks:
        if slot not in answers:
            terminated, truncated, success = over[slot]
            answers[slot] = Advanced(
                observations=seen[slot],
                rewards=np.array(rewards[slot], np.float32),
                terminated=terminated,
                truncated=truncated,
                success=success,
            )
    return answers


def _act(
    batch: EnvBatch, slots: Sequence[int], actions: Mapping[int, Array]
) -> dict[int, tuple[float, bool, bool, bool] | Lost]:
    """One action in each slot; together where all goes well, one by one to find out who failed where not."""
    try:
        outcomes = batch.act(slots, np.stack([actions[slot] for slot in slots])) if slots else None
    except Exception as error:
        if len(slots) == 1:
            return {slots[0]: Lost(reason=_describe(error))}
        # Which of them acted is not known, so none of them can go on.
        return {slot: Lost(reason=f"beside a slot that failed: {_describe(error)}") for slot in slots}
    found: dict[int, tuple[float, bool, bool, bool] | Lost] = {}
    for i, slot in enumerate(slots if outcomes is not None else ()):
        reward, terminated, truncated, success = (column[i] for column in outcomes)  # type: ignore[union-attr]
        if np.isfinite(reward):
            found[slot] = float(reward), bool(terminated), bool(truncated), bool(success)
        else:
            found[slot] = Lost(reason=f"the environment's reward is {reward}")
    return found


def _look(batch: EnvBatch, slots: Sequence[int], *, pictures: bool) -> dict[int, RawObservation | Lost]:
    """What each slot shows, if it can be used."""
    if not slots:
        return {}
    try:
        observations = batch.observe(slots, pictures=pictures)
    except Exception as error:
        if len(slots) == 1:
            return {slots[0]: Lost(reason=_describe(error))}
        return {slot: found for slot in slots for found in _look(batch, [slot], pictures=pictures).values()}
    return {slot: _checked(observation) for slot, observation in zip(slots, observations, strict=True)}


def _checked(observation: RawObservation) -> RawObservation | Lost:
    for key, value in observation.items():
        array = np.asarray(value)
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return Lost(reason=f"observation {key!r} of shape {array.shape} is not finite")
    return observation


def _describe(error: Exception) -> str:
    return error.message if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"


class LocalPool:
    """Environments in this process, stepped in turn."""

    def __init__(self, config: EnvConfig, size: int) -> None:
        self.size = size
        self._batch = make_batch(config, size)
        self.info = EnvInfo.of(self._batch)

    def start(self, contexts: Mapping[int, Context]) -> dict[int, Started | Lost]:
        """Begin an episode in each of the slots."""
        return start_episodes(self._batch, contexts)

    def advance(self, chunks: Mapping[int, Float[Array, "h A"]], *, every_picture: bool) -> dict[int, Advanced | Lost]:
        """Execute a chunk in each of the slots, stopping where an episode ends."""
        return execute_chunks(self._batch, chunks, every_picture=every_picture)

    def close(self) -> None:
        """Free what the simulators hold."""
        self._batch.close()

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
