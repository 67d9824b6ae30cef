"""Rows with their own observation: recordings at a server do not have one for every row (`Episode.observed`)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from pirl.records import Array, Episode


def seen_at(episodes: Sequence[Episode], starts: Int[Array, "E"], rows: Int[Array, "N"]) -> Int[Array, "N"]:
    """For every row the last observed row at or before it. The first row of an episode counts as observed."""
    seen = np.concatenate([np.ones(len(one), bool) if one.observed is None else one.observed for one in episodes])
    seen[starts] = True
    return np.maximum.accumulate(np.where(seen, rows, 0))
