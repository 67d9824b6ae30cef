"""RECAP's and filtered imitation's updates against NumPy, and their promises: who is imitated, what is served."""

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
from pirl.agents.advantage_config import FilteredConfig, RECAPConfig
from pirl.agents.agent import Agent, TrainState
from pirl.agents.filtered import RATE as FILTER_RATE
from pirl.agents.filtered import Filtered
from pirl.agents.learner import Learner
from pirl.agents.objectives import moving_quantile
from pirl.agents.recap import RATE, RECAP
from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED

SIZE, HORIZON, DIM, REAL, CRITIC_HORIZON, STATE, DRAWS = 8, 3, 3, 2, 2, 4, 2
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(6,)))
POLICY_RATE, CRITIC_RATE, DECAY, DROPOUT, SHARE, DISCOUNT = 0.3, 0.2, 0.7, 0.3, 0.4, 0.8
CONDITION_RATE = 3.0
KEY = jax.random.key(3)
NAIVE: Any = SimpleNamespace(
    loss="hl_gauss",
    low=0.0,
    high=1.0,
    bins=14,
    sigma_ratio=0.75,
    real_dims=REAL,
    critic_horizon=CRITIC_HORIZON,
    critic_state_dim=STATE,
    action_clip=1.5,
)


@functools.cache
def make(*, accumulate: int = 1, guidance: float = 1.0, warmup: int = 0, heed: bool = False) -> RECAP:
    config = RECAPConfig(
        discount=DISCOUNT,
        positive_share=SHARE,
        condition_dropout=DROPOUT,
        guidance=guidance,
        condition_rate=CONDITION_RATE,
        value_warmup_steps=warmup,
        heed_corrections=heed,
        flow_draws=DRAWS,
        policy_ema_decay=DECAY,
        accumulate=accumulate,
    )
    critic = make_critic(
        CriticConfig(hidden=(5, 4), bins=14),
        feature_width=None,
        state_dim=STATE,
        real_action_dim=REAL,
        critic_horizon=CRITIC_HORIZON,
    )
    return RECAP(
        policy=POLICY,
        critic=critic,
        config=config,
        policy_learner=Learner(tx=optax.sgd(POLICY_RATE), ema_decay=DECAY),
        critic_learner=Learner(tx=optax.sgd(CRITIC_RATE)),
        flow_steps=4,
    )


@functools.cache
def make_state() -> TrainState:
    """In the middle of a run: weights, averages and conditions all differ, so none can stand for another."""
    shapes, rng = jax.eval_shape(make().init, KEY), np.random.default_rng(2)
    filled = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), (shapes.params, shapes.ema))
    opt = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.opt)
    scalars = {"quantile": jnp.float32(-0.1)}
    return replace(shapes, step=jnp.int32(5), params=filled[0], ema=filled[1], opt=opt, scalars=scalars)


@functools.cache
def make_batch() -> dict:
    rng = np.random.default_rng(0)
    remaining = np.array([3, 3, 2, 1, 3, 2, 1, 3])
    batch = {
        "observations": {"state": rng.normal(size=(SIZE, STATE))},
        "next_observations": {"state": rng.normal(size=(SIZE, STATE))},
        "actions": rng.normal(0, 1.2, (SIZE, HORIZON, DIM)),
        "valid": np.arange(HORIZON) < remaining[:, None],
        "next_terminal": np.array([0, 0, 1, 1, 0, 0, 0, 1]),
        "reward_sum": np.array([0, 0.2, 1, 0, 0, 0.1, 0, 0.8]),
        "mc_return": np.array([0.3, 0.9, 1, 0, 0.5, np.nan, np.nan, 0.8]),
    }
    cast = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    acted_by = np.full((SIZE, HORIZON), AUTONOMOUS)
    acted_by[0], acted_by[1], acted_by[2], acted_by[3] = CORRECTED, CORRECTED, BLAMED, BLAMED
    acted_by[4, 1:] = CORRECTED
    more = {"length": np.array([2, 2, 2, 1, 2, 1, 1, 2]), "acted_by": acted_by}
    return cast | {name: jnp.asarray(column, jnp.int32) for name, column in more.items()}


@functools.cache
def updated(**settings: Any) -> tuple[TrainState, dict]:
    return jax.jit(make(**settings).update)(make_state(), make_batch(), KEY)


