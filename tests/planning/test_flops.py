"""Operations counted by hand, and by the program that counts them."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents.bc import BC
from pirl.agents.config import BCConfig
from pirl.agents.learner import Learner
from pirl.build import build_agent
from pirl.models.config import GemmaConfig
from pirl.models.pi0 import Pi0
from pirl.planning.flops import count_flops, update_flops
from pirl.recipes import get_config
from pirl.training import metrics
from pirl.training.loop import train
from pirl.training.metrics import Timers
from small_pi0 import EXPERT, SMALL, VLM
from small_runs import small_run

X, W = jax.ShapeDtypeStruct((5, 7), jnp.float32), jax.ShapeDtypeStruct((7, 7), jnp.float32)
ONE = 2 * 5 * 7 * 7


def product(x, w):
    return x @ w


def loss(x, w):
    return jnp.square(x @ w).sum()


@jax.custom_vjp
def halved(x, w):
    return x @ w


halved.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T / 2, kept[0].T @ g / 2))


def six_times(x, w):
    return jax.lax.scan(lambda x, _: (x @ w, None), x, length=6)[0]


CASES = {
    "product": (product, 1),
    "elementwise": (lambda x, w: x.sum() * jnp.tanh(w).sum(), 0),
    "gradient of both": (jax.grad(loss, argnums=(0, 1)), 3),
    "gradient of one": (jax.grad(loss, argnums=1), 2),
    "own gradient": (jax.value_and_grad(lambda x, w: halved(x, w).sum(), argnums=(0, 1)), 3),
    "jit": (jax.jit(product), 1),
    "vmap": (lambda x, w: jax.vmap(product, (None, 0))(x, jnp.stack([w] * 4)), 4),
    "scan": (six_times, 6),
    "gradient of a scan": (
        jax.grad(lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=6)[0].sum(), 1),
        18,
    ),
    "loop": (lambda x, w: jax.lax.fori_loop(0, 9, lambda _, x: x @ w, x), 9),
    "loops in loops": (lambda x, w: jax.lax.fori_loop(0, 3, lambda _, x: six_times(x, w), x), 18),
    "recomputed": (jax.grad(jax.checkpoint(lambda x, w: loss(jnp.tanh(x @ w), w)), argnums=(0, 1)), 8),
    "branches": (lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w), 2),
    "unknown length": (lambda x, w: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_products_and_loops_by_hand(name: str) -> None:
    function, products = CASES[name]
    assert count_flops(function, X, W) == products * ONE


def test_products_with_batches_and_several_contractions() -> None:
    """Attention's two: logits and mixing."""
    q, k = (jax.ShapeDtypeStruct((3, n, 4, 8), jnp.bfloat16) for n in (5, 6))
    logits = 2 * 3 * 4 * 5 * 6 * 8
    assert count_flops(lambda q, k: jnp.einsum("btnh,bsnh->bnts", q, k), q, k) == logits
    assert count_flops(lambda q, k: jnp.einsum("btnh,bsnh->bts", q, k), q, k) == logits


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups", "pairs"),
    [
        (1, "VALID", 1, 1, 6 * 3),
        (2, "VALID", 1, 1, 3 * 3),
        (1, "SAME", 1, 1, 8 * 3 - 2),  # at both ends one tap meets the padding
        (1, "VALID", 2, 1, 4 * 3),
        (1, "VALID", 1, 2, 6 * 3),
    ],
)
def test_convolutions_by_hand(stride: int, padding: str, dilation: int, groups: int, pairs: int) -> None:
    x, kernel = jnp.zeros((2, 8, 4)), jnp.zeros((3, 4 // groups, 10))

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (stride,),
            padding,
            rhs_dilation=(dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )

    forward = 2 * 2 * pairs * (4 // groups) * 10
    assert count_flops(convolve, x, kernel) == forward
    # Its two gradients are convolutions over the same pairs, though of spread and padded arrays.
    gradient = jax.grad(lambda x, kernel: convolve(x, kernel).sum(), argnums=(0, 1))
    assert count_flops(gradient, x, kernel) == 3 * forward


BATCH = 2


def small_batch() -> dict:
    rng = np.random.default_rng(0)
    return {
        "observations": {
            "image": {name: np.zeros((BATCH, 16, 16, 3), np.uint8) for name in SMALL.cameras},
            "image_mask": {name: np.ones(BATCH, bool) for name in SMALL.cameras},
            "state": rng.normal(size=(BATCH, 5)).astype(np.float32),
            "tokenized_prompt": np.ones((BATCH, 6), np.int32),
            "tokenized_prompt_mask": np.ones((BATCH, 6), bool),
        },
        "actions": rng.normal(size=(BATCH, 3, 5)).astype(np.float32),
        "valid": np.ones((BATCH, 3), np.float32),
    }


def transformer(config: GemmaConfig, tokens: int, attended: int) -> int:
    """Multiplications of all layers: four projections, three matrices of the feed-forward, logits and mixing."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = tokens * config.width * (2 * heads + 2 * kv + 3 * config.mlp_dim)
    return config.depth * (projections + 2 * tokens * attended * heads)


def small_forward() -> tuple[int, int]:
    """(all multiplications of one sample, those whose input needs no gradient: pixels, noisy actions, state)."""
    vision, patches, prefix, suffix = SMALL.vision, 4, 3 * 4 + 6, 1 + 3
    pixels = 3 * patches * (8 * 8 * 3) * vision.width
    layer = patches * (4 * vision.width**2 + 2 * vision.width * vision.mlp_dim) + 2 * patches**2 * vision.width
    pictures = 3 * (vision.depth * layer + patches * vision.width * VLM.width)
    wide = EXPERT.width
    inputs = 3 * 5 * wide + 5 * wide
    # The time is multiplied once per chunk, the actions once per step.
    time, heads = wide * wide, 3 * (2 * wide * wide + wide * 5)
    rest = pictures + transformer(VLM, prefix, prefix) + transformer(EXPERT, suffix, prefix + suffix) + heads
    without_gradient = pixels + inputs + time
    return without_gradient + rest - unread(), without_gradient


def unread() -> int:
    """What the VLM's last layer would do beyond its keys and values."""
    tokens, kv = 3 * 4 + 6, VLM.num_kv_heads * VLM.head_dim
    return transformer(replace(VLM, depth=1), tokens, tokens) - tokens * VLM.width * 2 * kv


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_training_step_of_the_small_model_by_formula(remat: str) -> None:
    """Forward once, backward twice, except where nothing asks for the gradient of the input; with remat, more."""
    policy = Pi0(replace(SMALL, remat=remat))
    agent = BC(
        policy=policy, config=BCConfig(augment=False), policy_learner=Learner(tx=optax.adam(1e-3)), real_action_dim=5
    )
    state = jax.eval_shape(agent.init, jax.random.key(0))
    everything, without_gradient = small_forward()
    model = 2 * BATCH * (3 * everything - without_gradient)
    found = count_flops(agent.update, state, small_batch(), jax.random.key(0))
    if remat == "none":
        assert found == model
    else:
        repeated = 2 * BATCH * everything
        assert model + 0.5 * repeated < found < model + repeated


def test_what_is_recomputed_is_no_work_of_the_model() -> None:
    everything, without_gradient = small_forward()
    for remat in ("none", "full", "names"):
        config = replace(get_config("debug_bc"), model=replace(SMALL, remat=remat, vocab_size=512))
        state = jax.eval_shape(build_agent(config).init, jax.random.key(0))
        assert update_flops(build_agent(config), state, small_batch()) == 2 * BATCH * (
            3 * everything - without_gradient
        )


def test_a_run_logs_its_share_of_the_peak_of_all_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e9)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    config = small_run(tmp_path, BCConfig(), num_train_steps=4, log_interval=2)
    assert train(config) == 0
    state = jax.eval_shape(build_agent(config).init, jax.random.key(0))
    steps = [json.loads(line)["values"] for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    batch = {
        "observations": {"image": {}, "image_mask": {}, "state": np.zeros((8, 2), np.float32)},
        "actions": np.zeros((8, 3, 2), np.float32),
        "valid": np.ones((8, 3), np.float32),
    }
    flops = update_flops(build_agent(config), state, batch)
    assert flops > 0
    for step in steps:
        assert step["time/mfu"] == pytest.approx(flops / step["time/step_seconds"] / 8e9)


def test_operations_are_counted_only_where_the_peak_is_known() -> None:
    ticks, counted = iter([0.0, 2.0, 7.0, 8.0]), list[int]()
    timers = Timers(batch_size=1, peak_flops=100.0, clock=lambda: next(ticks))
    for _ in range(2):
        timers.count_flops(lambda: counted.append(1) or 50)
        timers.tick()
        assert not counted, "the first steps do not wait for it"
    assert timers.read()["time/mfu"] == 0.25
    timers.tick()
    speed = {"time/step_seconds": 1.0, "time/samples_per_second": 1.0, "time/mfu": 0.5}
    assert timers.read() == speed | {"time/seconds": 1.0}
    assert counted == [1]

    def never() -> int:
        raise AssertionError("nobody can use this")

    Timers(batch_size=1).count_flops(never)
