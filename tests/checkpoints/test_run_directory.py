"""The folder of a run is looked at before anything in it changes."""

from pathlib import Path

import pytest

from pirl.checkpoints.run_directory import check_directory, prepare_directory
from pirl.errors import CheckpointError


def never_saved(folder: Path) -> Path:
    folder.mkdir()
    for name in ("metadata.json", "config.yaml", "metrics.jsonl"):
        (folder / name).write_text("{}")
    return folder


def test_a_run_that_ended_before_its_first_checkpoint_starts_again_if_it_may(tmp_path: Path) -> None:
    folder = never_saved(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        prepare_directory(folder, resume=True)
    assert prepare_directory(folder, resume=True, fresh_if_missing=True) is False
    assert [path.name for path in folder.iterdir()] == ["metadata.json"]


def test_what_pirl_did_not_write_is_not_started_over(tmp_path: Path) -> None:
    folder = never_saved(tmp_path / "run")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        prepare_directory(folder, resume=True, fresh_if_missing=True)
    assert (folder / "notes.txt").read_text() == "mine"


def test_looking_changes_nothing_and_names_other_runs(tmp_path: Path) -> None:
    (tmp_path / "first" / "10" / "params").mkdir(parents=True)
    (tmp_path / "first" / "10" / "params" / "_METADATA").touch()
    with pytest.raises(CheckpointError, match="are first; or start without --resume"):
        check_directory(tmp_path / "frist", resume=True)
    assert check_directory(tmp_path / "first", resume=True) is True
    assert not (tmp_path / "frist").exists()
