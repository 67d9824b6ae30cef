"""From rollouts to training rows of on-policy algorithms: one row per plan."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from pirl.data.transforms import Transform
from pirl.envs.env import RawObservation
from pirl.names import ACTIONS, IMAGE, IMAGE_MASK
from pirl.records import Array, Rollout
from pirl.rollout.policy import ChunkPolicy, model_inputs, replay_frames


@dataclass(frozen=True, kw_only=True)
class PlanRows:
    """Training rows, one per plan: observation, plan, executed steps and the algorithm's per-rollout values."""

    images: Mapping[str, Array]
    """Images by camera slot, as the policy saw them."""
    inputs: Mapping[str, Array]
    """The model's other inputs: normalised state and prompt tokens."""
    actions: Float32[Array, "n H A"]
    """The planned chunks, normalised."""
    executed: Float32[Array, "n H"]
    """1 where a step of the plan was executed, else 0."""
    columns: Mapping[str, Float32[Array, "n"]]
    """The algorithm's values per row, such as the advantage of its rollout, and constants."""
    weight: Float32[Array, "n"]
    """Loss weight of each row, 1 on average."""
    notes: Mapping[str, Array] = field(default_factory=dict)
    """The policy's notes on each plan."""

    def __len__(self) -> int:
        return len(self.executed)

    def batch(self, rows: Int[Array, "B"], weight: Float32[Array, "B"], *, fresh: bool) -> dict[str, Any]:
        """A minibatch; rows of weight 0 are padding. `fresh` marks the first minibatch of an iteration."""
        size = len(rows)
        return {
            "observations": {
                IMAGE: {slot: pixels[rows] for slot, pixels in self.images.items()},
                IMAGE_MASK: {slot: np.ones(size, bool) for slot in self.images},
                **{name: column[rows] for name, column in self.inputs.items()},
            },
            "actions": self.actions[rows],
            "executed": self.executed[rows],
            **{name: column[rows] for name, column in self.columns.items()},
            **({"notes": {name: values[rows] for name, values in self.notes.items()}} if self.notes else {}),
            "weight": weight * self.weight[rows],
            "fresh": np.full(size, float(fresh), np.float32),
        }


def plan_rows(
    transform: Transform,
    rollouts: Sequence[Rollout],
    columns: Mapping[str, Float[Array, "r"]],
    cameras: Sequence[str],
    constants: Mapping[str, float] = MappingProxyType({}),
    *,
    even: bool = False,
    of_plans: Mapping[str, Sequence[Float[Array, "_"]]] = MappingProxyType({}),
    notes: Collection[str] = (),
) -> PlanRows:
    """The rows of all rollouts in order. `columns` has one value per rollout, `of_plans` one per plan, `constants` one
    for all rows; `notes` names the notes to keep.

    All rows have weight 1; with `even` all rollouts have the same total weight.
    """
    states, plans, executed, prompts, counts = [], [], [], [], []
    images: dict[str, list[Array]] = {slot: [] for slot in cameras}
    for rollout in rollouts:
        episode, starts = rollout.episode, rollout.starts
        assert episode.intended is not None  # a policy's rollouts always hold its plans
        ends = np.append(starts[1:], len(episode))
        states.append(episode.state[starts])
        plans.append(episode.intended[starts])
        executed.append(np.arange(episode.intended.shape[1]) < (ends - starts)[:, None])
        prompts += [episode.task] * len(starts)
        counts.append(len(starts))
        seen = np.searchsorted(rollout.frame_steps, starts)
        frames = {key: pixels[seen] for key, pixels in rollout.frames.items()}
        for slot, pixels in replay_frames(transform, frames, cameras, borders=False).items() if cameras else ():
            images[slot].append(pixels)
    inputs = transform.low_dim(np.concatenate(states), np.concatenate(plans), prompts)
    return PlanRows(
        images={slot: np.concatenate(parts) for slot, parts in images.items()},
        actions=inputs.pop(ACTIONS),
        inputs=inputs,
        executed=np.concatenate(executed).astype(np.float32),
        columns={
            **{name: np.repeat(np.asarray(column, np.float32), counts) for name, column in columns.items()},
            **{name: np.full(sum(counts), value, np.float32) for name, value in constants.items()},
            **{name: np.concatenate(column).astype(np.float32) for name, column in of_plans.items()},
        },
        weight=_weights(np.array(counts), even=even),
        notes={name: np.concatenate([r.notes[name][: len(r.starts)] for r in rollouts]) for name in notes},
    )


def _weights(counts: Int[Array, "r"], *, even: bool) -> Float32[Array, "n"]:
    """Row weights: all 1, or with `even` the same sum over each rollout's rows; the mean is 1 either way."""
    share = counts.mean() / counts if even else np.ones(len(counts))
    return np.repeat(share, counts).astype(np.float32)


def first_rows(
    policy: ChunkPolicy,
    observation: RawObservation,
    horizon: int,
    columns: Sequence[str],
    notes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> PlanRows:
    """One dummy row with the right shapes: a real observation, a zero chunk, ones in the columns and zero notes."""
    transform = policy.transform
    states, inputs = model_inputs(transform, [observation], policy.cameras)
    plan = np.zeros((1, horizon, transform.robot.action_dim), np.float32)
    return PlanRows(
        images=inputs.pop(IMAGE),
        actions=transform.low_dim(states, plan, [""])[ACTIONS],
        inputs={name: column for name, column in inputs.items() if name != IMAGE_MASK},
        executed=np.ones(plan.shape[:2], np.float32),
        columns={name: np.ones(1, np.float32) for name in columns},
        weight=np.ones(1, np.float32),
        notes={name: np.zeros((1, *shape), np.float32) for name, shape in notes.items()},
    )


def minibatches(
    count: int, batch_size: int, rng: np.random.Generator
) -> list[tuple[Int[Array, "B"], Float32[Array, "B"]]]:
    """One pass over `count` rows in random order, as (rows, weights).

    An incomplete last batch is dropped (other rows in each pass). Fewer rows than one batch are padded with rows of
    weight 0; fewer than a quarter of a batch are too few for an update and give none.
    """
    order = rng.permutation(count)
    full = count // batch_size
    if full:
        ones = np.ones(batch_size, np.float32)
        return [(order[i * batch_size : (i + 1) * batch_size], ones) for i in range(full)]
    if 4 * count < batch_size:
        return []
    rows = np.resize(order, batch_size)
    return [(rows, (np.arange(batch_size) < count).astype(np.float32))]
