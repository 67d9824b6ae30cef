"""Behaviour cloning against NumPy: the loss with and without padding, one step, the average, acting."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import naive_acrlpd as naive
from pirl.agents.agent import Agent
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner
from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation

SIZE, HORIZON, DIM, REAL, STATE, DRAWS = 8, 3, 3, 2, 4, 2
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(6,)))
RATE, DECAY = 0.3, 0.7
KEY = jax.random.key(3)


@functools.cache
def make(*, accumulate: int = 1, mask_padding: bool = True, ema_decay: float | None = DECAY) -> BC:
    return BC(
        policy=POLICY,
        config=BCConfig(flow_draws=DRAWS, mask_padding=mask_padding, ema_decay=ema_decay, accumulate=accumulate),
        policy_learner=Learner(tx=optax.sgd(RATE), ema_decay=ema_decay),
        real_action_dim=REAL,
        flow_steps=4,
    )


@functools.cache
def updating(agent: BC):
    return jax.jit(agent.update)


@functools.cache
def make_state():
    """Average and weights differ, so that neither can stand for the other."""
    state, rng = jax.eval_shape(make().init, KEY), np.random.default_rng(2)
    filled = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), (state.params, state.ema))
    return replace(state, step=jnp.int32(5), params=filled[0], ema=filled[1])


@functools.cache
def make_batch() -> dict:
    rng = np.random.default_rng(0)
    remaining = np.array([3, 3, 2, 1, 3, 2, 1, 3])
    batch = {
        "observations": {"state": rng.normal(size=(SIZE, STATE))},
        "actions": rng.normal(0, 1.2, (SIZE, HORIZON, DIM)),
        "valid": np.arange(HORIZON) < remaining[:, None],
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)


def doubles(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found, expected, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def naive_losses(policy, *, dims: int, valid):
    """Each sample's loss; the key gives three, in OpenPI's order: augmentation, noise, time."""
    _, noise_key, time_key = jax.random.split(KEY, 3)
    noise = np.float64(jax.random.normal(noise_key, (SIZE, DRAWS, HORIZON, DIM)))
    time = np.float64(jax.random.uniform(time_key, (SIZE, DRAWS)) ** (1 / 1.5)) * 0.999 + 0.001
    batch = doubles(make_batch())
    losses = []
    for b, state in enumerate(batch["observations"]["state"]):
        total = 0.0
        for eps, t in zip(noise[b], time[b], strict=True):
            chunk = batch["actions"][b]
            v = naive.velocity(policy, state, t * eps + (1 - t) * chunk, t)
            total += ((v - (eps - chunk)) ** 2)[valid[b] > 0, :dims].mean()
        losses.append(total / DRAWS)
    return np.array(losses)


@pytest.mark.parametrize("mask_padding", [True, False])
def test_update_equals_numpy(mask_padding: bool):
    """Without masking it is OpenPI's loss, which averages over padded steps and dimensions as over any other."""
    agent, state, batch = make(mask_padding=mask_padding), make_state(), make_batch()
    new, metrics = updating(agent)(state, batch, KEY)
    policy, average = doubles(state.params["policy"]), doubles(state.ema["policy"])
    valid = np.asarray(batch["valid"]) if mask_padding else np.ones((SIZE, HORIZON))
    loss = functools.partial(naive_losses, dims=REAL if mask_padding else DIM, valid=valid)
    grads = naive.gradient(lambda policy: loss(policy).mean(), policy)
    moved = naive.mapped(lambda x, g: x - RATE * g, policy, grads)
    close(new.params["policy"], moved)
    close(new.ema["policy"], naive.mapped(lambda old, new: DECAY * old + (1 - DECAY) * new, average, moved))
    close(metrics["policy/loss"], loss(policy).mean())
    close(metrics["policy/loss_std"], loss(policy).std())
    close(metrics["policy/grad_norm"], naive.norm(grads))
    close(metrics["data/valid_fraction"], 0.75)
    assert int(new.step) == 6


