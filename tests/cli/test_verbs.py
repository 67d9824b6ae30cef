"""The verbs end to end, on checkpoints OpenPI wrote and datasets LeRobot wrote."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from golden_data import FAMILIES, HERE, STATIC
from pirl import recipes
from pirl.agents.config import ACRLPDConfig, RECAPConfig, RLTokenConfig
from pirl.checkpoints.handover import BESIDE
from pirl.checkpoints.run_metadata import as_json
from pirl.checkpoints.weights import load_openpi, load_pytorch
from pirl.cli import app, export
from pirl.config_io import to_dict
from pirl.data.config import DataConfig
from pirl.errors import PirlWarning
from pirl.models import config
from pirl.models.params import flatten, nest
from pirl.models.pi0 import param_shapes

LEROBOT = HERE / "golden" / "lerobot"
LENGTHS = (37, 80, 52, 45, 63)
PI0 = FAMILIES["pi0"]


def pirl(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """What a command prints: its output, or its complaint where it is to fail."""
    capsys.readouterr()
    found = app.main(list(map(str, words)))
    shown = capsys.readouterr()
    assert found == code, shown.err
    return shown.err if code else shown.out


def assert_same(found: dict, expected: dict) -> None:
    found, expected = flatten(found), flatten(expected)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(leaf), err_msg=path)


@pytest.mark.parametrize(
    ("preset", "golden"),
    [("pi0", "pi0"), ("pi05", "pi05"), ("pi0_lora", "pi0_lora_both"), ("pi05_lora", "pi05_lora_both")],
)
def test_a_recipe_has_openpis_parameters(preset: str, golden: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = pirl(capsys, "inspect", "recipe", preset, "--leaves")
    summary = json.loads((STATIC / "param_summary.json").read_text())[golden]
    names = {"SigLIP": "siglip", "embedder": "embedder", "Gemma VLM": "gemma_vlm", "Gemma expert": "action_expert(_1)"}
    for name, key in (names | {"heads": "heads"}).items():
        (row,) = re.findall(rf"^  {name} +\d+ +([\d,]+) ", shown, re.MULTILINE)
        assert row == f"{summary['components'][key]:,}"
    (total,) = re.findall(r"^  total +(\d+) +([\d,]+) +([\d,]+) ", shown, re.MULTILINE)
    assert total == (str(summary["n_leaves"]), f"{summary['total']:,}", f"{summary['trainable']:,}")
    tree = json.loads((STATIC / f"param_tree_{golden}.json").read_text())
    listed = dict(re.findall(r"^  (\S+/\S+) +(\d.*)$", shown, re.MULTILINE))
    expected = {
        path: f"{' x '.join(map(str, leaf['shape']))} {'float32 trains' if leaf['trainable'] else 'bfloat16 frozen'}"
        for path, leaf in tree.items()
    }
    assert {path: " ".join(rest.split()) for path, rest in listed.items()} == expected


def test_a_recipe_under_another_freeze_rule(capsys: pytest.CaptureFixture[str]) -> None:
    shown = pirl(capsys, "inspect", "recipe", "pi0", "--freeze", "vlm_frozen")
    rows = re.findall(r"^  (SigLIP|Gemma VLM|Gemma expert) .* ([\d,]+) +([\d,]+)  (\w+)$", shown, re.MULTILINE)
    assert {name: (trains, dtype) for name, trains, _, dtype in rows} == {
        "SigLIP": ("0", "bfloat16"),
        "Gemma VLM": ("0", "bfloat16"),
        "Gemma expert": ("311,464,960", "float32"),
    }
    assert "did you mean: vlm_frozen" in pirl(capsys, "inspect", "recipe", "pi0", "--freeze", "vlm_frosen", code=1)
    assert "did you mean: pi0_lora" in pirl(capsys, "inspect", "recipe", "pi0_lola", code=1)


def test_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    stored = PI0.json("param_stats")
    shown = pirl(capsys, "inspect", "checkpoint", PI0.step_dir, "--leaves")
    count = sum(int(np.prod(leaf["shape"])) for leaf in stored.values())
    assert f"{count:,} parameters in {len(stored)} arrays" in shown
    assert "openpi (π₀)" in shown
    assert all(re.search(rf"^  {path} +\d.* {leaf['dtype']}$", shown, re.MULTILINE) for path, leaf in stored.items())


def test_no_checkpoint_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complaint = pirl(capsys, "inspect", "checkpoint", tmp_path / "nothing", code=1)
    assert complaint.startswith(f"error: there is nothing at {tmp_path / 'nothing'}\n  hint: ")


@pytest.mark.parametrize("name", ["v21_image", "v21_video", "v30_image", "v30_video", "v30_video_multifile"])
def test_a_dataset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = pirl(capsys, "inspect", "data", LEROBOT / name)
    assert f"LeRobot {name[:2]}.{name[2]}" in shown
    assert "5 episodes of 37 to 80 frames, 277 in all" in shown
    assert "3 episodes succeed, 2 fail" in shown
    assert "data.held_out 0.1 (data.seed 0) keeps" in shown
    assert "held_out" not in pirl(capsys, "inspect", "data", LEROBOT / name, "--held-out", "0")


def test_no_dataset_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complaint = pirl(capsys, "inspect", "data", tmp_path, code=1)
    assert complaint.startswith(f"error: no LeRobot dataset at {tmp_path}; looked at")
    assert "  hint: " in complaint


@pytest.mark.parametrize("name", ["v21_image", "v30_video_multifile"])
def test_norm_stats(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["norm-stats", LEROBOT / name, "--robot", "aloha", "--horizon", 20, "--out", tmp_path / "stats"]
    assert "277 steps of 5 episodes" in pirl(capsys, *words)
    stats = json.loads((tmp_path / "stats" / "norm_stats.json").read_text())["norm_stats"]
    frames = [np.arange(length, dtype=float) for length in LENGTHS]
    # The datasets count frames in state 0 and write 1000 * episode + frame into action 0, which is relative for ALOHA.
    chunks = [
        1000 * episode + np.minimum(frame[:, None] + np.arange(20), frame[-1]) - frame[:, None]
        for episode, frame in enumerate(frames)
    ]
    for key, values in (("state", np.concatenate(frames)), ("actions", np.concatenate(chunks))):
        assert len(stats[key]["mean"]) == 14
        np.testing.assert_allclose(stats[key]["mean"][0], values.mean(), rtol=1e-6)
        np.testing.assert_allclose(stats[key]["std"][0], values.std(), rtol=1e-6)
        assert values.min() <= stats[key]["q01"][0] < values.mean() < stats[key]["q99"][0] <= values.max()
    before = (tmp_path / "stats" / "norm_stats.json").read_bytes()
    assert "norm_stats.json exists" in pirl(capsys, *words[:5], 5, *words[6:], code=1)
    assert (tmp_path / "stats" / "norm_stats.json").read_bytes() == before
    pirl(capsys, *words[:5], 5, *words[6:], "--overwrite")
    assert (tmp_path / "stats" / "norm_stats.json").read_bytes() != before


def test_norm_stats_go_to_assets_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "me").mkdir(parents=True)
    (tmp_path / "home" / "me" / "cubes").symlink_to(LEROBOT / "v30_video")
    pirl(capsys, "norm-stats", "me/cubes", "--robot", "aloha")
    assert (tmp_path / "assets" / "me" / "cubes" / "norm_stats.json").is_file()
    pirl(capsys, "norm-stats", LEROBOT / "v30_video", "--robot", "aloha")
    assert (tmp_path / "assets" / "v30_video" / "norm_stats.json").is_file()


def test_norm_stats_of_several_datasets_count_every_step_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--robot", "aloha", "--horizon", 3, "--out"]
    one = LEROBOT / "v21_image"
    assert "554 steps of 10 episodes" in pirl(
        capsys, "norm-stats", one, LEROBOT / "v30_image", *words, tmp_path / "two"
    )
    pirl(capsys, "norm-stats", one, *words, tmp_path / "one")
    both, alone = (
        json.loads((tmp_path / name / "norm_stats.json").read_text())["norm_stats"]["state"] for name in ("two", "one")
    )
    for name in ("mean", "std"):  # the two hold the same episodes
        np.testing.assert_allclose(both[name], alone[name], rtol=1e-6, atol=1e-9)


def test_norm_stats_of_another_robot_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["norm-stats", LEROBOT / "v30_image", "--out", tmp_path / "out", "--robot"]
    complaint = pirl(capsys, *words, "libero", code=1)
    assert "episode 0: robot 'libero': state has shape (37, 14), expected 8" in complaint
    assert "did you mean: aloha" in pirl(capsys, *words, "alhoa", code=1)
    assert "'0' is not a positive whole number" in pirl(capsys, *words, "aloha", "--horizon", 0, code=2)
    assert not (tmp_path / "out").exists()


def test_export_to_openpi_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    shown = pirl(capsys, "export", "openpi", PI0.step_dir, "--out", out)
    count = sum(leaf.size for leaf in flatten(PI0.params).values())
    assert f"{count:,} parameters of π₀, statistics of fixture_robot -> {out}" in shown
    assert_same(load_openpi(out), PI0.params)
    file = "assets/fixture_robot/norm_stats.json"
    assert (out / file).read_bytes() == (PI0.step_dir / file).read_bytes()
    assert not (out / "train_state").exists()
    assert "resumable   no" in pirl(capsys, "inspect", "checkpoint", out)


def test_export_replaces_only_when_told_and_never_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    complaint = pirl(capsys, "export", "openpi", PI0.step_dir, "--out", out, code=1)
    assert "out exists already" in complaint
    assert "--overwrite" in complaint
    assert (out / "notes").read_text() == "mine"
    complaint = pirl(capsys, "export", "openpi", PI0.step_dir, "--out", out, "--overwrite", code=1)
    assert "not an export of pirl" in complaint
    assert (out / "notes").read_text() == "mine"
    (out / "notes").unlink()
    out.rmdir()
    pirl(capsys, "export", "openpi", PI0.step_dir, "--out", out)
    pirl(capsys, "export", "openpi", PI0.step_dir, "--out", out, "--overwrite", "--dtype", "bfloat16")
    assert not (out / "notes").exists()
    kernel = np.asarray(load_openpi(out)["action_in_proj"]["kernel"])
    assert kernel.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(kernel, PI0.params["action_in_proj"]["kernel"].astype(ml_dtypes.bfloat16))
    for target in (out, tmp_path):
        complaint = pirl(capsys, "export", "openpi", out, "--out", target, "--overwrite", code=1)
        assert "is or contains the checkpoint that is exported" in complaint
    assert (out / "params").is_dir()


def test_to_pytorch_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(config.PRESETS, "fixture", PI0.config)
    torch, back = tmp_path / "torch", tmp_path / "back"
    words = ["--dtype", "float32", "--model", "fixture", "--out"]
    pirl(capsys, "export", "pytorch", PI0.step_dir, *words, torch)
    assert_same(load_pytorch(torch, param_shapes(PI0.config)), PI0.params)
    assert json.loads((torch / "config.json").read_text())["action_horizon"] == PI0.config.horizon
    assert "name its preset" in pirl(capsys, "export", "openpi", torch, "--out", back, code=1)
    pirl(capsys, "export", "openpi", torch, *words, back)
    assert_same(load_openpi(back), PI0.params)
    file = "assets/fixture_robot/norm_stats.json"
    assert (back / file).read_bytes() == (PI0.step_dir / file).read_bytes()


def test_sizes_go_by_openpis_names() -> None:
    for name in ("dummy", "gemma_2b", "gemma_300m"):
        gemma = config.GEMMA_VARIANTS[name]
        assert export.variant_of((gemma.depth, gemma.mlp_dim, gemma.width), "other") == name
    with pytest.warns(PirlWarning, match="no name for a Gemma"):
        assert export.variant_of((1, 2, 3), "other") == "other"


def test_another_model_than_the_checkpoints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "openpi", PI0.step_dir, "--model", "pi05", "--out", tmp_path / "out"]
    assert "do not fit the model" in pirl(capsys, *words, code=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif("pi0_lora_asym" not in FAMILIES, reason="this golden set has no adapters")
def test_adapters_are_merged_for_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = FAMILIES["pi0_lora_asym"]
    loras = (source.config.vlm.attn_lora, source.config.expert.attn_lora)
    scales = [lora.scaling for lora in loras if lora]
    words = ["export", "pytorch", source.step_dir, "--dtype", "float32", "--lora-scale", *scales, "--out"]
    pirl(capsys, *words, tmp_path / "out", "--horizon", 7)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["action_horizon"] == 7
    shapes = {path: leaf for path, leaf in flatten(param_shapes(source.config)).items() if "lora" not in path}
    merged = flatten(load_pytorch(tmp_path / "out", nest(shapes)))
    before = flatten(source.params)
    for name, scale in zip(("q_einsum", "q_einsum_1"), scales, strict=True):
        path = f"PaliGemma/llm/layers/attn/{name}"
        w, a, b = (np.asarray(before[f"{path}/{part}"], np.float64) for part in ("w", "lora_a", "lora_b"))
        np.testing.assert_allclose(np.asarray(merged[f"{path}/w"]), w + scale * a @ b, rtol=1e-5, atol=1e-6)
        assert np.abs(a @ b).max() > 1e-3


@pytest.mark.skipif("pi0_lora_asym" not in FAMILIES, reason="this golden set has no adapters")
def test_a_run_says_how_long_its_chunks_are_and_how_its_adapters_are_scaled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = FAMILIES["pi0_lora_asym"]
    trained = replace(
        recipes.get_config("bc_aloha_fold"),
        model=replace(source.config, horizon=9),
        data=DataConfig(robot="aloha", tokenizer="byte"),
    )
    step = Path(shutil.copytree(source.step_dir, tmp_path / "run" / "7"))
    (step / "extra").mkdir()
    (step / "extra" / "metadata.json").write_text(json.dumps({"config": as_json(to_dict(trained))}))
    scales = [gemma.attn_lora.scaling for gemma in (source.config.vlm, source.config.expert) if gemma.attn_lora]
    words = ["export", "pytorch", step, "--dtype", "float32", "--out"]
    shown = pirl(capsys, *words, tmp_path / "own")
    assert f"scaled in attention by {scales[0]:g} (VLM) and {scales[1]:g} (expert)" in shown
    pirl(capsys, *words, tmp_path / "given", "--lora-scale", *scales, "--horizon", 9)
    own, given = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("own", "given"))
    assert own == given
    assert json.loads((tmp_path / "own" / "config.json").read_text())["action_horizon"] == 9
    assert "--policy.config=bc_aloha_fold_run" in (tmp_path / "own" / "openpi_config.py").read_text()
    pirl(capsys, "export", "openpi", step, "--out", tmp_path / "jax", "--name", "box")
    assert "name='box'" in (tmp_path / "jax" / "openpi_config.py").read_text()
    pirl(capsys, "export", "openpi", step, "--out", tmp_path / "jax", "--overwrite")


def test_what_was_learned_beside_the_policy_is_not_exported_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = DataConfig(robot="aloha", tokenizer="byte")
    trained = replace(recipes.get_config("bc_aloha_fold"), model=PI0.config, data=data)
    step = Path(shutil.copytree(PI0.step_dir, tmp_path / "run" / "7"))
    (step / "extra").mkdir()
    for agent, beside in ((RLTokenConfig(), True), (ACRLPDConfig(actor="best_of_n"), True), (ACRLPDConfig(), False)):
        told = to_dict(replace(trained, agent=agent))
        (step / "extra" / "metadata.json").write_text(json.dumps({"config": as_json(told)}))
        assert app.main(["export", "openpi", str(step), "--out", str(tmp_path / "out"), "--overwrite"]) == 0
        assert (BESIDE in " ".join(capsys.readouterr().err.split())) == beside
        assert (f"# Warning: {BESIDE}" in (tmp_path / "out" / "openpi_config.py").read_text()) == beside


def test_a_checkpoint_without_statistics_is_exported_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "params").symlink_to(PI0.step_dir / "params")
    assert app.main(["export", "openpi", str(tmp_path / "bare"), "--out", str(tmp_path / "out")]) == 0
    assert "warning: " in (shown := capsys.readouterr()).err
    assert "no normalisation statistics" in shown.err
    assert_same(load_openpi(tmp_path / "out"), PI0.params)


def test_the_handover_says_what_a_policy_is_told_with_each_instruction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = recipes.get_config("bc_aloha_fold")
    data = DataConfig(robot="aloha_sim", tokenizer="byte")
    step = Path(shutil.copytree(PI0.step_dir, tmp_path / "run" / "7"))
    (step / "extra").mkdir()
    for condition, said in (("text", True), ("vector", False)):
        agent = RECAPConfig(condition=condition)
        told = to_dict(replace(trained, model=PI0.config, data=data, agent=agent))
        (step / "extra" / "metadata.json").write_text(json.dumps({"config": as_json(told)}))
        pirl(capsys, "export", "openpi", step, "--out", tmp_path / "out", "--overwrite")
        text = (tmp_path / "out" / "openpi_config.py").read_text()
        assert ("end every instruction with ', Advantage: positive'" in text) == said
        assert ("'Transfer cube, Advantage: positive'" in text) == said
