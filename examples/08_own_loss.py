"""A loss of your own, in one class, trained through the same loop: checkpoints, metrics, resuming, sharding.

    python examples/08_own_loss.py

Imitation that also asks for smooth chunks. One Euler step from the noisy chunk x_t to t = 0 gives the chunk the policy
means; its second difference is its acceleration. An algorithm that is not a variation implements `init`, `update` and
`act` of `pirl.agents.agent.Agent` and is handed to `train` in the same way.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pirl
from pirl.agents.bc import BC
from pirl.models import flow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()


@dataclass(frozen=True, kw_only=True)
class SmoothBC(BC):
    """Imitation, and a penalty on acceleration."""

    smoothness: float

    def loss(self, params: Any, observation: Any, actions: jax.Array, valid: Any, draws: flow.Draws) -> jax.Array:
        """One number per sample, as in BC."""
        x_t, u = flow.interpolate(actions, draws)
        v = self.policy.velocity(params, self.policy.encode(params, observation), x_t, draws.time)
        acceleration = jnp.diff(x_t - draws.time[..., None, None] * v, n=2, axis=2)
        return flow.chunk_loss(jnp.square(v - u)) + self.smoothness * jnp.square(acceleration).mean((1, 2, 3))


recipe = pirl.get_config("debug_bc")  # demonstrations made on the spot; here without pictures, for a small network
config = replace(
    recipe,
    model=pirl.MLPFlowConfig(state_dim=2, action_dim=2, horizon=6, hidden=(64, 64)),
    data=replace(recipe.data, cameras=(), tokenizer="none"),
    checkpoint=replace(recipe.checkpoint, base_dir="example_runs/checkpoints", save_interval=args.steps),
    num_train_steps=args.steps,
    log_interval=max(1, args.steps // 3),
)
for name, smoothness in (("plain", 0.0), ("smooth", 1.0)):
    config = replace(config, exp_name=name)
    pirl.train(config, overwrite=True, agent=SmoothBC(**vars(pirl.build_agent(config)), smoothness=smoothness))
    acting = pirl.open_checkpoint(config.run_dir)
    chunks = [acting.chunk({"state": np.zeros(2, np.float32)}, seed=seed) for seed in range(64)]
    print(f"{name}: mean squared acceleration of 64 chunks {np.square(np.diff(chunks, n=2, axis=1)).mean():.4f}")
