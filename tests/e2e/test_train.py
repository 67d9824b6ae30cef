"""`pirl train` from the command line to a checkpoint that OpenPI reads, and what it says when it cannot."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from pirl import recipes
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.build import build_agent
from pirl.checkpoints.weights import load_openpi
from pirl.cli import app
from pirl.config import EarlyStop, RLTrainConfig
from pirl.config_io import write_yaml
from pirl.data import synthetic
from pirl.data.assets import named_asset
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.normalize import load_norm_stats
from pirl.data.synthetic import PICTURE
from pirl.errors import CheckpointError, PirlError, PirlWarning
from pirl.models.params import flatten
from pirl.training import loop
from pirl.training.build import build_transform
from pirl.training.config import SGD, ConstantSchedule
from pirl.training.metrics import DivergedError
from small_runs import assert_same_bits, compiled_once, position_of, records, restored, small_run, steps_of

BC = BCConfig()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory.mktemp("programs")):
        yield


def shallow(folder: Path) -> RLTrainConfig:
    """The debug recipe with one layer of everything: pictures, prompt, critic and all."""
    recipe = recipes.get_config("debug")
    model: Any = recipe.model
    once = {part: replace(getattr(model, part), depth=1) for part in ("vlm", "expert", "vision")}
    return replace(
        recipe,
        model=replace(model, **once),
        data=replace(recipe.data, asset_id="me/dots"),
        agent=ACRLPDConfig(discount=0.9, num_action_samples=2, flow_steps=2, policy_ema_decay=0.9),
        checkpoint=replace(recipe.checkpoint, base_dir=str(folder), save_interval=3, keep_last=9),
        batch_size=4,
        num_train_steps=5,
        log_interval=2,
    )


@dataclass(frozen=True)
class Finished:
    """A run made by the command line, from a file."""

    config: RLTrainConfig
    file: Path
    printed: str

    def pirl(self, *words: str) -> int:
        """`pirl train` on the same file."""
        return app.main(["train", str(self.file), *words])

    @property
    def step(self) -> Path:
        return self.config.run_dir / "5"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("train")
    config = replace(shallow(folder / "runs"), exp_name="first")
    file = write_yaml(folder / "run.yaml", replace(config, exp_name="run"))
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        assert app.main(["train", str(file), "--exp-name", "first"]) == 0
    return Finished(config, file, "\n".join(lines))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for locks."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# What a run leaves.


def test_the_folder_of_a_run(finished: Finished) -> None:
    names = {path.name for path in finished.config.run_dir.iterdir() if not path.name.startswith(".")}
    assert names == {"3", "5", "config.yaml", "first_batch.png", "metadata.json", "metrics.csv", "metrics.jsonl"}
    assert recipes.load(str(finished.config.run_dir / "config.yaml")) == finished.config
    with Image.open(finished.config.run_dir / "first_batch.png") as picture:
        assert picture.size == (4 * PICTURE, PICTURE + 2)  # four samples, one camera
        pixels = np.asarray(picture)
    for sample in range(4):
        seen = {tuple(pixel) for pixel in pixels[:PICTURE, sample * PICTURE : (sample + 1) * PICTURE].reshape(-1, 3)}
        assert seen == {(0, 0, 0), (0, 200, 0), (200, 0, 0), (255, 255, 255)}  # goal, trap and point are shown


def test_metrics_and_learning_rates(finished: Finished) -> None:
    lines = records(finished.config.run_dir)
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line in lines:
        # Twenty steps of warm-up to 1e-3, of which step k is number k - 1.
        ramp = 1e-3 / 21 + (1e-3 - 1e-3 / 21) * (line["step"] - 1) / 20
        assert line["values"]["policy/learning_rate"] == pytest.approx(ramp, rel=1e-5)
        assert line["values"]["critic/learning_rate"] == pytest.approx(1e-3, rel=1e-5)
        assert {"actor/loss", "critic/loss", "actor/ess", "data/valid_fraction"} <= set(line["values"])
    assert f"step 2/5  actor/loss {lines[0]['values']['actor/loss']:.3g}" in finished.printed
    assert "debug/first: 5 steps in 0:" in finished.printed
    assert f"pirl export openpi {finished.step} --out to_robot" in finished.printed


def test_the_checkpoint_is_openpis(finished: Finished) -> None:
    """params under `value`, statistics under their name; the weights are those one acts with."""
    state, step = restored(finished.config), finished.step
    stored = json.loads((step / "params" / "_METADATA").read_text())["tree_metadata"]
    names = {eval_path(name) for name in stored}
    assert names == {("params", *path.split("/"), "value") for path in flatten(state.policy)}
    assert_same_bits(load_openpi(step), state.policy)
    assert_same_bits(load_openpi(step), state.ema["policy"])
    raw, averaged = (jax.tree.leaves(part["policy"]) for part in (state.params, state.ema))
    assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(raw, averaged, strict=True))
    stats, own = load_norm_stats(step / "assets" / "me" / "dots"), build_transform(finished.config).norm_stats
    assert own is not None
    assert set(stats) == set(own) == {"state", "actions"}
    for name, numbers in stats.items():
        np.testing.assert_array_equal(numbers.mean, own[name].mean)
        np.testing.assert_array_equal(numbers.std, own[name].std)


def test_statistics_go_by_the_name_of_the_data() -> None:
    """As in OpenPI: the name that is given, else the dataset's; a run looks for them there and leaves them there."""
    config = recipes.get_config("debug_bc")
    for given, repo_ids, expected in (
        ("me/dots", ("synthetic",), "me/dots"),
        (None, ("lerobot/pusht", "lerobot/other"), "lerobot/pusht"),
        (None, ("recordings/of/cubes",), "cubes"),
        (None, (), "synthetic"),  # none: the robot's
    ):
        data = replace(config.data, asset_id=given, repo_ids=repo_ids)
        assert named_asset(data, config.robot) == expected


