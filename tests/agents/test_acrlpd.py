"""ACRLPD's update against NumPy, and its promises: who learns from whom, what is computed once, what never leaks."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import naive_acrlpd as naive
from pirl.agents.acrlpd import ACRLPD
from pirl.agents.agent import TrainState
from pirl.agents.bc import BC
from pirl.agents.chunk_critic import Successor
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.agents.learner import Learner
from pirl.agents.q_chunking import ActorPart
from pirl.data.config import DataConfig
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.replay import MemorySource
from pirl.errors import ConfigError
from pirl.models import flow, pi0
from pirl.models.config import GemmaConfig, MLPFlowConfig, Pi0Config, SigLIPConfig
from pirl.models.critic import CriticInputs, make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.freeze import trainable_mask
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.models.params import flatten
from pirl.models.pi0 import Pi0
from pirl.models.policy import FlowPolicy
from pirl.names import BASE_CAMERA
from pirl.records import AUTONOMOUS, CORRECTED, Episode

SIZE, HORIZON, DIM, REAL, CRITIC_HORIZON, STATE, CRITIC_STATE = 8, 3, 3, 2, 2, 4, 3
NUM, DRAWS, WARMUP, STEP = 3, 2, 3, 5
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(6,)))
POLICY_RATE, CRITIC_RATE, POLICY_DECAY, CRITIC_DECAY = 0.3, 0.2, 0.7, 0.6
KEY = jax.random.key(3)

CASES = {
    "awr": (dict(), dict(loss="hl_gauss", bins=14)),
    "best_of_n": (dict(q_aggregation="min", calql_weight=0.7, critic_rows="shares"), dict(loss="mse")),
    "distill": (
        dict(q_aggregation="random_pair", mc_steps=STEP + 1, heed_agreement=True, scale_by_state=True),
        dict(loss="huber", huber_delta=0.3, num_critics=3),
    ),
}
HEADS = {
    "value": (dict(actor="awr", value="expectile", expectile=0.8, q_aggregation="min"), dict(loss="mse")),
    "partial": (dict(actor="awr", partial_horizon=1, expectile=0.9), dict(loss="hl_gauss", bins=14)),
    "both": (
        dict(actor="awr", value="expectile", partial_horizon=1, q_aggregation="random_pair", scale_by_state=True),
        dict(loss="mse", num_critics=3),
    ),
}
"""A learned V, a critic of fewer steps, and V below that one."""


@functools.cache
def make(actor: str, *, accumulate: int = 1, dropout: float = 0.0, **changes) -> ACRLPD:
    of_agent, of_critic = (CASES | HEADS)[actor]
    config = ACRLPDConfig(
        **({"actor": actor, "members": "all", "heed_agreement": False} | of_agent | changes),
        discount=0.8,
        num_action_samples=NUM,
        flow_steps=4,
        critic_updates=2,
        target_update_rate=0.3,
        target_ess=0.85,
        weight_cap=2.5,
        bc_loss_weight=0.2,
        actor_warmup_steps=WARMUP,
        flow_draws=DRAWS,
        policy_ema_decay=POLICY_DECAY,
        critic_ema_decay=CRITIC_DECAY,
        accumulate=accumulate,
    )
    critic = make_critic(
        CriticConfig(hidden=(5, 4), dropout=dropout, **of_critic),
        feature_width=None,
        state_dim=CRITIC_STATE,
        real_action_dim=REAL,
        critic_horizon=CRITIC_HORIZON,
    )
    critic = replace(critic, heads=config.heads)
    return ACRLPD(
        policy=POLICY,
        critic=critic,
        config=config,
        policy_learner=Learner(tx=optax.sgd(POLICY_RATE), ema_decay=POLICY_DECAY),
        critic_learner=Learner(tx=optax.sgd(CRITIC_RATE), ema_decay=CRITIC_DECAY),
        encoder_frozen=True,
    )


@functools.cache
def updating(agent: ACRLPD):
    """The compiled update; every test of one agent shares it."""
    return jax.jit(agent.update)


@functools.cache
def totalling(agent: ACRLPD):
    return jax.jit(agent.total_loss)


def filled(agent: ACRLPD, scale: float, seed: int = 2) -> TrainState:
    """A state in the middle of a run: weights, averages and targets all differ, so none can stand for another."""
    state, rng = jax.eval_shape(agent.init, KEY), np.random.default_rng(seed)
    numbers = {"beta": 0.02, "mean_weight": 1.1, "spread": 0.05}
    scalars = {name: jnp.float32(numbers[name]) for name in state.scalars}
    state = replace(state, step=jnp.int32(STEP), scalars=scalars)

    def fill(leaf):
        # Made by NumPy, since every little jax operation would be compiled.
        values = rng.normal(0, scale, leaf.shape)
        return jnp.asarray(values.astype(leaf.dtype)) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(fill, state)


@functools.cache
def make_state(agent: ACRLPD) -> TrainState:
    # Random critics: with these seeds advantages lie on both sides of 0, some of them beyond the cap.
    seeds = {("best_of_n", None): 2, ("best_of_n", 1): 3, ("expectile", None): 12, ("expectile", 1): 15}
    return filled(agent, 0.5, seeds[agent.config.value, agent.config.partial_horizon])


@functools.cache
def make_batch() -> dict:
    """Every kind of sample: whole and cut chunks, terminated and cut off, counted and not, known returns and none.

    The fifth is the critic's alone: the actor is to imitate no step of it.
    """
    rng = np.random.default_rng(0)
    remaining = np.array([3, 3, 2, 1, 0, 2, 1, 3])
    batch = {
        "observations": {"state": rng.normal(size=(SIZE, STATE))},
        "next_observations": {"state": rng.normal(size=(SIZE, STATE))},
        "actions": rng.normal(0, 1.2, (SIZE, HORIZON, DIM)),
        "critic_actions": rng.normal(0, 1.2, (SIZE, CRITIC_HORIZON, DIM)),
        "valid": np.arange(HORIZON) < remaining[:, None],
        "length": np.array([2, 2, 2, 1, 2, 1, 0, 2]),
        "next_terminal": np.array([0, 0, 1, 1, 0, 0, 0, 1]),
        "sequence_mask": np.array([1, 1, 1, 1, 1, 1, 0, 1]),
        "reward_sum": np.array([0, 0.9, 1, 0, 0.3, 0.1, 0, 0.8]),
        "mc_return": np.array([0.3, 0.9, 1, np.nan, 0.5, np.nan, 0.2, 0.8]),
        "rewards": rng.normal(size=(SIZE, HORIZON)),
        "masks": np.ones((SIZE, HORIZON)),
        "terminals": np.zeros((SIZE, HORIZON)),
    }
    cast = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    return cast | {"length": jnp.asarray(batch["length"], jnp.int32)}


def doubles(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found, expected, rtol=1e-4, atol=1e-5, err_msg=""):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=err_msg), found, expected)


def same(left, right) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b, equal_nan=True)), left, right)))


def largest_difference(left, right) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), left, right)))


# One update, number by number


def settings(agent: ACRLPD) -> naive.Settings:
    c, sizes = agent.config, agent.critic.config
    return naive.Settings(
        actor=c.actor,
        loss=sizes.loss,
        aggregation=c.q_aggregation,
        value=c.value,
        expectile=c.expectile,
        partial=c.partial_horizon,
        discount=c.discount,
        low=0.0,  # one reward of at most 1 per episode
        high=1.0,
        real_dims=REAL,
        critic_horizon=CRITIC_HORIZON,
        critic_state_dim=CRITIC_STATE,
        flow_steps=c.flow_steps,
        critic_updates=c.critic_updates,
        tau=c.target_update_rate,
        target_ess=c.target_ess,
        weight_cap=c.weight_cap,
        bc_loss_weight=c.bc_loss_weight,
        warmup=c.actor_warmup_steps,
        mc=c.mc_steps > STEP,
        shares=c.critic_rows == "shares",
        heed_agreement=c.heed_agreement,
        scale_by_state=c.scale_by_state,
        calql_weight=c.calql_weight,
        bins=sizes.bins,
        sigma_ratio=sizes.sigma_ratio,
        huber_delta=sizes.huber_delta,
        action_clip=sizes.action_clip,
        policy_rate=POLICY_RATE,
        critic_rate=CRITIC_RATE,
        policy_decay=POLICY_DECAY,
        critic_decay=CRITIC_DECAY,
        correction_weight=c.correction_weight,
    )


def naive_draws(agent: ACRLPD, key) -> naive.Draws:
    """The random numbers of a step: six keys, in the order augmentation, flow noise, flow time, candidates at s,
    candidates at s', critic; the last gives one key per critic update, and each of these one for the random pair and
    one for dropout.
    """
    _, noise, time, here, there, critic = jax.random.split(key, 6)
    chunk = (HORIZON, DIM)
    pairs = [
        jax.random.choice(jax.random.split(k)[0], agent.critic.config.num_critics, (2,), replace=False)
        for k in jax.random.split(critic, agent.config.critic_updates)
    ]
    return naive.Draws(
        noise=np.float64(jax.random.normal(noise, (SIZE, DRAWS, *chunk))),
        time=np.float64(jax.random.uniform(time, (SIZE, DRAWS)) ** (1 / 1.5)) * 0.999 + 0.001,
        here=np.float64(jax.random.normal(here, (SIZE, NUM, *chunk))),
        there=np.float64(jax.random.normal(there, (SIZE, NUM, *chunk))),
        pairs=np.array(pairs),
    )


def naive_state(state) -> dict:
    named = {
        "policy": state.params["policy"],
        "critic": state.params["critic"],
        "target_critic": state.target["critic"],
        "ema_policy": state.ema["policy"],
        "ema_critic": state.ema["critic"],
        "fixed": state.target.get("policy", {}),
    }
    return doubles(named) | {"step": int(state.step)} | {k: float(v) for k, v in state.scalars.items()}


@functools.cache
def expected(actor: str):
    """(new state, metrics, what the numbers exercised), by NumPy."""
    agent = make(actor)
    return naive.update(settings(agent), naive_state(make_state(agent)), doubles(make_batch()), naive_draws(agent, KEY))


@pytest.mark.parametrize("actor", [*CASES, *HEADS])
def test_update_equals_numpy(actor: str):
    """Targets, choice, losses, weights, both gradients twice over, averages, targets' weights, temperature, metrics."""
    agent = make(actor)
    state = make_state(agent)
    new, metrics = updating(agent)(state, make_batch(), KEY)
    trees, numbers, info = expected(actor)
    # The batch reaches the cases that matter: else this test could not see them.
    assert info["disagree"] or agent.config.value == "expectile", "online and target critic never choose differently"
    assert 0 < np.mean(info["clipped"]) < 1
    assert 0 < np.mean(info["capped"]) < 1
    found = naive_state(new)
    for name, value in trees.items():
        close(found[name], value, err_msg=name)
    assert set(metrics) == set(numbers) | {"critic/action_slope"}
    for name, value in numbers.items():
        close(metrics[name], value, rtol=2e-4, err_msg=name)
    assert int(new.step) == STEP + 1
    assert same(new.target.get("policy", {}), state.target.get("policy", {}))


