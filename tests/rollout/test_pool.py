"""Environments in this process, and what all pools do with misbehaving batches."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

import rollout_envs
from pirl.records import Context
from pirl.rollout.pool import Advanced, EnvPool, LocalPool, Lost
from pool_contract import PoolContract, chunk


class TestLocalPool(PoolContract):
    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[EnvPool]:
        with LocalPool(rollout_envs.counting, 5) as pool:
            yield pool


def test_a_vectorised_batch_that_fails_loses_all_that_acted() -> None:
    with LocalPool(rollout_envs.VectorisedEnvs, 3) as pool:
        pool.start({0: Context("count", 0), 1: Context("raise", 1), 2: Context("count", 0)})
        answers = pool.advance({0: chunk(2), 1: chunk(2)}, every_picture=False)
        assert answers == dict.fromkeys((0, 1), Lost(reason="beside a slot that failed: the cup broke at step 1"))
        still = pool.advance({2: chunk(2)}, every_picture=False)[2]
        assert isinstance(still, Advanced)
        np.testing.assert_array_equal(still.observations[-1]["state"][1], 2)


def test_outcomes_that_do_not_fit_are_a_loss_not_a_crash() -> None:
    with LocalPool(partial(rollout_envs.VectorisedEnvs, wrong=True), 2) as pool:
        pool.start({0: Context("count", 0), 1: Context("count", 0)})
        for answer in pool.advance({0: chunk(2), 1: chunk(2)}, every_picture=False).values():
            assert isinstance(answer, Lost)
            assert "shorter" in answer.reason or "longer" in answer.reason


def test_actions_that_no_robot_can_execute() -> None:
    with LocalPool(rollout_envs.counting, 2) as pool:
        pool.start({0: Context("count", 0), 1: Context("count", 0)})
        bad = chunk(3)
        bad[1, 0] = np.nan
        answers = pool.advance({0: bad, 1: chunk(3)}, every_picture=False)
        assert isinstance(answers[0], Lost)
        assert "expected 2 finite numbers" in answers[0].reason
        assert isinstance(answers[1], Advanced)


def test_nothing_to_do() -> None:
    with LocalPool(rollout_envs.counting, 1) as pool:
        assert pool.start({}) == {} == pool.advance({}, every_picture=True)


def test_closing_closes_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(rollout_envs.CountingEnv, "close", lambda env: closed.append(1))
    with LocalPool(rollout_envs.counting, 2):
        assert not closed
    assert closed == [1, 1]
