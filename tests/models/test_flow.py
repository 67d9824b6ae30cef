"""Path, loss and sampler, on velocity fields whose answers are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.models import flow
from pirl.models.config import MLPFlowConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.models.policy import FlowPolicy

CONFIG = MLPFlowConfig(state_dim=3, action_dim=2, horizon=4, hidden=(16, 16))
POLICY = MLPFlow(CONFIG)


@pytest.fixture(scope="module")
def params():
    return POLICY.init(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    observation = Observation(images={}, image_masks={}, state=jnp.asarray(rng.normal(size=(5, 3)), jnp.float32))
    return observation, jnp.asarray(rng.normal(size=(5, 4, 2)), jnp.float32)


def test_both_ends_of_the_path(batch):
    _, actions = batch
    noise = jnp.ones((5, 2, 4, 2)) * 3
    at_noise, u = flow.interpolate(actions, flow.Draws(noise, jnp.ones((5, 2))))
    at_data, _ = flow.interpolate(actions, flow.Draws(noise, jnp.zeros((5, 2))))
    np.testing.assert_allclose(at_noise, noise)
    np.testing.assert_allclose(at_data, jnp.broadcast_to(actions[:, None], noise.shape))
    np.testing.assert_allclose(u, noise - actions[:, None])


def test_draws_have_openpis_distribution(batch):
    _, actions = batch
    draws = flow.draw(jax.random.key(1), jax.random.key(2), actions, 4000)
    assert draws.noise.shape == (5, 4000, 4, 2)
    assert draws.time.min() >= 0.001
    assert draws.time.max() <= 1.0
    # Beta(1.5, 1): P(t < q) is q^1.5.
    quantiles = [(draws.time < 0.001 + 0.999 * q).mean() for q in (0.1, 0.3, 0.5, 0.9)]
    np.testing.assert_allclose(quantiles, [q**1.5 for q in (0.1, 0.3, 0.5, 0.9)], atol=0.01)
    np.testing.assert_allclose([draws.noise.mean(), draws.noise.std()], [0, 1], atol=0.01)
    uniform = flow.draw(jax.random.key(1), jax.random.key(2), actions, 4000, "uniform").time
    np.testing.assert_allclose([(uniform < q).mean() for q in (0.1, 0.5, 0.9)], [0.1, 0.5, 0.9], atol=0.01)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), dims=st.sampled_from([None, 1, 2]), masked=st.booleans())
def test_chunk_loss_against_loops(seed: int, dims: int | None, masked: bool):
    rng = np.random.default_rng(seed)
    error = rng.normal(size=(3, 2, 4, 2)) ** 2
    valid = (rng.uniform(size=(3, 4)) < 0.6).astype(np.float32) if masked else None
    expected = []
    for b in range(3):
        terms = []
        for h in range(4):
            if valid is None or valid[b, h]:
                terms += [error[b, n, h, a] for n in range(2) for a in range(dims or 2)]
        expected.append(np.mean(terms) if terms else 0.0)
    ours = flow.chunk_loss(
        jnp.asarray(error, jnp.float32), valid=None if valid is None else jnp.asarray(valid), dims=dims
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_masked_steps_have_no_gradient(params, batch):
    """What lies behind the end of an episode does not train the actor."""
    observation, actions = batch
    valid = jnp.ones((5, 4)).at[:, 2:].set(0)
    draws = flow.draw(jax.random.key(2), jax.random.key(3), actions, 3)

    def loss(actions):
        error = flow.squared_error(POLICY, params, POLICY.encode(params, observation), actions, draws)
        return flow.chunk_loss(error, valid=valid).sum()

    # The noisy chunk is the network's input, so only the target's side is looked at: through a constant field.
    def target_only(actions):
        _, u = flow.interpolate(actions, draws)
        return flow.chunk_loss(jnp.square(u), valid=valid).sum()

    assert np.isfinite(loss(actions))
    gradient = jax.grad(target_only)(actions)
    assert not np.any(gradient[:, 2:])
    assert np.any(gradient[:, :2])


def test_time_grid():
    """10 Euler steps evaluate the field at 1.0, 0.9, ..., 0.1 and nowhere else."""
    seen = []

    def field(x, t):
        jax.debug.callback(lambda t: seen.append(np.asarray(t)), t, ordered=True)
        return jnp.zeros_like(x)

    flow.euler(field, jnp.zeros((2, 3, 4, 1)), 10)
    jax.effects_barrier()
    assert all(t.shape == (2, 3) for t in seen)
    np.testing.assert_allclose([t[0, 0] for t in seen], np.arange(10, 0, -1) / 10, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(steps=st.integers(1, 12), seed=st.integers(0, 1000))
def test_euler_by_hand(steps: int, seed: int):
    """dx/dt = x·t + 1, stepped by hand in float64; the number of steps is a traced value."""
    noise = np.random.default_rng(seed).normal(size=(1, 2, 3, 1))
    x, t = noise.copy(), 1.0
    for _ in range(steps):
        x = x - (x * t + 1) / steps
        t -= 1 / steps
    np.testing.assert_allclose(EULER(jnp.asarray(noise, jnp.float32), steps), x, rtol=1e-4, atol=1e-5)


EULER = jax.jit(lambda noise, steps: flow.euler(lambda x, t: x * t[..., None, None] + 1, noise, steps))


def test_one_step_is_noise_minus_velocity(params, batch):
    observation, _ = batch
    context = POLICY.encode(params, observation)
    noise = jax.random.normal(jax.random.key(3), (5, 2, 4, 2))
    v = POLICY.velocity(params, context, noise, jnp.ones((5, 2)))
    np.testing.assert_allclose(
        flow.sample(POLICY, params, context, noise, num_steps=1), noise - v, rtol=1e-6, atol=1e-6
    )


def test_a_straight_flow_arrives():
    """The exact field of a single target, v = (x - a)/t, ends at the target whatever the step count."""
    target = jnp.asarray([[0.3, -2.0]])
    noise = jax.random.normal(jax.random.key(0), (2, 3, 1, 2))
    for steps in (1, 4, 10):
        arrived = flow.euler(lambda x, t: (x - target) / t[..., None, None], noise, steps)
        np.testing.assert_allclose(arrived, jnp.broadcast_to(target, arrived.shape), atol=1e-5)


def test_guidance():
    up, down = (lambda x, t: x + 1), (lambda x, t: x - 1)
    x, t = jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1))
    for scale, expected in ((0.0, -1.0), (1.0, 1.0), (3.0, 5.0)):
        np.testing.assert_allclose(flow.guided(up, down, scale)(x, t).item(), expected)


def test_mlp_flow_by_hand(params, batch):
    """The network is what Q-chunking describes: state, chunk and time in one vector, GELU between dense layers."""
    assert isinstance(POLICY, FlowPolicy)
    observation, actions = batch
    t = jnp.asarray([[0.1], [0.2], [0.5], [0.9], [1.0]])
    ours = POLICY.velocity(params, POLICY.encode(params, observation), actions[:, None], t)
    for b in range(5):
        h = np.concatenate([observation.state[b], np.ravel(actions[b]), t[b]])
        for i in range(3):
            h = h @ np.asarray(params[f"dense_{i}"]["kernel"]) + np.asarray(params[f"dense_{i}"]["bias"])
            if i < 2:
                h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        np.testing.assert_allclose(np.ravel(ours[b]), h, rtol=1e-4, atol=1e-5)


def test_q_chunkings_size():
    total = sum(
        np.prod(leaf.shape)
        for leaf in jax.tree.leaves(MLPFlow(MLPFlowConfig(state_dim=37, action_dim=5)).param_shapes())
    )
    inputs, chunk = 37 + 25 + 1, 25
    assert total == (inputs + 1) * 512 + 3 * 513 * 512 + 513 * chunk


def test_steps_written_out_and_what_is_prepared_change_nothing(params, batch, monkeypatch):
    observation, _ = batch
    noise = jax.random.normal(jax.random.key(5), (5, 3, 4, 2))
    looped = flow.sample(POLICY, params, POLICY.encode(params, observation), noise)
    monkeypatch.setattr(MLPFlow, "quick", True)
    program = jax.make_jaxpr(lambda: flow.sample(POLICY, params, POLICY.encode(params, observation), noise))()
    (loop,) = (equation.params for equation in program.eqns if equation.primitive.name == "scan")
    assert loop["unroll"] == loop["length"] == 10
    written_out = flow.sample(POLICY, params, POLICY.encode(params, observation), noise)
    np.testing.assert_allclose(written_out, looped, rtol=0, atol=1e-6)

    # [state, chunk, time] times one matrix, as it is stored.
    kernel, bias = (np.asarray(params["dense_0"][name]) for name in ("kernel", "bias"))
    state, t = np.asarray(observation.state), 0.25
    rows = [np.concatenate([state[0], np.asarray(noise)[0, 1].ravel(), [t]]) @ kernel + bias]
    for i in (1, 2):
        layer = params[f"dense_{i}"]
        rows.append(np.asarray(jax.nn.gelu(rows[-1])) @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]))
    found = POLICY.velocity(params, POLICY.encode(params, observation), noise, jnp.full((5, 3), t))
    np.testing.assert_allclose(found[0, 1].ravel(), rows[-1], rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(horizon=st.integers(1, 8), frozen=st.integers(0, 9), overlap=st.integers(0, 8))
def test_prefix_weights_against_the_papers_formula(horizon: int, frozen: int, overlap: int):
    """W_i = 1 for i < d; c_i (e^c_i - 1)/(e - 1), c_i = (end - i)/(end - d + 1), up to the end; 0 after."""
    overlap = min(overlap, horizon)
    d = min(frozen, overlap)
    expected = []
    for i in range(horizon):
        c = (overlap - i) / (overlap - d + 1)
        expected.append(1.0 if i < d else c * (np.exp(c) - 1) / (np.e - 1) if i < overlap else 0.0)
    found = flow.prefix_weights(jnp.array([frozen]), jnp.array([overlap]), horizon)[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("time", [1.0, 0.9, 0.5, 0.1])
def test_the_steered_field_against_numpy(time: float):
    """Of a linear field v = x M + t c, the chunk it heads for is x (I - t M) - t² c, and its Jacobian is I - t M."""
    rng = np.random.default_rng(3)
    horizon, dim, limit = 4, 2, 5.0
    size = horizon * dim
    mix, offset = rng.normal(size=(size, size)) / 3, rng.normal(size=size)
    x, before = rng.normal(size=(2, 3, horizon, dim)), rng.normal(size=(2, horizon, dim))
    weights = rng.uniform(size=(2, horizon))

    def velocity(x, t):
        flat = x.reshape(*x.shape[:2], size)
        return (flat @ jnp.asarray(mix) + t[..., None] * jnp.asarray(offset)).reshape(x.shape)

    flat = x.reshape(2, 3, size)
    v = flat @ mix + time * offset
    error = (np.repeat(weights, dim, 1)[:, None]) * (before.reshape(2, 1, size) - (flat - time * v))
    pull = error @ (np.eye(size) - time * mix).T
    r = 1 - time  # the paper's time, from noise to data
    scale = limit if r == 0 else min(limit, (1 - r) / r * (r**2 + (1 - r) ** 2) / (1 - r) ** 2)
    steered = flow.continued(velocity, jnp.asarray(before), jnp.asarray(weights), limit)
    found = steered(jnp.asarray(x), jnp.full((2, 3), time))
    np.testing.assert_allclose(found, (v - scale * pull).reshape(x.shape), rtol=1e-4, atol=1e-4)


def test_a_continued_chunk_agrees_with_the_one_before_where_it_should(params, batch):
    observation, _ = batch
    noise = flow.noise(jax.random.split(jax.random.key(4), 5), 2, 4, 2)
    context = POLICY.encode(params, observation)
    plain = flow.sample(POLICY, params, context, noise)
    before = plain[:, 0] + jnp.array([1.0, -1.0])
    none = flow.prefix_weights(jnp.zeros(5, int), jnp.zeros(5, int), 4)
    same = flow.sample(POLICY, params, context, noise, steer=lambda v: flow.continued(v, before, none))
    np.testing.assert_allclose(same, plain, atol=1e-5)
    weights = flow.prefix_weights(jnp.full(5, 2), jnp.full(5, 3), 4)
    steered = flow.sample(POLICY, params, context, noise, steer=lambda v: flow.continued(v, before, weights))
    off, was = (jnp.abs(chunks - before[:, None]).mean((0, 1, 3)) for chunks in (steered, plain))
    assert (off[:2] < 0.1 * was[:2]).all()
    assert off[3] > 0.5 * was[3]


def test_draws_for_real_time_chunking_give_the_first_steps(batch):
    """Every length of the given part is drawn equally often; the others' loss counts 1 on average over the chunk."""
    _, actions = batch
    keys = jax.random.key(1), jax.random.key(2)
    plain, draws = flow.draw(*keys, actions, 4000), flow.draw(*keys, actions, 4000, delay=3)
    np.testing.assert_array_equal(plain.noise, draws.noise)
    np.testing.assert_array_equal(plain.time, draws.time)
    assert plain.counts is None
    assert draws.counts is not None
    given = np.asarray((draws.counts == 0).sum(-1))
    np.testing.assert_array_equal(draws.counts == 0, np.arange(4) < given[..., None])
    np.testing.assert_allclose(np.bincount(given.ravel()) / given.size, [0.25] * 4, atol=0.02)
    np.testing.assert_allclose(draws.counts.mean(), 1.0, atol=0.01)


