"""Checkpoints OpenPI wrote are read value by value, and what is written back is what OpenPI would have written."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from golden_data import FAMILIES as ALL
from golden_data import GOLDEN, OUTPUT
from pirl.checkpoints.compare import leaf_shapes
from pirl.checkpoints.openpi import save_openpi
from pirl.checkpoints.pytorch import merge_lora, save_pytorch
from pirl.checkpoints.weights import check_finite, find_params, load, load_openpi
from pirl.models.params import flatten
from pirl.models.pi0 import Pi0, param_shapes
from pirl.names import CHECKSUMS_FILE

FAMILIES = sorted(name for name, family in ALL.items() if family.has("ckpt"))
TRAINED = [name for name in FAMILIES if ALL[name].has("ckpt_after3")]
ADAPTED = [name for name in FAMILIES if ALL[name].config.has_lora]


def experiment(family: str, checkpoint: str = "ckpt") -> Path:
    """The folder that holds the steps of a run."""
    return next((GOLDEN / family / checkpoint).glob("*/*"))


def merged(family: str) -> dict:
    """The family's weights with its adapters, if any, merged as OpenPI scales them."""
    config = ALL[family].config
    vlm, expert = (gemma.attn_lora.scaling if gemma.attn_lora else 1.0 for gemma in (config.vlm, config.expert))
    return merge_lora(load_openpi(experiment(family)), attn=(vlm, expert), ffn=(1.0, 1.0))


def assert_stats(params: dict, stats: dict) -> None:
    leaves = flatten(params)
    assert set(leaves) == set(stats)
    for path, expected in stats.items():
        leaf = np.asarray(leaves[path])
        values = leaf.astype(np.float64)
        assert (list(leaf.shape), leaf.dtype.name) == (expected["shape"], expected["dtype"]), path
        found = [values.sum(), np.sqrt((values**2).sum()), np.abs(values).max()]
        want = [expected["sum"], expected["l2"], expected["absmax"]]
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-9, err_msg=path)


def assert_identical(found: dict, expected: dict) -> None:
    """Same paths, shapes, types and bits."""
    found, expected = flatten(found), flatten(expected)
    assert set(found) == set(expected)
    for path, leaf in expected.items():
        other = np.asarray(found[path])
        assert other.dtype == leaf.dtype, path
        np.testing.assert_array_equal(other.view(np.uint8), np.asarray(leaf).view(np.uint8), err_msg=path)


def layout(step: Path) -> set[str]:
    """Files of a step, with the random names of data files and the train state left out."""
    files = (str(file.relative_to(step)) for file in step.rglob("*") if file.is_file())
    return {re.sub(r"/d/[0-9a-f]{32}$", "/d/*", file) for file in files if not file.startswith("train_state/")}


@pytest.mark.parametrize("family", FAMILIES)
def test_step_zero_holds_the_recorded_values(family: str) -> None:
    params = load_openpi(experiment(family))
    assert_stats(params, json.loads((GOLDEN / family / "param_stats.json").read_text()))
    check_finite(params)


@pytest.mark.parametrize("family", TRAINED)
def test_trained_weights_are_the_average_where_there_is_one(family: str) -> None:
    params = load_openpi(experiment(family, "ckpt_after3"))
    steps = json.loads((GOLDEN / family / "train_steps.json").read_text())
    assert_stats(params, steps["ema_params"] or steps["params"])
    if steps["ema_params"] is None:
        final = np.load(GOLDEN / family / "train_steps.npz")
        leaves = flatten(params)
        names = [name for name in final.files if name.startswith("final/")]
        assert names
        for name in names:
            np.testing.assert_array_equal(leaves[name.removeprefix("final/")].astype(np.float32), final[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value_suffix", [True, False])
def test_saved_again_it_is_the_same_checkpoint(family: str, value_suffix: bool, tmp_path: Path) -> None:
    golden = find_params(experiment(family)).parent
    stats = {path.parent.name: path for path in golden.glob("assets/*/norm_stats.json")}
    params = load_openpi(golden)
    step = save_openpi(params, tmp_path / "run" / "5", norm_stats=stats, value_suffix=value_suffix)

    assert_identical(load_openpi(tmp_path / "run"), params)
    assert layout(step) == layout(golden) | {CHECKSUMS_FILE}
    for asset, source in stats.items():
        assert (step / "assets" / asset / "norm_stats.json").read_bytes() == source.read_bytes()
    ours, theirs = (json.loads((s / "params" / "_METADATA").read_text()) for s in (step, golden))
    if value_suffix:
        assert ours["tree_metadata"] == theirs["tree_metadata"]
    else:  # as in OpenPI's released weights
        names = {re.sub(r", 'value'\)$", ")", name) for name in theirs["tree_metadata"]}
        assert set(ours["tree_metadata"]) == names
    assert ours["use_zarr3"] is theirs["use_zarr3"] is False


@pytest.mark.parametrize("family", FAMILIES)
def test_pytorch_in_float32_comes_back_bit_by_bit(family: str, tmp_path: Path) -> None:
    params = merged(family)
    save_pytorch(params, tmp_path / "pt", action_horizon=4, dtype="float32")
    reference = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert_identical(load(tmp_path / "pt", reference), params)


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_in_bfloat16_every_value_is_rounded_once(family: str) -> None:
    stored = load_openpi(experiment(family))
    reference = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), stored)
    expected = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), stored)
    assert_identical(load(experiment(family), reference, dtype=ml_dtypes.bfloat16), expected)


@pytest.mark.parametrize("family", ADAPTED)
def test_merged_and_taken_through_pytorch_the_policy_is_openpis(family: str, tmp_path: Path) -> None:
    config, inputs, outputs = ALL[family].config, ALL[family].inputs, ALL[family].outputs
    plain = replace(config, vlm=replace(config.vlm, attn_lora=None, ffn_lora=None))
    plain = replace(plain, expert=replace(config.expert, attn_lora=None, ffn_lora=None))
    params = merged(family)
    assert leaf_shapes(params) == leaf_shapes(param_shapes(plain))
    save_pytorch(params, tmp_path / "pt", action_horizon=config.horizon, dtype="float32")
    # Frozen leaves keep the type OpenPI computed these outputs in: a bfloat16 embedding is scaled in bfloat16.
    params = load(tmp_path / "pt", jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    policy = Pi0(plain)

    @jax.jit
    def velocity(params, observation, x_t, time):
        return policy.velocity(params, policy.encode(params, observation), x_t, time)

    found = velocity(params, ALL[family].observation, outputs["x_t"][:, None], inputs["time"][:, None])
    np.testing.assert_allclose(found[:, 0], outputs["v_t"], **OUTPUT)
