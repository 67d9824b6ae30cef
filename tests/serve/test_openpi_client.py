"""The real openpi-client, in an environment of its own (it pins NumPy below 2), drives the server."""

import json
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from acting_runs import save_run, walking
from pirl.agents.config import BCConfig
from pirl.data.normalize import NormStats
from pirl.models.config import PRESETS
from pirl.names import CAMERAS
from pirl.paths import pirl_home
from pirl.serve.planner import Planner
from pirl.serve.server import PolicyServer
from pirl.training.acting import Acting, open_checkpoint
from serving_runs import SEEN, Client, load, running

PACKAGES = ("openpi-client==0.1.2", "typing_extensions")
"""It needs the second, and does not say so."""
ROBOT = Path(__file__).parent / "openpi_robot.py"


@pytest.fixture(scope="session")
def openpi_python() -> Path:
    """An interpreter with openpi-client, installed once and kept."""
    folder = pirl_home() / "tests" / f"openpi-client-0.1.2-py{sys.version_info.major}.{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, done = folder / "bin" / "python", folder / "installed"
    with FileLock(f"{folder}.lock"):
        if not done.is_file():
            venv.create(folder, with_pip=True, clear=True)
            pip = [str(python), "-m", "pip", "install", "-q", "--only-binary", ":all:", "--retries", "1", *PACKAGES]
            found = subprocess.run(pip, capture_output=True, text=True, check=False)
            if found.returncode:
                pytest.skip(f"pip cannot install openpi-client here: {found.stderr.strip().splitlines()[-1]}")
            done.touch()
    return python


def drive(python: Path, server: PolicyServer, seen: dict[str, Any], folder: Path, key: str = "") -> tuple[Any, Any]:
    """(what the robot says, the actions it got)."""
    np.savez(folder / "seen.npz", **seen)
    words = [str(python), str(ROBOT), f"ws://127.0.0.1:{server.port}", key, "seen.npz", "out.npz"]
    found = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert found.returncode == 0, found.stderr
    with np.load(folder / "out.npz") as arrays:
        return json.loads(found.stdout), dict(arrays)


def expected(acting: Acting, seen: dict[str, Any], number: int) -> np.ndarray:
    return acting.use(0).plan({0: seen}, {0: (0, number)})[0]


def test_a_stock_client_gets_the_checkpoints_actions(
    openpi_python: Path, planner: Planner, run_folder: Path, tmp_path: Path
) -> None:
    with running(planner, metadata={"reset_pose": [0, -1.5]}, api_key="sesame") as server:
        said, got = drive(openpi_python, server, SEEN, tmp_path, key="sesame")
        assert server.metrics.counted("requests") == 4
    assert said["numpy"].startswith("1.")
    assert said["metadata"]["reset_pose"] == [0, -1.5]
    assert {"infer_ms", "prev_total_ms"} == set(said["reply"]["server_timing"])
    assert said["reply"]["pirl/candidates"] == 3
    assert "no state" in said["said"]
    acting = open_checkpoint(
        run_folder / "5", change=lambda config: replace(config, rollout=replace(config.rollout, best_of=3))
    )
    for number, reply in enumerate((got["reply0"], got["reply1"], got["steps"][:3], got["steps"][3:])):
        np.testing.assert_allclose(reply, expected(acting, SEEN, number), rtol=0, atol=1e-5)


def test_a_stock_client_sends_alohas_nested_pictures(openpi_python: Path, tmp_path: Path) -> None:
    """Channels first, in a map of their own; the joints go to π₀'s space and come back, relative to the state."""
    rng = np.random.default_rng(0)
    recipe = walking(tmp_path, BCConfig(), env=None)
    model = replace(PRESETS["pi0_tiny"], horizon=3, action_dim=16, dtype="float32", attention="plain")
    model = replace(model, cameras=CAMERAS[:2])
    data = replace(recipe.data, robot="aloha", cameras=CAMERAS[:2], tokenizer="byte")
    config = replace(recipe, model=model, data=data)
    stats = {
        name: NormStats(mean=rng.normal(size=14), std=rng.uniform(0.5, 2, 14), q01=-np.ones(14), q99=np.ones(14))
        for name in ("state", "actions")
    }
    folder = save_run(config, {5: 0.5}, stats=stats) / "5"
    seen = {
        "state": rng.uniform(-0.3, 0.3, 14).astype(np.float32),
        "images/cam_high": rng.integers(0, 256, (3, 48, 64), np.uint8),
        "images/cam_left_wrist": rng.integers(0, 256, (3, 32, 32), np.uint8),
        "prompt": "fold",
    }
    settings = {"max_batch": 1, "real_time": True}
    nested = {"state": seen["state"], "prompt": "fold", "images": {k[7:]: seen[k] for k in seen if k[:7] == "images/"}}
    moved = nested | {"state": seen["state"] + np.float32(0.2), "pirl/episode": 1, "pirl/step": 1}
    with running(load(folder, settings=settings), **settings) as server:
        said, got = drive(openpi_python, server, seen, tmp_path)
        with Client(server.port) as client:
            first = client.ask(nested | {"pirl/episode": 1})["actions"]
            following = client.ask(moved | {"pirl/executed": 1, "pirl/delay": 2})["actions"]
            plain = client.ask(moved)["actions"]
    assert "no instruction" in said["said"]
    acting = open_checkpoint(folder)
    np.testing.assert_allclose(got["reply1"], expected(acting, seen, 1), rtol=0, atol=1e-4)
    assert got["reply0"].shape == (3, 14)
    # The next chunk agrees with what is left of the last one, in places, although the robot has moved meanwhile.
    gap, was = (np.abs(chunk[:2] - first[1:]).mean() for chunk in (following, plain))
    assert gap < 0.5 * was