@pytest.mark.parametrize("actor", CASES)
def test_what_a_person_did_counts_at_least_so_much(actor: str):
    """Chunks that a person began, until they hand back; others as ever, also those that a person ends."""
    acted_by = np.full((SIZE, HORIZON), AUTONOMOUS)
    acted_by[:2], acted_by[7], acted_by[7, 1:], acted_by[3, 1:] = CORRECTED, CORRECTED, AUTONOMOUS, CORRECTED
    batch = make_batch() | {"acted_by": jnp.asarray(acted_by, jnp.int32)}
    agent = make(actor, correction_weight=1.6)
    state = make_state(agent)
    new, metrics = jax.jit(agent.update)(state, batch, KEY)
    trees, numbers, _ = naive.update(settings(agent), naive_state(state), doubles(batch), naive_draws(agent, KEY))
    for name, value in trees.items():
        close(naive_state(new)[name], value, err_msg=name)
    close(metrics["actor/loss"], numbers["actor/loss"], rtol=2e-4)
    assert largest_difference(new.params["policy"], updating(make(actor))(state, make_batch(), KEY)[0].params["policy"])


@pytest.mark.parametrize("actor", [*CASES, "both"])
def test_total_loss_is_what_the_update_descends_on(actor: str):
    agent = make(actor)
    if agent.config.critic_rows == "shares":
        agent = make(actor, critic_rows="all")
    total, parts = totalling(agent)(make_state(agent), make_batch(), KEY)
    _, numbers, info = naive.update(
        settings(agent), naive_state(make_state(agent)), doubles(make_batch()), naive_draws(agent, KEY)
    )
    close(parts["actor"], numbers["actor/loss"], rtol=2e-4)
    close(parts["bc"], numbers["actor/flow_loss"], rtol=2e-4)
    close(parts["critic"], info["critic_losses"][0], rtol=2e-4)
    np.testing.assert_array_equal(total, parts["critic"] + parts["actor"])
    assert set(parts) == {"critic", "actor", "bc", "total"}
    assert float(parts["total"]) == float(total)


