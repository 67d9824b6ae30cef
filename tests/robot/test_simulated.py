"""The simulated robot drives any server of OpenPI's protocol and records what happened."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.dataset import LeRobotSource
from pirl.data.lerobot import read_meta
from pirl.data.rows import read_columns
from pirl.robot.simulated import main
from policy_server import policy_server

PICTURE = {"base_0_rgb": "observation.images.image"}
LEFT = np.tile(np.array([-1, 0, 1], np.float32), (4, 1))


def fetch(request: Mapping[str, Any], *, wrong: bool = False) -> dict[str, Any]:
    """A scripted policy that looks at the picture: to the block, close, then left (or right) and never let go."""
    state, image = request["observation/state"], request["observation/image"].astype(int)
    gripper, holding = (state[:2] + 1) / 2, state[3] > 0
    if holding:
        return {"actions": LEFT * (np.array([-1, 1, 1], np.float32) if wrong else 1)}
    coloured = np.ptp(image, axis=2) > 60
    rows, columns = np.nonzero(coloured)
    block = (np.array([columns.mean(), rows.mean()]) + 0.5) / len(image)
    move = np.clip((block - gripper) / 0.12, -1, 1)
    near = np.abs(block - gripper).max() < 0.06
    return {"actions": np.array([[*move, 1.0 if near else -1.0]], np.float32)}


@pytest.mark.parametrize("supervised", [False, True])
def test_a_supervisor_takes_over_when_the_block_is_carried_the_wrong_way(tmp_path: Path, supervised: bool) -> None:
    """All tasks here go left; this policy carries right and never lets go."""
    root = tmp_path / "data"
    with policy_server(lambda request: fetch(request, wrong=True), metadata={"pirl/execute": 1}) as server:
        words = ["--server", f"ws://127.0.0.1:{server.port}", "--inits", "0,6,12,0", "--record", str(root)]
        assert main([*words, "--supervise", str(float(supervised))]) == 0
    source = LeRobotSource(root, cameras=PICTURE, image_size=None)
    episodes = [source.episode(index) for index in range(4)]
    assert len({episode.task for episode in episodes}) == 1
    np.testing.assert_array_equal(source.frames(0)["base_0_rgb"][0], source.frames(3)["base_0_rgb"][0])  # same state
    flags = np.concatenate([episode.intervention for episode in episodes if episode.intervention is not None])
    assert flags.any() == supervised
    if supervised:
        assert set(read_columns(source.meta)["policy"][flags].tolist()) == {"operator"}
        assert any(episode.success for episode in episodes)
    else:
        assert not any(episode.success for episode in episodes)


def test_nobody_supervises_a_comparison(tmp_path: Path) -> None:
    root = tmp_path / "data"
    with policy_server(lambda request: fetch(request, wrong=True), metadata={"pirl/execute": 1}) as server:
        words = ["--server", f"ws://127.0.0.1:{server.port}", "--inits", "0", "--record", str(root)]
        assert main([*words, "--supervise", "1.0", "--purpose", "compare", "--outcomes", "none"]) == 0
    columns = read_columns(read_meta(root))
    assert not columns["intervention"].any()
    assert "next.success" not in columns


def test_an_unreachable_server_is_an_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with policy_server(metadata={"pirl/execute": 1}, key="secret") as server:
        assert main(["--server", f"ws://127.0.0.1:{server.port}"]) == 1
    assert "refused (401)" in capsys.readouterr().err
