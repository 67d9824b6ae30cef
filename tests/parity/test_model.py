"""Our π₀ is OpenPI's π₀: each stage from pixels to actions against numbers OpenPI's own code produced."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from golden_data import (
    BFLOAT16,
    FROM_RNG,
    GRADIENT,
    NOISE_GRADIENTS,
    OUTPUT,
    WEIGHTS_AFTER_3_STEPS,
    Family,
)
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.models import flow, freeze, pi0
from pirl.models.params import flatten, nest
from pirl.models.pi0 import Encoded, Pi0
from pirl.training.config import AdamW, CosineSchedule


@pytest.fixture(scope="session")
def context(family: Family) -> Encoded:
    return jax.jit(Pi0(family.config).encode)(family.params, family.observation)


@pytest.fixture(scope="session")
def golden_draws(family: Family) -> flow.Draws:
    return flow.Draws(jnp.asarray(family.inputs["noise"])[:, None], jnp.asarray(family.inputs["time"])[:, None])


@pytest.fixture(scope="session")
def expert(family: Family):
    """(params, context, x_t, t) -> what the action expert leaves; compiled once per family."""
    return jax.jit(lambda p, c, x, t: pi0.run_expert(p, family.config, c, x, t))


@pytest.fixture(scope="session")
def velocity(family: Family):
    """(params, context, x_t, t) -> dx/dt; compiled once per family."""
    return jax.jit(Pi0(family.config).velocity)


@pytest.fixture(scope="session")
def loss_and_gradients(family: Family):
    """(params, draws) -> the mean loss over the golden batch and its gradients; compiled once per family."""
    # What is recomputed changes no number (tests/models/test_pi0.py), only the time to compile.
    config, actions = replace(family.config, remat="none"), jnp.asarray(family.inputs["actions"])

    def loss(params, draws):
        return loss_per_step(config, params, family.observation, actions, draws).mean()

    return jax.jit(jax.value_and_grad(loss))


def openpi_draws(key: jax.Array, actions: jax.Array) -> flow.Draws:
    """Noise and time as OpenPI's compute_loss derives them from its key (augmentation takes the first part)."""
    _, noise_key, time_key = jax.random.split(key, 3)
    time = jax.random.beta(time_key, 1.5, 1, actions.shape[:1]) * 0.999 + 0.001
    return flow.Draws(jax.random.normal(noise_key, actions.shape)[:, None], time[:, None])


def loss_per_step(config, params, observation, actions, draws):
    policy = Pi0(config)
    error = flow.squared_error(policy, params, policy.encode(params, observation), actions, draws)
    return error.mean((1, 3))


def test_prefix_embeddings(family: Family):
    out, index = family.outputs, family.outputs["prefix_index"]
    embed = jax.jit(lambda p, o: pi0.embed_prefix(p, family.config, Pi0(family.config).prepare(o)))
    tokens, mask = embed(family.params, family.observation)
    np.testing.assert_array_equal(mask, out["prefix_mask"])
    np.testing.assert_allclose(tokens[:, index], out["prefix_tokens_at_index"], **OUTPUT)
    np.testing.assert_allclose(tokens.sum(-1), out["prefix_tokens_sum_per_token"], rtol=1e-5, atol=2e-4)


def test_positions_and_masks(family: Family, context: Encoded):
    """Who attends to whom, and at which position, over the joint sequence of OpenPI's training pass."""
    out = family.outputs
    x_t = jnp.asarray(out["x_t"])[:, None]
    _, suffix_mask, _ = pi0.embed_suffix(
        family.params, family.config, context.state, x_t, jnp.asarray(family.inputs["time"])[:, None]
    )
    length = suffix_mask.shape[0]
    positions = np.concatenate(
        [context.positions, np.asarray(context.mask).sum(-1)[:, None] + np.arange(length)[None]], axis=1
    )
    np.testing.assert_array_equal(positions, out["positions"])

    valid = np.asarray(context.mask)
    batch, prefix = valid.shape
    joint = np.zeros((batch, prefix + length, prefix + length), bool)
    joint[:, :prefix, :prefix] = valid[:, :, None] & valid[:, None, :]
    joint[:, prefix:, :prefix] = valid[:, None, :]
    joint[:, prefix:, prefix:] = suffix_mask
    shape = out["attn_mask_shape"]
    golden = np.unpackbits(out["attn_mask_packed"])[: shape.prod()].reshape(shape).astype(bool)
    np.testing.assert_array_equal(joint, golden)


def test_prefix_output_and_cache(family: Family, context: Encoded):
    out, index = family.outputs, family.outputs["prefix_index"]
    valid = np.asarray(context.mask)[:, index]
    # The VLM's own output, which π₀ does not read, is what a critic may be given as features.
    whole = Pi0(replace(family.config, feature_layer=family.config.vlm.depth))
    output = jax.jit(lambda p, o: whole.encode(p, o).features)(family.params, family.observation)
    np.testing.assert_allclose(output[:, index][valid], out["prefix_out_at_index"][valid], **OUTPUT)
    everywhere = np.asarray(context.mask)
    np.testing.assert_allclose(
        output.sum(-1)[everywhere], out["prefix_out_sum_per_token"][everywhere], rtol=1e-5, atol=5e-4
    )
    last, valid = index[-16:], valid[:, -16:]
    for ours, name in ((context.keys, "kv_k_at_index"), (context.values, "kv_v_at_index")):
        np.testing.assert_allclose(ours[:, :, last][:, valid], out[name][:, valid], **OUTPUT)