def test_given_steps_cost_nothing_and_split_like_the_rest():
    """With a delay the draws give the first steps; the policy here ignores its time, so one of an MLP will do."""

    class Timeless(MLPFlow):
        def velocity(self, params, context, x_t, t):
            return super().velocity(params, context, x_t, jnp.zeros(x_t.shape[:2]))

    def late(parts: int) -> BC:
        agent = make(accumulate=parts)
        return replace(agent, policy=Timeless(POLICY.config), config=replace(agent.config, real_time_delay=2))

    state, batch = make_state(), make_batch()
    observation, actions, draws = late(1)._inputs(batch, KEY)
    noise, time, counts = (np.asarray(x, np.float64) for x in draws)
    policy, valid = doubles(state.params["policy"]), np.asarray(batch["valid"], np.float64)
    expected = np.zeros(SIZE)
    for b in range(SIZE):
        for n in range(DRAWS):
            t = np.where(counts[b, n] > 0, time[b, n], 0.0)[:, None]
            x_t = t * noise[b, n] + (1 - t) * np.asarray(actions[b])
            v = naive.velocity(policy, np.asarray(observation.state[b], np.float64), x_t, np.zeros(()))
            error = np.square(v - noise[b, n] + np.asarray(actions[b]))[:, :REAL].mean(-1)
            kept = (counts[b, n] > 0) / (1 - 2 / 2 / HORIZON)
            expected[b] += (error * kept * valid[b]).sum() / valid[b].sum() / DRAWS
    whole, parts = (jax.jit(late(count).update)(state, batch, KEY) for count in (1, 2))
    close(whole[1]["policy/loss"], expected.mean())
    close(parts, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_batch_in_parts_is_the_batch(parts: int):
    found, expected = (updating(make(accumulate=n))(make_state(), make_batch(), KEY) for n in (parts, 1))
    close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(ConfigError, match="batch of 8 does not split into 3"):
        jax.eval_shape(make(accumulate=3).update, make_state(), make_batch(), KEY)


def test_the_same_key_is_the_same_update_and_the_state_is_not_touched():
    update, state = updating(make()), make_state()
    before = doubles(state)
    first, second, other = (update(state, make_batch(), key)[0] for key in (KEY, KEY, jax.random.key(4)))
    close(first, second, rtol=0, atol=0)
    close(doubles(state), before, rtol=0, atol=0)
    assert (
        np.abs(first.params["policy"]["dense_0"]["kernel"] - other.params["policy"]["dense_0"]["kernel"]).max() > 1e-3
    )


def test_a_batch_without_any_valid_step_moves_nothing():
    state = make_state()
    new, metrics = updating(make())(state, make_batch() | {"valid": jnp.zeros((SIZE, HORIZON))}, KEY)
    close(new.params, state.params, rtol=0, atol=0)
    assert float(metrics["policy/loss"]) == 0


def test_acting_samples_from_the_average():
    agent, state, start = make(), make_state(), make_batch()["observations"]["state"]
    act, observation = jax.jit(agent.act), Observation(images={}, image_masks={}, state=start)
    keys = jax.random.split(KEY, SIZE)
    noise = np.float64(np.stack([jax.random.normal(key, (1, HORIZON, DIM))[0] for key in keys]))
    for acting, weights in ((state, state.ema["policy"]), (replace(state, ema={}), state.params["policy"])):
        chunks = naive.sample(doubles(weights), np.float64(start), noise, agent.flow_steps)
        close(act(acting, observation, keys), chunks)


def test_a_fresh_state():
    """The average starts as a copy: leaves are donated one by one, so none may be shared."""
    agent = make()
    assert isinstance(agent, Agent)
    given = POLICY.init(jax.random.key(9))
    state = agent.init(KEY, given)
    close(state.params["policy"], given, rtol=0, atol=0)
    close(state.ema["policy"], given, rtol=0, atol=0)
    assert all(a is not b for a, b in zip(*map(jax.tree.leaves, (state.params, state.ema)), strict=True))
    assert int(state.step) == 0
    assert make(ema_decay=None).init(KEY, given).ema == {}
    close(agent.init(KEY).params["policy"], POLICY.init(KEY), rtol=0, atol=0)


@pytest.mark.parametrize("augment", [True, False])
def test_pictures_are_augmented_only_when_asked(augment: bool):
    seen = []

    class Watched(MLPFlow):
        def prepare(self, observation, key=None):
            seen.append(key)
            return observation

    agent = replace(make(), policy=Watched(POLICY.config), config=BCConfig(augment=augment))
    jax.eval_shape(agent.update, make_state(), make_batch(), KEY)
    assert [key is not None for key in seen] == [augment]
