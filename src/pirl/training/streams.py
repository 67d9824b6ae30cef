"""Sources of training batches: datasets, datasets plus a replay buffer, or groups of rollouts.

Each loop step asks for one round: one batch from a dataset, or several when an algorithm makes passes over its own
rollouts. A stream collects with the weights at the start of the round. `state` suffices to resume, even in the middle
of a collection, because an episode depends only on its context, its number and the weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from pirl.agents.agent import Agent, Lesson, TrainState
from pirl.config import RLTrainConfig
from pirl.data.episode_store import keep_only
from pirl.data.loader import ACRLPDDataLoader, put_on_devices
from pirl.data.replay import ReplayBuffer
from pirl.envs.env import RawObservation
from pirl.errors import EnvError
from pirl.nested import flatten
from pirl.parallel.distributed import host_slice
from pirl.records import Array, Context, Episode, Rollout
from pirl.rollout.collect import Job, numbered
from pirl.rollout.collector import Collector, Say, Stop
from pirl.rollout.config import OnlineConfig
from pirl.rollout.curriculum import Curriculum
from pirl.rollout.policy import replay_frames
from pirl.rollout.pool import Lost
from pirl.rollout.rows import PlanRows, first_rows, minibatches, plan_rows

_COLLECTED = "rollout/lost_episodes time/env_steps_per_second time/env_share time/policy_share time/occupancy"
_ONLINE = "online/success_rate online/episodes online/env_steps online/replay_episodes"
_RIPT = "ript/success_rate ript/env_steps ript/attempted_groups ript/accepted_groups ript/collected_rows ript/updates"
_CURRICULUM = "curriculum/success_mean curriculum/solved_share curriculum/hopeless_share curriculum/entropy"
LOGGED = {
    "data": ("time/stall_fraction",),
    "collected": tuple(_COLLECTED.split()),
    "online": tuple(_ONLINE.split()),
    "ript": tuple(f"{_RIPT} {_CURRICULUM}".split()),
}
"""Metrics logged by each kind of stream; a test compares them with the actual ones."""


def logged_names(config: RLTrainConfig) -> tuple[str, ...]:
    """Names of the metrics that a run's stream logs, without those of the updates."""
    if config.agent.groups is not None:
        return LOGGED["ript"] + LOGGED["collected"]
    return LOGGED["data"] + (LOGGED["online"] + LOGGED["collected"] if config.online is not None else ())


