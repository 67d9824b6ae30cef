"""Held-out measurements: the numbers they claim to be, the same every time, in training and afterwards."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.agents.agent import TrainState
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.build import build_agent
from pirl.checkpoints.ownership import foreign_in_run
from pirl.config import EarlyStop, RLTrainConfig
from pirl.data.held_out import rows_of
from pirl.errors import CheckpointError, ConfigError
from pirl.models import flow
from pirl.models.critic import CriticInputs
from pirl.models.observation import Observation
from pirl.parallel.sharding import make_mesh
from pirl.training.build import build_acting, build_transform
from pirl.training.config import HeldOutConfig, KeepBest
from pirl.training.eval_fn import Snapshot
from pirl.training.held_out import FLOW_DRAWS, HeldOut
from pirl.training.held_out_metrics import masked_means
from pirl.training.loop import train
from pirl.training.measured import FILE, Measured, metric_names
from small_runs import compiled_once, records, small_run, steps_of


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory.mktemp("programs")):
        yield


def apart(folder: Path, agent: BCConfig | ACRLPDConfig, **changes: Any) -> RLTrainConfig:
    config = small_run(folder, agent, held_out=HeldOutConfig(interval=4, rows=48, candidates=3), **changes)
    return replace(config, data=replace(config.data, held_out=0.03))


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HeldOut, TrainState]]:
    agent_config = ACRLPDConfig(discount=0.9, augment=False, flow_steps=2, policy_ema_decay=0.9)
    config = apart(tmp_path_factory.mktemp("runs"), agent_config)
    agent, transform = build_agent(config), build_transform(config)
    with build_acting(config, agent, transform, make_mesh()) as (_, evaluations):
        (held_out,) = evaluations.parts
        assert isinstance(held_out, HeldOut)
        yield held_out, agent.init(jax.random.key(1))


@pytest.fixture(scope="module")
def measured(critic: tuple[HeldOut, TrainState]) -> Measured:
    held_out, state = critic
    return held_out.measure(state)


def test_rows_are_spread_over_every_episode() -> None:
    lengths, outcomes = [100, 5, 40, 80], [True, False, None, True]
    episode, step = rows_of(lengths, outcomes, 40)
    assert [np.sum(episode == i) for i in range(4)] == [10, 5, 10, 10]
    assert step[episode == 0].tolist() == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert step[episode == 1].tolist() == [0, 1, 2, 3, 4]


def test_where_rows_are_few_outcomes_take_turns() -> None:
    episode, _ = rows_of([50] * 30, [True] * 25 + [False] * 5, 48)
    used = np.unique(episode)
    assert used.tolist() == [0, 1, 2, 25, 26, 27]
    assert np.bincount(episode)[used].tolist() == [8] * 6


def test_both_outcomes_are_measured(measured: Measured) -> None:
    assert set(measured.outcome.tolist()) == {0, 1}
    assert len(np.unique(measured.episode)) == 6


def test_each_number_is_what_it_says(critic: tuple[HeldOut, TrainState], measured: Measured) -> None:
    """Row by row without the program, with the formulas written out."""
    held_out, state = critic
    agent: Any = held_out._agent
    size, table = held_out._loader.batch_size, held_out._resident.table
    rows = (table.starts[held_out._episode] + measured.step)[:size]
    batch: Any = held_out._loader.batch_at(held_out._resident, rows)
    keys = jnp.stack([jax.random.fold_in(held_out._key, row) for row in range(size)])
    here, there = (Observation.from_dict(batch[name]) for name in ("observations", "next_observations"))

    acting = jax.vmap(lambda key: jax.random.fold_in(key, 0))(keys)
    chunk = np.asarray(agent.act(state, here, acting))
    np.testing.assert_allclose(measured.error[:size], np.abs(chunk - batch["actions"])[..., :2], rtol=1e-4, atol=1e-5)

    sampling = jax.vmap(lambda key: jax.random.fold_in(key, 2))(keys)
    noise = jnp.stack([jax.random.normal(key, (3, 3, 2)) for key in sampling])

    def candidates(observation: Observation) -> np.ndarray:
        params = state.ema["policy"]
        return np.asarray(
            flow.sample(
                agent.policy, params, agent.policy.encode(params, observation), noise, num_steps=agent.flow_steps
            )
        )

    def q(observation: Observation, chunks: Any) -> np.ndarray:
        critic = state.ema["critic"]
        inputs = CriticInputs.of(agent.policy.encode(state.ema["policy"], observation))
        return np.asarray(agent.values(critic, agent.critic.embed(critic, inputs), jnp.asarray(chunks)))

    own, of_data = q(here, candidates(here)), q(here, batch["critic_actions"][:, None])[:, :, 0]
    later = q(there, candidates(there)).mean(0).max(1)
    target = [
        batch["reward_sum"][i] + (0 if batch["next_terminal"][i] else 0.9 ** int(batch["length"][i]) * later[i])
        for i in range(size)
    ]
    errors = np.array(
        [
            [
                np.mean([np.abs(one[t] - batch["actions"][i, t]).mean() for t in np.flatnonzero(batch["valid"][i])])
                for one in row
            ]
            for i, row in enumerate(candidates(here))
        ]
    )
    expected = {
        "q": of_data.mean(0),
        "q_spread": of_data.std(0),
        "candidate_mean": own.mean((0, 2)),
        "candidate_best": own.mean(0).max(1),
        "candidate_error": errors.mean(1),
        "chosen_error": errors[np.arange(size), own.mean(0).argmax(1)],
        "td_error": of_data.mean(0) - target,
        "learns": np.asarray(batch["sequence_mask"]),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(measured.numbers[name][:size], values, rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_flow_loss_is_that_of_fixed_draws(critic: tuple[HeldOut, TrainState], measured: Measured) -> None:
    held_out, state = critic
    agent: Any = held_out._agent
    size, table = held_out._loader.batch_size, held_out._resident.table
    batch: Any = held_out._loader.batch_at(held_out._resident, (table.starts[held_out._episode] + measured.step)[:size])
    keys = [jax.random.fold_in(held_out._key, row) for row in range(3)]
    here = Observation.from_dict(batch["observations"])
    for i in range(3):
        noise_key, time_key = jax.random.split(jax.random.fold_in(keys[i], 1))
        draws = flow.draw(noise_key, time_key, batch["actions"][i : i + 1], FLOW_DRAWS)
        observation = jax.tree.map(itemgetter(slice(i, i + 1)), here)
        context = agent.policy.encode(state.ema["policy"], observation)
        t, action = draws.time[0][:, None, None], batch["actions"][i]
        v = agent.policy.velocity(
            state.ema["policy"], context, t[None] * draws.noise + (1 - t[None]) * action, draws.time
        )
        error = np.square(np.asarray(v)[0] - (np.asarray(draws.noise)[0] - action)).mean((0, 2))
        valid = np.asarray(batch["valid"])[i]
        assert measured.numbers["flow_loss"][i] == pytest.approx((error * valid).sum() / valid.sum(), rel=1e-3)


def test_robot_units_undo_the_normalisation(critic: tuple[HeldOut, TrainState], measured: Measured) -> None:
    stats = critic[0]._transform.norm_stats
    assert stats is not None
    np.testing.assert_allclose(measured.robot_error, measured.error * stats["actions"].std[:2], rtol=1e-3, atol=1e-4)


def test_metrics_split_by_outcome(measured: Measured) -> None:
    metrics = measured.metrics()
    failed = measured.outcome == 0
    assert metrics["held_out/flow_loss"] == pytest.approx(measured.numbers["flow_loss"][~failed].mean())
    assert metrics["held_out/flow_loss_failures"] == pytest.approx(measured.numbers["flow_loss"][failed].mean())
    expected = masked_means(measured.error[failed], measured.valid[failed])[0]
    assert metrics["held_out/action_error_failures"] == pytest.approx(expected)
    wanted = {
        "auc",
        "rank_correlation",
        "calibration_gap",
        "td_error",
        "q_spread",
        "candidate_gain",
        "best_of_n_closer",
    }
    assert {f"held_out/{name}" for name in wanted} <= set(metrics)
    assert set(metrics) == metric_names(values=True)
    json.dumps(measured.to_json(), allow_nan=False)


def test_again_is_the_same_to_the_bit_with_one_program(critic: tuple[HeldOut, TrainState], measured: Measured) -> None:
    held_out, state = critic
    again = held_out.measure(state)
    assert again.to_json() == measured.to_json()
    assert held_out.programs == 1


def test_a_better_critic_scores_better(critic: tuple[HeldOut, TrainState], measured: Measured) -> None:
    """With the returns themselves as values every ranking is perfect and nothing is off."""
    perfect = replace(measured, numbers={**measured.numbers, "q": measured.returns})
    metrics = perfect.metrics()
    assert metrics["held_out/rank_correlation"] == pytest.approx(1)
    assert metrics["held_out/auc"] == pytest.approx(1)
    assert metrics["held_out/calibration_gap"] == pytest.approx(0)
    worst = replace(measured, numbers={**measured.numbers, "q": -measured.returns}).metrics()
    assert worst["held_out/auc"] == pytest.approx(0)


class Recorder:
    """An evaluation of the user's own."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, snapshot: Snapshot) -> Mapping[str, float]:
        self.steps.append(snapshot.step)
        chunk = snapshot.chunk({"observation.state": np.zeros(2, np.float32)})
        return {"reach": float(np.abs(chunk).max()), "own/steps": snapshot.step, "unknown": float("nan")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RLTrainConfig, Recorder]:
    config = apart(tmp_path_factory.mktemp("runs"), BCConfig(), exp_name="whole")
    keep = KeepBest(metric="held_out/action_error", mode="min")
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=4, keep_last=1, keep_best=keep))
    own = Recorder()
    assert train(config, eval_fn=own) == 0
    return config, own


