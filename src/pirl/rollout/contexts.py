"""Splits of contexts: training, validation (to choose settings and checkpoints) and test (to report results).

Where initial states are seeds, the splits are disjoint. Where a benchmark lists its states (LIBERO: 50 per task), all
are test states by convention; validation takes them from the end.
"""

from typing import Literal

import numpy as np

from pirl.records import Context
from pirl.rollout.pool import EnvInfo

Split = Literal["train", "validation", "test"]
_FIRST = {"train": 0, "validation": 2**30, "test": 2**30 + 2**29}
"""First seed of each split."""


def fixed_contexts(info: EnvInfo, count: int, split: Split, *, tasks: tuple[str, ...] | None = None) -> list[Context]:
    """The first `count` contexts of a split, cycling over tasks; deterministic."""
    tasks = info.tasks if tasks is None else tasks
    return [Context(tasks[i % len(tasks)], _init(info, i // len(tasks), split)) for i in range(count)]


def random_contexts(info: EnvInfo, count: int, rng: np.random.Generator) -> list[Context]:
    """Random training contexts."""
    limit = _FIRST["validation"] if info.num_inits is None else info.num_inits
    tasks = rng.integers(len(info.tasks), size=count).tolist()
    inits = rng.integers(limit, size=count).tolist()
    return [Context(info.tasks[task], init) for task, init in zip(tasks, inits, strict=True)]


def distinct_contexts(info: EnvInfo, count: int, rng: np.random.Generator) -> list[Context]:
    """`count` distinct training contexts; all of a benchmark's listed ones if there are fewer."""
    if info.num_inits is None:
        found: dict[Context, None] = {}
        while len(found) < count:
            found |= dict.fromkeys(random_contexts(info, count - len(found), rng))
        return list(found)
    every = [Context(task, init) for task in info.tasks for init in range(info.num_inits)]
    return [every[i] for i in rng.permutation(len(every))[:count].tolist()]


def _init(info: EnvInfo, index: int, split: Split) -> int:
    if info.num_inits is None:
        return _FIRST[split] + index
    return (-1 - index if split == "validation" else index) % info.num_inits