@pytest.mark.parametrize("actor", ["awr", "distill"])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_batch_in_parts_is_the_batch(actor: str, parts: int):
    whole, split = make(actor), make(actor, accumulate=parts)
    state = make_state(whole)
    close(updating(split)(state, make_batch(), KEY), updating(whole)(state, make_batch(), KEY), rtol=1e-5, atol=2e-6)


def test_a_batch_that_does_not_split_is_refused():
    agent = make("awr", accumulate=3)
    with pytest.raises(ConfigError, match="batch of 8 does not split into 3"):
        jax.eval_shape(agent.update, make_state(agent), make_batch(), KEY)


# What an actor learns from whom


@pytest.mark.parametrize("actor", ["awr", "distill"])
def test_warm_up_is_behaviour_cloning(actor: str):
    """While the critic learns as ever, the policy takes the very step that BC takes with the same noise and times."""
    agent, batch = make(actor), make_batch()
    state = make_state(agent)
    cloning = BC(
        policy=POLICY, config=BCConfig(mask_padding=True), policy_learner=agent.policy_learner, real_action_dim=REAL
    )
    _, noise, time, *_ = jax.random.split(KEY, 6)
    inputs = (Observation.from_dict(batch["observations"]), batch["actions"], batch["valid"])
    draws = flow.draw(noise, time, batch["actions"], DRAWS)
    policy = state.params["policy"]
    for loss in (lambda p: cloning.loss(p, *inputs, draws).mean(), lambda p: agent.bc_loss(p, *inputs, draws)):
        cloned, _ = cloning.policy_learner.step(policy, jax.jit(jax.grad(loss))(policy), state.opt["policy"])
        last, _ = updating(agent)(replace(state, step=jnp.int32(WARMUP - 1)), batch, KEY)
        close(last.params["policy"], cloned, rtol=1e-5, atol=1e-6)
    first, _ = updating(agent)(replace(state, step=jnp.int32(WARMUP)), batch, KEY)
    assert largest_difference(first.params["policy"], cloned) > 1e-3
    assert same(first.params["critic"], last.params["critic"])


