"""The replay buffer: its limits, what readers see while it changes, and what survives on disk."""

from dataclasses import replace

import numpy as np
import pytest

from pirl.data.episode_store import keep_only
from pirl.data.replay import ReplayBuffer, ReplayStream
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.records import Episode

CAMERA = "base_0_rgb"


def rollout(number, steps=3, *, success=True, plan=True, side=4):
    rng = np.random.default_rng(number)
    episode = Episode(
        task=f"put block {number} away",
        state=rng.normal(size=(steps, 2)).astype(np.float32),
        actions=rng.normal(size=(steps, 2)).astype(np.float32),
        rewards=np.full(steps, number, np.float32),
        terminated=np.arange(steps) == steps - 1,
        truncated=np.zeros(steps, bool),
        success=success,
        intended=rng.normal(size=(steps, 5, 2)).astype(np.float32) if plan else None,
    )
    return episode, {CAMERA: rng.integers(0, 256, (steps, side, side, 3), dtype=np.uint8)}


def buffer(count=0, **limits):
    replay = ReplayBuffer(**{"cameras": (CAMERA,), "max_episodes": 4, "max_bytes": 10**6} | limits)
    for number in range(count):
        replay.append(*rollout(number))
    return replay


def numbers(replay):
    return [int(replay.episode(index).rewards[0]) for index in range(len(replay))]


def assert_same(left, right):
    assert len(left) == len(right)
    assert left.appended == right.appended
    assert left.nbytes == right.nbytes
    for index in range(len(left)):
        ours, theirs = left.episode(index), right.episode(index)
        for name in Episode.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            assert type(getattr(ours, name)) is type(getattr(theirs, name))
        np.testing.assert_array_equal(left.frames(index)[CAMERA], right.frames(index)[CAMERA])


def test_the_oldest_leave_when_there_are_too_many():
    replay = buffer(6)
    assert numbers(replay) == [2, 3, 4, 5]
    assert replay.appended == 6
    assert replay.lengths.tolist() == [3] * 4


def test_the_oldest_leave_when_there_are_too_many_bytes():
    one = buffer(1).nbytes
    assert one > 3 * 4 * 4 * 3  # the pictures are counted, and more than they
    replay = buffer(3, max_bytes=int(2.5 * one))
    assert numbers(replay) == [1, 2]
    assert replay.nbytes <= replay.max_bytes
    big = rollout(7, steps=4)
    replay.append(*big)
    assert numbers(replay) == [2, 7]
    with pytest.raises(DataError, match=r"takes \d+ bytes"):
        replay.append(*rollout(8, side=100))
    assert numbers(replay) == [2, 7]


def test_bad_pictures_and_limits_are_refused():
    episode, frames = rollout(0)
    for bad in ({}, {CAMERA: frames[CAMERA][:2]}):
        with pytest.raises(DataError, match=r"expected uint8 \[3, h, w, 3\]"):
            buffer().append(episode, bad)
    with pytest.raises(ConfigError, match="can hold nothing"):
        buffer(max_episodes=0)


def test_a_snapshot_does_not_change():
    replay = buffer(4)
    before = replay.snapshot()
    assert before is replay.snapshot()
    replay.append(*rollout(9))
    assert [int(before.episode(index).rewards[0]) for index in range(len(before))] == [0, 1, 2, 3]
    np.testing.assert_array_equal(before.frames(0)[CAMERA], rollout(0)[1][CAMERA])


def test_the_stream_follows_the_buffer():
    replay = buffer()
    stream = ReplayStream(replay, discount=0.9)
    assert stream.resident(0) is None
    replay.append(*rollout(1))
    first = stream.resident(0)
    assert first is stream.resident(1)
    assert len(first.table) == 3
    replay.append(*rollout(2, steps=5))
    assert len(stream.resident(1).table) == 8
    assert len(first.table) == 3


