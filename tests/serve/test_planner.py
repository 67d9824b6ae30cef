"""Rows as OpenPI's data pipeline makes them, programs for every batch size, and weights that change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acting_runs import save_run, walking
from golden_data import FAMILIES
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.build import build_agent
from pirl.data.create import create_tokenizer
from pirl.data.robots import ROBOTS
from pirl.data.writer import LeRobotWriter
from pirl.errors import ConfigError, DataError
from pirl.models import flow
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.serve.config import ServeConfig
from pirl.serve.load import loader
from pirl.serve.planner import LONGEST_PROMPT, PlannedChunk, Planner, example
from pirl.serve.shadow import Shadow, shadow
from pirl.training.acting import open_checkpoint
from serving_runs import SEEN, load
from small_pi0 import SMALL


def row_of(planner: Planner, number: tuple[int, int]):
    place = np.array([0.1 * number[0], -0.1 * number[1]], np.float32)
    return planner.row(SEEN | {"observation/state": place}, number=number)


def test_a_rows_plan_depends_on_no_other_row(planner: Planner) -> None:
    rows = [row_of(planner, (i, i + 1)) for i in range(4)]
    alone = [planner.plan([row])[0] for row in rows]
    for chosen in ([0, 1], [1, 0], [3, 2, 1], [2, 0, 3, 1]):
        for place, plan in zip(chosen, planner.plan([rows[i] for i in chosen]), strict=True):
            assert isinstance(plan, PlannedChunk)
            np.testing.assert_allclose(plan.chunk, alone[place].chunk, rtol=0, atol=1e-5)
            assert plan.value == pytest.approx(alone[place].value, abs=1e-5)


def test_the_seed_changes_the_noise_and_nothing_else_does(run_folder: Path) -> None:
    settings = {"max_batch": 1, "real_time": False}
    first, again, other = (load(run_folder / "5", settings=settings | {"seed": seed})(None) for seed in (0, 0, 1))
    plans = [each.plan([row_of(each, (0, 0))])[0].chunk for each in (first, again, other)]
    np.testing.assert_array_equal(plans[0], plans[1])
    assert np.abs(plans[0] - plans[2]).max() > 1e-3


def test_one_broken_row_spares_its_neighbours(planner: Planner) -> None:
    rows = [row_of(planner, (0, 0)), replace(row_of(planner, (1, 0)), state=np.array([np.nan, 0.0]))]
    good, bad = planner.plan(rows)
    assert isinstance(good, PlannedChunk)
    assert isinstance(bad, DataError)


def test_programs_are_shared_by_checkpoints_of_one_run_only(planner: Planner, run_folder: Path) -> None:
    assert load(run_folder / "9", best_of=3)(planner)._programs is planner._programs
    assert load(run_folder / "9", best_of=2, settings={"max_batch": 1})(planner)._programs is not planner._programs


@pytest.mark.parametrize("name", ["aloha", "libero", "droid", "synthetic"])
def test_every_robot_has_an_example(name: str) -> None:
    robot = ROBOTS[name]
    seen = example(robot)
    assert robot.find_state(seen).shape == (robot.state_dim,)
    assert set(robot.find_cameras(seen)) == set(robot.cameras)
    assert robot.find_prompt(seen) == ""


def test_a_policy_conditioned_by_text_is_given_the_text(planner: Planner) -> None:
    def prompt(instruction: str, *suffixes: str) -> np.ndarray:
        reads = {"tokenizer": create_tokenizer("byte"), "token_len": 40}
        transform = replace(planner.transform, suffixes=suffixes, **reads)
        reading = object.__new__(Planner)
        reading.__dict__ |= planner.__dict__ | {"transform": transform}
        return reading.row(SEEN | {"prompt": instruction}, number=(0, 0)).inputs["tokenized_prompt"]

    np.testing.assert_array_equal(prompt("go right", ", good", ", bad"), prompt("go right, good"))


def test_long_instructions_are_refused(planner: Planner) -> None:
    reading = object.__new__(Planner)
    reading.__dict__ |= planner.__dict__ | {"transform": replace(planner.transform, tokenizer=create_tokenizer("byte"))}
    with pytest.raises(DataError, match="characters"):
        reading.row(SEEN | {"prompt": "x" * (LONGEST_PROMPT + 1)}, number=(0, 0))


def test_batch_sizes_and_settings() -> None:
    assert ServeConfig(max_batch=1).batch_sizes == (1,)
    assert ServeConfig(max_batch=6).batch_sizes == (1, 2, 4, 6)
    assert ServeConfig(max_batch=8).batch_sizes == (1, 2, 4, 8)
    assert ServeConfig().is_local
    assert "sesame" not in repr(ServeConfig(api_key="sesame"))
    for wrong in (
        {"max_batch": 0},
        {"port": 70_000},
        {"api_key": " "},
        {"max_rate": 0.0},
        {"tls_key": Path("key.pem")},
    ):
        with pytest.raises(ConfigError):
            ServeConfig(**wrong)


@pytest.fixture
def recorded(tmp_path: Path, planner: Planner) -> Path:
    """Two episodes in which the policy itself acted, and moved by 0.5 more in the second dimension."""
    features = {name: {"dtype": "float32", "shape": [2], "names": None} for name in ("observation.state", "action")}
    states = np.linspace(-0.5, 0.5, 14, dtype=np.float32).reshape(7, 2)
    with LeRobotWriter(tmp_path / "walks", fps=5, features=features) as writer:
        for episode in range(2):
            actions = []
            for step in range(0, 7, 3):
                row = planner.row({"observation/state": states[step], "prompt": "go"}, number=(episode, step))
                actions.extend(planner.plan([row])[0].chunk + np.array([0.0, 0.5]))
            columns = {"observation.state": states, "action": np.array(actions, np.float32)[:7]}
            writer.add_episode(columns, task="go")
    return tmp_path / "walks"


def test_candidates_share_one_encoding(tmp_path: Path) -> None:
    """Plain and guided, the program of best of 8 does eight times what follows the prefix, and the prefix once."""
    model = replace(SMALL, cameras=(), action_dim=2, vocab_size=512, max_token_len=64, horizon=4)
    config = walking(tmp_path, ACRLPDConfig(actor="best_of_n", num_action_samples=2, augment=False))
    config = replace(config, model=model, data=replace(config.data, tokenizer="byte"), exp_name="shared")
    acting = open_checkpoint(save_run(config, {5: 0.5}))
    agent = build_agent(acting.found.config)
    plans = {}
    for count in (1, 8):
        planner = load(acting.found.folder, best_of=count, settings={"max_batch": 1})(None)
        plans[count] = [operations(program) for program in planner._programs.values()]
        row = planner.row(SEEN, number=(0, 0))
    inputs = jax.tree.map(lambda leaf: leaf[None], dict(row.inputs))
    encode = jax.jit(lambda state, inputs: agent.policy.encode(state.policy, Observation.from_dict(inputs)))
    prefix = operations(encode.lower(acting.state, inputs).compile())
    for one, eight in zip(plans[1], plans[8], strict=True):
        assert one > prefix
        assert eight < 8 * one - 6 * prefix, "the candidates are encoded apart"


def operations(program: Any) -> float:
    """Of a compiled program, by XLA's own count."""
    return float(program.cost_analysis()["flops"])


