"""FlowPPO's update against NumPy, and its promises: ratio 1 where nothing moved, who is told what, who learns."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import naive_ppo as naive
from pirl.agents import ppo_objectives as po
from pirl.agents.agent import TrainState
from pirl.agents.config import FlowPPOConfig
from pirl.agents.flow_ppo import FlowPPO
from pirl.agents.learner import Learner
from pirl.errors import ConfigError, EnvError
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.noise_head import NoiseHead
from pirl.models.observation import Observation
from pirl.records import BatchSizes, Context, Episode, Rollout

SIZE, DEMOS, HORIZON, DIM, REAL, STATE, DRAWS, STEPS = 6, 3, 3, 3, 2, 4, 2, 4
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(5,)))
HEAD = dict(horizon=HORIZON, action_dim=DIM, state_dim=STATE, feature_width=None, width=4)
RATE, CRITIC_RATE, KEY = 0.1, 0.2, jax.random.key(3)
KINDS = [
    ("ppo", "flow_sde", "hl_gauss", "sum"),
    ("ppo", "flow_noise", "huber", "mean"),
    ("grpo", "flow_sde", "mse", "mean"),
    ("grpo", "flow_noise", "mse", "sum"),
]


@functools.cache
def make(
    algorithm: str = "ppo", exploration: str = "flow_sde", loss: str = "hl_gauss", reduce: str = "sum", **changes: Any
) -> FlowPPO:
    given = dict(
        bc_weight=0.4, clip=0.1, kl_limit=None, value_clip=0.15, entropy_weight=0.3, discount=0.8, flow_draws=DRAWS
    )
    config = FlowPPOConfig(algorithm=algorithm, exploration=exploration, reduce=reduce, **(given | changes))
    critic = make_critic(
        CriticConfig(hidden=(5, 4), bins=14, loss=loss, huber_delta=0.1),
        feature_width=None,
        state_dim=STATE,
        real_action_dim=REAL,
        critic_horizon=2,
    )
    return FlowPPO(
        policy=POLICY,
        critic=critic,
        head=NoiseHead(**HEAD, low=config.noise_low, high=config.noise_high),
        config=config,
        policy_learner=Learner(tx=optax.sgd(RATE)),
        critic_learner=Learner(tx=optax.sgd(CRITIC_RATE)),
        real_action_dim=REAL,
        flow_steps=STEPS,
    )


@functools.cache
def updating(agent: FlowPPO):
    return jax.jit(agent.update)


@functools.cache
def make_state(agent: FlowPPO) -> TrainState:
    """A state in the middle of an iteration: the weights are near those that rolled out, and differ from them."""
    state, rng = jax.eval_shape(agent.init, KEY), np.random.default_rng(2)

    def fill(leaf):
        return jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype) if leaf.ndim else jnp.int32(5)

    state = replace(jax.tree.map(fill, state), scalars={"held": jnp.zeros(())})
    target = {name: jax.tree.map(lambda x: x + 0.02 * jnp.cos(9 * x), state.params[name]) for name in state.target}
    return replace(state, target=target)


def observed(size: int = SIZE) -> Observation:
    state = np.random.default_rng(0).normal(size=(size, STATE))
    return Observation(images={}, image_masks={}, state=jnp.asarray(state, jnp.float32))


@functools.cache
def explored(agent: FlowPPO):
    """Plans of the policy that rolled out."""
    state = make_state(agent)
    return jax.jit(agent.explore)(
        replace(state, params=state.params | state.target), observed(), jax.random.split(KEY, SIZE)
    )


def make_batch(agent: FlowPPO, **changes: Any) -> dict:
    """Both signs; whole and cut plans; rows that weigh differently, and one that only fills up the batch."""
    rng, executed = np.random.default_rng(1), np.array([3, 2, 3, 1, 2, 3])
    batch = {
        "observations": {"state": np.asarray(observed().state)},
        "executed": np.arange(HORIZON) < executed[:, None],
        "notes": explored(agent).notes,
        "advantage": np.array([0.6, -0.4, 1.7, -1.3, 0.3, 0.9]),
        "return": np.array([0.9, 0.1, 0.4, 0.0, 1.0, 0.2]),
        "weight": np.array([1.5, 0.5, 1, 1, 1, 0]),
        "fresh": np.zeros(SIZE),
        "demos": {
            "observations": {"state": rng.normal(size=(DEMOS, STATE))},
            "actions": rng.normal(size=(DEMOS, HORIZON, DIM)),
            "valid": np.arange(HORIZON) < np.array([3, 2, 3])[:, None],
        },
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch | changes)


def doubles(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found, expected, rtol=1e-3, atol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def same(left, right) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), left, right)))


def settings_of(agent: FlowPPO) -> naive.Settings:
    c, sizes = agent.config, agent.critic.config
    names = ("exploration", "noise_level", "noise_low", "noise_high", "entropy_weight", "clip", "reduce", "bc_weight")
    critic: Any = SimpleNamespace(
        **{name: getattr(sizes, name) for name in ("loss", "bins", "sigma_ratio", "huber_delta", "action_clip")},
        **{"low": 0.0, "high": 1.0, "real_dims": REAL, "critic_horizon": 2, "critic_state_dim": STATE},
    )
    return naive.Settings(
        **{name: getattr(c, name) for name in names},
        **{"flow_steps": STEPS, "real_dims": REAL, "head_state_dim": STATE, "value_clip": c.value_clip},
        **{"rate": RATE, "critic_rate": CRITIC_RATE, "critic": critic},
    )


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_update_equals_numpy(kind: tuple[str, ...]):
    agent = make(*kind)
    state, batch = make_state(agent), make_batch(agent)
    new, metrics = updating(agent)(state, batch, KEY)
    _, noise_key, time_key = jax.random.split(jax.random.split(KEY)[1], 3)
    draws = {
        "noise": np.float64(jax.random.normal(noise_key, (DEMOS, DRAWS, HORIZON, DIM))),
        "time": np.float64(jax.random.uniform(time_key, (DEMOS, DRAWS)) ** (1 / 1.5)) * 0.999 + 0.001,
    }
    given = doubles(state.params) | {"old": doubles(state.target)}
    expected, numbers = naive.update(settings_of(agent), given, doubles(batch), draws)
    close(doubles(new.params), expected)
    close(metrics, numbers)
    assert metrics["ppo/kl"] > 1e-4, "the weights differ from those that rolled out"
    assert abs(metrics["ppo/ratio"] - 1) > 1e-4
    assert same(new.target, state.target)
    assert int(new.step) == 6


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids="-".join)
def test_the_first_minibatch_has_ratio_one_and_no_divergence(kind: tuple[str, ...]):
    agent = make(*kind)
    state = make_state(agent)
    new, metrics = updating(agent)(state, make_batch(agent, fresh=np.ones(SIZE)), KEY)
    assert metrics["ppo/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["ppo/kl"] < 1e-10
    assert metrics["ppo/ratio_clipped"] == 0
    assert same(new.target, {name: state.params[name] for name in state.target}), "from before the update"
    after, metrics = updating(agent)(new, make_batch(agent), KEY)
    assert metrics["ppo/kl"] > 1e-6
    assert same(after.target, new.target)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_policy_that_moved_far_is_held_until_the_next_iteration(algorithm: str):
    agent = make(algorithm, kl_limit=1e-6)
    state, batch = make_state(agent), make_batch(agent)
    held, metrics = updating(agent)(state, batch, KEY)
    assert metrics["ppo/held"] == 1
    assert same(held.params["policy"], state.params["policy"])
    assert agent.moved_far(metrics) == (algorithm == "grpo"), "a value goes on"
    if algorithm == "ppo":
        assert not same(held.params["critic"], state.params["critic"])
    back = replace(held, target={"policy": held.params["policy"]})
    still, metrics = updating(agent)(back, batch, KEY)
    assert metrics["ppo/kl"] < 1e-6
    assert same(still.params["policy"], state.params["policy"])
    again, metrics = updating(agent)(back, batch | {"fresh": jnp.ones(SIZE)}, KEY)
    assert metrics["ppo/held"] == 0
    assert not same(again.params["policy"], state.params["policy"])


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids="-".join)
def test_rows_that_fill_up_the_batch_change_nothing(kind: tuple[str, ...]):
    agent, last = make(*kind), np.arange(SIZE) == SIZE - 1
    batch = make_batch(agent)
    notes = batch["notes"]
    other = batch | {
        "notes": jax.tree.map(lambda x: x.at[-1].set(jnp.nan), notes),
        "advantage": jnp.where(last, jnp.nan, batch["advantage"]),
        "return": jnp.where(last, jnp.nan, batch["return"]),
        "executed": jnp.where(last[:, None], 0.0, batch["executed"]),
    }
    found, expected = (updating(agent)(make_state(agent), b, KEY) for b in (other, batch))
    close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_batch_in_parts_is_the_batch():
    found, expected = (
        updating(make(*KINDS[1], accumulate=n))(make_state(make(*KINDS[1])), make_batch(make(*KINDS[1])), KEY)
        for n in (3, 1)
    )
    close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_value_learns_first():
    agent = make(value_warmup_steps=6)
    state, batch = make_state(agent), make_batch(agent)
    first, _ = updating(agent)(state, batch, KEY)
    assert same(first.params["policy"], state.params["policy"])
    assert not same(first.params["critic"], state.params["critic"])
    second, _ = updating(agent)(first, batch, KEY)
    assert not same(second.params["policy"], first.params["policy"])


def test_batches_are_as_announced():
    for kind in KINDS:
        agent = make(*kind)
        sizes = BatchSizes(batch=SIZE, horizon=HORIZON, critic_horizon=2, action_dim=DIM, state_dim=STATE)
        spec = agent.batch_spec(sizes)["notes"]
        assert {name: one.shape for name, one in spec.items()} == {
            name: x.shape for name, x in explored(agent).notes.items()
        }
        assert {name: one.dtype for name, one in spec.items()} == dict.fromkeys(spec, "float32")
        assert agent.lesson([]).columns.keys() | agent.lesson([]).of_plans.keys() == (
            {"advantage", "return"} if agent.config.learns_values else {"advantage"}
        )


# Exploring and acting


def test_acting_follows_the_ode_and_exploring_does_not():
    agent, keys = make(), jax.random.split(KEY, SIZE)
    state = make_state(agent)
    assert same(agent.act(state, observed(), keys), make("grpo").act(make_state(agent), observed(), keys))
    a, b = (agent.explore(state, observed(), k).chunk for k in (keys, jax.random.split(jax.random.key(4), SIZE)))
    assert not np.allclose(a, b)
    few = Observation(images={}, image_masks={}, state=observed().state[2:4])
    close(agent.explore(state, few, keys[2:4]).chunk, a[2:4], rtol=1e-5, atol=1e-5)
    assert agent.served(state) is None
    assert agent.acting_groups() == frozenset()


def test_a_value_is_that_of_the_observation():
    agent = make()
    state = make_state(agent)
    chunks = jax.random.normal(KEY, (SIZE, 3, HORIZON, DIM))
    q = agent.q_values(state, observed(), chunks)
    assert q.shape == (2, SIZE, 3)
    assert same(q[..., 0], q[..., 2])
    noted = agent.explore(state, observed(), jax.random.split(KEY, SIZE)).notes
    close(noted["value"], q.mean(0)[:, 0], rtol=1e-5, atol=1e-6)


# Advantages


def rollout(rewards: list[float], starts: list[int], values: list[float], *, ended: bool) -> Rollout:
    steps = len(rewards)
    last = np.arange(steps) == steps - 1
    return Rollout(
        context=Context("go", 0),
        number=0,
        episode=Episode(
            task="go",
            state=np.zeros((steps, STATE), np.float32),
            actions=np.zeros((steps, REAL), np.float32),
            rewards=np.array(rewards, np.float32),
            terminated=last & ended,
            truncated=last & (not ended),
            success=ended,
        ),
        starts=np.array(starts),
        frames={},
        frame_steps=np.zeros(0, np.int64),
        notes={"value": np.array(values, np.float32)},
    )


CASES = [
    ([0, 0, 0, 0, 0, 0, 1.0], [0, 3, 6], [0.2, 0.5, 0.4], True, 0.0),  # ends in the middle of a plan
    ([0, 0.5, 0, 0, 0, 0], [0, 3], [0.3, 0.1, 0.7], False, 0.7),  # cut off, and looked at again
    ([0, 0, 0, 0, 0, 0], [0, 3], [0.3, 0.1], False, 0.0),  # cut off, and counted as lost
    ([0.25], [0], [0.9], True, 0.0),
]


@pytest.mark.parametrize("trace", [0.0, 0.9, 1.0])
def test_advantages_equal_sums_over_what_follows(trace: float):
    agent = make(gae_lambda=trace, standardise=False)
    rollouts = [rollout(*case[:3], ended=case[3]) for case in CASES]
    lesson = agent.lesson([rollouts[:2], rollouts[2:]])
    assert lesson.groups.tolist() == [0, 1]
    for i, (rewards, starts, values, _, after) in enumerate(CASES):
        expected = naive.advantages(rewards, starts, values[: len(starts)], after, 0.8, trace)
        close(lesson.of_plans["advantage"][i], expected, atol=1e-6)
        close(lesson.of_plans["return"][i], np.add(expected, values[: len(starts)]), atol=1e-6)


def test_full_traces_are_returns_minus_values():
    """With λ = 1 what is bootstrapped in between cancels: A = G - V."""
    agent = make(gae_lambda=1.0, standardise=False)
    rewards, starts, values, _, _ = CASES[0]
    found = agent.lesson([[rollout(rewards, starts, values, ended=True)]])
    returns = [0.8 ** (6 - start) for start in starts]
    close(found.of_plans["return"][0], returns, atol=1e-6)


def test_standardised_advantages_keep_their_order():
    agent = make()
    rollouts = [rollout(*case[:3], ended=case[3]) for case in CASES]
    plain, scaled = (
        np.concatenate(one.lesson([rollouts]).of_plans["advantage"]) for one in (make(standardise=False), agent)
    )
    assert scaled.mean() == pytest.approx(0, abs=1e-9)
    assert scaled.std() == pytest.approx(1)
    assert np.argsort(plain).tolist() == np.argsort(scaled).tolist()
    assert po.standardised([np.ones(3), np.ones(2)])[0].tolist() == [0, 0, 0]


def test_rewards_beyond_the_histogram_are_refused():
    with pytest.raises(EnvError, match=r"rewards from 0.0 to 3.0, and the values are bounded by rewards in \[0.0, 1.0"):
        make().lesson([[rollout([0, 3.0], [0], [0.5], ended=True)]])
    assert make(loss="huber").lesson([[rollout([0, 3.0], [0], [0.5], ended=True)]]).groups.tolist() == [0]


def test_groups_with_equal_outcomes_teach_grpo_nothing():
    agent = make("grpo")
    won, lost = (rollout([0.0, float(x)], [0], [], ended=x) for x in (True, False))
    lesson = agent.lesson([[won] * 7 + [lost], [won] * 8, [lost] * 8])
    assert lesson.groups.tolist() == [0]
    close(lesson.columns["advantage"], [[1 / 7] * 7 + [-1.0]], atol=1e-6)
    assert lesson.of_plans == {}


def test_plans_of_iterations():
    ppo, grpo = (FlowPPOConfig(algorithm=a, group_size=2, groups_per_iteration=5) for a in ("ppo", "grpo"))
    assert (ppo.groups.max_groups, ppo.groups.last_look) == (5, True)
    assert (grpo.groups.max_groups, grpo.groups.last_look) == (20, False)
    assert not replace(ppo, bootstrap_timeouts=False).groups.last_look
    assert replace(ppo, weigh="rollouts").groups.even
    with pytest.raises(ConfigError, match="groups of 1 rollout"):
        replace(grpo, group_size=1)
    with pytest.raises(ConfigError, match=r"noise_low is 0\.2"):
        FlowPPOConfig(noise_low=0.2)


def test_demonstrations_are_needed_where_they_are_asked_for():
    batch = {name: value for name, value in make_batch(make()).items() if name != "demos"}
    with pytest.raises(ConfigError, match="the batch has no `demos`"):
        jax.eval_shape(make().update, make_state(make()), batch, KEY)
