"""ACRLPD's update against NumPy, and what it promises: who learns from whom, what is computed once, what never leaks."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import naive_acrlpd as naive
from pirl.agents.acrlpd import ACRLPD
from pirl.agents.config import ACRLPDConfig
from pirl.agents.learner import Learner
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow

SIZE, HORIZON, DIM, REAL, CRITIC_HORIZON, STATE, CRITIC_STATE = 8, 3, 3, 2, 2, 4, 3
NUM, DRAWS, WARMUP, STEP = 3, 2, 3, 5
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(6,)))
POLICY_RATE, CRITIC_RATE, POLICY_DECAY, CRITIC_DECAY = 0.3, 0.2, 0.7, 0.6
KEY = jax.random.key(3)

CASES = {
    "awr": (dict(), dict(loss="hl_gauss", bins=14)),
    "best_of_n": (dict(q_aggregation="min", calql_weight=0.7), dict(loss="mse")),
    "distill": (dict(q_aggregation="random_pair"), dict(loss="huber", huber_delta=0.3, num_critics=3)),
}


@functools.cache
def make(actor: str, *, accumulate: int = 1, dropout: float = 0.0, **changes) -> ACRLPD:
    of_agent, of_critic = CASES[actor]
    config = ACRLPDConfig(
        actor=actor,
        discount=0.8,
        num_action_samples=NUM,
        flow_steps=4,
        critic_updates=2,
        target_update_rate=0.3,
        target_ess=0.7,
        weight_cap=2.5,
        bc_loss_weight=0.2,
        actor_warmup_steps=WARMUP,
        flow_draws=DRAWS,
        policy_ema_decay=POLICY_DECAY,
        critic_ema_decay=CRITIC_DECAY,
        accumulate=accumulate,
        **(of_agent | changes),
    )
    critic = make_critic(
        CriticConfig(hidden=(5, 4), dropout=dropout, **of_critic),
        feature_width=None,
        state_dim=CRITIC_STATE,
        real_action_dim=REAL,
        critic_horizon=CRITIC_HORIZON,
    )
    return ACRLPD(
        policy=POLICY,
        critic=critic,
        config=config,
        policy_learner=Learner(tx=optax.sgd(POLICY_RATE), ema_decay=POLICY_DECAY),
        critic_learner=Learner(tx=optax.sgd(CRITIC_RATE), ema_decay=CRITIC_DECAY),
        encoder_frozen=True,
    )


@functools.cache
def updating(agent: ACRLPD):
    """The compiled update; every test of one agent shares it."""
    return jax.jit(agent.update)


@functools.cache
def make_state(agent: ACRLPD):
    """The state in the middle of a run: weights, averages and targets all differ, so that none can stand for another."""
    state = agent.init(jax.random.key(1))
    leaves, structure = jax.tree.flatten((state.params, state.target, state.ema))
    rng = np.random.default_rng(2)
    moved = [x + jnp.asarray(rng.normal(0, 0.4, x.shape), x.dtype) for x in leaves]
    params, target, ema = jax.tree.unflatten(structure, moved)
    scalars = {"beta": jnp.float32(0.15), "mean_weight": jnp.float32(1.1)}
    return replace(state, step=jnp.int32(STEP), params=params, target=target, ema=ema, scalars=scalars)


@functools.cache
def make_batch() -> dict:
    """Every kind of sample: whole and cut chunks, terminated and cut off, counted and not, known returns and none."""
    rng = np.random.default_rng(0)
    remaining = np.array([3, 3, 2, 1, 3, 2, 1, 3])
    batch = {
        "observations": {"state": rng.normal(size=(SIZE, STATE))},
        "next_observations": {"state": rng.normal(size=(SIZE, STATE))},
        "actions": rng.normal(0, 1.2, (SIZE, HORIZON, DIM)),
        "critic_actions": rng.normal(0, 1.2, (SIZE, CRITIC_HORIZON, DIM)),
        "valid": np.arange(HORIZON) < remaining[:, None],
        "length": np.array([2, 2, 2, 1, 2, 1, 0, 2]),
        "next_terminal": np.array([0, 0, 1, 1, 0, 0, 0, 1]),
        "sequence_mask": np.array([1, 1, 1, 1, 1, 1, 0, 1]),
        "reward_sum": np.array([0, 0.9, 1, 0, 0.3, 0.1, 0, 0.8]),
        "mc_return": np.array([0.3, 0.9, 1, np.nan, 0.5, np.nan, 0.2, 0.8]),
        "rewards": rng.normal(size=(SIZE, HORIZON)),
        "masks": np.ones((SIZE, HORIZON)),
        "terminals": np.zeros((SIZE, HORIZON)),
    }
    cast = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    return cast | {"length": jnp.asarray(batch["length"], jnp.int32)}


def doubles(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found, expected, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def same(left, right) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b, equal_nan=True)), left, right)))


# One update, number by number


def settings(agent: ACRLPD) -> naive.Settings:
    c, sizes = agent.config, agent.critic.config
    return naive.Settings(
        actor=c.actor,
        loss=sizes.loss,
        aggregation=c.q_aggregation,
        discount=c.discount,
        low=0.0,  # one reward of at most 1 per episode
        high=1.0,
        real_dims=REAL,
        critic_horizon=CRITIC_HORIZON,
        critic_state_dim=CRITIC_STATE,
        flow_steps=c.flow_steps,
        critic_updates=c.critic_updates,
        tau=c.target_update_rate,
        target_ess=c.target_ess,
        weight_cap=c.weight_cap,
        bc_loss_weight=c.bc_loss_weight,
        warmup=c.actor_warmup_steps,
        calql_weight=c.calql_weight,
        bins=sizes.bins,
        sigma_ratio=sizes.sigma_ratio,
        huber_delta=sizes.huber_delta,
        action_clip=sizes.action_clip,
        policy_rate=POLICY_RATE,
        critic_rate=CRITIC_RATE,
        policy_decay=POLICY_DECAY,
        critic_decay=CRITIC_DECAY,
    )


def naive_draws(agent: ACRLPD, key) -> naive.Draws:
    """The random numbers of a step: six keys, in the order augmentation, flow noise, flow time, candidates at s,
    candidates at s', critic; the last gives one key per critic update, and each of these one for the random pair and
    one for dropout.
    """
    _, noise, time, here, there, critic = jax.random.split(key, 6)
    chunk = (HORIZON, DIM)
    pairs = [
        jax.random.choice(jax.random.split(k)[0], agent.critic.config.num_critics, (2,), replace=False)
        for k in jax.random.split(critic, agent.config.critic_updates)
    ]
    return naive.Draws(
        noise=np.float64(jax.random.normal(noise, (SIZE, DRAWS, *chunk))),
        time=np.float64(jax.random.beta(time, 1.5, 1.0, (SIZE, DRAWS))) * 0.999 + 0.001,
        here=np.float64(jax.random.normal(here, (SIZE, NUM, *chunk))),
        there=np.float64(jax.random.normal(there, (SIZE, NUM, *chunk))),
        pairs=np.array(pairs),
    )


def naive_state(state) -> dict:
    named = {
        "policy": state.params["policy"],
        "critic": state.params["critic"],
        "target_critic": state.target["critic"],
        "ema_policy": state.ema["policy"],
        "ema_critic": state.ema["critic"],
        "fixed": state.target.get("policy", {}),
    }
    return doubles(named) | {"step": int(state.step)} | {k: float(v) for k, v in state.scalars.items()}


@pytest.mark.parametrize("actor", CASES)
def test_update_equals_numpy(actor: str):
    agent, state, batch = make(actor), make_state(make(actor)), make_batch()
    new, metrics = updating(agent)(state, batch, KEY)
    expected, numbers, info = naive.update(settings(agent), naive_state(state), doubles(batch), naive_draws(agent, KEY))
    # The numbers reach the cases that matter: else this test could not see them.
    assert info["disagree"]
    assert 0 < np.mean(info["clipped"]) < 1
    assert 0 < np.mean(info["capped"]) < 1
    found = naive_state(new)
    for name, value in expected.items():
        close(found[name], value)
    assert set(metrics) == set(numbers) | {"critic/action_slope"}
    for name, value in numbers.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
    assert int(new.step) == STEP + 1
    assert same(new.target.get("policy", {}), state.target.get("policy", {}))
