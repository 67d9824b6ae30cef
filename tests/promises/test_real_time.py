"""A policy trained with given steps goes on as they began; where none are given, it goes where the noise leads."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pirl.agents.agent import TrainState
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner
from pirl.models import flow
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from small_pi0 import SMALL

SIZE, STEPS, DIM = 32, 300, 2
POLICY = Pi0(replace(SMALL, cameras=(), action_dim=DIM, horizon=4))


def seen(count: int) -> dict[str, np.ndarray]:
    """The same for all: nothing in it says which way to go."""
    prompt = np.ones((count, POLICY.config.token_len), np.int32)
    return {
        "image": {},
        "image_mask": {},
        "state": np.zeros((count, DIM), np.float32),
        "tokenized_prompt": prompt,
        "tokenized_prompt_mask": prompt == 1,
    }


def trained() -> TrainState:
    """Clones demonstrations that go left or right, the whole chunk long."""
    agent = BC(
        policy=POLICY,
        config=BCConfig(augment=False, flow_draws=4, ema_decay=None, real_time_delay=2),
        policy_learner=Learner(tx=optax.adam(3e-3)),
        real_action_dim=DIM,
    )

    @jax.jit
    def step(state: TrainState, key: jax.Array) -> TrainState:
        way = jnp.where(jax.random.bernoulli(key, shape=(SIZE, 1, 1)), 1.0, -1.0)
        batch = {"observations": seen(SIZE), "actions": jnp.tile(way, (1, 4, DIM)), "valid": jnp.ones((SIZE, 4))}
        return agent.update(state, batch, key)[0]

    state = agent.init(jax.random.key(0))
    for key in jax.random.split(jax.random.key(1), STEPS):
        state = step(state, key)
    return state


def test_given_steps_decide_how_a_chunk_goes_on() -> None:
    state, way = trained(), np.tile([[1.0], [-1.0]], (32, 1))

    @jax.jit
    def sample(noise: jax.Array, given: jax.Array) -> jax.Array:
        context = POLICY.encode(state.policy, Observation.from_dict(seen(64)))
        before = jnp.asarray(way[:, :, None] * np.ones((1, 4, DIM)), jnp.float32)
        return flow.sample(
            POLICY, state.policy, context, noise, steer=lambda velocity: flow.prefixed(velocity, before, given)
        )

    noise = jax.random.normal(jax.random.key(2), (64, 1, 4, DIM))
    last = np.asarray(sample(noise, jnp.full(64, 1)))[:, 0, -1, 0]
    assert np.mean(np.sign(last) == way[:, 0]) >= 0.95
    assert np.abs(last - way[:, 0]).mean() < 0.25
    free = np.asarray(sample(noise, jnp.zeros(64, int)))[:, 0, -1, 0]
    assert 0.2 < np.mean(free > 0) < 0.8
    assert 0.2 < np.mean(np.sign(free) == way[:, 0]) < 0.8
    np.testing.assert_allclose(np.abs(free).mean(), 1.0, atol=0.25)
