"""Going back after divergence and out of memory: real NaNs, real overflows, an allocation no machine can make."""

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pirl
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.checkpoints.ownership import foreign_in_run
from pirl.checkpoints.run import Checkpoints
from pirl.cli.resume import saved_settings
from pirl.config import RLTrainConfig
from pirl.data.loader import ACRLPDDataLoader
from pirl.errors import CheckpointError, PirlWarning
from pirl.models.config import get_preset
from pirl.training import recovered
from pirl.training.config import SGD, ConstantSchedule, CosineSchedule, RecoveryConfig, slower
from pirl.training.metrics import DivergedError
from pirl.training.recovered import Recovery
from pirl.training.recovery import OutOfMemoryError, train
from small_runs import assert_same_bits, compiled_once, position_of, records, restored, small_run, steps_of

SEEN: list[int] = []
"""Bytes of all arrays on the devices, each time `Hungry` is built."""


@dataclass(frozen=True, kw_only=True)
class NaNConfig(BCConfig):
    agent: ClassVar[str] = f"{__name__}:NaNAtAStep"
    at: int = 5


class NaNAtAStep(BC):
    """Imitation whose loss is not a number at one update, whatever the batch."""

    def update(self, state: Any, batch: Any, key: Any) -> Any:
        spoilt = jnp.where(state.step == self.config.at - 1, jnp.nan, 1.0)  # type: ignore[attr-defined]
        return super().update(state, {**batch, "actions": batch["actions"] * spoilt}, key)


@dataclass(frozen=True, kw_only=True)
class HungryConfig(BCConfig):
    agent: ClassVar[str] = f"{__name__}:Hungry"
    parts_that_fit: int = 4


class Hungry(BC):
    """Imitation that sorts 2^45 numbers on the side, unless its batch is split into enough parts."""

    @classmethod
    def build(cls, config: Any, parts: Any) -> Any:
        gc.collect()
        SEEN.append(sum(array.nbytes for array in jax.live_arrays()))
        return super().build(config, parts)

    def update(self, state: Any, batch: Any, key: Any) -> Any:
        state, metrics = super().update(state, batch, key)
        if self.config.parts < self.config.parts_that_fit:  # type: ignore[attr-defined]
            metrics["waste"] = jnp.sort(jax.random.uniform(key, (2**45,)))[7]
        return state, metrics


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory.mktemp("programs")):
        yield


def config_of(folder: Path, agent: Any = None, **changes: Any) -> RLTrainConfig:
    config = small_run(folder, agent or BCConfig(), num_train_steps=8, log_interval=1, **changes)
    return replace(config, checkpoint=replace(config.checkpoint, save_interval=2))


def poison(patch: pytest.MonkeyPatch, number: int, value: float = np.nan) -> None:
    """From now on the batch of this number has such a number among its actions."""
    sample_batch = ACRLPDDataLoader.sample_batch

    def poisoned(loader: ACRLPDDataLoader) -> Any:
        at, batch = loader.step, sample_batch(loader)
        if at == number:
            actions = np.array(batch["actions"])
            actions[0, 0, 0] = value
            batch["actions"] = jax.device_put(actions, batch["actions"].sharding)
        return batch

    patch.setattr(ACRLPDDataLoader, "sample_batch", poisoned)


def rate_of(config: RLTrainConfig) -> float:
    schedule = config.policy_schedule
    return schedule.lr if isinstance(schedule, ConstantSchedule) else schedule.peak_lr


