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
from pirl.agents import by_task, ensemble
from pirl.agents.advantage_config import FilteredConfig, RECAPConfig
from pirl.agents.agent import Agent, TrainState
from pirl.agents.filtered import RATE as FILTER_RATE
from pirl.agents.filtered import Filtered
from pirl.agents.learner import Learner
from pirl.agents.objectives import moving_quantile
from pirl.agents.recap import RECAP
from pirl.build import build_agent
from pirl.errors import ConfigError
from pirl.models import flow
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import CriticInputs, make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.recipes import get_config
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED
from small_pi0 import BATCH, SMALL, observation, weights

SIZE, HORIZON, DIM, REAL, CRITIC_HORIZON, STATE, DRAWS = 8, 3, 3, 2, 2, 4, 2
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(6,)))
POLICY_RATE, CRITIC_RATE, DECAY, DROPOUT, SHARE, DISCOUNT = 0.3, 0.2, 0.7, 0.3, 0.4, 0.8
CONDITION_RATE = 3.0
KEY = jax.random.key(3)
EPISODE = np.array([3, 3, 8, 11, 12, 13, 21, 22])
TASK = np.array([0, 1, 0, 0, 1, 0, 1, 2])
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
def make(
    *, accumulate: int = 1, guidance: float = 1.0, warmup: int = 0, heed: bool = False, folds: int = 2, **settings: Any
) -> RECAP:
    config = RECAPConfig(
        folds=folds,
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
        **settings,
    )
    critic = make_critic(
        CriticConfig(hidden=(5, 4), bins=14, num_critics=max(folds, 2)),
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


def remembered() -> by_task.Recent:
    """Advantages of the past: of task 0 around -0.1, of task 1 around 0.2, of task 2 none."""
    past, tasks = jnp.asarray([-0.3, -0.1, 0.4, 0.1, 0.2, 0.3]), jnp.asarray([0, 0, 0, 1, 1, 1])
    return by_task.added(by_task.fresh(), tasks, past)


@functools.cache
def make_state(folds: int = 2) -> TrainState:
    """In the middle of a run: weights, averages and conditions all differ, so none can stand for another."""
    shapes, rng = jax.eval_shape(make(folds=folds).init, KEY), np.random.default_rng(2)
    filled = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), (shapes.params, shapes.ema))
    opt = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.opt)
    scalars = {"advantages": remembered()}
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
    more |= {"episode": EPISODE, "task": TASK, "task_steps": np.array([3, 9, 3, 3, 9, 3, 9, 5])}
    return cast | {name: jnp.asarray(column, jnp.int32) for name, column in more.items()}


@functools.cache
def updated(**settings: Any) -> tuple[TrainState, dict]:
    return jax.jit(make(**settings).update)(make_state(settings.get("folds", 2)), make_batch(), KEY)


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


LOW, HIGH, FAILURE = -0.2, 0.3, -0.5
"""Rewards of each step, for values of returns that depend on how long a task is."""


@pytest.mark.parametrize(
    ("heed", "folds", "dense"), [(False, 2, False), (True, 1, False), (False, 3, True)], ids=["halves", "all", "dense"]
)
def test_one_update_is_numpys(heed: bool, folds: int, dense: bool) -> None:
    rewards = dict(reward_low=LOW, reward_high=HIGH, reward_once=False, failure_reward=FAILURE) if dense else {}
    settings = dict(heed=heed, folds=folds, **rewards)
    state, batch = make_state(folds), doubles(make_batch())
    low, high = np.zeros(SIZE), np.ones(SIZE)
    if dense:
        pays = (1 - DISCOUNT ** batch["task_steps"]) / (1 - DISCOUNT)
        low, high = LOW * pays + FAILURE, HIGH * pays
    learns = np.asarray(ensemble.learns(make_batch()["episode"], max(folds, 2), folds))
    blind = np.ones_like(learns) if folds == 1 else ~learns
    assert blind.any(0).all()
    policy, told, critic = (doubles(state.params[name]) for name in ("policy", "condition", "critic"))
    acting = doubles(state.ema["policy"])
    seen, after = batch["observations"]["state"], batch["next_observations"]["state"]
    nothing, noise = np.zeros((SIZE, CRITIC_HORIZON, REAL)), draws()

    def value(critic: dict, at: np.ndarray) -> np.ndarray:
        shares = naive.members(NAIVE, critic, at, nothing)
        return low + (high - low) * (shares * blind).sum(0) / blind.sum(0)

    assert acting.keys() == policy.keys()  # MLPs have nothing to encode: s' is the state
    bootstrap = DISCOUNT ** batch["length"] * (1 - batch["next_terminal"]) * value(critic, after)
    advantage = batch["reward_sum"] + bootstrap - value(critic, seen)
    better = advantage > np.array([-0.1, 0.2, 0.0])[TASK]
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
        share = ((np.nan_to_num(batch["mc_return"]) - low) / (high - low)).clip(0, 1)
        error = naive.error(NAIVE, naive.outputs(NAIVE, critic, seen, nothing), share)
        return np.mean([one[rows].mean() for one, rows in zip(error, learns & known, strict=True)])

    grads = naive.gradient(loss, {"policy": policy, "condition": told})
    new, metrics = updated(**settings)
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
    for task, past in enumerate(([-0.3, -0.1, 0.4], [0.1, 0.2, 0.3], [])):
        held = [*past, *advantage[task == TASK]]
        close(new.scalars["advantages"].values[task, : len(held)], np.array(held))
        assert new.scalars["advantages"].total[task] == len(held)


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
    numbers = {"length": np.full(64, 2), "episode": np.arange(64), "task": np.zeros(64), "task_steps": np.full(64, 2)}
    cast = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    cast |= {name: jnp.asarray(column, jnp.int32) for name, column in numbers.items()}
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


