"""The contract of every environment pool, as tests that each pool's test module inherits."""

from typing import Any

import numpy as np
import pytest

import rollout_envs
from pirl.records import Context
from pirl.rollout.pool import Advanced, EnvPool, LocalPool, Lost, Started


def chunk(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(length, 2)).astype(np.float32)


def plain(answer: Any) -> Any:
    """An answer with arrays replaced by comparable values and dtypes."""
    match answer:
        case np.ndarray():
            return str(answer.dtype), answer.tolist()
        case dict():
            return {key: plain(value) for key, value in answer.items()}
        case list():
            return [plain(value) for value in answer]
        case Started() | Advanced() | Lost():
            return type(answer).__name__, plain(vars(answer))
    return answer


def play(pool: EnvPool) -> list[Any]:
    """A sequence of calls: all slots, some slots, an episode that ends inside a chunk, a restarted slot."""
    said = [
        pool.start({slot: Context("count", 10 + slot) for slot in range(5)}),
        pool.advance({slot: chunk(3, slot) for slot in range(5)}, every_picture=False),
        pool.advance({4: chunk(1, 6), 1: chunk(6, 7), 2: chunk(2, 8)}, every_picture=True),
        pool.start({1: Context("count forever", 3)}),
        pool.advance({slot: chunk(4, slot) for slot in (0, 1)}, every_picture=False),
        pool.advance({1: chunk(9)}, every_picture=False),
    ]
    return [plain(answers) for answers in said]


class PoolContract:
    """Inherit this and provide a fixture `pool` with 5 slots of `rollout_envs.counting`."""

    def test_describes_its_environments(self, pool: EnvPool) -> None:
        assert isinstance(pool, EnvPool)
        assert (pool.size, pool.info.robot, pool.info.action_dim, pool.info.num_inits) == (5, "counting", 2, None)
        assert (pool.info.max_steps, pool.info.fps, pool.info.tasks[0]) == (12, 5, "count")

    def test_answers_are_the_same_everywhere_and_again(self, pool: EnvPool) -> None:
        with LocalPool(rollout_envs.counting, 5) as local:
            expected = play(local)
        assert play(pool) == expected
        assert play(pool) == expected

    def test_a_chunk(self, pool: EnvPool) -> None:
        started = pool.start({2: Context("count", 5), 3: Context("count", 6)})
        assert list(started) == [2, 3]
        assert isinstance(started[2], Started)
        np.testing.assert_array_equal(started[2].observation["state"], [5, 0, 0, 0])
        assert {"camera 0", "camera 1"} <= started[2].observation.keys()

        actions = chunk(5)
        advanced = pool.advance({2: actions}, every_picture=False)[2]
        assert isinstance(advanced, Advanced)
        np.testing.assert_allclose(advanced.rewards, np.arange(1, 6) + actions[:, 0], rtol=1e-6)
        np.testing.assert_allclose(advanced.observations[-1]["state"], [5, 5, *actions.sum(0)], rtol=1e-5)
        assert ["camera 0" in seen for seen in advanced.observations] == [False] * 4 + [True]
        assert (advanced.terminated, advanced.truncated, advanced.success) == (False, False, False)

        ended = pool.advance({2: actions}, every_picture=True)[2]
        assert isinstance(ended, Advanced)
        assert len(ended.observations) == len(ended.rewards) == 2
        assert all("camera 0" in seen for seen in ended.observations)
        assert (ended.terminated, ended.truncated, ended.success) == (True, False, True)

    def test_answers_can_be_written_to(self, pool: EnvPool) -> None:
        """Views into a pipe's or object store's memory would be read-only and keep that memory allocated."""
        started = pool.start({0: Context("count", 0)})[0]
        assert isinstance(started, Started)
        assert started.observation["camera 0"].flags.writeable

    @pytest.mark.parametrize(
        ("task", "reason"),
        [
            ("raise", "the cup broke at step 2"),
            ("nan reward", "the environment's reward is nan"),
            ("nan state", "observation 'state' of shape (4,) is not finite"),
            ("grow", "observation 'state' has shape (5,); before, it had (4,)"),
        ],
    )
    def test_a_slot_that_fails_is_lost_alone(self, pool: EnvPool, task: str, reason: str) -> None:
        everyone = range(5)
        pool.start({slot: Context(task if slot == 2 else "count", 2) for slot in everyone})
        answers = pool.advance({slot: chunk(4) for slot in everyone}, every_picture=False)
        assert answers.pop(2) == Lost(reason=reason)
        assert [len(answer.rewards) for answer in answers.values() if isinstance(answer, Advanced)] == [4] * 4
        assert isinstance(pool.start({2: Context("count", 2)})[2], Started)
        assert isinstance(pool.advance({2: chunk(2)}, every_picture=False)[2], Advanced)

    def test_a_slot_that_cannot_start_is_lost_alone(self, pool: EnvPool) -> None:
        answers = pool.start({0: Context("raise", 0), 1: Context("juggle", 0), 2: Context("count", 0)})
        assert answers[0] == Lost(reason="the cup broke at step 0")
        assert answers[1] == Lost(reason="unknown task 'juggle'")
        assert isinstance(answers[2], Started)

    def test_time_is_counted(self, pool: EnvPool) -> None:
        before = pool.waited  # type: ignore[attr-defined]
        pool.start({0: Context("count", 0)})
        assert before < pool.waited < before + 10  # type: ignore[attr-defined]
