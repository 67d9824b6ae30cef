"""Random paths: their steps have the densities that are claimed, and Flow-SDE's marginals are those of the ODE."""

import functools
from math import log, pi, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from naive_ppo import std_of_head
from pirl.agents import denoising
from pirl.models import flow
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import CriticInputs
from pirl.models.mlp import MLPFlow
from pirl.models.noise_head import NoiseHead

SIZE, HORIZON, DIM, STATE, STEPS = 2000, 1, 2, 3, 5
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(8,)))
HEAD = NoiseHead(horizon=HORIZON, action_dim=DIM, state_dim=STATE, feature_width=None, low=0.05, high=0.2, width=4)
CONTEXT = jax.random.normal(jax.random.key(5), (SIZE, STATE))


@functools.cache
def weights() -> dict:
    rng, shapes = np.random.default_rng(0), {"policy": POLICY.param_shapes(), "noise": HEAD.init(jax.random.key(0))}
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.6, x.shape), jnp.float32), shapes)


@functools.cache
def sampled(level: float, head: NoiseHead | None = None):
    sampler = denoising.Sampler(policy=POLICY, flow_steps=STEPS, level=level, head=head)
    keys = jax.random.split(jax.random.key(1), SIZE)
    chunks, path = jax.jit(sampler.sample)(weights(), CONTEXT, keys)
    return chunks, path, jax.jit(sampler.steps)(weights(), CONTEXT, path)


@pytest.mark.parametrize("head", [None, HEAD], ids=["sde", "noise"])
def test_steps_are_drawn_from_their_densities(head: NoiseHead | None):
    """(x' - μ)/σ is standard normal at every step; all steps have their turn; the path ends in the chunk."""
    chunks, path, steps = sampled(0.7, head)
    z = np.float64((path.points[:, 1:] - steps.mean) / steps.std)
    assert z.shape == (SIZE, 1 if head is None else STEPS, HORIZON, DIM)
    tolerance = 4 / sqrt(SIZE * DIM)
    np.testing.assert_allclose(z.mean((0, 2, 3)), 0, atol=tolerance)
    np.testing.assert_allclose((z**2).mean((0, 2, 3)), 1, atol=2 * tolerance)
    np.testing.assert_allclose((z**4).mean(), 3, atol=0.5)
    if head is not None:
        assert path.first.tolist() == [0] * SIZE
        np.testing.assert_array_equal(path.points[:, -1], chunks)
        return
    counts = np.bincount(path.first, minlength=STEPS)
    assert counts.sum() == SIZE
    assert np.all(np.abs(counts - SIZE / STEPS) < 4 * sqrt(SIZE / STEPS))
    last = np.asarray(path.first) == STEPS - 1
    np.testing.assert_array_equal(path.points[last, -1], chunks[last])
    for number in range(STEPS):  # one step is random, and the others follow the field
        mine = np.asarray(path.first) == number
        x = path.points[mine, 1]
        for i in range(number + 1, STEPS):
            t = jnp.full((len(x), 1), 1 - i / STEPS)
            x = x - POLICY.velocity(weights()["policy"], CONTEXT[mine], x[:, None], t)[:, 0] / STEPS
        np.testing.assert_allclose(x, chunks[mine], atol=1e-5)


def test_without_noise_it_is_the_ode():
    """Where noise goes to nothing, the path of each key ends where the ODE does that begins there."""
    chunks, path, _ = sampled(1e-7)
    first = np.asarray(path.first) == 0
    begin = path.points[first, :1]
    expected = flow.sample(POLICY, weights()["policy"], CONTEXT[first], begin, num_steps=STEPS)[:, 0]
    np.testing.assert_allclose(chunks[first], expected, atol=1e-5)


def test_times_are_those_of_euler():
    seen = []

    def velocity(x, t):
        jax.debug.callback(lambda t: seen.append(np.float32(t)), t[0, 0], ordered=True)
        return x

    jax.block_until_ready(flow.euler(velocity, jnp.zeros((1, 1, 1, 1)), 10))
    jax.effects_barrier()
    np.testing.assert_array_equal(denoising.times(10), seen)


@pytest.mark.parametrize("level", [0.3, 0.7])
def test_the_sde_keeps_the_marginals_of_the_ode(level: float):
    """Data N(2, 0.5²), whose field is known. With noise at every one of many steps all marginals stay; the same noise
    without its correction of the mean, which is what Flow-Noise adds, makes them wider.
    """
    mean, std, steps, count = 2.0, 0.5, 400, 40_000
    delta = 1 / steps
    time = (1 - np.arange(steps) / steps).astype(np.float32)

    def field(x, t):
        """E[ε - a | x_t = x]: the two are jointly Gaussian."""
        spread = t**2 + (1 - t) ** 2 * std**2
        return -mean + (t - (1 - t) * std**2) / spread * (x - (1 - t) * mean)

    def run(corrected: bool):
        def advance(carry, number):
            x, key = carry
            key, used = jax.random.split(key)
            t = jnp.broadcast_to(jnp.asarray(time)[number], (count, 1))
            v = field(x, t[..., None, None])
            moved, noise = denoising.sde_step(x, v, t, delta, level)
            moved = moved if corrected else denoising.ode_mean(x, v, delta)
            x = moved + noise * jax.random.normal(used, x.shape)
            return (x, key), jnp.stack([x.mean(), x.std()])

        begin = jax.random.normal(jax.random.key(0), (count, 1, 1, 1)), jax.random.key(1)
        return np.asarray(jax.jit(lambda b: jax.lax.scan(advance, b, jnp.arange(steps))[1])(begin))

    found, after = run(True), time - delta
    expected = np.stack([(1 - after) * mean, np.sqrt(after**2 + (1 - after) ** 2 * std**2)], 1)
    np.testing.assert_allclose(found, expected, atol=0.06)  # the first steps are long ones, where σ is nearly infinite
    np.testing.assert_allclose(found[40:], expected[40:], atol=0.02)
    assert run(False)[-1, 1] > std + (0.04 if level < 0.5 else 0.2)


