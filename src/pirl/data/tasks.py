"""The tasks of a dataset by number, for algorithms that treat each task separately."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from pirl.records import Array, EpisodeSource


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Numbers of instructions, deterministic for a dataset on every host and in every run."""

    numbers: Mapping[str, int]
    """Task number by instruction."""
    longest: Int[Array, "T"]
    """Steps of each task's longest episode; the last entry, the maximum over all tasks, is for unknown tasks."""

    @classmethod
    def of(cls, source: EpisodeSource | None) -> "Tasks":
        """Tasks of all episodes of a source."""
        longest: dict[str, int] = {}
        for index, length in enumerate(() if source is None else source.lengths.tolist()):
            assert source is not None
            task = source.episode(index).task
            longest[task] = max(length, longest.get(task, 0))
        ordered = sorted(longest)
        steps = [longest[task] for task in ordered]
        numbers = {task: number for number, task in enumerate(ordered)}
        return cls(numbers=numbers, longest=np.array([*steps, max(steps, default=1)], np.int32))

    def columns(self, tasks: Sequence[str]) -> dict[str, Int[Array, "B"]]:
        """Task columns of a batch; tasks that only the replay buffer has count as one."""
        number = np.array([self.numbers.get(task, len(self.numbers)) for task in tasks], np.int32)
        return {"task": number, "task_steps": self.longest[number]}
