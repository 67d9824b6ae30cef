"""Corrections teach: DAgger beats imitation of the very same episodes, and does not where the flags say nothing.

A clone of mixed demonstrations acts; a scripted person lets it err for a few steps, takes over and goes to the goal.
Three seeds train side by side; 600 fresh episodes each: the 95% interval of a success rate is ±0.04 at most.
CriticNFT learns from corrections too, where no outcome is known and its critic knows nothing.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents.agent import Agent
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig, CriticNFTConfig, DAggerConfig
from pirl.agents.critic_nft import CriticNFT
from pirl.agents.dagger import DAgger
from pirl.agents.learner import Learner
from pirl.data import synthetic
from pirl.data.config import DataConfig
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.replay import MemorySource
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.records import Episode

SEEDS, STEPS, BATCH, HORIZON, LIMIT = 3, 260, 128, 3, 15
"""`LIMIT`: steps of an episode, enough to err a little and go back."""
EPISODES, PATIENCE, WINDOW = 200, 4, 4
"""Episodes that a person watches; the most steps away from the goal that they allow; the steps that are blamed."""
POLICY = MLPFlow(MLPFlowConfig(state_dim=2, action_dim=2, horizon=HORIZON, hidden=(64, 64, 64)))
KEYS, MORE_KEYS = (jax.random.split(jax.random.key(seed), SEEDS) for seed in (7, 8))
LEARNER = Learner(tx=optax.adam(2e-3), ema_decay=0.96)
_SHARED: dict[str, Any] = {"policy": POLICY, "policy_learner": LEARNER, "real_action_dim": 2}
CLONING = BC(config=BCConfig(flow_draws=2, mask_padding=True), **_SHARED)
DAGGER = DAgger(config=DAggerConfig(flow_draws=2, mask_padding=True, correction_weight=3.0), **_SHARED)


def by_critic(correction_weight: float | None) -> CriticNFT:
    """A small critic, an actor that never waits for it."""
    small = CriticConfig(hidden=(32, 32), bins=21, action_clip=3.0)
    shared: dict[str, Any] = {"discount": 0.9, "num_action_samples": 2, "flow_steps": 4, "flow_draws": 2}
    config = CriticNFTConfig(target_update_rate=0.02, old_rate=0.02, correction_weight=correction_weight, **shared)
    return CriticNFT(
        policy=POLICY,
        critic=make_critic(small, feature_width=None, state_dim=2, real_action_dim=2, critic_horizon=HORIZON),
        config=config,
        policy_learner=LEARNER,
        critic_learner=LEARNER,
        encoder_frozen=True,
    )


class Identity:
    """Positions and actions are normalised as they are."""

    def low_dim(self, state: Any, actions: Any, prompts: Any) -> dict[str, Any]:
        return {"state": state} if actions is None else {"state": state, "actions": actions}


def batches(sources: list[MemorySource], *, window: int = WINDOW, next_observations: bool = False) -> Any:
    """[seed, step, ...]: every batch of a run, drawn by the real loader."""

    def drawn(source: MemorySource, seed: int) -> Any:
        config = DataConfig(seed=seed, prefetch=0, takeover_window=window)
        shape = dict(batch_size=BATCH, horizon=HORIZON, discount=0.9, corrections=True)
        more = dict(next_observations=next_observations)
        with ACRLPDDataLoader(source, Identity(), config=config, **shape, **more) as loader:
            steps = [loader.sample_batch() for _ in range(STEPS)]
        return jax.tree.map(lambda *x: np.stack(x), *steps)

    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *(drawn(s, i) for i, s in enumerate(sources)))


def trained(agent: Agent, states: Any, data: Any, keys: Any = KEYS) -> Any:
    """All seeds at once, all steps in one program."""

    def run(state: Any, data: Any, key: Any) -> Any:
        def step(state: Any, inputs: Any) -> Any:
            return agent.update(state, *inputs)[0], None

        return jax.lax.scan(step, state, (data, jax.random.split(key, STEPS)))[0]

    compiled = jax.jit(jax.vmap(run), compiler_options={"xla_backend_optimization_level": 1})
    return compiled(states, data, keys)


@jax.jit
def chunks(state: Any, position: Any, key: Any) -> Any:
    seen = Observation(images={}, image_masks={}, state=position)
    return CLONING.act(state, seen, jax.random.split(key, len(position)))


def acted(states: Any, seed: int, count: int, *, watched: bool) -> tuple[float, list[Episode]]:
    """The share of episodes that the policy solves in time and the episodes, with a person's corrections if watched."""
    state = jax.tree.map(lambda x: x[seed], states)
    rng = np.random.default_rng(1000 * watched + seed)
    keys = iter(jax.random.split(MORE_KEYS[seed], LIMIT))
    position = synthetic.reset(rng, count)
    patience = rng.integers(1, PATIENCE + 1, count)
    away, person, over, success = np.zeros(count, int), *(np.zeros(count, bool) for _ in range(3))
    rows: list[tuple[Any, ...]] = []
    for step in range(LIMIT):
        if step % HORIZON == 0:
            plan = np.asarray(chunks(state, jnp.asarray(position, jnp.float32), next(keys)))
        offset = synthetic.GOAL - position
        straight = np.clip(offset / np.maximum(np.abs(offset).max(1, keepdims=True), synthetic.STEP), -1, 1)
        action = np.where(person[:, None], straight, plan[:, step % HORIZON])
        moved, arrived, trapped = synthetic.advance(position, action)
        rows.append((position, action, arrived, person.copy(), ~over))
        nearer = np.linalg.norm(offset, axis=1) - np.linalg.norm(moved - synthetic.GOAL, axis=1)
        away = np.where(nearer < 0.05, away + 1, 0)
        position = np.where(over[:, None], position, moved)
        success |= arrived & ~over
        over |= arrived | (trapped & ~person)
        person |= watched & (away >= patience)
    columns = [np.stack(column, axis=1) for column in zip(*rows, strict=True)]
    return float(success.mean()), [_episode(*(column[i] for column in columns)) for i in range(count)]