def test_the_first_step_keeps_the_variance_of_noise():
    """There σ would be infinite; with the second step's it still takes out nearly what it puts in."""
    t, x = jnp.ones((1, 1)), jnp.full((1, 1, 1, 1), 3.0)
    mean, std = denoising.sde_step(x, 0 * x, t, 0.1, 0.5)
    sigma2 = 0.5**2 / 0.1
    np.testing.assert_allclose(mean, 3 * (1 - sigma2 * 0.1 / 2), rtol=1e-6)
    np.testing.assert_allclose(std, sqrt(sigma2 * 0.1), rtol=1e-6)
    assert float((mean[0, 0, 0, 0] / 3) ** 2 + std[0, 0, 0, 0] ** 2) == pytest.approx(1, abs=0.02)


def test_densities_divergence_and_entropy_of_gaussians():
    rng = np.random.default_rng(0)
    x, mean, old = rng.normal(size=(3, 7))
    std, std_old = rng.uniform(0.1, 2, (2, 7))
    given = [jnp.asarray(one, jnp.float32) for one in (x, mean, std, old, std_old)]
    density = -((x - mean) ** 2) / (2 * std**2) - np.log(std * sqrt(2 * pi))
    np.testing.assert_allclose(denoising.log_density(*given[:3]), density, rtol=1e-5)
    np.testing.assert_allclose(denoising.entropy(given[2]), 0.5 * np.log(2 * pi * np.e * std**2), rtol=1e-4, atol=1e-6)
    # By quadrature: ∫ p_old log(p_old / p_new).
    grid = np.linspace(-12, 12, 20_001)[:, None]
    logs = [-((grid - m) ** 2) / (2 * s**2) - np.log(s) - 0.5 * log(2 * pi) for m, s in ((old, std_old), (mean, std))]
    expected = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(0) * (grid[1] - grid[0])
    np.testing.assert_allclose(denoising.divergence(given[1], given[2], given[3], given[4]), expected, rtol=1e-3)


def test_the_noise_head_starts_in_the_middle_and_stays_in_its_bounds():
    inputs, keys = CriticInputs.of(CONTEXT[:4]), jax.random.split(jax.random.key(2))
    x, t = 3 * jax.random.normal(keys[0], (4, 2, HORIZON, DIM)), jax.random.uniform(keys[1], (4, 2))
    np.testing.assert_allclose(HEAD.std(HEAD.init(keys[0]), inputs, x, t), 0.1, rtol=1e-5)
    params = weights()["noise"]
    found = HEAD.std(params, inputs, x, t)
    assert found.min() >= 0.05
    assert found.max() <= 0.2
    assert found.max() > 1.2 * found.min()

    class Told:
        noise_low, noise_high, head_state_dim = 0.05, 0.2, STATE

    doubles = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for b in range(4):
        for n in range(2):
            expected = std_of_head(Told, doubles, np.float64(CONTEXT[b]), np.float64(x[b, n]), float(t[b, n]))  # type: ignore[arg-type]
            np.testing.assert_allclose(found[b, n], expected, rtol=1e-4)


def test_the_noise_head_reads_the_prefix_and_not_its_padding():
    head = NoiseHead(horizon=HORIZON, action_dim=DIM, state_dim=STATE, feature_width=6, low=0.05, high=0.2, width=4)
    params = jax.tree.map(lambda x: x + 0.3, head.init(jax.random.key(0)))
    features = jax.random.normal(jax.random.key(1), (2, 5, 6))
    mask = jnp.arange(5) < 3
    x, t = jnp.zeros((2, 1, HORIZON, DIM)), jnp.full((2, 1), 0.5)

    def std(features):
        inputs = CriticInputs(state=CONTEXT[:2], features=features, mask=jnp.broadcast_to(mask, (2, 5)))
        return head.std(params, inputs, x, t)

    np.testing.assert_array_equal(std(features), std(features.at[:, 3:].set(9.0)))
    assert np.abs(std(features) - std(features.at[:, 0, 0].add(3.0))).max() > 1e-4
    slopes = jax.grad(lambda features: std(features).sum())(features)
    assert not np.any(slopes), "no gradient leaves towards the policy"
