"""A tiny π₀ and its inputs, for tests that compare programs which must give equal results."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pirl.models.config import GemmaConfig, LoRAConfig, Pi0Config, SigLIPConfig
from pirl.models.observation import Observation
from pirl.models.params import nest
from pirl.models.pi0 import declare

VLM = GemmaConfig(width=24, depth=3, mlp_dim=32, num_heads=4, num_kv_heads=2, head_dim=8)
EXPERT = replace(VLM, width=16, mlp_dim=20)
LORA = LoRAConfig(rank=3, alpha=7.0)
SMALL = Pi0Config(
    vlm=VLM,
    expert=EXPERT,
    vision=SigLIPConfig(width=16, depth=2, mlp_dim=20, num_heads=2, patch_size=8),
    image_size=16,
    vocab_size=40,
    action_dim=5,
    horizon=3,
    max_token_len=6,
    dtype="float32",
    remat="none",
    attention="auto",
)
CONFIGS = {
    "pi0": SMALL,
    "pi05": replace(SMALL, pi05=True),
    "lora": replace(
        SMALL,
        vlm=replace(VLM, ffn_lora=LORA),
        expert=replace(EXPERT, attn_lora=LORA, ffn_lora=LoRAConfig(rank=2, alpha=3.0)),
    ),
}
BATCH, NUM = 3, 4
HALF = replace(SMALL, dtype="bfloat16", vlm=replace(VLM, head_dim=16), expert=replace(EXPERT, head_dim=16))


def weights(config: Pi0Config) -> Any:
    """Weights without zero leaves, of which fresh weights have many."""
    rng = np.random.default_rng(0)
    return nest(
        {path: jnp.asarray(rng.normal(0, 0.25, leaf.shape), jnp.float32) for path, leaf in declare(config).items()}
    )


def observation(config: Pi0Config) -> Observation:
    """One sample lacks its first camera, so that valid tokens do not come first; prompts differ in length."""
    rng = np.random.default_rng(1)
    present = ([True, False, True], [True, True, True], [True, False, False])
    size = (BATCH, config.image_size, config.image_size, 3)
    return Observation(
        images={name: jnp.asarray(rng.integers(0, 256, size), jnp.uint8) for name in config.cameras},
        image_masks={name: jnp.asarray(mask) for name, mask in zip(config.cameras, present, strict=True)},
        state=jnp.asarray(rng.normal(size=(BATCH, config.action_dim)), jnp.float32),
        tokenized_prompt=jnp.asarray(rng.integers(1, config.vocab_size, (BATCH, config.token_len)), jnp.int32),
        tokenized_prompt_mask=jnp.asarray(np.arange(config.token_len)[None] < np.array([[4], [2], [3]])),
    )


def points(config: Pi0Config, num: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(2)
    x_t = rng.normal(size=(BATCH, num, config.horizon, config.action_dim))
    return jnp.asarray(x_t, jnp.float32), jnp.asarray(rng.uniform(size=(BATCH, num)), jnp.float32)
