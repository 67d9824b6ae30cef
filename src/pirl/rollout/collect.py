"""Collects episodes: each slot of a pool runs one context after another; one policy call per round serves all slots.

An episode depends only on its context, its number and the policy. So repeating a lost episode or resuming an
interrupted collection gives the same result.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.data.robots import Robot
from pirl.envs.env import RawObservation
from pirl.errors import EnvError, PirlWarning
from pirl.names import PROMPT
from pirl.nested import flatten
from pirl.records import Array, Context, Episode, Rollout
from pirl.rollout.policy import ChunkPolicy, Plan
from pirl.rollout.pool import Advanced, EnvPool, Lost, Started


class CollectionStoppedError(Exception):
    """A stop was requested; unfinished episodes are dropped."""


@dataclass(frozen=True)
class Job:
    """One episode to run."""

    number: int
    """Episode number; with the policy's key it determines the noise."""
    context: Context
    """Task and initial state."""


@dataclass
class CollectStats:
    """Cost of a collection: seconds this process waited for environments and for the policy."""

    episodes: int = 0
    env_steps: int = 0
    env_seconds: float = 0.0
    policy_seconds: float = 0.0
    total_seconds: float = 0.0
    policy_calls: int = 0
    rows_used: int = 0
    """Rows of the policy's batches that held an environment's observation, not padding."""
    lost: list[tuple[Job, str]] = field(default_factory=list)
    """Dropped episodes, with reasons."""

    def metrics(self, batch_size: int) -> dict[str, float]:
        """Speed metrics; they depend on the machine and include repeated episodes."""
        total = max(self.total_seconds, 1e-9)
        return {
            "time/env_steps_per_second": self.env_steps / total,
            "time/env_share": self.env_seconds / total,
            "time/policy_share": self.policy_seconds / total,
            "time/occupancy": self.rows_used / max(self.policy_calls * batch_size, 1),
        }


def collect(
    pool: EnvPool,
    policy: ChunkPolicy,
    jobs: Iterable[Job],
    *,
    every_picture: bool = False,
    last_look: bool = False,
    retries: int = 2,
    stop: Callable[[], bool] = lambda: False,
    stats: CollectStats | None = None,
) -> Iterator[Rollout]:
    """Yield the jobs' episodes as they end. With `every_picture` each step has images, otherwise only planning steps.

    With `last_look` the policy also plans (and notes) at the last observation of truncated episodes.
    A lost episode is repeated up to `retries` times, then dropped with a warning. If every episode is lost, the
    environment is broken: EnvError. `stats` accumulates over the parts of a collection; finished episodes in it show
    that the environment works.
    """
    stats = CollectStats() if stats is None else stats
    queue = _Queue(jobs, retries=retries, slots=pool.size, stats=stats)
    running: dict[int, _Running] = {}

    def choose(slots: Iterable[int]) -> dict[int, Plan]:
        episodes = {slot: running[slot] for slot in slots}
        if not episodes:
            return {}
        began = time.perf_counter()
        plans = policy.choose(
            {slot: episode.seen for slot, episode in episodes.items()},
            {slot: (episode.job.number, len(episode.rewards)) for slot, episode in episodes.items()},
        )
        stats.policy_seconds += time.perf_counter() - began
        stats.policy_calls += 1
        stats.rows_used += len(plans)
        return plans

    clock = time.perf_counter()
    while queue.waiting or running:
        if stop():
            raise CollectionStoppedError
        began = time.perf_counter()
        free = [slot for slot in range(pool.size) if slot not in running]
        given = {slot: queue.waiting.popleft() for slot in free[: len(queue.waiting)]}
        for slot, begun in pool.start({slot: job.context for slot, job in given.items()}).items() if given else ():
            if isinstance(begun, Lost):
                queue.lose(given[slot], begun.reason)
            else:
                running[slot] = _Running(given[slot], begun, policy.transform.robot)
        stats.env_seconds += time.perf_counter() - began
        plans = choose(running)
        began = time.perf_counter()
        chunks = {slot: plan.chunk[: policy.execute] for slot, plan in plans.items()}
        answers = pool.advance(chunks, every_picture=every_picture) if chunks else {}
        stats.env_seconds += time.perf_counter() - began
        lost = {slot: answer.reason for slot, answer in answers.items() if isinstance(answer, Lost)}
        advanced = {slot: answer for slot, answer in answers.items() if isinstance(answer, Advanced)}
        for slot, answer in advanced.items():
            running[slot].add(plans[slot], answer)
        ended = {slot: answer for slot, answer in advanced.items() if answer.terminated or answer.truncated}
        if last_look:
            for slot, plan in choose(slot for slot, answer in ended.items() if not answer.terminated).items():
                running[slot].note(plan)
        finished = [running.pop(slot).finish(answer) for slot, answer in ended.items()]
        stats.episodes += len(finished)
        stats.env_steps += sum(len(one.episode) for one in finished)
        for slot, reason in lost.items():  # after the finished ones are counted: without any, the environment is broken
            queue.lose(running.pop(slot).job, reason)
        stats.total_seconds += (now := time.perf_counter()) - clock
        clock = now
        yield from finished


