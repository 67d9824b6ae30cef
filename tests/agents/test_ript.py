"""RIPT's update against NumPy for every loss, and its promises: whose field v_old is, what counts, what never moves."""

import functools
import re
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import naive_ript as naive
from pirl.agents.agent import Agent, TrainState
from pirl.agents.config import RIPTConfig
from pirl.agents.learner import Learner
from pirl.agents.ript import RIPT
from pirl.errors import ConfigError, PirlWarning
from pirl.models import pi0
from pirl.models.config import MLPFlowConfig, get_preset
from pirl.models.freeze import trainable_mask
from pirl.models.mlp import MLPFlow
from pirl.models.observation import Observation
from pirl.models.params import count, flatten
from pirl.models.pi0 import Pi0

SIZE, DEMOS, HORIZON, DIM, REAL, STATE, DRAWS, STEPS = 8, 4, 3, 3, 2, 4, 2, 4
POLICY = MLPFlow(MLPFlowConfig(state_dim=STATE, action_dim=DIM, horizon=HORIZON, hidden=(5,)))
RATE, DECAY, BETA = 0.1, 0.7, 0.8
KEY = jax.random.key(3)
LOSSES = ("nft", "awr", "filter", "cfg", "fpo", "raw")


@functools.cache
def make(loss: str = "nft", *, decay: float | None = DECAY, **changes) -> RIPT:
    """One program per loss serves nearly all tests, since the time goes into compiling them."""
    given = dict(nft_beta=BETA, awr_beta=0.6, weight_cap=2.5, fpo_clip=0.1, condition_dropout=0.3, epochs=1)
    given["bc_weight"] = 0.4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PirlWarning)
        config = RIPTConfig(loss=loss, flow_draws=DRAWS, ema_decay=decay, **(given | changes))
    learner = Learner(tx=optax.sgd(RATE), ema_decay=decay)
    return RIPT(policy=POLICY, config=config, policy_learner=learner, real_action_dim=REAL, flow_steps=STEPS)


@functools.cache
def updating(agent: RIPT):
    return jax.jit(agent.update)


@functools.cache
def make_state(agent: RIPT) -> TrainState:
    """A state in the middle of an iteration: weights, averages and v_old all differ, so none can stand for another."""
    state, rng = jax.eval_shape(agent.init, KEY), np.random.default_rng(2)

    def fill(leaf):
        return jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype) if leaf.ndim else jnp.int32(5)

    return jax.tree.map(fill, state)


def make_batch(**changes) -> dict:
    """Both signs, clipped ones and none; whole and cut chunks; the last row only fills up the batch."""
    rng = np.random.default_rng(0)
    executed = np.array([3, 3, 2, 1, 3, 2, 1, 3])
    batch = {
        "observations": {"state": rng.normal(size=(SIZE, STATE))},
        "actions": rng.normal(0, 1.2, (SIZE, HORIZON, DIM)),
        "executed": np.arange(HORIZON) < executed[:, None],
        "advantage": np.array([0.6, -0.4, 1.7, -1.3, 0.0, 0.3, -0.2, 0.9]),
        "weight": np.array([1, 1, 1, 1, 1, 1, 1, 0]),
        "fresh": np.zeros(SIZE),
        "acceptance": np.ones(SIZE),
        "demos": {
            "observations": {"state": rng.normal(size=(DEMOS, STATE))},
            "actions": rng.normal(size=(DEMOS, HORIZON, DIM)),
            "valid": np.arange(HORIZON) < np.array([3, 2, 3, 1])[:, None],
        },
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch | changes)


def doubles(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(found, expected, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


def same(left, right) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), left, right)))


def drawn() -> dict:
    """The random numbers of the step: rows and demonstrations have keys of their own."""
    found = {}
    for prefix, size, key in zip(("", "demo_"), (SIZE, DEMOS), jax.random.split(KEY), strict=True):
        _, noise_key, time_key = jax.random.split(key, 3)
        found[f"{prefix}noise"] = np.float64(jax.random.normal(noise_key, (size, DRAWS, HORIZON, DIM)))
        found[f"{prefix}time"] = np.float64(jax.random.uniform(time_key, (size, DRAWS)) ** (1 / 1.5)) * 0.999 + 0.001
    return found


