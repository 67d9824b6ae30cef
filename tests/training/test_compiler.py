"""Options for the compiler: on a GPU, and only those that it knows."""

import pytest

from pirl.training import compiler


def test_none_without_a_gpu() -> None:
    compiler.options.cache_clear()
    assert compiler.options() == {}


def test_what_the_compiler_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cuda_capability", lambda: (9, 0))
    wanted = dict(compiler.WANTED)
    monkeypatch.setattr(compiler, "WANTED", wanted | {"xla_gpu_no_such_thing": True})
    compiler.options.cache_clear()
    found, more = compiler.options(), compiler.options(all_trains=True)
    compiler.options.cache_clear()
    assert found == wanted
    assert more == wanted | compiler.WHERE_ALL_TRAINS
