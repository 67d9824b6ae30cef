"""Processes that collect together, here as threads: shares, what is lost, and ends that all of them meet alike."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pirl.data.robots import make_robot
from pirl.data.transforms import Transform
from pirl.errors import EnvError, PirlWarning
from pirl.names import BASE_CAMERA
from pirl.parallel.failures import DistributedError
from pirl.records import Context, Rollout
from pirl.rollout import hosts
from pirl.rollout.collect import CollectionStoppedError, CollectStats, Job, numbered
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import LocalPool
from rollout_envs import counting

COUNT = 3
TRANSFORM = Transform(
    robot=make_robot(name="counting", state_dim=4, action_dim=2, cameras={BASE_CAMERA: "camera 0"}),
    norm_stats=None,
    tokenizer=None,
    action_dim=2,
    state_dim=4,
)
JOBS = numbered([Context("count", 10 + i) for i in range(8)], 40)


class Service:
    """Stands in for the service through which processes talk."""

    def __init__(self) -> None:
        self.me = threading.local()
        self.words: dict[int, Any] = {}
        self.asked = threading.Event()
        self.barrier = threading.Barrier(COUNT, timeout=60)

    def stop(self, asked: bool) -> bool:
        if asked:
            self.asked.set()
        return self.asked.is_set()

    def gather(self, word: Any, *, meanwhile: Callable[[], object]) -> list[Any]:
        meanwhile()
        self.words[self.me.index] = json.loads(json.dumps(word))
        self.barrier.wait()
        return [self.words[index] for index in range(COUNT)]


def act(weights: Any, observation: Any, keys: Any) -> Any:
    return weights + jax.vmap(lambda key: jax.random.normal(key, (4, 2)))(keys)


Result = tuple[dict[int, Rollout], CollectStats, Exception | None]


def together(
    monkeypatch: pytest.MonkeyPatch, folder: Path, jobs: list[Job], *, stops: int | None = None, **options: Any
) -> list[Result]:
    """What each of the processes yields, counts and raises; `stops` is asked to stop."""
    service = Service()
    monkeypatch.setattr(jax, "process_count", lambda: COUNT)
    monkeypatch.setattr(jax, "process_index", lambda: service.me.index)
    monkeypatch.setattr(hosts, "Meeting", lambda name: service)
    monkeypatch.setattr(hosts, "barrier", lambda name: service.barrier.wait())

    def run(index: int) -> Result:
        service.me.index = index
        found: dict[int, Rollout] = {}
        stats, error = CollectStats(), None
        policy = ChunkPolicy(act, TRANSFORM, batch_size=2, execute=3, cameras=()).use(
            jnp.float32(0.5), jax.random.key(0)
        )
        with LocalPool(counting, 2) as pool:
            stop = lambda: index == stops  # noqa: E731
            given = {"folder": folder, "stop": stop, "stats": stats, "retries": 0} | options
            try:
                for rollout in hosts.collect_together(pool, policy, jobs, **given):
                    assert rollout.number not in found
                    found[rollout.number] = rollout
            except Exception as raised:
                error = raised
        return found, stats, error

    with ThreadPoolExecutor(COUNT) as threads:
        return list(threads.map(run, range(COUNT)))


def test_all_get_all_episodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = together(monkeypatch, tmp_path, JOBS)
    for found, stats, error in results:
        assert error is None
        assert sorted(found) == [job.number for job in JOBS]
        assert {number: rollout.context for number, rollout in found.items()} == {j.number: j.context for j in JOBS}
        assert stats.episodes == len(JOBS)
        assert stats.env_steps == sum(len(rollout.episode) for rollout in found.values())
    actions = [{n: rollout.episode.actions.tolist() for n, rollout in found.items()} for found, _, _ in results]
    assert actions[0] == actions[1] == actions[2]
    assert list(tmp_path.iterdir()) == []  # what travelled is not needed any more


def test_what_one_loses_all_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = [*JOBS, Job(48, Context("raise", 3))]
    with pytest.warns(PirlWarning, match="continuing without it"):
        results = together(monkeypatch, tmp_path, jobs)
    for found, stats, error in results:
        assert error is None
        assert sorted(found) == [job.number for job in JOBS]
        ((job, reason),) = stats.lost
        assert job == jobs[-1]
        assert "the cup broke" in reason


def test_a_broken_environment_of_one_ends_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the same error, and with every episode that the others finished."""
    broken = [Job(job.number, Context("raise", 2)) if i % COUNT == 1 else job for i, job in enumerate(JOBS)]
    with pytest.warns(PirlWarning):
        results = together(monkeypatch, tmp_path, broken)
    for found, _, error in results:
        assert sorted(found) == [job.number for job in broken if job.context.task == "count"]
        assert isinstance(error, EnvError)
        assert "the cup broke" in error.message
    assert str(results[0][2]).startswith("process 1: ")


def test_one_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = together(monkeypatch, tmp_path, JOBS, stops=2)
    assert all(isinstance(error, CollectionStoppedError) for _, _, error in results)
    assert len({frozenset(found) for found, _, _ in results}) == 1


def test_any_other_failure_ends_all_and_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    collect = hosts.collect

    def failing(pool: Any, policy: Any, jobs: list[Job], **options: Any) -> Any:
        if jobs[0] == JOBS[1]:
            raise ValueError("the disk is full of sand")
        return collect(pool, policy, jobs, **options)

    monkeypatch.setattr(hosts, "collect", failing)
    results = together(monkeypatch, tmp_path, JOBS, stops=0)
    assert isinstance(results[1][2], ValueError)
    for process in (0, 2):
        error = results[process][2]
        assert isinstance(error, DistributedError)
        assert "process 1 failed while collecting: ValueError('the disk is full of sand')" in error.message


def test_a_folder_that_is_not_shared_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save = hosts.save_rollouts
    monkeypatch.setattr(hosts, "save_rollouts", lambda folder, mine: save(tmp_path / str(jax.process_index()), mine))
    results = together(monkeypatch, tmp_path, JOBS)
    for _, _, error in results:
        assert isinstance(error, DistributedError)
        assert "on a shared file system" in error.hint
