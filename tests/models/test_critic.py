"""The critic ensemble: values against NumPy, and what may and may not influence them."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import Critic, CriticInputs, MLPCritic, PrefixCritic, make_critic
from pirl.models.critic_config import CRITIC_PRESETS, CriticConfig, get_critic_preset
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.models.params import Params, count, flatten

E, B, P, W, S, N, h, A = 3, 4, 6, 12, 3, 5, 2, 2
CONFIG = CriticConfig(
    num_critics=E,
    hidden=(16, 16),
    bins=11,
    dropout=0.5,
    num_queries=2,
    pool_width=8,
    pool_heads=2,
    embedding_width=16,
)
SIZES = {"state_dim": S, "real_action_dim": A, "critic_horizon": h}


def random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.fixture(scope="module", params=["prefix", "mlp"])
def critic(request: pytest.FixtureRequest) -> Critic:
    return make_critic(CONFIG, feature_width=W if request.param == "prefix" else None, **SIZES)


@pytest.fixture(scope="module")
def initial(critic: Critic) -> Params:
    return jax.jit(critic.init)(KEY)


@pytest.fixture(scope="module")
def params(initial: Params) -> Params:
    """Not quite the initial ones: biases and norms that do nothing could be forgotten unnoticed."""
    noise = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape, np.float32), initial)


KEY = jax.random.key(0)
INPUTS = CriticInputs(
    state=random(1, B, S), features=random(2, B, P, W), mask=jnp.arange(P) < jnp.arange(3, 7)[:, None]
)
ACTIONS = random(3, B, N, h, A)


# Compiled once per critic and shape.
embed = jax.jit(lambda critic, params, inputs: critic.embed(params, inputs), static_argnums=0)


@partial(jax.jit, static_argnums=0)
def score(
    critic: Critic, params: Params, inputs: CriticInputs, actions: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    return critic.score(params, critic.embed(params, inputs), actions, key=key)


@pytest.fixture(scope="module")
def values(critic: Critic, params: Params) -> np.ndarray:
    return np.asarray(score(critic, params, INPUTS, ACTIONS))


# A slow NumPy critic, one member, one observation, one chunk at a time


def norm(x: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    return (x - x.mean()) / np.sqrt(x.var() + epsilon)


def activation(layer: dict, z: np.ndarray) -> np.ndarray:
    tanh = np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    return norm(0.5 * z * (1 + tanh)) * layer["scale"] + layer["offset"]


def stack(*kernels: np.ndarray) -> np.ndarray:
    return np.concatenate(kernels)


def mlp_member(p: dict, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    x = np.concatenate([state, chunk])
    for i in range(2):
        layer = p[f"layer_{i}"]
        kernel = stack(layer["state"], layer["action"]) if i == 0 else layer["hidden"]
        x = activation(layer, x @ kernel + layer["bias"])
    return x @ p["head"]["kernel"] + p["head"]["bias"]


def prefix_member(p: dict, state: np.ndarray, chunk: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """With keys and values of every token, as attention is usually written."""
    tokens = np.stack([norm(token, 0) for token in tokens])
    summaries = []
    for query in p["pool"]["query"]:
        heads = []
        for head, q in enumerate(query):
            keys, contents = tokens @ p["pool"]["key"][:, head], tokens @ p["pool"]["value"][:, head]
            weight = np.exp(keys @ q / math.sqrt(len(q)))
            heads.append(weight @ contents / weight.sum())
        summaries.append(norm(np.concatenate(heads)))
    trunk = p["trunk"]
    z = np.concatenate([*summaries, state]) @ stack(trunk["pooled"], trunk["state"]) + trunk["bias"]
    x = activation(trunk, z)
    for i in range(2):
        layer = p[f"layer_{i}"]
        kernel = stack(layer["state" if i == 0 else "hidden"], layer["action"])
        x = activation(layer, np.concatenate([x, chunk]) @ kernel + layer["bias"])
    return x @ p["head"]["kernel"] + p["head"]["bias"]


def test_values_equal_a_numpy_critic(critic: Critic, params: Params, values: np.ndarray) -> None:
    assert values.shape == (E, B, N, 11)
    features, mask = np.asarray(INPUTS.features, np.float64), np.asarray(INPUTS.mask)
    for e, b, n in np.ndindex(E, B, N):
        member = jax.tree.map(lambda x, e=e: np.asarray(x[e], np.float64), params)
        state = np.asarray(INPUTS.state[b], np.float64)
        chunk = np.clip(np.asarray(ACTIONS[b, n], np.float64), -1.5, 1.5).ravel()
        if isinstance(critic, PrefixCritic):
            expected = prefix_member(member, state, chunk, features[b, mask[b]])
        else:
            expected = mlp_member(member, state, chunk)
        np.testing.assert_allclose(values[e, b, n], expected, rtol=1e-4, atol=1e-4)


def test_candidates_share_an_embedding(critic: Critic, params: Params, values: np.ndarray) -> None:
    embedding = embed(critic, params, INPUTS)
    assert embedding.shape == (E, B, 16)
    for n in range(2):
        alone = jax.jit(critic.score)(params, embedding, ACTIONS[:, n : n + 1])
        np.testing.assert_allclose(alone[:, :, 0], values[:, :, n], atol=1e-5)


def test_padding_and_what_is_beyond_the_clip_do_not_count(critic: Critic, params: Params, values: np.ndarray) -> None:
    padded = jnp.pad(ACTIONS, ((0, 0), (0, 0), (0, 3), (0, 1)), constant_values=7.0)
    state = jnp.pad(INPUTS.state, ((0, 0), (0, 2)), constant_values=7.0)
    np.testing.assert_array_equal(score(critic, params, replace(INPUTS, state=state), padded), values)
    beyond = jnp.where(jnp.abs(ACTIONS) > 1.5, ACTIONS * 10, ACTIONS)
    assert (beyond != ACTIONS).any()
    np.testing.assert_array_equal(score(critic, params, INPUTS, beyond), values)
    with pytest.raises(ConfigError, match="1 steps of 2 dimensions"):
        score(critic, params, INPUTS, ACTIONS[:, :, :1])
    with pytest.raises(ConfigError, match="2 steps of 1 dimensions"):
        score(critic, params, INPUTS, ACTIONS[..., :1])


def test_members_are_independent(critic: Critic, initial: Params, params: Params) -> None:
    for path, leaf in flatten(jax.tree.map(np.asarray, initial)).items():
        if leaf[0].std() > 0:
            assert not np.allclose(leaf[0], leaf[1]), path

    def second(params: Params) -> jax.Array:
        return jnp.square(score(critic, params, INPUTS, ACTIONS)[1]).sum()

    for path, gradient in flatten(jax.jit(jax.grad(second))(params)).items():
        touched = np.abs(np.asarray(gradient)).reshape(E, -1).max(1) > 0
        assert touched.tolist() == [False, True, False], path


def test_no_gradient_reaches_the_policy_and_chunks_have_one(critic: Critic, params: Params) -> None:
    def total(features: jax.Array, state: jax.Array, actions: jax.Array) -> jax.Array:
        inputs = replace(INPUTS, features=features, state=state)
        return jnp.square(score(critic, params, inputs, actions)).sum()

    features, state, actions = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(INPUTS.features, INPUTS.state, ACTIONS)
    assert not features.any()
    assert not state.any()
    assert (jnp.abs(actions) > 0).mean() == (jnp.abs(ACTIONS) < 1.5).mean()


def test_dropout_needs_a_key(critic: Critic, params: Params, values: np.ndarray) -> None:
    dropped = [np.asarray(score(critic, params, INPUTS, ACTIONS, jax.random.key(i))) for i in (1, 1, 2)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert np.abs(dropped[0] - values).max() > 0.1
    assert np.abs(dropped[0] - dropped[2]).max() > 0.1
    without = replace(critic, config=replace(CONFIG, dropout=0.0))
    np.testing.assert_array_equal(score(without, params, INPUTS, ACTIONS, KEY), values)


# The prefix


@pytest.fixture(scope="module")
def prefix() -> tuple[Critic, Params]:
    critic = make_critic(CONFIG, feature_width=W, **SIZES)
    return critic, jax.jit(critic.init)(KEY)


def test_masked_tokens_do_not_count(prefix: tuple[Critic, Params]) -> None:
    critic, params = prefix
    expected = embed(critic, params, INPUTS)
    for rubbish in (1e4, jnp.nan, jnp.inf):
        features = jnp.where(INPUTS.mask[..., None], INPUTS.features, rubbish)
        np.testing.assert_array_equal(embed(critic, params, replace(INPUTS, features=features)), expected)
    seen = embed(critic, params, replace(INPUTS, mask=jnp.ones((B, P), bool)))
    assert (jnp.abs(seen - expected).max((0, 2)) > 1e-3).tolist() == [True, True, True, False]


def test_features_may_have_any_scale_and_type(prefix: tuple[Critic, Params]) -> None:
    critic, params = prefix
    expected = embed(critic, params, INPUTS)
    for scale in (1e-3, 300.0):
        scaled = embed(critic, params, replace(INPUTS, features=INPUTS.features * scale))
        np.testing.assert_allclose(scaled, expected, atol=1e-4)
    half = embed(critic, params, replace(INPUTS, features=INPUTS.features.astype(jnp.bfloat16)))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, expected, atol=0.05)


def test_an_observation_without_tokens_is_scored_by_its_state(prefix: tuple[Critic, Params]) -> None:
    critic, params = prefix
    nothing = replace(INPUTS, mask=jnp.zeros((B, P), bool))
    embedding, gradient = jax.jit(jax.value_and_grad(lambda p: critic.embed(p, nothing).sum()))(params)
    assert all(jnp.isfinite(leaf).all() for leaf in (embedding, *flatten(gradient).values()))
    with pytest.raises(ConfigError, match="no prefix features"):
        critic.embed(params, CriticInputs(state=INPUTS.state))


def test_chunks_are_heard_beside_a_wide_prefix() -> None:
    """At the start, four action numbers move values at least half as much as 40 tokens of 256 numbers and a state do.

    Compared is the standard deviation of the value over random chunks (same observation) with that over random
    observations (same chunk), both of unit variance.
    """
    config = replace(get_critic_preset("tiny"), loss="mse", num_critics=4)
    critic = make_critic(config, feature_width=256, state_dim=14, real_action_dim=2, critic_horizon=2)
    params = jax.jit(critic.init)(KEY)
    inputs = CriticInputs(state=random(4, 16, 14), features=random(5, 16, 40, 256), mask=jnp.ones((16, 40), bool))
    chunks = jnp.broadcast_to(random(6, 1, 16, 2, 2), (16, 16, 2, 2))
    values = score(critic, params, inputs, chunks)
    over_chunks, over_observations = values.std(2).mean(), values.std(1).mean()
    assert 0.5 < over_chunks / over_observations < 5


# Sizes and inputs


def test_regression_critics_give_one_number() -> None:
    critic = make_critic(replace(CONFIG, loss="huber"), feature_width=None, **SIZES)
    assert score(critic, jax.jit(critic.init)(KEY), INPUTS, ACTIONS).shape == (E, B, N)


def test_inputs_of_a_policy_without_a_prefix() -> None:
    policy = MLPFlow(MLPFlowConfig(state_dim=S, action_dim=A, horizon=h))
    inputs = CriticInputs.of(policy.encode({}, Observation(images={}, image_masks={}, state=INPUTS.state)))
    assert inputs.features is None
    np.testing.assert_array_equal(inputs.state, INPUTS.state)


@pytest.mark.parametrize(
    ("preset", "feature_width", "millions"),
    [("pair", 2048, 18.93), ("ten", 2048, 26.40), ("q_chunking", None, 1.74)],
)
def test_sizes_of_the_presets(preset: str, feature_width: int | None, millions: float) -> None:
    """Two arms of seven joints, ten steps."""
    critic = make_critic(
        CRITIC_PRESETS[preset], feature_width=feature_width, state_dim=14, real_action_dim=14, critic_horizon=10
    )
    assert count(critic.declare().values()) / 1e6 == pytest.approx(millions, abs=0.01)
    assert {path: leaf.shape for path, leaf in flatten(critic.param_shapes()).items()} == {
        path: leaf.shape for path, leaf in critic.declare().items()
    }


def test_q_chunking_s_initialisation() -> None:
    critic = MLPCritic(config=CRITIC_PRESETS["q_chunking"], state_dim=28, real_action_dim=5, critic_horizon=5)
    first = jax.jit(critic.init)(KEY)["layer_0"]
    for kernel in (first["state"], first["action"]):
        assert float(jnp.abs(kernel).max()) == pytest.approx(math.sqrt(6 / (28 + 25 + 512)), rel=0.01)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_critics": 0},
        {"hidden": ()},
        {"hidden": (512, 0)},
        {"pool_heads": 3},
        {"dropout": 1.0},
        {"action_clip": 0.0},
    ],
)
def test_sizes_that_cannot_be(bad: dict) -> None:
    with pytest.raises(ConfigError):
        CriticConfig(**bad)
    with pytest.raises(ConfigError, match="q_chunking"):
        get_critic_preset("q_chunkin")


def test_hidden_layers_in_bfloat16_and_values_unrounded(critic: Critic, params: Params, values: np.ndarray) -> None:
    half = replace(critic, config=replace(critic.config, dtype="bfloat16"))
    found = score(half, params, INPUTS, ACTIONS)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, values, rtol=0, atol=0.02 * np.abs(values).max())
    assert np.any(found != values)
    raw = np.asarray(found - params["head"]["bias"][:, None, None])
    rounded = np.float32(jnp.asarray(raw, jnp.bfloat16))
    assert np.median(np.abs(raw - rounded) / np.abs(raw)) > 1e-4, "the head's product is not rounded"
    gradient = flatten(jax.grad(lambda p: score(half, p, INPUTS, ACTIONS).sum())(params))
    assert {leaf.dtype for leaf in gradient.values()} == {jnp.dtype("float32")}
    assert np.any(gradient["layer_1/hidden"])
