"""Fixtures: a private copy of a golden dataset, and a labelling server for it."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pirl.label.server import LabelServer

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"


@pytest.fixture(params=["v30_video_multifile"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


@pytest.fixture
def server(dataset: Path) -> Iterator[LabelServer]:
    with LabelServer(dataset, name="ann") as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()
