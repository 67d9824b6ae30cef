"""From a configuration to batches: everything found, mixed and normalised as the configuration says."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.cli import app
from pirl.data.assets import asset_id
from pirl.data.chunks import validate_qchunking_batch_format
from pirl.data.config import DataConfig
from pirl.data.create import (
    create_acrlpd_data_loader,
    create_source,
    create_tokenizer,
    create_transform,
    find_columns,
    select_cameras,
)
from pirl.data.dataset import LeRobotSource, MixedSource
from pirl.data.loader import ACRLPDDataLoader
from pirl.data.normalize import NormStats
from pirl.data.replay import MemorySource, ReplayBuffer
from pirl.data.resize import pad
from pirl.data.robots import get_robot, make_robot
from pirl.data.tokenizer import ByteTokenizer, WordTokenizer
from pirl.data.writer import LeRobotWriter
from pirl.errors import ConfigError, DataError
from pirl.names import BASE_CAMERA, LEFT_WRIST_CAMERA, RIGHT_WRIST_CAMERA

pytestmark = pytest.mark.usefixtures("own_home")

HORIZON = 5
HIGH, LEFT = "observation.images.cam_high", "observation.images.cam_left_wrist"


def write(root: Path, *, size: tuple[int, int] = (24, 32), number: int = 0, episodes: int = 3) -> Path:
    """Episodes whose state says which dataset, episode and step it is; the last one of a dataset fails."""
    features: dict[str, Any] = {key: {"dtype": "float32", "shape": [14]} for key in ("observation.state", "action")}
    features["next.success"] = {"dtype": "bool", "shape": [1]}
    features |= {key: {"dtype": "image", "shape": [*size, 3]} for key in (HIGH, LEFT)}
    rng = np.random.default_rng(number)
    with LeRobotWriter(root, fps=10, features=features, robot_type="aloha") as writer:
        for episode in range(episodes):
            steps = 8 + episode
            state = np.zeros((steps, 14), np.float32)
            state[:, 0], state[:, 3], state[:, 4] = number, episode, np.arange(steps)
            columns: Mapping[str, Any] = {
                "observation.state": state,
                "action": state + 1,
                "next.success": (np.arange(steps) == steps - 1) & (episode < episodes - 1),
                HIGH: rng.integers(0, 256, (steps, *size, 3), np.uint8),
                LEFT: rng.integers(0, 256, (steps, *size, 3), np.uint8),
            }
            writer.add_episode(columns, task=f"task of {root.name}")
    return root


def config(tmp_path: Path, *roots: Path, **options: Any) -> DataConfig:
    settings = dict(tokenizer="byte", assets_dir=str(tmp_path / "assets"), cache="ram", prefetch=0)
    return DataConfig(repo_ids=tuple(map(str, roots)), **{**settings, **options})


def test_from_the_configuration_to_batches_with_the_command_the_error_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "cubes of mine")
    wanted = config(tmp_path, root)
    with pytest.raises(DataError, match="no normalisation statistics at") as caught:
        create_transform(wanted, horizon=HORIZON, token_len=60)
    command = caught.value.hint.removeprefix("compute them: ").split("; or")[0]
    assert shlex.split(command)[:2] == ["pirl", "norm-stats"]
    assert app.main(shlex.split(command)[1:]) == 0
    assert "27 steps of 3 episodes" in capsys.readouterr().out
    transform = create_transform(wanted, horizon=HORIZON, token_len=60, image_size=16)
    options = dict(transform=transform, horizon=HORIZON, discount=0.9)
    with create_acrlpd_data_loader(wanted, batch_size=6, **options) as loader:
        batch = loader.sample_batch()
        validate_qchunking_batch_format(batch)
        assert batch["actions"].shape == (6, HORIZON, 32)
        view = batch["observations"]
        assert {name: image.shape for name, image in view["image"].items()} == {
            BASE_CAMERA: (6, 12, 16, 3),
            LEFT_WRIST_CAMERA: (6, 12, 16, 3),
        }
        prompt = ByteTokenizer().encode("task of cubes of mine\n")
        assert view["tokenized_prompt"][0, 1 : 1 + len(prompt)].tolist() == prompt
        statistics = loader.get_dataset_statistics()["offline"]
        assert (statistics.episodes, statistics.successes, statistics.failures) == (3, 2, 1)
    # Normalised with the dataset's own statistics: over all steps, dimension 3 (the episode's number) has mean 0.
    source = create_source(wanted, get_robot("aloha"), image_size=16)
    states = np.concatenate([source.episode(index).state for index in range(len(source))])
    normal = transform.low_dim(states, None, [""] * len(states))["state"]
    np.testing.assert_allclose(normal[:, 3].mean(), 0, atol=1e-5)
    np.testing.assert_allclose(normal[:, 3].std(), 1, atol=1e-4)


def test_datasets_are_mixed_by_their_weights(tmp_path: Path) -> None:
    roots = [write(tmp_path / "one", number=1), write(tmp_path / "two", number=2, episodes=5)]
    mixed = create_source(config(tmp_path, *roots, weights=(1.0, 3.0)), get_robot("aloha"), image_size=16)
    assert isinstance(mixed, MixedSource)
    assert len(mixed) == 8
    np.testing.assert_allclose(mixed.weights[:3].sum(), 0.25)
    assert mixed.cameras == (BASE_CAMERA, LEFT_WRIST_CAMERA)
    assert mixed.frame_sizes() == {BASE_CAMERA: (12, 16), LEFT_WRIST_CAMERA: (12, 16)}  # alike: no borders stored
    assert not mixed.prepare()


def test_cameras_of_different_proportions_get_their_borders(tmp_path: Path) -> None:
    roots = [write(tmp_path / "wide", number=1), write(tmp_path / "tall", number=2, size=(32, 24))]
    parts = [create_source(config(tmp_path, root), get_robot("aloha"), image_size=16) for root in roots]
    with pytest.raises(DataError, match=r"base_0_rgb \(16, 12\).*source 0 they are base_0_rgb \(12, 16\)"):
        MixedSource(parts)
    mixed = create_source(config(tmp_path, *roots), get_robot("aloha"), image_size=16)
    assert set(mixed.frame_sizes().values()) == {(16, 16)}
    for index, (part, local) in enumerate([(part, local) for part in parts for local in range(3)]):
        for camera, frames in part.frames(local).items():
            np.testing.assert_array_equal(mixed.frames(index)[camera], pad(frames, (16, 16)))
    # Sources that do not tell their sizes are looked at.
    held = [MemorySource(cameras=(BASE_CAMERA,), items=[(p.episode(0), p.frames(0))]) for p in parts]
    with pytest.raises(DataError, match="letterbox=True"):
        MixedSource(held)


def test_a_source_that_decodes_when_asked_says_so(tmp_path: Path) -> None:
    root = write(tmp_path / "one")
    pool, held = (create_source(config(tmp_path, root, cache=tier), get_robot("aloha")) for tier in ("pool", "ram"))
    assert isinstance(pool, LeRobotSource)
    assert pool.prepare()
    assert MixedSource([held, pool]).prepare()
    transform = create_transform(config(tmp_path, root), horizon=HORIZON, norm_stats=plain_stats(), token_len=60)
    wanted = config(tmp_path, root, cache="auto", episodes_per_memory_pool=1, steps_per_memory_pool=2)
    options = dict(config=wanted, batch_size=8, horizon=HORIZON, discount=0.9)
    with ACRLPDDataLoader(pool, transform, **options) as loader:  # `auto` settled on a pool
        numbers = [set(loader.sample_batch()["observations"]["state"][:, 3].tolist()) for _ in range(6)]
    assert all(len(found) == 1 for found in numbers)
    assert len(set.union(*numbers)) == 3


def plain_stats() -> dict[str, NormStats]:
    return {key: NormStats(mean=np.zeros(14), std=np.ones(14)) for key in ("state", "actions")}


def test_only_the_cameras_asked_for_are_read(tmp_path: Path) -> None:
    root = write(tmp_path / "one")
    one = create_source(config(tmp_path, root, cameras=(LEFT_WRIST_CAMERA,)), get_robot("aloha"), image_size=16)
    assert one.cameras == (LEFT_WRIST_CAMERA,)
    assert isinstance(one, LeRobotSource)
    assert list(one.cache.folders) == [LEFT]
    assert create_source(config(tmp_path, root, cameras=()), get_robot("aloha")).cameras == ()
    with pytest.raises(ConfigError, match="did you mean: left_wrist_0_rgb"):
        create_source(config(tmp_path, root, cameras=("left_wrist_rgb",)), get_robot("aloha"))
    # A camera the robot has but the dataset lacks is told when it is asked for by name or needed.
    bare = select_cameras(get_robot("libero"), None)
    assert bare is get_robot("libero")
    with pytest.raises(DataError, match="no picture for camera base_0_rgb"):
        create_source(config(tmp_path, root), get_robot("libero"))
    assert RIGHT_WRIST_CAMERA not in create_source(config(tmp_path, root), get_robot("aloha")).cameras


def test_joined_states_are_found() -> None:
    droid = get_robot("droid")
    assert find_columns(droid, ["joint_position", "gripper_position", "actions", "task_index"]) == (
        ("joint_position", "gripper_position"),
        "actions",
    )
    assert find_columns(droid, ["joint_position", "action"]) == (("observation.state",), "action")


def test_statistics_go_by_the_asset_id(tmp_path: Path) -> None:
    root = write(tmp_path / "one")
    assert asset_id(str(root)) == "one"
    assert asset_id("me/cubes") == "me/cubes"
    assert asset_id(str(tmp_path / "gone")) == "gone"
    with pytest.raises(DataError, match=r"assets/mine/norm_stats\.json"):
        create_transform(config(tmp_path, root, asset_id="mine"), horizon=HORIZON)
    with pytest.raises(ConfigError, match="set asset_id or repo_ids"):
        create_transform(config(tmp_path), horizon=HORIZON)
    own = make_robot(name="my arm", state_dim=14, action_dim=14)
    with pytest.raises(DataError, match="compute_norm_stats"):
        create_transform(config(tmp_path, root), horizon=HORIZON, robot=own)
    assert create_transform(config(tmp_path, root), horizon=HORIZON, robot=own, norm_stats=plain_stats()).robot == own


def test_a_loader_of_the_replay_buffer_alone(tmp_path: Path) -> None:
    source = create_source(config(tmp_path, write(tmp_path / "one")), get_robot("aloha"), image_size=16)
    replay = ReplayBuffer(cameras=source.cameras, max_episodes=9, max_bytes=10**8)
    replay.append(source.episode(1), source.frames(1))
    transform = create_transform(config(tmp_path), horizon=HORIZON, norm_stats=plain_stats(), image_size=16)
    options = dict(transform=transform, horizon=HORIZON, discount=0.9, batch_size=4)
    with create_acrlpd_data_loader(config(tmp_path), replay=replay, **options) as loader:
        batch = loader.sample_batch()
        np.testing.assert_allclose(batch["observations"]["state"][:, 3], 1, rtol=1e-5)  # the episode's number
        assert loader.get_dataset_statistics()["online"].episodes == 1
        assert "offline" not in loader.get_dataset_statistics()


def test_what_cannot_be_created_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="repo_ids is empty"):
        create_source(config(tmp_path), get_robot("aloha"))
    with pytest.raises(DataError, match="no LeRobot dataset at"):
        create_source(config(tmp_path, tmp_path / "nothing" / "there"), get_robot("aloha"))
    with pytest.raises(ConfigError, match="1 success_file for 2 datasets"):
        config(tmp_path, tmp_path / "a", tmp_path / "b", success_file="labels.json")
    transform = create_transform(config(tmp_path), horizon=HORIZON, norm_stats=plain_stats())
    with pytest.raises(ConfigError, match="224x112"):
        create_acrlpd_data_loader(
            config(tmp_path), transform=replace(transform, image_size=(224, 112)), horizon=HORIZON, discount=0.9
        )


def test_tokenizers_by_name(tmp_path: Path) -> None:
    assert isinstance(create_tokenizer("byte"), ByteTokenizer)
    assert isinstance(create_tokenizer("word"), WordTokenizer)
    assert create_tokenizer("none") is None
    with pytest.raises(DataError, match="tokenizer was not found"):
        create_tokenizer(str(tmp_path / "missing.model"))


def test_outcomes_follow_the_configuration(tmp_path: Path) -> None:
    root = write(tmp_path / "one")
    (tmp_path / "labels.json").write_text('{"0": false, "2": true}')
    options = dict(outcome="step_penalty", success_file=str(tmp_path / "labels.json"))
    source = create_source(config(tmp_path, root, **options), get_robot("aloha"))
    assert [source.episode(index).success for index in range(3)] == [False, None, True]
    assert source.episode(2).rewards.tolist() == [-1.0] * 9 + [0.0]
    recorded = create_source(config(tmp_path, root), get_robot("aloha"))
    assert [recorded.episode(index).success for index in range(3)] == [True, True, False]