def test_shadow_mode_measures_the_distance_to_what_was_done(planner: Planner, recorded: Path) -> None:
    found = shadow(planner, recorded, stride=3)
    assert (found.episodes, found.chunks) == (2, 6)
    np.testing.assert_allclose(found.error, [[0.0, 0.5]] * 3, atol=1e-5)
    one = shadow(planner, recorded, episodes=1, stride=7)
    assert (one.episodes, one.chunks) == (1, 1)
    assert (one.hold[0] == 0).all()
    assert (one.hold[1:] > 0).all()


def test_steps_beyond_the_longest_episode_are_null_in_json() -> None:
    found = Shadow(error=np.array([[0.5], [np.nan]]), hold=np.ones((2, 1)), spread=np.ones(1), chunks=1, episodes=1)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["error"] == [[0.5], [None]]


def test_another_robots_dataset_is_refused(planner: Planner) -> None:
    golden = Path(__file__).parents[1] / "golden" / "lerobot" / "v30_video"
    with pytest.raises(DataError):
        shadow(planner, golden)


def test_weights_of_openpi_are_served_with_a_recipe(tmp_path: Path) -> None:
    """OpenPI's checkpoint and statistics, LIBERO's observation: the model's chunk, unnormalised by hand."""
    family = FAMILIES["pi0_asym"]
    base = walking(tmp_path, BCConfig(), env=None)
    data = replace(base.data, robot="libero", cameras=None, tokenizer="byte", asset_id="fixture_robot")
    recipe = replace(base, model=family.config, data=data, rollout=replace(base.rollout, flow_steps=4))
    planner = loader(str(family.step_dir), ServeConfig(max_batch=1), recipe=recipe)(None)
    assert planner.name == family.step_dir.name
    rng = np.random.default_rng(0)
    seen = {f"observation/{name}": rng.integers(0, 256, (48, 64, 3), np.uint8) for name in ("image", "wrist_image")}
    row = planner.row(seen | {"observation/state": rng.normal(size=8), "prompt": "open the drawer"}, number=(3, 5))
    (plan,) = planner.plan([row])
    assert isinstance(plan, PlannedChunk)

    model, key = Pi0(family.config), jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 3), 5)
    observation = Observation.from_dict(jax.tree.map(lambda x: x[None], dict(row.inputs)))
    noise = jax.random.normal(key, (1, 1, family.config.horizon, family.config.action_dim))

    @jax.jit
    def sampled(params: Any) -> jax.Array:
        context = model.encode(params, observation)
        return flow.euler(lambda x, t: model.velocity(params, context, x, t), noise, 4)[0, 0, :, :7]

    chunk = sampled(jax.tree.map(jnp.asarray, family.params))
    stats = json.loads((family.step_dir / "assets/fixture_robot/norm_stats.json").read_text())["norm_stats"]["actions"]
    expected = np.asarray(chunk) * (np.array(stats["std"]) + 1e-6) + np.array(stats["mean"])
    np.testing.assert_allclose(plan.chunk, expected, rtol=0, atol=1e-4)


