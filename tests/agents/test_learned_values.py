"""V(s) by expectiles, the partial critic, critics of halves: each by its definition, and what it must not see."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents import objectives as ob
from pirl.agents.acrlpd import ACRLPD
from pirl.agents.config import ACRLPDConfig
from pirl.agents.ensemble import halves
from pirl.agents.learner import Learner
from pirl.build import build_agent
from pirl.errors import ConfigError
from pirl.models import flow
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.recipes import get_config

SIZE, HORIZON, STEPS = 6, 3, 2
Y = np.random.default_rng(0).beta(0.6, 1.4, 200)


def expectile(y: np.ndarray, tau: float) -> float:
    """Where τ · E[(y - v)₊] = (1 - τ) · E[(v - y)₊], by bisection."""
    low, high = y.min(), y.max()
    for _ in range(60):
        middle = (low + high) / 2
        above, below = np.maximum(y - middle, 0).mean(), np.maximum(middle - y, 0).mean()
        low, high = (middle, high) if tau * above > (1 - tau) * below else (low, middle)
    return low


@pytest.mark.parametrize("kind", ["mse", "hl_gauss"])
def test_the_best_value_is_the_expectile(kind: str) -> None:
    """Whether it is a number or the mean of a histogram."""
    support = ob.HLGauss(0.0, 1.0, 41)
    y, found = jnp.asarray(Y, jnp.float32)[None], {}
    for tau in (0.5, 0.7, 0.9):

        def loss(out: jax.Array, tau: float = tau) -> jax.Array:
            every = jnp.broadcast_to(out, (1, len(Y), *out.shape))
            weights = ob.expectile_weights(y - ob.critic_value(kind, every, support), tau)
            return (weights * ob.critic_loss(kind, every, y[0], support=support)).mean()

        tx = optax.adam(0.05)

        def step(carry: tuple, _: None, loss=loss, tx=tx) -> tuple:
            out, state = carry
            updates, state = tx.update(jax.grad(loss)(out), state)
            return (out + updates, state), None

        start = jnp.zeros(()) if kind == "mse" else jnp.zeros(41)
        (out, _), _ = jax.jit(lambda s, step=step: jax.lax.scan(step, s, length=600))((start, tx.init(start)))
        found[tau] = float(ob.critic_value(kind, out, support))
        assert abs(found[tau] - expectile(Y, tau)) < 0.01, (kind, tau)
    assert found[0.5] < found[0.7] - 0.03 < found[0.9] - 0.1


def make(**changes: object) -> ACRLPD:
    config = ACRLPDConfig(**({"flow_steps": 2, "num_action_samples": 3, "members": "all"} | changes))
    critic = make_critic(
        CriticConfig(hidden=(8, 8), bins=21), feature_width=None, state_dim=2, real_action_dim=2, critic_horizon=HORIZON
    )
    return ACRLPD(
        policy=MLPFlow(MLPFlowConfig(state_dim=2, action_dim=2, horizon=HORIZON, hidden=(8,))),
        critic=replace(critic, heads=config.heads),
        config=config,
        policy_learner=Learner(tx=optax.sgd(0.1)),
        critic_learner=Learner(tx=optax.sgd(0.1)),
    )


def batch() -> dict:
    rng = np.random.default_rng(1)
    chunk = rng.normal(size=(SIZE, HORIZON, 2))
    numbers = {
        "observations": {"state": rng.normal(size=(SIZE, 2))},
        "next_observations": {"state": rng.normal(size=(SIZE, 2))},
        "actions": chunk,
        "critic_actions": chunk,
        "valid": np.ones((SIZE, HORIZON)),
        "next_terminal": np.zeros(SIZE),
        "sequence_mask": np.ones(SIZE),
        "reward_sum": rng.random(SIZE),
        "mc_return": rng.random(SIZE),
    }
    return jax.tree.map(jnp.float32, numbers) | {"length": jnp.full(SIZE, HORIZON, jnp.int32)}


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({}, [3, 3]),
        ({"value": "expectile"}, []),
        ({"value": "expectile", "actor": "best_of_n"}, []),
        ({"value": "expectile", "scale_by_state": True}, [3]),
        ({"value": "expectile", "actor": "distill"}, [3]),
        ({"value": "expectile", "calql_weight": 1.0}, [3]),
    ],
)
def test_a_learned_value_samples_only_what_the_actor_needs(
    changes: dict, samples: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = [], flow.sample

    def sample(policy, params, context, noise, **options):
        asked.append(noise.shape[1])
        return real(policy, params, context, noise, **options)

    monkeypatch.setattr(flow, "sample", sample)
    agent = make(**changes)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    _, metrics = jax.eval_shape(agent.update, state, batch(), jax.random.key(1))
    assert asked == samples
    assert ("critic/candidate_gain" in metrics) == (agent.config.value == "best_of_n")


def test_the_partial_critic_sees_only_its_steps() -> None:
    """It chooses, and what the rest of a chunk is does not matter to it; the whole critic sees the rest."""
    agent = make(partial_horizon=1, value="expectile")
    critic = agent.init(jax.random.key(0)).params["critic"]
    seen, chunks = batch()["observations"]["state"], batch()["actions"][:, None]
    embedding = jax.vmap(lambda m: seen @ m)(critic["layer_0"]["state"])
    later, first = chunks.at[:, :, 1:].add(1.0), chunks.at[:, :, :1].add(1.0)
    by_first = agent.values(critic, embedding, chunks)
    np.testing.assert_array_equal(agent.values(critic, embedding, later), by_first)
    assert np.abs(agent.values(critic, embedding, first) - by_first).max() > 1e-3
    whole = agent.valued(critic, embedding, chunks, None)
    assert np.abs(agent.valued(critic, embedding, later, None) - whole).max() > 1e-3


def test_a_run_gets_its_heads_and_a_partial_critic_that_is_none_is_refused() -> None:
    config = get_config("acrlpd_tabletop")
    heads = {"value": "expectile", "partial_horizon": 2}
    shapes = build_agent(replace(config, agent=replace(config.agent, **heads))).critic.param_shapes()
    assert {"first_2", "first_0"} < set(shapes)
    assert "action" not in shapes["first_0"]["layer_0"]
    assert not {"first_2", "first_0"} & set(build_agent(config).critic.param_shapes())
    with pytest.raises(ConfigError, match=r"agent\.partial_horizon is 4, and the critic scores 4 steps"):
        replace(config, agent=replace(config.agent, partial_horizon=4))


def test_neighbours_learn_from_the_two_halves_of_the_episodes() -> None:
    numbers = jnp.asarray(np.random.default_rng(0).integers(2**31, size=2000), jnp.int32)
    found = np.asarray(halves(numbers, 4))
    np.testing.assert_array_equal(found[0], ~found[1])
    np.testing.assert_array_equal(found[2], ~found[3])
    for other in (0.5, np.mean(found[0] == found[2])):
        assert abs(other - 0.5) < 0.04
    assert abs(found[0].mean() - 0.5) < 0.04
    # By the number alone: in any company, at any place.
    np.testing.assert_array_equal(np.asarray(halves(numbers[::-7], 4)), found[:, ::-7])


def test_critics_of_halves_do_not_see_the_other_half_nor_each_other() -> None:
    agent = make(members="halves", calql_weight=0.5)
    data = batch() | {"episode": jnp.arange(SIZE, dtype=jnp.int32)}
    state, key = agent.init(jax.random.key(0)), jax.random.key(1)
    mine = np.asarray(halves(data["episode"], 2))
    assert 0 < mine[0].sum() < SIZE
    update = jax.jit(lambda state, batch: agent.update(state, batch, key)[0])

    def member(tree: dict, number: int) -> list:
        return [np.asarray(x[number]) for x in jax.tree.leaves(tree)]

    plain = update(state, data)
    told = update(state, data | {"reward_sum": data["reward_sum"] + 0.3 * mine[1]})
    other = jax.tree.map(lambda x: x.at[1].multiply(1.5), state.target["critic"])
    moved = update(replace(state, target=state.target | {"critic": other}), data)
    for after in (told, moved):
        for a, b in zip(member(after.params["critic"], 0), member(plain.params["critic"], 0), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        both = zip(member(after.params["critic"], 1), member(plain.params["critic"], 1), strict=True)
        assert max(np.abs(a - b).max() for a, b in both) > 1e-5


def test_halves_show_the_noise_that_all_share() -> None:
    """Means of noisy outcomes, once over all episodes and once over halves: against their distance from the truth."""
    rng, situations, episodes = np.random.default_rng(0), 400, 64
    truth = rng.normal(size=(situations, 1)) * 0.1
    for scale, low, high in ((0.0, 0.0, 0.35), (1.0, 0.3, 0.7), (10.0, 0.97, 1.0)):
        outcomes = scale * truth + rng.normal(size=(situations, episodes))
        mine = np.asarray(halves(jnp.arange(episodes, dtype=jnp.int32), 6))
        members = np.stack([outcomes[:, one].mean(1) for one in mine])
        found = float(ob.agreement(jnp.asarray(members, jnp.float32), halved=True))
        by_hand = 1 - np.mean(np.var(members, axis=0)) / np.var(members.mean(0))
        assert found == pytest.approx(max(by_hand, 0.0), abs=1e-3)
        assert low <= found <= high, (scale, found)