def doubles(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found: Any, expected: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def draws(size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    _, noise_key, time_key = jax.random.split(KEY, 3)
    noise = np.float64(jax.random.normal(noise_key, (size, DRAWS, HORIZON, DIM)))
    return noise, np.float64(jax.random.uniform(time_key, (size, DRAWS)) ** (1 / 1.5)) * 0.999 + 0.001


def shifted(policy: dict, vector: np.ndarray) -> dict:
    first = policy["dense_0"]
    return policy | {"dense_0": first | {"bias": first["bias"] + vector}}


@pytest.mark.parametrize("heed", [False, True])
def test_one_update_is_numpys(heed: bool) -> None:
    state, batch = make_state(), doubles(make_batch())
    policy, told, critic = (doubles(state.params[name]) for name in ("policy", "condition", "critic"))
    acting = doubles(state.ema["policy"])
    seen, after = batch["observations"]["state"], batch["next_observations"]["state"]
    nothing, noise = np.zeros((SIZE, CRITIC_HORIZON, REAL)), draws()

    def value(critic: dict, at: np.ndarray) -> np.ndarray:
        return naive.members(NAIVE, critic, at, nothing).mean(0)

    assert acting.keys() == policy.keys()  # MLPs have nothing to encode: s' is the state
    bootstrap = DISCOUNT ** batch["length"] * (1 - batch["next_terminal"]) * value(critic, after)
    advantage = batch["reward_sum"] + bootstrap - value(critic, seen)
    better = advantage > -0.1
    assert 0 < better.sum() < SIZE
    if heed:
        by_value, better = better, better.copy()
        better[:2], better[2:4] = True, False
        assert not by_value[:2].all() or by_value[2:4].any()  # corrections change something

    def loss(groups: dict) -> float:
        def flow_loss(vector: np.ndarray) -> np.ndarray:
            weights = shifted(groups["policy"], vector)
            return naive.flow_losses(NAIVE, weights, seen, batch["actions"], batch["valid"], *noise)

        as_better, as_other = (flow_loss(groups["condition"][name]) for name in ("better", "other"))
        conditional = np.where(better, as_better, as_other)
        return ((1 - DROPOUT) * conditional + DROPOUT * flow_loss(np.zeros(6))).mean()

    def value_loss(critic: dict) -> float:
        known = np.isfinite(batch["mc_return"])
        out = naive.outputs(NAIVE, critic, seen[known], nothing[known])
        return naive.error(NAIVE, out, batch["mc_return"][known]).mean()

    grads = naive.gradient(loss, {"policy": policy, "condition": told})
    new, metrics = updated(heed=heed)
    step = naive.mapped(lambda x, g: x - POLICY_RATE * g, {"policy": policy, "condition": told}, grads)
    close(new.params["policy"], step["policy"])
    moved = naive.mapped(lambda x, g: x - CONDITION_RATE * POLICY_RATE * g, told, grads["condition"])
    close(new.params["condition"], moved)
    slope = naive.gradient(value_loss, critic)
    close(new.params["critic"], naive.mapped(lambda x, g: x - CRITIC_RATE * g, critic, slope))
    close(new.ema["policy"], naive.mapped(lambda a, x: DECAY * a + (1 - DECAY) * x, acting, step["policy"]))
    close(float(metrics["policy/loss"]), loss({"policy": policy, "condition": told}))
    close(float(metrics["value/loss"]), value_loss(critic))
    close(float(metrics["advantage/positive_share"]), better.mean())
    latest = np.sort(advantage)[int((1 - SHARE) * (SIZE - 1))]
    close(float(new.scalars["quantile"]), (1 - RATE) * -0.1 + RATE * latest)


def test_split_in_parts_it_is_the_same() -> None:
    for left, right in zip(jax.tree.leaves(updated()), jax.tree.leaves(updated(accumulate=2)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_while_the_value_learns_the_condition_does_not() -> None:
    new, _ = updated(warmup=100)
    close(new.params["condition"], make_state().params["condition"], rtol=0, atol=0)
    assert not np.array_equal(new.params["critic"]["head"]["bias"], make_state().params["critic"]["head"]["bias"])


def test_what_is_served_acts_like_the_policy_told_better() -> None:
    agent, state = make(), make_state()
    assert isinstance(agent, Agent)
    seen = Observation(images={}, image_masks={}, state=make_batch()["observations"]["state"])
    keys = jax.random.split(KEY, SIZE)
    served = TrainState(step=0, params={"policy": agent.served(state)})
    chunks = agent.act(state, seen, keys)
    close(agent.act(served, seen, keys), chunks, rtol=1e-6, atol=1e-6)
    assert np.abs(np.asarray(make(guidance=2.0).act(state, seen, keys)) - chunks).max() > 1e-3
    assert agent.acting_groups() == frozenset()
    assert make(guidance=2.0).acting_groups() == {"policy", "condition"}
    values = agent.q_values(state, seen, make_batch()["actions"][:, None])
    assert values.shape == (2, SIZE, 1)


def test_it_learns_what_was_better() -> None:
    """One state, two actions of which one succeeds: imitation takes either, the policy told "better" the good one."""
    rng = np.random.default_rng(0)
    good = rng.random(64) < 0.5
    actions = np.where(good, 1.0, -1.0)[:, None, None] + rng.normal(0, 0.1, (64, HORIZON, DIM))
    batch = {
        "observations": {"state": np.zeros((64, STATE))},
        "next_observations": {"state": np.zeros((64, STATE))},
        "actions": actions,
        "valid": np.ones((64, HORIZON)),
        "next_terminal": np.ones(64),
        "reward_sum": good.astype(float),
        "mc_return": good.astype(float),
    }
    cast = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch) | {"length": jnp.full(64, 2, jnp.int32)}
    policy = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(64,)))
    learner = Learner(tx=optax.adam(1e-2), ema_decay=0.9)
    agent = replace(make(), policy=policy, policy_learner=learner, critic_learner=Learner(tx=optax.adam(1e-2)))
    agent = replace(agent, config=replace(agent.config, positive_share=0.5))
    step = jax.jit(agent.update)
    state = agent.init(KEY)
    for i in range(400):
        state, metrics = step(state, cast, jax.random.fold_in(KEY, i))
    seen = Observation(images={}, image_masks={}, state=jnp.zeros((64, STATE)))
    keys = jax.random.split(jax.random.key(9), 64)
    told = np.asarray(agent.act(state, seen, keys)).mean((1, 2))
    untold = np.asarray(agent.act(TrainState(step=0, params={"policy": state.policy}), seen, keys)).mean((1, 2))
    assert (told > 0).mean() > 0.9
    assert 0.2 < (untold > 0).mean() < 0.8
    assert float(metrics["value/mean"]) == pytest.approx(good.mean(), abs=0.05)


# Filtered imitation


@functools.cache
def filtering(*, accumulate: int = 1) -> Filtered:
    config = FilteredConfig(share=SHARE, flow_draws=DRAWS, mask_padding=True, ema_decay=DECAY, accumulate=accumulate)
    learner = Learner(tx=optax.sgd(POLICY_RATE), ema_decay=DECAY)
    return Filtered(policy=POLICY, config=config, learner=learner, real_action_dim=REAL, flow_steps=4)


def test_filtered_imitation_is_numpys() -> None:
    agent, batch = filtering(), doubles(make_batch())
    policy = doubles(make_state().params["policy"])
    state = replace(agent.init(KEY), step=jnp.int32(5), scalars={"quantile": jnp.float32(0.6)})
    state = replace(state, params={"policy": make_state().params["policy"]}, ema={"policy": make_state().ema["policy"]})
    ordered = np.sort(np.nan_to_num(batch["mc_return"], nan=-1e30))
    quantile = (1 - FILTER_RATE) * 0.6 + FILTER_RATE * ordered[int((1 - SHARE) * (SIZE - 1))]
    weight = (np.nan_to_num(batch["mc_return"], nan=-np.inf) >= quantile) / SHARE
    assert 0 < (weight > 0).sum() < SIZE

    def loss(policy: dict) -> float:
        seen = batch["observations"]["state"]
        losses = naive.flow_losses(NAIVE, policy, seen, batch["actions"], batch["valid"], *draws())
        return (weight * losses).mean()

    for parts in (1, 2):
        new, metrics = jax.jit(filtering(accumulate=parts).update)(state, make_batch(), KEY)
        expected = naive.mapped(lambda x, g: x - POLICY_RATE * g, policy, naive.gradient(loss, policy))
        close(new.params["policy"], expected)
        close(float(metrics["policy/loss"]), loss(policy))
        close(float(new.scalars["quantile"]), quantile)


def test_the_quantile_starts_at_the_first_batch_and_ignores_batches_without_returns() -> None:
    values = jnp.array([0.0, 1.0, 2.0, 3.0, jnp.nan])
    assert float(moving_quantile(9.0, values, 0.5, 0.1, first=True)) == 1.0
    assert float(moving_quantile(9.0, values, 0.5, 0.1)) == pytest.approx(0.9 * 9 + 0.1)
    assert float(moving_quantile(9.0, jnp.full(4, jnp.nan), 0.5, 0.1)) == 9.0


def test_settings_outside_their_range_are_refused() -> None:
    for bad in (dict(share=0.0), dict(discount=1.0), dict(flow_draws=0)):
        with pytest.raises(ConfigError):
            FilteredConfig(**bad)
    wrong = {"positive_share": 1.0, "condition_dropout": 1.0, "guidance": -1.0, "value_warmup_steps": -1}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            RECAPConfig(**{name: value})
