"""`pirl eval`: which checkpoint is meant, that it acts as it was trained, and that results are repeated and kept."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acting_runs import ENV, STATS, fresh_state, save_run, walking
from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
from pirl.build import build_agent
from pirl.checkpoints.run import Checkpoints
from pirl.cli import app
from pirl.cli.eval import _show
from pirl.config_io import write_yaml
from pirl.data.normalize import save_norm_stats
from pirl.errors import CheckpointError, ConfigError
from pirl.models.observation import Observation
from pirl.records import Context
from pirl.rollout.contexts import fixed_contexts
from pirl.rollout.evaluate import Evaluation, Trial, evaluate
from pirl.rollout.pool import LocalPool
from pirl.training.acting import find_checkpoint, open_checkpoint
from small_runs import assert_same_bits, compiled_once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs, made once: nothing of what is tested changes them."""
    folder = tmp_path_factory.mktemp("runs")
    with compiled_once(tmp_path_factory.mktemp("programs")):
        save_run(walking(folder, BCConfig()), {5: 0.25, 10: 0.75, 15: 0.75, 20: 0.5})
        save_run(walking(folder, ACRLPDConfig()), {5: 0.5})
        yield folder / "checkpoints"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No statistics, datasets or earlier results beside the checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def result_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert app.main(["eval", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    capsys.readouterr()
    assert app.main(["eval", *words]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_the_same_command_gives_the_same_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder / "walk_bc/run"), "--episodes", "12", "--out", "out", "--video", "1"]
    found = result_of(capsys, *words)
    first = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert len(first) == 4
    assert {"eval.json", "filmstrip.png"} < set(first)
    assert json.loads(first["eval.json"]) == found
    assert result_of(capsys, *words) == found
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == first
    # It is what evaluating the saved weights themselves gives.
    acting = open_checkpoint(folder / "walk_bc/run/20")
    assert_same_bits(acting.state.params, {"policy": fresh_state(acting.found.config, 20).policy})
    with LocalPool(ENV, 4) as pool:
        direct = evaluate(pool, acting.use(0), fixed_contexts(pool.info, 12, "test"))
    assert found["result"] == direct.to_json()
    assert 0 < found["result"]["success"]["successes"] < 12
    assert found["evaluation"]["env"]["type"] == "Gym"
    assert found["evaluation"]["execute"] == 2
    names = {path.name for path in Path("out").glob("*.mp4")}
    for kind in ("success", "failure"):
        number = next(i for i, one in enumerate(found["result"]["episodes"]) if one["success"] == (kind == "success"))
        assert f"{kind}-{number:04d}.mp4" in names
        with av.open(f"out/{kind}-{number:04d}.mp4") as video:
            steps = found["result"]["episodes"][number]["length"]
            assert sum(1 for _ in video.decode(video=0)) == steps + 1 + 5


def test_what_is_asked_for_changes_the_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = str(folder / "walk_bc/run/20")
    base = result_of(capsys, step, "--episodes", "8", "--out", "a")
    contexts = [(one["task"], one["init"]) for one in base["result"]["episodes"]]
    for i, words in enumerate(
        (["--seed", "1"], ["--split", "validation"], ["--execute", "1"], ["--env.max-steps", "3"])
    ):
        other = result_of(capsys, step, "--episodes", "8", "--out", f"b{i}", *words)
        assert other["evaluation"] != base["evaluation"]
        assert other["result"]["episodes"] != base["result"]["episodes"]
        found = [(one["task"], one["init"]) for one in other["result"]["episodes"]]
        assert (found == contexts) == (words[0] != "--split")
        assert words[0] != "--env.max-steps" or max(one["length"] for one in other["result"]["episodes"]) == 3
    # How many environments there are, and where, does not.
    same = result_of(capsys, step, "--episodes", "8", "--out", "c", "--num-envs", "3")
    assert same["result"] == base["result"]


def test_the_table_tells_rates_intervals_and_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["eval", str(folder / "walk_bc/run"), "--best", "--episodes", "10", "--out", "out"]) == 0
    shown = capsys.readouterr()
    stored = json.loads(Path("out/eval.json").read_text())
    assert stored["evaluation"]["checkpoint"] == str(folder / "walk_bc/run/15")
    rate = stored["result"]["success"]
    for part in ("go right", f"({rate['successes']}/10)", f"{rate['low']:.3f} to {rate['high']:.3f}", "out/eval.json"):
        assert part in shown.out
    assert "10/10 episodes (100%)" in shown.err