class _Queue:
    """Pending jobs and how often each was lost."""

    def __init__(self, jobs: Iterable[Job], *, retries: int, slots: int, stats: CollectStats) -> None:
        self.waiting = deque(jobs)
        self._retries, self._stats = retries, stats
        self._enough = min(slots, len(self.waiting))
        """After this many dropped episodes and none finished, the environment itself is broken."""
        self._tries: dict[int, int] = {}

    def lose(self, job: Job, reason: str) -> None:
        """Requeue a lost job, or drop it after `retries`; raises EnvError if the environment is broken."""
        tries = self._tries.get(job.number, 0) + 1
        self._tries[job.number] = tries
        message = f"episode {job.number} ({job.context.task!r}, initial state {job.context.init}) was lost: {reason}"
        if tries <= self._retries:
            self.waiting.append(job)
            outlook = "it is repeated"
        else:
            self._stats.lost.append((job, reason))
            outlook = f"tried {tries} times, continuing without it"
            if self._stats.episodes == 0 and len(self._stats.lost) >= self._enough:
                raise EnvError(message, hint="no episode could be finished: try the environment with pirl.envs.check")
        warnings.warn(f"{message}; {outlook}", PirlWarning, stacklevel=2)


class _Running:
    """An episode in progress."""

    def __init__(self, job: Job, begun: Started, robot: Robot) -> None:
        self.job, self.seen, self._robot = job, begun.observation, robot
        self.rewards: list[float] = []
        self._rows: list[RawObservation] = []
        self._actions: list[Array] = []
        self._plans: list[Array] = []
        self._starts: list[int] = []
        self._notes: list[Mapping[str, Array]] = []

    def note(self, plan: Plan) -> None:
        """Keep a plan's notes."""
        self._notes.append(plan.notes)

    def add(self, planned: Plan, answer: Advanced) -> None:
        """Append the result of a chunk."""
        self.note(planned)
        steps, plan = len(answer.rewards), planned.chunk
        self._starts.append(len(self.rewards))
        self._rows += [self.seen, *answer.observations[:-1]]
        self._actions += list(plan[:steps])
        self._plans += [_remaining(plan, step) for step in range(steps)]
        self.rewards += answer.rewards.tolist()
        self.seen = answer.observations[-1]

    def finish(self, answer: Advanced) -> Rollout:
        """The finished episode."""
        last = np.arange(len(self.rewards)) == len(self.rewards) - 1
        flat = [flatten(row) for row in self._rows]
        prompt = flat[0].get(PROMPT)
        episode = Episode(
            task=self.job.context.task if prompt is None else str(prompt),
            state=np.stack([self._robot.find_state(row) for row in flat]).astype(np.float32),
            actions=np.stack(self._actions).astype(np.float32),
            rewards=np.array(self.rewards, np.float32),
            terminated=last & answer.terminated,
            truncated=last & (answer.truncated and not answer.terminated),
            success=answer.success,
            intended=np.stack(self._plans).astype(np.float32),
        )
        steps = [step for step, row in enumerate(flat) if _pictures(row)]
        keys = _pictures(flat[0])
        return Rollout(
            context=self.job.context,
            number=self.job.number,
            episode=episode,
            starts=np.array(self._starts, np.int64),
            frames={key: np.stack([np.asarray(flat[step][key]) for step in steps]) for key in keys},
            frame_steps=np.array(steps, np.int64),
            notes={name: np.stack([notes[name] for notes in self._notes]) for name in self._notes[0]},
        )


def _remaining(plan: Float[Array, "H A"], step: int) -> Float[Array, "H A"]:
    """What remains of a plan after `step` steps, padded with NaN to the same length."""
    rest = np.full_like(plan, np.nan)
    rest[: len(plan) - step] = plan[step:]
    return rest


def _pictures(row: Mapping[str, Any]) -> list[str]:
    return [key for key, value in row.items() if np.ndim(value) == 3]


def numbered(contexts: Sequence[Context], first: int = 0) -> list[Job]:
    """Jobs for contexts, numbered from `first`."""
    return [Job(first + i, context) for i, context in enumerate(contexts)]
