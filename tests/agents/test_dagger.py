"""DAgger's update against NumPy, and its promises: who is imitated, in which steps, and that it is else cloning."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import naive_acrlpd as naive
from pirl import recipes
from pirl.agents import corrections
from pirl.agents.agent import Agent
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig, DAggerConfig
from pirl.agents.dagger import DAgger
from pirl.agents.learner import Learner
from pirl.models.config import MLPFlowConfig
from pirl.models.mlp import MLPFlow
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED, DEMONSTRATED, BatchSizes

SIZE, HORIZON, DIM, REAL, STATE, DRAWS = 8, 4, 3, 2, 4, 2
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(6,)))
RATE, DECAY, CORRECTION, OWN = 0.3, 0.7, 3.0, 0.5
KEY = jax.random.key(3)
LETTERS = {"d": DEMONSTRATED, ".": AUTONOMOUS, "x": BLAMED, "C": CORRECTED}
ACTED = ("dddd", "CCCC", "CC..", "....", "..xx", "xxCC", ".xCC", "CCxC")
"""The chunks of the batch, step by step."""
COUNTED = ("1111", "1111", "1100", "1111", "1100", "0000", "1000", "1100")
"""Their steps that count."""
WEIGHTS = np.array([1, CORRECTION, CORRECTION, OWN, OWN, 0, OWN, CORRECTION])
REMAINING = np.array([4, 4, 4, 4, 4, 4, 4, 1])


def acted_by(rows: tuple[str, ...] = ACTED) -> jax.Array:
    return jnp.asarray([[LETTERS[letter] for letter in row] for row in rows], jnp.int32)


@functools.cache
def make(*, accumulate: int = 1, mask_padding: bool = True, own: float = OWN) -> DAgger:
    config = DAggerConfig(
        correction_weight=CORRECTION,
        policy_weight=own,
        flow_draws=DRAWS,
        mask_padding=mask_padding,
        ema_decay=DECAY,
        accumulate=accumulate,
    )
    learner = Learner(tx=optax.sgd(RATE), ema_decay=DECAY)
    return DAgger(policy=POLICY, config=config, policy_learner=learner, real_action_dim=REAL, flow_steps=4)


@functools.cache
def make_state() -> Any:
    """Average and weights differ, so that neither can stand for the other."""
    state, rng = jax.eval_shape(make().init, KEY), np.random.default_rng(2)
    filled = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), (state.params, state.ema))
    return replace(state, step=jnp.int32(5), params=filled[0], ema=filled[1])


def make_batch() -> dict:
    rng = np.random.default_rng(0)
    batch = {
        "observations": {"state": rng.normal(size=(SIZE, STATE))},
        "actions": rng.normal(0, 1.2, (SIZE, HORIZON, DIM)),
        "valid": np.arange(HORIZON) < REMAINING[:, None],
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch) | {"acted_by": acted_by()}


def doubles(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


@pytest.mark.parametrize("mask_padding", [True, False])
def test_update_equals_numpy(mask_padding: bool) -> None:
    agent, state, batch = make(mask_padding=mask_padding), make_state(), doubles(make_batch())
    new, metrics = jax.jit(agent.update)(state, make_batch(), KEY)
    _, noise_key, time_key = jax.random.split(KEY, 3)
    noise = np.float64(jax.random.normal(noise_key, (SIZE, DRAWS, HORIZON, DIM)))
    time = np.float64(jax.random.uniform(time_key, (SIZE, DRAWS)) ** (1 / 1.5)) * 0.999 + 0.001
    steps = np.array([[float(letter) for letter in row] for row in COUNTED])
    if mask_padding:
        steps = steps * batch["valid"]
    settings: Any = SimpleNamespace(real_dims=REAL if mask_padding else DIM)
    weight = WEIGHTS / WEIGHTS.mean()

    def loss(policy: Any) -> float:
        seen = batch["observations"]["state"]
        return (weight * naive.flow_losses(settings, policy, seen, batch["actions"], steps, noise, time)).mean()

    policy = doubles(state.params["policy"])
    moved = naive.mapped(lambda x, g: x - RATE * g, policy, naive.gradient(loss, policy))
    close(new.params["policy"], moved)
    average = doubles(state.ema["policy"])
    close(new.ema["policy"], naive.mapped(lambda old, x: DECAY * old + (1 - DECAY) * x, average, moved))
    close(metrics["policy/loss"], loss(policy))
    shares = {"autonomous": 3 / 8, "blamed": 1 / 8, "corrected": 3 / 8}
    for name, share in shares.items():
        assert float(metrics[f"data/{name}"]) == share
    close(metrics["data/imitated"], steps.mean())
    split, _ = jax.jit(make(mask_padding=mask_padding, accumulate=2).update)(state, make_batch(), KEY)
    close(split.params, new.params, rtol=1e-5, atol=1e-6)


def test_what_led_to_a_takeover_is_not_learned() -> None:
    """Whatever the actions of steps that do not count, in chunks that do and in chunks that do not."""
    agent = make(own=0.0)
    steps = agent.counts(make_state(), make_batch()).steps
    chunks = np.array([row[0] in "dC" for row in ACTED])
    others = (np.asarray(steps) * chunks[:, None])[..., None] == 0
    assert others.any((1, 2)).sum() == 6
    batch = make_batch()
    # What is not counted still stands in the noisy chunk that the policy sees: only whole chunks may differ.
    different = jnp.where(chunks[:, None, None], batch["actions"], 7.0)
    update = jax.jit(agent.update)
    one, two = (update(make_state(), batch | {"actions": actions}, KEY)[0] for actions in (batch["actions"], different))
    close(one.params, two.params, rtol=0, atol=0)
    _, loud = update(make_state(), batch | {"actions": jnp.where(others, 1e3, batch["actions"])}, KEY)
    assert np.isfinite(float(loud["policy/loss"]))


@pytest.mark.parametrize("mask_padding", [True, False])
def test_on_demonstrations_it_is_behaviour_cloning(mask_padding: bool) -> None:
    agent, batch = make(mask_padding=mask_padding), make_batch() | {"acted_by": acted_by(("dddd",) * SIZE)}
    config = BCConfig(flow_draws=DRAWS, mask_padding=mask_padding, ema_decay=DECAY)
    cloning = BC(policy=POLICY, config=config, policy_learner=agent.policy_learner, real_action_dim=REAL)
    found, expected = (jax.jit(one.update)(make_state(), batch, KEY)[0] for one in (agent, cloning))
    close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_batch_of_nothing_to_imitate_moves_nothing() -> None:
    batch = make_batch() | {"acted_by": acted_by(("....", "xxCC") * (SIZE // 2))}
    new, metrics = jax.jit(make(own=0.0).update)(make_state(), batch, KEY)
    close(new.params, make_state().params, rtol=0, atol=0)
    assert float(metrics["policy/loss"]) == 0


def test_it_asks_for_who_acted_and_says_when_nothing_is_left() -> None:
    assert isinstance(make(), Agent)
    sizes = BatchSizes(batch=2, horizon=HORIZON, critic_horizon=2, action_dim=DIM, state_dim=STATE)
    assert make().batch_spec(sizes)["acted_by"].shape == (2, HORIZON)
    assert "next_observations" not in make().batch_spec(sizes)
    run = recipes.get_config("dagger_tabletop")
    assert not list(run.agent.problems(run))
    none = replace(run.agent, correction_weight=0.0)
    assert "nothing is learned" in next(iter(none.problems(run)))[0]


# What the others share


def test_a_person_is_always_better_and_what_led_there_never() -> None:
    found = corrections.judged(jnp.array([True, False] * 4), acted_by())
    assert found.tolist() == [True, True, True, False, True, False, True, True]


def test_weights_are_raised_where_a_person_acted() -> None:
    weights = jnp.array([0.1, 0.1, 5.0, 0.1, 5.0, 0.1, 0.1, 0.0])
    found = corrections.raised(weights, acted_by(), 2.0)
    np.testing.assert_allclose(found, [0.1, 2.0, 5.0, 0.1, 5.0, 0.1, 0.1, 2.0])
    own = corrections.persons_own(jnp.ones((SIZE, HORIZON)), acted_by())
    assert own.sum(1).tolist() == [4, 4, 2, 4, 4, 4, 4, 2]
