"""Which losses survive: a one-step task in the plane, a flow policy with four modes, a reward on one of them.

Small steps suit every loss; large ones on rollouts that are used twenty times kill those that are not bounded. As a
script (`python tests/promises/test_flow_loss_table.py`) this prints the whole table of docs/algorithms-ript.md.
"""

import functools
import warnings
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents import objectives as ob
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig, RIPTConfig
from pirl.agents.learner import Learner
from pirl.agents.ript import RIPT
from pirl.errors import PirlWarning
from pirl.models.config import MLPFlowConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation

SEEDS, GROUPS, SIZE, ITERATIONS, ATTEMPTS = 3, 32, 8, 40, 4
POLICY = MLPFlow(MLPFlowConfig(state_dim=1, action_dim=2, horizon=1, hidden=(64, 64, 64)))
MODES = 0.7 * jnp.array([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
# Half of the time goes into computing, so let the compiler work a little (tests/conftest.py tells it not to).
jitted = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


class Setting(NamedTuple):
    """How hard the updates are on a loss. One program serves both, since compiling it takes longer than running it."""

    rate: float
    clip: float
    updates: int
    """Per iteration, all on the same rollouts."""
    radius: float
    """Of the reward's disc around the first mode."""


BENIGN = Setting(rate=3e-4, clip=1.0, updates=8, radius=0.2)
HARSH = Setting(rate=1e-3, clip=float("inf"), updates=20, radius=0.1)
LOSSES = {
    "nft": {},
    "awr": {},
    "filter": {},
    "cfg": {},
    "cfg, guidance 2": {"loss": "cfg", "guidance": 2.0},
    "fpo": {},
    "raw": {"epochs": 1},
}
Groups = Literal["all", "accepted", "accepted, scaled"]
"""Which groups are learned from. All that were rolled out; or those that are not all alike, out of four times as many,
with or without scaling the advantages by the share of accepted groups."""


def observations(size: int) -> Observation:
    return Observation(images={}, image_masks={}, state=jnp.zeros((size, 1)))


@functools.cache
def cloned():
    """Weights of each seed after imitating all four modes alike."""
    agent = BC(policy=POLICY, config=BCConfig(), policy_learner=Learner(tx=optax.adam(2e-3)), real_action_dim=2)

    def step(state, key):
        mode_key, noise_key, key = jax.random.split(key, 3)
        modes = MODES[jax.random.randint(mode_key, (256,), 0, 4)]
        actions = modes + 0.12 * jax.random.normal(noise_key, modes.shape)
        batch = {
            "observations": {"state": jnp.zeros((256, 1))},
            "actions": actions[:, None],
            "valid": jnp.ones((256, 1)),
        }
        return agent.update(state, batch, key)[0], None

    def run(key):
        return jax.lax.scan(step, agent.init(key), jax.random.split(key, 2000))[0].params["policy"]

    return jitted(jax.vmap(run))(jax.random.split(jax.random.key(0), SEEDS))


def make(name: str, setting: Setting) -> RIPT:
    with warnings.catch_warnings():
        # `raw` is run on purpose as it should not be.
        warnings.simplefilter("ignore", PirlWarning)
        config = RIPTConfig(**{"loss": name, "group_size": SIZE, "flow_draws": 1} | LOSSES[name])
    tx = optax.chain(optax.clip_by_global_norm(setting.clip), optax.adam(setting.rate))
    return RIPT(policy=POLICY, config=config, policy_learner=Learner(tx=tx), real_action_dim=2, encoder_frozen=True)


def reward(setting: Setting, chunks):
    return (jnp.linalg.norm(chunks[:, 0] - MODES[0], axis=-1) < setting.radius).astype(jnp.float32)


def rollouts(agent: RIPT, setting: Setting, rejects: bool, scaled, state, key):
    """Chunks with their advantages, as a batch; and what came of them."""
    tried = ATTEMPTS * GROUPS if rejects else GROUPS
    chunks = agent.act(state, observations(tried * SIZE), jax.random.split(key, tried * SIZE))
    rewards = reward(setting, chunks).reshape(tried, SIZE)
    counts = (rewards.max(1) > rewards.min(1)).astype(jnp.float32) if rejects else jnp.ones(tried)
    first = jnp.argsort(-counts, stable=True)[:GROUPS]
    batch = {
        "observations": {"state": jnp.zeros((GROUPS * SIZE, 1))},
        "actions": chunks.reshape(tried, SIZE, 1, 2)[first].reshape(-1, 1, 2),
        "executed": jnp.ones((GROUPS * SIZE, 1)),
        "advantage": ob.rloo(rewards)[first].reshape(-1),
        "weight": jnp.repeat(counts[first], SIZE),
        "acceptance": jnp.where(scaled, counts.mean(), 1.0),
    }
    return batch, {"success": rewards.mean(), "largest": jnp.abs(chunks).max()}


def iteration(agent: RIPT, setting: Setting, rejects: bool, scaled, state, key):
    """Roll out, compare within groups, update several times on what came of it."""
    act_key, key = jax.random.split(key)
    batch, history = rollouts(agent, setting, rejects, scaled, state, act_key)

    def update(number, carry):
        state, _ = carry
        fresh = (number == 0).astype(jnp.float32)
        state, metrics = agent.update(state, batch | {"fresh": fresh}, jax.random.fold_in(key, number))
        return state, metrics["ript/drift"]

    state, drift = jax.lax.fori_loop(0, setting.updates, update, (state, jnp.zeros(())))
    return state, history | {"drift": drift}


@functools.cache
def program(name: str, rejects: bool):
    """All seeds at once: (weights, keys, setting, scaled) -> final success and spread, and the course by iteration."""

    def run(weights, key, setting: Setting, scaled):
        agent = make(name, setting)
        step = functools.partial(iteration, agent, setting, rejects, scaled)
        state, history = jax.lax.scan(step, agent.init(key, weights), jax.random.split(key, ITERATIONS))
        chunks = agent.act(state, observations(4000), jax.random.split(key, 4000))
        near = jnp.linalg.norm(chunks[:, 0] - MODES[0], axis=-1) < 0.4
        spread = jnp.where(near[:, None], chunks[:, 0], jnp.nan)
        return history | {"final": reward(setting, chunks).mean(), "spread": jnp.nanstd(spread, 0).mean()}

    return jitted(jax.vmap(run, in_axes=(0, 0, None, None)))


@functools.cache
def trained(name: str, setting: Setting, groups: Groups = "all") -> dict[str, np.ndarray]:
    keys = jax.random.split(jax.random.key(1), SEEDS)
    found = program(name, groups != "all")(cloned(), keys, setting, groups == "accepted, scaled")
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("setting", [BENIGN, HARSH], ids=["benign", "harsh"])
def test_nft_survives(setting: Setting):
    found = trained("nft", setting)
    assert np.all(found["success"][:, 0] < 0.25), "the task is not solved from the start"
    assert np.all(found["final"] >= 0.9), found["final"]


def test_raw_lives_by_small_steps():
    assert np.all(trained("raw", BENIGN)["final"] >= 0.9)
    assert np.all(trained("raw", HARSH)["final"] <= 0.2)


def test_awr_survives_large_steps():
    assert np.all(trained("awr", HARSH)["final"] >= 0.9)


def test_rejecting_groups_needs_scaled_advantages():
    """Groups that are all alike held the policy: without them it unlearns a solved task, or the rest must pull less."""
    assert np.all(trained("nft", HARSH, "accepted, scaled")["final"] >= 0.9)
    assert np.any(trained("nft", HARSH, "accepted")["final"] <= 0.5)


def table() -> str:
    """Final success of every loss, seed by seed."""
    lines = ["| loss | groups | benign | harsh | spread of the solution, benign / harsh |", "|---|---|---|---|---|"]
    rows = [(name, "all") for name in LOSSES]
    rows += [("nft", "accepted"), ("nft", "accepted, scaled"), ("awr", "accepted"), ("filter", "accepted")]
    for name, groups in rows:
        runs = [trained(name, setting, groups) for setting in (BENIGN, HARSH)]
        rates = [" ".join(f"{x:.2f}" for x in run["final"]) for run in runs]
        spreads = " / ".join(
            "-" if np.isnan(run["spread"]).all() else f"{np.nanmean(run['spread']):.3f}" for run in runs
        )
        lines.append(f"| `{name}` | {groups} | {rates[0]} | {rates[1]} | {spreads} |")
    starts = [trained("nft", setting)["success"][:, 0].mean() for setting in (BENIGN, HARSH)]
    return "\n".join([*lines, f"success before: {starts[0]:.2f} benign, {starts[1]:.2f} harsh"])


if __name__ == "__main__":
    print(table())
