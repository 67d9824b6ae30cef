"""From the robot's recorder to weights: whole runs on a dataset with interventions, and the same again after a stop."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pirl.agents.config import ACRLPDConfig, DAggerConfig
from pirl.config import RLTrainConfig
from pirl.data.create import create_source
from pirl.data.normalize import save_norm_stats
from pirl.data.robots import get_robot
from pirl.data.stats import compute_norm_stats
from pirl.robot.recorder import Recorder
from pirl.training.loop import train
from small_runs import assert_same_bits, compiled_once, records, restored, small_run

FLAGS = ("......CC", "CC....", ".......C", "..CC..CCC.", "....")
AGENTS = {
    "dagger": DAggerConfig(augment=False, policy_weight=0.5, mask_padding=True),
    "acrlpd": ACRLPDConfig(
        augment=False,
        discount=0.9,
        reward_low=-3.0,
        num_action_samples=2,
        flow_steps=2,
        correction_weight=2.0,
    ),
}


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten episodes as the robot records them."""
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("corrected") / "data"
    with Recorder(root, fps=5, horizon=3) as recorder:
        for number, flags in enumerate(FLAGS * 2):
            recorder.start(task="go to the goal")
            for flag in flags:
                state, chunk = rng.normal(size=2).astype(np.float32), rng.normal(size=(3, 2)).astype(np.float32)
                planned = None if flag == "C" else (chunk, 0)
                recorder.step({"state": state}, chunk[0], intended=planned, intervention=flag == "C")
            recorder.end(number % 3 > 0, truncated=number % 2 > 0)
    return root


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory.mktemp("programs")):
        yield


def run_of(name: str, corrected: Path, folder: Path) -> RLTrainConfig:
    config = small_run(folder, AGENTS[name], exp_name="straight")
    failing = {} if name == "dagger" else {"takeover": "failure", "takeover_reward": -2.0}
    data = replace(
        config.data, repo_ids=(str(corrected),), assets_dir=str(folder), asset_id="robot", takeover_window=2, **failing
    )
    robot = replace(get_robot("synthetic"), cameras={})
    save_norm_stats(folder / "robot", compute_norm_stats(create_source(data, robot), robot, config.horizon))
    return replace(config, data=data)


@pytest.mark.parametrize("name", AGENTS)
def test_a_run_on_corrections_goes_on_where_it_stopped(
    name: str, corrected: Path, tmp_path: Path, programs: None
) -> None:
    straight = run_of(name, corrected, tmp_path)
    pieces = replace(straight, exp_name="pieces")
    assert train(straight) == 0
    assert train(replace(pieces, num_train_steps=5)) == 0
    assert train(pieces, resume=True) == 0
    assert_same_bits(restored(pieces).params, restored(straight).params)
    found = records(straight.run_dir)[-1]["values"]
    if name == "dagger":
        assert found["data/corrected"] > 0
        assert found["data/blamed"] > 0
        assert found["data/imitated"] < 1
    else:
        assert found["critic/y"] < 0  # takeovers fail, and cost
