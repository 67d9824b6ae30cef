"""The shared prefix is exact: whatever is split off, left out or recomputed, the numbers stay."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import naive_pi0
from pirl.errors import ConfigError
from pirl.models import flow
from pirl.models.config import LoRAConfig, Pi0Config, get_preset
from pirl.models.observation import Observation
from pirl.models.params import flatten, nest
from pirl.models.pi0 import Pi0
from small_pi0 import BATCH, EXPERT, LORA, NUM, SMALL, VLM, weights

CONFIGS = {
    "pi0": SMALL,
    "pi05": replace(SMALL, pi05=True),
    "pi0_lora": replace(
        SMALL,
        vlm=replace(VLM, attn_lora=LORA, ffn_lora=LORA),
        expert=replace(EXPERT, attn_lora=LoRAConfig(rank=2, alpha=3.0), ffn_lora=LORA),
    ),
}


def random_observation(config: Pi0Config) -> Observation:
    rng = np.random.default_rng(1)
    size = (BATCH, config.image_size, config.image_size, 3)
    # Sample 0 has all cameras; the right wrist is absent from every sample, the left one from sample 1.
    masks = dict(zip(config.cameras, ([True, True, True], [True, False, True], [False, False, False]), strict=True))
    lengths = np.array([4, 2, 3])
    return Observation(
        images={name: jnp.asarray(rng.integers(0, 256, size), jnp.uint8) for name in config.cameras},
        image_masks={name: jnp.asarray(mask) for name, mask in masks.items()},
        state=jnp.asarray(rng.normal(size=(BATCH, config.action_dim)), jnp.float32),
        tokenized_prompt=jnp.asarray(rng.integers(1, config.vocab_size, (BATCH, config.token_len)), jnp.int32),
        tokenized_prompt_mask=jnp.asarray(np.arange(config.token_len)[None] < lengths[:, None]),
    )


@pytest.fixture(scope="module", params=CONFIGS)
def small(request: pytest.FixtureRequest):
    """(policy, params, observation, x_t, t, context, v) of one small model."""
    config = CONFIGS[request.param]
    policy, params, observation = Pi0(config), weights(config), random_observation(config)
    rng = np.random.default_rng(2)
    x_t = jnp.asarray(rng.normal(size=(BATCH, NUM, config.horizon, config.action_dim)), jnp.float32)
    t = jnp.asarray(rng.uniform(size=(BATCH, NUM)), jnp.float32)
    context = jax.jit(policy.encode)(params, observation)
    v = jax.jit(policy.velocity)(params, context, x_t, t)
    return policy, params, observation, x_t, t, context, v


def test_equals_the_joint_pass(small):
    """Encode + velocity against NumPy's single pass over the whole sequence, one sample and candidate at a time."""
    policy, params, obs, x_t, t, _, v = small
    for b in range(BATCH):
        images = {name: np.asarray(image[b], np.float64) / 255 * 2 - 1 for name, image in obs.images.items()}
        masks = {name: mask[b] for name, mask in obs.image_masks.items()}
        for n in (0, NUM - 1):
            expected = naive_pi0.velocity(
                params,
                policy.config,
                images,
                masks,
                obs.state[b],
                np.asarray(obs.tokenized_prompt[b]),
                np.asarray(obs.tokenized_prompt_mask[b]),
                x_t[b, n],
                float(t[b, n]),
            )
            np.testing.assert_allclose(v[b, n], expected, rtol=2e-4, atol=2e-4)


def test_each_step_may_have_its_own_time(small):
    """As in chunks whose first steps are given; in training, and prepared for sampling."""
    policy, params, obs, x_t, t, context, v = small
    steps = jnp.where(jnp.arange(policy.horizon) < 1, 0.0, t[..., None])
    found = jax.jit(policy.velocity)(params, context, x_t, steps)
    images = {name: np.asarray(image[1], np.float64) / 255 * 2 - 1 for name, image in obs.images.items()}
    expected = naive_pi0.velocity(
        params,
        policy.config,
        images,
        {name: mask[1] for name, mask in obs.image_masks.items()},
        obs.state[1],
        np.asarray(obs.tokenized_prompt[1]),
        np.asarray(obs.tokenized_prompt_mask[1]),
        x_t[1, 0],
        np.asarray(steps[1, 0]),
    )
    np.testing.assert_allclose(found[1, 0], expected, rtol=2e-4, atol=2e-4)
    assert jnp.abs(found - v).max() > 1e-3
    prepared = jax.jit(flow.field(policy, params, context))
    np.testing.assert_allclose(prepared(x_t, steps), found, rtol=0, atol=1e-4)
    alike = jnp.broadcast_to(t[..., None], steps.shape)
    np.testing.assert_allclose(jax.jit(policy.velocity)(params, context, x_t, alike), v, rtol=0, atol=1e-5)


