"""`model.remat` auto: the least recomputation that fits, decided where training begins."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from pirl.models.config import Pi0Config
from pirl.recipes import get_config
from pirl.training import plan as module
from pirl.training.memory import GIB


class _Device:
    def __init__(self, gib: float | None) -> None:
        self._stats = None if gib is None else {"bytes_limit": int(gib * GIB)}

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def remat_on(gib: float | None, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    config = get_config("bc_aloha_fold")
    config = replace(config, batch_size=32, model=replace(config.model, **({"remat": "auto"} | changes)))
    monkeypatch.setattr(jax, "local_devices", lambda: [_Device(gib)])
    decided = module.with_remat(config).model
    assert isinstance(decided, Pi0Config)
    return decided.remat


def test_it_is_the_default() -> None:
    assert Pi0Config().remat == "auto"


@pytest.mark.parametrize(("gib", "remat"), [(None, "none"), (132, "names"), (76, "full"), (20, "full")])
def test_the_least_that_fits(
    gib: float | None, remat: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights at batch 32: nothing recomputed is far too large, and where nothing fits the least is tried."""
    assert remat_on(gib, monkeypatch) == remat
    assert f"model.remat auto: {remat}" in capsys.readouterr().out


def test_what_was_said_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert remat_on(132, monkeypatch, remat="dots") == "dots"
    assert not capsys.readouterr().out