def test_a_run_logs_them_at_their_interval_and_at_its_end(trained: tuple[RLTrainConfig, Recorder]) -> None:
    config, own = trained
    found = {one["step"]: one["values"] for one in records(config.run_dir) if "held_out/flow_loss" in one["values"]}
    assert list(found) == own.steps == [0, 4, 8, 11]
    assert found[8]["own/steps"] == 8
    assert not any("auc" in name or "td_error" in name for name in found[8])  # behaviour cloning has no values
    assert found[8]["eval_fn/reach"] > 0
    assert "eval_fn/unknown" not in found[8]
    details = json.loads((config.run_dir / FILE).read_text())
    assert details["step"] == 11
    assert details["metrics"] == pytest.approx({k: v for k, v in found[11].items() if k.startswith("held_out/")})


def test_the_best_by_a_held_out_metric_is_kept(trained: tuple[RLTrainConfig, Recorder]) -> None:
    config, _ = trained
    values = {one["step"]: one["values"].get("held_out/action_error") for one in records(config.run_dir)}
    saved = {step: value for step, value in values.items() if step in (4, 8, 11) and value is not None}
    best = min(saved, key=lambda step: saved[step])
    assert steps_of(config) == sorted({best, 11})


def test_metrics_that_a_run_never_logs_are_refused(tmp_path: Path) -> None:
    config = apart(tmp_path, BCConfig(), early_stop=EarlyStop(metric="held_out/auc"))
    with pytest.raises(ConfigError, match="held_out/auc"):  # behaviour cloning has no critic
        train(config)
    with pytest.raises(ConfigError, match="held_out/flow_loss"):  # and this run holds nothing out
        train(replace(small_run(tmp_path, BCConfig()), early_stop=EarlyStop(metric="held_out/flow_loss")))