def test_names_with_brackets_are_names(capsys: pytest.CaptureFixture[str]) -> None:
    """As markup, `[/red]` in a task ended the command after all of its simulation."""
    context = Context("put [/red] into [bold]the box[/bold] :smile:", 0)
    evaluation = Evaluation(trials=[Trial(context=context, success=True, reward=1.0, length=3)])
    asked = {"checkpoint": "runs/[/x]/5", "episodes": 1, "split": "test", "seed": 0}
    _show({"evaluation": asked}, {"": evaluation}, Path("out [/y]"))
    shown = capsys.readouterr().out
    for part in (context.task, "runs/[/x]/5", "out [/y]/eval.json"):
        assert part in shown


def test_results_of_another_evaluation_are_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, copy = folder / "walk_bc/run", Path("walk_bc")
    shutil.copytree(run, copy)
    words = [str(copy), "--episodes", "2"]
    result_of(capsys, *words)
    kept = (copy / "evaluations/20-test/eval.json").read_text()
    assert "another evaluation" in refused(capsys, 1, *words, "--execute", "1")
    assert result_of(capsys, *words, "--seed", "3")["evaluation"]["seed"] == 3
    assert result_of(capsys, str(copy), "--episodes", "3")["evaluation"]["episodes"] == 3
    assert {path.name for path in (copy / "evaluations").iterdir()} == {
        "20-test",
        "20-test-seed-3",
        "20-test-episodes-3",
    }
    assert (copy / "evaluations/20-test/eval.json").read_text() == kept
    assert result_of(capsys, *words, "--seed", "3", "--overwrite")["evaluation"]["seed"] == 3
    (copy / "evaluations/20-test/eval.json").write_text("what?")
    assert "holds no results of pirl" in refused(capsys, 1, *words)