def test_the_loss_with_given_steps_against_numpy(batch):
    """Given steps are clean at time 0 and cost nothing: arXiv 2512.05964, with our time and a constant divisor."""
    _, actions = batch
    draws = flow.draw(jax.random.key(1), jax.random.key(2), actions, 3, delay=2)
    mix = np.random.default_rng(4).normal(size=(4, 4))

    class Field(MLPFlow):
        def velocity(self, params, context, x_t, t):
            return jnp.einsum("hk,bnka->bnha", mix, x_t) + jnp.square(t)[..., None]

    found = flow.chunk_loss(flow.squared_error(Field(CONFIG), {}, None, actions, draws))
    given = np.asarray((draws.counts == 0).sum(-1))
    noise, time, a = (np.asarray(x, np.float64) for x in (draws.noise, draws.time, actions))
    assert len(np.unique(given)) == 3
    for b in range(5):
        total = 0.0
        for n in range(3):
            x_t, t = np.zeros((4, 2)), np.zeros(4)
            for h in range(4):
                t[h] = 0.0 if h < given[b, n] else time[b, n]
                x_t[h] = a[b, h] if h < given[b, n] else t[h] * noise[b, n, h] + (1 - t[h]) * a[b, h]
            v = mix @ x_t + t[:, None] ** 2
            total += sum(np.square(v[h] - noise[b, n, h] + a[b, h]).mean() for h in range(given[b, n], 4))
        np.testing.assert_allclose(found[b], total / 3 / (4 - 1), rtol=1e-5)  # one step of four is given on average


