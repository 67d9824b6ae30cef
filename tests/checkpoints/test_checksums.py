"""Every byte of a step is checked when it is read, or by `pirl verify`; the last whole step is named."""

import random
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents.agent import TrainState
from pirl.checkpoints.checksums import changed_files, read_checksums
from pirl.checkpoints.openpi import save_openpi
from pirl.checkpoints.run import Checkpoints
from pirl.checkpoints.weights import load_openpi
from pirl.cli import app
from pirl.data.normalize import NormStats
from pirl.errors import CheckpointError
from pirl.training.config import CheckpointConfig

KEEP = CheckpointConfig(keep_last=9, async_save=False)
NORM = {"robot": {"state": NormStats(mean=np.zeros(2), std=np.ones(2))}}


def make_state(seed: int) -> TrainState:
    params = {"policy": {"a": {"kernel": jax.random.normal(jax.random.key(seed), (40, 30))}}}
    opt = {"policy": optax.adam(1e-3).init(params["policy"])}
    return TrainState(step=jnp.asarray(seed), params=params, target={}, ema={}, opt=opt)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("saved") / "run"
    with Checkpoints(run, KEEP, run={"config": {"seed": 1}}, norm_stats=NORM) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), extra={"step": step, "pending": [0.1]}, metrics={"loss": 0.5})
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(file: Path, random: random.Random) -> None:
    """One bit."""
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def restore(run: Path, step: int | None = None) -> TrainState:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state(0))
    with Checkpoints(run, KEEP, read_only=True) as checkpoints:
        checkpoints.extra(step)
        return checkpoints.restore(shapes, step)


def test_any_flipped_bit_is_found_and_the_last_whole_step_named(run: Path) -> None:
    names = [*read_checksums(run / "3"), "extra/extra.json"]
    assert len(names) > 8
    for number, name in enumerate(names):
        whole = (run / "3" / name).read_bytes()
        flip(run / "3" / name, random.Random(number))
        with pytest.raises(CheckpointError, match="step 3 is damaged") as caught:
            restore(run)
        assert f"step 2 is intact: move {run / '3'} away" in caught.value.hint, name
        (run / "3" / name).write_bytes(whole)
    assert restore(run).step == 3


@pytest.mark.parametrize("name", ["extra/extra.json", "extra/metadata.json", "extra/checksums.sha256"])
@pytest.mark.parametrize("content", [None, "", "{}"])
def test_files_of_a_step_that_are_empty_or_gone(name: str, content: str | None, run: Path) -> None:
    if content is None:
        (run / "3" / name).unlink()
    else:
        (run / "3" / name).write_text(content)
    if (content, name) == (None, "extra/checksums.sha256"):
        assert restore(run).step == 3  # as a step of an earlier version
        return
    with pytest.raises(CheckpointError, match="step 3 is damaged") as caught:
        restore(run)
    assert "step 2 is intact" in caught.value.hint


def test_a_damaged_older_step_does_not_stop_a_run(run: Path) -> None:
    for name in ("extra.json", "metadata.json"):
        (run / "1" / "extra" / name).write_text("")
    best = CheckpointConfig(keep_last=2, async_save=False)
    with Checkpoints(run, best) as checkpoints:
        assert [extra["step"] for extra in checkpoints.extras()] == [2, 3]
        checkpoints.save(4, make_state(4), extra={"step": 4})


def test_an_amended_step_is_whole(run: Path) -> None:
    with Checkpoints(run, KEEP) as checkpoints:
        checkpoints.amend(3, {"step": 3, "later": True})
        assert checkpoints.extra(3) == {"step": 3, "later": True}
    assert changed_files(run / "3") == []


def test_weights_and_statistics_are_checked_when_they_are_loaded(run: Path, tmp_path: Path) -> None:
    export = save_openpi({"a": {"kernel": np.ones((40, 30), np.float32)}}, tmp_path / "out", norm_stats={})
    for folder in (run / "3", export):
        load_openpi(folder)
        largest = max((folder / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
        flip(largest, random.Random(0))
        with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
            load_openpi(folder)
    flip(run / "2/assets/robot/norm_stats.json", random.Random(1))
    with pytest.raises(CheckpointError, match=r"step 2 is damaged.*\n.*norm_stats"):
        load_openpi(run / "2")


def test_verify_tells_of_every_step(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": whole, ") == 3
    flip(run / "3/train_state/_METADATA", random.Random(2))
    (run / "1/extra/checksums.sha256").unlink()
    assert app.main(["verify", str(run)]) == 1
    shown = capsys.readouterr()
    assert f"{run / '3'}: DAMAGED" in shown.out
    assert "train_state/_METADATA: changed since it was written" in shown.out
    assert f"{run / '1'}: no checksums" in shown.out
    assert "1 of 3 checkpoints are damaged: 3; the newest whole step is 2" in shown.err
    assert app.main(["verify", str(run / "2")]) == 0
    export = save_openpi({"a": {"kernel": np.ones((4, 3), np.float32)}}, tmp_path / "out", norm_stats={})
    assert app.main(["verify", str(export)]) == 0
    assert app.main(["verify", str(tmp_path)]) == 1
    assert "holds no complete checkpoint" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_reads_the_checksums(run: Path) -> None:
    words = ["sha256sum", "--check", "--strict", "extra/checksums.sha256"]
    assert subprocess.run(words, cwd=run / "3", check=False, capture_output=True).returncode == 0
    flip(run / "3/params/manifest.ocdbt", random.Random(3))
    assert subprocess.run(words, cwd=run / "3", check=False, capture_output=True).returncode == 1