def test_no_value_that_judges_an_episode_has_seen_how_it_ended() -> None:
    """One episode's outcome changed: the other members' view of it stays the same to the bit, whatever they learn."""
    batch, episode = make_batch(), 4
    told = batch | {"mc_return": batch["mc_return"].at[episode].set(0.9)}
    clipped = Learner(tx=optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2)))
    for folds, same in ((2, True), (3, True), (1, False)):
        agent = replace(make(folds=folds), critic_learner=clipped, policy_learner=Learner(tx=optax.sgd(0.0)))
        step = jax.jit(agent.update)

        def labels(batch: dict, agent: RECAP = agent, step: Any = step) -> np.ndarray:
            state = agent.init(KEY)
            for i in range(5):
                state, _ = step(state, batch, jax.random.fold_in(KEY, i))
            inputs = CriticInputs.of(batch["observations"]["state"])
            return np.asarray(agent.value.unseen(state.params["critic"], inputs, batch))

        before, after = labels(batch), labels(told)
        assert (before[episode] == after[episode]) is np.bool_(same)
        assert (before != after).any()


def test_an_easy_task_does_not_take_all_the_praise() -> None:
    """Two tasks, of which one returns more: 40 % of each are better, and not those of the easy one alone."""
    rng = np.random.default_rng(0)
    recent, alone = by_task.fresh(), by_task.fresh()
    for _ in range(40):
        task = jnp.asarray(rng.random(32) < 0.25, jnp.int32)
        advantage = jnp.asarray(rng.normal(0.1, 0.2, 32) + 2.0 * np.asarray(task), jnp.float32)
        better = advantage > by_task.quantiles(recent, task, 0.6)
        easy = advantage > by_task.quantiles(alone, jnp.zeros_like(task), 0.6)
        recent = by_task.added(recent, task, advantage)
        alone = by_task.added(alone, jnp.zeros_like(task), advantage)
    assert int(recent.total[0] + recent.total[1]) == 40 * 32
    held = np.asarray(recent.values[1, : int(recent.total[1])])
    assert (held > float(by_task.quantiles(recent, jnp.ones(1, jnp.int32), 0.6)[0])).mean() == pytest.approx(
        0.4, abs=0.01
    )
    shares = [np.asarray(chosen)[np.asarray(task) == 1].mean() for chosen in (better, easy)]
    assert shares[0] < 0.8 < shares[1] == 1


def test_each_task_remembers_its_latest_advantages() -> None:
    size, rng = by_task.RECENT, np.random.default_rng(0)
    recent, seen = by_task.fresh(), {3: [], 5: [], 3 + by_task.SLOTS: []}
    assert float(by_task.quantiles(recent, jnp.asarray([3]), 0.5)[0]) == 0
    for count in (7, 2 * size + 5, 3, size):
        task = rng.choice([3, 5, 3 + by_task.SLOTS], count, p=[0.5, 0.4, 0.1])
        values = rng.normal(size=count).astype(np.float32)
        recent = by_task.added(recent, jnp.asarray(task), jnp.asarray(values))
        for number, value in zip(task, values, strict=True):
            seen[3 if number > by_task.SLOTS else number].append(value)
        for number in (3, 5):
            latest = np.sort(seen[number][-size:])
            for level in (0.0, 0.3, 1.0):
                found = by_task.quantiles(recent, jnp.asarray([number]), level)[0]
                assert float(found) == latest[int(np.float32(level) * (len(latest) - 1))]


# The indicator in words


