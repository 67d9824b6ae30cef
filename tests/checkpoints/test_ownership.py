"""Only what pirl wrote is ever removed: whatever is told to overwrite, rotate or clean up."""

from pathlib import Path

import numpy as np
import pytest

from pirl.checkpoints.openpi import save_openpi
from pirl.checkpoints.ownership import foreign_in_run, is_export
from pirl.checkpoints.run import Checkpoints
from pirl.checkpoints.run_directory import prepare_directory
from pirl.data.episode_store import keep_only
from pirl.errors import CheckpointError, EnvError
from pirl.training.config import CheckpointConfig
from pirl.tune.results import drop_checkpoints

PARAMS = {"a": {"kernel": np.zeros((2, 2), np.float32)}}


def make_run(run: Path, *steps: int) -> Path:
    """A run with steps as they look from outside."""
    prepare_directory(run)
    for step in steps:
        for name in ("params", "train_state", "extra"):
            (run / str(step) / name).mkdir(parents=True)
        (run / str(step) / "params" / "_METADATA").write_text("{}")
    (run / "metrics.jsonl").write_text("")
    return run


@pytest.mark.parametrize("thesis", ["thesis.tex", ".thesis.deleted", "5/thesis.tex", "2026/thesis.tex"])
def test_a_run_with_other_files_is_not_overwritten(thesis: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 5)
    (run / thesis).parent.mkdir(exist_ok=True)
    (run / thesis).write_text("mine")
    with pytest.raises(CheckpointError, match="holds what pirl did not write and is not deleted") as caught:
        prepare_directory(run, overwrite=True)
    assert thesis in caught.value.message
    assert (run / thesis).read_text() == "mine"
    assert (run / "5").is_dir()
    (run / thesis).unlink()
    if thesis.startswith("2026"):
        (run / "2026").rmdir()
    prepare_directory(run, overwrite=True)
    assert not (run / "5").exists()


def test_what_killed_processes_leave_in_a_run_is_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 5)
    for name in ("7.orbax-checkpoint-tmp-12", ".3.deleted", ".replay.deleted"):
        (run / name).mkdir()
    for name in (".metadata.json.123", ".metadata.json.0123456789ab.tmp.json", "metrics.csv.partial", ".lock"):
        (run / name).write_text("")
    assert foreign_in_run(run) == []


def test_a_folder_beside_the_run_that_has_the_name_of_its_deletion_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 5)
    other = tmp_path / ".run.deleted"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        prepare_directory(run, overwrite=True)
    assert (other / "thesis.tex").exists()
    prepare_directory(run, resume=True, fresh_if_missing=True)
    assert (other / "thesis.tex").exists()


def test_what_a_killed_deletion_left_goes_with_the_next_command(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run", 5), tmp_path / ".run.deleted"
    for arguments in ({"resume": True}, {"overwrite": True}, {"resume": True, "fresh_if_missing": True}):
        other.mkdir()
        (other / "metrics.jsonl").write_text("")
        prepare_directory(run, **arguments)
        assert not other.exists(), arguments


def test_rotation_and_sweeping_leave_files_of_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1, 2, 3)
    (run / "1" / "notes.md").write_text("mine")
    for name in (".thesis.deleted", "thesis.orbax-checkpoint-tmp"):
        (run / name).mkdir()
    with Checkpoints(run, CheckpointConfig(keep_last=1)) as checkpoints:
        checkpoints._delete_old()
    assert sorted(child.name for child in run.iterdir() if child.is_dir()) == [
        *(".thesis.deleted", "1", "3", "thesis.orbax-checkpoint-tmp")
    ]


def test_a_trial_loses_its_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "trial", 1, 2)
    (run / "2" / "notes.md").write_text("mine")
    (run / "2026").mkdir()
    for folder, name in (("replay", "00000001-0123456789abcdef.npz"), ("rollouts", "mine.npz")):
        (run / folder).mkdir()
        (run / folder / name).write_text("")
    drop_checkpoints(run)
    assert sorted(child.name for child in run.iterdir() if child.is_dir()) == ["2", "2026", "rollouts"]
    foreign = tmp_path / "foreign"
    (foreign / "1" / "params").mkdir(parents=True)
    (foreign / "1" / "params" / "_METADATA").write_text("{}")
    drop_checkpoints(foreign)  # nothing says that this is a run
    assert (foreign / "1").is_dir()


def test_episodes_are_pruned_by_their_names(tmp_path: Path) -> None:
    mine, stale, kept = (
        "measurements.npz",
        ".00000002-0123456789abcdef.npz.0123456789ab.tmp.npz",
        "00000001-0123456789abcdef.npz",
    )
    for name in (mine, ".mine.tmp", kept, stale, "00000009-0123456789abcdef.npz"):
        (tmp_path / name).write_text("")
    keep_only(tmp_path, [kept])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", kept, mine]


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter1.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="not an export of pirl"):
        save_openpi(PARAMS, thesis, norm_stats={}, overwrite=True)
    assert (thesis / "chapter1.tex").read_text() == "mine"

    export = save_openpi(PARAMS, tmp_path / "export", norm_stats={})
    assert is_export(export)
    save_openpi(PARAMS, export, norm_stats={}, overwrite=True)
    (export / "notes.md").write_text("mine")
    with pytest.raises(CheckpointError, match="not an export of pirl"):
        save_openpi(PARAMS, export, norm_stats={}, overwrite=True)
    assert (export / "notes.md").read_text() == "mine"

    step = make_run(tmp_path / "run", 5) / "5"
    with pytest.raises(CheckpointError, match="not an export of pirl"):
        save_openpi(PARAMS, step, norm_stats={}, overwrite=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "link").symlink_to(export)
    for target in (empty, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="not an export of pirl"):
            save_openpi(PARAMS, target, norm_stats={}, overwrite=True)


@pytest.mark.parametrize("name", [".out.writing", ".out.replaced", ".out.writing.orbax-checkpoint-tmp-1"])
def test_a_folder_with_the_name_of_an_interrupted_export_is_looked_into(name: str, tmp_path: Path) -> None:
    (tmp_path / name / "params").mkdir(parents=True)
    save_openpi(PARAMS, tmp_path / "out", norm_stats={})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="in the way"):
        save_openpi(PARAMS, tmp_path / "out", norm_stats={}, overwrite=True)
    assert (tmp_path / name / "thesis.tex").exists()


def test_an_evaluation_replaces_only_an_evaluation(tmp_path: Path) -> None:
    from pirl.cli.eval import _films, check_target

    file, film = tmp_path / "eval.json", tmp_path / "success-0001.mp4"
    film.write_text("mine")
    with pytest.raises(EnvError, match=r"success-0001\.mp4 exists"):
        check_target(file, {"": {}}, overwrite=True)
    film.rename(tmp_path / "success-at-last.mp4")
    check_target(file, {"": {}}, overwrite=True)
    assert _films(tmp_path) == []
    file.write_text('{"grades": [1, 2]}')
    with pytest.raises(EnvError, match="holds no results of pirl"):
        check_target(file, {"": {}}, overwrite=True)
    file.write_text('{"evaluation": {"seed": 1}}')
    check_target(file, {"": {"seed": 2}}, overwrite=True)
