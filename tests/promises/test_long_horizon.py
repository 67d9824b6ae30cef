"""Twenty seconds at 50 Hz, one outcome at the end: what was decided in the first second is found, 950 steps before.

A cart needs 1,000 steps along a corridor that divides soon after its start; one branch mostly ends well, the other
mostly does not, and nothing on the way says which. The demonstrator takes both equally often.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.bc import BC
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.agents.learner import Learner
from pirl.data.config import DataConfig
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.replay import MemorySource
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.recipes import get_config
from pirl.records import Episode

LENGTH, HORIZON, EPISODES, BATCH, STEPS = 1000, 20, 260, 256, 400
FORK, LUCK = 0.08, 0.9
POLICY = MLPFlow(MLPFlowConfig(state_dim=2, action_dim=2, horizon=HORIZON, hidden=(64, 64)))
CRITIC = make_critic(
    CriticConfig(num_critics=2, hidden=(64, 64), bins=51, action_clip=4.0),
    feature_width=None,
    state_dim=2,
    real_action_dim=2,
    critic_horizon=HORIZON,
)


class Corridor:
    """`count` carts; a state is (how far, which side) and both sides are walled off behind the fork."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.far, self.side = np.zeros(count), self.rng.normal(0, 0.02, count)

    @property
    def state(self) -> np.ndarray:
        """In units of about 1."""
        return np.stack([2 * self.far - 1, 2 * self.side], axis=-1).astype(np.float32)

    def step(self, actions: np.ndarray) -> None:
        self.far += np.clip(actions[:, 0], 0, 1) / LENGTH
        moved = np.clip(self.side + 0.02 * np.clip(actions[:, 1], -1, 1), -0.5, 0.5)
        walled = (self.far > FORK) & (np.sign(moved) != np.sign(self.side))
        self.side = np.where(walled, self.side, moved)

    def succeeds(self) -> np.ndarray:
        """The upper branch mostly does."""
        return self.rng.random(len(self.side)) < np.where(self.side > 0, LUCK, 1 - LUCK)


class Identity:
    """States and actions are normalised as they are."""

    def low_dim(self, state, actions, prompts):
        return {"state": state} if actions is None else {"state": state, "actions": actions}


@functools.cache
def demonstrated() -> MemorySource:
    carts = Corridor(EPISODES, seed=0)
    towards = 0.4 * np.sign(carts.rng.random(EPISODES) - 0.5)
    states, actions = [], []
    for _ in range(LENGTH):
        states.append(carts.state)
        steered = np.clip(10 * (towards - carts.side), -1, 1)
        actions.append(np.stack([np.ones(EPISODES), steered], axis=-1) + carts.rng.normal(0, 0.1, (EPISODES, 2)))
        carts.step(actions[-1])
    success, last = carts.succeeds(), np.arange(LENGTH) == LENGTH - 1
    seen, done = np.stack(states, axis=1), np.stack(actions, axis=1).astype(np.float32)
    episodes = [
        Episode(
            task="to the end",
            state=seen[i],
            actions=done[i],
            rewards=(last & success[i]).astype(np.float32),
            terminated=last,
            truncated=np.zeros(LENGTH, bool),
            success=bool(success[i]),
        )
        for i in range(EPISODES)
    ]
    return MemorySource(cameras=(), items=[(episode, {}) for episode in episodes])


@functools.cache
def batches(discount: float) -> dict:
    config = DataConfig(seed=0, prefetch=0)
    with ACRLPDDataLoader(
        demonstrated(), Identity(), config=config, batch_size=BATCH, horizon=HORIZON, discount=discount
    ) as loader:
        steps = [loader.sample_batch() for _ in range(STEPS)]
    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *steps)


def trained(agent, state, discount: float = 0.999, seed: int = 0):
    def run(state, data, key):
        return jax.lax.scan(lambda state, x: agent.update(state, *x), state, (data, jax.random.split(key, STEPS)))

    run = jax.jit(run, compiler_options={"xla_backend_optimization_level": 1})
    return run(state, batches(discount), jax.random.key(seed))


def success(agent, state, count: int = 300) -> float:
    """Share of carts that end well, each chunk executed whole."""
    carts = Corridor(count, seed=1)

    @jax.jit
    def chunks(position, key):
        seen = Observation(images={}, image_masks={}, state=position)
        return agent.act(state, seen, jax.random.split(key, count))

    for number in range(2 * LENGTH // HORIZON):
        plan = np.asarray(chunks(carts.state, jax.random.key(number)))
        for t in range(HORIZON):
            carts.step(plan[:, t])
    return float(((carts.far >= 0.9) & carts.succeeds()).mean())


def learner(rate: float = 2e-3) -> Learner:
    return Learner(tx=optax.adam(rate), ema_decay=0.97)


@pytest.fixture(scope="module")
def cloned():
    agent = BC(policy=POLICY, config=BCConfig(mask_padding=True), policy_learner=learner(), real_action_dim=2)
    state, _ = trained(agent, agent.init(jax.random.key(0)))
    return success(agent, state), state.params["policy"]


def improved(weights, **changes) -> float:
    """The flagship recipe's agent from these weights, its steps scaled to this run."""
    config = replace(get_config("acrlpd_aloha_fold").agent, gate=None, mc_steps=100, actor_warmup_steps=150, **changes)
    assert isinstance(config, ACRLPDConfig)
    config = replace(config, flow_steps=4, target_update_rate=0.02, critic_ema_decay=0.97)
    agent = ACRLPD(policy=POLICY, critic=CRITIC, config=config, policy_learner=learner(), critic_learner=learner())
    state, _ = trained(agent, agent.init(jax.random.key(1), weights), config.discount)
    return success(agent, state)


def test_a_decision_950_steps_before_the_outcome_is_learned(cloned) -> None:
    rate, weights = cloned
    assert 0.3 < rate < 0.7
    assert improved(weights) > 0.8


def test_a_discount_for_two_seconds_does_not_see_it(cloned) -> None:
    rate, weights = cloned
    assert improved(weights, discount=0.99) < rate + 0.15
