"""Evaluate policies in your own simulator, with confidence intervals and a paired comparison.

    python examples/05_own_simulator.py --episodes 200

The simulator is my_simulator.py. A policy is any function from observations to chunks of actions: here two scripted
ones, one of them noisy. 09_compare_checkpoints.py does the same with checkpoints.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from my_simulator import POINT, REACH

import pirl

parser = argparse.ArgumentParser()
parser.add_argument("--episodes", type=int, default=200)
args = parser.parse_args()

# Steps the environment and checks its observations against the robot's keys and sizes; raises if anything is wrong.
print(pirl.check_env(pirl.GymEnv(REACH), POINT), end="\n\n")


def act(noise: Any, observation: pirl.Observation, keys: jax.Array) -> jax.Array:
    """Four steps straight towards the goal, plus noise; `noise` takes the place of a policy's weights."""
    direction = (observation.state[:, 2:] - observation.state[:, :2])[:, None]
    chunk = jnp.clip(direction, -1, 1) * jnp.ones((1, 4, 1))
    return chunk + noise * jax.vmap(lambda key: jax.random.normal(key, (4, 2)))(keys)


transform = pirl.Transform(robot=POINT, norm_stats=None, tokenizer=None, action_dim=2, state_dim=4)
policy = pirl.ChunkPolicy(act, transform, batch_size=32, execute=4, cameras=())
with pirl.LocalPool(REACH, 32) as pool:  # pirl.ProcessPool for slow simulators
    contexts = pirl.fixed_contexts(pool.info, args.episodes, "test")  # the same initial states every time
    steady = pirl.evaluate(pool, policy.use(0.0, jax.random.key(0)), contexts)
    shaky = pirl.evaluate(pool, policy.use(2.0, jax.random.key(0)), contexts)

print(f"steady: {steady.success}, mean steps {steady.metrics()['eval/length']:.1f}")
print(f"shaky:  {shaky.success}, mean steps {shaky.metrics()['eval/length']:.1f}")
pairs = pirl.compare(shaky, steady)
print(f"difference {pairs.difference:+.3f}, p = {pairs.p_value:.2g} (McNemar, exact, on the same initial states)")
