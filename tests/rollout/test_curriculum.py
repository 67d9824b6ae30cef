"""The curriculum practises what is sometimes solved; its evidence is counted, fades, and survives a checkpoint."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.errors import ConfigError
from pirl.records import Context
from pirl.rollout.config import CurriculumConfig
from pirl.rollout.contexts import fixed_contexts
from pirl.rollout.curriculum import Curriculum
from pirl.rollout.pool import EnvInfo

TASKS = ("push", "pull", "turn")


def curriculum(seed: int = 3, *, num_inits: int | None = None, **settings: Any) -> Curriculum:
    info = EnvInfo(robot="synthetic", tasks=TASKS, num_inits=num_inits, max_steps=9, fps=5, action_dim=2)
    return Curriculum(CurriculumConfig(**settings), info, seed)


def test_the_posterior_is_beta() -> None:
    made = curriculum(fade=1.0)
    np.testing.assert_allclose(made.success, 0.5)  # uniform: Beta(1, 1)
    made.update([(Context("push", 7), 3, 1), (Context("turn", 8), 0, 4)])
    made.update([(Context("push", 9), 1, 1)])
    np.testing.assert_allclose(made.success, [(1 + 4) / (2 + 6), 1 / 2, 1 / (2 + 4)])


@pytest.mark.parametrize("contexts", [None, 400])
def test_held_out_states_are_never_drawn(contexts: int | None) -> None:
    """Of 50 listed states the last 10, with which validation begins; any other may be drawn."""
    made = curriculum(num_inits=50, contexts=contexts, held_out=10)
    drawn = {context for iteration in range(40) for context in made.draw(50, iteration)}
    assert {context.init for context in drawn} == set(range(40))
    info = EnvInfo(robot="synthetic", tasks=TASKS, num_inits=50, max_steps=9, fps=5, action_dim=2)
    validation = fixed_contexts(info, 10 * len(TASKS), "validation")
    assert {context.init for context in validation} == set(range(40, 50))
    assert not drawn & set(validation)
    assert max(one.init for one in curriculum(num_inits=50, contexts=150).draw(999, 0)) >= 40
    seeds = curriculum(held_out=10).draw(99, 0)
    assert seeds == curriculum().draw(99, 0)
    with pytest.raises(ConfigError, match="a task has 50 initial states"):
        curriculum(num_inits=50, held_out=50)


def test_evidence_fades() -> None:
    made = curriculum(fade=0.5)
    made.update([(Context("push", 7), 4, 0)])
    made.update([(Context("pull", 1), 0, 2)])
    made.update([])
    np.testing.assert_allclose(made.success, [(1 + 1) / (2 + 1), 1 / (2 + 1), 1 / 2])


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=3, max_size=3),
    target=st.floats(0.05, 0.95),
    floor=st.floats(0.001, 1.0),
)
def test_weights(counts: list[tuple[int, int]], target: float, floor: float) -> None:
    """Largest nearest (in this measure) to the target, p(1 - p) for one half, never below the floor."""
    made = curriculum(target=target, floor=floor)
    made.update([(Context(task, 0), *count) for task, count in zip(TASKS, counts, strict=True)])
    p, weights = made.success, made.weights
    assert weights.sum() == pytest.approx(1)
    plain = p**target * (1 - p) ** (1 - target)
    assert weights[plain.argmax()] == pytest.approx(weights.max())
    assert weights.min() >= floor * weights.max() * (1 - 1e-9)
    halves = curriculum(floor=1e-9)
    halves.restore(made.state())
    np.testing.assert_allclose(halves.weights, p * (1 - p) / (p * (1 - p)).sum(), rtol=1e-6)


@pytest.mark.parametrize("target", [0.2, 0.5, 0.8])
def test_the_maximum_is_at_the_target(target: float) -> None:
    made = curriculum(contexts=99, target=target, floor=1e-6)
    rates = np.arange(1, 100) / 100
    made.restore({"counts": np.stack([1e6 * rates, 1e6 * (1 - rates)], axis=1).tolist()})
    assert rates[made.weights.argmax()] == pytest.approx(target)


def test_draws_follow_the_weights_and_the_seed() -> None:
    made = curriculum(floor=0.01)
    made.update([(Context("push", 0), 500, 500), (Context("pull", 0), 1000, 0), (Context("turn", 0), 900, 100)])
    drawn = made.draw(4000, iteration=1)
    shares = [sum(context.task == task for context in drawn) / 4000 for task in TASKS]
    np.testing.assert_allclose(shares, made.weights, atol=0.03)
    assert len({context.init for context in drawn}) > 3990  # fresh initial states
    assert made.draw(4000, iteration=1) == drawn == curriculum_like(made).draw(4000, iteration=1)
    for other in (
        made.draw(4000, iteration=2),
        made.draw(4000, 1, already=1),
        curriculum_like(made, seed=4).draw(4000, 1),
    ):
        assert other != drawn


def curriculum_like(made: Curriculum, seed: int = 3) -> Curriculum:
    """Another one, with its evidence from JSON."""
    other = curriculum(seed, floor=made.config.floor)
    other.restore(json.loads(json.dumps(made.state())))
    return other


def test_without_it_all_are_alike() -> None:
    made = curriculum(enabled=False)
    made.update([(Context("push", 0), 500, 500), (Context("pull", 0), 1000, 0)])
    np.testing.assert_allclose(made.weights, 1 / 3)


def test_a_fixed_set_is_kept_and_told_apart() -> None:
    made = curriculum(contexts=5, fade=1.0)
    drawn = {context for iteration in range(40) for context in made.draw(3, iteration)}
    assert len(drawn) == 5
    chosen = min(drawn)
    made.update([(chosen, 0, 8), (Context("push", 123456), 8, 0)])  # the second is none of them
    assert sorted(made.success.tolist()) == [pytest.approx(0.1), *[0.5] * 4]
    assert {context for iteration in range(400) for context in made.draw(3, iteration)} == drawn


def test_a_context_drawn_twice_in_a_round_counts_twice() -> None:
    made = curriculum(contexts=1, fade=1.0)
    drawn = made.draw(4, 0)
    assert len(drawn) == 4
    assert len(set(drawn)) == 1
    made.update([(context, 1, 2) for context in drawn])
    assert made.success.tolist() == [pytest.approx((1 + 4) / (2 + 12))]


def test_a_short_list_is_practised_whole() -> None:
    made = curriculum(contexts=12, num_inits=4)
    assert len(made.success) == 12
    assert len({context for iteration in range(60) for context in made.draw(4, iteration)}) == 12


def test_metrics() -> None:
    made = curriculum(floor=1.0)
    made.update([(Context("push", 0), 98, 0), (Context("pull", 0), 0, 98)])
    assert made.metrics() == pytest.approx(
        {
            "curriculum/success_mean": (0.99 + 0.01 + 0.5) / 3,
            "curriculum/solved_share": 1 / 3,
            "curriculum/hopeless_share": 1 / 3,
            "curriculum/entropy": 1.0,
        }
    )


def test_other_arms_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 5 arms, this one 3"):
        curriculum().restore(curriculum(contexts=5).state())
    for wrong in ({"target": 1.0}, {"floor": 0.0}, {"fade": 1.5}, {"contexts": 0}):
        with pytest.raises(ConfigError, match=f"CurriculumConfig: {next(iter(wrong))} is"):
            CurriculumConfig(**wrong)
