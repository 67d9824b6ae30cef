"""Whose statistics: the named ones, or the only ones; never a guess among several."""

from pathlib import Path

import pytest

from pirl.data.assets import asset_id, assets_beside, choose_asset, named_asset, own_assets
from pirl.data.config import DataConfig
from pirl.data.robots import get_robot


def test_settings_name_their_own_then_the_dataset_then_the_robot(tmp_path: Path) -> None:
    (tmp_path / "fold_box").mkdir()
    robot, folder = get_robot("aloha"), str(tmp_path / "fold_box")
    assert named_asset(DataConfig(asset_id="mine", repo_ids=("a/b",)), robot) == "mine"
    assert named_asset(DataConfig(repo_ids=("a/b", "c/d")), robot) == "a/b"
    assert named_asset(DataConfig(repo_ids=(folder,)), robot) == asset_id(folder) == "fold_box"
    assert named_asset(DataConfig(), robot) == "aloha"
    assert own_assets(DataConfig()) is None
    assert own_assets(DataConfig(repo_ids=("a/b",), assets_dir="x")) == Path("x/a/b")


@pytest.mark.parametrize(
    ("stored", "named", "expected"),
    [(("a/b", "c"), "c", "c"), (("a/b",), "c", "a/b"), (("a/b", "d"), "c", None), ((), "c", None)],
)
def test_beside_weights(tmp_path: Path, stored: tuple[str, ...], named: str, expected: str | None) -> None:
    for name in stored:
        (tmp_path / "assets" / name).mkdir(parents=True)
        (tmp_path / "assets" / name / "norm_stats.json").write_text("{}")
    found = assets_beside(tmp_path)
    assert set(found) == set(stored)
    assert choose_asset(found, named) == expected