def eval_path(name: str) -> tuple[str, ...]:
    """Orbax writes paths as Python tuples."""
    return tuple(part.strip(" '\"") for part in name.strip("()").split(",") if part.strip())


def test_checkpoints_are_inspected_and_exported(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["inspect", "checkpoint", str(finished.step)]) == 0
    shown = capsys.readouterr().out
    state = restored(finished.config)
    assert f"{sum(leaf.size for leaf in jax.tree.leaves(state.policy)):,}" in shown
    assert "me/dots" in shown
    assert app.main(["export", "openpi", str(finished.step), "--out", str(tmp_path / "out")]) == 0
    assert_same_bits(load_openpi(tmp_path / "out"), state.policy)
    assert not (tmp_path / "out" / "train_state").exists()
    assert (tmp_path / "out" / "assets" / "me" / "dots" / "norm_stats.json").is_file()


# Running it again.


def test_a_run_that_exists_is_left_alone(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(finished.config.run_dir)
    assert finished.pirl("--exp-name", "first") == 1
    said = capsys.readouterr().err
    assert "first is an existing run with checkpoints of steps 3, 5" in said
    assert "--resume continues it, --overwrite deletes it" in said
    assert tree(finished.config.run_dir) == before


def test_another_model_does_not_resume(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    """What differs is listed, and the folder stays as it was."""
    before = tree(finished.config.run_dir)
    assert finished.pirl("--exp-name", "first", "--resume", "--model.expert.mlp-dim", "96", "--model.horizon", "5") == 1
    said = capsys.readouterr().err
    assert "was trained with other settings that shape its state" in said
    assert "model.expert.mlp_dim: 128 -> 96" in said
    assert "model.horizon: 4 -> 5" in said
    assert "resume with the saved settings, or start a new run from its weights: --exp-name NAME --init-weights" in said
    assert tree(finished.config.run_dir) == before


def test_harmless_changes_resume_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_run(tmp_path / "runs", BC, num_train_steps=5, log_interval=2)
    file = write_yaml(tmp_path / "run.yaml", config)
    assert app.main(["train", str(file)]) == 0
    words = ("--resume", "--max-steps", "7", "--log-interval", "1", "--save-interval", "2", "--log-memory")
    capsys.readouterr()
    assert app.main(["train", str(file), *words[:-1]]) == 0
    assert capsys.readouterr().err == ""
    assert [line["step"] for line in records(config.run_dir)] == [2, 4, 6, 7]
    assert steps_of(config) == [5, 6, 7]
    assert app.main(["train", str(file), *words]) == 0
    said = capsys.readouterr().err
    assert "debug/run: step 7 of 7 is done already; --max-steps N trains on" in said
    assert "warning" not in said


def test_other_changes_are_told(tmp_path: Path) -> None:
    config = small_run(tmp_path, BC, num_train_steps=2)
    assert loop.train(config) == 0
    with pytest.warns(PirlWarning, match=r"1 changed settings\n    agent.ema_decay: 0.99 -> 0.5"):
        assert loop.train(replace(config, agent=replace(BC, ema_decay=0.5), num_train_steps=3), resume=True) == 0
    changed = replace(config, agent=ACRLPDConfig(discount=0.9))
    with pytest.raises(CheckpointError, match=r"agent\.type: \"BC\" -> \"ACRLPD\""):
        loop.train(changed, resume=True)


def test_overwriting_starts_again(tmp_path: Path) -> None:
    config = small_run(tmp_path, BC, num_train_steps=3, log_interval=1)
    assert loop.train(config) == 0
    (config.run_dir / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds what pirl did not write(.|\n)*notes\.txt"):
        loop.train(replace(config, num_train_steps=2, seed=1), overwrite=True)
    assert steps_of(config) == [3]
    (config.run_dir / "notes.txt").unlink()
    assert loop.train(replace(config, num_train_steps=2, seed=1), overwrite=True) == 0
    assert steps_of(config) == [2]
    assert [line["step"] for line in records(config.run_dir)] == [1, 2]
    assert [path.name for path in config.run_dir.parent.iterdir()] == ["run"]


def test_one_program_serves_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints, logs and the end of a run change nothing that would need another one."""
    made: list[Any] = []
    step = loop.Step
    monkeypatch.setattr(loop, "Step", lambda *args: made.append(step(*args)) or made[-1])
    assert loop.train(small_run(tmp_path, agent=BC, num_train_steps=5)) == 0
    assert [update.programs for update in made] == [1]


def test_a_dry_run_says_what_it_takes_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_run(tmp_path / "runs", BC)
    file = write_yaml(tmp_path / "run.yaml", config)
    assert app.main(["train", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    state = jax.eval_shape(build_agent(config).init, jax.random.key(0))
    parts = {"params/policy": state.params, "ema/policy": state.ema, "opt/policy": state.opt, "total": state}
    rows = {words[0]: words[1] for line in shown.splitlines() if len(words := line.split()) > 3}
    for name, part in parts.items():
        assert rows[name] == f"{sum(leaf.size for leaf in jax.tree.leaves(part)):,}", shown
    for row in ("arguments per device", "temporaries per device", "dry run: nothing was written", "1 (cpu), fsdp 1"):
        assert row in shown
    assert re.search(r"arithmetic, all devices\W+[\d.e-]+ TFLOP", shown), shown


# What goes wrong.


def poison(patch: pytest.MonkeyPatch, *, step: int) -> None:
    """From now on batch number `step` of a run has a NaN among its actions."""
    sample_batch = ACRLPDDataLoader.sample_batch

    def poisoned(loader: ACRLPDDataLoader) -> Any:
        batch = sample_batch(loader)
        if loader.step == step:
            actions = np.array(batch["actions"])
            actions[0, 0, 0] = np.nan
            batch["actions"] = jax.device_put(actions, batch["actions"].sharding)
        return batch

    patch.setattr(ACRLPDDataLoader, "sample_batch", poisoned)


@pytest.mark.parametrize(("log_interval", "noticed"), [(100, 6), (5, 5)], ids=["at a checkpoint", "at a record"])
def test_a_diverged_run_stops_and_keeps_its_last_good_checkpoint(
    log_interval: int, noticed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints every second step, a NaN at the fifth: the fourth stays, and a clean run goes on from it."""
    config = small_run(tmp_path, BC, num_train_steps=8, log_interval=log_interval)
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=2, keep_last=1))
    with monkeypatch.context() as patch:
        poison(patch, step=5)
        with pytest.raises(DivergedError, match=rf"diverged: at step {noticed} .*policy/loss = nan") as raised:
            loop.train(config)
    assert "go on from the last checkpoint" in raised.value.hint
    assert steps_of(config) == [4]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(restored(config)))
    assert loop.train(config, resume=True) == 0
    clean = replace(config, exp_name="clean")
    assert loop.train(clean) == 0
    assert_same_bits(restored(config), restored(clean))
    assert records(config.run_dir) == records(clean.run_dir)


