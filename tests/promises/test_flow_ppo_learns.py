"""PPO and GRPO learn, with either exploration, and coin tosses teach them nothing: one step in the plane, a flow policy
with four modes, a reward on one of them. What is measured is the plain policy, which follows the ODE.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents import objectives as ob
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig, FlowPPOConfig
from pirl.agents.flow_ppo import FlowPPO
from pirl.agents.learner import Learner
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.noise_head import NoiseHead
from pirl.models.observation import Observation

SEEDS, GROUPS, SIZE, ITERATIONS, UPDATES, STEPS = 2, 32, 8, 40, 8, 5
POLICY = MLPFlow(MLPFlowConfig(state_dim=1, action_dim=2, horizon=1, hidden=(64, 64, 64)))
MODES = 0.7 * jnp.array([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
KINDS = [(algorithm, exploration) for algorithm in ("ppo", "grpo") for exploration in ("flow_sde", "flow_noise")]
# Half of the time goes into computing, so let the compiler work a little (tests/conftest.py tells it not to).
jitted = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


def observations(size: int) -> Observation:
    return Observation(images={}, image_masks={}, state=jnp.zeros((size, 1)))


@functools.cache
def cloned():
    """Weights of each seed after imitating all four modes alike."""
    agent = BC(policy=POLICY, config=BCConfig(), policy_learner=Learner(tx=optax.adam(2e-3)), real_action_dim=2)

    def step(state, key):
        mode_key, noise_key, key = jax.random.split(key, 3)
        modes = MODES[jax.random.randint(mode_key, (256,), 0, 4)]
        actions = modes + 0.12 * jax.random.normal(noise_key, modes.shape)
        batch = {
            "observations": {"state": jnp.zeros((256, 1))},
            "actions": actions[:, None],
            "valid": jnp.ones((256, 1)),
        }
        return agent.update(state, batch, key)[0], None

    def run(key):
        return jax.lax.scan(step, agent.init(key), jax.random.split(key, 2000))[0].params["policy"]

    return jitted(jax.vmap(run))(jax.random.split(jax.random.key(0), SEEDS))


@functools.cache
def make(algorithm: str, exploration: str) -> FlowPPO:
    config = FlowPPOConfig(algorithm=algorithm, exploration=exploration, group_size=SIZE, entropy_weight=0.0)
    critic = make_critic(
        CriticConfig(hidden=(16,), bins=21), feature_width=None, state_dim=1, real_action_dim=2, critic_horizon=1
    )
    head = NoiseHead(
        horizon=1, action_dim=2, state_dim=1, feature_width=None, low=config.noise_low, high=config.noise_high, width=16
    )
    return FlowPPO(
        policy=POLICY,
        critic=critic,
        head=head,
        config=config,
        policy_learner=Learner(tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))),
        critic_learner=Learner(tx=optax.adam(3e-3)),
        real_action_dim=2,
        flow_steps=STEPS,
        encoder_frozen=True,
    )


def reward(chunks):
    return (jnp.linalg.norm(chunks[:, 0] - MODES[0], axis=-1) < 0.2).astype(jnp.float32)


def iteration(agent: FlowPPO, coin, state, key):
    """Explore, judge, update several times."""
    act_key, coin_key, key = jax.random.split(key, 3)
    count = GROUPS * SIZE
    choice = agent.explore(state, observations(count), jax.random.split(act_key, count))
    notes = choice.notes
    earned = jnp.where(coin, jax.random.bernoulli(coin_key, 0.2, (count,)), reward(choice.chunk))
    if agent.config.algorithm == "ppo":
        advantage = earned - notes["value"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    else:
        advantage = ob.rloo(earned.reshape(GROUPS, SIZE)).ravel()
    batch = {
        "observations": {"state": jnp.zeros((count, 1))},
        "executed": jnp.ones((count, 1)),
        "notes": notes,
        "advantage": advantage,
        "return": earned,
        "weight": jnp.ones(count),
    }

    def update(number, carry):
        state, _, held = carry
        state, metrics = agent.update(state, batch | {"fresh": (number == 0).astype(jnp.float32)}, key)
        return state, metrics["ppo/kl"], held + metrics["ppo/held"]

    state, kl, held = jax.lax.fori_loop(0, UPDATES, update, (state, jnp.float32(0), jnp.float32(0)))
    return state, {"success": reward(choice.chunk).mean(), "kl": kl, "held": held}


@functools.cache
def program(algorithm: str, exploration: str):
    agent = make(algorithm, exploration)

    def run(weights, key, coin):
        def success(state):
            chunks = agent.act(state, observations(2000), jax.random.split(jax.random.key(7), 2000))
            return reward(chunks).mean()

        state = agent.init(key, weights)
        before = success(state)
        step = functools.partial(iteration, agent, coin)
        state, history = jax.lax.scan(step, state, jax.random.split(key, ITERATIONS))
        return history | {"before": before, "after": success(state)}

    return jitted(jax.vmap(run, in_axes=(0, 0, None)))


@functools.cache
def trained(algorithm: str, exploration: str, coin: bool = False) -> dict[str, np.ndarray]:
    keys = jax.random.split(jax.random.key(1), SEEDS)
    return jax.tree.map(np.asarray, program(algorithm, exploration)(cloned(), keys, coin))


@pytest.mark.parametrize(("algorithm", "exploration"), KINDS)
def test_it_learns(algorithm: str, exploration: str):
    found = trained(algorithm, exploration)
    assert np.all(found["before"] < 0.25), "the task is not solved from the start"
    assert np.all(found["after"] >= 0.85), found["after"]


@pytest.mark.parametrize(("algorithm", "exploration"), KINDS)
def test_coin_tosses_teach_nothing(algorithm: str, exploration: str):
    assert np.all(trained(algorithm, exploration, coin=True)["after"] < 0.4)


if __name__ == "__main__":
    for kind in KINDS:
        for coin in (False, True):
            found = trained(*kind, coin=coin)
            numbers = {name: np.round(x, 3).tolist() for name, x in found.items() if x.ndim == 1}
            shown = {name: np.round(found[name].mean(0)[::5], 3).tolist() for name in ("success", "kl", "held")}
            sys.stdout.write(f"{kind} coin={coin} {numbers} {shown}\n")
