"""The memory plan: measured peaks, what each remat setting keeps, real bytes, and advice that holds."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.errors import ConfigError
from pirl.models.config import PRESETS, Pi0Config, Remat
from pirl.models.freeze import cast_frozen, split, trainable_mask
from pirl.models.pi0 import param_shapes
from pirl.training.activations import Load, activations
from pirl.training.config import AdamW
from pirl.training.memory import GIB
from pirl.training.optim import make_optimizer
from pirl.training.plan import plan

PI0 = PRESETS["pi0"]
TINY = PRESETS["pi0_tiny"]


@pytest.mark.parametrize(
    ("remat", "batch", "cameras", "measured", "tolerance"),
    [
        ("full", 32, 3, 66.0, 0.02),
        ("names", 32, 3, 106.0, 0.02),
        ("names", 32, 2, 91.0, 0.02),
        # OpenPI's step is another program of the same size.
        ("full", 32, 3, 71.6, 0.08),
        ("full", 64, 3, 77.3, 0.03),
    ],
)
def test_the_plan_agrees_with_peaks_measured_on_a_gpu(
    remat: Remat, batch: int, cameras: int, measured: float, tolerance: float
) -> None:
    found = plan(PI0, batch_size=batch, cameras=cameras, remat=remat, device_gb=139)
    assert found.parameters == found.trainable == 3_238_048_528
    assert found.peak / GIB == pytest.approx(measured, rel=tolerance)
    assert found.accumulate == 1
    largest = plan(PI0, batch_size=found.largest_batch, cameras=cameras, remat=remat, device_gb=139)
    assert largest.accumulate == 1
    assert largest.usable - largest.peak < (found.peak - largest.peak) / (batch - largest.batch_size)
    assert largest.peak <= largest.usable


@pytest.mark.parametrize("model", [PI0, TINY], ids=["pi0", "pi0_tiny"])
def test_what_is_kept_is_what_the_remat_settings_say(model: Pi0Config) -> None:
    cameras = len(model.cameras)
    size = jnp.dtype(model.dtype).itemsize
    prefix, suffix = cameras * model.tokens_per_image + model.token_len, model.horizon + 1
    vlm, expert, vision, heads = model.vlm, model.expert, model.vision, model.vlm.num_heads * model.vlm.head_dim
    kv = 2 * vlm.num_kv_heads * vlm.head_dim
    full, names, dots = (
        activations(replace(model, remat=remat), "full", cameras) for remat in ("full", "names", "dots")
    )
    patches = cameras * model.tokens_per_image
    inputs = {"vlm": prefix * vlm.width * vlm.depth, "vision": patches * vision.width * vision.depth}
    for part, stack in inputs.items():
        # Beside the stack of block inputs stand some arrays of a single layer, before and after the scan.
        single = full.saved[part].per_sample - stack * size
        assert 0 <= single < (0.4 if model is PI0 else 5) * stack * size
    named = {
        "vlm": prefix * (2 * vlm.mlp_dim + 2 * heads + kv),
        "expert": suffix * (2 * expert.mlp_dim + 2 * heads + kv),
        "vision": patches * (3 * vision.width + vision.mlp_dim),
    }
    assert {part: load.per_sample for part, load in names.kept.items()} == {p: n * size for p, n in named.items()}
    assert dots.kept["vlm"].per_sample == prefix * (2 * vlm.mlp_dim + heads + kv + vlm.width) * size
    assert dots.kept["vision"].per_sample == patches * (4 * vision.width + vision.mlp_dim) * size
    products = prefix * (2 * heads + kv + 2 * vlm.mlp_dim + 2 * vlm.width) * size + vlm.num_heads * prefix**2 * 4
    assert full.products["vlm"].per_sample == products
    assert full.backward("vlm").per_sample == 2 * products
    assert names.backward("vlm").per_sample == 2 * products - named["vlm"] * size
    assert full.cache == Load(0, vlm.depth * prefix * kv * size)


def test_resident_bytes_are_those_of_real_arrays() -> None:
    for rule in ("full", "expert_only"):
        params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), param_shapes(TINY))
        mask = trainable_mask(params, TINY, rule)
        params = cast_frozen(params, mask)
        trainable = split(params, mask)[0]
        moments = make_optimizer(AdamW(), 1e-3).init(trainable)
        found = plan(TINY, batch_size=4, device_gb=1, rule=rule, critic_parameters=1000)
        params_bytes, trainable_bytes = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (params, trainable))
        assert found.parts["params"] == found.parts["ema"] == params_bytes
        assert found.parts["optimizer"] == sum(x.nbytes for x in jax.tree.leaves(moments))
        assert found.parts["optimizer"] == pytest.approx(2 * trainable_bytes, abs=16)
        assert found.parts["critic"] == pytest.approx(4 * 4000, abs=16)
        assert found.parts["gradients"] <= trainable_bytes
        assert found.parts["copy"] == plan(TINY, batch_size=4, device_gb=1, rule=rule, ema=False).parts["ema"] == 0
        kept = plan(TINY, batch_size=4, device_gb=1, rule=rule, copy=True)
        assert kept.parts["copy"] == sum(2 * x.size for x in jax.tree.leaves(params))
        assert kept.peak - found.peak == kept.parts["copy"] - found.parts["critic"]


def test_frozen_parts_keep_nothing_and_are_still_run_forward() -> None:
    needs = activations(PI0, "vlm_frozen", 3)
    assert needs.saved["vision"] == needs.saved["vlm"] == Load()
    assert needs.saved["expert"].per_sample > 0
    found = plan(PI0, batch_size=32, device_gb=24, rule="vlm_frozen")
    assert found.phase == "forward pass of the VLM"
    whole = plan(PI0, batch_size=32, device_gb=139)
    assert found.peak < whole.peak / 3
    assert found.trainable < PI0.vlm.width * 1e6
    # Adapters leave the backward pass through the VLM in place.
    adapted = activations(PRESETS["pi0_lora"], "lora", 3)
    assert adapted.saved["vlm"].per_sample >= activations(PI0, "full", 3).saved["vlm"].per_sample


def test_sharding_divides_what_is_large_and_splits_the_batch() -> None:
    one, eight = (plan(PI0, batch_size=64, device_gb=24, devices=n, fsdp=n) for n in (1, 8))
    for name in ("params", "optimizer", "ema"):
        assert eight.parts[name] == pytest.approx(one.parts[name] / 8, rel=0.01)
        assert eight.parts[name] > one.parts[name] / 8, "small leaves are on every device"
    assert not one.fits
    assert eight.accumulate == 1
    copies = plan(PI0, batch_size=64, device_gb=80, devices=8, fsdp=1)
    assert copies.parts["params"] == one.parts["params"]
    assert copies.largest_batch % 8 == 0


def test_a_batch_too_large_is_split_into_the_fewest_parts() -> None:
    found = plan(PI0, batch_size=256, device_gb=96, remat="full")
    assert found.accumulate is not None
    assert found.accumulate > 1
    assert found.peak <= found.usable
    assert found.largest_batch < 256
    gradients = 4 * found.parameters
    assert found.parts["gradients"] > gradients, "the sum so far is one more set"
    assert "in " + str(found.accumulate) + " parts" in str(found)
    assert any(line.startswith("no EMA") for line in found.suggestions)


def test_where_nothing_fits_what_is_suggested_does() -> None:
    found = plan(PI0, batch_size=8, device_gb=24)
    assert found.accumulate is None
    assert found.largest_batch == 0
    assert "does not fit" in str(found)
    assert {line.split(":")[0] for line in found.suggestions} == {
        "VLM frozen (expert and heads train)",
        "expert only",
        "LoRA",
    }
    assert plan(PI0, batch_size=8, device_gb=24, rule="expert_only").fits
    # Too small for any of them alone.
    combined = plan(PI0, batch_size=8, device_gb=12, devices=2)
    assert combined.suggestions
    assert all("fsdp 2, no EMA, remat full" in line for line in combined.suggestions)
    assert "larger or more devices" in plan(PI0, batch_size=8, device_gb=2).suggestions[0]


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="fsdp is 3 and there are 8 devices"):
        plan(TINY, batch_size=8, device_gb=1, devices=8, fsdp=3)
    with pytest.raises(ConfigError, match="a batch of 9 over 8 devices"):
        plan(TINY, batch_size=9, device_gb=1, devices=8)
    with pytest.raises(ConfigError, match="unknown optimizer 'adamv'"):
        plan(TINY, batch_size=8, device_gb=1, optimizer="adamv")
