"""Which losses survive: a one-step task in the plane, a flow policy with four modes, a reward on one of them.

Small steps suit every loss; large ones on rollouts that are used twenty times kill those that are not bounded. As a
script (`python tests/promises/test_flow_loss_table.py`) this prints the whole table of docs/algorithms-ript.md.
"""

import functools
import warnings
from dataclasses import dataclass

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

SEEDS, GROUPS, SIZE, ITERATIONS = 3, 32, 8, 46
POLICY = MLPFlow(MLPFlowConfig(state_dim=1, action_dim=2, horizon=1, hidden=(96, 96, 96)))
MODES = 0.7 * jnp.array([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
# Here the time goes into computing, so let the compiler work (tests/conftest.py tells it not to).
jitted = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How hard the updates are on a loss."""

    name: str
    rate: float
    clip: float
    updates: int
    """Per iteration, all on the same rollouts."""
    radius: float
    """Of the reward's disc around the first mode."""


BENIGN = Setting(name="benign", rate=3e-4, clip=1.0, updates=8, radius=0.2)
HARSH = Setting(name="harsh", rate=1e-3, clip=float("inf"), updates=20, radius=0.1)
LOSSES = {
    "nft": {},
    "awr": {},
    "filter": {},
    "cfg": {},
    "cfg, guidance 2": {"loss": "cfg", "guidance": 2.0},
    "fpo": {},
    "raw": {"epochs": 1},
}


def observations(size: int) -> Observation:
    return Observation(images={}, image_masks={}, state=jnp.zeros((size, 1)))


@functools.cache
def cloned():
    """Weights of each seed after imitating all four modes alike."""
    agent = BC(policy=POLICY, config=BCConfig(), learner=Learner(tx=optax.adam(1e-3)), real_action_dim=2)

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
        return jax.lax.scan(step, agent.init(key), jax.random.split(key, 3000))[0].params["policy"]

    return jitted(jax.vmap(run))(jax.random.split(jax.random.key(0), SEEDS))


def make(name: str, setting: Setting) -> RIPT:
    with warnings.catch_warnings():
        # `raw` is run on purpose as it should not be.
        warnings.simplefilter("ignore", PirlWarning)
        config = RIPTConfig(**{"loss": name, "group_size": SIZE, "flow_draws": 1} | LOSSES[name])
    tx = optax.chain(optax.clip_by_global_norm(setting.clip), optax.adam(setting.rate))
    return RIPT(policy=POLICY, config=config, learner=Learner(tx=tx), real_action_dim=2, encoder_frozen=True)


def reward(setting: Setting, chunks):
    return (jnp.linalg.norm(chunks[:, 0] - MODES[0], axis=-1) < setting.radius).astype(jnp.float32)


def iteration(agent: RIPT, setting: Setting, state, key):
    """Roll out, compare within groups, update several times on what came of it."""
    act_key, key = jax.random.split(key)
    rows = GROUPS * SIZE
    chunks = agent.act(state, observations(rows), jax.random.split(act_key, rows))
    rewards = reward(setting, chunks)
    grouped = rewards.reshape(GROUPS, SIZE)
    batch = {
        "observations": {"state": jnp.zeros((rows, 1))},
        "actions": chunks,
        "executed": jnp.ones((rows, 1)),
        "advantage": ob.rloo(grouped).reshape(-1),
        "weight": jnp.repeat((grouped.max(1) > grouped.min(1)).astype(jnp.float32), SIZE),
    }

    def update(state, inputs):
        number, key = inputs
        fresh = (number == 0).astype(jnp.float32)
        state, metrics = agent.update(state, batch | {"fresh": fresh}, key)
        return state, metrics["ript/drift"]

    numbers, keys = jnp.arange(setting.updates), jax.random.split(key, setting.updates)
    state, drift = jax.lax.scan(update, state, (numbers, keys))
    return state, {"success": rewards.mean(), "largest": jnp.abs(chunks).max(), "drift": drift[-1]}


@functools.cache
def trained(name: str, setting: Setting) -> dict[str, np.ndarray]:
    """Final success and spread of each seed, and what went on by iteration."""
    agent = make(name, setting)

    def run(weights, key):
        state, history = jax.lax.scan(
            functools.partial(iteration, agent, setting), agent.init(key, weights), jax.random.split(key, ITERATIONS)
        )
        chunks = agent.act(state, observations(4000), jax.random.split(key, 4000))
        near = jnp.linalg.norm(chunks[:, 0] - MODES[0], axis=-1) < 0.4
        spread = jnp.where(near[:, None], chunks[:, 0], jnp.nan)
        return history | {"final": reward(setting, chunks).mean(), "spread": jnp.nanstd(spread, 0).mean()}

    found = jitted(jax.vmap(run))(cloned(), jax.random.split(jax.random.key(1), SEEDS))
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("setting", [BENIGN, HARSH], ids=lambda s: s.name)
def test_nft_survives(setting: Setting):
    found = trained("nft", setting)
    assert np.all(found["success"][:, 0] < 0.25), "the task is not solved from the start"
    assert np.all(found["final"] >= 0.9), found["final"]


def test_raw_lives_by_small_steps():
    assert np.all(trained("raw", BENIGN)["final"] >= 0.9)
    assert np.all(trained("raw", HARSH)["final"] <= 0.2)


def test_awr_survives_large_steps():
    assert np.all(trained("awr", HARSH)["final"] >= 0.9)


def table() -> str:
    """Final success of every loss, seed by seed."""
    lines = ["| loss | " + " | ".join(f"{s.name}: success" for s in (BENIGN, HARSH)) + " | spread, benign / harsh |"]
    lines.append("|---|---|---|---|")
    for name in LOSSES:
        runs = [trained(name, setting) for setting in (BENIGN, HARSH)]
        rates = [" ".join(f"{x:.2f}" for x in run["final"]) for run in runs]
        spreads = " / ".join(f"{np.nanmean(run['spread']):.3f}" for run in runs)
        lines.append(f"| `{name}` | {rates[0]} | {rates[1]} | {spreads} |")
    starts = [trained("nft", setting)["success"][:, 0].mean() for setting in (BENIGN, HARSH)]
    return "\n".join([*lines, f"success before: {starts[0]:.2f} benign, {starts[1]:.2f} harsh"])


if __name__ == "__main__":
    print(table())
