"""Environments on Ray, here a local one. No other test module starts Ray."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

import rollout_envs
from pirl.envs.config import TabletopConfig
from pirl.errors import EnvError, MissingExtraError, PirlWarning
from pirl.records import Context
from pirl.rollout.config import RolloutConfig
from pirl.rollout.make_pool import make_pool
from pirl.rollout.pool import Advanced, EnvPool, Lost, Started
from pirl.rollout.ray import RayPool
from pool_contract import PoolContract, chunk


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # it would leave a token in the home folder
        patch.delenv("RAY_ADDRESS", raising=False)
        ray = pytest.importorskip("ray")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


class TestRayPool(PoolContract):
    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[EnvPool]:
        with RayPool(rollout_envs.counting, size=5, num_workers=2, timeout=30.0) as pool:
            yield pool
            assert pool.restarts == 0


def test_actors_that_die_hang_or_are_killed_are_replaced() -> None:
    with RayPool(rollout_envs.inspecting, size=3, num_workers=2, timeout=5.0) as pool:
        started = pool.start({0: Context("count", 0), 1: Context("count", 0), 2: Context("die", 2)})
        states = [answer.observation["state"].tolist() for answer in started.values() if isinstance(answer, Started)]
        assert [state[1] for state in states] == [False] * 3, "jax is not imported"
        assert [state[3:] for state in states] == [[1, 1]] * 3, "threads"

        with pytest.warns(PirlWarning, match="restarted"):
            answers = pool.advance({1: chunk(3), 2: chunk(3)}, every_picture=False)
        assert isinstance(answers[1], Advanced)
        assert isinstance(answers[2], Lost)
        assert "ActorDiedError" in answers[2].reason
        assert "common causes" not in answers[2].reason
        assert pool.advance({0: chunk(1)}, every_picture=False)[0] == answers[2]

        os.kill(states[1][0], signal.SIGKILL)
        with pytest.warns(PirlWarning, match="ActorDiedError"):
            assert isinstance(pool.advance({1: chunk(1)}, every_picture=False)[1], Lost)

        with pytest.warns(PirlWarning, match="no answer"):
            hanging = pool.start({0: Context("hang", 0), 1: Context("count", 1)})
        assert hanging[0] == Lost(reason="its worker gave no answer for 5 s")
        assert isinstance(hanging[1], Started)

        answers = pool.start({slot: Context("count", 0) for slot in range(3)})
        assert all(isinstance(answer, Started) for answer in answers.values())
        assert pool.restarts == 3


def test_errors_while_starting() -> None:
    with pytest.raises(MissingExtraError, match="gym_aloha"):
        RayPool(rollout_envs.missing, size=1, num_workers=1, timeout=30.0)
    with pytest.warns(PirlWarning, match="OSError"), pytest.raises(EnvError, match=r"in broken\n(.|\n)*libGL.so.1"):
        RayPool(rollout_envs.broken, size=1, num_workers=1, timeout=30.0)


def test_more_workers_than_cpus() -> None:
    began = time.monotonic()
    with (
        pytest.warns(PirlWarning, match="2 CPUs for 3 workers"),
        pytest.warns(PirlWarning, match="no answer for 1 s, while starting"),
        pytest.raises(EnvError, match="the Ray cluster has 2 CPUs"),
    ):
        RayPool(rollout_envs.counting, size=3, num_workers=3, timeout=30.0, start_timeout=1.0)
    assert time.monotonic() - began < 60


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"rollout\.backend=ray needs the package 'ray'(.|\n)*pirl\[ray\]"):
        make_pool(TabletopConfig(), RolloutConfig(backend="ray"))