@pytest.mark.parametrize("actor", ["awr", "distill"])
def test_a_policy_that_holds_keeps_its_weights_until_it_may_use_the_critic(actor: str):
    agent, batch = make(actor, actor_warmup="hold"), make_batch()
    state = make_state(agent)
    waiting, _ = updating(agent)(replace(state, step=jnp.int32(WARMUP - 1)), batch, KEY)
    assert same(waiting.params["policy"], state.params["policy"])
    assert not same(waiting.params["critic"], state.params["critic"])
    at = replace(state, step=jnp.int32(WARMUP))
    close(updating(agent)(at, batch, KEY)[0], updating(make(actor))(at, batch, KEY)[0])


def test_a_policy_that_holds_leaves_no_trace_in_its_optimizer_and_passes_on_what_is_frozen():
    """Adam with weight decay: neither moves the weights, its moments stay zero, and its schedule goes on."""
    policy = make_state(make("awr")).params["policy"]
    first, *_ = sorted(policy)
    mask = {name: jax.tree.map(lambda _, name=name: name != first, group) for name, group in policy.items()}
    learner = Learner(tx=optax.adamw(1e-2, weight_decay=0.1), mask=mask)
    agent = replace(make("awr", actor_warmup="hold"), policy_learner=learner)
    state = replace(agent.init(KEY), step=jnp.int32(0))
    kept = {}

    def update(state: TrainState) -> TrainState:
        new = agent.update(state, make_batch(), KEY)[0]
        pairs = zip(*(jax.tree.leaves_with_path(one.params["policy"]) for one in (new, state)), strict=True)
        kept.update({path[0].key: after is before for (path, after), (_, before) in pairs})
        return new

    new = jax.jit(update)(state)
    assert kept == {name: name == first for name in policy}
    assert same(new.params["policy"], state.params["policy"])
    counts = [leaf for leaf in jax.tree.leaves(new.opt["policy"]) if leaf.ndim == 0]
    assert counts
    assert all(int(count) == 1 for count in counts)
    assert all(not leaf.any() for leaf in jax.tree.leaves(new.opt["policy"]) if leaf.ndim)


def test_q_chunkings_own_actor_clones_at_uniform_flow_times():
    """`best_of_n` takes the step of plain cloning, with flow times drawn the way `flow_times` says."""
    agent, batch = make("best_of_n", flow_times="uniform"), make_batch()
    state = make_state(agent)
    _, noise, time, *_ = jax.random.split(KEY, 6)
    draws = flow.draw(noise, time, batch["actions"], DRAWS, "uniform")
    inputs = (Observation.from_dict(batch["observations"]), batch["actions"], batch["valid"])
    policy = state.params["policy"]
    grads = jax.jit(jax.grad(lambda p: agent.bc_loss(p, *inputs, draws)))(policy)
    cloned, _ = agent.policy_learner.step(policy, grads, state.opt["policy"])
    close(updating(agent)(state, batch, KEY)[0].params["policy"], cloned, rtol=1e-5, atol=1e-6)


def test_targets_leave_the_range_of_returns_where_they_may():
    """Unclipped, y is the reward sum and the discounted value, however large; clipped, the largest possible return."""
    batch = make_batch() | {"reward_sum": jnp.full(SIZE, 50.0)}
    found = {}
    for clip in (True, False):
        agent = make("best_of_n", clip_targets=clip)
        state = make_state(agent)
        noise = jnp.zeros((SIZE, agent.config.num_action_samples, HORIZON, DIM))
        successor = agent.successor(state.policy, Observation.from_dict(batch["next_observations"]), noise)
        critic = state.params["critic"]
        found[clip], _ = agent.target(critic, state.target["critic"], successor, batch, KEY)
    np.testing.assert_allclose(found[True], 1.0)
    assert float(found[False].min()) > 40


