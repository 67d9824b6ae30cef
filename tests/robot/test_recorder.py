"""Every control step comes back from the dataset, and a killed process loses at most the running episode."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pirl.data.dataset import LeRobotSource
from pirl.data.inspection import inspect_dataset
from pirl.data.lerobot import read_meta
from pirl.data.rows import read_columns
from pirl.errors import DataError
from pirl.robot.recorder import Recorder, columns_of

HORIZON = 4
CAMERA = "observation.images.cam_high"


def observation(t: int) -> dict:
    """ALOHA's: nested, pictures with channels first."""
    picture = np.zeros((3, 16, 24), np.uint8)
    picture[:, :, :8] = 10 * t
    return {"state": np.full(3, t, np.float32), "images": {"cam_high": picture}, "prompt": "fold"}


def record(recorder: Recorder, steps: int, *, success: bool, note: str = "", truncated: bool = False) -> int:
    recorder.start(task="fold the box", policy="bc/100")
    chunk = np.arange(2 * HORIZON, dtype=np.float32).reshape(HORIZON, 2)
    for t in range(steps):
        human = t == 2
        recorder.step(
            observation(t),
            np.array([t, -t], np.float32),
            intended=None if human else (chunk + t, t % HORIZON),
            intervention=human,
            policy="operator" if human else None,
        )
    return recorder.end(success, note=note, truncated=truncated)


def test_every_step_comes_back(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10, robot_type="aloha", horizon=HORIZON) as recorder:
        assert record(recorder, 5, success=True, note="clean") == 0
        assert record(recorder, 3, success=False, truncated=True) == 1
    source = LeRobotSource(tmp_path / "data", cameras={"base_0_rgb": CAMERA}, image_size=None)
    assert source.meta.robot == "aloha"
    columns = read_columns(source.meta)
    assert columns["policy"].tolist() == [
        "bc/100",
        "bc/100",
        "operator",
        "bc/100",
        "bc/100",
        "bc/100",
        "bc/100",
        "operator",
    ]
    assert columns["note"].tolist() == [""] * 4 + ["clean"] + [""] * 3
    assert columns["intended_step"].tolist() == [0, 1, -1, 3, 0, 0, 1, -1]
    np.testing.assert_array_equal(columns["intended"][3], np.arange(8).reshape(4, 2) + 3)
    episode = source.episode(0)
    assert (episode.task, episode.success, source.episode(1).success) == ("fold the box", True, False)
    assert episode.actions.tolist() == [[t, -t] for t in range(5)]
    assert episode.state[:, 0].tolist() == list(range(5))
    assert episode.intervention is not None
    assert episode.intervention.tolist() == [False, False, True, False, False]
    assert episode.terminated.tolist() == [False] * 4 + [True]
    assert source.episode(1).truncated[-1]
    frames = source.frames(0)["base_0_rgb"]
    assert frames.shape == (5, 16, 24, 3)
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 10, 20, 30, 40]


def test_the_reader_gives_the_rest_of_the_chunk_from_each_step_on(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10, horizon=HORIZON) as recorder:
        record(recorder, 5, success=True)
    intended = LeRobotSource(tmp_path / "data", cameras={}).episode(0).intended
    assert intended is not None
    chunk = np.arange(2 * HORIZON, dtype=np.float32).reshape(HORIZON, 2)
    np.testing.assert_array_equal(intended[1, :3], chunk[1:] + 1)
    assert np.isnan(intended[1, 3:]).all()
    assert np.isnan(intended[2]).all()
    np.testing.assert_array_equal(intended[4], chunk + 4)


def test_outcomes_may_be_left_to_labels(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10, outcomes=False) as recorder:
        recorder.start(task="fold")
        recorder.step(observation(0), np.zeros(2))
        with pytest.raises(DataError, match="has an outcome"):
            recorder.end(True)
        assert recorder.end(note="unclear") == 0
    found = inspect_dataset(tmp_path / "data")
    assert found.success == (None,)
    assert "next.success" not in found.features
    with Recorder(tmp_path / "other", fps=10) as recorder:
        recorder.start(task="fold")
        recorder.step(observation(0), np.zeros(2))
        with pytest.raises(DataError, match="lacks its outcome"):
            recorder.end()
        assert recorder.end(False) == 0  # the episode was still there