def test_early_stopping_reads_them(tmp_path: Path) -> None:
    stop = EarlyStop(metric="held_out/action_error", mode="min", patience=1, min_delta=100.0)
    config = apart(tmp_path, BCConfig(), early_stop=stop)
    assert train(config) == 0
    assert steps_of(config)[-1] == 8


def test_a_resumed_run_measures_what_the_whole_one_did(trained: tuple[RLTrainConfig, Recorder], tmp_path: Path) -> None:
    config, _ = trained
    again = replace(config, checkpoint=replace(config.checkpoint, base_dir=str(tmp_path)))
    assert train(replace(again, num_train_steps=5), eval_fn=Recorder()) == 0
    assert train(again, resume=True, eval_fn=Recorder()) == 0
    last = [one for one in records(again.run_dir) if one["step"] == 11]
    assert last == [one for one in records(config.run_dir) if one["step"] == 11]
    assert (again.run_dir / FILE).read_text() == (config.run_dir / FILE).read_text()


def test_what_it_writes_is_the_run_s_and_goes_with_it(trained: tuple[RLTrainConfig, Recorder]) -> None:
    config, _ = trained
    assert (config.run_dir / FILE).is_file()
    assert not foreign_in_run(config.run_dir)


def test_another_split_is_another_dataset(trained: tuple[RLTrainConfig, Recorder]) -> None:
    config, _ = trained
    other = replace(config, data=replace(config.data, held_out=0.1), num_train_steps=12)
    with pytest.raises(CheckpointError, match=r"data\.held_out"):
        train(other, resume=True)