def test_suffix(family: Family, context: Encoded, expert):
    out = family.outputs
    x_t, t = jnp.asarray(out["x_t"])[:, None], jnp.asarray(family.inputs["time"])[:, None]
    tokens, _, cond = pi0.embed_suffix(family.params, family.config, context.state, x_t, t)
    np.testing.assert_allclose(tokens[:, 0], out["suffix_tokens"], **OUTPUT)
    assert (cond is None) == ("adarms_cond" not in out)
    if cond is not None:
        np.testing.assert_allclose(cond[:, 0], out["adarms_cond"], **OUTPUT)
    suffix = expert(family.params, context, x_t, t)
    np.testing.assert_allclose(suffix.out[:, 0], out["suffix_out"], **OUTPUT)
    np.testing.assert_allclose(suffix.keys[:, :, 0], out["kv_k_suffix"], **OUTPUT)
    np.testing.assert_allclose(suffix.values[:, :, 0], out["kv_v_suffix"], **OUTPUT)


def test_velocity_and_loss(family: Family, context: Encoded, velocity, golden_draws: flow.Draws):
    out = family.outputs
    x_t, u_t = flow.interpolate(jnp.asarray(family.inputs["actions"]), golden_draws)
    np.testing.assert_allclose(x_t[:, 0], out["x_t"], **OUTPUT)
    np.testing.assert_allclose(u_t[:, 0], out["u_t"], **OUTPUT)
    v_t = velocity(family.params, context, x_t, golden_draws.time)
    np.testing.assert_allclose(v_t[:, 0], out["v_t"], **OUTPUT)
    error = jnp.square(v_t - u_t)
    np.testing.assert_allclose(error.mean((1, 3)), out["loss_per_step"], **OUTPUT)
    np.testing.assert_allclose(flow.chunk_loss(error), out["loss_per_step"].mean(-1), **OUTPUT)


def test_loss_from_rng(family: Family, context: Encoded, velocity):
    """The stored noise and time are what OpenPI's key gives, and the loss follows from the key alone."""
    key = jax.random.wrap_key_data(jnp.asarray(family.inputs["loss_rng_key_data"]))
    actions = jnp.asarray(family.inputs["actions"])
    draws = openpi_draws(key, actions)
    np.testing.assert_allclose(draws.noise[:, 0], family.inputs["noise"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(draws.time[:, 0], family.inputs["time"], rtol=0, atol=1e-6)
    x_t, u_t = flow.interpolate(actions, draws)
    error = jnp.square(velocity(family.params, context, x_t, draws.time) - u_t)
    np.testing.assert_allclose(error.mean((1, 3)), family.outputs["loss"], **FROM_RNG)


def test_samples(family: Family, context: Encoded):
    policy = Pi0(family.config)
    sample = jax.jit(lambda p, c, noise, n: flow.sample(policy, p, c, noise, num_steps=n))
    noise = jnp.asarray(family.inputs["sample_noise"])[:, None]
    for steps in (5, 10):
        chunks = sample(family.params, context, noise, steps)
        np.testing.assert_allclose(chunks[:, 0], family.outputs[f"sample_actions_{steps}"], **OUTPUT)
    key = jax.random.wrap_key_data(jnp.asarray(family.outputs["sample_actions_rng_key_data"]))
    noise = jax.random.normal(key, noise[:, 0].shape)[:, None]
    chunks = sample(family.params, context, noise, 10)
    np.testing.assert_allclose(chunks[:, 0], family.outputs["sample_actions_rng"], **OUTPUT)


def test_gradients(family: Family, golden_draws: flow.Draws, loss_and_gradients):
    loss, grads = loss_and_gradients(jax.tree.map(jnp.asarray, family.params), golden_draws)
    golden, grads = family.json("grad_norms"), flatten(grads)
    np.testing.assert_allclose(loss, golden["mean_loss"], **FROM_RNG)
    norm = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in grads.values()))
    np.testing.assert_allclose(norm, golden["global_norm"], rtol=1e-4)
    assert set(grads) == set(golden["leaves"])
    for path, expected in golden["leaves"].items():
        if path.endswith(NOISE_GRADIENTS):
            continue
        # A leaf stored in bfloat16 has a gradient of that precision.
        tolerance = GRADIENT if grads[path].dtype == jnp.float32 else dict(rtol=5e-3, atol=1e-5)
        l2 = np.sqrt(np.square(np.asarray(grads[path], np.float64)).sum())
        np.testing.assert_allclose(l2, expected["l2"], err_msg=path, **tolerance)
    for path, expected in family.arrays("grads_small").items():
        if path.endswith(NOISE_GRADIENTS):
            continue
        scale = max(np.abs(expected).max(), 1e-3)
        atol = 1e-4 * scale if grads[path].dtype == jnp.float32 else 1e-2 * scale
        np.testing.assert_allclose(np.asarray(grads[path], np.float32), expected, rtol=0, atol=atol, err_msg=path)


