"""Settings against data: discount by length, rewards by range, the critic's clip by what actions are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.dataset import LeRobotSource
from pirl.data.fit import Expected, clip_warnings, discount_warnings, fit_problems, median_length
from pirl.data.inspection import inspect_dataset
from pirl.data.normalize import NormStats, normalize
from pirl.data.robots import Robot, make_robot
from pirl.data.writer import LeRobotWriter
from pirl.errors import DataError, PirlWarning

SPARSE = Expected(discount=0.9, rewards=(0.0, 1.0), once=True)


@dataclass(frozen=True)
class Recorded:
    """One episode."""

    rewards: Sequence[float]
    success: bool = True


def write(root: Path, episodes: Sequence[Recorded], actions: Any = None) -> LeRobotSource:
    """A dataset of these rewards; the last step of each episode ends the task."""
    features: dict[str, Any] = {key: {"dtype": "float32", "shape": [2]} for key in ("observation.state", "action")}
    features |= {"next.reward": {"dtype": "float32", "shape": [1]}, "next.success": {"dtype": "bool", "shape": [1]}}
    rng = np.random.default_rng(0)
    with LeRobotWriter(root, fps=10, features=features) as writer:
        for one in episodes:
            steps = len(one.rewards)
            columns = {
                "observation.state": rng.normal(size=(steps, 2)).astype(np.float32),
                "action": rng.normal(size=(steps, 2)).astype(np.float32) if actions is None else actions[:steps],
                "next.reward": np.asarray(one.rewards, np.float32),
                "next.success": one.success & (np.arange(steps) == steps - 1),
            }
            for step in range(steps):
                writer.add_frame({name: column[step] for name, column in columns.items()})
            writer.save_episode(task="reach")
    return LeRobotSource(root, cameras={})


def sparse(steps: int, *, success: bool = True) -> Recorded:
    return Recorded([0.0] * (steps - 1) + [float(success)], success)


@pytest.mark.parametrize(("discount", "steps"), [(0.99, 229.0), (0.9, 11.0), (0.999, 101.0), (0.999, 2301.0)])
def test_a_horizon_between_a_tenth_of_a_success_and_ten_episodes_is_fine(discount: float, steps: float) -> None:
    assert list(discount_warnings(discount, steps)) == []


def test_a_discount_that_does_not_see_the_end_is_said() -> None:
    (found,) = discount_warnings(0.99, 1000.0)
    assert "a success is worth 4e-05 at the start of a median episode of 1000 steps" in str(found)
    assert "--agent.discount 0.999, which leaves 0.37 of it" in str(found)
    assert len(list(discount_warnings(0.99, 230.0))) == 1  # .99 ** 230 = .0991


def test_a_discount_that_looks_far_beyond_the_end_is_said() -> None:
    (found,) = discount_warnings(0.999, 99.0)
    assert "looks 1000 steps ahead, 10 times a median episode of 99 steps" in str(found)
    assert "--agent.discount 0.9899" in str(found)


def test_the_median_is_of_successes_where_there_are_any(tmp_path: Path) -> None:
    mixed = write(tmp_path / "a", [sparse(4), sparse(6), *[sparse(30, success=False)] * 3])
    found = inspect_dataset(mixed.meta.root)
    assert found.steps == 5
    assert "a discount that fits: 0.8 (1 - 1/N for a median of 5 steps)" in str(found)
    lost = write(tmp_path / "b", [sparse(30, success=False)])
    assert median_length(lost.lengths, [False]) == 30
    (said,) = fit_problems([mixed, lost], Expected(discount=0.5, rewards=None, once=False))
    assert "a median episode of 5 steps" in str(said)


def test_rewards_beyond_the_range_are_refused_by_file_and_episode(tmp_path: Path) -> None:
    source = write(tmp_path, [sparse(5), Recorded([0, -1, -3, 0, 2.5]), Recorded([-1, 0, 0])])
    (found,) = fit_problems([source], SPARSE)
    assert isinstance(found, DataError)
    assert "file-000.parquet: episode 1: the reward of frame 2 is -3, the agent expects 0 to 1 (2 such" in str(found)
    assert found.hint == "--agent.reward-low -3 --agent.reward-high 2.5"
    wide = Expected(discount=0.9, rewards=(-3.0, 2.5), once=False)
    assert list(fit_problems([source], wide)) == []
    assert list(fit_problems([source], Expected(discount=0.9, rewards=None, once=False))) == []


def test_returns_beyond_one_reward_are_refused(tmp_path: Path) -> None:
    """Six steps of .3 are worth 1.41 at γ .9, two of them .57: what matters is what the values would have to be."""
    (few, many) = (write(tmp_path / name, [Recorded([0.3] * n)]) for name, n in (("few", 2), ("many", 6)))
    assert list(fit_problems([few], Expected(discount=0.8, rewards=(0.0, 1.0), once=True))) == []
    (found,) = fit_problems([many], SPARSE)
    assert isinstance(found, DataError)
    assert f"6 steps pay, with returns up to {sum(0.3 * 0.9**k for k in range(6)):g}" in str(found)
    assert found.hint == "--agent.no-reward-once"
    many_allowed = Expected(discount=0.9, rewards=(0.0, 1.0), once=False)
    assert list(fit_problems([many], many_allowed)) == []


def point(relative: tuple[int, ...] = ()) -> Robot:
    return make_robot(name="point", state_dim=2, action_dim=2, cameras={}, relative=relative)


def test_a_clip_that_hides_actions_is_said_with_one_that_does_not(tmp_path: Path) -> None:
    """Of a Gaussian, 13.4 % lie beyond 1.5 standard deviations and .006 % beyond 4."""
    actions = np.random.default_rng(1).normal(size=(4000, 2)).astype(np.float32)
    source = write(tmp_path, [sparse(4000)], actions)
    stats = NormStats(mean=np.zeros(2), std=np.ones(2))
    (found,) = clip_warnings([source], point(), stats, clip=1.5, steps=1, quantile=False)
    assert isinstance(found, PirlWarning)
    share = float(str(found).split("%")[0])
    assert share == pytest.approx(100 * (np.abs(actions) > 1.5).mean(), abs=0.06)
    assert share == pytest.approx(13.4, abs=1)
    assert "--critic.action-clip 3.5" in str(found)
    assert not list(clip_warnings([source], point(), stats, clip=3.5, steps=1, quantile=False))
    assert not list(clip_warnings([source], point(), stats, clip=np.inf, steps=1, quantile=False))


def test_the_clip_is_measured_on_chunks_as_the_critic_sees_them(tmp_path: Path) -> None:
    """Relative to the chunk's first state, held at the end, in quantiles: against a loop over all starts."""
    steps = 3
    actions = np.cumsum(np.random.default_rng(2).normal(size=(50, 2)), 0).astype(np.float32)
    source = write(tmp_path, [sparse(50), sparse(20)], actions)
    numbers = np.array([1.0, 2.0])
    stats = NormStats(mean=numbers, std=numbers, q01=-numbers, q99=numbers)
    seen = []
    for index in range(2):
        episode = source.episode(index)
        for start in range(len(episode)):
            rows = [min(start + step, len(episode) - 1) for step in range(steps)]
            moved = episode.actions[rows].astype(np.float64)
            moved[:, 0] -= episode.state[start, 0]
            seen.append(normalize(moved, stats, quantile=True))
    expected = (np.abs(seen) > 1.5).mean()
    (found,) = clip_warnings([source], point((1, -1)), stats, clip=1.5, steps=steps, quantile=True)
    assert f"{expected:.1%} of the normalised" in str(found)
