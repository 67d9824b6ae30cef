"""What LIBERO needs is looked for and named when missing; its files are read without torch, and never executed."""

import io
import os
import pickle
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.envs.config import LiberoConfig
from pirl.envs.libero import axis_angle
from pirl.envs.libero_setup import _torch_absent, find_assets, prepare, read_init_states
from pirl.errors import ConfigError, EnvError


def archive(path: Path, content: bytes) -> Path:
    """As torch saves an object: a zip file with a pickle in it."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
    return path


@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_are_read(tmp_path: Path, protocol: int) -> None:
    states = np.random.default_rng(0).normal(size=(3, 7))
    path = archive(tmp_path / "a.pruned_init", pickle.dumps(states, protocol))
    np.testing.assert_array_equal(read_init_states(path), states)
    old = pickle.dumps(states, protocol).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    if protocol == 2:  # whose names carry no length, as in the files of LIBERO
        np.testing.assert_array_equal(read_init_states(archive(tmp_path / "b", old)), states)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hidden = np.empty(1, object)
    hidden[0] = Evil()
    for content in (Evil(), hidden):
        with pytest.raises(EnvError, match=r"bad cannot be read as initial states: it uses posix.mkdir"):
            read_init_states(archive(tmp_path / "bad", pickle.dumps(content)))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [{"a": 1}, np.zeros(3), np.zeros((2, 2), int), np.zeros((0, 4))])
def test_other_contents_are_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(EnvError, match="expected rows of numbers"):
        read_init_states(archive(tmp_path / "other", pickle.dumps(content)))


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a zip file")
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    (tmp_path / "empty").write_bytes(empty.getvalue())
    archive(tmp_path / "cut", pickle.dumps(np.zeros((2, 2)), 2)[:-20])
    for name in ("text", "empty", "cut", "absent"):
        with pytest.raises(EnvError, match=f"{name} cannot be read as initial states"):
            read_init_states(tmp_path / name)


def test_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PIRL_LIBERO_ASSETS", raising=False)
    if find_spec("libero") is None:
        with pytest.raises(EnvError, match=r"are not in .*\.cache/libero/assets[\s\S]*libero_install"):
            find_assets(None)
    with pytest.raises(EnvError, match=r"are not in .*/nowhere[\s\S]*--env.assets"):
        find_assets(str(tmp_path / "nowhere"))
    folder = tmp_path / "assets"
    for name in ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects"):
        (folder / name).mkdir(parents=True)
    with pytest.raises(EnvError, match="has no folder turbosquid_objects; expected articulated_objects, scenes"):
        find_assets(str(folder))
    (folder / "turbosquid_objects").mkdir()
    assert find_assets(str(folder)) == folder.resolve()
    monkeypatch.setenv("PIRL_LIBERO_ASSETS", str(folder))
    assert find_assets(None) == folder.resolve()


@pytest.mark.skipif(find_spec("libero") is not None, reason="LIBERO is installed")
def test_absent_packages_are_named() -> None:
    with pytest.raises(EnvError, match=r"LIBERO needs .*libero.*\n.*--no-deps robosuite==1.4.0"):
        prepare(None)


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_torch_is_absent_again() -> None:
    with _torch_absent():
        import torch

        assert not hasattr(torch, "load")
    assert "torch" not in sys.modules
    with pytest.raises(ImportError), _torch_absent():
        raise ImportError
    assert "torch" not in sys.modules


def test_axis_angle() -> None:
    half = np.sqrt(0.5)
    np.testing.assert_allclose(axis_angle(np.array([half, 0, 0, half])), [np.pi / 2, 0, 0])
    np.testing.assert_allclose(axis_angle(np.array([0, 0, 1.0, 0])), [0, 0, np.pi])
    np.testing.assert_allclose(axis_angle(np.array([0, 1.0, 0, -1e-3])), [0, np.pi + 2e-3, 0], rtol=1e-5)
    assert not axis_angle(np.array([0, 0, 0, 1.0])).any()
    assert not axis_angle(np.array([1e-9, 0, 0, 1.0 + 1e-9])).any()


def test_settings_that_cannot_be() -> None:
    for wrong in ({"keep_tasks": 0}, {"render_size": 0}, {"wait_steps": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LiberoConfig(**wrong)