def _episode(state: Any, actions: Any, arrived: Any, person: Any, alive: Any) -> Episode:
    steps = int(alive.sum())
    last, solved = np.arange(steps) == steps - 1, bool(arrived[steps - 1])
    return Episode(
        task=synthetic.TASK,
        state=state[:steps].astype(np.float32),
        actions=actions[:steps].astype(np.float32),
        rewards=(last & solved).astype(np.float32),
        terminated=last & solved,
        truncated=last & (not solved),
        success=solved,
        intervention=person[:steps],
    )


def source_of(*parts: list[Episode]) -> MemorySource:
    return MemorySource(cameras=(), items=[(episode, {}) for part in parts for episode in part])


def shuffled(episodes: list[Episode], seed: int) -> list[Episode]:
    """The same episodes, each with flags of other rows: as many corrections, which say nothing."""
    rng = np.random.default_rng(seed)
    flags = rng.permutation(np.concatenate([episode.intervention for episode in episodes]))
    ends = np.cumsum([len(episode) for episode in episodes])[:-1]
    return [replace(one, intervention=part) for one, part in zip(episodes, np.split(flags, ends), strict=True)]


def silent(episodes: list[Episode]) -> list[Episode]:
    """The same episodes, of which nobody knows how they ended."""
    return [
        replace(
            one,
            rewards=np.zeros_like(one.rewards),
            terminated=np.zeros_like(one.terminated),
            truncated=one.terminated | one.truncated,
            success=None,
        )
        for one in episodes
    ]


@pytest.fixture(scope="module")
def found() -> dict[str, np.ndarray]:
    """Success without a person: of the clone, and after so many further updates on the same episodes."""
    demonstrated = [[item[0] for item in synthetic.demonstrations(seed=s, pictures=False).items] for s in range(SEEDS)]
    demos = batches([source_of(episodes) for episodes in demonstrated])
    clones = trained(CLONING, trained(CLONING, jax.vmap(CLONING.init)(KEYS), demos), demos, MORE_KEYS)
    watched = [acted(clones, seed, EPISODES, watched=True)[1] for seed in range(SEEDS)]
    pairs = list(zip(demonstrated, watched, strict=True))
    both = [source_of(*pair) for pair in pairs]
    data = batches(both)
    mixed = batches([source_of(demos, shuffled(own, seed)) for seed, (demos, own) in enumerate(pairs)])
    all_own = replace(DAGGER, config=replace(DAGGER.config, policy_weight=1.0))
    states = {
        "clone": clones,
        "cloned further": trained(CLONING, clones, data),
        "dagger": trained(DAGGER, clones, data),
        "dagger, flags shuffled": trained(DAGGER, clones, mixed),
        "dagger, the policy's own too": trained(all_own, clones, data),
        "dagger, nothing blamed": trained(all_own, clones, batches(both, window=0)),
    }
    unknown = batches([source_of(silent(demos), silent(own)) for demos, own in pairs], next_observations=True)
    for name, agent in (("by critic", by_critic(None)), ("by critic, corrected", by_critic(3.0))):
        states[name] = trained(agent, jax.vmap(agent.init)(KEYS, clones.params["policy"]), unknown)
    return {
        name: np.array([acted(state, seed, 600, watched=False)[0] for seed in range(SEEDS)])
        for name, state in states.items()
    }


def test_corrections_beat_imitation_of_the_same_episodes(found: dict[str, np.ndarray]) -> None:
    gain = found["dagger"] - found["cloned further"]
    assert gain.min() > 0.02, found
    assert gain.mean() > 0.04, found
    assert np.all(found["dagger"] > found["clone"] + 0.15), found


def test_flags_that_say_nothing_do_not(found: dict[str, np.ndarray]) -> None:
    assert found["dagger, flags shuffled"].mean() < found["cloned further"].mean() + 0.01, found
    assert np.all(found["dagger, flags shuffled"] < found["dagger"] - 0.05), found


def test_the_steps_before_a_takeover_are_better_left_out(found: dict[str, np.ndarray]) -> None:
    """Where the policy's own chunks count like demonstrations."""
    gain = found["dagger, the policy's own too"] - found["dagger, nothing blamed"]
    assert gain.min() > 0.02, found
    assert gain.mean() > 0.04, found


def test_corrections_teach_critic_nft_where_its_critic_knows_nothing(found: dict[str, np.ndarray]) -> None:
    assert np.all(found["by critic, corrected"] > found["clone"] + 0.15), found
    assert np.all(found["by critic, corrected"] > found["by critic"] + 0.15), found
