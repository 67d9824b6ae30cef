"""Environments in processes that may die, hang or never come up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import rollout_envs
from pirl.envs.config import TabletopConfig
from pirl.errors import ConfigError, EnvError, MissingExtraError, PirlWarning
from pirl.records import Context
from pirl.rollout.config import RolloutConfig
from pirl.rollout.make_pool import make_pool
from pirl.rollout.pool import Advanced, Build, EnvPool, Lost, Started
from pirl.rollout.workers import ProcessPool, ProcessWorker
from pool_contract import PoolContract, chunk, plain


def make(build: Build = rollout_envs.counting, *, size: int = 2, num_workers: int = 2, **times: float) -> ProcessPool:
    return ProcessPool(build, size=size, num_workers=num_workers, **{"timeout": 30.0, **times})


def gone(pid: int) -> bool:
    """No such process, or one that is only waiting for somebody to read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return met


def pid_of(pool: EnvPool, slot: int) -> int:
    started = pool.start({slot: Context("count", 0)})[slot]
    assert isinstance(started, Started)
    return int(started.observation["state"][0])


class TestProcessPool(PoolContract):
    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[EnvPool]:
        with make(size=5) as pool:
            yield pool
            assert pool.restarts == 0


def test_workers_are_small_and_leave_the_parent_alone() -> None:
    before = dict(os.environ)
    with make(rollout_envs.inspecting, size=3) as pool:
        answers = pool.start({slot: Context("count", 0) for slot in range(3)})
        states = [answer.observation["state"].tolist() for answer in answers.values() if isinstance(answer, Started)]
    pids = [state.pop(0) for state in states]
    assert pids[0] == pids[2] != pids[1]
    assert os.getpid() not in pids
    assert states == [[False, True, 1, 1]] * 3, "[jax is imported, SIGINT is ignored, OMP threads, LP threads]"
    assert all(gone(pid) for pid in pids), "closing ends them"
    assert dict(os.environ) == before


def test_death_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    """The worker's other slot goes with it; the other worker does not even wait for the new one."""
    with make(partial(rollout_envs.held_back, tmp_path, 2), size=4) as pool:
        pool.start({0: Context("die", 2), 1: Context("count", 0), 2: Context("count", 0)})
        with pytest.warns(PirlWarning, match=r"restarted \(restart 1\): its worker ended with exit code 7") as told:
            answers = pool.advance({0: chunk(3), 1: chunk(3)}, every_picture=False)
        assert len(told) == 1
        assert pool.restarts == 1
        lost = Lost(reason="its worker ended with exit code 7")
        assert answers[0] == lost
        assert isinstance(answers[1], Advanced)

        assert isinstance(pool.advance({1: chunk(1)}, every_picture=False)[1], Advanced)
        (tmp_path / "go").touch()
        answers = pool.advance({1: chunk(1), 2: chunk(1)}, every_picture=False)
        assert isinstance(answers[1], Advanced)
        assert answers[2] == lost, "slot 2 was not asked when its worker died"

        started = pool.start({0: Context("count", 8), 2: Context("count", 9)})
        assert all(isinstance(answer, Started) for answer in started.values())
        advanced = pool.advance({0: chunk(3), 2: chunk(2)}, every_picture=False)[2]
        assert isinstance(advanced, Advanced)
        np.testing.assert_array_equal(advanced.observations[-1]["state"][:2], [9, 2])


def test_an_idle_worker_that_is_killed() -> None:
    with make(rollout_envs.inspecting) as pool:
        os.kill(pid_of(pool, 1), signal.SIGKILL)
        with pytest.warns(PirlWarning, match="SIGKILL"):
            answers = pool.advance({1: chunk(1)}, every_picture=False)
        assert answers[1] == Lost(reason="its worker was killed by SIGKILL (out of memory?)")
        assert isinstance(pool.start({1: Context("count", 0)})[1], Started)


def test_a_worker_that_hangs() -> None:
    with make(timeout=4.0) as pool:
        with pytest.warns(PirlWarning, match="no answer"):
            answers = pool.start({0: Context("hang", 0), 1: Context("count", 1)})
        assert answers[0] == Lost(reason="its worker gave no answer for 4 s")
        assert isinstance(answers[1], Started)
        assert isinstance(pool.start({0: Context("count", 0)})[0], Started)
        assert pool.waited > 4


def test_workers_work_side_by_side(tmp_path: Path) -> None:
    """One after the other, the first would wait for the second in vain."""
    with make(partial(rollout_envs.meeting, tmp_path)) as pool:
        pool.start({0: Context("count", 0), 1: Context("count", 1)})
        answers = pool.advance({0: chunk(1), 1: chunk(1)}, every_picture=False)
        assert all(isinstance(answer, Advanced) for answer in answers.values())