@runtime_checkable
class Stream(Protocol):
    """Batches for the loop."""

    def round(self, step: int, state: TrainState, stop: Stop, say: Say) -> Iterator[Any]:
        """The batches of one step of the loop; raises CollectionStoppedError if asked to stop while collecting."""

    def notice(self, metrics: Mapping[str, jax.Array]) -> None:
        """Receive the metrics of the update on the latest batch."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest round."""

    def example(self) -> Any:
        """A batch with real shapes and dtypes, for a dry run."""

    def state(self) -> dict[str, Any]:
        """The position, as plain JSON for `restore`."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position."""

    def prune(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete files that none of these states refers to."""


class DatasetStream:
    """One batch per step."""

    def __init__(self, loader: ACRLPDDataLoader) -> None:
        self.loader = loader

    def round(self, step: int, state: TrainState, stop: Stop, say: Say) -> Iterator[Any]:
        """The next batch."""
        yield self.loader.sample_batch()
        if self.loader.step == 1:
            self.loader.reset_stall()  # the first step compiles: not a data stall

    def notice(self, metrics: Mapping[str, jax.Array]) -> None:
        """Ignored."""

    def metrics(self) -> dict[str, float]:
        """Fraction of the time the device waited for data."""
        return {"time/stall_fraction": self.loader.stall_fraction}

    def example(self) -> Any:
        """The first batch."""
        return self.loader.sample_batch()

    def state(self) -> dict[str, Any]:
        """The loader's position."""
        return {"data": self.loader.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume the loader at a saved position."""
        self.loader.restore(state["data"])

    def prune(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Nothing to delete: the stream writes no files."""


class OnlineStream(DatasetStream):
    """Off-policy: the policy collects at intervals into a replay buffer; batches mix dataset and replay."""

    def __init__(
        self,
        loader: ACRLPDDataLoader,
        replay: ReplayBuffer,
        collector: Collector,
        curriculum: Curriculum,
        config: OnlineConfig,
        *,
        borders: bool,
        directory: Path,
    ) -> None:
        """`borders`: whether dataset images are stored with their letterbox borders."""
        super().__init__(loader)
        self._replay, self._collector, self._curriculum, self._config = replay, collector, curriculum, config
        self._borders, self._directory = borders, directory
        self._collections = self._episodes = self._env_steps = 0
        self._latest: dict[str, float] = {}

    def round(self, step: int, state: TrainState, stop: Stop, say: Say) -> Iterator[Any]:
        """Collect if due (`updates_per_step` updates per environment step); then one batch."""
        trained = step - 1 - self._config.start_step
        if trained >= 0 and trained >= self._config.updates_per_step * self._env_steps:
            self._collect(state, stop, say)
        yield from super().round(step, state, stop, say)

    def _collect(self, state: TrainState, stop: Stop, say: Say) -> None:
        contexts = self._curriculum.draw(self._config.episodes, self._collections)
        found = self._collector.collect(numbered(contexts, self._episodes), state, stop, say)
        transform = self._collector.policy.transform
        for rollout in found.values():
            frames = replay_frames(transform, rollout.frames, self._replay.cameras, borders=self._borders)
            self._replay.append(rollout.episode, frames)
        rollouts = list(found.values())
        self._curriculum.update(
            [(r.context, int(bool(r.episode.success)), int(not r.episode.success)) for r in rollouts]
        )
        self._collections += 1
        self._episodes += len(contexts)
        self._env_steps += sum(len(rollout.episode) for rollout in rollouts)
        self._latest = {
            **self._collector.close_round(),
            "online/success_rate": float(np.mean([bool(r.episode.success) for r in rollouts])) if rollouts else 0.0,
            "online/episodes": float(self._episodes),
            "online/env_steps": float(self._env_steps),
            "online/replay_episodes": float(len(self._replay)),
        }

    def metrics(self) -> dict[str, float]:
        """The loader's metrics; those of a collection are returned once, by the first call after it."""
        latest, self._latest = self._latest, {}
        return {**super().metrics(), **latest}

    def example(self) -> Any:
        """A batch that includes a two-step replay episode, made from a real environment's first observation."""
        transform, cameras = self._collector.policy.transform, self._replay.cameras
        seen = flatten(_first_observation(self._collector, self._curriculum))
        steps, state = 2, transform.robot.find_state(seen)
        episode = Episode(
            task="",
            state=np.stack([state] * steps).astype(np.float32),
            actions=np.zeros((steps, transform.robot.action_dim), np.float32),
            rewards=np.zeros(steps, np.float32),
            terminated=np.zeros(steps, bool),
            truncated=np.zeros(steps, bool),
        )
        frames = {key: np.stack([value] * steps) for key, value in seen.items() if np.ndim(value) == 3}
        self._replay.append(episode, replay_frames(transform, frames, cameras, borders=self._borders))
        return super().example()

    def state(self) -> dict[str, Any]:
        """Loader position, replay buffer (saved to disk), curriculum, counters, and any unfinished collection."""
        return {
            **super().state(),
            "replay": self._replay.save(self._directory),
            "collector": self._collector.state(),
            "curriculum": self._curriculum.state(),
            "collections": self._collections,
            "episodes": self._episodes,
            "env_steps": self._env_steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the replay buffer first: the loader's position depends on its contents."""
        self._replay.restore(self._directory, state["replay"])
        super().restore(state)
        self._collector.restore(state["collector"])
        self._curriculum.restore(state["curriculum"])
        self._collections, self._episodes = int(state["collections"]), int(state["episodes"])
        self._env_steps = int(state["env_steps"])

    def prune(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete evicted replay episodes that no checkpoint refers to, and rollouts of finished collections."""
        states = list(states)
        keep_only(self._directory, [name for state in states for name in state["replay"]["episodes"]])
        self._collector.prune(state["collector"] for state in states)


class GroupStream:
    """On-policy: each round collects groups of rollouts from one initial state each, then trains on the useful groups.

    The agent turns groups into a `lesson` and ends the passes early when `moved_far` says so.
    """

    def __init__(
        self,
        collector: Collector,
        curriculum: Curriculum,
        agent: Agent,
        *,
        batch_size: int,
        horizon: int,
        seed: int,
        demonstrations: ACRLPDDataLoader | None,
        sharding: Any,
    ) -> None:
        assert agent.config.groups is not None
        self._collector, self._curriculum, self._agent, self._plan = collector, curriculum, agent, agent.config.groups
        self._batch_size, self._horizon, self._seed = batch_size, horizon, seed
        self._demonstrations, self._sharding = demonstrations, sharding
        self._attempted: list[Context] = []
        self._episodes = self._env_steps = 0
        self._moved_far = False
        self._latest: dict[str, float] = {}

    def round(self, step: int, state: TrainState, stop: Stop, say: Say) -> Iterator[Any]:
        """Collect groups, then yield shuffled minibatches for `epochs` passes, or until the policy has moved far."""
        groups = self._collect(step, state, stop, say)
        full = [group for _, group in groups if len(group) == self._plan.size]
        lesson = self._agent.lesson(full)
        rows = self._rows([full[i] for i in lesson.groups], lesson)
        updates = 0
        for batch in self._batches(step, rows):
            yield batch
            updates += 1
        outcomes = [(context, _successes(group)) for context, group in groups]
        self._curriculum.update([(context, int(sum(won)), int(len(won) - sum(won))) for context, won in outcomes])
        won = [success for _, successes in outcomes for success in successes]
        self._env_steps += sum(len(rollout.episode) for _, group in groups for rollout in group)
        self._latest = {
            **self._collector.close_round(),
            **self._curriculum.metrics(),
            "ript/success_rate": float(np.mean(won)) if won else 0.0,
            "ript/env_steps": float(self._env_steps),
            "ript/attempted_groups": float(len(groups)),
            "ript/accepted_groups": float(len(lesson.groups)),
            "ript/collected_rows": float(0 if rows is None else len(rows)),
            "ript/updates": float(updates),
        }
        self._episodes += len(self._attempted) * self._plan.size
        self._attempted = []

    def _collect(self, step: int, state: TrainState, stop: Stop, say: Say) -> list[tuple[Context, list[Rollout]]]:
        """Collect until `groups` groups have mixed outcomes, or `max_groups` were attempted."""
        size = self._plan.size
        while True:
            jobs = [
                Job(self._episodes + group * size + k, context)
                for group, context in enumerate(self._attempted)
                for k in range(size)
            ]
            found = self._collector.collect(jobs, state, stop, say)
            groups = [
                (context, [found[n] for n in self._numbers(group) if n in found])
                for group, context in enumerate(self._attempted)
            ]
            mixed = sum(len(group) == size and len(set(_successes(group))) > 1 for _, group in groups)
            wanted = min(self._plan.groups - mixed, self._plan.max_groups - len(groups))
            if wanted <= 0:
                return groups
            self._attempted += self._curriculum.draw(wanted, step, already=len(groups))

    def _numbers(self, group: int) -> range:
        first = self._episodes + group * self._plan.size
        return range(first, first + self._plan.size)

    def _rows(self, groups: list[list[Rollout]], lesson: Lesson) -> PlanRows | None:
        if not groups:
            return None
        policy = self._collector.policy
        flat = [rollout for group in groups for rollout in group]
        columns = {name: column.ravel() for name, column in lesson.columns.items()}
        return plan_rows(
            policy.transform,
            flat,
            columns,
            policy.cameras,
            lesson.constants,
            even=self._plan.even,
            of_plans=lesson.of_plans,
            notes=self._agent.notes,
        )

    def _batches(self, step: int, rows: PlanRows | None) -> Iterator[Any]:
        fresh, self._moved_far = True, False
        for epoch in range(0 if rows is None else self._plan.epochs):
            rng = np.random.default_rng([self._seed, 2, step, epoch])
            for chosen, weight in minibatches(len(rows), self._batch_size, rng):  # type: ignore[arg-type]
                yield self._batch(rows, chosen, weight, fresh=fresh)  # type: ignore[arg-type]
                fresh = False
                if self._moved_far:
                    return

    def _batch(self, rows: PlanRows, chosen: Array, weight: Array, *, fresh: bool) -> Any:
        chosen, weight = host_slice((chosen, weight), self._sharding.mesh)
        batch: Any = put_on_devices(rows.batch(chosen, weight, fresh=fresh), self._sharding)
        if self._demonstrations is not None:
            demos = self._demonstrations.sample_batch()
            batch["demos"] = {name: demos[name] for name in ("observations", "actions", "valid")}
        return batch

    def notice(self, metrics: Mapping[str, jax.Array]) -> None:
        """Ask the agent whether the policy has moved far enough to end the round."""
        self._moved_far = self._agent.moved_far(metrics)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last complete round."""
        return self._latest

    def example(self) -> Any:
        """A batch of copies of a real environment's first observation."""
        observation = _first_observation(self._collector, self._curriculum)
        lesson = self._agent.lesson([])
        columns = [*lesson.columns, *lesson.constants, *lesson.of_plans]
        rows = first_rows(self._collector.policy, observation, self._horizon, columns, self._agent.notes)
        chosen = np.zeros(self._batch_size, np.int64)
        return self._batch(rows, chosen, np.ones(self._batch_size, np.float32), fresh=True)

    def state(self) -> dict[str, Any]:
        """Counters, curriculum, position in the demonstrations, and any unfinished collection."""
        return {
            "collector": self._collector.state(),
            "curriculum": self._curriculum.state(),
            "attempted": [[context.task, context.init] for context in self._attempted],
            "episodes": self._episodes,
            "env_steps": self._env_steps,
            **({} if self._demonstrations is None else {"data": self._demonstrations.state()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position."""
        self._collector.restore(state["collector"])
        self._curriculum.restore(state["curriculum"])
        self._attempted = [Context(task, int(init)) for task, init in state["attempted"]]
        self._episodes, self._env_steps = int(state["episodes"]), int(state.get("env_steps", 0))
        if self._demonstrations is not None:
            self._demonstrations.restore(state["data"])

    def prune(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete rollouts of finished rounds."""
        self._collector.prune(state["collector"] for state in states)


def _first_observation(collector: Collector, curriculum: Curriculum) -> RawObservation:
    """An environment's first observation."""
    context = curriculum.draw(1, 0)[0]
    begun = collector.pool.start({0: context})[0]
    if isinstance(begun, Lost):
        raise EnvError(f"{context}: {begun.reason}", hint="try the environment with pirl.envs.check")
    return begun.observation


def _successes(group: list[Rollout]) -> list[float]:
    """1.0 per successful rollout, else 0.0."""
    return [float(bool(rollout.episode.success)) for rollout in group]
