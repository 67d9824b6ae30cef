"""Options for the compiler: on a GPU, and only those that it knows."""

import pytest

from pirl.training import compiler


def test_none_without_a_gpu() -> None:
    compiler.options.cache_clear()
    assert compiler.options() == {}


def test_what_the_compiler_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(compiler, "WANTED", compiler.WANTED | {"xla_gpu_no_such_thing": True})
    compiler.options.cache_clear()
    found = compiler.options()
    compiler.options.cache_clear()
    assert "xla_gpu_no_such_thing" not in found
    assert found == {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}
