"""DSRL's and RLT's updates against NumPy, and their promises: the policy never moves, they learn what pays."""

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
from pirl.agents.agent import Agent, Parts, TrainState
from pirl.agents.bc import BC
from pirl.agents.config import BCConfig, DSRLConfig, RLTokenConfig
from pirl.agents.dsrl import DSRL
from pirl.agents.frozen_policy import FrozenPolicy
from pirl.agents.learner import Learner
from pirl.agents.rl_token import RLToken
from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.models.params import flatten
from pirl.recipes import get_config

SIZE, HORIZON, DIM, REAL, CRITIC_HORIZON, STATE, NUM = 8, 3, 3, 2, 2, 4, 3
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(6,)))
ACTOR_RATE, CRITIC_RATE, DECAY, TAU, DISCOUNT = 0.3, 0.2, 0.7, 0.3, 0.8
LIMIT, TARGET_ENTROPY, PRIOR_SHARE, ALPHA = 2.0, 0.3, 0.4, 0.25
EDIT, COST, DROPOUT, NOISE = 0.7, 0.3, 0.4, 0.2
KEY = jax.random.key(3)
KINDS = ("dsrl", "rl_token")

COMMON: dict[str, Any] = dict(
    discount=DISCOUNT,
    num_action_samples=NUM,
    flow_steps=4,
    critic_updates=2,
    target_update_rate=TAU,
    critic_ema_decay=DECAY,
    actor_hidden=(5, 4),
)
CONFIGS: dict[str, Any] = {
    "dsrl": DSRLConfig(
        noise_limit=LIMIT, target_entropy=TARGET_ENTROPY, prior_share=PRIOR_SHARE, q_aggregation="min", **COMMON
    ),
    "rl_token": RLTokenConfig(
        edit_limit=EDIT, edit_cost=COST, reference_dropout=DROPOUT, exploration=NOISE, calql_weight=0.4, **COMMON
    ),
}
SIZES = {"dsrl": dict(loss="hl_gauss", bins=14), "rl_token": dict(loss="mse")}


def built(config: Any, sizes: CriticConfig, policy: MLPFlow, actor: Any, critic: Any, real: int = REAL) -> Any:
    network = make_critic(
        sizes, feature_width=None, state_dim=STATE, real_action_dim=real, critic_horizon=CRITIC_HORIZON
    )
    parts = Parts(
        policy=policy,
        policy_learner=Learner(tx=actor),
        critic=network,
        critic_learner=Learner(tx=critic, ema_decay=config.critic_ema),
        real_action_dim=real,
        flow_steps=4,
    )
    algorithm = DSRL if isinstance(config, DSRLConfig) else RLToken
    return algorithm.build(config, parts)


@functools.cache
def make(kind: str, **changes: Any) -> FrozenPolicy:
    sizes = CriticConfig(hidden=(5, 4), **SIZES[kind])
    return built(replace(CONFIGS[kind], **changes), sizes, POLICY, optax.sgd(ACTOR_RATE), optax.sgd(CRITIC_RATE))


@functools.cache
def make_state(kind: str) -> TrainState:
    """In the middle of a run: weights, averages and targets all differ, so none can stand for another."""
    shapes, rng = jax.eval_shape(make(kind).init, KEY), np.random.default_rng(2)
    filled = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), (shapes.params, shapes.ema, shapes.target)
    )
    params, ema, target = filled
    if kind == "dsrl":
        params["temperature"]["log_alpha"] = jnp.log(jnp.float32(ALPHA))
    opt = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.opt)
    return replace(shapes, step=jnp.int32(5), params=params, ema=ema, target=target, opt=opt)