def test_shared_candidates_equal_separate_calls(small):
    policy, params, _, x_t, t, context, v = small
    one = jax.jit(policy.velocity)
    for n in range(NUM):
        alone = one(params, context, x_t[:, n : n + 1], t[:, n : n + 1])
        np.testing.assert_allclose(alone[:, 0], v[:, n], rtol=0, atol=1e-5)


def test_absent_cameras_can_be_left_out(small):
    policy, params, obs, x_t, t, _, v = small
    kept = [name for name, mask in obs.image_masks.items() if np.asarray(mask).any()]
    assert kept == list(policy.config.cameras[:2])
    parts = {field: {name: getattr(obs, field)[name] for name in kept} for field in ("images", "image_masks")}
    shorter = replace(obs, **parts)
    context = jax.jit(policy.encode)(params, shorter)
    assert context.mask.shape[1] == 2 * policy.config.tokens_per_image + obs.tokenized_prompt.shape[1]
    np.testing.assert_allclose(jax.jit(policy.velocity)(params, context, x_t, t), v, rtol=0, atol=5e-5)


def test_features_are_the_chosen_layer(small):
    """feature_layer counts VLM layers by their input; depth is the final norm; no gradient comes back through them."""
    policy, params, obs, *_ = small
    config = policy.config

    def features(layer, params):
        return Pi0(replace(config, feature_layer=layer)).encode(params, obs).features

    run = jax.jit(features, static_argnums=0)
    first, last = run(0, params), run(-1, params)
    np.testing.assert_allclose(run(config.vlm.depth - 1, params), last, rtol=0, atol=1e-6)
    # The output has unit mean square before the final norm's scale.
    out = run(config.vlm.depth, params) / (1 + params["PaliGemma"]["llm"]["final_norm"]["scale"])
    np.testing.assert_allclose(jnp.square(out).mean(-1), 1, rtol=1e-3)
    scale = np.sqrt(config.vlm.width)
    embedded = params["PaliGemma"]["llm"]["embedder"]["input_embedding"][obs.tokenized_prompt] * scale
    np.testing.assert_allclose(first[:, -config.token_len :], embedded, rtol=1e-5, atol=1e-5)
    assert np.abs(first - last).max() > 0.1
    gradient = jax.jit(jax.grad(lambda p: features(-1, p).sum()))(params)
    assert all(not np.any(g) for g in flatten(gradient).values())


def test_rematerialisation_changes_no_gradient():
    config = CONFIGS["pi05"]
    params, obs = weights(config), random_observation(config)
    actions = jnp.asarray(np.random.default_rng(3).normal(size=(BATCH, config.horizon, config.action_dim)), jnp.float32)
    draws = flow.draw(jax.random.key(0), jax.random.key(1), actions, 2)

    def gradient(remat):
        policy = Pi0(replace(config, remat=remat))

        def loss(params):
            error = flow.squared_error(policy, params, policy.encode(params, obs), actions, draws)
            return flow.chunk_loss(error).mean()

        return flatten(jax.jit(jax.grad(loss))(params))

    plain = gradient("none")
    for remat in ("full", "dots", "names"):
        for path, value in gradient(remat).items():
            np.testing.assert_allclose(value, plain[path], rtol=1e-4, atol=1e-6, err_msg=f"{remat}: {path}")


