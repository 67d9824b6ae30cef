"""The actor starts when the critic knows: when the gate opens and shuts, what it does, and that a run obeys it."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents.acrlpd import ACRLPD
from pirl.agents.config import ACRLPDConfig
from pirl.agents.gate import final_word, stays_open
from pirl.agents.learner import Learner
from pirl.config import RLTrainConfig
from pirl.errors import ConfigError
from pirl.models.config import MLPFlowConfig
from pirl.models.critic import make_critic
from pirl.models.critic_config import CriticConfig
from pirl.models.mlp import MLPFlow
from pirl.recipes import get_config, list_configs
from pirl.training.config import ConstantSchedule, HeldOutConfig
from pirl.training.loop import train
from small_runs import compiled_once, records, small_run

DEBUG = get_config("debug")
KNOWS = {
    "held_out/rank_correlation": 0.6,
    "held_out/rank_correlation_by_chance": 0.3,
    "held_out/auc": 0.8,
    "held_out/auc_by_chance": 0.65,
}
SIZE, HORIZON = 4, 2


@pytest.mark.parametrize(
    ("changes", "was_open", "is_open"),
    [
        ({}, False, True),
        ({"held_out/rank_correlation": 0.49}, False, False),
        ({"held_out/rank_correlation_by_chance": 0.7}, False, False),  # few episodes: chance would do as well
        ({"held_out/auc": 0.6}, False, False),  # later is better in all episodes, and that is all it knows
        ({"held_out/rank_correlation": 0.40}, True, True),  # hysteresis
        ({"held_out/rank_correlation": 0.37}, True, False),
        ({"held_out/auc": 0.55}, True, True),
        ({"held_out/auc": 0.49}, True, False),
    ],
)
def test_it_opens_above_chance_and_shuts_well_below(changes: dict[str, float], was_open: bool, is_open: bool) -> None:
    assert stays_open(KNOWS | changes, 0.5, was_open=was_open) == is_open


def test_without_failures_the_ranking_decides_and_without_returns_nothing_does() -> None:
    ranking = {name: value for name, value in KNOWS.items() if "auc" not in name}
    assert stays_open(ranking, 0.5, was_open=False)
    assert not stays_open(ranking | {"held_out/rank_correlation": 0.2}, 0.5, was_open=False)
    assert stays_open({"held_out/flow_loss": 1.0}, 0.5, was_open=False)


def make(**changes) -> ACRLPD:
    return ACRLPD(
        policy=MLPFlow(MLPFlowConfig(state_dim=2, action_dim=2, horizon=HORIZON, hidden=(4,))),
        critic=make_critic(
            CriticConfig(hidden=(4,), bins=21),
            feature_width=None,
            state_dim=2,
            real_action_dim=2,
            critic_horizon=HORIZON,
        ),
        config=ACRLPDConfig(num_action_samples=2, flow_steps=2, bc_loss_weight=0.0, members="all", **changes),
        policy_learner=Learner(tx=optax.sgd(1.0)),
        critic_learner=Learner(tx=optax.sgd(0.1)),
    )


def batch() -> dict:
    rng = np.random.default_rng(0)
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


def test_shut_it_imitates_and_open_it_listens() -> None:
    key = jax.random.key(0)
    gated, free, waiting = make(gate=0.5), make(), make(actor_warmup_steps=10)
    state = gated.init(key)
    said: list[str] = []
    opened = gated.heard(state, KNOWS, said.append)
    assert said == ["held_out/rank_correlation 0.6, held_out/auc 0.8: the actor follows the critic"]
    assert gated.heard(opened, {"eval/success_rate": 0.0}, said.append) is opened
    assert float(gated.heard(opened, KNOWS, said.append).scalars["gate"]) == 1
    assert float(gated.heard(state, {}, [].append).scalars["gate"]) == 1  # nothing is held out: steps decide
    shut = gated.heard(opened, KNOWS | {"held_out/auc": 0.4}, said.append)
    assert len(said) == 2
    update = jax.jit(gated.update)
    after = {name: update(one, batch(), key)[0].params["policy"] for name, one in (("open", opened), ("shut", shut))}
    plain = {
        name: jax.jit(one.update)(one.init(key), batch(), key)[0].params["policy"]
        for name, one in (("open", free), ("shut", waiting))
    }
    for name, expected in plain.items():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), after[name], expected)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after["open"], after["shut"])
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_a_run_whose_gate_stayed_shut_says_so() -> None:
    gated, unsure = make(gate=0.5), KNOWS | {"held_out/auc": 0.52}
    state = gated.init(jax.random.key(0))
    assert gated.verdict(state, unsure) == (
        "the critic never ranked held-out successes above failures; the actor only imitated: held_out/auc 0.52 where "
        "more than 0.65 is needed, held_out/rank_correlation 0.60 where more than 0.50 is needed. Are the outcomes "
        "right, are there enough successes and failures, does the discount reach them? --agent.gate None trusts the "
        "critic anyway"
    )
    ranking = KNOWS | {"held_out/rank_correlation": 0.4}
    assert "never ranked held-out returns; the actor only imitated" in str(gated.verdict(state, ranking))
    opened = gated.heard(state, KNOWS, [].append)
    assert gated.verdict(opened, KNOWS) is None
    shut = gated.heard(opened, KNOWS | {"held_out/auc": 0.4}, [].append)
    word = "the critic no longer ranks held-out successes above failures; in the end the actor imitated"
    assert str(gated.verdict(shut, unsure)).startswith(word)
    assert gated.heard(shut, unsure, [].append).scalars["gate"] == shut.scalars["gate"] == -1
    assert float(gated.heard(shut, KNOWS, [].append).scalars["gate"]) == 1
    assert make().verdict(make().init(jax.random.key(0)), unsure) is None
    assert "only left the policy as it was" in final_word(unsure, 0.5, was_open=False, did="left the policy as it was")


def gated_run(folder: Path, held_out: float) -> RLTrainConfig:
    listening = ACRLPDConfig(discount=0.9, augment=False, flow_steps=2, policy_ema_decay=None, critic_ema_decay=None)
    config = small_run(folder, listening, held_out=HeldOutConfig(interval=20, rows=160, candidates=2))
    config = replace(config, critic_schedule=ConstantSchedule(lr=3e-3), num_train_steps=61, log_interval=1)
    return replace(config, agent=replace(listening, gate=0.3), data=replace(config.data, held_out=held_out))


def test_a_run_obeys_what_it_measures(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    config = gated_run(tmp_path, held_out=0.2)
    with compiled_once(tmp_path_factory.mktemp("programs")):
        assert train(config) == 0
    logged: dict[int, dict[str, float]] = {}
    for one in records(config.run_dir):
        logged.setdefault(one["step"], {}).update(one["values"])
    is_open, gates = False, {step: values["actor/gate"] for step, values in logged.items() if "actor/gate" in values}
    assert sorted(gates) == list(range(1, config.num_train_steps + 1))
    for step in range(config.num_train_steps):
        if any(name.startswith("held_out/") for name in logged.get(step, {})):
            is_open = stays_open(logged[step], 0.3, was_open=is_open)
        assert gates[step + 1] == float(is_open), step
    assert (gates[1], gates[config.num_train_steps]) == (0, 1)
    assert "the critic never" not in capsys.readouterr().err
    never = replace(config, exp_name="never", num_train_steps=20, agent=replace(config.agent, gate=1.0))
    with compiled_once(tmp_path_factory.mktemp("programs")):
        assert train(never) == 0
    assert "the critic never ranked held-out" in capsys.readouterr().err


def test_on_the_tabletop_every_actor_with_a_critic_waits_for_it() -> None:
    recipes = [config for name in list_configs() if (config := get_config(name)).env == get_config("bc_tabletop").env]
    gated = [config.name for config in recipes if getattr(config.agent, "gate", None)]
    assert gated == [config.name for config in recipes if hasattr(config.agent, "gate")]
    assert len(gated) == 7
    assert all(get_config(name).data.held_out for name in gated)


def test_a_gate_needs_episodes_to_measure_on() -> None:
    gated = replace(DEBUG.agent, gate=0.3)
    with pytest.raises(ConfigError, match=r"gate is 0\.3, and no episodes are held out .*\n.*--data\.held-out 0\.1"):
        replace(DEBUG, agent=gated)
    replace(DEBUG, agent=gated, data=replace(DEBUG.data, held_out=0.1))