@functools.cache
def make_batch() -> dict:
    rng = np.random.default_rng(0)
    remaining = np.array([3, 3, 2, 1, 3, 2, 1, 3])
    actions = rng.normal(0, 1.2, (SIZE, HORIZON, DIM))
    batch = {
        "observations": {"state": rng.normal(size=(SIZE, STATE))},
        "next_observations": {"state": rng.normal(size=(SIZE, STATE))},
        "actions": actions,
        "critic_actions": actions[:, :CRITIC_HORIZON],
        "valid": np.arange(HORIZON) < remaining[:, None],
        "sequence_mask": np.array([1, 1, 1, 1, 0, 1, 1, 1]),
        "next_terminal": np.array([0, 0, 1, 1, 0, 0, 0, 1]),
        "reward_sum": np.array([0, 0.2, 1, 0, 0, 0.1, 0, 0.8]),
        "mc_return": np.array([0.3, 0.9, 1, 0, 0.5, np.nan, np.nan, 0.8]),
    }
    cast = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    return cast | {"length": jnp.asarray([2, 2, 2, 1, 2, 1, 1, 2], jnp.int32)}


@functools.cache
def updated(kind: str, **changes: Any) -> tuple[TrainState, dict]:
    return jax.jit(make(kind, **changes).update)(make_state(kind), make_batch(), KEY)


