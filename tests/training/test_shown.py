"""Films of evaluations stay bounded, and nothing else is deleted."""

from pathlib import Path

import pytest

from pirl.training.shown import thin_out


def folder(root: Path, step: int, *names: str) -> Path:
    path = root / str(step)
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [0, 1000]), (2, [0, 1000]), (3, [0, 200, 1000]), (50, [0, 20, 40, 100, 200, 1000])]
)
def test_the_first_and_the_latest_stay(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (0, 20, 40, 100, 200, 1000):
        folder(tmp_path, step, "filmstrip.png", "success-0.mp4")
    thin_out(tmp_path, keep)
    assert sorted(int(child.name) for child in tmp_path.iterdir()) == left


def test_what_was_not_filmed_stays(tmp_path: Path) -> None:
    folder(tmp_path, 0, "filmstrip.png")
    own = folder(tmp_path, 20, "failure-1.mp4", "notes.txt")
    folder(tmp_path, 40, "failure-1.mp4", ".success-0.mp4.partial")
    folder(tmp_path, 60, "filmstrip.png")
    (tmp_path / "chosen").mkdir()
    thin_out(tmp_path, 2)
    assert {child.name for child in tmp_path.iterdir()} == {"0", "20", "60", "chosen"}
    assert len(list(own.iterdir())) == 2