def test_a_configuration_runs_code_of_trusted_modules_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells_on_import.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = apart(tmp_path, BCConfig(), eval_fn="tells_on_import:score")
    with pytest.raises(ConfigError, match="names code outside pirl: tells_on_import") as refused:
        train(config)
    assert "--trust tells_on_import" in str(refused.value.hint)
    monkeypatch.setenv("PIRL_TRUST", "tells_on_import")
    with pytest.raises(AssertionError, match="imported"):
        train(config)
    assert not config.run_dir.exists()


@pytest.mark.parametrize("named", ["score", "my module:score", ":score", "m:"])
def test_names_of_functions_have_two_parts(named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval_fn"):
        apart(tmp_path, BCConfig(), eval_fn=named)


@pytest.mark.parametrize("found", [0.5, {"a": [1.0, 2.0]}, {1: 2.0}, {"a": "much"}])
def test_what_a_function_returns_is_checked(found: Any) -> None:
    from pirl.training.eval_fn import checked

    with pytest.raises(ConfigError, match="eval_fn mine returned"):
        checked(found, "mine")


def test_a_policy_that_is_told_something_acts_on_it_and_values_read_the_instruction() -> None:
    """Batches hold bare instructions; what acts sees what it will be told."""
    acted: list[Any] = []

    class Told:
        def act(self, state: Any, observation: Observation, keys: Any) -> Any:
            acted.append(observation.tokenized_prompt)
            return jnp.zeros((2, 3, 2))

    prompts = jnp.arange(2 * 2 * 4).reshape(2, 2, 4)
    bare = {"state": jnp.zeros((2, 2)), "tokenized_prompt": -prompts[:, 0], "tokenized_prompt_mask": prompts[:, 0] >= 0}
    batch = {"observations": bare, "actions": jnp.zeros((2, 3, 2)), "valid": jnp.ones((2, 3))}
    told = {"tokenized_prompt": prompts, "tokenized_prompt_mask": prompts >= 0}
    held = object.__new__(HeldOut)
    held.__dict__ |= {
        "_agent": Told(),
        "_transform": SimpleNamespace(robot=SimpleNamespace(action_dim=2)),
    }
    keys = jax.random.split(jax.random.key(0), 2)
    for given in (batch | {"suffixed_prompts": told}, batch):
        held._measure(TrainState(step=0, params={}), given, keys)
    np.testing.assert_array_equal(acted[0], prompts[:, 0])
    np.testing.assert_array_equal(acted[1], -prompts[:, 0])
