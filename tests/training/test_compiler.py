"""Options for the compiler: on a GPU, and only those that it knows."""

import pytest

from pirl.training import compiler


def test_none_without_a_gpu() -> None:
    assert compiler.for_training(transformer=True) == {}
    assert compiler.for_acting() == {}


def test_what_the_compiler_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cuda_capability", lambda: (9, 0))
    wanted = dict(compiler.TRAINING)
    monkeypatch.setattr(compiler, "TRAINING", wanted | {"xla_gpu_no_such_thing": True})
    assert compiler.for_training() == wanted
    assert compiler.for_training(transformer=True) == wanted | compiler.TRANSFORMER
    assert compiler.for_acting() == compiler.ACTING
