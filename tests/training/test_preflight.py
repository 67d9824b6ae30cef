"""A run is checked before it starts: all problems at once, each with its fix, and nothing on disk has changed."""

import json
import shutil
import warnings
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pirl.agents.bc import BC
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.build import build_agent, build_policy
from pirl.checkpoints.openpi import save_openpi
from pirl.cli import app
from pirl.config import EarlyStop, RLTrainConfig
from pirl.config_io import write_yaml
from pirl.data import check as data_check
from pirl.data.config import DataConfig
from pirl.data.normalize import NormStats, StatsOrigin, load_origin, save_norm_stats
from pirl.data.robots import get_robot
from pirl.data.writer import LeRobotWriter
from pirl.errors import ConfigError, DataError, PirlError, PirlWarning
from pirl.models import pi0
from pirl.models.config import MLPFlowConfig, get_preset
from pirl.models.params import flatten, nest
from pirl.names import CAMERAS
from pirl.parallel.sharding import make_mesh, sharded_shapes
from pirl.recipes import get_config
from pirl.rollout.config import EvalConfig
from pirl.training import preflight
from pirl.training.build import load_policy
from pirl.training.config import KeepBest
from small_runs import small_run

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
PLAIN = BCConfig(ema_decay=None, augment=False)
ALOHA = replace(
    get_config("bc_aloha_fold"),
    model=replace(get_preset("pi0_tiny"), action_dim=14, horizon=20, cameras=CAMERAS),
    data=DataConfig(robot="aloha", tokenizer="byte", outcome="sparse_success"),
    init_weights=None,
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIRL_HOME", "HF_LEROBOT_HOME", "OPENPI_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))


def checked(config: RLTrainConfig, **modes: bool) -> None:
    agent, mesh = build_agent(config), make_mesh(config.mesh.size)
    shapes = sharded_shapes(mesh, jax.eval_shape(agent.init, jax.random.key(0)))
    preflight.check(config, agent, mesh, shapes, **modes)


def refused(config: RLTrainConfig, **modes: bool) -> tuple[PirlError, ...]:
    with pytest.raises(PirlError) as found:
        checked(config, **modes)
    return getattr(found.value, "problems", (found.value,))


def aloha_stats(folder: Path, *, robot: str = "aloha", horizon: int = 20, dim: int = 14) -> None:
    numbers = np.ones(dim)
    stats = dict.fromkeys(("state", "actions"), NormStats(mean=numbers, std=numbers))
    save_norm_stats(folder, stats, origin=StatsOrigin(robot=robot, horizon=horizon))


def test_a_run_without_problems_passes(tmp_path: Path) -> None:
    checked(small_run(tmp_path, PLAIN))
    assert list(tmp_path.iterdir()) == []


def test_everything_is_said_at_once(tmp_path: Path) -> None:
    config = replace(
        ALOHA,
        data=replace(ALOHA.data, repo_ids=(str(tmp_path / "nowhere"),), assets_dir=str(tmp_path / "assets")),
        init_weights=str(tmp_path / "weights"),
        early_stop=EarlyStop(metric="val_reward"),
        checkpoint=replace(ALOHA.checkpoint, base_dir=str(tmp_path / "runs"), keep_best=KeepBest()),
    )
    problems = refused(config)
    said = "\n".join(map(str, problems))
    for part in (
        "no LeRobot dataset at",
        "no normalisation statistics at",
        f"pirl norm-stats {tmp_path}/nowhere --robot aloha --horizon 20 --out {tmp_path}/assets/nowhere",
        "there is nothing at",
        "unknown metric in early_stop.metric: 'val_reward'",
        "checkpoint.keep_best.metric is 'eval/success_rate', and the run does not evaluate",
    ):
        assert part in said
    assert len(problems) == 5
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_numbers_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_run(tmp_path / "runs", PLAIN, early_stop=EarlyStop(metric="policy/lose"))
    config = replace(config, checkpoint=replace(config.checkpoint, keep_best=KeepBest()))
    file = write_yaml(tmp_path / "run.yaml", config)
    for mode in ((), ("--dry-run",)):
        assert app.main(["train", str(file), *mode]) == 1
        said = capsys.readouterr().err
        assert "2 problems; nothing was started or changed" in said
        assert "1. unknown metric in early_stop.metric: 'policy/lose'" in said
        assert "did you mean: policy/loss" in said
        assert "2. checkpoint.keep_best.metric" in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("metric", ["policy/loss", "policy/learning_rate", "time/step_seconds"])