def doubles(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found: Any, expected: Any, rtol: float = 3e-4, atol: float = 3e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


# The same in NumPy

NAIVE = {
    kind: SimpleNamespace(
        aggregation=CONFIGS[kind].q_aggregation,
        value="best_of_n",
        partial=None,
        discount=DISCOUNT,
        low=0.0,
        high=1.0,
        real_dims=REAL,
        critic_horizon=CRITIC_HORIZON,
        critic_state_dim=STATE,
        calql_weight=CONFIGS[kind].calql_weight,
        sigma_ratio=0.75,
        action_clip=1.5,
        **SIZES[kind],
    )
    for kind in KINDS
}
OF_NOISE = SimpleNamespace(**vars(NAIVE["dsrl"]) | {"real_dims": DIM, "critic_horizon": HORIZON, "action_clip": LIMIT})


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def token_of(critic: dict, state: np.ndarray) -> np.ndarray:
    """What the averaged critic reads: the first layer's part of the state, for both members."""
    return standard(np.concatenate([state @ critic["layer_0"]["state"][member] for member in range(2)], axis=-1))


def actor_of(actor: dict, token: np.ndarray, state: np.ndarray, chunk: np.ndarray | None, outputs: int) -> np.ndarray:
    """The actor's outputs for one chunk per state: [B, h, a, outputs]."""
    shown = np.zeros((len(token), 0)) if chunk is None else chunk.reshape(len(chunk), -1)
    h = np.concatenate([token, state], axis=-1)
    for i in range(2):
        layer = actor[f"layer_{i}"]
        names = (["token", "state"] if i == 0 else ["hidden"]) + (["action"] if chunk is not None else [])
        matrix = np.concatenate([layer[name] for name in names])
        z = np.concatenate([h, shown], axis=-1) @ matrix + layer["bias"]
        h = standard(naive.gelu(z)) * layer["scale"] + layer["offset"]
    steps, dims = (HORIZON, DIM) if chunk is None else (CRITIC_HORIZON, REAL)
    return (h @ actor["head"]["kernel"] + actor["head"]["bias"]).reshape(len(token), steps, dims, outputs)


def noise_of(actor: dict, token: np.ndarray, state: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(noise, log-density): the density of u, divided by the slope of limit · tanh(u)."""
    out = actor_of(actor, token, state, None, 2)
    mean, std = out[..., 0], np.exp(np.clip(out[..., 1], -5, 1))
    u = mean + std * own
    density = np.exp(-0.5 * ((u - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi)) / (LIMIT / np.cosh(u) ** 2)
    return LIMIT * np.tanh(u), np.log(density).mean((1, 2))


def edit_of(actor: dict, token: np.ndarray, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    return EDIT * np.tanh(actor_of(actor, token, state, chunk[:, :CRITIC_HORIZON, :REAL], 1)[..., 0])


def with_edit(chunk: np.ndarray, edit: np.ndarray) -> np.ndarray:
    chunk = chunk.copy()
    chunk[:, :CRITIC_HORIZON, :REAL] += edit
    return chunk


class Naive:
    """One update, from the same random numbers."""

    def __init__(self, kind: str) -> None:
        self.kind, self.s = kind, NAIVE[kind]
        state, batch = make_state(kind), doubles(make_batch())
        self.p, self.target, self.ema = doubles(state.params), doubles(state.target), doubles(state.ema)
        self.batch, self.here, self.there = batch, batch["observations"]["state"], batch["next_observations"]["state"]
        keys = dict(zip(("augment", "here", "there", "critic", "actor"), jax.random.split(KEY, 5), strict=True))
        shape = (SIZE, NUM, HORIZON, DIM)
        self.draws = {name: doubles(make(kind).draw(keys[name], shape)) for name in ("here", "there")}
        self.key, self.shape = keys["actor"], shape

    def flow(self, state: np.ndarray, noise: np.ndarray) -> np.ndarray:
        each = [naive.sample(self.p["policy"], state, noise[:, n], 4) for n in range(NUM)]
        return np.stack(each, axis=1)

    def each(self, function: Any) -> np.ndarray:
        return np.stack([function(n) for n in range(NUM)], axis=1)

    def critic_steps(self, candidates: np.ndarray, successors: np.ndarray) -> None:
        self.critic, self.slow = self.p["critic"], self.target["critic"]
        for _ in range(2):
            info: dict[str, Any] = {"disagree": False, "clipped": [], "gain": []}
            y = naive.target(self.s, self.critic, self.slow, successors, self.batch, slice(None), info)

            def loss(critic: dict, y: np.ndarray = y) -> float:
                temporal, penalty, _ = naive.critic_loss(self.s, critic, candidates, self.batch, y, {})
                return temporal + self.s.calql_weight * penalty

            self.y, self.loss = y, naive.critic_loss(self.s, self.critic, candidates, self.batch, y, {})[0]
            grads = naive.gradient(loss, self.critic)
            self.critic = naive.mapped(lambda x, g: x - CRITIC_RATE * g, self.critic, grads)
            self.slow = naive.mapped(lambda old, new: (1 - TAU) * old + TAU * new, self.slow, self.critic)
        average = naive.mapped(lambda a, x: DECAY * a + (1 - DECAY) * x, self.ema["critic"], self.critic)
        self.expected = {"critic": self.critic, "slow": self.slow, "average": average}


def naive_dsrl() -> tuple[Naive, dict]:
    run = Naive("dsrl")
    actor, token, after = run.p["actor"], token_of(run.ema["critic"], run.here), token_of(run.ema["critic"], run.there)
    ahead = run.each(lambda n: noise_of(actor, after, run.there, run.draws["there"].own[:, n])[0])
    mine = run.each(lambda n: noise_of(actor, token, run.here, run.draws["here"].own[:, n])[0])
    normal = run.draws["here"].coin < PRIOR_SHARE
    assert 0 < normal.sum() < normal.size
    prior = run.draws["here"].prior
    assert np.abs(prior).max() > LIMIT
    noise = np.where(normal[..., None, None], np.clip(prior, -LIMIT, LIMIT), mine)
    chunks = run.flow(run.here, noise)
    run.critic_steps(chunks, run.flow(run.there, ahead))
    of_chunks = run.each(lambda n: naive.members(run.s, run.critic, run.here, chunks[:, n]).min(0))

    def distil(params: dict) -> float:
        errors = [
            naive.error(OF_NOISE, naive.outputs(OF_NOISE, params, run.here, noise[:, n]), of_chunks[:, n])
            for n in range(NUM)
        ]
        return np.mean(errors)

    own = np.float64(jax.random.normal(jax.random.split(run.key)[1], run.shape))

    def actor_loss(params: dict) -> float:
        found = []
        for n in range(NUM):
            w, log_density = noise_of(params, token, run.here, own[:, n])
            q = naive.members(OF_NOISE, run.p["noise_critic"], run.here, w).mean(0)
            found.append(ALPHA * log_density - q)
        return np.mean(found)

    entropy = -run.each(lambda n: noise_of(actor, token, run.here, own[:, n])[1]).mean()
    before = run.p["noise_critic"]
    run.expected |= {
        "actor": naive.mapped(lambda x, g: x - ACTOR_RATE * g, actor, naive.gradient(actor_loss, actor)),
        "noise_critic": naive.mapped(lambda x, g: x - CRITIC_RATE * g, before, naive.gradient(distil, before)),
        "temperature": {"log_alpha": np.log(ALPHA) - CRITIC_RATE * (entropy - TARGET_ENTROPY)},
    }
    guessed = run.each(lambda n: naive.members(OF_NOISE, before, run.here, noise[:, n]).mean(0))
    own_values = [
        naive.members(OF_NOISE, before, run.here, noise_of(actor, token, run.here, own[:, n])[0]) for n in range(NUM)
    ]
    mean = actor_of(actor, token, run.here, None, 2)[..., 0]
    within = [x - x.mean(1, keepdims=True) for x in (guessed, of_chunks)]
    return run, {
        "actor/loss": actor_loss(actor),
        "actor/entropy": entropy,
        "actor/temperature": ALPHA,
        "actor/noise_gain": np.mean(own_values) - of_chunks.mean(),
        "actor/noise_size": np.sqrt(np.mean((LIMIT * np.tanh(mean)) ** 2)),
        "critic/noise_loss": distil(before),
        "critic/noise_correlation": np.corrcoef(*(x.ravel() for x in within))[0, 1],
    }


def naive_rl_token() -> tuple[Naive, dict]:
    run = Naive("rl_token")
    actor, token, after = run.p["actor"], token_of(run.ema["critic"], run.here), token_of(run.ema["critic"], run.there)
    references, later = run.flow(run.here, run.draws["here"].flow), run.flow(run.there, run.draws["there"].flow)

    def ahead(n: int) -> np.ndarray:
        noise = NOISE * run.draws["there"].edit[:, n, :CRITIC_HORIZON, :REAL]
        edit = edit_of(run.target["actor"], after, run.there, later[:, n]) + noise
        return with_edit(later[:, n], np.clip(edit, -EDIT, EDIT))

    done = run.each(lambda n: with_edit(references[:, n], edit_of(actor, token, run.here, references[:, n])))
    run.critic_steps(done, run.each(ahead))
    dropped = np.asarray(jax.random.bernoulli(run.key, DROPOUT, (SIZE, NUM)))
    assert 0 < dropped.sum() < dropped.size

    def parts(params: dict) -> tuple[float, float]:
        q, size = [], []
        for n in range(NUM):
            shown = np.where(dropped[:, n, None, None], 0.0, references[:, n])
            edit = edit_of(params, token, run.here, shown)
            q.append(naive.members(run.s, run.critic, run.here, with_edit(references[:, n], edit)))
            size.append(edit**2)
        return np.mean(q), np.mean(size)

    def actor_loss(params: dict) -> float:
        q, size = parts(params)
        return -q + COST * size

    moved = naive.mapped(lambda x, g: x - ACTOR_RATE * g, actor, naive.gradient(actor_loss, actor))
    followed = naive.mapped(lambda old, new: (1 - TAU) * old + TAU * new, run.target["actor"], moved)
    run.expected |= {"actor": moved, "slow_actor": followed}
    q, size = parts(actor)
    of_policy = np.mean([naive.members(run.s, run.critic, run.here, references[:, n]) for n in range(NUM)])
    return run, {
        "actor/loss": actor_loss(actor),
        "actor/edit_gain": q - of_policy,
        "actor/edit_size": np.sqrt(size),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_one_update_is_numpys(kind: str) -> None:
    run, expected = naive_dsrl() if kind == "dsrl" else naive_rl_token()
    new, metrics = updated(kind)
    close(new.params["critic"], run.expected["critic"])
    close(new.target["critic"], run.expected["slow"])
    close(new.ema["critic"], run.expected["average"])
    close(new.params["actor"], run.expected["actor"])
    if kind == "dsrl":
        close(new.params["noise_critic"], run.expected["noise_critic"])
        close(new.params["temperature"], run.expected["temperature"])
    else:
        close(new.target["actor"], run.expected["slow_actor"])
    found = {name: float(metrics[name]) for name in expected}
    assert found == pytest.approx(expected, rel=5e-4, abs=5e-5)
    assert float(metrics["critic/loss"]) == pytest.approx(run.loss, rel=5e-4)
    assert float(metrics["critic/y"]) == pytest.approx(run.y.mean(), rel=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_split_in_parts_it_is_the_same(kind: str) -> None:
    for left, right in zip(jax.tree.leaves(updated(kind)), jax.tree.leaves(updated(kind, accumulate=2)), strict=True):
        np.testing.assert_allclose(np.float64(left), np.float64(right), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_never_moves_and_the_actor_waits(kind: str) -> None:
    state, new = make_state(kind), updated(kind)[0]
    assert bits(new.params["policy"]) == bits(state.params["policy"])
    assert new.frozen == {f"policy/{path}" for path in flatten(state.params["policy"])}
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(new.params["policy"]))
    waiting = updated(kind, actor_warmup_steps=100)[0]
    patient = {"actor", "temperature"} & set(state.params)
    for group in state.params:
        moved = bits(waiting.params[group]) != bits(state.params[group])
        assert moved == (group not in patient | {"policy"}), group


# Acting


def seen(states: Any) -> Observation:
    return Observation(images={}, image_masks={}, state=jnp.asarray(states, jnp.float32))


def plain(agent: FrozenPolicy, state: TrainState, here: Observation, keys: Any) -> Any:
    learner = Learner(tx=optax.sgd(0.1))
    bc = BC(policy=agent.policy, config=BCConfig(), policy_learner=learner, real_action_dim=REAL, flow_steps=4)
    return bc.act(TrainState(step=0, params={"policy": state.params["policy"]}), here, keys)


def test_before_training_they_act_as_the_policy() -> None:
    here, keys = seen(np.repeat(make_batch()["observations"]["state"], 64, 0)), jax.random.split(KEY, 64 * SIZE)
    editor = make("rl_token")
    close(editor.act(editor.init(KEY), here, keys), plain(editor, editor.init(KEY), here, keys), rtol=0, atol=0)
    # DSRL's samples are limit · tanh(normal / limit): nearly what the flow was trained on.
    dsrl = make("dsrl", noise_limit=3.0)
    state = dsrl.init(KEY)
    chunks, of_policy = dsrl.explore(state, here, keys).chunk, plain(dsrl, state, here, keys)
    close(chunks.mean(0), of_policy.mean(0), rtol=0, atol=0.15)
    assert np.abs(np.asarray(chunks - of_policy)).max() < 1.5
    assert np.corrcoef(np.ravel(chunks), np.ravel(of_policy))[0, 1] > 0.98


@pytest.mark.parametrize("kind", KINDS)
def test_acting(kind: str) -> None:
    """A row does not depend on its neighbours; collecting is not acting; of several the best is taken."""
    agent, state = make(kind), make_state(kind)
    assert isinstance(agent, Agent)
    states, keys = make_batch()["observations"]["state"], jax.random.split(KEY, SIZE)
    others = jax.random.split(jax.random.key(7), SIZE)
    chunks = agent.act(state, seen(states), keys)
    close(agent.act(state, seen(states[2:3]), keys[2:3]), chunks[2:3], rtol=1e-5, atol=1e-6)
    same = bool(np.allclose(agent.act(state, seen(states), others), chunks, atol=1e-6))
    assert same == (kind == "dsrl")  # the mean of the noise, whatever the key
    explored = agent.explore(state, seen(states), keys).chunk
    assert np.abs(np.asarray(explored - chunks)).max() > 1e-2
    assert not np.allclose(agent.explore(state, seen(states), others).chunk, explored, atol=1e-3)
    choice = agent.choose(state, seen(states), keys, best_of=4)
    values = agent.q_values(state, seen(states), choice.chunk[:, None]).mean(0)[:, 0]
    close(values, choice.value, rtol=1e-4, atol=1e-5)
    assert agent.acting_groups() == agent.acting_groups(4) == {"actor", "critic", "gate"}
    # What acts is read from a checkpoint as averages alone.
    loaded = {"policy": state.params["policy"], "actor": state.params["actor"], "critic": state.ema["critic"]}
    close(agent.act(TrainState(step=0, params=loaded), seen(states), keys), chunks, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_while_the_gate_is_shut_they_act_and_collect_as_the_policy(kind: str) -> None:
    """Then as without a gate. What a checkpoint holds is enough to know."""
    gated, free, middle = make(kind, gate=0.3), make(kind), make_state(kind)
    here, keys = seen(make_batch()["observations"]["state"]), jax.random.split(KEY, SIZE)
    state = replace(middle, params=middle.params | {"gate": {"open": jnp.zeros(())}}, scalars={"gate": jnp.zeros(())})
    step = jax.jit(gated.update)
    shut, _ = step(state, make_batch(), KEY)
    opened, _ = step(replace(state, scalars={"gate": jnp.ones(())}), make_batch(), KEY)
    assert bits(shut.params["actor"]) == bits(state.params["actor"])
    for one, expected in ((shut, None), (opened, free)):
        loaded = {name: one.params[name] for name in ("policy", *gated.acting_groups())}
        acting = TrainState(step=0, params=loaded | {"critic": one.ema["critic"]})
        chunks, explored = gated.act(acting, here, keys), gated.explore(acting, here, keys).chunk
        if expected is None:
            close(chunks, plain(gated, acting, here, keys), rtol=0, atol=0)
            close(explored, plain(gated, acting, here, keys), rtol=0, atol=0)
        else:
            close(chunks, expected.act(acting, here, keys), rtol=0, atol=0)
            assert np.abs(np.asarray(chunks - plain(gated, acting, here, keys))).max() > 1e-2


def test_an_edit_stays_within_its_limit() -> None:
    agent, state = make("rl_token"), make_state("rl_token")
    states, keys = make_batch()["observations"]["state"], jax.random.split(KEY, SIZE)
    off = np.asarray(agent.explore(state, seen(states), keys).chunk - plain(agent, state, seen(states), keys))
    assert 0.05 < np.abs(off[:, :CRITIC_HORIZON, :REAL]).max() <= EDIT + 1e-6
    assert np.all(off[:, CRITIC_HORIZON:] == 0)
    assert np.all(off[:, :, REAL:] == 0)


def test_settings() -> None:
    recipe = get_config("dsrl_tabletop")
    assert recipe.freeze_rule == "frozen"
    assert recipe.agent.only_beside
    assert not recipe.agent.only_chooses
    with pytest.raises(ConfigError, match=r"rollout\.flow_steps"):
        replace(recipe, agent=replace(recipe.agent, flow_steps=3))
    with pytest.raises(ConfigError, match="BC trains the policy"):
        replace(recipe, agent=BCConfig(), freeze="frozen")
    for bad in (dict(noise_limit=0.0), dict(prior_share=1.1), dict(temperature_init=0.0)):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            DSRLConfig(**bad)
    for bad in (dict(edit_limit=0.0), dict(edit_cost=-1.0), dict(reference_dropout=2.0), dict(exploration=-0.1)):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            RLTokenConfig(**bad)


# They learn


LEARNING = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(64, 64)))
ROWS, ROUNDS = 128, 300


@functools.cache
def training(agent: Any) -> Any:
    """All steps in one program, on all rows: (state, batch, keys) -> (state, metrics)."""

    def run(state: TrainState, batch: dict, keys: Any) -> tuple[TrainState, dict]:
        return jax.lax.scan(lambda state, key: agent.update(state, batch, key), state, keys)

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 1})


def bandit(rewards: np.ndarray, states: np.ndarray, actions: np.ndarray) -> dict:
    """One decision per episode."""
    batch = {
        "observations": {"state": states},
        "next_observations": {"state": states},
        "actions": actions,
        "critic_actions": actions[:, :CRITIC_HORIZON],
        "valid": np.ones((ROWS, HORIZON)),
        "sequence_mask": np.ones(ROWS),
        "next_terminal": np.ones(ROWS),
        "reward_sum": rewards,
        "mc_return": rewards,
    }
    cast = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    return cast | {"length": jnp.full(ROWS, CRITIC_HORIZON, jnp.int32)}


@functools.cache
def learner_of(config: Any) -> Any:
    sizes = CriticConfig(hidden=(64, 64), bins=51, action_clip=3.0)
    return built(config, sizes, LEARNING, optax.adam(3e-3), optax.adam(5e-3), real=DIM)


@functools.cache
def cloned() -> tuple[np.ndarray, np.ndarray, Any]:
    """Two modes, whatever the state: (states, actions, the policy that imitates both)."""
    rng = np.random.default_rng(0)
    states = rng.uniform(-1, 1, (ROWS, STATE))
    mode = rng.choice([-1.0, 1.0], ROWS)[:, None, None]
    actions = mode + rng.normal(0, 0.1, (ROWS, HORIZON, DIM))
    bc = BC(
        policy=LEARNING,
        config=BCConfig(flow_draws=4, ema_decay=None),
        policy_learner=Learner(tx=optax.adam(3e-3)),
        real_action_dim=DIM,
    )
    keys = jax.random.split(KEY, 2 * ROUNDS)
    state, _ = training(bc)(bc.init(KEY), bandit(np.zeros(ROWS), states, actions), keys)
    return states, actions, state.params["policy"]


@pytest.mark.parametrize("shuffled", [False, True], ids=["rewards", "shuffled"])
def test_noise_alone_finds_the_mode_that_pays(shuffled: bool) -> None:
    """Which of two modes pays depends on the state. With other episodes' rewards there is nothing to find."""
    states, actions, policy = cloned()
    good = np.sign(states[:, 0])
    rewards = (np.sign(actions.mean((1, 2))) == good).astype(float)
    if shuffled:
        rewards = np.random.default_rng(1).permutation(rewards)
    config = DSRLConfig(num_action_samples=2, flow_steps=4, actor_warmup_steps=100, augment=False)
    agent = learner_of(config)
    start = agent.init(KEY, policy)
    end, metrics = training(agent)(start, bandit(rewards, states, actions), jax.random.split(KEY, ROUNDS))
    assert bits(end.params["policy"]) == bits(start.params["policy"])
    keys = jax.random.split(jax.random.key(9), ROWS)
    before = np.mean(np.sign(plain(agent, start, seen(states), keys).mean((1, 2))) == good)
    chunks = np.asarray(agent.act(end, seen(states), keys))
    share = np.mean(np.sign(chunks.mean((1, 2))) == good)
    assert 0.35 < before < 0.65
    assert (share < 0.7) if shuffled else (share > 0.9), share
    if not shuffled:
        assert np.abs(np.abs(chunks) - 1).mean() < 0.35  # it acts as the policy does, in one of its modes
        assert np.asarray(metrics["critic/noise_correlation"])[-50:].mean() > 0.8


@pytest.mark.parametrize("shuffled", [False, True], ids=["rewards", "shuffled"])
def test_edits_go_where_it_pays(shuffled: bool) -> None:
    """Larger actions are better, or smaller ones, as the state says: that is where edits go."""
    states, _, policy = cloned()
    rng = np.random.default_rng(2)
    sign = np.sign(states[:, 0])
    actions = rng.choice([-1.0, 1.0], ROWS)[:, None, None] + rng.uniform(-0.5, 0.5, (ROWS, HORIZON, DIM))
    rewards = np.clip(0.5 + 0.4 * actions[:, :CRITIC_HORIZON].mean((1, 2)) * sign, 0, 1)
    if shuffled:
        rewards = np.random.default_rng(1).permutation(rewards)
    config = RLTokenConfig(num_action_samples=2, flow_steps=4, actor_warmup_steps=100, edit_cost=0.3)
    agent = learner_of(config)
    start = agent.init(KEY, policy)
    end, _ = training(agent)(start, bandit(rewards, states, actions), jax.random.split(KEY, ROUNDS))
    assert bits(end.params["policy"]) == bits(start.params["policy"])
    keys = jax.random.split(jax.random.key(9), ROWS)
    edits = np.asarray(agent.act(end, seen(states), keys) - plain(agent, start, seen(states), keys))
    towards = (edits[:, :CRITIC_HORIZON].mean((1, 2)) * sign).mean()
    assert (abs(towards) < 0.06) if shuffled else (towards > 0.12), towards
