"""Who chose each action, the policy or a person, is read from LeRobot's column and never lost on the way."""

from pathlib import Path

import numpy as np
import pytest

from pirl.data.dataset import LeRobotSource, MixedSource
from pirl.data.inspection import inspect_dataset
from pirl.data.replay import ReplayBuffer
from pirl.data.writer import LeRobotWriter
from pirl.errors import DataError

FLAGS = ([False, True, True, False, True, False], [False] * 4)
"""Two episodes: one with two corrections of three frames together, one without."""


def recorded(root: Path, *, column: str | None = "bool", shape: tuple[int, ...] = (1,)) -> Path:
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "action": {"dtype": "float32", "shape": [3], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
    }
    if column:
        features["intervention"] = {"dtype": column, "shape": list(shape), "names": None}
    with LeRobotWriter(root, fps=5, features=features) as writer:
        for flags in FLAGS:
            length = len(flags)
            columns = {
                "observation.state": np.zeros((length, 2), np.float32),
                "action": np.ones((length, 3), np.float32),
                "next.success": np.arange(length) == length - 1,
            }
            if column:
                columns["intervention"] = np.broadcast_to(
                    np.array(flags).reshape(length, *[1] * (shape != (1,))), (length, *(shape if shape != (1,) else ()))
                ).astype(column)
            writer.add_episode(columns, task="put it away")
    return root


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
def test_every_row_keeps_its_flag(tmp_path: Path, dtype: str) -> None:
    source = LeRobotSource(recorded(tmp_path / "data", column=dtype), cameras={})
    for mixed in (source, MixedSource([source])):
        for index, flags in enumerate(FLAGS):
            found = mixed.episode(index).intervention
            assert found is not None
            assert found.dtype == bool
            assert found.tolist() == flags


def test_a_dataset_that_does_not_say_has_none(tmp_path: Path) -> None:
    root = recorded(tmp_path / "data", column=None)
    assert LeRobotSource(root, cameras={}).episode(0).intervention is None
    assert "interventions" not in str(inspect_dataset(root))


def test_an_inspection_counts_corrections_episodes_and_frames(tmp_path: Path) -> None:
    text = str(inspect_dataset(recorded(tmp_path / "data")))
    assert "interventions: 2 in 1 of 2 episodes, 3 of 10 frames (30.0%)" in text


def test_a_column_of_another_shape_is_refused(tmp_path: Path) -> None:
    root = recorded(tmp_path / "data", shape=(2,))
    with pytest.raises(DataError, match=r"intervention is bool of shape \(2,\), expected one truth value"):
        LeRobotSource(root, cameras={})


def test_the_replay_buffer_saves_and_restores_the_flags(tmp_path: Path) -> None:
    source = LeRobotSource(recorded(tmp_path / "data"), cameras={})
    replay = ReplayBuffer(cameras=(), max_episodes=4, max_bytes=10**6)
    replay.append(source.episode(0), {})
    state = replay.save(tmp_path / "replay")
    other = ReplayBuffer(cameras=(), max_episodes=4, max_bytes=10**6)
    other.restore(tmp_path / "replay", state)
    assert other.episode(0).intervention is not None
    assert other.episode(0).intervention.tolist() == FLAGS[0]
