"""What is trained on, chosen by and reported are different initial states, wherever there are enough of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.records import Context
from pirl.rollout.contexts import distinct_contexts, fixed_contexts, random_contexts
from pirl.rollout.pool import EnvInfo


def info(tasks: int = 3, num_inits: int | None = None) -> EnvInfo:
    names = tuple(f"task {i}" for i in range(tasks))
    return EnvInfo(robot="synthetic", tasks=names, num_inits=num_inits, max_steps=9, fps=5, action_dim=2)


@settings(max_examples=50, deadline=None)
@given(tasks=st.integers(1, 6), count=st.integers(1, 400), seed=st.integers(0, 2**32))
def test_splits_never_share_a_state(tasks: int, count: int, seed: int) -> None:
    here, rng = info(tasks), np.random.default_rng(seed)
    train = {*random_contexts(here, count, rng), *distinct_contexts(here, count, rng)}
    train |= set(fixed_contexts(here, count, "train"))
    validation, test = (set(fixed_contexts(here, count, split)) for split in ("validation", "test"))
    assert len(validation) == len(test) == count
    inits = [{context.init for context in split} for split in (train, validation, test)]
    assert sum(map(len, inits)) == len(set().union(*inits))
    assert min(map(min, inits)) >= 0


def test_the_splits_have_room() -> None:
    """The largest seed that training can draw lies below validation, and those are half a billion apart from test."""

    class Largest(np.random.Generator):
        def integers(self, high: int, size: int) -> np.ndarray:  # type: ignore[override]
            return np.full(size, high - 1)

    drawn = random_contexts(info(1), 2, Largest(np.random.PCG64()))
    first = {split: fixed_contexts(info(1), 1, split)[0].init for split in ("validation", "test")}
    assert drawn[0].init == first["validation"] - 1
    assert first["test"] - first["validation"] >= 2**29


def test_fixed_contexts_take_the_tasks_in_turn() -> None:
    found = fixed_contexts(info(2), 5, "validation")
    first = found[0].init
    assert found == [Context(f"task {task}", first + init) for task, init in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2))]
    assert fixed_contexts(info(2), 3, "validation") == found[:3]
    assert fixed_contexts(info(3), 2, "test", tasks=("task 2",))[1].task == "task 2"


def test_a_benchmark_s_list_is_its_test() -> None:
    """Test starts at the front, validation at the back: with half of the list or less they do not meet."""
    listed = info(2, num_inits=10)
    test, validation = (fixed_contexts(listed, 10, split) for split in ("test", "validation"))
    assert [context.init for context in test] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [context.init for context in validation] == [9, 9, 8, 8, 7, 7, 6, 6, 5, 5]
    assert len(set(fixed_contexts(listed, 40, "test"))) == 20  # there are no more
    assert all(0 <= context.init < 10 for context in random_contexts(listed, 200, np.random.default_rng(0)))


@pytest.mark.parametrize(("tasks", "inits", "wanted", "given"), [(2, 5, 7, 7), (2, 5, 10, 10), (2, 5, 30, 10)])
def test_distinct_contexts(tasks: int, inits: int, wanted: int, given: int) -> None:
    found = distinct_contexts(info(tasks, inits), wanted, np.random.default_rng(0))
    assert len(set(found)) == len(found) == given
    assert found == distinct_contexts(info(tasks, inits), wanted, np.random.default_rng(0))
    assert found != distinct_contexts(info(tasks, inits), wanted, np.random.default_rng(1))
