"""Assemble batches from drawn rows: numbers go through the robot's transform, images are copied once, as uint8.

Every host of a job computes the numbers of the whole batch and copies the images of its own rows. Padding, scaling and
augmentation of images run on the device, where they are cheaper.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from pirl.data.chunks import bootstrap_rows, choose_donors, chunk_actions, chunk_actors, chunk_outcomes, fill_tails
from pirl.data.config import Boundary
from pirl.data.pool import FrameMemory, Resident, copy_frames
from pirl.data.tasks import Tasks
from pirl.errors import DataError
from pirl.records import Array, ChunkBatch, Observations, Prompts


@runtime_checkable
class LowDimTransform(Protocol):
    """The loader's view of a robot's transforms: raw numbers and text in, the model's inputs out."""

    def low_dim(
        self, state: Float[Array, "B S"], actions: Float[Array, "B H A"] | None, prompts: Sequence[str]
    ) -> Mapping[str, Array]:
        """Normalised `state` and `actions` (if given); for models that read text also prompt tokens and mask."""


@runtime_checkable
class Suffixing(Protocol):
    """A transform that also builds prompts with text after the instruction."""

    def suffixed_prompts(self, state: Float[Array, "B S"], prompts: Sequence[str]) -> Mapping[str, Array]:
        """Tokens and masks [B, V, L] of V prompts per sample."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The rows of one whole batch, over all hosts, before any data is copied."""

    residents: Sequence[Resident]
    """Source of the rows: offline data, the replay buffer, or both."""
    part: Int[Array, "B"]
    """Index into `residents` of each sample."""
    rows: Int[Array, "B"]
    """Start row of each sample in its resident's table."""
    known: Int[Array, "B"]
    """Number of known critic steps of each sample; another sample lends the others."""
    for_actor: Bool[Array, "B"] | None = None
    """True for samples that only the actor trains on; None: no such samples."""

    def by_part(self, samples: Int[Array, "n"]) -> Iterator[tuple[Resident, Int[Array, "m"]]]:
        """Each resident that `samples` need, with their positions in `samples`."""
        for number, resident in enumerate(self.residents):
            positions = np.flatnonzero(self.part[samples] == number)
            if len(positions):
                yield resident, positions


@dataclass(frozen=True, kw_only=True)
class Gatherer:
    """Turns draws into batches of one host's samples."""

    transform: LowDimTransform
    cameras: tuple[str, ...]
    horizon: int
    """Steps of the policy's chunks."""
    critic_horizon: int
    """Leading steps that the critic scores."""
    boundary: Boundary
    """Padding of a chunk beyond the end of its episode."""
    n_step: int = 1
    """Critic horizons that a target spans."""
    next_observations: bool
    """Whether to add `next_observations`, from which the critic bootstraps."""
    corrections: bool = False
    """Whether to add `acted_by`."""
    tasks: Tasks | None = None
    """Task numbers, if batches have `task` and `task_steps`."""
    suffixes: bool = False
    """Whether to add `suffixed_prompts`."""
    mine: Int[Array, "n"]
    """This host's positions in the batch."""
    memory: FrameMemory = field(default_factory=FrameMemory)
    """Arrays for the pictures."""

    def gather(self, draw: Draw) -> ChunkBatch:
        """Assemble this host's samples. Computes numbers of the whole batch, because any sample may lend a tail."""
        mine, h = self.mine, self.critic_horizon
        columns, prompts = self._columns(draw)
        columns |= {} if self.tasks is None else self.tasks.columns(prompts)
        state, own_prompts = columns.pop("state"), [prompts[sample] for sample in mine]
        now = dict(self.transform.low_dim(state, columns.pop("actions"), prompts))
        chunks = now["actions"][:, :h]
        columns |= {"critic_actions": fill_tails(chunks, draw.known, choose_donors(chunks, draw.known))}
        if draw.for_actor is not None:
            columns["sequence_mask"] = np.where(draw.for_actor, np.float32(0), columns["sequence_mask"])
        columns, now = ({name: column[mine] for name, column in part.items()} for part in (columns, now))
        next_state, next_rows = columns.pop("next_state"), columns.pop("next_rows")
        batch = ChunkBatch(actions=now.pop("actions"))
        batch.update(columns)  # type: ignore[typeddict-item]
        if self.suffixes:
            assert isinstance(self.transform, Suffixing)
            batch["suffixed_prompts"] = Prompts(**self.transform.suffixed_prompts(state[mine], own_prompts))  # type: ignore[typeddict-item]
        views = {"observations": (draw.rows[mine], now)}
        if self.next_observations:
            later = dict(self.transform.low_dim(next_state, None, own_prompts))
            views["next_observations"] = (next_rows, later)
        pictures = self._pictures(draw, [rows for rows, _ in views.values()])
        for (name, (_, low_dim)), image in zip(views.items(), pictures, strict=True):
            mask = {camera: np.ones(len(mine), bool) for camera in image}
            view = Observations(image=image, image_mask=mask, **low_dim)  # type: ignore[typeddict-item]
            batch[name] = view  # type: ignore[literal-required]
        return batch

    def _columns(self, draw: Draw) -> tuple[dict[str, Array], list[str]]:
        """Raw numbers and instructions of all samples, in batch order."""
        columns: dict[str, Array] = {}
        size = len(draw.rows)
        prompts = [""] * size
        for resident, positions in draw.by_part(np.arange(size)):
            table, rows = resident.table, draw.rows[positions]
            outcomes = chunk_outcomes(
                table,
                rows,
                horizon=self.horizon,
                critic_horizon=self.critic_horizon,
                boundary=self.boundary,
                n_step=self.n_step,
            )
            next_rows = bootstrap_rows(table, rows, outcomes["length"])
            found: dict[str, Any] = {
                **outcomes,
                "state": table.state[rows],
                "actions": chunk_actions(table, rows, horizon=self.horizon),
                "next_state": table.state[next_rows],
                "next_rows": next_rows,
            }
            if self.corrections:
                found["acted_by"] = chunk_actors(table, rows, horizon=self.horizon)
            for position, episode in zip(positions.tolist(), table.episode[rows].tolist(), strict=True):
                prompts[position] = table.tasks[episode]
            if len(positions) == size:
                return found, prompts
            for name, column in found.items():
                if name not in columns:
                    columns[name] = np.empty((size, *column.shape[1:]), column.dtype)
                elif columns[name].shape[1:] != column.shape[1:]:
                    raise DataError(
                        f"{name} has shape {columns[name].shape[1:]} in the dataset, {column.shape[1:]} in the replay",
                        hint="both must come from the same robot",
                    )
                columns[name][positions] = column
        return columns, prompts

    def _pictures(self, draw: Draw, rows: Sequence[Int[Array, "n"]]) -> list[dict[str, UInt8[Array, "_ _ _ 3"]]]:
        """Images of this host's samples at each of `rows`: the chunk's start and, if asked for, the bootstrap row."""
        images: list[dict[str, Array]] = [{} for _ in rows]
        for resident, positions in draw.by_part(self.mine) if self.cameras else ():
            copy_frames(resident, positions, rows, images, cameras=self.cameras, allocate=self.memory.take)
        return images