def test_metrics_that_a_run_logs_may_stop_it(metric: str, tmp_path: Path) -> None:
    checked(small_run(tmp_path, PLAIN, early_stop=EarlyStop(metric=metric)))


def test_settings_that_contradict_each_other_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as found:
        replace(ALOHA, batch_size=6, agent=replace(ALOHA.agent, accumulate=4), freeze="lora")
    said = str(found.value)
    assert "2 settings contradict each other" in said
    assert "1. freeze is 'lora', and the model has no adapters" in said
    assert "2. batch_size 6 cannot be split over 1 device(s) in 4 part(s)" in said


def test_no_dataset_is_named_by_its_flag() -> None:
    (problem,) = refused(ALOHA)
    assert "bc_aloha_fold has no dataset" in problem.message
    assert "--data-path DATASET" in problem.hint


def test_what_must_be_downloaded_is_told_beside_other_problems(tmp_path: Path) -> None:
    data = replace(ALOHA.data, repo_ids=("me/box",), assets_dir=str(tmp_path / "assets"))
    first, second, third = refused(replace(ALOHA, data=data, init_weights="gs://openpi-assets/checkpoints/pi0_base"))
    assert "dataset me/box is not on this machine; looked at me/box" in first.message
    assert "no normalisation statistics" in second.message
    assert "the weights gs://openpi-assets/checkpoints/pi0_base are not on this machine" in third.message


def test_weights_are_compared_by_their_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = replace(ALOHA.data, repo_ids=("synthetic",), robot="synthetic", cameras=())
    config = replace(ALOHA, data=data, init_weights=str(tmp_path / "weights"))
    leaves = flatten(pi0.param_shapes(config.model))
    fits = nest({path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves.items()})
    save_openpi(fits, tmp_path / "weights", norm_stats={})
    monkeypatch.setattr("pirl.checkpoints.weights.load_openpi", lambda *_, **__: pytest.fail("a value was read"))
    checked(config)
    wider = replace(config, model=replace(config.model, action_dim=32))
    (problem,) = refused(wider)
    assert "do not fit the model" in problem.message
    assert "action_dim differs" in problem.hint


def test_an_mlp_starts_from_the_weights_of_another_run(tmp_path: Path) -> None:
    data = replace(ALOHA.data, repo_ids=("synthetic",), robot="synthetic", cameras=(), tokenizer="none")
    model = MLPFlowConfig(state_dim=2, action_dim=2, horizon=3, hidden=(8, 8))
    config = replace(ALOHA, data=data, model=model, init_weights=str(tmp_path / "weights"))
    params = build_policy(config).init(jax.random.key(1))
    save_openpi(params, tmp_path / "weights", norm_stats={})
    checked(config)
    loaded = load_policy(config, make_mesh(1), jax.random.key(2))
    assert loaded is not None
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    (problem,) = refused(replace(config, model=replace(model, hidden=(8, 16))))
    assert "do not fit the model" in problem.message


