"""`pirl recipes` lists, shows and copies; `pirl inspect recipe` knows recipes as well as model presets."""

import re
from pathlib import Path

import pytest

from pirl import recipes
from pirl.cli import app
from pirl.config import RLTrainConfig
from pirl.config_io import from_dict, parse_yaml


def pirl(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """What a command prints: its output, or its complaint where it is to fail."""
    capsys.readouterr()
    found = app.main(list(map(str, words)))
    shown = capsys.readouterr()
    assert found == code, shown.err
    return shown.err if code else shown.out


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    shown = pirl(capsys, "recipes", "ls")
    names = re.findall(r"^  (\w+)", shown, re.MULTILINE)
    assert names == ["recipe", *recipes.list_configs(), *recipes.ALIASES]
    (row,) = re.findall(r"^  acrlpd_libero_lora +(.*)$", shown, re.MULTILINE)
    assert re.split(r" {2,}", row) == ["ACRLPD", "π₀.₅", "lora", "libero", "10, 5 scored", "16", "30,000"]
    assert "rl_fold_box (= acrlpd_aloha_fold)" in shown
    found = re.findall(r"^  (\w+)", pirl(capsys, "recipes", "ls", "droid"), re.MULTILINE)[1:]
    assert found == [name for name in (*recipes.list_configs(), *recipes.ALIASES) if "droid" in name]


def test_show_prints_yaml_that_is_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    shown = pirl(capsys, "recipes", "show", "rl_fold_box")
    assert "# Discount per environment step." in shown
    assert from_dict(RLTrainConfig, parse_yaml(shown)) == recipes.get_config("acrlpd_aloha_fold")
    bare = pirl(capsys, "recipes", "show", "rl_fold_box", "--bare")
    assert "#" not in bare
    assert parse_yaml(bare) == parse_yaml(shown)


def test_cp_writes_a_file_to_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "configs" / "mine.yaml"
    assert f"pirl train {file}" in pirl(capsys, "recipes", "cp", "debug", file)
    assert file.read_text().startswith("# A policy of 270,000 parameters")
    assert recipes.load(str(file)) == recipes.get_config("debug")
    before = file.read_bytes()
    assert "exists" in pirl(capsys, "recipes", "cp", "bc_droid", file, code=1)
    assert file.read_bytes() == before
    assert "does not end in .yaml" in pirl(capsys, "recipes", "cp", "debug", tmp_path / "mine", code=1)
    assert "did you mean: debug" in pirl(capsys, "recipes", "cp", "debugg", tmp_path / "other.yaml", code=1)
    assert not (tmp_path / "other.yaml").exists()


def test_show_resolves_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: debug\nbatch_size: 8\n")
    assert parse_yaml(pirl(capsys, "recipes", "show", file, "--bare"))["batch_size"] == 8


def test_inspect_knows_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = pirl(capsys, "inspect", "recipe", "acrlpd_libero_lora")
    assert "freeze rule lora, chunks of 10 actions of 32 dimensions" in recipe
    preset = pirl(capsys, "inspect", "recipe", "pi05_lora")
    assert recipe.splitlines()[1:] == preset.splitlines()[1:]
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: debug\nfreeze: expert_only\n")
    assert "freeze rule expert_only, chunks of 4 actions" in pirl(capsys, "inspect", "recipe", file)
    assert "freeze rule full" in pirl(capsys, "inspect", "recipe", file, "--freeze", "full")
    assert "did you mean: acrlpd_libero" in pirl(capsys, "inspect", "recipe", "acrlpd_libro", code=1)
    file.write_text(
        "name: x\nmodel: {type: MLPFlow, state_dim: 8, action_dim: 7}\nagent: {type: BC}\n"
        "data: {robot: libero, cameras: []}\n"
    )
    assert "is an MLP" in pirl(capsys, "inspect", "recipe", file, code=1)


@pytest.mark.parametrize("action", ["ls", "show", "cp"])
def test_the_examples_of_an_action_are_accepted(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = pirl(capsys, "recipes", action, "--help").split("examples:\n")[1].splitlines()
    assert len(examples) >= 2
    for line in examples:
        words = line.split("   ")[0].split()
        args = app.build_parser(words[1:]).parse_args(words[1:])
        assert (args.verb, args.action) == ("recipes", action)
