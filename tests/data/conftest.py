"""Fixtures: golden LeRobot datasets, and copies that a test may modify."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own caches and download folders."""
    monkeypatch.setenv("PIRL_HOME", str(tmp_path / "pirl_home"))
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "lerobot_home"))
    return tmp_path


@pytest.fixture
def dataset_copy(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a golden dataset by name."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


@pytest.fixture
def edit_info() -> Callable[..., None]:
    """Change entries of a dataset's info.json."""

    def edit(root: Path, **changes: Any) -> None:
        path = root / "meta/info.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit
