"""No mutant of a dataset or file loads to other data without a word, and none ends in a traceback.

A slice runs with the other tests; `make campaign` (CAMPAIGN=1) runs the whole.
"""

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import pirl.data.rows as rows
from campaign import mutants

COUNT = 1600 if os.environ.get("CAMPAIGN") else 60
SEED = 1


def failures(seed: int, count: int, folder: Path) -> tuple[list[str], Counter[str]]:
    found, kinds = [], Counter[str]()
    for mutant, verdict in mutants.attack(seed, range(count), folder):
        kinds[verdict.kind] += 1
        if verdict.kind in ("raw", "wrong"):
            found.append(f"--only {seed}:{mutant.number}: {mutant}: {verdict}")
    return found, kinds


def test_every_mutant_is_read_right_or_refused(tmp_path: Path) -> None:
    found, kinds = failures(SEED, COUNT, tmp_path)
    assert not found, "\n".join(found)
    assert kinds["right"] > COUNT / 10, "the attacks change too much to show what is read in spite of them"
    assert kinds["refused"] > COUNT / 3


def test_a_mutant_is_made_again_by_its_number(tmp_path: Path) -> None:
    first, second = (mutants.make(3, 14, tmp_path / name) for name in ("a", "b"))
    assert first == second
    files = {path.relative_to(tmp_path / "a"): path for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert files
    assert all((tmp_path / "b" / name).read_bytes() == path.read_bytes() for name, path in files.items())


def test_the_judge_notices_a_reader_that_truncates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign that finds nothing proves nothing unless it would have found something."""
    root = tmp_path / "mutant"
    subject = "own_v30"
    mutants.reference(subject)
    mutant = mutants.Mutant(0, subject, "a JSON value", "action/dtype")

    def truncated(stored: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        return stored.astype(np.int8 if len(stored) > 100 else dtype).astype(dtype), np.zeros(1, bool)  # of vectors

    monkeypatch.setattr(rows, "_cast", truncated)
    monkeypatch.setattr("pirl.data.dataset.witness.check_columns", lambda *_: None)
    shutil.copytree(mutants.subjects() / subject, root)
    assert mutants.judge(mutant, root).kind == "wrong"
    monkeypatch.setattr(rows, "_cast", lambda stored, dtype: 1 / 0)
    assert mutants.judge(mutant, root).kind == "raw"