def test_two_checkpoints_are_compared_on_the_same_states(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = folder / "walk_bc/run/20", folder / "walk_q/run"
    words = ["--episodes", "12", "--out", "out"]
    found = result_of(capsys, str(first), "--compare", str(second), *words, "--video", "1")
    mine = [one["success"] for one in found["result"]["episodes"]]
    other = found["compared_with"]
    assert other["evaluation"]["checkpoint"] == str(second / "5")
    theirs = [one["success"] for one in other["result"]["episodes"]]
    pairs = list(zip(mine, theirs, strict=True))
    comparison = other["comparison"]
    for name, pair in {"both": (1, 1), "neither": (0, 0), "only_this": (1, 0), "only_other": (0, 1)}.items():
        assert comparison[name] == pairs.count((bool(pair[0]), bool(pair[1])))
    assert comparison["difference"] == pytest.approx((sum(mine) - sum(theirs)) / 12)
    alone = result_of(capsys, str(second), "--episodes", "12", "--out", "alone", "--video", "1")
    assert alone["result"] == other["result"]
    filmed = {path.name: path.read_bytes() for path in Path("alone").iterdir() if path.name != "eval.json"}
    assert {path.name: path.read_bytes() for path in Path("out/compared_with").iterdir()} == filmed
    assert len(filmed) >= 2
    assert app.main(["eval", str(first), "--compare", str(second), *words]) == 0
    assert f"difference {comparison['difference']:+.3f}, p = {comparison['p_value']:.3g}" in capsys.readouterr().out


def test_which_checkpoint_is_meant(folder: Path, tmp_path: Path) -> None:
    run = folder / "walk_bc/run"
    config = walking(folder.parent, BCConfig())
    for path, best, step in ((run, False, 20), (run, True, 15), (run / "5", False, 5), (run / "5/params", False, 5)):
        found = find_checkpoint(path, best=best)
        assert (found.folder, found.step, found.run, found.config) == (run / str(step), step, run, config)
    alone = tmp_path / "robot/5"
    shutil.copytree(run / "5", alone)
    assert (find_checkpoint(alone).config, find_checkpoint(alone).run) == (config, None)
    shutil.rmtree(alone / "extra")  # as OpenPI writes it
    with pytest.raises(CheckpointError, match=r"does not say how it was trained.*\n.*--recipe NAME"):
        find_checkpoint(alone)
    other = replace(config, exp_name="named")
    assert find_checkpoint(alone, config=other).config == other
    shutil.copy(run / "config.yaml", alone.parent)
    assert find_checkpoint(alone).config == config


def test_mistakes_are_answered(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(folder / "walk_bc/run")
    (tmp_path / "empty").mkdir()
    for code, words, answer in (
        (1, [str(folder / "walk_bc/rnu")], "did you mean: run"),
        (1, ["nowhere/at/all"], "there is nothing at"),
        (1, ["empty"], "is not a checkpoint"),
        (1, [f"{run}/5", "--best"], "is not the folder of a run"),
        (1, [run, "--best-of", "4"], "best of 4 without a critic"),
        (1, [run, "--recipe", "debgu"], "did you mean: debug"),
        (1, [run, "--recipe", "debug"], "has no environment"),
        (1, [run, "--execute", "9"], "cannot execute more than it plans"),
        (1, [run, "--compare", f"{run}/6"], "6"),
        (2, [run, "--epsodes", "4"], "--epsodes: did you mean --episodes?"),
        (2, [run, "--split", "tset"], "did you mean: test"),
        (2, [run, "--episodes", "0"], "not a positive whole number"),
        (2, [run, "--env.max-stesp", "4"], "--env.max-steps"),
        (2, [run, "stray"], "unrecognized arguments: stray"),
        (2, [run, "--seed", "-1"], "--seed is 0 or more"),
        (2, [], "usage: pirl eval CHECKPOINT"),
    ):
        assert answer in refused(capsys, code, *words), words
    assert app.main(["eval", run, "--help"]) == 0
    assert "--best-of N" in capsys.readouterr().out


def test_a_run_without_evaluations_has_no_best(tmp_path: Path) -> None:
    config = walking(tmp_path, BCConfig())
    run = save_run(config, {5: float("nan")})
    with pytest.raises(CheckpointError, match=r"no step of .* was saved with eval/success_rate"):
        find_checkpoint(run, best=True)


def test_the_statistics_are_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    """Those of this machine's `assets` are of another time, or of another dataset."""
    scaled = {key: replace(stats, std=7 * stats.std) for key, stats in STATS.items()}
    save_norm_stats(tmp_path / "assets/me/walks", scaled)
    found = open_checkpoint(folder / "walk_bc/run/5").policy.transform.norm_stats
    assert found is not None
    np.testing.assert_array_equal(found["actions"].std, STATS["actions"].std)
    copy = tmp_path / "5"
    shutil.copytree(folder / "walk_bc/run/5", copy)
    (copy / "assets/me/walks").rename(copy / "assets/another")  # the only ones: nothing else can be meant
    assert open_checkpoint(copy).policy.transform.norm_stats is not None
    save_norm_stats(copy / "assets/third", scaled)
    with pytest.raises(CheckpointError, match=r"statistics of another, third, .* names 'me/walks'\n.*--data.asset-id"):
        open_checkpoint(copy)
    data = {"data": replace(walking(tmp_path, BCConfig()).data, asset_id="third")}
    chosen = open_checkpoint(copy, change=lambda config: replace(config, **data)).policy.transform.norm_stats
    assert chosen is not None
    np.testing.assert_array_equal(chosen["actions"].std, 7 * STATS["actions"].std)


def test_the_critic_is_read_when_it_chooses(folder: Path, tmp_path: Path) -> None:
    step = folder / "walk_q/run/5"
    assert set(open_checkpoint(step).state.params) == {"policy"}
    acting = open_checkpoint(step, change=lambda c: replace(c, rollout=replace(c.rollout, best_of=6)))
    config = acting.found.config
    saved = fresh_state(config, 5)
    assert_same_bits(acting.state.params, {"policy": saved.policy, "critic": saved.ema["critic"]})
    # A plan is the best of six by the saved critic, exactly as the agent chooses.
    agent: Any = build_agent(config)
    states = [{"state": np.array([0.1 * i, 0.2], np.float32)} for i in range(4)]
    plans = acting.use(3).plan(dict(enumerate(states)), {i: (i, 0) for i in range(4)})
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(jax.random.key(3), i), 0))(jnp.arange(4))
    observation = Observation.from_dict({"state": np.stack([state["state"] for state in states])})
    chunks = np.asarray(jax.jit(lambda: agent.act(saved, observation, keys, best_of=6))())
    expected = acting.policy.transform.robot_actions(chunks, np.stack([state["state"] for state in states]))
    np.testing.assert_allclose(np.stack([plans[i] for i in range(4)]), expected, rtol=1e-5, atol=1e-6)
    shutil.copytree(step, tmp_path / "5")
    shutil.rmtree(tmp_path / "5/train_state")
    with pytest.raises(CheckpointError, match="no train_state, and with it no critic"):
        open_checkpoint(tmp_path / "5", change=lambda c: replace(c, rollout=replace(c.rollout, best_of=6)))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_condition_that_was_learned_is_followed(guidance: float, tmp_path: Path) -> None:
    """Without guidance it is part of the served weights; with it, both branches are needed."""
    config = walking(tmp_path, RIPTConfig(loss="cfg", guidance=guidance))
    agent: Any = build_agent(config)
    state = fresh_state(config, 5)
    learned = jax.tree.map(lambda x: jnp.full_like(x, 0.3), state.params["condition"])
    state = replace(state, params=state.params | {"condition": learned})
    with Checkpoints(config.run_dir, config.checkpoint, run={}, norm_stats={"me/walks": STATS}) as checkpoints:
        checkpoints.save(5, state, weights=agent.inference_params(state))
    acting = open_checkpoint(config.run_dir, config=config)
    assert set(acting.state.params) == ({"policy"} if guidance == 1 else {"policy", "condition"})
    observation = Observation.from_dict({"state": np.zeros((4, 2), np.float32)})
    keys = jax.random.split(jax.random.key(0), 4)
    found, expected = (np.asarray(agent.act(one, observation, keys)) for one in (acting.state, state))
    np.testing.assert_array_equal(found, expected)
    plain = replace(state, params={"policy": state.params["policy"]})
    assert np.abs(found - np.asarray(agent.act(plain, observation, keys))).max() > 0.01


