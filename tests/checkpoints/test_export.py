"""Folders written for others: complete or absent, never overwritten by accident, and what `inspect` says of them."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from pirl import __version__
from pirl.checkpoints.compare import leaf_shapes
from pirl.checkpoints.inspect import describe, render
from pirl.checkpoints.openpi import save_openpi
from pirl.checkpoints.pytorch import merge_lora, save_pytorch, state_dict_layout
from pirl.checkpoints.torch_names import EMBED_TOKENS, EXPERT_LM_HEAD, LM_HEAD
from pirl.checkpoints.weights import load_openpi
from pirl.errors import CheckpointError
from pirl.models.params import flatten

GOLDEN = Path(__file__).parents[1] / "golden" / "openpi"
STATS = {"state": {"mean": [0.0, 1.0], "std": [1.0, 2.0]}, "actions": {"mean": [0.5], "std": [0.1]}}
SMALL = {"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}}


def run_of(family: str, checkpoint: str = "ckpt") -> Path:
    return next((GOLDEN / family / checkpoint).glob("*/*"))


# --- OpenPI folders


def test_an_existing_folder_is_kept_unless_told(tmp_path: Path) -> None:
    target = tmp_path / "0"
    save_openpi(SMALL, target, norm_stats={"robot": STATS})
    with pytest.raises(CheckpointError, match="exists already"):
        save_openpi({"b": np.zeros(1, np.float32)}, target, norm_stats={})
    assert set(load_openpi(target)) == {"a"}
    save_openpi({"b": np.zeros(1, np.float32)}, target, norm_stats={}, overwrite=True)
    assert set(load_openpi(target)) == {"b"}
    assert not (target / "assets").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_failed_export_leaves_what_was_there(tmp_path: Path) -> None:
    target = save_openpi(SMALL, tmp_path / "0", norm_stats={})
    with pytest.raises(CheckpointError, match="cannot be read"):
        save_openpi({"b": np.zeros(1, np.float32)}, target, norm_stats={"robot": "{broken"}, overwrite=True)
    np.testing.assert_array_equal(load_openpi(target)["a"]["kernel"], SMALL["a"]["kernel"])
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_an_interrupted_export_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".0.writing" / "params").mkdir(parents=True)
    save_openpi(SMALL, tmp_path / "0", norm_stats={})
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_norm_stats_as_text_path_or_dict_are_the_same_file(tmp_path: Path) -> None:
    text = json.dumps({"norm_stats": STATS}, indent=2)
    (tmp_path / "norm_stats.json").write_text(text)
    arrays = jax.tree.map(np.asarray, STATS, is_leaf=lambda x: isinstance(x, list))
    sources = {"text": text, "path": tmp_path / "norm_stats.json", "dict": STATS, "org/arrays": arrays}
    folder = save_openpi(SMALL, tmp_path / "0", norm_stats=sources)
    for asset in sources:
        assert json.loads((folder / "assets" / asset / "norm_stats.json").read_text()) == {"norm_stats": STATS}


@pytest.mark.parametrize(
    ("asset", "stats", "message"),
    [
        ("robot", {"state": {"mean": [0.0], "std": [1.0, 2.0]}}, "different lengths"),
        ("robot", {"state": {"mean": [float("nan")], "std": [1.0]}}, "expected a finite number"),
        ("robot", {"state": {"std": [1.0]}}, "has no 'mean'"),
        ("robot", "absent.json", "no norm statistics for 'robot' at absent.json"),
        ("../robot", STATS, "cannot name an asset"),
    ],
)
def test_norm_stats_that_would_mislead_a_robot_are_refused(
    tmp_path: Path, asset: str, stats: object, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_openpi(SMALL, tmp_path / "0", norm_stats={asset: stats})
    assert not (tmp_path / "0").exists()


def test_an_empty_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no parameters"):
        save_openpi({}, tmp_path / "0", norm_stats={})


# --- PyTorch


@pytest.mark.parametrize("family", ["pi0_asym", "pi05_asym"])
def test_the_torch_file_holds_the_state_dict_once(family: str, tmp_path: Path) -> None:
    params = load_openpi(run_of(family))
    folder = save_pytorch(params, tmp_path / "pt", action_horizon=7, norm_stats={"robot": STATS})
    layout = state_dict_layout(leaf_shapes(params))
    with safetensors.safe_open(folder / "model.safetensors", framework="np") as stored:
        names = set(stored.keys())
        # One of the two tied names, as PyTorch saves them and as OpenPI's strict loader wants them.
        assert names == set(layout) - {EMBED_TOKENS}
        assert stored.metadata()[EMBED_TOKENS] == LM_HEAD
        for name in names:
            dtype, shape = layout[name]
            tensor = stored.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (dtype, shape), name
        assert not stored.get_tensor(EXPERT_LM_HEAD).any()
        embedding = flatten(params)["PaliGemma/llm/embedder/input_embedding"]
        np.testing.assert_array_equal(stored.get_tensor(LM_HEAD), embedding.astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(
            stored.get_tensor("action_out_proj.weight"), params["action_out_proj"]["kernel"].T
        )
    assert json.loads((folder / "config.json").read_text()) == {
        "action_dim": params["action_in_proj"]["kernel"].shape[0],
        "action_horizon": 7,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "bfloat16",
    }
    assert (folder / "assets" / "robot" / "norm_stats.json").is_file()


def test_torch_export_refuses_adapters_and_existing_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="merge_lora"):
        save_pytorch(load_openpi(run_of("pi0_lora_asym")), tmp_path / "pt", action_horizon=4)
    assert not (tmp_path / "pt").exists()
    params = load_openpi(run_of("pi0_asym"))
    save_pytorch(params, tmp_path / "pt", action_horizon=4)
    with pytest.raises(CheckpointError, match="exists already"):
        save_pytorch(params, tmp_path / "pt", action_horizon=4)


@pytest.mark.parametrize("on_device", [False, True])
def test_merged_adapters_compute_the_same(on_device: bool) -> None:
    params = load_openpi(run_of("pi0_lora_asym"))
    leaves = {path: leaf.astype(np.float64) for path, leaf in flatten(params).items()}
    given = jax.tree.map(jnp.asarray, params) if on_device else params
    attn, ffn = (1.5, 2.0), (1.0, 1.0)
    merged = flatten(merge_lora(given, attn=attn, ffn=ffn))
    assert set(merged) == {path for path in leaves if "lora" not in path}

    random = np.random.default_rng(0)
    layer = 1
    # The equations of OpenPI's LoRA einsum: (matrix, x -> rank, rank -> y).
    attention = {
        "q_einsum": ("td,ndh->tnh", "td,ndr->tnr", "tnr,nrh->tnh"),
        "kv_einsum": ("td,ckdh->ctkh", "td,ckdr->ctkr", "ctkr,ckrh->ctkh"),
        "attn_vec_einsum": ("tnh,nhd->td", "tnh,nhr->tr", "tr,nrd->td"),
    }
    for expert, suffix in enumerate(("", "_1")):
        for name, (whole, down, up) in attention.items():
            path = f"PaliGemma/llm/layers/attn/{name}{suffix}"
            w, a, b = (leaves[f"{path}/{leaf}"][layer] for leaf in ("w", "lora_a", "lora_b"))
            x = (
                random.normal(size=(5, *w.shape[:2]))
                if name == "attn_vec_einsum"
                else random.normal(size=(5, w.shape[-2]))
            )
            expected = np.einsum(whole, x, w) + attn[expert] * np.einsum(up, np.einsum(down, x, a), b)
            found = np.einsum(whole, x, np.asarray(merged[f"{path}/w"][layer], np.float64))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=path)
        for name in ("gating_einsum", "linear"):
            path = f"PaliGemma/llm/layers/mlp{suffix}/{name}"
            w, a, b = (leaves[path + leaf][layer] for leaf in ("", "_lora_a", "_lora_b"))
            x = random.normal(size=(5, w.shape[-2]))
            found = x @ np.asarray(merged[path][layer], np.float64)
            np.testing.assert_allclose(found, x @ w + ffn[expert] * (x @ a @ b), rtol=1e-5, atol=1e-5, err_msg=path)
    untouched = "PaliGemma/img/head/kernel"
    np.testing.assert_array_equal(merged[untouched], flatten(params)[untouched])


# --- inspect


def test_inspect_reads_the_golden_run_without_its_arrays(tmp_path: Path) -> None:
    run = run_of("pi0_asym", "ckpt_after3")
    found = describe(run)
    stats = json.loads((GOLDEN / "pi0_asym" / "param_stats.json").read_text())
    sizes = {path: int(np.prod(leaf["shape"])) for path, leaf in stats.items()}
    step = int(found.path.name)
    assert (found.kind, found.model, found.step, found.steps) == ("openpi", "π₀", step, (step,))
    assert (found.parameters, found.bytes) == (sum(sizes.values()), 4 * sum(sizes.values()))
    assert {path: leaf.shape for path, leaf in found.leaves.items()} == {p: tuple(s["shape"]) for p, s in stats.items()}
    assert found.norm_stats == {"fixture_robot": {"state": 8, "actions": 7}}
    assert (found.ema, found.written_by) == (True, "OpenPI")
    assert {"opt_state", "params", "step"} <= set(found.train_state)
    parts = {component.name: component for component in found.components}
    assert set(parts) == {"SigLIP", "embedder", "Gemma VLM", "Gemma expert", "heads"}
    assert parts["embedder"].parameters == sizes["PaliGemma/llm/embedder/input_embedding"]
    assert parts["SigLIP"].parameters == sum(n for path, n in sizes.items() if path.startswith("PaliGemma/img/"))
    assert parts["heads"].parameters == sum(n for path, n in sizes.items() if not path.startswith("PaliGemma"))
    text = render(found)
    assert f"{found.parameters:,} parameters in {len(stats)} arrays" in text
    assert "moving average (EMA)" in text
    assert "fixture_robot: state 8, actions 7" in text


def test_inspect_tells_adapters_formats_and_writers(tmp_path: Path) -> None:
    lora = describe(run_of("pi0_lora_asym"))
    parts = {component.name: component for component in lora.components}
    assert parts["LoRA"].leaves == 20
    assert parts["Gemma VLM"].dtypes == ("bfloat16",)
    assert lora.ema is False

    params = load_openpi(run_of("pi05_asym"))
    ours = describe(save_openpi(params, tmp_path / "run" / "12", norm_stats={}).parent)
    assert (ours.step, ours.model, ours.written_by, ours.train_state) == (12, "π₀.₅", f"pirl {__version__}", ())
    assert ours.written_at is not None
    assert "none: OpenPI cannot serve it without" in render(ours)

    torch = describe(save_pytorch(params, tmp_path / "pt", action_horizon=4, norm_stats={"robot": STATS}))
    assert (torch.kind, torch.model, torch.norm_stats["robot"]) == ("pytorch", "π₀.₅", {"state": 2, "actions": 1})
    counts = {component.name: component.parameters for component in torch.components}
    assert {name: counts[name] for name in counts if name != "unused"} == {
        c.name: c.parameters for c in ours.components
    }

    np.savez(tmp_path / "vlm.npz", **{"params/img/head/bias": np.zeros(3, ml_dtypes.bfloat16)})
    npz = describe(tmp_path / "vlm.npz")
    assert (npz.kind, npz.model, npz.parameters, npz.bytes) == ("npz", "PaliGemma", 3, 6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8", "uint8", "uint16", "bool"])
def test_inspect_knows_the_size_of_every_type_of_safetensors(tmp_path: Path, dtype: str) -> None:
    array = np.ones((3, 5), dtype)
    save_file({"state_proj.weight": array}, tmp_path / "model.safetensors")
    (leaf,) = describe(tmp_path).leaves.values()
    assert (leaf.dtype, leaf.bytes) == (dtype, array.nbytes)


def test_inspect_of_damaged_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        describe(tmp_path)
    step = shutil.copytree(next(run_of("pi0_asym").glob("0")), tmp_path / "0")
    (step / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="_CHECKPOINT_METADATA cannot be read"):
        describe(step)