def test_dropout_is_the_critics_alone():
    """Neither candidates, advantages nor temperature see it: only the loss of the critic's own prediction."""
    dense, sparse = make("awr"), make("awr", dropout=0.5)
    state = make_state(dense)
    losses = jax.jit(sparse.total_loss)
    (_, plain), (_, dropped), (_, again), (_, other) = (
        totalling(dense)(state, make_batch(), KEY),
        losses(state, make_batch(), KEY),
        losses(state, make_batch(), KEY),
        losses(state, make_batch(), jax.random.key(4)),
    )
    for name in ("actor", "bc"):
        close(dropped[name], plain[name], rtol=1e-6)
    assert abs(dropped["critic"] - plain["critic"]) > 1e-3
    assert same(again, dropped)
    assert abs(other["critic"] - dropped["critic"]) > 1e-3


def test_the_same_key_is_the_same_update():
    agent = make("awr")
    first, second, other = (updating(agent)(make_state(agent), make_batch(), k) for k in (KEY, KEY, jax.random.key(4)))
    assert same(first, second)
    assert largest_difference(first[0].params["policy"], other[0].params["policy"]) > 1e-4
    assert largest_difference(first[0].params["critic"], other[0].params["critic"]) > 1e-4


def test_calql_pushes_candidates_down_to_the_return_and_no_further():
    batch, state = make_batch(), make_state(make("best_of_n"))
    inputs = CriticInputs(state=batch["observations"]["state"])
    candidates = jax.random.normal(jax.random.key(8), (SIZE, NUM, HORIZON, DIM))
    y = jnp.full(SIZE, 0.5)

    @functools.partial(jax.jit, static_argnums=0)
    def values(weight: float, mc_return):
        """(mean of the data's, mean of the candidates') after 60 steps on the loss with this weight."""
        agent = make("best_of_n", calql_weight=weight)
        known = {
            "critic_actions": batch["critic_actions"],
            "sequence_mask": jnp.ones(SIZE),
            "mc_return": mc_return,
        }

        def step(critic, _):
            grads = jax.grad(lambda c: agent.critic_loss(c, inputs, candidates, known, y, KEY, {})[0])(critic)
            return jax.tree.map(lambda x, g: x - 0.05 * g, critic, grads), None

        critic, _ = jax.lax.scan(step, state.params["critic"], length=60)
        embedding = agent.critic.embed(critic, inputs)
        data = agent.values(critic, embedding, batch["critic_actions"][:, None])
        return data.mean(), agent.values(critic, embedding, candidates).mean()

    free, floored = (values(0.7, jnp.full(SIZE, mc, jnp.float32)) for mc in (jnp.nan, 10.0))
    plain = values(0.0, jnp.zeros(SIZE))
    assert free[1] - free[0] < plain[1] - plain[0] - 0.1
    assert free[1] < plain[1] - 0.1
    assert floored[1] > free[1] + 0.1


@pytest.mark.parametrize("actor", CASES)
def test_degenerate_batches_leave_everything_finite(actor: str):
    agent, batch = make(actor), make_batch()
    state, update = make_state(agent), updating(agent)

    def finite(state, batch):
        new, metrics = update(state, batch, KEY)
        bad = [name for name, value in metrics.items() if not np.isfinite(value)]
        assert not bad, bad
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((new.params, new.ema, new.target, new.scalars)))
        return new, metrics

    new, metrics = finite(state, batch | {"sequence_mask": jnp.zeros(SIZE)})
    assert same(new.params["critic"], state.params["critic"])
    assert float(metrics["critic/loss"]) == 0
    _, metrics = finite(state, batch | {"mc_return": jnp.full(SIZE, jnp.nan, jnp.float32)})
    assert float(metrics["critic/mc_gap"]) == float(metrics["critic/mc_correlation"]) == 0
    _, metrics = finite(state, batch | {"valid": jnp.zeros((SIZE, HORIZON))})
    assert float(metrics["actor/flow_loss"]) == 0

    def critic_times(factor: float):
        scaled = jax.tree.map(lambda x: jnp.asarray(factor * np.asarray(x)), state.params["critic"])
        return replace(state, params=state.params | {"critic": scaled})

    new, metrics = finite(critic_times(0.0), batch)
    np.testing.assert_allclose(metrics["actor/advantage"], 0, atol=1e-6)
    np.testing.assert_allclose(metrics["actor/ess"], 1, rtol=1e-6)
    # Equal advantages are no reason to be greedy.
    assert float(new.scalars["beta"]) > 0
    finite(critic_times(30.0), batch)


