"""A file is written whole or not at all."""

import os
from pathlib import Path

import numpy as np
import pytest

from pirl.files import LEFTOVERS, json_text, read_arrays, replacing, write_arrays, write_text


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "new" / "film.mp4"
    write_text(file, "old\r\n")

    def fail() -> None:
        with replacing(file) as partial:
            partial.write_text("half")
            assert partial.suffix == file.suffix
            assert list(file.parent.glob(LEFTOVERS)) == [partial]
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        fail()
    assert file.read_bytes() == b"old\r\n"
    assert [path.name for path in file.parent.iterdir()] == ["film.mp4"]


def test_several_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    with replacing(file) as first, replacing(file) as second:
        first.write_text("first")
        second.write_text("second")
    assert file.read_text() == "first"


def test_what_killed_writers_left_goes_an_hour_later(tmp_path: Path) -> None:
    """Not what belongs to a writer at work, to another file, or to somebody else."""
    names = {
        "stale": ".table.csv.0123456789ab.tmp.csv",
        "at work": ".table.csv.ba9876543210.tmp.csv",
        "of another file": ".table.csv.old.0123456789ab.tmp.csv",
        "somebody's": ".table.csv.notes.tmp.csv",
    }
    for name in names.values():
        (tmp_path / name).write_text("half")
    for kind in names.keys() - {"at work"}:
        os.utime(tmp_path / names[kind], (0, 0))
    write_text(tmp_path / "table.csv", "new")
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", *names.values()} - {names["stale"]}


def test_arrays_come_back_and_objects_are_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.npz", {"x/y": np.arange(3), "name": np.array("π")})
    found = read_arrays(tmp_path / "a.npz")
    assert found["x/y"].tolist() == [0, 1, 2]
    assert str(found["name"]) == "π"
    write_arrays(tmp_path / "b.npz", {"x": np.array([{}], object)})
    with pytest.raises(ValueError, match="pickle"):
        read_arrays(tmp_path / "b.npz")
    with pytest.raises(ValueError, match="JSON compliant"):
        json_text({"loss": float("nan")})
