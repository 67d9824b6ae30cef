"""Episodes on disk are those that were collected, or an error; nothing half-written has the name of an episode."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.episode_store import keep_only
from pirl.errors import CheckpointError
from pirl.records import Context, Episode, Rollout
from pirl.rollout.files import load_rollouts, save_rollouts


def rollout(number: int = 5, *, pictures: bool = True, success: bool | None = True, steps: int = 4) -> Rollout:
    rng, last = np.random.default_rng(number), np.arange(steps) == steps - 1
    plans = rng.normal(size=(steps, 3, 2)).astype(np.float32)
    plans[1, 2:] = np.nan
    frames = {"images/top": rng.integers(0, 256, (2, 4, 6, 3), np.uint8)} if pictures else {}
    return Rollout(
        context=Context("put the 红 cup down", 2**30 + number),
        number=number,
        episode=Episode(
            task="put it down",
            state=rng.normal(size=(steps, 3)).astype(np.float32),
            actions=rng.normal(size=(steps, 2)).astype(np.float32),
            rewards=rng.normal(size=steps).astype(np.float32),
            terminated=last,
            truncated=np.zeros(steps, bool),
            success=success,
            intended=plans,
        ),
        starts=np.array([0, 2]),
        frames=frames,
        frame_steps=np.array([0, 2] if pictures else [], np.int64),
    )


def plain(value: Any) -> Any:
    """Values, types and bits."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, Rollout | Episode):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def test_round_trip(tmp_path: Path) -> None:
    given = [
        rollout(0),
        rollout(1, pictures=False),
        rollout(2, success=False),
        rollout(3, success=None),
        replace(rollout(4), episode=replace(rollout(4).episode, intended=None)),
        replace(rollout(5), notes={"path": np.ones((3, 2, 4), np.float32), "value": np.float32([0.1, 0.2, 0.3])}),
    ]
    names = save_rollouts(tmp_path / "new" / "folder", given)
    assert [plain(found) for found in load_rollouts(tmp_path / "new" / "folder", names)] == [plain(r) for r in given]
    assert load_rollouts(tmp_path / "new" / "folder", names[3:4])[0].number == 3
    assert save_rollouts(tmp_path / "nothing", []) == []


def test_rollouts_without_notes_have_the_names_they_always_had(tmp_path: Path) -> None:
    """Files of earlier versions are read, and not written again under another name."""
    (name,) = save_rollouts(tmp_path, [rollout(1)])
    assert name == "00000001-9bdfc63a69eb4018.npz"
    (other,) = save_rollouts(tmp_path, [replace(rollout(1), notes={"value": np.zeros(2, np.float32)})])
    assert other != name
    assert load_rollouts(tmp_path, [name])[0].notes == {}


def test_files_are_written_once_and_other_histories_beside_them(tmp_path: Path) -> None:
    names = save_rollouts(tmp_path, [rollout(1), rollout(2)])
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    other = replace(rollout(2), episode=replace(rollout(2).episode, rewards=np.ones(4, np.float32)))
    again = save_rollouts(tmp_path, [rollout(1), other, rollout(3)])
    now = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert again[0] == names[0]
    assert again[1] != names[1]
    assert now.items() > before.items()
    assert len(now) == 4
    (tmp_path / ".00000009-0123456789abcdef.npz.123.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    keep_only(tmp_path, names)
    assert {path.name for path in tmp_path.iterdir()} == {*names, "notes.txt"}
    keep_only(tmp_path / "nowhere", [])


@pytest.mark.parametrize("damage", ["missing", "cut", "flip", "empty", "swap", "pickle"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    first, second = save_rollouts(tmp_path, [rollout(1), rollout(2)])
    path = tmp_path / first
    content = bytearray(path.read_bytes())
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "flip":
            content[len(content) // 3] ^= 1
            path.write_bytes(content)
        case "empty":
            path.write_bytes(b"")
        case "swap":
            path.write_bytes((tmp_path / second).read_bytes())
        case "pickle":
            with path.open("wb") as file:
                np.savez(file, success=np.array([print], dtype=object))
    with pytest.raises(CheckpointError, match=first):
        load_rollouts(tmp_path, [second, first])


def test_a_full_disk_leaves_no_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, **arrays: Any) -> None:
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        save_rollouts(tmp_path, [rollout(1)])
    assert list(tmp_path.iterdir()) == []