# Gradients that must not be


SMALL = Pi0Config(
    vlm=GemmaConfig(width=24, depth=2, mlp_dim=32, num_heads=4, num_kv_heads=2, head_dim=8),
    expert=GemmaConfig(width=16, depth=2, mlp_dim=20, num_heads=4, num_kv_heads=2, head_dim=8),
    vision=SigLIPConfig(width=12, depth=1, mlp_dim=20, num_heads=2, patch_size=8),
    image_size=16,
    vocab_size=40,
    action_dim=DIM,
    horizon=HORIZON,
    max_token_len=4,
    dtype="float32",
    remat="none",
)


@functools.cache
def make_pi0() -> ACRLPD:
    agent = make("awr")
    sizes = CriticConfig(hidden=(5, 4), bins=14, num_queries=2, pool_width=8, pool_heads=2, embedding_width=6)
    critic = make_critic(
        sizes, feature_width=24, state_dim=CRITIC_STATE, real_action_dim=REAL, critic_horizon=CRITIC_HORIZON
    )
    learner = replace(agent.policy_learner, mask=trainable_mask(pi0.param_shapes(SMALL), SMALL, "vlm_frozen"))
    return replace(
        agent,
        policy=Pi0(SMALL),
        critic=critic,
        config=replace(agent.config, calql_weight=0.7, augment=False),
        policy_learner=learner,
    )


@functools.cache
def pi0_batch() -> dict:
    rng = np.random.default_rng(5)

    def view():
        pictures = jnp.asarray(rng.integers(0, 256, (SIZE, 16, 16, 3)), jnp.uint8)
        return {
            "image": {BASE_CAMERA: pictures},
            "image_mask": {BASE_CAMERA: jnp.ones(SIZE, bool)},
            "state": jnp.asarray(rng.normal(size=(SIZE, DIM)), jnp.float32),
            "tokenized_prompt": jnp.asarray(rng.integers(1, 40, (SIZE, 4)), jnp.int32),
            "tokenized_prompt_mask": jnp.ones((SIZE, 4), bool),
        }

    return make_batch() | {"observations": view(), "next_observations": view()}


def test_losses_stay_with_their_own_weights():
    """On a π₀ with pictures: no TD error through features, candidates or targets; no actor loss into the critic."""
    agent, batch = make_pi0(), pi0_batch()
    state = filled(agent, 0.25)

    @jax.jit
    def gradients(params):
        def part(name):
            return lambda params: agent.total_loss(replace(state, params=params), batch, KEY)[1][name]

        of_actor = jax.grad(lambda critic: part("actor")(params | {"critic": critic}))(params["critic"])
        return jax.value_and_grad(part("critic"))(params), of_actor

    (loss, of_critic), of_actor = gradients(state.params)
    assert not any(np.any(g) for g in jax.tree.leaves(of_critic["policy"]))
    assert not any(np.any(g) for g in jax.tree.leaves(of_actor))
    # And yet the critic reads what the policy sees, and learns from it.
    (other, _), _ = gradients(state.params | {"policy": state.ema["policy"]})
    assert abs(loss - other) > 1e-4
    assert all(np.any(g) for g in jax.tree.leaves(of_critic["critic"]))


def test_frozen_leaves_never_move():
    """In the weights and in their average, through a whole update; and they stay bfloat16."""
    agent = make_pi0()
    state = filled(agent, 0.25)
    new, metrics = jax.jit(agent.update)(state, pi0_batch(), KEY)
    assert all(np.isfinite(value) for value in metrics.values())
    mask = flatten(agent.policy_learner.mask)
    assert 0 < sum(mask.values()) < len(mask)
    for name, tree in (("weights", new.params["policy"]), ("average", new.ema["policy"])):
        before, after = flatten(state.params["policy"]), flatten(tree)
        for path, trains in mask.items():
            assert after[path].dtype == (jnp.float32 if trains else jnp.bfloat16), (name, path)
            if not trains:
                np.testing.assert_array_equal(after[path], before[path], err_msg=f"{name}: {path}")
    before, after = flatten(state.params["policy"]), flatten(new.params["policy"])
    for path in ("PaliGemma/llm/layers/attn/q_einsum_1/w", "state_proj/kernel"):
        assert np.any(after[path] != before[path]), path


# What is computed once


class Watched:
    """A policy that notes what is asked of it; tests trace, so a note is a call in the program."""

    def __init__(self, policy: FlowPolicy):
        self.policy, self.horizon, self.action_dim = policy, policy.horizon, policy.action_dim
        self.encoded, self.augmented = [], []

    def init(self, key):
        return self.policy.init(key)

    def prepare(self, observation, key=None):
        self.augmented.append(key)
        return self.policy.prepare(observation, key)

    def encode(self, params, observation):
        self.encoded.append((jax.tree.leaves(params)[0].dtype.name, observation.state))
        return self.policy.encode(params, observation)

    def velocity(self, params, context, x_t, t):
        return self.policy.velocity(params, context, x_t, t)


