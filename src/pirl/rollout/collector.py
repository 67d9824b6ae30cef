"""The episodes of one round, collected so that an interruption loses none that was finished."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from pirl.records import Rollout
from pirl.rollout.collect import CollectStats, Job, collect
from pirl.rollout.files import delete_rollouts, load_rollouts, save_rollouts
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import EnvPool

Stop = Callable[[], bool]
"""Has anybody asked to stop?"""
Say = Callable[[str], None]
"""Shows a few words about what is going on."""
Keep = Callable[[Rollout], None]
"""Takes every finished episode, to write a dataset of them, for example."""


class Collector:
    """Collects the episodes of one round, surviving interruption: `state` holds what is finished of it."""

    def __init__(
        self,
        pool: EnvPool,
        policy: ChunkPolicy,
        *,
        key: jax.Array,
        directory: Path,
        retries: int = 2,
        every_picture: bool = False,
        keep: Keep | None = None,
    ) -> None:
        self.pool, self.policy = pool, policy
        self._key, self._directory, self._retries = key, directory, retries
        self._every_picture, self._keep = every_picture or keep is not None, keep
        self._finished: dict[int, Rollout] = {}
        self._lost: set[int] = set()
        self.stats = CollectStats()

    def collect(self, jobs: list[Job], weights: Any, stop: Stop, say: Say) -> dict[int, Rollout]:
        """The jobs' episodes by number; those that were lost are missing."""
        missing = [job for job in jobs if job.number not in self._finished and job.number not in self._lost]
        stats = CollectStats()
        self.policy.use(weights, self._key)
        try:
            for rollout in collect(
                self.pool,
                self.policy,
                missing,
                every_picture=self._every_picture,
                retries=self._retries,
                stop=stop,
                stats=stats,
            ):
                self._finished[rollout.number] = rollout
                say(f"collecting {len(self._finished)}/{len(jobs)}")
        finally:
            self.policy.use(None, self._key)
            self._lost |= {job.number for job, _ in stats.lost}
            self.stats.add(stats)
        return {job.number: self._finished[job.number] for job in jobs if job.number in self._finished}

    def close_round(self) -> dict[str, float]:
        """The round is over: its episodes are handed on and forgotten. Returns what they cost."""
        if self._keep is not None:
            for number in sorted(self._finished):
                self._keep(self._finished[number])
        metrics = self.stats.metrics(self.policy.batch_size)
        self._finished, self._lost, self.stats = {}, set(), CollectStats()
        return metrics

    def state(self) -> dict[str, Any]:
        """What is finished of a round that is not over; the episodes are written to the run's folder."""
        names = save_rollouts(self._directory, [self._finished[number] for number in sorted(self._finished)])
        return {"rollouts": names, "lost": sorted(self._lost)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with these episodes; files of other histories are removed."""
        self._finished = {r.number: r for r in load_rollouts(self._directory, state["rollouts"])}
        self._lost = set(state["lost"])
        delete_rollouts(self._directory, keep=state["rollouts"])
