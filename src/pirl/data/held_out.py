"""Held-out episodes: whole episodes, some of every outcome, selected deterministically.

Within each dataset and outcome, every stretch of 1/share consecutive episodes gives one, picked by a hash of the seed
and the stretch's number. So the share is exact to within one episode, episodes recorded later do not change the
selection among earlier ones, and the order of the datasets does not matter.
"""

import hashlib
import math
import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from pirl.data.dataset import MixedSource, SubsetSource
from pirl.errors import PirlWarning
from pirl.records import EpisodeSource

FEWEST = 4
"""Fewest episodes of an outcome from which one is held out."""
_OUTCOMES = {True: "success", False: "failure", None: "unlabelled"}


def choose(outcomes: Sequence[bool | None], held_out: int | float, seed: int = 0) -> Int[np.ndarray, "n"]:
    """Sorted indices of one dataset's held-out episodes.

    `held_out` below 1 is a share; from 1 on a number of episodes per outcome, limited to a quarter of them.
    """
    if not held_out:
        return np.zeros(0, np.int64)
    share, most = (held_out, math.inf) if held_out < 1 else (1 / FEWEST, held_out)
    chosen: list[int] = []
    for kind, name in _OUTCOMES.items():
        alike = [index for index, outcome in enumerate(outcomes) if outcome is kind]
        for stretch in range(math.floor(len(alike) * share) + 1):
            first, end = (math.ceil(border / share - 1e-9) for border in (stretch, stretch + 1))
            # The first stretch picks among the first four, so that rare outcomes are held out as well.
            size = min(end - first, FEWEST) if stretch == 0 else end - first
            digest = hashlib.blake2b(f"{seed} {name} {stretch}".encode(), digest_size=8).digest()
            place = first + int.from_bytes(digest) % size
            if len(alike) >= FEWEST and place < len(alike) and stretch < most:
                chosen.append(alike[place])
    return np.array(sorted(chosen), np.int64)


def split(source: EpisodeSource, held_out: int | float, seed: int = 0) -> tuple[EpisodeSource, EpisodeSource | None]:
    """(training episodes, held-out episodes or None). The datasets of a mixture are split one by one."""
    if not held_out:
        return source, None
    parts = source.sources if isinstance(source, MixedSource) else (source,)
    chosen, before = [np.zeros(0, np.int64)], 0
    for part in parts:
        outcomes = [part.episode(index).success for index in range(len(part))]
        chosen.append(before + choose(outcomes, held_out, seed))
        before += len(part)
    apart = np.concatenate(chosen)
    if not len(apart):
        warnings.warn(
            f"data.held_out is {held_out:g}, and no outcome has the {FEWEST} episodes it takes to keep one apart: "
            "nothing is held out",
            PirlWarning,
            stacklevel=3,
        )
        return source, None
    rest = np.setdiff1d(np.arange(len(source)), apart)
    return SubsetSource(source, rest), SubsetSource(source, apart)


def describe(outcomes: Sequence[bool | None], indices: Sequence[int], held_out: int | float, seed: int = 0) -> str:
    """One sentence about the held-out episodes of a dataset with these outcomes and episode indices."""
    chosen = choose(outcomes, held_out, seed)
    kinds = [outcomes[i] for i in chosen]
    counts = ", ".join(f"{kinds.count(kind)} {name}" for kind, name in _OUTCOMES.items() if kind in kinds)
    shown = " ".join(str(indices[i]) for i in chosen[:20]) + (" …" if len(chosen) > 20 else "")
    found = f" ({counts}): {shown}" if kinds else f": no outcome has {FEWEST}"
    return f"data.held_out {held_out:g} (data.seed {seed}) keeps {len(kinds)} of {len(outcomes)} episodes apart{found}"


def rows_of(
    lengths: Sequence[int] | Int[np.ndarray, "E"], outcomes: Sequence[bool | None], count: int, *, least: int = 8
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """(episode, step) of about `count` validation rows, spread evenly over each episode.

    Every used episode gets at least `least` rows (if it has as many steps). If that exceeds `count`, only some episodes
    are used, alternating between outcomes.
    """
    groups = [[i for i, outcome in enumerate(outcomes) if outcome is kind] for kind in _OUTCOMES]
    in_turn = [i for rank in range(len(outcomes)) for group in groups for i in group[rank : rank + 1]]
    used = sorted(in_turn[: max(count // least, 1)])
    each = max(least, count // max(len(used), 1))
    steps = [np.unique(((np.arange(each) + 0.5) * lengths[i] / each).astype(np.int64)) for i in used]
    episodes = [np.full(len(of), i, np.int64) for i, of in zip(used, steps, strict=True)]
    return np.concatenate(episodes), np.concatenate(steps)
