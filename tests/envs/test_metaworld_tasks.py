"""What is known of Meta-World without the simulator: tasks, robots, dials, recipes."""

from importlib.util import find_spec

import pytest

from pirl.data.robots import get_robot
from pirl.data.tokenizer import WordTokenizer
from pirl.envs.config import MetaWorldConfig
from pirl.envs.make import check_installed
from pirl.envs.metaworld import task_names
from pirl.envs.metaworld_expert import MetaWorldDials
from pirl.envs.metaworld_tasks import INSTRUCTIONS, MT10
from pirl.errors import ConfigError, EnvError, MissingExtraError
from pirl.recipes import metaworld
from pirl.rollout.record import parse_dials


def test_fifty_tasks_have_fifty_instructions() -> None:
    assert len(INSTRUCTIONS) == len(set(INSTRUCTIONS.values())) == 50
    assert len(set(MT10)) == 10
    assert task_names(MetaWorldConfig()) == MT10
    assert task_names(MetaWorldConfig(suite="MT50")) == tuple(INSTRUCTIONS)
    assert task_names(MetaWorldConfig(tasks=("hammer-v3", "reach-v3"))) == ("hammer-v3", "reach-v3")


def test_a_misspelt_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown Meta-World task 'reach'") as error:
        task_names(MetaWorldConfig(tasks=("reach",)))
    assert "reach-v3" in str(error.value)
    for tasks in ((), ("reach-v3", "reach-v3")):
        with pytest.raises(EnvError, match="Meta-World tasks"):
            task_names(MetaWorldConfig(tasks=tasks))


def test_dials_are_read_and_checked() -> None:
    found = parse_dials(MetaWorldConfig(), ["wrong=0.5", "detour-steps=[10, 20]"])
    assert found == MetaWorldDials(wrong=0.5, detour_steps=(10, 20))
    for wrong in ({"wrong": 0.7, "detour": 0.4}, {"action_noise": -1.0}, {"detour_steps": (5, 4)}):
        with pytest.raises(ConfigError):
            MetaWorldDials(**wrong)  # type: ignore[arg-type]


def test_recipes_fit_the_robot_and_tell_the_tasks_apart() -> None:
    words = {name: WordTokenizer().encode(INSTRUCTIONS[name]) for name in MT10}
    assert len(set(map(tuple, words.values()))) == 10
    for recipe in metaworld.RECIPES:
        assert recipe.env is not None
        robot = get_robot(recipe.data.robot)
        assert robot.action_dim <= recipe.model.action_dim
        assert robot.state_dim <= recipe.model.action_dim
        assert recipe.env.render_size == recipe.model.image_size
        assert recipe.model.image_size % recipe.model.vision.patch_size == 0
        assert max(map(len, words.values())) + 2 <= recipe.model.token_len  # the beginning, and the end of the line


@pytest.mark.skipif(find_spec("metaworld") is not None, reason="Meta-World is installed")
def test_without_the_simulator_its_extra_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"metaworld(.|\n)*pirl\[metaworld\]"):
        check_installed(MetaWorldConfig())