def test_an_episode_keeps_its_number_whatever_its_last_bits_and_whoever_left(tmp_path):
    """Which critics learn from an episode hangs on its number: another number of devices must not change it."""
    replay, nearly = buffer(6), buffer(5)
    episode, frames = rollout(5)
    nearly.append(replace(episode, actions=np.nextafter(episode.actions, 9)), frames)
    for one in (replay, nearly):
        table = ReplayStream(one, discount=0.9).resident(0).table
        assert table.numbers.tolist() == [2, 3, 4, 5]
    restored = buffer()
    restored.restore(tmp_path, replay.save(tmp_path))
    assert ReplayStream(restored, discount=0.9).resident(0).table.numbers.tolist() == [2, 3, 4, 5]


def test_saved_and_restored_it_is_the_same(tmp_path):
    replay = buffer(2)
    replay.append(*rollout(5, success=None, plan=False))
    replay.append(*rollout(6, success=False))
    state = replay.save(tmp_path)
    restored = buffer(3)
    restored.restore(tmp_path, state)
    assert_same(replay, restored)
    replay.append(*rollout(7))
    restored.append(*rollout(7))
    assert_same(replay, restored)
    assert replay.save(tmp_path / "a") == restored.save(tmp_path / "b")


def test_saving_writes_only_what_is_new(tmp_path):
    replay = buffer(3)
    replay.save(tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(written) == 3
    replay.append(*rollout(3))
    replay.append(*rollout(4))
    state = replay.save(tmp_path)
    now = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(now) == 5
    assert now.items() >= written.items()
    assert len(state["episodes"]) == 4


def test_an_older_checkpoint_survives_another_history(tmp_path):
    """Resuming from an old state and collecting other episodes leaves both states restorable."""
    replay = buffer(2)
    old = replay.save(tmp_path)
    replay.append(*rollout(2))
    new = replay.save(tmp_path)
    other = buffer()
    other.restore(tmp_path, old)
    other.append(*rollout(20))
    branch = other.save(tmp_path)
    for state, content in ((old, [0, 1]), (new, [0, 1, 2]), (branch, [0, 1, 20])):
        again = buffer()
        again.restore(tmp_path, state)
        assert numbers(again) == content
    assert [path.name for path in keep_only(tmp_path, [*old["episodes"], *branch["episodes"]])] == [new["episodes"][-1]]
    again.restore(tmp_path, branch)
    with pytest.raises(CheckpointError, match="is missing"):
        again.restore(tmp_path, new)


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "camera"])
def test_damaged_files_are_refused_and_the_buffer_is_left_alone(tmp_path, damage):
    replay = buffer(2)
    state = replay.save(tmp_path)
    path = tmp_path / state["episodes"][1]
    content = bytearray(path.read_bytes())
    victim = buffer(3)
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "swap":
        content = (tmp_path / state["episodes"][0]).read_bytes()
    path.write_bytes(content)
    if damage == "camera":
        victim = ReplayBuffer(cameras=("left_wrist_0_rgb",), max_episodes=4, max_bytes=10**6)
    before = numbers(victim)
    with pytest.raises(CheckpointError, match=path.name if damage != "camera" else "left_wrist_0_rgb"):
        victim.restore(tmp_path, state)
    assert numbers(victim) == before


def test_every_flipped_bit_of_a_file_is_refused_or_without_effect(tmp_path):
    """Also those that ask the zip reader for a password, a compression method or more memory than there is."""
    replay = buffer(1)
    state = replay.save(tmp_path)
    path, refused = tmp_path / state["episodes"][0], 0
    content = path.read_bytes()
    central = content.index(b"PK\x01\x02")  # the directory of the zip file
    for place in (*range(0, 60), *range(200, central, 211), *range(central, len(content))):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        again = buffer()
        try:
            again.restore(tmp_path, state)
        except CheckpointError:
            refused += 1
        else:
            assert numbers(again) == numbers(replay)
    assert refused > 100


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        buffer(1).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_restoring_more_than_fits_is_refused(tmp_path):
    state = buffer(3).save(tmp_path)
    with pytest.raises(CheckpointError, match="do not fit"):
        buffer(max_episodes=2).restore(tmp_path, state)
