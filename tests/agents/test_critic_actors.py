"""CriticNFT's and QC-FQL's updates against NumPy, and their promises: what is held, what is shared, what is served."""

import argparse
import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import naive_acrlpd as naive
from pirl.agents.agent import TrainState
from pirl.agents.config import CriticNFTConfig, QCFQLConfig
from pirl.agents.critic_nft import RATE, CriticNFT
from pirl.agents.flow_objectives import nft_loss
from pirl.agents.learner import Learner
from pirl.agents.q_chunking import QChunking
from pirl.agents.qc_fql import QCFQL
from pirl.build import build_agent
from pirl.cli.export import _handover
from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.models.params import flatten
from pirl.names import HANDOVER_FILE
from pirl.parallel.sharding import make_mesh
from pirl.planning.plan import batch_shapes
from pirl.recipes import get_config
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED, DEMONSTRATED
from pirl.training.step import Step

SIZE, HORIZON, DIM, REAL, CRITIC_HORIZON, STATE, DRAWS, NUM, STEPS = 8, 3, 3, 2, 2, 4, 2, 3, 4
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(6,)))
POLICY_RATE, DECAY, DISCOUNT, WARMUP, STEP, OLD_RATE, SHARE, BETA, ALPHA = 0.3, 0.7, 0.8, 3, 5, 0.2, 0.25, 0.8, 2.0
LEVEL = 0.6
KEY = jax.random.key(3)
NAMES = ("critic_nft", "qc_fql")
_KINDS = ("augment", "flow", "time", "here", "there", "critic")
SCALARS = {"scale": 0.012, "agreement": 0.7, "error": 1.1, "q_size": 0.4}
NAIVE: Any = SimpleNamespace(
    loss="hl_gauss",
    aggregation="mean",
    value="best_of_n",
    partial=None,
    discount=DISCOUNT,
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
def make(name: str, **changes: Any) -> QChunking:
    shared = dict(
        discount=DISCOUNT,
        num_action_samples=NUM,
        flow_steps=STEPS,
        flow_draws=DRAWS,
        actor_warmup_steps=WARMUP,
        policy_ema_decay=DECAY,
        critic_ema_decay=DECAY,
    )
    parts: dict[str, Any] = dict(
        policy=POLICY,
        critic=make_critic(
            CriticConfig(hidden=(5, 4), bins=14, action_clip=1.5),
            feature_width=None,
            state_dim=STATE,
            real_action_dim=REAL,
            critic_horizon=CRITIC_HORIZON,
        ),
        policy_learner=Learner(tx=optax.sgd(POLICY_RATE), ema_decay=DECAY),
        critic_learner=Learner(tx=optax.sgd(0.2), ema_decay=DECAY),
        encoder_frozen=True,
    )
    if name == "critic_nft":
        own = dict(nft_beta=BETA, old_rate=OLD_RATE, bc_loss_weight=SHARE, advantage_quantile=LEVEL)
        return CriticNFT(config=CriticNFTConfig(**(shared | own | changes)), **parts)
    return QCFQL(config=QCFQLConfig(**(shared | {"alpha": ALPHA} | changes)), **parts)


@functools.cache
def updating(agent: QChunking) -> Any:
    return jax.jit(agent.update)


@functools.cache
def make_state(name: str) -> TrainState:
    """In the middle of a run: weights, averages and targets all differ, so none can stand for another."""
    state, rng = jax.eval_shape(make(name).init, KEY), np.random.default_rng(2)
    scalars = {name: jnp.float32(SCALARS[name]) for name in state.scalars}
    filled = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), replace(state, scalars={}))
    return replace(filled, step=jnp.int32(STEP), scalars=scalars)