@pytest.mark.parametrize(
    ("actor", "encoder_frozen", "here", "there"),
    [
        ("awr", False, ["float32"], ["float32"]),
        ("best_of_n", False, ["float32"], ["float32"]),
        ("distill", True, ["float32"], ["bfloat16"]),
        ("distill", False, ["bfloat16", "float32"], ["bfloat16"]),
    ],
)
def test_one_prefix_pass_per_observation(actor: str, encoder_frozen: bool, here: list, there: list):
    """One more only for the fixed policy of `distill` (kept in bfloat16), where it reads with other eyes by now."""
    plain = make(actor)
    policy = Watched(POLICY)
    agent = replace(plain, policy=policy, encoder_frozen=encoder_frozen)
    found = {}

    def update(state, batch, key):
        agent.update(state, batch, key)
        for name in ("observations", "next_observations"):
            found[name] = sorted(dtype for dtype, state in policy.encoded if state is batch[name]["state"])

    jax.eval_shape(update, make_state(plain), make_batch(), KEY)
    assert found == {"observations": here, "next_observations": there}
    assert len(policy.encoded) == len(here) + len(there)
    # Pictures of s and s' are augmented with one key: what moved between them moved in the world.
    first, second = policy.augmented
    assert first is not None
    assert first is second


# Acting


def test_acting_is_the_critics_choice_among_separate_samples():
    agent = make("best_of_n")
    state, start = make_state(agent), make_batch()["observations"]["state"]
    observation = Observation(images={}, image_masks={}, state=start)
    act = jax.jit(agent.act, static_argnames="best_of")
    keys = jax.random.split(KEY, SIZE)
    chunks, trees, s = act(state, observation, keys), naive_state(state), settings(agent)
    noise = doubles(np.stack([jax.random.normal(key, (NUM, HORIZON, DIM)) for key in keys]))
    chosen = set()
    for b, here in enumerate(doubles(start)):
        options = [naive.sample(trees["ema_policy"], here, n, s.flow_steps) for n in noise[b]]
        values = [naive.members(s, trees["ema_critic"], here, option).mean() for option in options]
        close(chunks[b], options[int(np.argmax(values))])
        chosen.add(int(np.argmax(values)))
    assert len(chosen) > 1

    # One candidate is a plain sample, BC's own.
    cloning = BC(
        policy=POLICY,
        config=BCConfig(),
        policy_learner=agent.policy_learner,
        real_action_dim=REAL,
        flow_steps=s.flow_steps,
    )
    plain = act(state, observation, keys, best_of=1)
    close(plain, jax.jit(cloning.act)(state, observation, keys), rtol=0, atol=1e-6)
    assert same(jax.jit(make("awr").act)(state, observation, keys), plain)

    # Averages act, not the weights; without averages the weights do.
    other = {name: jax.tree.map(jnp.zeros_like, tree) for name, tree in state.params.items()}
    assert same(act(replace(state, params=other), observation, keys), chunks)
    assert same(act(replace(state, params=state.ema, ema={}), observation, keys), chunks)
    for name in ("policy", "critic"):
        assert not same(act(replace(state, ema=state.ema | {name: state.params[name]}), observation, keys), chunks)


# The critic must not see where an episode ended


def test_the_critic_reads_the_chunk_and_nothing_about_its_end():
    """Losses work on batches that hold nothing else, and the update of the critic ignores all else."""
    agent, batch = make("awr"), make_batch()
    state = make_state(agent)
    inputs, candidates = CriticInputs(state=batch["observations"]["state"]), jnp.zeros((SIZE, NUM, HORIZON, DIM))
    critic, successor = state.params["critic"], Successor(inputs, candidates)
    told = {name: batch[name] for name in ("reward_sum", "length", "next_terminal")}
    y, _ = jax.eval_shape(agent.target, critic, state.target["critic"], successor, told, KEY)
    only = {name: batch[name] for name in ("critic_actions", "sequence_mask")}
    jax.eval_shape(agent.critic_loss, critic, inputs, candidates, only, y, KEY, {})

    ended = batch | {
        "valid": batch["valid"][:, ::-1],  # what adapts asks whether a chunk is imitated, not how much of it
        "masks": 1 - batch["masks"],
        "terminals": 1 - batch["terminals"],
        "rewards": batch["rewards"] + 1,
        "actions": jnp.where(batch["valid"][..., None] > 0, batch["actions"], 9.0),
    }
    plain, metrics = updating(agent)(state, batch, KEY)
    new, others = updating(agent)(state, ended, KEY)
    for name in ("params", "target", "ema"):
        assert same(getattr(new, name)["critic"], getattr(plain, name)["critic"]), name
    assert same(new.scalars, plain.scalars)
    kept = [name for name in metrics if name.startswith("critic/") or name in ("actor/advantage", "actor/ess")]
    assert same({name: others[name] for name in kept}, {name: metrics[name] for name in kept})
    assert largest_difference(new.params["policy"], plain.params["policy"]) > 1e-3