@pytest.mark.parametrize("number", [4, 1], ids=["from the last checkpoint", "from the beginning"])
def test_a_batch_that_spoils_the_loss_is_left_out(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, number)
    config = config_of(tmp_path)
    first, back_to = number - number % 2, number - number % 2
    with pytest.warns(PirlWarning, match=rf"goes back to step {back_to} .*diverged.*policy/loss = nan"):
        assert train(config) == 0
    assert steps_of(config) == [2, 4, 6, 8]
    assert position_of(config)["stream"]["data"]["step"] == 8 + number + 1 - first
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(restored(config)))
    (once,) = recovered.read(config.run_dir)
    assert (once.back_to, once.skipped) == (back_to, (first, number + 1))
    # The run says so: in its settings, its metrics since then and not before, its checkpoints and its last words.
    assert rate_of(saved_settings(config.run_dir)) == rate_of(config) / 2
    told = {line["step"]: line["values"].get(recovered.METRIC) for line in records(config.run_dir)}
    assert told == {step: 1.0 if step > back_to else None for step in range(1, 9)}
    with Checkpoints(config.run_dir, config.checkpoint, read_only=True) as saved:
        assert [one["back_to"] for one in saved.metadata(8)["recoveries"]] == [back_to]
    assert f"back to step {back_to} (" in capsys.readouterr().out


def test_resumed_it_remembers_and_stays_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run goes back and to its end; another is stopped after it went back, and resumed with the first settings."""
    poison(monkeypatch, 2)
    whole, pieces = config_of(tmp_path / "whole"), config_of(tmp_path / "pieces")
    with pytest.warns(PirlWarning, match="goes back"):
        assert train(whole) == 0
    with pytest.warns(PirlWarning, match="goes back"):
        assert train(replace(pieces, num_train_steps=4)) == 0
    with pytest.warns(PirlWarning, match=r"recovered 1 time\(s\) and keeps the changed settings: policy_schedule\.lr"):
        assert train(pieces, resume=True) == 0
    assert_same_bits(restored(pieces), restored(whole))
    assert records(pieces.run_dir) == records(whole.run_dir)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_an_absurd_learning_rate_is_lowered(tmp_path: Path) -> None:
    config = config_of(tmp_path, policy_optimizer=SGD(), policy_schedule=ConstantSchedule(lr=1e9))
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, save_interval=5),
        recovery=RecoveryConfig(learning_rate=1e-6),
    )
    with pytest.warns(PirlWarning, match=r"goes back to step 0 .*policy_schedule\.lr 1000000000\.0 -> 1000\.0"):
        assert train(config) == 0
    assert [one.back_to for one in recovered.read(config.run_dir)] == [0, 0]
    assert rate_of(saved_settings(config.run_dir)) == pytest.approx(1e-3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(restored(config)))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_checkpoint_that_is_finite_and_spoilt_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth batch makes weights huge, the fourth step is saved, and nothing works from there."""
    poison(monkeypatch, 3, 1e10)
    config = config_of(tmp_path, policy_optimizer=SGD(), policy_schedule=ConstantSchedule(lr=1e-3))
    with pytest.warns(PirlWarning, match="goes back to step 2"):
        assert train(config) == 0
    assert [one.back_to for one in recovered.read(config.run_dir)] == [4, 2]
    assert steps_of(config) == [2, 4, 6, 8]
    assert (config.run_dir / "4.diverged-1" / "params").is_dir()
    assert not foreign_in_run(config.run_dir)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(restored(config).params)) < 100


def test_what_does_not_help_ends_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, NaNConfig(), recovery=RecoveryConfig(attempts=2))
    with pytest.warns(PirlWarning, match="Time 2 of at most 2"), pytest.raises(DivergedError, match="at step 5"):
        train(config)
    assert steps_of(config) == [2, 4]
    assert [one.skipped for one in recovered.read(config.run_dir)] == [(4, 5), (2, 5)]
    with pytest.warns(PirlWarning, match="recovered 2"), pytest.raises(DivergedError):
        train(config, resume=True)  # a restart does not get new attempts
    assert len(recovered.read(config.run_dir)) == 2


@pytest.mark.filterwarnings("error::pirl.errors.PirlWarning")
def test_one_flag_turns_it_off(tmp_path: Path) -> None:
    config = config_of(tmp_path, NaNConfig(), recovery=RecoveryConfig(attempts=0))
    with pytest.raises(DivergedError):
        train(config)
    assert not (config.run_dir / recovered.FILE).exists()
    with pytest.raises(OutOfMemoryError):
        train(replace(config, exp_name="hungry", agent=HungryConfig()))