def test_the_operation_that_made_a_nan_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --debug-nans: at once, not at the next record, and only as long as the run lasts."""
    poison(monkeypatch, step=2)
    config = small_run(tmp_path, BC, num_train_steps=4, log_interval=100, debug_nans=True)
    with pytest.raises(FloatingPointError, match="nan"):
        loop.train(config)
    assert steps_of(config) == []
    assert not jax.config.jax_debug_nans


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_weights_that_overflow_are_never_saved(tmp_path: Path) -> None:
    """The metrics of a step are those before its update, and still fine; what they say counts for nothing."""
    config = small_run(tmp_path, BC, log_interval=1, policy_optimizer=SGD(), policy_schedule=ConstantSchedule(lr=1e39))
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=1))
    with pytest.raises(DivergedError, match=r"after step 1 \d+ of \d+ arrays are not finite\n +params/policy/"):
        loop.train(config)
    assert [line["step"] for line in records(config.run_dir)] == [1]
    assert steps_of(config) == []


def test_a_nan_in_the_dataset_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demonstrate = synthetic.demonstrate
    made: list[int] = []

    def broken(rng: np.random.Generator) -> Any:
        episode = demonstrate(rng)
        made.append(1)
        if len(made) % 200 == 7:
            episode.actions[1, 0] = np.nan
        return episode

    monkeypatch.setattr(synthetic, "demonstrate", broken)
    config = small_run(tmp_path, BC, log_interval=1)
    with pytest.raises(PirlError) as raised:
        loop.train(config)
    assert "nan" in str(raised.value).lower() or "finite" in str(raised.value)
    assert steps_of(config) == []


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    file = write_yaml(tmp_path / "run.yaml", small_run(tmp_path / "file", BC))
    assert app.main(["train", str(file)]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'file' / 'debug' / 'run'} cannot be written to" in said
    assert "check the path, its permissions and the disk" in said
    (tmp_path / "runs" / "debug").mkdir(parents=True)
    (tmp_path / "runs" / "debug" / "run").write_text("not a folder")
    assert app.main(["train", str(file), "--checkpoint.base-dir", str(tmp_path / "runs")]) == 1
    assert "is a file, expected the folder of a run" in capsys.readouterr().err


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before anything is built: 1 for what a file or recipe says, 2 for flags."""
    file = tmp_path / "run.yaml"
    file.write_text("recipe: debug\nbatch_sise: 4\n")
    for words, code, expected in (
        ([str(file)], 1, ("batch_sise", "did you mean: batch_size")),
        (["debgu"], 1, ("unknown recipe 'debgu'", "did you mean: debug")),
        (["debug", "--batch-sise", "4"], 2, ("--batch-size",)),
        (["debug", "--resume", "--overwrite"], 2, ("choose one",)),
        (["debug", "--batch-size", "0"], 1, ("batch_size is 0", "it is at least 1")),
        (["debug", "--batch-size", "6", "--agent.accumulate", "4"], 1, ("multiple of mesh.fsdp × agent.accumulate",)),
        (["debug", "--mesh.fsdp", "3", "--batch-size", "6"], 1, ("fsdp is 3 and there are 1 devices",)),
    ):
        assert app.main(["train", *words, "--checkpoint.base-dir", str(tmp_path / "runs")]) == code
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        for text in expected:
            assert text in said, (words, said)
    assert not (tmp_path / "runs").exists()


# Stopping early.


def test_patience_ends_a_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A constant gets no better: best at step 2, then three disappointments, the first of them before a restart."""
    watched = EarlyStop(metric="policy/learning_rate", patience=3, min_delta=0.0)
    config = small_run(tmp_path, BC, num_train_steps=100, log_interval=2, early_stop=watched)
    config = replace(config, policy_schedule=ConstantSchedule(lr=0.001))
    pieces = replace(config, exp_name="pieces")
    assert loop.train(config) == 0
    said = "stopped early at step 8: policy/learning_rate was 0.001 at best, and 3 times not better by 0"
    assert f"debug/run: {said}" in capsys.readouterr().err
    assert loop.train(replace(pieces, num_train_steps=4)) == 0
    assert loop.train(pieces, resume=True) == 0
    assert f"debug/pieces: {said}" in capsys.readouterr().err
    assert steps_of(config) == [5, 8]
    assert steps_of(pieces) == [4, 5, 8]
    assert position_of(pieces) == position_of(config)
    assert_same_bits(restored(pieces), restored(config))