class Stepwise:
    """A policy whose velocity at one step does not look at the others."""

    horizon, action_dim = HORIZON, DIM

    def init(self, key):
        return {"scale": jnp.float32(0.5), "state": jnp.full((STATE, DIM), 0.1)}

    def prepare(self, observation, key=None):
        return observation

    def encode(self, params, observation):
        return observation.state

    def velocity(self, params, context, x_t, t):
        return params["scale"] * x_t + (context @ params["state"])[:, None, None]


def test_padding_is_not_imitated_but_is_seen():
    """Steps after the end and padded dimensions have no weight in the loss. They are part of x_t, though, which a
    network that mixes steps reads: so does OpenPI's π₀, whose action tokens attend to each other unmasked.
    """
    batch = make_batch()
    inside = (batch["valid"][..., None] > 0) & (jnp.arange(DIM) < REAL)
    other = jnp.where(inside, batch["actions"], batch["actions"] + 1)
    draws = flow.draw(jax.random.key(0), jax.random.key(1), batch["actions"], DRAWS)
    noise = jnp.zeros((SIZE, NUM, HORIZON, DIM))

    def gradient(policy, actions):
        agent = replace(make("awr"), policy=policy)
        state = agent.init(jax.random.key(1))
        part = ActorPart(
            observation=Observation.from_dict(batch["observations"]),
            actions=actions,
            critic_actions=batch["critic_actions"],
            valid=batch["valid"],
            draws=draws,
            candidate_noise=noise,
        )
        (loss, _), grads = jax.value_and_grad(agent.actor_loss, has_aux=True)(state.params["policy"], state, part)
        return loss, grads

    gradient = jax.jit(gradient, static_argnums=0)

    stepwise = Stepwise()
    assert same(gradient(stepwise, batch["actions"]), gradient(stepwise, other))
    assert largest_difference(gradient(POLICY, batch["actions"]), gradient(POLICY, other)) > 1e-3


class Identity:
    def low_dim(self, state, actions, prompts):
        return {"state": state} if actions is None else {"state": state, "actions": actions}


def test_the_loader_gives_the_critic_no_sign_of_an_end():
    """Episodes alike but for their length: whether a chunk was cut cannot be told from the critic's, only from the
    actor's copy, whose repeated last action gives it away.
    """
    rng = np.random.default_rng(0)
    items = []
    for length in rng.integers(2, 9, 60):
        last = np.arange(length) == length - 1
        items.append(
            Episode(
                task="go",
                state=rng.normal(size=(length, STATE)).astype(np.float32),
                actions=rng.normal(size=(length, DIM)).astype(np.float32),
                rewards=last.astype(np.float32),
                terminated=last,
                truncated=np.zeros(length, bool),
                success=True,
            )
        )
    source = MemorySource(cameras=(), items=[(episode, {}) for episode in items])
    config = DataConfig(prefetch=0, critic_horizon=4)
    with ACRLPDDataLoader(source, Identity(), config=config, batch_size=600, horizon=6, discount=0.9) as loader:
        batch = loader.sample_batch()
    chunks, padded, valid = batch["critic_actions"], batch["actions"][:, :4], batch["valid"][:, :4] > 0
    whole = valid.all(1)
    assert 100 < whole.sum() < 500
    np.testing.assert_array_equal(chunks[valid], padded[valid])
    for first in (1, 2, 3):
        # Actions here have nothing to do with each other, so the tail is nearly that of a chunk that went on.
        tails, lent = (x[:, first:].reshape(len(x), -1) for x in (chunks[valid.sum(1) == first], padded[whole]))
        apart = np.sqrt(np.square(tails[:, None] - lent).mean(-1))
        assert np.median(apart.min(1)) < 0.2 < 0.5 < np.median(apart)
    # Two probes of each step: how large the action is, how far it is from the one before.
    for values, told in ((chunks, False), (padded, True)):
        probes = np.stack([np.square(values).mean(-1)[:, 1:], np.square(np.diff(values, axis=1)).mean(-1)])
        left, right = probes[:, ~whole], probes[:, whole]
        z = (left.mean(1) - right.mean(1)) / np.sqrt(left.var(1) / len(left[0]) + right.var(1) / len(right[0]))
        assert (np.abs(z).max() > 8) == told, z
        assert (np.abs(z).max() > 4) == told, z