def flat_state(state: TrainState, old: dict) -> dict:
    """A state as NumPy's update takes it; a condition is one vector there."""
    found = {"policy": state.params["policy"], "old": old["policy"]}
    found |= {f"ema_{name}": x for name, x in state.ema.items()}
    if "condition" in state.params:
        found |= {"condition": state.params["condition"]["embedding"], "old_condition": old["condition"]["embedding"]}
        found["ema_condition"] = state.ema["condition"]["embedding"]
    return doubles(found)


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
@pytest.mark.parametrize("loss", LOSSES)
def test_update_equals_numpy(loss: str, fresh: bool):
    agent = make(loss)
    state, batch = make_state(agent), make_batch(fresh=np.full(SIZE, fresh))
    new, metrics = updating(agent)(state, batch, KEY)
    c = agent.config
    told = naive.Settings(
        **{name: getattr(c, name) for name in ("loss", "nft_beta", "awr_beta", "weight_cap", "fpo_clip")},
        **{name: getattr(c, name) for name in ("condition_dropout", "bc_weight")},
        **{"real_dims": REAL, "rate": RATE, "decay": DECAY},
    )
    # The policy that rolled out is the one that acts: the average.
    old = state.ema if fresh else state.target
    expected, numbers = naive.update(told, flat_state(state, old), doubles(batch), drawn())
    found = flat_state(new, new.target)
    close({name: found[name] for name in expected}, expected)
    close(metrics, numbers)
    assert same(new.target, old)
    assert int(new.step) == 6


def test_groups_with_equal_rollouts_are_learned_from_on_request_alone():
    rewards = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    mixed, every = make().prepare(rewards), make(accept="all").prepare(rewards)
    assert (mixed.groups.tolist(), every.groups.tolist()) == ([1], [0, 1, 2])
    assert (mixed.constants, every.constants) == ({"acceptance": 1 / 3}, {"acceptance": 1.0})
    np.testing.assert_array_equal(every.columns["advantage"], [[0, 0], [1, -1], [0, 0]])
    assert RIPTConfig().accept == "mixed"
    assert RIPTConfig().small().accept == "all", "an untrained policy fails all, and a debug run tests the update"


def test_acceptance_scales_the_pull_of_nft_alone():
    """Whatever is rejected for having no advantage was holding the policy: the rest must pull less."""
    batch = make_batch()
    some = make_batch(acceptance=np.full(SIZE, 0.25))
    fewer = make_batch(advantage=0.25 * np.clip(batch["advantage"], -1, 1))
    agent = make()
    found, expected = (updating(agent)(make_state(agent), batch, KEY)[0] for batch in (some, fewer))
    close(found.params, expected.params, rtol=1e-6, atol=1e-7)
    agent = make("awr")
    found, expected = (updating(agent)(make_state(agent), batch, KEY)[0] for batch in (some, batch))
    assert same(found.params, expected.params)
    absent = {name: value for name, value in batch.items() if name != "acceptance"} | {"fresh": jnp.ones(())}
    jax.eval_shape(agent.update, make_state(agent), absent, KEY)


@pytest.mark.parametrize("loss", ["nft", "cfg"])
def test_a_rollout_of_two_rows_counts_as_one_of_one(loss: str):
    """The gradient with rows at half the weight is the mean of the gradients of the two choices of one of them."""
    agent = make(loss, bc_weight=0.0)
    state = make_state(agent)

    def moved(weight: list[float]) -> np.ndarray:
        batch = make_batch(weight=np.array(weight), fresh=np.ones(SIZE))
        new, _ = updating(agent)(state, batch, KEY)
        before, after = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.params)]) for s in (state, new))
        return np.float64(after) - np.float64(before)

    both = moved([0.5, 0, 0.5, 1, 0, 0, 0, 0])
    first, second = moved([1, 0, 0, 1, 0, 0, 0, 0]), moved([0, 0, 1, 1, 0, 0, 0, 0])
    close(both, (first + second) / 2, rtol=1e-3, atol=1e-5)
    assert np.abs(both - moved([1, 0, 1, 1, 0, 0, 0, 0])).max() > 1e-4


def test_settings_reach_the_plan_and_the_weights():
    assert not RIPTConfig().groups.even
    assert RIPTConfig(weigh="rollouts").groups.even
    batch, found = make_batch(advantage=np.full(SIZE, 1.2)), {}
    for scale in ("clip", "largest"):
        agent = make(advantage="std", nft_scale=scale)
        found[scale] = agent._rows(batch, KEY).advantage[:-1]
    close(found["clip"], np.ones(SIZE - 1))
    close(found["largest"], np.full(SIZE - 1, 1.2 / 7**0.5))


# v_old