def test_none_is_no_path() -> None:
    assert replace(ALOHA, init_weights="none").init_weights is None


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ({"robot": "aloha_sim"}, "was computed for robot 'aloha_sim', this run is of 'aloha'"),
        ({"horizon": 50}, "was computed for chunks of 50 actions, the model predicts 20"),
        ({"dim": 7}, "state has 7 dimensions"),
    ],
)
def test_statistics_of_something_else(made: dict[str, Any], problem: str, tmp_path: Path) -> None:
    aloha_stats(tmp_path / "mine", **made)
    data = replace(ALOHA.data, asset_id="mine", assets_dir=str(tmp_path), repo_ids=(str(tmp_path / "absent"),))
    problems = refused(replace(ALOHA, data=data))
    assert any(problem in found.message and "--horizon 20" in found.hint for found in problems)


def test_absolute_actions_hardly_depend_on_the_horizon(tmp_path: Path) -> None:
    aloha_stats(tmp_path, robot="aloha_sim", horizon=50)
    robot = get_robot("aloha_sim")
    assert not any(robot.delta_mask)
    (found,) = data_check.norm_stats_problems(ALOHA.data, robot, tmp_path, horizon=20, quantile=False)
    assert isinstance(found, PirlWarning)
    assert "for chunks of 50 actions, the model predicts 20" in str(found)


