"""A run ends by saying where it is, which step is best, and what to type next."""

from dataclasses import replace
from pathlib import Path

from pirl import recipes
from pirl.training.config import KeepBest
from pirl.training.ending import best_step, next_commands, table


def test_the_best_step_is_the_one_that_evaluation_would_take() -> None:
    metrics = {
        100: {"eval/success_rate": 0.6},
        200: {"eval/success_rate": 0.8},
        300: {"eval/success_rate": 0.8},
        400: {},
    }
    assert best_step(metrics, KeepBest()) == 300
    assert best_step(metrics, KeepBest(mode="min")) == 100
    assert best_step({1: {}}, KeepBest()) is None


def test_the_table_has_a_row_for_each_saved_step() -> None:
    rows = table({100: {"critic/loss": 0.123456, "data/x": 1.0}, 200: {"eval/success_rate": 0.5}}, 200)
    assert [line.split() for line in rows] == [
        ["step", "eval/success_rate", "critic/loss"],
        ["100", "–", "0.123"],
        ["200", "(best)", "0.5", "–"],
    ]


def test_the_next_commands_fit_the_run() -> None:
    run = recipes.get_config("bc_tabletop")
    folder = Path("checkpoints/bc_tabletop/run")
    assert next_commands(run, folder, 800)[1] == "pirl eval checkpoints/bc_tabletop/run/800 --episodes 100"
    held_out = replace(recipes.get_config("debug"), data=replace(recipes.get_config("debug").data, held_out=0.1))
    assert next_commands(held_out, folder, 800)[1] == "pirl eval checkpoints/bc_tabletop/run/800 --data"
    assert next_commands(held_out, folder, 800)[-1].startswith("pirl export openpi checkpoints/bc_tabletop/run/800")
