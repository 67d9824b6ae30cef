"""`checkpoint.save params`: the newest step can be resumed, the others act, and none of them counts as damaged."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import pirl
from pirl.agents.config import ACRLPDConfig
from pirl.build import build_agent
from pirl.checkpoints.checksums import changed_files, damage, read_checksums, write_checksums
from pirl.checkpoints.lighten import can_be_resumed
from pirl.checkpoints.ownership import foreign_in_run
from pirl.checkpoints.run import Checkpoints
from pirl.cli import app
from pirl.config import RLTrainConfig
from pirl.errors import CheckpointError
from pirl.training import preflight
from pirl.training.loop import train
from small_runs import assert_same_bits, compiled_once, records, restored, small_run, steps_of

AGENT = ACRLPDConfig(discount=0.9, num_action_samples=2, flow_steps=2)


def config_of(folder: Path) -> RLTrainConfig:
    config = small_run(folder, AGENT, num_train_steps=8, log_interval=1)
    return replace(config, checkpoint=replace(config.checkpoint, save_interval=2, save="params"))


def resumable(config: RLTrainConfig) -> list[int]:
    return [step for step in steps_of(config) if can_be_resumed(config.run_dir / str(step))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RLTrainConfig, RLTrainConfig]:
    """One in two pieces that keeps weights, one in one piece that keeps all."""
    folder = tmp_path_factory.mktemp("lighten")
    light, full = config_of(folder / "light"), config_of(folder / "full")
    full = replace(full, checkpoint=replace(full.checkpoint, save="full"))
    with compiled_once(tmp_path_factory.mktemp("programs")):
        assert train(replace(light, num_train_steps=4)) == 0
        assert resumable(light) == [4]
        assert train(light, resume=True) == 0
        assert train(full) == 0
    return light, full


def test_the_run_is_the_same_and_its_newest_step_is_whole(runs: tuple[RLTrainConfig, RLTrainConfig]) -> None:
    light, full = runs
    assert (steps_of(light), resumable(light)) == ([2, 4, 6, 8], [8])
    assert_same_bits(restored(light), restored(full))
    assert records(light.run_dir) == records(full.run_dir)
    assert not foreign_in_run(light.run_dir)


def test_the_others_are_whole_and_act_alike(
    runs: tuple[RLTrainConfig, RLTrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    light, _ = runs
    assert app.main(["verify", str(light.run_dir)]) == 0
    assert capsys.readouterr().out.count(": whole, ") == 4
    seen = {"state": np.zeros(2, np.float32)}
    chunks = [pirl.open_checkpoint(one.run_dir / "4").chunk(seen, seed=3) for one in runs]
    assert (chunks[0] == chunks[1]).all()
    sizes = [sum(f.stat().st_size for f in (one.run_dir / "4").rglob("*") if f.is_file()) for one in runs]
    assert sizes[0] < sizes[1] / 2


def test_they_cannot_be_resumed_and_say_so(runs: tuple[RLTrainConfig, RLTrainConfig]) -> None:
    light, _ = runs
    with pytest.raises(CheckpointError, match="holds weights only") as raised:
        restored(light, 4)
    assert "--init-weights" in raised.value.hint
    largest = max((light.run_dir / "8/train_state").rglob("*"), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    try:
        largest.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match="step 8 is damaged") as raised:
            restored(light)
        assert "no earlier step is intact" in raised.value.hint  # to go on from
    finally:
        largest.write_bytes(content)


def test_a_step_whose_training_state_is_lost_is_damaged(runs: tuple[RLTrainConfig, RLTrainConfig]) -> None:
    _, full = runs
    item = full.run_dir / "2/train_state"
    item.rename(full.run_dir / "2/elsewhere")
    try:
        assert "train_state" in damage(full.run_dir / "2")
    finally:
        (full.run_dir / "2/elsewhere").rename(item)


def test_killed_in_between_it_is_whole_and_finished_later(tmp_path: Path) -> None:
    shape = {"policy": {"w": jax.numpy.ones((4, 4))}}
    state = pirl.agents.agent.TrainState(step=jax.numpy.int32(0), params=shape)
    config = replace(config_of(tmp_path).checkpoint, async_save=False)
    with Checkpoints(tmp_path / "run", replace(config, save="full")) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    step = tmp_path / "run/1"
    sums = {name: text for name, text in read_checksums(step).items() if not name.startswith("train_state/")}
    write_checksums(step / "extra/checksums.sha256", sums)  # and then the power went
    assert damage(step) == ""
    (step / "notes.txt").write_text("mine")
    with Checkpoints(tmp_path / "run", config) as checkpoints:
        checkpoints.save(3, state)
        assert can_be_resumed(step), "somebody keeps files there"
        (step / "notes.txt").unlink()
        checkpoints.save(4, state)
    assert [can_be_resumed(tmp_path / "run" / str(number)) for number in (1, 2, 3, 4)] == [False, False, False, True]
    assert [changed_files(tmp_path / "run" / str(number)) for number in (1, 2, 3, 4)] == [[]] * 4
    assert not list((tmp_path / "run").glob(".*deleted"))


def test_the_disk_they_need_is_reckoned(tmp_path: Path) -> None:
    light = config_of(tmp_path)
    full = replace(light, checkpoint=replace(light.checkpoint, save="full"))
    shapes = jax.eval_shape(build_agent(light).init, jax.random.key(0))
    (least, steps), (most, same) = (preflight.checkpoint_bytes(one, shapes) for one in (light, full))
    assert steps == same == 4
    assert least < most
    one, two = (preflight.checkpoint_bytes(replace(one, num_train_steps=2), shapes)[0] for one in (light, full))
    assert one == two == most / 4