def test_other_environments_by_flag_or_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(folder / "walk_bc/run/5")
    own = replace(walking(folder.parent, BCConfig()), env=replace(ENV, max_steps=4, prompt="hurry"))
    write_yaml("mine.yaml", own)
    found = result_of(capsys, run, "--recipe", "mine.yaml", "--episodes", "3", "--out", "a")
    assert {one["task"] for one in found["result"]["episodes"]} == {"hurry"}
    assert "the environment is of robot 'tabletop', the data of 'synthetic'" in refused(
        capsys, 1, run, "--env.type", "Tabletop", "--episodes", "3"
    )


def test_weights_that_are_not_finite_do_not_act(tmp_path: Path) -> None:
    config = replace(walking(tmp_path, BCConfig(ema_decay=None)), exp_name="broken")
    save_run(config, {5: 0.0})
    state = jax.tree.map(lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, fresh_state(config, 5))
    with Checkpoints(config.run_dir, config.checkpoint, run={}, norm_stats={"me/walks": STATS}) as checkpoints:
        checkpoints.save(6, state)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        open_checkpoint(config.run_dir, config=config)
    file = config.run_dir / "5/extra/metadata.json"
    file.write_text(file.read_text().replace('"name"', '"naem"'))
    with pytest.raises(ConfigError, match=r"metadata.json: unknown setting 'naem'"):
        open_checkpoint(config.run_dir / "5")
