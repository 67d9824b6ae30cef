"""The safety net: what each limit does to a chunk, against loops in NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.errors import ConfigError
from pirl.serve.safety import Box, SafetyConfig, SafetyNet, load_safety

STATE = np.zeros(3)
CHUNK = np.array([[0.0, 0.0], [0.1, -0.1], [0.2, 0.3], [0.3, 0.2], [0.2, 0.1]], np.float32)


def net(**limits: Any) -> SafetyNet:
    return SafetyNet(SafetyConfig(rate=10.0, **limits), action_dim=2, state_dim=3)


def clipped(
    chunk: np.ndarray, *, state: np.ndarray = STATE, last: Any = None, expected: Any = None, **limits: Any
) -> Any:
    found = net(mode="clip", **limits).check(chunk, state=state, last=last, expected=expected)
    refused = net(**limits).check(chunk, state=state, last=last, expected=expected)
    assert (refused.chunk is None) == bool(found.rules)  # the same limits, whatever happens beyond them
    assert found.rules[:1] == refused.rules
    again = net(mode="clip", **limits).check(found.chunk, state=state, last=last, expected=expected)
    assert not again.rules  # what was clipped is within the limits
    return found


def test_a_chunk_within_its_limits_is_passed_on_untouched() -> None:
    loose = {"low": (-9.0, -9.0), "high": (9.0, 9.0), "velocity": (99.0, 99.0), "jerk": (9e4, 9e4), "jump": (9.0, 9.0)}
    found = net(**loose).check(CHUNK, state=STATE, last=CHUNK, expected=CHUNK[2:])
    assert found.chunk is CHUNK
    assert found.rules == ()
    assert net().check(CHUNK * 1e6, state=STATE).rules == ()  # nothing is limited unless it is said


def test_limits() -> None:
    found = clipped(CHUNK, low=(-1.0, 0.0), high=(0.15, 1.0))
    np.testing.assert_allclose(found.chunk, np.clip(CHUNK, [-1, 0], [0.15, 1]))
    assert found.rules == ("limits",)
    assert found.reason == "limits: step 3, dimension 0 is 0.3, within the limit 0.15"


def test_velocity() -> None:
    found = clipped(CHUNK, velocity=(99.0, 1.5))
    expected = CHUNK.copy()
    for step in range(1, 5):
        expected[step, 1] = np.clip(CHUNK[step, 1], expected[step - 1, 1] - 0.15, expected[step - 1, 1] + 0.15)
    np.testing.assert_allclose(found.chunk, expected, atol=1e-6)
    assert np.abs(np.diff(found.chunk, axis=0))[:, 1].max() <= 0.15 + 1e-6


def test_jerk() -> None:
    found = clipped(CHUNK, jerk=(100.0, 100.0))
    third = np.abs(np.diff(found.chunk.astype(np.float64), n=3, axis=0))
    assert np.abs(np.diff(CHUNK, n=3, axis=0)).max() > 0.1 + 1e-3
    assert third.max() <= 0.1 + 1e-6
    np.testing.assert_array_equal(found.chunk[:3], CHUNK[:3])


def test_a_workspace_of_coordinates_and_one_of_steps() -> None:
    found = clipped(CHUNK, workspace=Box(actions=(1,), low=(-0.05,), high=(0.25,)))
    np.testing.assert_allclose(found.chunk[:, 1], np.clip(CHUNK[:, 1], -0.05, 0.25))
    np.testing.assert_array_equal(found.chunk[:, 0], CHUNK[:, 0])
    box = Box(actions=(0, 1), low=(-1.0, -1.0), high=(1.5, 1.0), state=(2, 0), scale=2.0)
    state = np.array([0.0, 9.0, 0.5])
    found = clipped(CHUNK, state=state, workspace=box)
    place = np.array([0.5, 0.0])
    for step, action in enumerate(CHUNK):  # where the steps lead
        there = np.clip(place + 2 * action, [-1, -1], [1.5, 1])
        np.testing.assert_allclose(found.chunk[step], (there - place) / 2, atol=1e-6)
        place = there
    outside = np.array([0.0, 0.0, 2.0])  # it may come back, and not go further out
    found = clipped(np.array([[0.1, 0.0], [-0.1, 0.0]], np.float32), state=outside, workspace=box)
    np.testing.assert_allclose(found.chunk[:, 0], [0.0, -0.1])


def test_a_jump_is_spread_over_the_chunk() -> None:
    last = CHUNK + np.array([1.0, 0.0])
    found = clipped(CHUNK, jump=(0.25, 9.0), last=last, expected=last[2:])
    assert found.chunk[0, 0] == pytest.approx(last[2, 0] - 0.25)
    moved = found.chunk[:, 0] - CHUNK[:, 0]
    np.testing.assert_allclose(moved, moved[0] * (1 - np.arange(5) / 5), atol=1e-6)
    # A client that does not say how far it got: only a jump from every step of the last chunk is one.
    assert net(jump=(0.85, 9.0)).check(CHUNK, state=STATE, last=last).rules == ("jump",)
    assert net(jump=(1.05, 9.0)).check(CHUNK, state=STATE, last=last).rules == ()
    assert net(jump=(0.1, 0.1)).check(CHUNK, state=STATE).rules == ()  # the first chunk follows none


def test_clipping_to_one_limit_never_breaks_another() -> None:
    ramp = np.tile(0.1 * np.arange(10.0)[:, None], 2).astype(np.float32)
    jerk = {"rate": 1.0, "mode": "clip", "high": (0.35, 0.35), "jerk": (0.001, 0.001)}
    found = SafetyNet(SafetyConfig(**jerk), action_dim=2, state_dim=3).check(ramp, state=STATE)
    assert found.chunk is None  # so smooth a ramp cannot stop before its limit
    assert found.rules == ("limits", "jerk")
    assert "cannot meet limits, jerk at once" in found.reason

    box = Box(actions=(0,), low=(0.0,), high=(0.5,), state=(0,))
    faster = np.array([[0.1, 0.0], [0.2, 0.0], [0.3, 0.0], [0.0, 0.0]], np.float32)
    found = net(mode="clip", velocity=(0.2, 9.0), workspace=box).check(faster, state=STATE)
    assert found.chunk is None or 0 <= np.cumsum(found.chunk[:, 0]).max() <= 0.5 + 1e-5


def test_a_clipped_chunk_is_within_all_limits_or_refused() -> None:
    rng, refused, sent = np.random.default_rng(0), 0, 0
    for _ in range(300):
        limits: dict[str, Any] = {"low": (-0.5, -0.5), "high": (0.5, 0.5), "jump": (0.2, 0.2)}
        limits |= {"velocity": tuple(rng.uniform(1, 9, 2)), "jerk": tuple(rng.uniform(50, 900, 2))}
        chunk, last = (rng.normal(0, 0.4, (6, 2)).astype(np.float32) for _ in range(2))
        found = net(mode="clip", **limits).check(chunk, state=STATE, last=last)
        if found.chunk is None:
            refused += 1
            continue
        sent += 1
        out = found.chunk.astype(np.float64)
        assert np.abs(out).max() <= 0.5 + 1e-5
        assert (np.abs(np.diff(out, axis=0)) <= np.array(limits["velocity"]) / 10 + 1e-5).all()
        assert (np.abs(np.diff(out, n=3, axis=0)) <= np.array(limits["jerk"]) / 1000 + 1e-5).all()
        assert np.abs(last - out[0]).max(axis=1).min() <= 0.2 + 1e-5
    assert sent > 30
    assert refused > 30


@pytest.mark.parametrize("mode", ["clip", "refuse"])
def test_actions_that_are_not_finite_are_always_refused(mode: Any) -> None:
    broken = CHUNK.copy()
    broken[3, 1] = np.nan
    found = net(mode=mode).check(broken, state=STATE)
    assert found.chunk is None
    assert found.rules == ("finite",)


def test_a_file_describes_a_robot(tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(
        "rate: 50\nmode: clip\nlow: [-1, -.inf]\nhigh: [1, 2]\nvelocity: [3, 3]\n"
        "workspace: {actions: [0], low: [-1], high: [1]}\n"
    )
    found = load_safety(file, action_dim=2, state_dim=3).config
    assert (found.rate, found.mode, found.high, found.low) == (50, "clip", (1, 2), (-1, -np.inf))
    assert found.workspace == Box(actions=(0,), low=(-1.0,), high=(1.0,))
    for text, said in {
        "rate: 50\nlow: [1, 2, 3]\n": "low has 3 values",
        "rate: 0\n": "rate is 0",
        "velocity: [1, 1]\n": "rate",
        "rate: 5\nspeed: 3\n": "speed",
        "rate: 5\njump: [0, 1]\n": "jump",
        "rate: 5\nworkspace: {actions: [7], low: [-1], high: [1]}\n": "workspace names actions",
        "rate: 5\nworkspace: {actions: [0], low: [1], high: [-1]}\n": "a workspace of 1 actions",
        "rate: 5\nworkspace: {actions: [0], low: [1, 2], high: [3]}\n": "a workspace of 1 actions",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=said) as caught:
            load_safety(file, action_dim=2, state_dim=3)
        assert "limits.yaml" in str(caught.value)
