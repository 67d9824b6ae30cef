"""The golden numbers: their location, readers and tolerances.

`PIRL_GOLDEN` may name another folder of the same layout, made with other seeds and dimensions; every size is taken from
its `config.json`.
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pirl.checkpoints.weights import load_openpi
from pirl.models.config import GemmaConfig, LoRAConfig, Pi0Config, SigLIPConfig
from pirl.models.observation import Observation

HERE = Path(__file__).parent
GOLDEN = Path(os.environ.get("PIRL_GOLDEN", HERE / "golden" / "openpi"))
STATIC = HERE / "golden" / "static"
TRANSFORMS = next(folder for root in (GOLDEN, HERE / "golden" / "openpi") if (folder := root / "transforms").is_dir())
"""Golden data transforms and schedules, from another folder if this set has none."""

# Tolerances for float32 on a CPU. The goldens are from jax 0.5.3; other XLA versions differ by at most this much.
OUTPUT = dict(rtol=0, atol=2e-5)  # activations and actions of size ~1-5, with noise and time given
FROM_RNG = dict(rtol=0, atol=1e-4)  # noise and time drawn inside jit: an ulp of t is visible in its embedding
GRADIENT = dict(rtol=1e-4, atol=1e-6)
WEIGHTS_AFTER_3_STEPS = dict(rtol=0, atol=1e-5)
BFLOAT16 = dict(rtol=0, atol=3e-2)

# Gradients that are analytically zero, in practice rounding noise, which Adam would amplify.
NOISE_GRADIENTS = ("MultiHeadDotProductAttention_0/key/bias",)


@dataclass(frozen=True)
class Family:
    """One model of the golden set, with its weights, inputs and outputs."""

    root: Path

    @cached_property
    def raw(self) -> dict:
        return self.json("config")

    @cached_property
    def config(self) -> Pi0Config:
        model, vision = self.raw["model"], dict(self.raw["siglip"])
        rows, columns = vision.pop("patch_size")
        assert rows == columns
        return Pi0Config(
            pi05=model["pi05"],
            vlm=self._gemma(model["paligemma_variant"]),
            expert=self._gemma(model["action_expert_variant"]),
            vision=SigLIPConfig(**vision, patch_size=rows),
            vocab_size=self.raw["vocab_size"],
            action_dim=model["action_dim"],
            horizon=model["action_horizon"],
            max_token_len=model["max_token_len"],
            dtype=model["dtype"],
        )

    def _gemma(self, variant: str) -> GemmaConfig:
        sizes = dict(self.raw["gemma_variants"][variant])
        lora = sizes.pop("lora", {})
        adapters = {f"{part}_lora": LoRAConfig(**lora[part]) for part in lora}
        return GemmaConfig(**sizes, **adapters)

    @cached_property
    def step_dir(self) -> Path:
        """The step-0 checkpoint directory."""
        return next((self.root / "ckpt").rglob("_CHECKPOINT_METADATA")).parent

    @cached_property
    def after3_dir(self) -> Path | None:
        """The checkpoint after three training steps, if the set has one."""
        return next((p.parent for p in (self.root / "ckpt_after3").rglob("_CHECKPOINT_METADATA")), None)

    @cached_property
    def params(self) -> dict:
        return load_openpi(self.step_dir)

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        return self.arrays("inputs")

    @cached_property
    def outputs(self) -> dict[str, np.ndarray]:
        return self.arrays("outputs")

    @cached_property
    def observation(self) -> Observation:
        data = self.inputs
        cameras = self.config.cameras
        # Kept between calls, so it must not belong to the program that happens to be traced at the first one.
        with jax.ensure_compile_time_eval():
            return Observation(
                images={name: jnp.asarray(data[f"image/{name}"]) for name in cameras},
                image_masks={name: jnp.asarray(data[f"image_mask/{name}"]) for name in cameras},
                state=jnp.asarray(data["state"]),
                tokenized_prompt=jnp.asarray(data["tokenized_prompt"]),
                tokenized_prompt_mask=jnp.asarray(data["tokenized_prompt_mask"]),
            )

    def has(self, name: str) -> bool:
        return (self.root / name).exists()

    def json(self, name: str) -> dict:
        return json.loads((self.root / f"{name}.json").read_text())

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.root / f"{name}.npz", allow_pickle=False) as data:
            return dict(data)


FAMILIES = {path.parent.name: Family(path.parent) for path in sorted(GOLDEN.glob("*/config.json"))}