@functools.cache
def make_batch() -> dict:
    """The fifth chunk is the critic's alone: the actor is to imitate no step of it."""
    rng = np.random.default_rng(0)
    batch = {
        "observations": {"state": rng.normal(size=(SIZE, STATE))},
        "next_observations": {"state": rng.normal(size=(SIZE, STATE))},
        "actions": rng.normal(0, 1.2, (SIZE, HORIZON, DIM)),
        "critic_actions": rng.normal(0, 1.2, (SIZE, CRITIC_HORIZON, DIM)),
        "valid": np.arange(HORIZON) < np.array([3, 3, 2, 1, 0, 2, 1, 3])[:, None],
        "next_terminal": np.array([0, 0, 1, 1, 0, 0, 0, 1]),
        "sequence_mask": np.ones(SIZE),
        "reward_sum": np.array([0, 0.9, 1, 0, 0.3, 0.1, 0, 0.8]),
        "mc_return": np.array([0.3, 0.9, 1, np.nan, 0.5, np.nan, 0.2, 0.8]),
    }
    cast = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    person, policy, blamed, shown = CORRECTED, AUTONOMOUS, BLAMED, DEMONSTRATED
    rows = [[person, person, policy], [policy] * 3, [policy, blamed, person], [person] * 3, [person] * 3, [blamed] * 3]
    acted_by = jnp.asarray([*rows, [shown] * 3, [person, policy, person]], jnp.int32)
    return cast | {"length": jnp.asarray([2, 2, 2, 1, 2, 1, 1, 2], jnp.int32), "acted_by": acted_by}


def heeded(batch: dict, weight: float | None) -> tuple[np.ndarray, dict]:
    """What each chunk of imitation counts for, and the batch with the steps that count, where corrections do."""
    if weight is None:
        return np.ones(SIZE), batch
    own = batch["acted_by"] == CORRECTED
    until = np.array([[own[b, : h + 1].all() or not own[b, 0] for h in range(HORIZON)] for b in range(SIZE)])
    assert 0 < (until < 1).sum() < own[:, 0].sum()
    return np.where(own[:, 0], weight, 1.0), batch | {"valid": batch["valid"] * until}