def test_initialisation_follows_openpi():
    """Zero where OpenPI starts with zero, and the variance its initialisers have elsewhere; same key, same weights."""
    config = replace(get_preset("pi0_tiny"), pi05=True, vlm=get_preset("pi0_tiny").vlm.with_lora(4))
    params = flatten(Pi0(config).init(jax.random.key(0)))
    zero = {path for path, value in params.items() if not np.any(value)}
    assert "PaliGemma/img/head/kernel" in zero
    assert "PaliGemma/llm/layers/pre_attention_norm_1/Dense_0/kernel" in zero
    assert all(path.endswith(("bias", "scale", "head/kernel", "Dense_0/kernel")) for path in zero)
    width = config.vlm.width
    expected = {
        "PaliGemma/llm/layers/mlp/gating_einsum": width**-0.5,
        "PaliGemma/llm/layers/attn/attn_vec_einsum/w": (config.vlm.num_heads * config.vlm.head_dim) ** -0.5,
        "PaliGemma/llm/layers/mlp/gating_einsum_lora_a": 0.01,
        "PaliGemma/llm/embedder/input_embedding": 0.01,
        "PaliGemma/img/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel": (2 / (64 + 128)) ** 0.5,
        "PaliGemma/img/pos_embedding": config.vision.width**-0.5,
    }
    for path, std in expected.items():
        np.testing.assert_allclose(np.std(params[path]), std, rtol=0.1, err_msg=path)
    again = flatten(Pi0(config).init(jax.random.key(0)))
    assert all(np.array_equal(again[path], value) for path, value in params.items())
    assert not np.array_equal(
        params["action_in_proj/kernel"], flatten(Pi0(config).init(jax.random.key(1)))["action_in_proj/kernel"]
    )


def test_a_fresh_pi0_does_not_see():
    """OpenPI's zero head: before training, pictures change nothing. (A reason not to test with fresh weights.)"""
    config = replace(SMALL, max_token_len=6)
    policy, obs = Pi0(config), random_observation(config)
    params = policy.init(jax.random.key(0))
    encode = jax.jit(policy.encode)
    dark = replace(obs, images={name: jnp.zeros_like(image) for name, image in obs.images.items()})
    np.testing.assert_array_equal(encode(params, obs).keys, encode(params, dark).keys)


def test_configuration_mistakes_are_named():
    with pytest.raises(ConfigError, match="depth is 3, the expert's is 2"):
        replace(SMALL, expert=replace(EXPERT, depth=2))
    with pytest.raises(ConfigError, match="cannot share 3"):
        replace(SMALL, vlm=replace(VLM, num_kv_heads=3), expert=replace(EXPERT, num_kv_heads=3))
    with pytest.raises(ConfigError, match="feature_layer 9"):
        replace(SMALL, feature_layer=9)
    with pytest.raises(ConfigError, match="did you mean: pi0_tiny"):
        get_preset("pi0_tinny")
    obs = random_observation(SMALL)
    top = replace(obs, images={"top": obs.images[SMALL.cameras[0]]})
    with pytest.raises(ConfigError, match="cameras \\['top'\\]"):
        Pi0(SMALL).encode({}, top)
    with pytest.raises(ConfigError, match="go together"):
        Observation.from_dict({"state": np.zeros((1, 2)), "tokenized_prompt": np.zeros((1, 3), np.int32)})
    with pytest.raises(ConfigError, match="'state' is not among them"):
        Observation.from_dict({"image": {}})


def test_derived_values_follow_overrides():
    """`--model.pi05` must change the token length too."""
    assert (Pi0Config().token_len, Pi0Config(pi05=True).token_len) == (48, 200)
    assert (Pi0Config().discrete_state, replace(Pi0Config(), pi05=True).discrete_state) == (False, True)
    assert replace(Pi0Config(), image_size=448).tokens_per_image == 1024


@pytest.mark.parametrize("remat", ["none", "full"])
def test_frozen_layers_are_taken_one_by_one(remat) -> None:
    """Weights that are stored as they are multiplied are read where they lie; others are cast first. Same bits."""
    config = replace(SMALL, dtype="bfloat16", remat=remat)
    flat = flatten(weights(config))
    blocks = {p: x.astype(jnp.bfloat16) for p, x in flat.items() if p.startswith("PaliGemma/llm/layers/")}
    frozen = nest(flat | blocks)
    trained = nest(flat | {p: x.astype(jnp.float32) for p, x in blocks.items()})
    encode = jax.jit(lambda params: Pi0(config).encode(params, random_observation(config)))
    for ours, theirs in zip(jax.tree.leaves(encode(frozen)), jax.tree.leaves(encode(trained)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
