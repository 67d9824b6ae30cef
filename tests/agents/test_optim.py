"""Schedules and optimizers are OpenPI's: its recorded rates, its state tree, its arithmetic re-derived in NumPy."""

import json
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from golden_data import FAMILIES, TRANSFORMS
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.errors import ConfigError
from pirl.training.config import SGD, AdamW, ConstantSchedule, CosineSchedule, RsqrtSchedule

RATES = json.loads((TRANSFORMS / "lr_schedules.json").read_text())
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1, -0.1])}
GRADS = {"w": jnp.array([[0.3, -4.0], [2.0, 0.0]]), "b": jnp.array([1.0, -1.0])}


@pytest.mark.parametrize("name", sorted(RATES))
def test_learning_rates_are_openpis(name: str) -> None:
    golden = RATES[name]
    schedule = make_schedule((CosineSchedule if name.startswith("cosine") else RsqrtSchedule)(**golden["cfg"]))
    for step, expected in golden["values"].items():
        np.testing.assert_allclose(schedule(int(step)), expected, rtol=2e-6, err_msg=step)


def test_defaults_are_openpis() -> None:
    assert RATES["cosine_default"]["cfg"] == vars(CosineSchedule())
    assert RATES["rsqrt_default"]["cfg"] == vars(RsqrtSchedule())
    steps = next(family.json("train_steps") for family in FAMILIES.values() if family.has("train_steps.json"))
    assert vars(AdamW()) == steps["optimizer"]


def test_constant_schedule_warms_up() -> None:
    schedule = make_schedule(ConstantSchedule(lr=0.4, warmup_steps=3))
    np.testing.assert_allclose([schedule(step) for step in range(5)], [0.1, 0.2, 0.3, 0.4, 0.4], rtol=1e-6)
    assert make_schedule(ConstantSchedule(lr=0.4))(0) == 0.4


def test_adamw_state_has_openpis_tree() -> None:
    """The names under which OpenPI stores the optimizer, read from a checkpoint it wrote."""
    file = next(f.after3_dir for f in FAMILIES.values() if f.after3_dir) / "train_state" / "_METADATA"
    keys = [
        tuple(part["key"] for part in leaf["key_metadata"])
        for leaf in json.loads(file.read_text())["tree_metadata"].values()
        if leaf["value_metadata"]["value_type"] != "None"
    ]
    weight = re.compile("(?:mu|nu)$")
    theirs = {"/".join(key[1:4] if weight.match(key[3]) else key[1:]) for key in keys if key[0] == "opt_state"}
    state = make_optimizer(AdamW(), make_schedule(CosineSchedule())).init(PARAMS)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(state)]
    assert {re.sub("/(w|b)$", "", path) for path in paths} == theirs


def test_adamw_is_clipping_then_decoupled_decay() -> None:
    config = AdamW(b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.1, clip_gradient_norm=2.0)
    rates = [0.1, 0.05]
    tx = make_optimizer(config, lambda step: jnp.array(rates)[step])
    params, state = PARAMS, tx.init(PARAMS)
    for _ in rates:
        updates, state = tx.update(GRADS, state, params)
        params = optax.apply_updates(params, updates)

    norm = np.sqrt(sum(np.square(g).sum() for g in GRADS.values()))
    assert norm > 2
    for name, w in PARAMS.items():
        w, g, m, v = np.asarray(w), np.asarray(GRADS[name]) * 2 / norm, 0.0, 0.0
        for t, rate in enumerate(rates, 1):
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            w = w - rate * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + 0.1 * w)
        np.testing.assert_allclose(params[name], w, rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov: bool) -> None:
    tx = make_optimizer(SGD(momentum=0.5, nesterov=nesterov), 0.1)
    state = tx.init(PARAMS)
    for step in range(2):
        updates, state = tx.update(GRADS, state, PARAMS)
        trace = GRADS["w"] * (1 if step == 0 else 1.5)
        expected = GRADS["w"] + 0.5 * trace if nesterov else trace
        np.testing.assert_allclose(updates["w"], -0.1 * expected, rtol=1e-6)


def test_without_clipping_the_state_fits_the_same_checkpoint() -> None:
    clipped, free = (make_optimizer(AdamW(clip_gradient_norm=norm), 1e-3) for norm in (1.0, None))
    assert jax.tree.structure(clipped.init(PARAMS)) == jax.tree.structure(free.init(PARAMS))
    big = jax.tree.map(lambda g: 100 * g, GRADS)
    (_, (clipped_adam, *_)), (_, (free_adam, *_)) = (
        tx.update(big, tx.init(PARAMS), PARAMS)[1] for tx in (clipped, free)
    )
    np.testing.assert_allclose(free_adam.mu["w"], 0.1 * big["w"], rtol=1e-6)
    assert optax.tree.norm(clipped_adam.mu) < 0.11


def test_an_own_optimizer_is_one_dataclass_and_one_function() -> None:
    @dataclass(frozen=True)
    class Lion:
        b1: float = 0.5

    with pytest.raises(TypeError, match="Lion has no optimizer"):
        make_optimizer(Lion(), 1e-3)
    with pytest.raises(TypeError, match="Lion has no schedule"):
        make_schedule(Lion())
    make_optimizer.register(Lion, lambda config, schedule: optax.lion(schedule, b1=config.b1))
    updates, _ = make_optimizer(Lion(), 1e-3).update(GRADS, optax.lion(1e-3).init(PARAMS), PARAMS)
    assert float(jnp.abs(updates["b"]).min()) > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CosineSchedule(warmup_steps=1000, decay_steps=1000), "decay_steps is 1000"),
        (lambda: CosineSchedule(peak_lr=-1.0), "peak_lr is -1.0"),
        (lambda: RsqrtSchedule(timescale=0), "timescale is 0"),
        (lambda: ConstantSchedule(lr=float("nan")), "lr is nan"),
        (lambda: AdamW(b2=1.0), "b2 is 1.0"),
        (lambda: AdamW(clip_gradient_norm=0.0), "clip_gradient_norm is 0.0"),
        (lambda: SGD(momentum=-0.1), "momentum is -0.1"),
    ],
)
def test_bad_settings_are_refused(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
