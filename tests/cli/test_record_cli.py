"""`pirl record`: demonstrations and rollouts become datasets that `pirl train` takes."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acting_runs import ENV, save_run, walking
from pirl import recipes
from pirl.agents.config import BCConfig
from pirl.cli import app
from pirl.config_io import write_yaml
from pirl.data.dataset import LeRobotSource
from pirl.data.lerobot import read_meta
from pirl.envs.config import TabletopConfig
from pirl.envs.tabletop_expert import Dials
from pirl.names import BASE_CAMERA
from pirl.records import Context
from pirl.rollout.collect import collect, numbered
from pirl.rollout.pool import LocalPool
from pirl.rollout.record import expert_rollouts, recording_contexts
from pirl.training.acting import open_checkpoint


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def recorded(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert app.main(["record", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_demonstrations(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bc_tabletop", "--episodes", "12", "--repo-id", "me/demos", "--seed", "3"]
    shown = recorded(capsys, *words)
    source = LeRobotSource("me/demos", cameras={BASE_CAMERA: "observation.images.image"}, image_size=24)
    config = TabletopConfig()
    with LocalPool(config, 1) as pool:
        contexts = recording_contexts(pool.info, 12, "train")
    expected = list(expert_rollouts(config, contexts, dials=None, seed=3))
    assert len(source) == 12
    for index, rollout in enumerate(expected):
        episode = source.episode(index)
        assert (episode.task, episode.success) == (rollout.context.task, rollout.episode.success)
        np.testing.assert_array_equal(episode.actions, rollout.episode.actions)
        np.testing.assert_array_equal(source.frames(index)[BASE_CAMERA], rollout.frames["observation/image"])
    won = sum(bool(rollout.episode.success) for rollout in expected)
    assert shown[0].startswith(f"12 episodes ({won} successful), {int(source.lengths.sum())} steps")
    assert shown[0].endswith(str(home / "me/demos"))
    # What is to be done next can be done as it stands.
    assert shown[1] == "next:"
    verbs = [shlex.split(line)[1:] for line in shown[2:]]
    assert [verb[0] for verb in verbs] == ["inspect", "norm-stats", "train"]
    for verb in verbs[:2]:
        assert app.main(verb) == 0
    assert Path("assets/me/demos/norm_stats.json").exists()
    assert recipes.cli(verbs[2][1:]).data.repo_ids == ("me/demos",)


def test_a_dataset_goes_on_where_it_stopped(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bc_tabletop", "--episodes", "7", "--repo-id", "me/demos"]
    recorded(capsys, *words)
    assert app.main(["record", *words]) == 1
    assert "already holds a dataset" in capsys.readouterr().err
    recorded(capsys, *words, "--append")
    source = LeRobotSource("me/demos", cameras={})
    assert len(source) == 14
    with LocalPool(TabletopConfig(), 1) as pool:
        tasks = [context.task for context in recording_contexts(pool.info, 14, "train")]
    assert [source.episode(index).task for index in range(14)] == tasks
    first = {source.episode(index).state[0].tobytes() for index in range(14)}
    assert len(first) == 14


def test_dials_settings_and_places(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bc_tabletop", "--episodes", "4", "--root", "here", "--dials", "wrong=1", "noise=0", "--split", "test"]
    recorded(capsys, *words, "--env.level", "colours", "--env.image-size", "16")
    meta = read_meta(Path("here"))
    assert meta.features["observation.images.image"].shape == (16, 16, 3)
    source = LeRobotSource("here", cameras={})
    assert [source.episode(index).success for index in range(4)] == [False] * 4
    config = TabletopConfig(level="colours", image_size=16)
    with LocalPool(config, 1) as pool:
        contexts = recording_contexts(pool.info, 4, "test")
    expected = expert_rollouts(config, contexts, dials=Dials(wrong=1.0, noise=0.0), seed=0)
    for index, rollout in enumerate(expected):
        np.testing.assert_array_equal(source.episode(index).state, rollout.episode.state)


def test_rollouts_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = walking(tmp_path, BCConfig())
    run = save_run(config, {5: 0.5})
    write_yaml("walk.yaml", config)
    words = ["walk.yaml", "--repo-id", "me/walks", "--checkpoint", str(run)]
    recorded(capsys, *words, "--episodes", "5")
    recorded(capsys, *words, "--episodes", "4", "--append")
    source = LeRobotSource("me/walks", cameras={BASE_CAMERA: "image"}, image_size=None)
    assert len(source) == 9
    with LocalPool(ENV, 4) as pool:
        jobs = numbered(recording_contexts(pool.info, 9, "train"))
        policy = open_checkpoint(run).use(0)
        parts = [collect(pool, policy, part, every_picture=True) for part in (jobs[:5], jobs[5:])]
        expected = [rollout for part in parts for rollout in part]
    for index, rollout in enumerate(expected):
        episode = source.episode(index)
        for name in ("state", "actions", "rewards", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(episode, name), getattr(rollout.episode, name), err_msg=name)
        assert (episode.success, episode.task) == (rollout.episode.success, "go right")
        np.testing.assert_array_equal(source.frames(index)[BASE_CAMERA], rollout.frames["image"])
    assert len({rollout.episode.actions.tobytes() for rollout in expected}) == 9


def test_an_interruption_keeps_what_is_whole(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pirl.rollout.record as module

    def tired(env: Any, contexts: list[Context], **options: Any) -> Any:
        yield from list(expert_rollouts(env, contexts, **options))[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "expert_rollouts", tired)
    assert app.main(["record", "bc_tabletop", "--episodes", "9", "--repo-id", "me/demos"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert json.loads((home / "me/demos/meta/info.json").read_text())["total_episodes"] == 3


def test_mistakes_are_answered(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--episodes", "2", "--repo-id", "me/demos"]
    for code, words, answer in (
        (1, ["bc_tabeltop", *usual], "did you mean: bc_tabletop"),
        (1, ["debug", *usual], "recipe debug has no environment"),
        (1, ["bc_tabletop", *usual, "--dials", "rong=1"], "did you mean: wrong"),
        (1, ["bc_tabletop", "--episodes", "2", "--repo-id", "../demos"], "OWNER/NAME"),
        (1, ["bc_tabletop", *usual, "--checkpoint", "nowhere/5"], "there is nothing at"),
        (1, ["bc_tabletop", *usual, "--env.image-size", "2"], "image_size is 2\n  hint: it is at least 8"),
        (2, ["bc_tabletop", *usual, "--env.levle", "easy"], "--env.level"),
        (2, ["bc_tabletop", "--episodes", "2"], "--repo-id (or --root)"),
        (2, ["bc_tabletop", *usual, "--apend"], "--apend: did you mean --append?"),
        (2, ["bc_tabletop", *usual, "--split", "tarin"], "did you mean: train"),
        (2, ["bc_tabletop", *usual, "--dials", "wrong=1", "--checkpoint", "x"], "choose one"),
        (2, ["bc_tabletop", *usual, "--seed", "-2"], "--seed is 0 or more"),
        (2, [], "usage: pirl record RECIPE"),
    ):
        capsys.readouterr()
        assert app.main(["record", *words]) == code, words
        shown = capsys.readouterr()
        assert (shown.out, answer in shown.err) == ("", True), (words, shown.err)
    assert not (home / "me/demos/meta").exists()
    assert app.main(["record", "bc_tabletop", "--help"]) == 0
    assert "--dials KEY=VALUE" in capsys.readouterr().out
