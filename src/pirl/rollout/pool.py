"""A pool of environments: slots that take a context, then one action chunk after another.

A chunk is one message, whether environments run in this process (`LocalPool`), in worker processes (`rollout.workers`)
or on other machines (`rollout.ray`). If an environment or its worker fails, the slot answers `Lost`: its episode is
gone, and the slot can take the next context.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32

from pirl.envs.config import EnvConfig
from pirl.envs.env import EnvBatch, RawObservation, SeparateEnvs
from pirl.envs.make import make_batch
from pirl.errors import EnvError
from pirl.records import Array, Context

Build = EnvConfig | Callable[[int], EnvBatch]
"""How to make environments: a configuration, or a function from the number of environments to a batch. For other
processes it must be picklable: a module-level function or a `functools.partial` of one."""

Shapes = dict[str, tuple[int, ...]]
"""The shape of each observation key, fixed by the first observation."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A slot's answer to a context."""

    observation: RawObservation
    """The first observation, with images."""


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """A slot's answer to a chunk, executed to its end or to the end of the episode."""

    observations: Sequence[RawObservation]
    """One per executed action; the last has images, the others only with `every_picture`."""
    rewards: Float32[Array, "k"]
    """One per executed action."""
    terminated: bool
    """Whether the last action ended the task."""
    truncated: bool
    """Whether the last action reached the time limit."""
    success: bool
    """Whether the episode has succeeded."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A slot's answer when its episode is gone."""

    reason: str
    """The cause, for the log."""


@dataclass(frozen=True, kw_only=True)
class EnvInfo:
    """Static facts about the environments."""

    robot: str
    tasks: tuple[str, ...]
    num_inits: int | None
    max_steps: int
    fps: int
    action_dim: int

    @classmethod
    def of(cls, batch: EnvBatch) -> "EnvInfo":
        """The facts of a batch."""
        return cls(**{name: getattr(batch, name) for name in cls.__dataclass_fields__})


@runtime_checkable
class EnvPool(Protocol):
    """Slots with environments, local or remote. Use as a context manager."""

    size: int
    """Number of slots."""
    info: EnvInfo
    """Facts about the environments."""

    def start(self, contexts: Mapping[int, Context]) -> dict[int, Started | Lost]:
        """Begin an episode in each of the slots."""

    def advance(self, chunks: Mapping[int, Float[Array, "h A"]], *, every_picture: bool) -> dict[int, Advanced | Lost]:
        """Execute a chunk in each of the slots, stopping where an episode ends."""

    def close(self) -> None:
        """Close the environments and end all workers."""

    def __enter__(self) -> "EnvPool": ...

    def __exit__(self, *exc: object) -> None: ...


def start_episodes(batch: EnvBatch, contexts: Mapping[int, Context], shapes: Shapes) -> dict[int, Started | Lost]:
    """`EnvPool.start` for environments in this process. Slots fail independently."""
    answers: dict[int, Started | Lost] = {}
    for slot, context in contexts.items():
        try:
            batch.begin([slot], [context])
        except Exception as error:  # a simulator may raise anything
            answers[slot] = Lost(reason=_describe(error))
    begun = [slot for slot in contexts if slot not in answers]
    for slot, seen in _look(batch, begun, shapes, pictures=True).items():
        answers[slot] = seen if isinstance(seen, Lost) else Started(observation=seen)
    return answers


def execute_chunks(
    batch: EnvBatch, chunks: Mapping[int, Float[Array, "h A"]], shapes: Shapes, *, every_picture: bool
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
            for slot, observation in _look(batch, slots, shapes, pictures=pictures).items():
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
    """One action in each slot. Separate environments fail independently; a vectorised batch fails as a whole, because
    it is unknown which of its slots have acted.
    """
    found: dict[int, tuple[float, bool, bool, bool] | Lost] = {}
    for group in [[slot] for slot in slots] if isinstance(batch, SeparateEnvs) else [slots] if slots else []:
        try:
            outcomes = batch.act(group, np.stack([actions[slot] for slot in group]))
            for slot, reward, *flags in zip(group, *(np.asarray(column).tolist() for column in outcomes), strict=True):
                if np.isfinite(float(reward)):
                    terminated, truncated, success = map(bool, flags)
                    found[slot] = float(reward), terminated, truncated, success
                else:
                    found[slot] = Lost(reason=f"the environment's reward is {reward}")
        except Exception as error:
            beside = "beside a slot that failed: " if len(group) > 1 else ""
            found |= {slot: Lost(reason=beside + _describe(error)) for slot in group}
    return found


def _look(batch: EnvBatch, slots: Sequence[int], shapes: Shapes, *, pictures: bool) -> dict[int, RawObservation | Lost]:
    """Each slot's observation, or `Lost` if it fails or is invalid. A failing batch is retried slot by slot."""
    if not slots:
        return {}
    try:
        observations = batch.observe(slots, pictures=pictures)
        return {slot: _checked(seen, shapes) for slot, seen in zip(slots, observations, strict=True)}
    except Exception as error:
        if len(slots) == 1:
            return {slots[0]: Lost(reason=_describe(error))}
        return {slot: seen for one in slots for slot, seen in _look(batch, [one], shapes, pictures=pictures).items()}


def _checked(observation: RawObservation, shapes: Shapes) -> RawObservation | Lost:
    """The observation if it is finite and has the shapes of earlier ones, else `Lost`."""
    for key, value in observation.items():
        array = np.asarray(value)
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return Lost(reason=f"observation {key!r} of shape {array.shape} is not finite")
        if (shape := shapes.setdefault(key, array.shape)) != array.shape:
            return Lost(reason=f"observation {key!r} has shape {array.shape}; before, it had {shape}")
    return observation


def _describe(error: Exception) -> str:
    return error.message if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"


class Pool:
    """Base of the pools: times both requests, and closes the pool at the end of a `with` block."""

    size: int
    info: EnvInfo
    waited = 0.0
    """Seconds spent in the environments, or waiting for them."""
    restarts = 0
    """Number of replaced workers."""

    def start(self, contexts: Mapping[int, Context]) -> dict[int, Started | Lost]:
        """Begin an episode in each of the slots."""
        return self._timed("start", contexts)

    def advance(self, chunks: Mapping[int, Float[Array, "h A"]], *, every_picture: bool) -> dict[int, Advanced | Lost]:
        """Execute a chunk in each of the slots, stopping where an episode ends."""
        return self._timed("advance", chunks, every_picture=every_picture)

    def _timed(self, verb: str, requests: Mapping[int, Any], **options: Any) -> dict[int, Any]:
        began = time.perf_counter()
        answers = self._answers(verb, requests, **options)
        self.waited += time.perf_counter() - began
        return answers

    def _answers(self, verb: str, requests: Mapping[int, Any], **options: Any) -> dict[int, Any]:
        raise NotImplementedError(f"{type(self).__name__}._answers")

    def close(self) -> None:
        """Close the environments."""

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LocalPool(Pool):
    """Environments in this process, stepped one after another."""

    def __init__(self, build: Build, size: int) -> None:
        self.size = size
        self._batch = (build if callable(build) else partial(make_batch, build))(size)
        self._shapes: Shapes = {}
        self.info = EnvInfo.of(self._batch)

    def _answers(self, verb: str, requests: Mapping[int, Any], **options: Any) -> dict[int, Any]:
        answer: Callable[..., dict[int, Any]] = start_episodes if verb == "start" else execute_chunks
        return answer(self._batch, requests, self._shapes, **options)

    def close(self) -> None:
        """Close the simulators."""
        self._batch.close()