def test_a_policy_trained_with_given_steps_is_given_them(tmp_path: Path) -> None:
    """As many as it was trained with; the chunk then begins with them. Where none are frozen, nothing changes."""
    model = replace(SMALL, cameras=(), action_dim=2, horizon=4, vocab_size=512)
    config = walking(tmp_path, BCConfig())
    data = replace(config.data, tokenizer="byte")
    config = replace(config, model=model, data=data, agent=BCConfig(real_time_delay=2), exp_name="given")
    run = save_run(config, {5: 0.5})
    planner = load(run, settings={"max_batch": 1})(None)
    before = np.array([[0.3, -0.1], [0.2, 0.4], [0.5, 0.6]], np.float32)

    def chunk(**more: Any) -> np.ndarray:
        (plan,) = planner.plan([planner.row(SEEN, number=(0, 0), **more)])
        assert isinstance(plan, PlannedChunk)
        return plan.chunk

    plain, late, later = chunk(), chunk(before=before, delay=1), chunk(before=before, delay=3)
    np.testing.assert_allclose(chunk(before=before, delay=0), plain, atol=1e-5)
    np.testing.assert_allclose(late[:1], before[:1], atol=1e-5)
    np.testing.assert_allclose(later[:2], before[:2], atol=1e-5)
    assert np.abs(later[2] - before[2]).max() > 1e-3
    assert np.abs(late[1:] - plain[1:]).max() > 1e-5  # the others heed what is given
