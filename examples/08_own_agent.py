"""Your own algorithm in one file: its settings, its class, a recipe. Everything in pirl works with it.

    python examples/08_own_agent.py
    PYTHONPATH=examples pirl train 08_own_agent:RECIPE --exp-name mine --agent.smoothness 2

Imitation with a penalty on acceleration. One Euler step from the noisy chunk x_t to t = 0 estimates the policy's chunk;
its second difference is its acceleration. An algorithm that does not derive from another implements `init` and `update`
of `pirl.agents.agent.Agent`; its fields name the parts it is built from.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import pirl
from pirl.agents.bc import BC
from pirl.models import flow


@dataclass(frozen=True, kw_only=True)
class SmoothBCConfig(pirl.BCConfig):
    """Imitation with a penalty on acceleration."""

    agent: ClassVar[str] = "08_own_agent:SmoothBC"

    smoothness: float = 1.0
    """Weight of the squared acceleration."""


class SmoothBC(BC):
    """BC with a smoothness loss."""

    config: SmoothBCConfig

    def loss(self, params: Any, observation: Any, actions: jax.Array, valid: Any, draws: flow.Draws) -> jax.Array:
        """The loss per sample, as in BC."""
        x_t, u = flow.interpolate(actions, draws)
        v = self.policy.velocity(params, self.policy.encode(params, observation), x_t, draws.time)
        acceleration = jnp.diff(x_t - draws.time[..., None, None] * v, n=2, axis=2)
        return flow.chunk_loss(jnp.square(v - u)) + self.config.smoothness * jnp.square(acceleration).mean((1, 2, 3))


BASE = pirl.get_config("debug_bc")  # demonstrations made on the spot; here without pictures, for a small network
RECIPE = replace(
    BASE,
    name="smooth_bc",
    agent=SmoothBCConfig(),
    model=pirl.MLPFlowConfig(state_dim=2, action_dim=2, horizon=6, hidden=(64, 64)),
    data=replace(BASE.data, cameras=(), tokenizer="none"),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    saved = replace(RECIPE.checkpoint, base_dir="example_runs/checkpoints", save_interval=steps)
    for name, weight in (("plain", 0.0), ("smooth", 1.0)):
        own = replace(RECIPE, exp_name=name, agent=SmoothBCConfig(smoothness=weight), checkpoint=saved)
        config = replace(own, num_train_steps=steps, log_interval=max(1, steps // 3))
        pirl.train(config, overwrite=True)
        acting = pirl.open_checkpoint(config.run_dir)
        chunks = [acting.chunk({"state": np.zeros(2, np.float32)}, seed=seed) for seed in range(64)]
        print(f"{name}: mean squared acceleration of 64 chunks {np.square(np.diff(chunks, n=2, axis=1)).mean():.4f}")