def test_bfloat16(family: Family, golden_draws: flow.Draws):
    """In bfloat16 we stray from float32 as far as OpenPI does, and stay as close to OpenPI's own bfloat16."""
    if not family.has("outputs_bf16.npz"):
        pytest.skip("this family has no bfloat16 numbers")
    golden, deviation = family.arrays("outputs_bf16"), family.json("bf16_deviation")
    config = replace(family.config, dtype="bfloat16", remat="none")
    actions = jnp.asarray(family.inputs["actions"])
    loss = jax.jit(lambda p: loss_per_step(config, p, family.observation, actions, golden_draws))(family.params)
    halves = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), family.params)
    policy, noise = Pi0(config), jnp.asarray(family.inputs["sample_noise"])[:, None]
    chunks = jax.jit(lambda p: flow.sample(policy, p, policy.encode(p, family.observation), noise))(halves)
    assert chunks.dtype == jnp.float32
    for ours, exact, name in (
        (loss, family.outputs["loss"], "train_f32_params/loss"),
        (chunks[:, 0], family.outputs["sample_actions_10"], "infer_bf16_params/sample_actions_10"),
    ):
        np.testing.assert_allclose(ours, golden[name], err_msg=name, **BFLOAT16)
        largest, mean, _ = deviation[name]
        assert np.abs(ours - exact).max() < 2 * largest, name
        assert np.abs(ours - exact).mean() < 1.5 * mean, name


def test_three_optimizer_steps(family: Family, loss_and_gradients):
    """OpenPI's AdamW, clipping, schedule, EMA and frozen leaves, three steps from the golden weights."""
    golden, arrays = family.json("train_steps"), family.arrays("train_steps")
    rate = make_schedule(CosineSchedule(**golden["lr_schedule"]))
    tx = make_optimizer(AdamW(**golden["optimizer"]), rate)
    params = jax.tree.map(jnp.asarray, family.params)
    mask = freeze.trainable_mask(params, family.config)
    trained, frozen = freeze.split(freeze.cast_frozen(params, mask), mask)
    state, ema = tx.init(trained), freeze.join(trained, frozen)

    @jax.jit
    def step(trained, state, grads):
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, optax.tree.norm(grads)

    for i, expected in enumerate(golden["steps"]):
        draws = flow.Draws(jnp.asarray(arrays[f"noise_{i}"])[:, None], jnp.asarray(arrays[f"time_{i}"])[:, None])
        loss, grads = loss_and_gradients(freeze.join(trained, frozen), draws)
        trained, state, norm = step(trained, state, freeze.split(grads, mask)[0])
        np.testing.assert_allclose(loss, expected["loss"], rtol=2e-5)
        np.testing.assert_allclose(norm, expected["grad_norm"], rtol=1e-4)
        np.testing.assert_allclose(rate(i), expected["lr"], rtol=1e-6)
        if decay := golden["ema_decay"]:
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, freeze.join(trained, frozen))

    final = flatten(freeze.join(trained, frozen))
    stored = {path.removeprefix("final/"): x for path, x in arrays.items() if path.startswith("final/")}
    assert stored
    assert set(stored) <= set(final)
    for path, expected in stored.items():
        if not path.endswith(NOISE_GRADIENTS):
            ours = np.asarray(final[path], np.float32)
            np.testing.assert_allclose(ours, expected, err_msg=path, **WEIGHTS_AFTER_3_STEPS)
    trees = {"params": final, "ema_params": flatten(ema)} if golden["ema_decay"] else {"params": final}
    for name, ours in trees.items():
        assert set(ours) == set(golden[name])
        for path, expected in golden[name].items():
            assert str(ours[path].dtype) == expected["dtype"], path
            if not path.endswith(NOISE_GRADIENTS):
                l2 = np.sqrt(np.square(np.asarray(ours[path], np.float64)).sum())
                np.testing.assert_allclose(l2, expected["l2"], rtol=1e-5, atol=1e-6, err_msg=f"{name}: {path}")


def test_frozen_leaves(family: Family):
    """Which leaves train, and that frozen ones are stored in bfloat16."""
    if not family.has("lora_trainable.json"):
        pytest.skip("nothing is frozen in this family")
    shapes = pi0.param_shapes(family.config)
    mask = freeze.trainable_mask(shapes, family.config)
    shapes = flatten(freeze.freeze_dtypes(shapes, mask))
    golden = family.json("lora_trainable")
    assert {p: (t, str(shapes[p].dtype), list(shapes[p].shape)) for p, t in flatten(mask).items()} == {
        p: (leaf["trainable"], leaf["dtype"], leaf["shape"]) for p, leaf in golden.items()
    }
    assert nest(flatten(mask)) == mask