def test_the_field_that_rolled_out_is_kept_until_the_next_iteration():
    agent = make()
    update, state = updating(agent), make_state(agent)
    begins = make_batch(fresh=np.ones(SIZE))
    first, _ = update(state, begins, KEY)
    assert same(first.target["policy"], state.policy), "taken before the update, from the weights that act"
    second, metrics = update(first, make_batch(), jax.random.key(4))
    third, _ = update(second, make_batch(), jax.random.key(5))
    assert same(third.target, first.target)
    assert float(metrics["ript/drift"]) > 0
    assert not same(third.policy, first.target["policy"])
    again, _ = update(third, begins, KEY)
    assert same(again.target["policy"], third.policy)
    assert not same(again.target["policy"], third.params["policy"]), "which are not those that train"
    raw = replace(third, ema={})
    assert same(update(raw, begins, KEY)[0].target["policy"], raw.params["policy"])


def test_the_first_step_of_nft_is_that_of_raw():
    """At v = v_old, NFT's gradient is -2β A (u - v_old) ∇v: that of the signed flow loss, times β."""
    pulls = []
    for loss in ("nft", "raw"):
        agent = make(loss)
        state = replace(make_state(agent), ema=make_state(agent).params)
        moved = []
        for advantage in (np.linspace(-0.9, 0.9, SIZE), np.zeros(SIZE)):
            ones = np.ones((SIZE, HORIZON))
            batch = make_batch(fresh=np.ones(SIZE), advantage=advantage, executed=ones)
            new, metrics = updating(agent)(state, batch, KEY)
            assert float(metrics["ript/drift"]) == 0
            moved.append(new.params["policy"])
        pulls.append(jax.tree.map(lambda a, b: a - b, *moved))
    close(pulls[0], jax.tree.map(lambda x: BETA * x, pulls[1]))
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(pulls[0])) > 0.01


# What counts


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_that_fill_up_the_batch_change_nothing(loss: str):
    agent, batch = make(loss), make_batch()
    last = jnp.arange(SIZE) == SIZE - 1
    other = jax.tree.map(lambda x: x, batch) | {
        "observations": {"state": jnp.where(last[:, None], 7.0, batch["observations"]["state"])},
        "actions": jnp.where(last[:, None, None], -3.0, batch["actions"]),
        "executed": jnp.where(last[:, None], 0.0, batch["executed"]),
        "advantage": jnp.where(last, jnp.nan, batch["advantage"]),
    }
    found, expected = (updating(agent)(make_state(agent), b, KEY) for b in (other, batch))
    close(found, expected, rtol=1e-6, atol=1e-7)
    only_demos = [
        updating(agent)(make_state(agent), b | {"weight": jnp.zeros(SIZE)}, KEY)
        for b in (batch, make_batch(advantage=-batch["advantage"]))
    ]
    close(*only_demos, rtol=1e-6, atol=1e-7)
    assert all(np.isfinite(value) for value in only_demos[0][1].values())


def test_steps_that_were_not_executed_only_hold():
    """Where nothing was executed there is no advantage: what is left of NFT is β² ‖v - v_old‖², whatever A is."""
    agent = make()
    moved = [
        updating(agent)(make_state(agent), make_batch(executed=np.zeros((SIZE, HORIZON)), advantage=a), KEY)[0].params
        for a in (np.ones(SIZE), -np.ones(SIZE))
    ]
    close(*moved, rtol=1e-6, atol=1e-7)
    held, _ = updating(agent)(make_state(agent), make_batch(weight=np.zeros(SIZE)), KEY)
    assert not same(moved[0], held.params)


@pytest.mark.parametrize(("loss", "parts"), [("awr", 4), ("cfg", 2)])
def test_a_batch_in_parts_is_the_batch(loss: str, parts: int):
    """The row that does not count falls into one of the parts, which must not weigh more for it."""
    found, expected = (
        updating(make(loss, accumulate=n) if n > 1 else make(loss))(make_state(make(loss)), make_batch(), KEY)
        for n in (parts, 1)
    )
    close(found, expected, rtol=1e-5, atol=1e-6)


def test_demonstrations_are_needed_where_they_are_asked_for():
    batch = {name: value for name, value in make_batch().items() if name != "demos"}
    with pytest.raises(ConfigError, match="the batch has no `demos`"):
        jax.eval_shape(make().update, make_state(make()), batch, KEY)


def test_the_same_key_is_the_same_update_and_the_state_is_not_touched():
    agent = make()
    state = make_state(agent)
    before = doubles(state)
    first, second, other = (updating(agent)(state, make_batch(), key)[0] for key in (KEY, KEY, jax.random.key(4)))
    assert same(first, second)
    assert same(doubles(state), before)
    assert not same(first.params, other.params)