def test_out_of_memory_it_goes_on_with_smaller_parts_and_frees_what_it_had(tmp_path: Path) -> None:
    config = config_of(tmp_path, HungryConfig())
    SEEN.clear()
    with pytest.warns(PirlWarning, match=r"goes back to step 0 \(out of memory: RESOURCE_EXHAUSTED") as said:
        assert train(config) == 0
    assert "agent.accumulate auto -> 2" in str(said[0].message)
    assert [one.changes for one in recovered.read(config.run_dir)] == [
        {"agent.accumulate": ("auto", 2)},
        {"agent.accumulate": (2, 4)},
    ]
    assert max(SEEN) < SEEN[0] + 2**14, "arrays of an attempt that failed are still there"
    plain = replace(config, exp_name="plain", agent=HungryConfig(accumulate=4))
    assert train(plain) == 0
    assert_same_bits(restored(config), restored(plain))  # nothing was learned twice, nothing left out


def test_nothing_left_to_go_on_with(tmp_path: Path) -> None:
    config = config_of(tmp_path, HungryConfig(parts_that_fit=99), recovery=RecoveryConfig(attempts=9))
    with pytest.warns(PirlWarning), pytest.raises(OutOfMemoryError, match="out of memory") as raised:
        train(config)
    assert "pirl plan" in raised.value.hint
    assert [one.changes["agent.accumulate"][1] for one in recovered.read(config.run_dir)] == [2, 4, 8]


def test_rematerialisation_comes_second(tmp_path: Path) -> None:
    from pirl.training.recovery import _lighter

    model = replace(get_preset("pi0_tiny"), remat="auto")
    config = replace(pirl.get_config("debug_bc"), model=model, batch_size=4)
    ladder = []
    while found := _lighter(config, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        config, _ = found
        ladder.append((config.agent.accumulate, config.model.remat))  # type: ignore[union-attr]
    assert ladder == [(2, "none"), (2, "full"), (4, "full")]


def test_other_errors_of_the_device_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> int:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is on fire")

    monkeypatch.setattr("pirl.training.loop.train", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="on fire"):
        train(config_of(tmp_path))


def test_settings_that_were_changed_since_stay(tmp_path: Path) -> None:
    config = config_of(tmp_path, policy_schedule=ConstantSchedule(lr=0.4))
    halved = [
        Recovery(kind="diverged", reason="", back_to=0, changes={"policy_schedule.lr": pair})
        for pair in ((0.4, 0.2), (0.2, 0.1))
    ]
    recovered.write(config.run_dir, halved)
    known = recovered.read(config.run_dir)
    assert known == tuple(halved)
    assert rate_of(recovered.remembered(config, known)) == 0.1
    for rate in (0.2, 0.1, 0.05):
        own = replace(config, policy_schedule=ConstantSchedule(lr=rate))
        assert rate_of(recovered.remembered(own, known)) == min(rate, 0.1)
    other = replace(config, policy_schedule=CosineSchedule())
    assert recovered.remembered(other, known) == other


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / recovered.FILE).write_text(json.dumps({"recoveries": [{"reason": "none"}]}))
    with pytest.raises(CheckpointError, match=recovered.FILE):
        recovered.read(tmp_path)


def test_positions_move_past_what_is_left_out() -> None:
    cut = [
        Recovery(kind="diverged", reason="", back_to=4, changes={}, skipped=pair) for pair in ((4, 6), (6, 9), (20, 21))
    ]
    steps = {at: recovered.beyond({"data": {"step": at}}, cut)["data"]["step"] for at in (3, 4, 5, 6, 8, 9, 19, 20)}
    assert steps == {3: 3, 4: 9, 5: 9, 6: 9, 8: 9, 9: 9, 19: 19, 20: 21}
    assert recovered.beyond({"collector": 1}, cut) == {"collector": 1}


def test_every_rate_of_a_schedule_is_lowered() -> None:
    assert slower(CosineSchedule(peak_lr=4.0, decay_lr=2.0), 0.5) == CosineSchedule(peak_lr=2.0, decay_lr=1.0)
    assert slower(ConstantSchedule(lr=4.0, warmup_steps=3), 0.5) == ConstantSchedule(lr=2.0, warmup_steps=3)
