"""What is recorded is what is read back, and short episodes are not expensive to save."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.columns import V21, V30
from pirl.data.config import DataConfig
from pirl.data.create import create_source
from pirl.data.lerobot import read_meta
from pirl.data.robots import get_robot, make_robot
from pirl.data.rows import read_columns
from pirl.data.video import read_frames
from pirl.data.writer import LeRobotWriter
from pirl.envs.config import GymConfig, TabletopConfig
from pirl.envs.make import make_batch
from pirl.envs.tabletop_expert import Dials
from pirl.errors import ConfigError, DataError
from pirl.names import BASE_CAMERA, LEFT_WRIST_CAMERA, NEXT_TRUNCATED
from pirl.records import Context, Episode, EpisodeSource, Rollout
from pirl.rollout.pool import EnvInfo
from pirl.rollout.record import (
    BLOCK,
    RolloutRecorder,
    expert_rollouts,
    feature_name,
    num_recorded,
    parse_dials,
    recording_contexts,
)

TABLETOP = TabletopConfig(wrist_camera=True)
INFO = EnvInfo.of(make_batch(TABLETOP, 1))
ENDS = {"success": (True, False, True), "failure": (True, False, False), "time-out": (False, True, False)}
"""How an episode ended: terminated, truncated, success."""


def opened(root: Path, size: int, **changes: Any) -> EpisodeSource:
    config = DataConfig(repo_ids=(str(root),), robot="tabletop", cache="ram", **changes)
    return create_source(config, get_robot("tabletop"), image_size=size)


def rollout_of(end: str, number: int, *, size: tuple[int, int] = (24, 24), steps: int = 5) -> Rollout:
    """A smooth picture that moves, numbers of all kinds, and an end."""
    rng, last = np.random.default_rng(number), np.arange(steps) == steps - 1
    terminated, truncated, success = ENDS[end]
    height, width = size
    ramp = np.linspace(0, 200, width)[None, None, :, None] + np.linspace(0, 40, height)[None, :, None, None]
    moving = (ramp + 3 * np.arange(steps)[:, None, None, None] + [0, 5, 10]).astype(np.uint8)
    return Rollout(
        context=Context(f"task {number % 2}", number),
        number=number,
        episode=Episode(
            task=f"task {number % 2}",
            state=rng.normal(size=(steps, 4)).astype(np.float32),
            actions=rng.normal(size=(steps, 3)).astype(np.float32),
            rewards=np.where(last & success, 1.0, rng.choice([0, -0.25], steps)).astype(np.float32),
            terminated=last & terminated,
            truncated=last & truncated,
            success=success,
        ),
        starts=np.arange(steps),
        frames={"observation/image": moving},
        frame_steps=np.arange(steps),
    )


def assert_same(found: Episode, expected: Episode) -> None:
    assert (found.task, found.success) == (expected.task, expected.success)
    for name in ("state", "actions", "rewards", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def test_several_processes_record_what_one_does() -> None:
    """More blocks than processes, the last one not full, in their order."""
    contexts = recording_contexts(INFO, 2 * BLOCK + 5, "train")
    one, several = (list(expert_rollouts(TABLETOP, contexts, dials=None, seed=1, processes=n)) for n in (1, 2))
    assert [rollout.number for rollout in several] == list(range(len(contexts)))
    for found, expected in zip(several, one, strict=True):
        assert found.context == expected.context
        assert_same(found.episode, expected.episode)


def test_demonstrations_come_back_exactly(tmp_path: Path) -> None:
    contexts = recording_contexts(INFO, 20, "train")
    rollouts = list(expert_rollouts(TABLETOP, contexts, dials=None, seed=1))
    with RolloutRecorder(tmp_path / "demos", info=INFO) as recorder:
        for rollout in rollouts:
            recorder.add(rollout)
    assert recorder.saved == num_recorded(tmp_path / "demos") == 20
    source = opened(tmp_path / "demos", 24)
    assert source.cameras == (BASE_CAMERA, LEFT_WRIST_CAMERA)
    assert {rollout.episode.success for rollout in rollouts} == {True, False}
    for index, rollout in enumerate(rollouts):
        assert_same(source.episode(index), rollout.episode)
        frames = source.frames(index)
        np.testing.assert_array_equal(frames[BASE_CAMERA], rollout.frames["observation/image"])
        np.testing.assert_array_equal(frames[LEFT_WRIST_CAMERA], rollout.frames["observation/wrist_image"])
    meta = read_meta(tmp_path / "demos")
    assert (meta.fps, meta.robot) == (5, "tabletop")
    assert meta.features["observation.images.image"].dtype == "image"


@pytest.mark.parametrize(("size", "stored"), [((24, 24), "image"), ((63, 80), "image"), ((64, 96), "video")])
def test_every_end_survives_and_only_large_pictures_are_videos(
    size: tuple[int, int], stored: str, tmp_path: Path
) -> None:
    rollouts = [rollout_of(end, number, size=size) for number, end in enumerate(ENDS)]
    with RolloutRecorder(tmp_path, info=INFO) as recorder:
        for rollout in rollouts:
            recorder.add(rollout)
    assert read_meta(tmp_path).features["observation.images.image"].dtype == stored
    source = opened(tmp_path, max(size), exact_resize=True)
    for index, rollout in enumerate(rollouts):
        assert_same(source.episode(index), rollout.episode)
        error = source.frames(index)[BASE_CAMERA].astype(int) - rollout.frames["observation/image"]
        assert np.abs(error).mean() < (2 if stored == "video" else 1e-9)
    truncated = read_columns(source.meta)[NEXT_TRUNCATED]  # type: ignore[attr-defined]
    assert truncated.tolist() == [False] * 14 + [True]


def test_what_was_added_before_an_error_is_kept(tmp_path: Path) -> None:
    rollouts = [rollout_of("success", number) for number in range(3)]
    broken = replace(rollouts[1], episode=replace(rollouts[1].episode, state=np.full((5, 4), np.nan, np.float32)))

    def record() -> None:
        with RolloutRecorder(tmp_path, info=INFO) as recorder:
            recorder.add(rollouts[0])
            with pytest.raises(DataError, match="is not finite"):
                recorder.add(broken)
            recorder.add(rollouts[2])
            raise RuntimeError("stumbled")

    with pytest.raises(RuntimeError, match="stumbled"):
        record()
    source = opened(tmp_path, 24)
    assert len(source) == 2
    for index, rollout in enumerate((rollouts[0], rollouts[2])):
        assert_same(source.episode(index), rollout.episode)


def test_an_existing_dataset_is_added_to_only_if_asked(tmp_path: Path) -> None:
    for number, existing in enumerate(("refuse", "append", "append")):
        with RolloutRecorder(tmp_path, info=INFO, existing=existing) as recorder:  # type: ignore[arg-type]
            recorder.add(rollout_of("success", number))
    assert num_recorded(tmp_path) == 3
    with pytest.raises(DataError, match="already holds a dataset"):
        RolloutRecorder(tmp_path, info=INFO)
    with RolloutRecorder(tmp_path, info=INFO, existing="append") as recorder:
        with pytest.raises(DataError, match="cannot be continued with these settings"):
            recorder.add(rollout_of("success", 3, size=(24, 32)))
    assert num_recorded(tmp_path) == 3
    assert num_recorded(tmp_path / "nothing") == 0


def test_rollouts_that_cannot_be_recorded(tmp_path: Path) -> None:
    rollout = rollout_of("success", 0)
    some = replace(rollout, frames={"observation/image": np.zeros((2, 24, 24, 3), np.uint8)}, frame_steps=np.arange(2))
    unsaid = replace(rollout, episode=replace(rollout.episode, success=None))
    with RolloutRecorder(tmp_path / "data", info=INFO) as recorder:
        with pytest.raises(DataError, match=r"pictures of 2 of its 5 steps\n.*every_picture=True"):
            recorder.add(some)
        with pytest.raises(DataError, match="does not say whether it succeeded"):
            recorder.add(unsaid)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("robot", ["aloha", "aloha_sim", "libero", "droid", "tabletop", "synthetic"])
def test_pictures_get_names_by_which_the_robot_finds_them(robot: str) -> None:
    kind = get_robot(robot)
    shown = {slot: names[0] for slot, names in kind.cameras.items()}
    stored = {slot: feature_name(kind, key) for slot, key in shown.items()}
    assert kind.find_cameras(stored.values()) == stored
    assert not any("/" in name for name in stored.values())


def test_other_pictures() -> None:
    assert feature_name(get_robot("aloha"), "images/cam_low") == "observation.images.cam_low"
    odd = make_robot(name="odd", state_dim=1, action_dim=1, cameras={BASE_CAMERA: "eyes/front"})
    with pytest.raises(ConfigError, match=r"no dataset can have\n.*observation\.images\.front"):
        feature_name(odd, "eyes/front")


def test_experts_repeat_themselves_but_not_between_blocks() -> None:
    contexts = [Context("red block to left zone", 5)] * (BLOCK + 2)
    config = TabletopConfig()
    first, again, other = (
        list(expert_rollouts(config, contexts, dials=Dials(noise=0.1), seed=seed)) for seed in (0, 0, 1)
    )
    assert [rollout.number for rollout in first] == list(range(BLOCK + 2))
    for left, right in zip(first, again, strict=True):
        assert_same(left.episode, right.episode)
    different = {rollout.episode.actions.tobytes() for rollout in (*first, *other)}
    assert len(different) == 2 * (BLOCK + 2)


def test_recordings_go_on_with_new_states_as_long_as_there_are_some() -> None:
    contexts = recording_contexts(INFO, 9, "train")
    assert [context.task for context in contexts] == [INFO.tasks[i % 6] for i in range(9)]
    assert len({context.init for context in contexts}) == 9
    assert recording_contexts(INFO, 4, "train", first=5) == contexts[5:]
    tested = {context.init for context in recording_contexts(INFO, 9, "test")}
    assert not tested & {context.init for context in contexts}
    limited = replace(INFO, tasks=("a", "b"), num_inits=3)
    assert sorted(recording_contexts(limited, 6, "train")) == [Context(task, i) for task in "ab" for i in range(3)]


def test_dials() -> None:
    assert parse_dials(TABLETOP, []) is None
    assert parse_dials(TABLETOP, ["wrong=0.5", "any-zone=true", "wrong-block=0.5"]) == Dials(
        wrong=0.5, wrong_block=0.5, any_zone=True
    )
    for words, answer in (
        (["rong=1"], "did you mean: wrong"),
        (["wrong=much"], "wrong: found the text 'much', expected a number"),
        (["wrong"], "KEY=VALUE"),
        (["wrong=2"], r"wrong is 2\.0\n  hint: it is between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=answer):
            parse_dials(TABLETOP, words)
    with pytest.raises(ConfigError, match="no scripted expert for Gym"):
        parse_dials(GymConfig(id="CartPole-v1", robot="synthetic"), [])


def columns_of(number: int) -> dict[str, Any]:
    steps = 3 + number % 2
    picture = np.full((steps, 64, 64, 3), 20 * number, np.uint8)
    return {"action": np.full((steps, 2), number, np.float32), "small": picture[:, :8, :8], "large": picture}


FEATURES = {
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "small": {"dtype": "image", "shape": [8, 8, 3], "names": None},
    "large": {"dtype": "video", "shape": [64, 64, 3], "names": None},
}


@pytest.mark.parametrize("version", [V30, V21])
def test_episodes_saved_together_are_those_saved_one_by_one(version: Any, tmp_path: Path) -> None:
    """Also over the border of a file, and in a second session."""
    # Small enough that a few episodes fill a file: about 3 kB each.
    options: dict[str, Any] = {"version": version, "codec": "h264", "data_files_size_in_mb": 0.01}
    for name, groups in (("single", [1] * 7), ("grouped", [3, 1, 3])):
        number = 0
        for group in groups:
            with LeRobotWriter(tmp_path / name, fps=5, features=FEATURES, **options) as writer:
                for _ in range(group):
                    index = writer.add_episode(columns_of(number), task=f"task {number % 3}", save=False)
                    assert index == number
                    number += 1
                assert writer.num_episodes == number - group
                writer.save()
                assert writer.num_episodes == number
    single, grouped = (read_meta(tmp_path / name) for name in ("single", "grouped"))
    assert single.tasks == grouped.tasks
    for key, column in read_columns(single).items():
        np.testing.assert_array_equal(read_columns(grouped)[key], column, err_msg=key)
    for meta in (single, grouped):
        for number, episode in enumerate(meta.episodes):
            assert episode.tasks == (f"task {number % 3}",)
            for camera in ("small", "large"):
                frames = read_frames(meta, episode, camera, size=None)
                assert len(frames) == 3 + number % 2
                assert np.abs(frames.astype(int) - 20 * number).max() <= 2
    infos = [json.loads((meta.root / "meta/info.json").read_text()) for meta in (single, grouped)]
    assert infos[0] == infos[1]
    if version == V30:
        assert len({episode.data.path.name for episode in grouped.episodes}) > 1
        stats = [json.loads((meta.root / "meta/stats.json").read_text()) for meta in (single, grouped)]
        np.testing.assert_allclose(stats[0]["action"]["mean"], stats[1]["action"]["mean"], rtol=1e-12)
        np.testing.assert_allclose(stats[0]["large"]["std"], stats[1]["large"]["std"], rtol=1e-12)
    assert not list(tmp_path.rglob(".writing"))


def test_episodes_that_wait_survive_a_bad_one_but_not_oblivion(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "kept", fps=5, features=FEATURES) as writer:
        writer.add_episode(columns_of(0), task="a", save=False)
        with pytest.raises(DataError, match="episode 1, frame 0"):
            writer.add_episode({**columns_of(1), "action": np.full((4, 2), np.nan, np.float32)}, task="a", save=False)
        writer.add_episode(columns_of(2), task="b")
    assert [episode.tasks for episode in read_meta(tmp_path / "kept").episodes] == [("a",), ("b",)]
    with pytest.raises(DataError, match="the last 1 episodes were not saved"):
        with LeRobotWriter(tmp_path / "lost", fps=5, features=FEATURES) as writer:
            writer.add_episode(columns_of(0), task="a", save=False)
    assert not (tmp_path / "lost/meta").exists()