def test_datasets_are_opened_without_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and whether they go together."""

    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError("a frame was decoded")

    monkeypatch.setattr("pirl.data.video.read_frames", decode)
    other = Path(shutil.copytree(GOLDEN / "v21_video", tmp_path / "other"))
    info = json.loads((other / "meta/info.json").read_text())
    (other / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v9"}))
    names = (str(GOLDEN / "v30_video"), str(other), str(tmp_path / "absent"))
    config = replace(ALOHA, data=replace(ALOHA.data, repo_ids=names, asset_id="mine", assets_dir=str(tmp_path)))
    said = [problem.message for problem in refused(config)]
    assert any("codebase_version is 'v9'" in message for message in said)
    assert any("no LeRobot dataset at" in message for message in said)


def test_a_disk_that_cannot_hold_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place: SimpleNamespace(free=100))
    (problem,) = refused(small_run(tmp_path / "runs" / "new", PLAIN))
    assert "the checkpoints take up to 0.0 GB (3 steps)" in problem.message
    assert "--checkpoint.base-dir" in problem.hint


def test_checkpoints_that_are_there_already_need_no_more_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_run(tmp_path, PLAIN)
    agent = build_agent(config)
    shapes = jax.eval_shape(agent.init, jax.random.key(0))
    needed, _ = preflight.checkpoint_bytes(config, shapes)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place: SimpleNamespace(free=needed - 1000))
    assert len(list(preflight.disk_problems(config, shapes))) == 1
    folder = config.run_dir / "4" / "params"
    folder.mkdir(parents=True)
    (folder / "_METADATA").write_bytes(bytes(1000))
    assert not list(preflight.disk_problems(config, shapes))


def test_what_is_best_must_be_saved(tmp_path: Path) -> None:
    run = get_config("bc_tabletop")
    config = replace(
        run,
        evaluation=EvalConfig(interval=700),
        num_train_steps=2000,
        checkpoint=replace(run.checkpoint, keep_best=KeepBest(), save_interval=500),
        data=replace(run.data, repo_ids=("synthetic",)),
    )
    agent = build_agent(config)
    shapes = jax.eval_shape(agent.init, jax.random.key(0))
    (problem,) = preflight.metric_problems(config, agent, shapes)
    assert "both evaluated (every 700) and saved (every 500)" in str(problem)


def test_an_agent_with_batches_of_its_own_is_not_judged(tmp_path: Path) -> None:
    class Own(BC):
        def update(self, *_: Any) -> Any:
            raise KeyError("mine")

    config = small_run(tmp_path, PLAIN, early_stop=EarlyStop(metric="mine/loss"))
    agent = build_agent(config)
    assert isinstance(agent, BC)
    own = Own(**{field.name: getattr(agent, field.name) for field in fields(agent)})
    assert preflight.metric_names(config, own, jax.eval_shape(own.init, jax.random.key(0))) is None


def test_norm_stats_remember_what_they_were_computed_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = str(GOLDEN / "v30_video")
    words = ["norm-stats", dataset, "--robot", "aloha", "--horizon", "7", "--out", str(tmp_path / "mine")]
    assert app.main(words) == 0
    assert load_origin(tmp_path / "mine") == StatsOrigin(robot="aloha", horizon=7, datasets=(dataset,))
    monkeypatch.setattr("pirl.data.stats.compute_norm_stats", lambda *_: pytest.fail("computed before refusing"))
    assert app.main(words) == 1
    assert "--overwrite replaces the statistics" in capsys.readouterr().err


def short_episodes(folder: Path, *, steps: int, reward: float, spread: float) -> Path:
    """Two episodes of a robot with two joints, with statistics that call `spread` one standard deviation."""
    features: dict[str, Any] = {name: {"dtype": "float32", "shape": [2]} for name in ("observation.state", "action")}
    features["next.reward"] = {"dtype": "float32", "shape": [1]}
    actions = np.random.default_rng(0).normal(size=(steps, 2)).astype(np.float32)
    with LeRobotWriter(folder / "two", fps=10, features=features) as writer:
        for _ in range(2):
            for step in range(steps):
                pay = {"next.reward": np.float32(reward * (step == steps - 1))}
                writer.add_frame({"observation.state": np.zeros(2, np.float32), "action": actions[step]} | pay)
            writer.save_episode(task="reach")
    numbers = NormStats(mean=np.zeros(2), std=np.full(2, spread))
    origin = StatsOrigin(robot="synthetic", horizon=3)
    save_norm_stats(folder / "stats", {"state": numbers, "actions": numbers}, origin=origin)
    return folder / "two"


def test_settings_that_do_not_fit_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards are refused; a short-sighted discount and a clip that hides actions are said. `pirl plan` says them too,
    and nobody says them of an algorithm without values.
    """
    dataset = short_episodes(tmp_path, steps=200, reward=2.0, spread=0.5)
    names = dict(repo_ids=(str(dataset),), assets_dir=str(tmp_path), asset_id="stats", outcome="auto")
    run = small_run(tmp_path / "runs", ACRLPDConfig(discount=0.98))
    run = replace(run, data=replace(run.data, **names))
    with pytest.warns(PirlWarning) as said:
        (problem,) = refused(run)
    assert f"{dataset}/data/chunk-000/file-000.parquet: episode 0: the reward of frame 199 is 2" in problem.message
    assert problem.hint == "--agent.reward-low 0 --agent.reward-high 2"
    words = "\n".join(str(one.message) for one in said)
    assert "discount 0.98: a success is worth 0.02 at the start of a median episode of 200 steps" in words
    assert "of the normalised actions are beyond ±1.5" in words
    right = replace(
        run, agent=ACRLPDConfig(discount=0.995, reward_high=2.0), critic=replace(run.critic, action_clip=9.0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked(right)
        checked(replace(run, agent=PLAIN))
    assert [type(one).__name__ for one in preflight.misfits(run)] == ["DataError", "PirlWarning", "PirlWarning"]
    assert list(preflight.misfits(right)) == []
    assert list(preflight.misfits(replace(run, data=replace(run.data, repo_ids=("absent/one",))))) == []
    file = write_yaml(tmp_path / "run.yaml", run)
    assert app.main(["train", str(file), "--dry-run"]) == 1
    assert "--agent.reward-high 2" in capsys.readouterr().err


def test_statistics_of_a_robot_of_ones_own_are_computed_by_its_name_or_in_python(tmp_path: Path) -> None:
    own = replace(get_robot("aloha"), name="mine")
    for named, command in (("robots:MINE", "--robot robots:MINE"), ("aloha", "in Python: save_norm_stats(")):
        data = replace(ALOHA.data, robot=named)
        (found,) = data_check.norm_stats_problems(data, own, tmp_path / "none", horizon=20, quantile=False)
        assert isinstance(found, DataError)
        assert command in found.hint