def test_the_tabletop_is_the_same_in_processes() -> None:
    env = TabletopConfig(max_steps=8)
    chunks = np.random.default_rng(0).uniform(-1, 1, (4, 10, 32)).astype(np.float32)
    said = []
    for backend in ("local", "process"):
        with make_pool(env, RolloutConfig(backend=backend, num_envs=4, num_workers=2)) as pool:
            acts = chunks[:, :, : pool.info.action_dim]
            contexts = {slot: Context(pool.info.tasks[slot % len(pool.info.tasks)], slot) for slot in range(4)}
            answers = [
                pool.start(contexts),
                pool.advance({slot: acts[slot, :3] for slot in range(4)}, every_picture=True),
                pool.advance({slot: acts[slot, 3:] for slot in (3, 1)}, every_picture=False),
            ]
            assert all(isinstance(answer, Started | Advanced) for part in answers for answer in part.values())
            said.append([plain(part) for part in answers])
    assert said[0] == said[1]


def test_an_answer_nobody_waited_for_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(num_workers=1) as pool:
        pool.start({0: Context("count", 0)})
        with monkeypatch.context() as patch:
            patch.setattr(ProcessWorker, "receive", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                pool.advance({0: chunk(1)}, every_picture=False)
        with pytest.warns(PirlWarning, match="not awaited"):
            started = pool.start({0: Context("count", 4)})[0]
        assert isinstance(started, Started)
        assert started.observation["state"][0] == 4


def test_starts_that_fail_are_repeated(tmp_path: Path) -> None:
    with pytest.warns(PirlWarning, match="OSError: libGL") as told:
        pool = make(partial(rollout_envs.late, tmp_path / "log", 2), num_workers=1)
    with pool:
        assert len(told) == pool.restarts == 2
        assert isinstance(pool.start({0: Context("count", 0)})[0], Started)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (rollout_envs.broken, r"3 times in a row(.|\n)*in broken\n(.|\n)*OSError: libGL.so.1: cannot open"),
        (rollout_envs.stillborn, r"3 times in a row(.|\n)*exit code 9"),
        (rollout_envs.sleepy, r"3 times in a row(.|\n)*its worker gave no answer for 0.4 s"),
    ],
)
def test_starts_that_always_fail(build: Build, told: str) -> None:
    with pytest.warns(PirlWarning), pytest.raises(EnvError, match=told):
        make(build, size=1, num_workers=1, start_timeout=0.4 if build is rollout_envs.sleepy else 30.0)


def test_a_worker_that_is_slow_to_start_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pirl.rollout.remote.START_NOTICE", 0.01)
    told = r"still starting; after 30 s \(rollout.worker_start_timeout\)"
    with (
        pytest.warns(PirlWarning, match=told),
        make(rollout_envs.slow, size=1, num_workers=1, start_timeout=30.0) as pool,
    ):
        assert isinstance(pool.start({0: Context("count", 0)})[0], Started)
    assert pool.restarts == 0


def test_errors_of_our_own_arrive_as_they_are() -> None:
    with pytest.raises(MissingExtraError) as caught:
        make(rollout_envs.missing)
    assert caught.value.message == "the ALOHA simulator needs the package 'gym_aloha', which is not installed"
    assert caught.value.hint == "pip install 'pirl[aloha]'"


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="2 environments for 3 workers"):
        make(num_workers=3)
    with pytest.raises(EnvError, match="cannot be sent to a worker"):
        make(lambda size: rollout_envs.counting(2 * size))
    pool = make(num_workers=1)
    pool.close()
    pool.close()
    with pytest.raises(EnvError, match="closed"):
        pool.start({0: Context("count", 0)})


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """Also those that hang, and where the parent has no time to say goodbye. The script has no guard, as in notebooks:
    workers must not run it again.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import rollout_envs\n"
        "from pirl.records import Context\n"
        "from pirl.rollout.workers import ProcessPool\n"
        "print('script', flush=True)\n"
        "pool = ProcessPool(rollout_envs.inspecting, size=2, num_workers=2, timeout=60)\n"
        "for slot, answer in pool.start({0: Context('count', 0), 1: Context('count', 0)}).items():\n"
        "    print(answer.observation['state'][0], flush=True)\n"
        "pool.start({1: Context('hang', 0)})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(rollout_envs.__file__).parent)}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "script\n"
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert not any(gone(pid) for pid in pids)
    finally:
        parent.kill()
        rest, _ = parent.communicate()
    assert rest == ""
    assert until(lambda: all(gone(pid) for pid in pids))
