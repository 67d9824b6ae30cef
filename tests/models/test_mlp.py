"""The MLP policy that predicts clean chunks: its field against NumPy, where sampling ends, and what it is for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.models import flow
from pirl.models.config import MLPFlowConfig
from pirl.models.mlp import MIN_TIME, MLPFlow

CONFIG = MLPFlowConfig(state_dim=3, action_dim=2, horizon=4, hidden=(16,), predicts="chunk")
POLICY = MLPFlow(CONFIG)


@pytest.mark.parametrize("time", [1.0, 0.3, 0.05, 0.0])
def test_the_field_against_numpy(time: float):
    """v = (x_t - f(s, x_t, t)) / max(t, 0.1), in float64."""
    params = jax.tree.map(lambda x: x + 0.1, POLICY.init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    state = rng.normal(size=(2, 3))
    x = rng.normal(size=(2, 3, 4, 2))
    found = POLICY.velocity(params, jnp.asarray(state), jnp.asarray(x), jnp.full((2, 3), time))
    (first, bias), (last, offset) = (
        [np.asarray(params[f"dense_{i}"][name], np.float64) for name in ("kernel", "bias")] for i in (0, 1)
    )
    for b in range(2):
        for n in range(3):
            h = np.concatenate([state[b], x[b, n].ravel(), [time]]) @ first + bias
            gelu = h * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            chunk = (gelu @ last + offset).reshape(4, 2)
            np.testing.assert_allclose(found[b, n], (x[b, n] - chunk) / max(time, 0.1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 3, 5, 10])
def test_the_right_chunk_is_the_right_velocity_and_where_sampling_ends(steps: int):
    """A network that answers a, whatever it sees, has no loss from t_min on, and samples a."""
    a = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 2)), jnp.float32)
    params = jax.tree.map(jnp.zeros_like, POLICY.init(jax.random.key(0)))
    params["dense_1"]["bias"] = a.ravel()
    context, noise = jnp.zeros((1, 3)), jax.random.normal(jax.random.key(1), (1, 64, 4, 2))
    times = jnp.linspace(MIN_TIME, 1.0, 64)[None]
    error = flow.squared_error(POLICY, params, context, a, flow.Draws(noise, times))
    np.testing.assert_allclose(error, 0.0, atol=1e-8)
    sampled = flow.sample(POLICY, params, context, noise, num_steps=steps)
    np.testing.assert_allclose(sampled, jnp.broadcast_to(a[:, None], noise.shape), atol=2e-5)


def test_the_same_weights_fit_both():
    """What is predicted is a matter of reading: the tree is the same."""
    shapes = MLPFlow(replace(CONFIG, predicts="velocity")).param_shapes()
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, POLICY.param_shapes())


def test_a_narrow_network_samples_long_chunks_without_noise():
    """280 numbers that two decide, by a network 32 wide: as a velocity they must carry their noise through it."""
    basis = jnp.asarray(np.random.default_rng(2).normal(size=(2, 20, 14)), jnp.float32) / np.sqrt(2)
    base = MLPFlowConfig(state_dim=2, action_dim=14, horizon=20, hidden=(32, 32))

    def error(policy: MLPFlow) -> float:
        tx = optax.adam(3e-3)

        @jax.jit
        def train(params, opt, keys):
            def step(carry, key):
                params, opt = carry
                state = jax.random.normal(key, (64, 2))
                chunks = jnp.tensordot(state, basis, 1)
                draws = flow.draw(*jax.random.split(key), chunks, 2)

                def loss(params):
                    return flow.chunk_loss(flow.squared_error(policy, params, state, chunks, draws)).mean()

                updates, opt = tx.update(jax.grad(loss)(params), opt)
                return (optax.apply_updates(params, updates), opt), None

            return jax.lax.scan(step, (params, opt), keys)[0]

        params = policy.init(jax.random.key(0))
        params, _ = train(params, tx.init(params), jax.random.split(jax.random.key(1), 400))
        state = jax.random.normal(jax.random.key(2), (64, 2))
        noise = jax.random.normal(jax.random.key(3), (64, 4, 20, 14))
        found = flow.sample(policy, params, state, noise, num_steps=5)
        return float(jnp.square(found - jnp.tensordot(state, basis, 1)[:, None]).mean())

    velocity, chunk = (error(MLPFlow(replace(base, predicts=predicts))) for predicts in ("velocity", "chunk"))
    assert chunk < 0.1 * velocity
    assert chunk < 0.1