# Frozen weights, and sizes


def tiny_pi0(loss: str, rule: str = "vlm_frozen") -> RIPT:
    config = get_preset("pi0_tiny")
    mask = trainable_mask(pi0.param_shapes(config), config, rule)
    return replace(
        make(loss, decay=None, bc_weight=0.0),
        policy=Pi0(config),
        policy_learner=Learner(tx=optax.sgd(RATE), mask=mask),
        encoder_frozen=True,
    )


def pictured(agent: RIPT, size: int) -> dict:
    rng, horizon, dim = np.random.default_rng(0), agent.policy.horizon, agent.policy.action_dim
    return {
        "observations": {
            "state": jnp.asarray(rng.normal(size=(size, dim)), jnp.float32),
            "image": {"base_0_rgb": jnp.asarray(rng.integers(0, 255, (size, 24, 24, 3)), jnp.uint8)},
            "image_mask": {"base_0_rgb": jnp.ones(size, bool)},
        },
        "actions": jnp.asarray(rng.normal(size=(size, horizon, dim)), jnp.float32),
        "executed": jnp.ones((size, horizon)),
        "advantage": jnp.linspace(-1, 1, size),
        "weight": jnp.ones(size),
        "fresh": jnp.ones(size),
    }


def test_frozen_weights_stay_and_are_not_copied():
    """With `expert_only` even the bias that the condition is added to is frozen: the condition learns all the same."""
    agent = tiny_pi0("cfg", "expert_only")
    state, batch = jax.jit(agent.init)(KEY), pictured(agent, 2)
    new, _ = jax.jit(agent.update)(state, batch, KEY)
    flags, before, after = flatten(agent.policy_learner.mask), *(flatten(s.params["policy"]) for s in (state, new))
    assert not flags["action_in_proj/bias"]
    assert set(flatten(state.target["policy"])) == {path for path, trains in flags.items() if trains}
    assert all(same(before[path], after[path]) for path, trains in flags.items() if not trains)
    assert not same(before["PaliGemma/llm/layers/mlp_1/linear"], after["PaliGemma/llm/layers/mlp_1/linear"])
    assert float(jnp.abs(new.params["condition"]["embedding"]).max()) > 0
    served = flatten(agent.inference_params(new))
    assert set(served) == set(after)
    assert [path for path in after if not same(after[path], served[path])] == ["action_in_proj/bias"]


def test_the_rollout_policy_costs_two_bytes_per_weight_that_trains():
    config = get_preset("pi0")
    mask = trainable_mask(pi0.param_shapes(config), config, "vlm_frozen")
    agent = replace(tiny_pi0("nft"), policy=Pi0(config), policy_learner=Learner(tx=optax.sgd(RATE), mask=mask))
    target = jax.eval_shape(replace(agent, compute_dtype=config.dtype).init, KEY).target["policy"]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target))
    assert 3e8 < count(jax.tree.leaves(target)) < 3.3e8
    assert 2 <= size / count(jax.tree.leaves(target)) < 2.05
    assert flatten(target)["action_in_proj/kernel"].dtype == jnp.float32, "heads compute in float32"


# The condition


def test_a_condition_that_was_not_trained_changes_no_bit():
    agent = tiny_pi0("cfg")
    params = jax.jit(agent.policy.init)(jax.random.key(9))
    state = jax.jit(agent.init)(KEY, params)
    observation = Observation.from_dict(pictured(agent, 2)["observations"])
    x, t = jax.random.normal(KEY, (2, 3, agent.policy.horizon, agent.policy.action_dim)), jnp.full((2, 3), 0.4)

    @jax.jit
    def field(weights):
        return agent.policy.velocity(weights, agent.policy.encode(weights, observation), x, t)

    assert same(field(agent.inference_params(state)), field(state.params["policy"]))


def observed() -> Observation:
    return Observation(images={}, image_masks={}, state=make_batch()["observations"]["state"])


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_acting_mixes_the_two_branches(scale: float):
    agent = make("cfg", guidance=scale)
    state, keys = make_state(agent), jax.random.split(KEY, SIZE)
    weights, embedding = doubles(state.ema["policy"]), np.float64(state.ema["condition"]["embedding"])
    noise = np.stack([np.float64(jax.random.normal(key, (1, HORIZON, DIM)))[0] for key in keys])
    fields = [(scale, naive.folded(weights, embedding)), (1 - scale, weights)]
    expected = naive.sample(fields, np.float64(observed().state), noise, STEPS)
    close(jax.jit(agent.act)(state, observed(), keys), expected, atol=1e-4)
    other = make("cfg")
    close(other.act(state, observed(), keys, guidance=scale), expected, atol=1e-4)