def doubles(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found: Any, expected: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


@functools.cache
def draws() -> SimpleNamespace:
    _, noise, time, here, there, _ = jax.random.split(KEY, 6)
    chunk = (HORIZON, DIM)
    return SimpleNamespace(
        noise=np.float64(jax.random.normal(noise, (SIZE, DRAWS, *chunk))),
        time=np.float64(jax.random.uniform(time, (SIZE, DRAWS)) ** (1 / 1.5)) * 0.999 + 0.001,
        here=np.float64(jax.random.normal(here, (SIZE, NUM, *chunk))),
        there=np.float64(jax.random.normal(there, (SIZE, NUM, *chunk))),
    )


def sampled(policy: dict, state: np.ndarray, noise: np.ndarray, steps: int) -> np.ndarray:
    return np.stack([naive.sample(policy, state, noise[:, n], steps) for n in range(NUM)], axis=1)


def valued(critic: dict, state: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """[E, B, N]."""
    return np.stack([naive.members(NAIVE, critic, state, chunks[:, n]) for n in range(chunks.shape[1])], axis=-1)


def flow_loss(policy: dict, batch: dict) -> np.ndarray:
    state = batch["observations"]["state"]
    return naive.flow_losses(NAIVE, policy, state, batch["actions"], batch["valid"], draws().noise, draws().time)


def mean_target(state: TrainState, batch: dict, successors: np.ndarray) -> float:
    info: dict = {"disagree": False, "clipped": [], "gain": []}
    critics = doubles((state.params["critic"], state.target["critic"]))
    return float(naive.target(NAIVE, *critics, successors, batch, None, info).mean())


# One update, number by number


@pytest.mark.parametrize("correction", [None, 1.6])
def test_critic_nfts_update_is_numpys(correction: float | None) -> None:
    state = make_state("critic_nft")
    counts, batch = heeded(doubles(make_batch()), correction)
    policy, critic, old = doubles((state.params["policy"], state.params["critic"], state.target["old"]))
    here, there = batch["observations"]["state"], batch["next_observations"]["state"]
    of_data = naive.members(NAIVE, critic, here, batch["critic_actions"])
    members = of_data - valued(critic, here, sampled(policy, here, draws().here, STEPS)).mean(2)
    advantage, old_error = members.mean(0), flow_loss(old, batch)
    assert 0 < (np.abs(advantage) > SCALARS["scale"]).sum() < SIZE  # some are clipped
    signed = np.clip(advantage / SCALARS["scale"], -1, 1) * SCALARS["agreement"]
    far = (signed < 0) & (old_error > SCALARS["error"])
    assert 0 < far.sum() < (signed < 0).sum() < SIZE  # some are pushed away less
    signed = np.array(
        [a * SCALARS["error"] / e if cut else a for a, e, cut in zip(signed, old_error, far, strict=True)]
    )
    signed = np.where(counts > 1, 1.0, signed)  # what a person chose is what to do, whatever the critic thinks

    def fields(weights: dict) -> np.ndarray:
        """v - u for each draw, step and real dimension."""
        off = []
        for d in range(DRAWS):
            eps, t = draws().noise[:, d], draws().time[:, d]
            x = t[:, None, None] * eps + (1 - t[:, None, None]) * batch["actions"]
            off.append((naive.velocity(weights, here, x, t) - (eps - batch["actions"]))[..., :REAL])
        return np.stack(off, axis=1)

    e_old = fields(old)

    def nft(weights: dict) -> np.ndarray:
        """β²‖d‖² - 2βA⟨e, d⟩ + ‖e‖² with d = v - v_old, e = u - v_old: another form of the same loss."""
        d, a = fields(weights) - e_old, (signed[:, None] * batch["valid"])[:, None, :, None]
        return (BETA**2 * d**2 + 2 * BETA * a * e_old * d + e_old**2).mean((1, 2, 3))

    def loss(weights: dict) -> float:
        return (counts * (SHARE * flow_loss(weights, batch) + (1 - SHARE) * nft(weights))).mean()

    new, metrics = updating(make("critic_nft", correction_weight=correction))(state, make_batch(), KEY)
    moved = naive.mapped(lambda x, g: x - POLICY_RATE * g, policy, naive.gradient(loss, policy))
    close(new.params["policy"], moved)
    close(new.target["old"], naive.mapped(lambda a, b: (1 - OLD_RATE) * a + OLD_RATE * b, old, moved))
    average = doubles(state.ema["policy"])
    close(new.ema["policy"], naive.mapped(lambda a, b: DECAY * a + (1 - DECAY) * b, average, moved))
    noise = np.mean([np.var(a, ddof=1) / 2 for a in members.T])
    preferred = (advantage > 0) & batch["valid"].any(1)
    latest = {
        "scale": np.sort(np.abs(advantage))[int(LEVEL * (SIZE - 1))],
        "agreement": max(0.0, 1 - noise / np.var(advantage)),
        "error": old_error[preferred].mean(),
    }
    close(
        {n: float(x) for n, x in new.scalars.items()}, {n: (1 - RATE) * SCALARS[n] + RATE * latest[n] for n in latest}
    )
    close(float(metrics["actor/loss"]), loss(policy))
    close(float(metrics["actor/drift"]), ((fields(policy) - e_old) ** 2).mean())
    close(float(metrics["actor/old_error"]), old_error.mean())
    imitated = signed[batch["valid"].any(1)]
    close(float(metrics["actor/negative_share"]), -imitated[imitated < 0].sum() / np.abs(imitated).sum())
    close(float(metrics["critic/y"]), mean_target(state, batch, sampled(average, there, draws().there, STEPS)))


@pytest.mark.parametrize(("normalise", "correction"), [(True, None), (False, None), (True, 1.6)])
def test_qc_fqls_update_is_numpys(normalise: bool, correction: float | None) -> None:
    state = make_state("qc_fql")
    counts, batch = heeded(doubles(make_batch()), correction)
    student, flowing, critic = (doubles(state.params[name]) for name in ("policy", "flow", "critic"))
    here, there = batch["observations"]["state"], batch["next_observations"]["state"]
    taught = sampled(flowing, here, draws().here, STEPS)
    scale = 1 / SCALARS["q_size"] if normalise else 1.0

    def pulled(weights: dict) -> np.ndarray:
        return ((sampled(weights, here, draws().here, 1) - taught) ** 2)[..., :REAL].mean((1, 2, 3))

    def values(weights: dict) -> np.ndarray:
        return valued(critic, here, sampled(weights, here, draws().here, 1)).mean(0)

    def of_student(weights: dict) -> float:
        return (ALPHA * pulled(weights) - scale * values(weights).mean(1)).mean()

    def of_flow(weights: dict) -> float:
        return (counts * flow_loss(weights, batch)).mean()

    agent = make("qc_fql", normalise_q=normalise, correction_weight=correction)
    new, metrics = updating(agent)(state, make_batch(), KEY)
    for name, weights, loss in (("policy", student, of_student), ("flow", flowing, of_flow)):
        close(new.params[name], naive.mapped(lambda x, g: x - POLICY_RATE * g, weights, naive.gradient(loss, weights)))
    average, moved = doubles((state.ema["policy"], new.params["policy"]))
    close(new.ema["policy"], naive.mapped(lambda a, b: DECAY * a + (1 - DECAY) * b, average, moved))
    close(float(new.scalars["q_size"]), (1 - RATE) * SCALARS["q_size"] + RATE * np.abs(values(student)).mean())
    close(float(metrics["actor/loss"]), of_student(student) + of_flow(flowing))
    close(float(metrics["actor/distill"]), pulled(student).mean())
    close(float(metrics["actor/q"]), values(student).mean())
    close(float(metrics["critic/y"]), mean_target(state, batch, sampled(average, there, draws().there, 1)))


@pytest.mark.parametrize("name", NAMES)
def test_split_in_parts_it_is_the_same(name: str) -> None:
    whole, split = (updating(make(name, accumulate=parts))(make_state(name), make_batch(), KEY) for parts in (1, 2))
    close(split, whole, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_states_may_be_valued_without_samples(name: str) -> None:
    """With V(s) by expectiles no target samples; the student still learns from chunks of its own."""
    plain, key = make(name, value="expectile"), jax.random.key(1)
    agent = replace(plain, critic=replace(plain.critic, heads=(0,)))
    state = jax.eval_shape(agent.init, key)
    part, (_, there) = agent._inputs(make_batch(), dict.fromkeys(_KINDS, key))
    assert (part.candidate_noise.shape[1], there.shape[1]) == (NUM if name == "qc_fql" else 0, 0)
    jax.eval_shape(agent.update, state, make_batch(), key)


@pytest.mark.parametrize("name", NAMES)
def test_total_loss_is_what_the_update_descends_on(name: str) -> None:
    agent = make(name)
    total, parts = jax.jit(agent.total_loss)(make_state(name), make_batch(), KEY)
    _, metrics = updating(agent)(make_state(name), make_batch(), KEY)
    close([parts["actor"], parts["critic"]], [metrics["actor/loss"], metrics["critic/loss"]], rtol=1e-5)
    weights = doubles(make_state(name).params["flow" if name == "qc_fql" else "policy"])
    close(float(parts["bc"]), flow_loss(weights, doubles(make_batch())).mean())
    assert float(total) == float(parts["critic"] + parts["actor"])


# What is held near what


def test_advantages_of_nothing_leave_imitation() -> None:
    """Where all chunks are worth the same, and where the critics disagree: λ of imitation's step, and nothing else."""
    state, batch = make_state("critic_nft"), doubles(make_batch())
    policy = state.params["policy"]
    slope = naive.gradient(lambda weights: flow_loss(weights, batch).mean(), doubles(policy))
    expected = naive.mapped(lambda x, g: x - SHARE * POLICY_RATE * g, doubles(policy), slope)
    ignorant = jax.tree.map(jnp.zeros_like, state.params["critic"])
    equal = replace(state, params=state.params | {"critic": ignorant}, target=state.target | {"old": policy})
    apart = replace(state, target=state.target | {"old": policy}, scalars=state.scalars | {"agreement": jnp.float32(0)})
    for start in (equal, apart):
        new, metrics = updating(make("critic_nft"))(start, make_batch(), KEY)
        close(new.params["policy"], expected)
        close(float(metrics["actor/drift"]), 0.0)


def test_while_the_critic_learns_the_policy_imitates() -> None:
    batch = doubles(make_batch())
    for name, group in (("critic_nft", "policy"), ("qc_fql", "flow")):
        state = replace(make_state(name), step=jnp.int32(WARMUP - 1))
        weights = doubles(state.params[group])
        slope = naive.gradient(lambda weights: flow_loss(weights, batch).mean(), weights)
        new, _ = updating(make(name))(state, make_batch(), KEY)
        close(new.params[group], naive.mapped(lambda x, g: x - POLICY_RATE * g, weights, slope))
        if name == "critic_nft":  # and v_old is that policy
            close(new.target["old"], new.params["policy"], rtol=1e-6, atol=1e-6)
        else:  # and the student learns from the flow alone
            worthless = jax.tree.map(jnp.zeros_like, state.params["critic"])
            other, _ = updating(make(name))(
                replace(state, params=state.params | {"critic": worthless}), make_batch(), KEY
            )
            close(new.params["policy"], other.params["policy"], rtol=0, atol=0)


@pytest.mark.parametrize("bounded", [True, False])
def test_repulsion_from_old_data_is_bounded(bounded: bool) -> None:
    """One chunk that the critic dislikes, and v_old follows: it settles where imitation balances repulsion.

    Without κ the same steps leave every bound: the test would see it.
    """
    agent = make("critic_nft", bc_loss_weight=0.1, nft_beta=1.0, heed_agreement=False)
    assert isinstance(agent, CriticNFT)
    state = make_state("critic_nft")
    typical = jnp.float32(0.5 if bounded else jnp.inf)
    state = replace(state, scalars=state.scalars | {"error": typical})
    u = jnp.zeros((1, 1, 1, 1))

    def step(both: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, None]:
        v, v_old = both

        def loss(v: jax.Array) -> jax.Array:
            signed = agent.signed(-jnp.ones(1), jnp.square(v_old - u).mean()[None], state)
            return (0.1 * jnp.square(v - u) + 0.9 * nft_loss(v, v_old, u, signed[:, None], 1.0)).sum()

        v = v - 0.1 * jax.grad(loss)(v)
        return (v, v_old + 0.02 * (v - v_old)), None

    (v, _), _ = jax.lax.scan(step, (u + 0.1, u + 0.1), length=3000)
    if bounded:
        assert float(v.squeeze() ** 2) == pytest.approx(0.9 * 0.5 / 0.1, rel=0.02)
    else:
        assert not abs(float(v.squeeze())) < 1e6


# The student, when it acts and when it is handed over


def test_the_student_acts_in_one_step() -> None:
    agent, state = make("qc_fql"), make_state("qc_fql")
    seen = Observation(images={}, image_masks={}, state=make_batch()["observations"]["state"])
    keys = jax.random.split(KEY, SIZE)
    noise = doubles(jnp.stack([jax.random.normal(key, (NUM, HORIZON, DIM)) for key in keys]))
    weights, critic = doubles((state.ema["policy"], state.ema["critic"]))
    start = doubles(seen.state)
    one = naive.sample(weights, start[0], np.float64(jax.random.normal(keys[0], (1, HORIZON, DIM)))[0], 1)
    alone = TrainState(step=0, params={"policy": state.ema["policy"]})  # as a checkpoint holds it
    plain = agent.act(alone, seen, keys)
    close(plain[0], one)
    close(agent.act(state, seen, keys), plain, rtol=0, atol=0)
    assert agent.imitator(alone) is None
    options = sampled(weights, start, noise, 1)
    best = valued(critic, start, options).mean(0).argmax(1)
    chosen = agent.choose(state, seen, keys, best_of=NUM)
    close(chosen.chunk, options[np.arange(SIZE), best])
    assert agent.acting_groups(NUM) == {"critic"}
    assert agent.served(state) is None


def test_a_run_says_that_the_student_takes_one_step() -> None:
    recipe = get_config("qc_fql_tabletop")
    with pytest.raises(ConfigError, match=r"flow_steps is 10.*one Euler step"):
        replace(recipe, rollout=replace(recipe.rollout, flow_steps=10))
    args = argparse.Namespace(form="openpi", name=None, out=Path("to_robot"))
    text, other = (
        _handover(config, args, ["demos/tabletop"])[HANDOVER_FILE]
        for config in (recipe, get_config("critic_nft_tabletop"))
    )
    assert 'sample_kwargs={"num_steps": 1}' in text
    assert "sample_kwargs" not in other


@pytest.mark.parametrize(("recipe", "beside"), [("critic_nft_tabletop", "target"), ("qc_fql_tabletop", "params")])
def test_frozen_weights_exist_once(recipe: str, beside: str) -> None:
    """On a π₀ whose VLM is frozen: the second network holds what trains; `Step` checks that the rest never changes."""
    config = get_config(recipe)
    agent, key = build_agent(config), jax.random.key(0)
    state = jax.eval_shape(agent.init, key)
    second = flatten(getattr(state, beside)["old" if beside == "target" else "flow"])
    trainable = {path for path in flatten(state.params["policy"]) if f"policy/{path}" not in state.frozen}
    assert state.frozen
    assert second.keys() == trainable
    Step(agent, make_mesh(), state).lower(state, batch_shapes(agent, replace(config.batch_sizes, batch=2)), key)