def test_given_steps_arrive_and_the_others_see_them_clean():
    """v of the last step is x - (mean of what is seen of the first): it heads for that, which is the given one."""
    rng = np.random.default_rng(5)
    noise, before = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 2, 4, 1), (3, 4, 1)))
    seen = []

    def velocity(x, t):
        jax.debug.callback(lambda x, t: seen.append((np.asarray(x), np.asarray(t))), x, t, ordered=True)
        return (x - x[:, :, :1]) / jnp.maximum(t[..., None], 0.05)

    given = jnp.array([0, 1, 2])
    chunks = np.asarray(flow.euler(flow.prefixed(velocity, before, given), noise, 10))
    jax.effects_barrier()
    for b, count in enumerate((0, 1, 2)):
        np.testing.assert_allclose(chunks[b, :, :count], np.tile(before[b, :count], (2, 1, 1)), atol=1e-5)
        for x, t in seen:
            np.testing.assert_allclose(x[b, :, :count], np.tile(before[b, :count], (2, 1, 1)), atol=1e-6)
            assert (t[b, :, :count] == 0).all()
            assert (t[b, :, count:] > 0).all()
        if count:
            np.testing.assert_allclose(chunks[b, :, count:], np.full((2, 4 - count, 1), before[b, 0]), atol=1e-4)