def test_what_is_served_is_the_conditional_policy():
    """Plain sampling from the folded weights, by an agent that knows of no condition."""
    agent, plain = make("cfg"), make("nft")
    state, keys = make_state(agent), jax.random.split(KEY, SIZE)
    served = replace(make_state(plain), ema={"policy": agent.inference_params(state)})
    assert same(agent.act(state, observed(), keys), plain.act(served, observed(), keys))
    assert not same(agent.act(state, observed(), keys), agent.act(state, observed(), keys, guidance=0.0))
    assert plain.inference_params(served) is served.policy
    with pytest.raises(ConfigError, match=r"guidance 2.0 with loss 'nft'"):
        plain.act(served, observed(), keys, guidance=2.0)


def test_a_row_acts_by_its_own_key():
    agent = make()
    state, keys = make_state(agent), jax.random.split(KEY, SIZE)
    chunks = agent.act(state, observed(), keys)
    few = Observation(images={}, image_masks={}, state=observed().state[2:4])
    close(agent.act(state, few, keys[2:4]), chunks[2:4], rtol=1e-6, atol=1e-6)


def test_a_policy_without_a_place_for_a_condition_is_refused():
    without = {k: v for k, v in vars(MLPFlow).items() if k not in ("condition_path", "__dict__", "__weakref__")}
    Bare = type("Bare", (), without)
    with pytest.raises(ConfigError, match="Bare, which has no place for a condition"):
        replace(make("cfg"), policy=Bare(POLICY.config))
    assert replace(make("nft"), policy=Bare(POLICY.config)).config.loss == "nft"


# The state, the pictures, the settings


@pytest.mark.parametrize("loss", ["nft", "cfg"])
def test_a_fresh_state(loss: str):
    """Averages and v_old start as copies: leaves are donated one by one, so none may be shared."""
    agent = make(loss)
    assert isinstance(agent, Agent)
    given = POLICY.init(jax.random.key(9))
    state = agent.init(KEY, given)
    assert same(state.params["policy"], given)
    assert same(state.ema, state.params)
    assert same(state.target, state.params)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.params, state.ema, state.target))]
    assert len(set(buffers)) == len(buffers)
    assert make(loss, decay=None).init(KEY, given).ema == {}
    assert same(agent.init(KEY).params["policy"], POLICY.init(KEY))
    if loss == "cfg":
        assert not state.params["condition"]["embedding"].any()


@pytest.mark.parametrize("augment", [True, False])
def test_pictures_are_augmented_only_when_asked(augment: bool):
    seen = []

    class Watched(MLPFlow):
        def prepare(self, observation, key=None):
            seen.append(key)
            return observation

    agent = replace(make(augment=augment), policy=Watched(POLICY.config))
    jax.eval_shape(agent.update, make_state(agent), make_batch(), KEY)
    assert [key is not None for key in seen] == [augment, augment]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(group_size=1), "group_size is 1"),
        (dict(max_attempts=0.5), r"max_attempts is 0\.5"),
        (dict(epochs=0), "epochs is 0"),
        (dict(drift_limit=0.0), r"drift_limit is 0\.0"),
        (dict(nft_beta=0.0), r"nft_beta is 0\.0"),
        (dict(awr_beta=float("nan")), "awr_beta is nan"),
        (dict(weight_cap=0.5), r"weight_cap is 0\.5"),
        (dict(fpo_clip=1.0), r"fpo_clip is 1\.0"),
        (dict(condition_dropout=1.0), r"condition_dropout is 1\.0"),
        (dict(bc_weight=-1.0), r"bc_weight is -1\.0"),
        (dict(ema_decay=1.0), r"ema_decay is 1\.0"),
        (dict(guidance=2.0), "guidance is 2.0 and the loss is 'nft'"),
        (dict(loss="raw", epochs=2), "loss 'raw' with 2 epochs"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        RIPTConfig(**changes)


def test_raw_warns_of_what_may_happen():
    with pytest.warns(PirlWarning, match="without a bound"):
        RIPTConfig(loss="raw", epochs=1)


def test_every_metric_is_explained():
    logged = set()
    for loss in LOSSES:
        agent = make(loss)
        logged |= set(jax.eval_shape(agent.update, make_state(agent), make_batch(), KEY)[1])
    page = (Path(__file__).parents[2] / "docs/algorithms-ript.md").read_text()
    assert logged <= set(re.findall(r"`((?:ript|bc)/\w+)`", page))