@pytest.fixture(scope="module")
def reading() -> tuple[RECAP, TrainState, dict, Any]:
    """A small π₀ that is told in words, and what it learns from: a person's chunks are better, blamed ones are not."""
    policy, seen = Pi0(SMALL), observation(SMALL)
    critic = make_critic(
        CriticConfig(hidden=(5, 4), bins=14, num_queries=1, pool_width=4, pool_heads=1, embedding_width=4),
        feature_width=SMALL.feature_width,
        state_dim=SMALL.action_dim,
        real_action_dim=REAL,
        critic_horizon=CRITIC_HORIZON,
    )
    agent = replace(make(heed=True, condition="text", augment=False), policy=policy, critic=critic)
    rng, acted_by = np.random.default_rng(0), np.full((BATCH, SMALL.horizon), CORRECTED)
    acted_by[1] = BLAMED
    parts = {"image": seen.images, "image_mask": seen.image_masks, "state": seen.state}
    parts |= {"tokenized_prompt": seen.tokenized_prompt, "tokenized_prompt_mask": seen.tokenized_prompt_mask}
    prompts = jnp.asarray(rng.integers(3, SMALL.vocab_size, (BATCH, 2, 6)), jnp.int32)
    batch = {
        "observations": parts,
        "next_observations": parts,
        "actions": jnp.asarray(rng.normal(size=(BATCH, SMALL.horizon, SMALL.action_dim)), jnp.float32),
        "valid": jnp.ones((BATCH, SMALL.horizon)),
        **{name: jnp.zeros(BATCH, jnp.int32) for name in ("task", "episode")},
        **{name: jnp.full(BATCH, 2, jnp.int32) for name in ("length", "task_steps")},
        **{name: jnp.ones(BATCH) for name in ("next_terminal", "reward_sum", "mc_return")},
        "acted_by": jnp.asarray(acted_by, jnp.int32),
        "suffixed_prompts": {"tokenized_prompt": prompts, "tokenized_prompt_mask": jnp.ones(prompts.shape, bool)},
    }
    return agent, agent.init(KEY, weights(SMALL)), batch, jax.jit(agent.update)


def test_in_words_the_policy_learns_by_the_prompt_that_fits_each_chunk(reading: tuple) -> None:
    agent, state, batch, update = reading
    assert "condition" not in state.params
    new, metrics = update(state, batch, KEY)
    _, noise_key, time_key = jax.random.split(KEY, 3)
    drawn = flow.draw(noise_key, time_key, batch["actions"], DRAWS)
    tokens = batch["suffixed_prompts"]["tokenized_prompt"][np.arange(BATCH), np.array([0, 1, 0])]

    @jax.jit
    def losses(prompt: Any, mask: Any) -> Any:
        seen = replace(observation(SMALL), tokenized_prompt=prompt, tokenized_prompt_mask=mask)
        policy = state.params["policy"]
        error = flow.squared_error(agent.policy, policy, agent.policy.encode(policy, seen), batch["actions"], drawn)
        return flow.chunk_loss(error, valid=batch["valid"], dims=REAL).mean()

    plain = observation(SMALL)
    told, untold = (
        losses(tokens, jnp.ones((BATCH, 6), bool)),
        losses(plain.tokenized_prompt, plain.tokenized_prompt_mask),
    )
    close(float(metrics["policy/told_loss"]), float(told))
    close(float(metrics["policy/untold_loss"]), float(untold))
    close(float(metrics["policy/loss"]), float((1 - DROPOUT) * told + DROPOUT * untold))
    assert agent.served(new) is new.policy
    assert agent.acting_groups() == frozenset()


def test_values_read_the_instruction_alone(reading: tuple) -> None:
    _, state, batch, update = reading
    plain = update(state, batch, KEY)
    other = update(
        state, batch | {"suffixed_prompts": jax.tree.map(lambda x: x[:, ::-1], batch["suffixed_prompts"])}, KEY
    )
    assert float(plain[1]["policy/told_loss"]) != float(other[1]["policy/told_loss"])
    jax.tree.map(np.testing.assert_array_equal, plain[0].params["critic"], other[0].params["critic"])


def test_settings_that_contradict_each_other_are_told() -> None:
    run = get_config("recap_tabletop")
    assert (run.agent.folds, run.agent.condition, run.agent.prompt_suffixes) == (2, "vector", ())
    with pytest.raises(ConfigError, match=r"agent\.folds is 3 and there is 2 critic"):
        replace(run, agent=replace(run.agent, folds=3))
    replace(run, agent=replace(run.agent, folds=3), critic=replace(run.critic, num_critics=3))
    text = replace(run.agent, condition="text")
    assert replace(run, agent=text).agent.prompt_suffixes[0] == ", Advantage: positive"
    with pytest.raises(ConfigError, match=r"guidance is 2 and agent\.condition 'text'"):
        replace(run, agent=replace(text, guidance=2.0))
    with pytest.raises(ConfigError, match="reads no instruction"):
        replace(run, agent=text, data=replace(run.data, tokenizer="none"))
    batch = build_agent(replace(run, agent=text)).batch_spec(run.batch_sizes)
    assert batch["suffixed_prompts"]["tokenized_prompt"].shape == (run.batch_size, 2, run.token_len)
    assert {"task", "task_steps", "episode"} < set(batch)
    alone = build_agent(replace(run, agent=replace(run.agent, per_task=False))).batch_spec(run.batch_sizes)
    assert not {"task", "suffixed_prompts"} & set(alone)


# Filtered imitation


@functools.cache
def filtering(*, accumulate: int = 1) -> Filtered:
    config = FilteredConfig(share=SHARE, flow_draws=DRAWS, mask_padding=True, ema_decay=DECAY, accumulate=accumulate)
    learner = Learner(tx=optax.sgd(POLICY_RATE), ema_decay=DECAY)
    return Filtered(policy=POLICY, config=config, policy_learner=learner, real_action_dim=REAL, flow_steps=4)


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
