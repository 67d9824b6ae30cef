"""Full-size parameter trees without allocating them: names, shapes, types, what trains, how it is sharded."""

import json
from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec

from golden_data import STATIC
from pirl.models import freeze, pi0
from pirl.models.config import GEMMA_VARIANTS, PRESETS, Pi0Config
from pirl.models.params import count, flatten
from pirl.parallel.sharding import fsdp_spec

LORA_VLM, LORA_EXPERT = GEMMA_VARIANTS["gemma_2b_lora"], GEMMA_VARIANTS["gemma_300m_lora"]
DUMMY = GEMMA_VARIANTS["dummy"]
VARIANTS = {
    "pi0": PRESETS["pi0"],
    "pi05": PRESETS["pi05"],
    "pi0_lora_both": PRESETS["pi0_lora"],
    "pi05_lora_both": PRESETS["pi05_lora"],
    "pi0_lora_vlm_only": Pi0Config(vlm=LORA_VLM),
    "pi0_lora_expert_only": Pi0Config(expert=LORA_EXPERT),
    "debug_dummy": Pi0Config(vlm=DUMMY, expert=DUMMY),
    "debug_dummy_pi05": Pi0Config(vlm=DUMMY, expert=DUMMY, pi05=True),
}


def test_every_golden_tree_is_checked():
    assert {path.stem.removeprefix("param_tree_") for path in STATIC.glob("param_tree_*.json")} == set(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tree(variant: str):
    config = VARIANTS[variant]
    golden = json.loads((STATIC / f"param_tree_{variant}.json").read_text())
    shapes = pi0.param_shapes(config)
    mask = freeze.trainable_mask(shapes, config)
    leaves, trains = flatten(freeze.freeze_dtypes(shapes, mask)), flatten(mask)
    assert set(leaves) == set(golden)
    for path, expected in golden.items():
        assert list(leaves[path].shape) == expected["shape"], path
        assert trains[path] == expected["trainable"], path
        # The golden file lists the types at initialisation; frozen leaves become bfloat16 in the train state.
        assert str(flatten(shapes)[path].dtype) == expected["dtype"], path
        assert str(leaves[path].dtype) == ("float32" if expected["trainable"] else "bfloat16"), path
        for fsdp in (2, 8):
            spec = fsdp_spec(leaves[path].shape, "float32", fsdp)
            assert spec == PartitionSpec(*expected[f"fsdp{fsdp}"]), (path, fsdp)


def test_totals():
    summary = json.loads((STATIC / "param_summary.json").read_text())
    for variant, expected in summary.items():
        config = VARIANTS[variant]
        shapes = pi0.param_shapes(config)
        trained, frozen = freeze.split(shapes, freeze.trainable_mask(shapes, config))
        assert count(flatten(shapes).values()) == expected["total"], variant
        assert count(flatten(trained).values()) == expected["trainable"], variant
        assert len(flatten(shapes)) == expected["n_leaves"], variant
        assert len(flatten(trained)) + len(flatten(frozen)) == expected["n_leaves"]


def test_own_presets_have_the_size_they_say():
    def total(name: str) -> int:
        return count(flatten(pi0.param_shapes(PRESETS[name])).values())

    assert 90e6 < total("pi0_small") < 110e6
    assert 0.2e6 < total("pi0_tiny") < 5e6


def test_freeze_rules():
    config = PRESETS["pi0"]
    shapes = pi0.param_shapes(config)
    trains = {
        rule: {p for p, t in flatten(freeze.trainable_mask(shapes, config, rule)).items() if t}
        for rule in ("full", "vlm_frozen", "expert_only", "frozen")
    }
    everything = set(flatten(shapes))
    heads = {p for p in everything if not p.startswith("PaliGemma/")}
    expert = {p for p in everything if "_1" in p and "llm" in p}
    assert trains == {"full": everything, "vlm_frozen": heads | expert, "expert_only": expert, "frozen": set()}
    assert count(flatten(shapes)[p] for p in expert) == 311_464_960
    assert freeze.default_rule(config) == "full"
    assert freeze.default_rule(replace(config, expert=LORA_EXPERT)) == "lora"