def test_a_dataset_is_continued(tmp_path: Path) -> None:
    for number in range(2):
        with Recorder(tmp_path / "data", fps=10, horizon=HORIZON) as recorder:
            assert record(recorder, 2, success=True) == number
    assert len(read_meta(tmp_path / "data").episodes) == 2


def test_a_discarded_episode_leaves_nothing(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10) as recorder:
        recorder.start(task="fold")
        recorder.step(observation(0), np.zeros(2))
        recorder.discard()
        assert record(recorder, 2, success=True) == 0


def test_a_bad_step_spoils_its_episode_alone(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10) as recorder:
        record(recorder, 2, success=True)
        recorder.start(task="fold")
        recorder.step(observation(0), np.array([np.nan, 0]))
        recorder.step(observation(1), np.zeros(2))
        with pytest.raises(DataError, match="not finite"):
            recorder.end(True)
        assert record(recorder, 2, success=True) == 1


def test_the_writing_process_dies_and_the_next_episode_is_recorded(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10) as recorder:
        record(recorder, 2, success=True)
        recorder.start(task="fold")
        assert recorder._writer is not None
        recorder._writer._process.kill()
        for t in range(3):
            recorder.step(observation(t), np.zeros(2))
        with pytest.raises(DataError, match="this episode is lost"):
            recorder.end(True)
        assert record(recorder, 2, success=True) == 1


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from test_recorder import HORIZON, Recorder, observation, record
import numpy as np
recorder = Recorder({root!r}, fps=10, horizon=HORIZON)
for number in range(2):
    record(recorder, 3, success=True)
recorder.start(task="fold")
recorder.step(observation(0), np.zeros(2), intended=(np.zeros((HORIZON, 2)), 0))
print("running", flush=True)
recorder._writer._thread.join()
"""


def test_kill_9_loses_the_running_episode_only(tmp_path: Path) -> None:
    root = tmp_path / "data"
    code = KILLED.format(tests=str(Path(__file__).parent), root=str(root))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"running\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with Recorder(root, fps=10, horizon=HORIZON) as recorder:  # waits for the process that still cleans up
        assert record(recorder, 2, success=True) == 2
    meta = read_meta(root)
    assert [one.length for one in meta.episodes] == [3, 3, 2]
    assert len(read_columns(meta)["index"]) == 8
    assert not (root / ".writing").exists()


def test_a_full_budget_refuses_the_next_episode(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10, max_gb=1e-6) as recorder:
        record(recorder, 2, success=True)
        with pytest.raises(DataError, match="budget"):
            recorder.start(task="fold")
    with Recorder(tmp_path / "other", fps=10, min_free_gb=1e9) as recorder:
        with pytest.raises(DataError, match="free on the disk"):
            recorder.start(task="fold")


def test_what_cannot_be_encoded_in_time_is_given_up_without_waiting(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10, max_pending_gb=1e-5) as recorder:
        recorder.start(task="fold")
        began = time.monotonic()
        for _ in range(50):
            recorder.step({"state": np.zeros(1), "image": np.zeros((64, 64, 3), np.uint8)}, np.zeros(2))
        assert time.monotonic() - began < 30
        with pytest.raises(DataError, match="waited to be encoded"):
            recorder.end(True)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path / "data", fps=10) as recorder:
        for call in (lambda: recorder.end(True), lambda: recorder.step({}, np.zeros(2))):
            with pytest.raises(DataError, match="no episode is running"):
                call()
        with pytest.raises(DataError, match="no task"):
            recorder.start(task=" ")
        recorder.start(task="fold")
        with pytest.raises(DataError, match="is running"):
            recorder.start(task="fold")
        with pytest.raises(DataError, match="no steps"):
            recorder.end(True)
        with pytest.raises(DataError, match="no state"):
            recorder.step({"prompt": "fold"}, np.zeros(2))


def test_states_are_found_or_joined() -> None:
    droid = {"observation/joint_position": np.arange(7), "observation/gripper_position": 0.5, "prompt": "x"}
    assert columns_of(droid)["observation.state"].tolist() == [*range(7), 0.5]
    libero = {"observation/state": np.ones(8), "observation/image": np.zeros((8, 8, 3), np.uint8), "pirl/step": 3}
    found = columns_of(libero)
    assert sorted(found) == ["observation.images.image", "observation.state"]
    picture = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(DataError, match=r"two of the observation's pictures .* observation\.images\.image"):
        columns_of({"state": np.ones(2), "wrist/image": picture, "base/image": picture})
