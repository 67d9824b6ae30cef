"""Rates, intervals and comparisons are those of the textbooks; an evaluation is decided by its contexts and its key."""

import math
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.data.robots import get_robot
from pirl.data.transforms import Transform
from pirl.envs.env import EnvBatch, Outcome, RobotEnv, SeparateEnvs
from pirl.errors import EnvError, PirlWarning
from pirl.records import Context
from pirl.rollout.contexts import fixed_contexts
from pirl.rollout.evaluate import Z95, Comparison, Evaluation, Rate, Trial, compare, evaluate
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import LocalPool


class Walk(RobotEnv):
    """A point that is pushed; it has arrived beyond 1. The task `broken` ends in an error instead."""

    robot = "synthetic"
    tasks = ("walk", "broken")
    max_steps = 9
    fps = 5
    action_dim = 2

    def begin(self, context: Context) -> None:
        self.context, self.steps = context, 0
        self.place = np.random.default_rng(context.init).uniform(-0.5, 0.5, 2).astype(np.float32)

    def act(self, action: np.ndarray) -> Outcome:
        if self.context.task == "broken":
            raise EnvError("a wheel came off")
        self.steps += 1
        self.place = self.place + action
        there = bool(self.place[0] > 1)
        return Outcome(float(there), there, self.steps == self.max_steps, there)

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        return {"state": self.place, "prompt": self.context.task}


def walks(size: int) -> EnvBatch:
    return SeparateEnvs([Walk() for _ in range(size)])


def walker(batch_size: int, seed: int = 0) -> ChunkPolicy:
    """Goes right by 0.2 on average, with noise from each row's key."""

    def act(weights: Any, observation: Any, keys: Any) -> Any:
        return weights + 0.3 * jax.vmap(lambda key: jax.random.normal(key, (3, 2)))(keys)

    transform = Transform(robot=get_robot("synthetic"), norm_stats=None, tokenizer=None, action_dim=2)
    policy = ChunkPolicy(act, transform, batch_size=batch_size, execute=2, cameras=())
    return policy.use(jnp.float32(0.2), jax.random.key(seed))


# Newcombe 1998 (Statistics in Medicine 17, table I, method 3), and 10 trials for the symmetry.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    rate = Rate(successes=successes, trials=trials)
    assert rate.interval == pytest.approx((low, high), abs=5e-5)
    for bound in rate.interval:  # both ends are as far from the observed rate as their own deviation allows
        assert (rate.value - bound) ** 2 == pytest.approx(Z95**2 * bound * (1 - bound) / trials, abs=1e-12)


def test_a_rate_of_nothing() -> None:
    assert math.isnan(Rate(successes=0, trials=0).value)
    assert Rate(successes=0, trials=0).interval == (0.0, 1.0)
    assert str(Rate(successes=5, trials=10)) == "0.500 [0.237, 0.763]"


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 5), (2, 7), (4, 4), (9, 1)])
def test_mcnemar_is_exact(first: int, second: int) -> None:
    """The share of all 2^n ways the differing pairs could have fallen that are at least as uneven as this one."""
    n = first + second
    uneven = [abs(2 * sum(way) - n) >= abs(first - second) for way in product((0, 1), repeat=n)]
    found = Comparison(both=3, neither=8, only_first=first, only_second=second)
    assert found.p_value == pytest.approx(sum(uneven) / len(uneven), abs=1e-12)
    assert found.difference == pytest.approx((second - first) / (n + 11))


def outcomes(*successes: int, task: str = "walk") -> Evaluation:
    trials = [
        Trial(context=Context(task, i), success=bool(s), reward=float(s), length=5) for i, s in enumerate(successes)
    ]
    return Evaluation(trials=trials)


def test_comparisons_pair_contexts_whatever_their_order() -> None:
    first, second = outcomes(1, 1, 0, 0, 1), outcomes(1, 0, 1, 0, 1)
    expected = Comparison(both=2, neither=1, only_first=1, only_second=1)
    assert compare(first, second) == expected
    assert compare(first, Evaluation(trials=second.trials[::-1])) == expected


@pytest.mark.parametrize(
    "other", [outcomes(1, 0), outcomes(1, 0, 1, task="run"), Evaluation(trials=[*outcomes(1, 0).trials] * 2)]
)
def test_other_contexts_are_not_compared(other: Evaluation) -> None:
    for pair in ((outcomes(1, 0, 1), other), (other, outcomes(1, 0, 1))):
        with pytest.raises(EnvError, match="do not have the same contexts"):
            compare(*pair)


def test_the_number_of_environments_does_not_matter() -> None:
    results = []
    for size in (1, 3, 7):
        with LocalPool(walks, size) as pool:
            contexts = fixed_contexts(pool.info, 8, "test", tasks=("walk",))
            results.append(evaluate(pool, walker(7), contexts).to_json())
    assert results[0] == results[1] == results[2]
    assert 0 < results[0]["success"]["successes"] < 8
    with LocalPool(walks, 4) as pool:
        assert evaluate(pool, walker(4, seed=1), contexts).to_json() != results[0]


def test_lost_episodes_are_failures_and_say_why() -> None:
    with LocalPool(walks, 2) as pool:
        contexts = fixed_contexts(pool.info, 6, "test")
        with pytest.warns(PirlWarning, match="a wheel came off"):
            found = evaluate(pool, walker(2), contexts, retries=1)
    assert [trial.context for trial in found.trials] == contexts
    assert [trial.error for trial in found.trials[1::2]] == ["a wheel came off"] * 3
    assert found.by_task["broken"] == Rate(successes=0, trials=3)
    assert found.by_task["walk"].trials == 3
    done = [trial for trial in found.trials if trial.error is None]
    assert found.metrics()["eval/length"] == pytest.approx(np.mean([trial.length for trial in done]))
    assert found.to_json()["episodes"][1]["error"] == "a wheel came off"
