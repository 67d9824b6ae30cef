"""Collects the episodes of one round, resumably: an interruption loses no finished episode."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from pirl.data.episode_store import keep_only
from pirl.errors import DataError, EnvError
from pirl.records import Rollout
from pirl.rollout.collect import CollectStats, Job
from pirl.rollout.files import load_rollouts, save_rollouts
from pirl.rollout.hosts import collect_together, weights_to_act
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import EnvPool
from pirl.rollout.record import RolloutRecorder, num_recorded

Stop = Callable[[], bool]
"""Returns whether a stop was requested."""
Say = Callable[[str], None]
"""Displays a progress message."""


class Collector:
    """Collects the episodes of one round; `state` holds the finished ones, so a run can resume.

    A `recorder` also writes the episodes of finished rounds to a dataset, each exactly once: a resumed run collects
    episodes after its checkpoint again, identically, and skips those already in the dataset.
    """

    def __init__(
        self,
        pool: EnvPool,
        policy: ChunkPolicy,
        *,
        key: jax.Array,
        directory: Path,
        retries: int = 2,
        every_picture: bool = False,
        last_look: bool = False,
        recorder: RolloutRecorder | None = None,
    ) -> None:
        """`recorder` requires `every_picture`."""
        self.pool, self.policy = pool, policy
        self._key, self._directory, self._retries = key, directory, retries
        self._every_picture, self._recorder = every_picture, recorder
        self._last_look = last_look
        self._recorded = 0 if recorder is None else num_recorded(recorder.root)
        self._ahead = 0
        """Number of the next episodes that the dataset already holds."""
        self._finished: dict[int, Rollout] = {}
        self._lost: set[int] = set()
        self._stats = CollectStats()

    def collect(self, jobs: list[Job], weights: Any, stop: Stop, say: Say) -> dict[int, Rollout]:
        """The jobs' episodes by number, without lost ones."""
        missing = [job for job in jobs if job.number not in self._finished and job.number not in self._lost]
        self.policy.use(weights_to_act(weights), self._key)
        try:
            for rollout in collect_together(
                self.pool,
                self.policy,
                missing,
                folder=self._directory,
                every_picture=self._every_picture,
                last_look=self._last_look,
                retries=self._retries,
                stop=stop,
                stats=self._stats,
            ):
                self._finished[rollout.number] = rollout
                say(f"collecting {len(self._finished)}/{len(jobs)}")
        except EnvError:
            self._stats.lost.clear()  # a resumed run, with a repaired environment, retries all
            raise
        finally:
            self.policy.use(None, self._key)
            self._lost |= {job.number for job, _ in self._stats.lost}
        return {job.number: self._finished[job.number] for job in jobs if job.number in self._finished}

    def close_round(self) -> dict[str, float]:
        """End the round: record its episodes, then drop them. Returns speed metrics."""
        for number in sorted(self._finished) if self._recorder is not None else ():
            self._record(self._finished[number])
        metrics = self._stats.metrics(self.policy.batch_size) | {"rollout/lost_episodes": float(len(self._lost))}
        self._finished, self._lost, self._stats = {}, set(), CollectStats()
        return metrics

    def _record(self, rollout: Rollout) -> None:
        assert self._recorder is not None
        if self._ahead:
            self._ahead -= 1
        else:
            self._recorder.add(rollout)
        self._recorded += 1

    def state(self) -> dict[str, Any]:
        """Write the unfinished round's finished episodes to the run folder; returns their file names, as JSON."""
        names = save_rollouts(self._directory, [self._finished[number] for number in sorted(self._finished)])
        if self._recorder is not None:
            self._recorder.save()  # a checkpoint only counts episodes that are safely on disk
        return {"rollouts": names, "lost": sorted(self._lost), "recorded": self._recorded}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the finished episodes of a saved round."""
        self._finished = {rollout.number: rollout for rollout in load_rollouts(self._directory, state["rollouts"])}
        self._lost = set(state["lost"])
        self._stats = CollectStats(episodes=len(self._finished))
        if self._recorder is not None:
            held, self._recorded = num_recorded(self._recorder.root), int(state["recorded"])
            self._ahead = held - self._recorded
            if self._ahead < 0:
                raise DataError(
                    f"{self._recorder.root} holds {held} episodes; at the checkpoint there were {self._recorded}",
                    hint="restore the dataset, or resume without recording (--rollout.record None)",
                )

    def prune(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete episode files that none of these states names."""
        keep_only(self._directory, [name for state in states for name in state["rollouts"]])
