"""Settings by their paths, and what a search may try of them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pirl import recipes
from pirl.agents.config import ACRLPDConfig, RIPTConfig
from pirl.config import RLTrainConfig
from pirl.config_io import diff, parse_yaml
from pirl.errors import ConfigError
from pirl.recipes.settings import part_kinds, settings
from pirl.search import Choice, Range
from pirl.training.config import ConstantSchedule, CosineSchedule
from pirl.tune.space import (
    changed,
    check_space,
    current,
    default_space,
    flags,
    parse_space,
    space_yaml,
)

TABLETOP = recipes.get_config("acrlpd_tabletop")
RIPT = recipes.get_config("ript_tabletop")
PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"


def parsed(text: str, config: RLTrainConfig = TABLETOP) -> dict[str, Choice | Range]:
    return parse_space(config, parse_yaml(text))


def test_a_file() -> None:
    text = """
        pi0_lr: {low: 1e-4, high: 1, log: true}
        agent.num_action_samples: {low: 2, high: 16}
        agent.target_ess: {low: 0.2, high: 0.5}
        agent.bc_loss_weight: [0, 0.1]
        agent.actor: [awr, distill]
        agent.policy_ema_decay: [null, 0.9]
        early_stopping: 1
    """
    found = parsed(text.replace("        early_stopping: 1\n", ""))
    assert found == {
        "pi0_lr": Range(low=1e-4, high=1.0, log=True),
        "agent.num_action_samples": Range(low=2, high=16, whole=True),
        "agent.target_ess": Range(low=0.2, high=0.5),
        "agent.bc_loss_weight": Choice(values=(0.0, 0.1)),
        "agent.actor": Choice(values=("awr", "distill")),
        "agent.policy_ema_decay": Choice(values=(None, 0.9)),
    }
    assert parsed(space_yaml(TABLETOP, found)) == found
    with pytest.raises(ConfigError, match="unknown setting in the space: 'early_stopping'"):
        parsed(text)


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("agent.discout: [0.9, 0.95]", "unknown setting in the space: 'agent.discout'", "did you mean: agent.discount"),
        ("agent.epochs: [1, 2]", "unknown setting in the space: 'agent.epochs'", ""),
        ("agent.discount: 0.9", "agent.discount is 0.9", "a list of values"),
        ("agent.discount: [0.9]", "agent.discount lists [0.9]", "two values or more"),
        ("agent.discount: [0.9, 0.9]", "lists [0.9, 0.9]", "each once"),
        ("agent.discount: [0.9, 1.5]", "agent.discount cannot be 1.5: agent.discount is 1.5", "between 0 and 1"),
        ("agent.discount: [0.9, high]", "agent.discount cannot be 'high': agent.discount: found the text", ""),
        ("agent.actor: [awr, distil]", "unknown value of agent.actor: 'distil'", "did you mean: distill"),
        ("agent.actor: {low: 1, high: 2}", "agent.actor is not a number", "[a, b]"),
        ("agent.discount: {low: 0.9}", "high of agent.discount is None, expected a number", ""),
        ("agent.discount: {low: 0.99, high: 0.9}", "agent.discount goes from 0.99 to 0.9", "low is below high"),
        ("pi0_lr: {low: 0, high: 1, log: true}", "pi0_lr goes from 0 to 1, log True", "above 0"),
        ("agent.discount: {low: 0.9, hihg: 1}", "unknown word in the space of agent.discount: 'hihg'", "high"),
        ("agent.flow_draws: {low: 1.5, high: 4}", "low of agent.flow_draws is 1.5, expected a whole number", ""),
        ("data.cameras: [[a], [b]]", "data.cameras lists ['a']", "numbers, text"),
        ("evaluation.episodes: [50, 100]", "evaluation.episodes is the same in all trials", "by its flag"),
        ("seed: [1, 2]", "seed is the same in all trials", ""),
        ("env.level: [easy, colours]", "env.level is the same in all trials", ""),
        ("batch_size: [64, 0]", "batch_size cannot be 0", ""),
    ],
)
def test_mistakes(text: str, problem: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as found:
        parsed(text)
    assert hint in found.value.hint


def test_an_empty_file() -> None:
    with pytest.raises(ConfigError, match="the space is empty"):
        parse_space(TABLETOP, {})


def test_a_value_must_be_possible_with_some_of_the_others() -> None:
    assert parsed("agent.loss: [nft, cfg]\nagent.guidance: [1, 2]", RIPT)
    with pytest.raises(ConfigError, match=re.escape("agent.guidance cannot be 2.0: guidance is 2.0 and the loss is")):
        parsed("agent.loss: [nft, awr]\nagent.guidance: [1, 2]", RIPT)


def test_values_become_configurations_and_flags() -> None:
    values = {
        "pi0_lr": 0.001,
        "critic_lr": 0.002,
        "agent.augment": True,
        "agent.policy_ema_decay": None,
        "agent.actor": "distill",
        "batch_size": 32,
        "model.dtype": "bfloat16",
    }
    found = changed(TABLETOP, values)
    assert isinstance(found.policy_schedule, CosineSchedule)
    assert found.policy_schedule.peak_lr == 1e-3
    assert found.policy_schedule.decay_lr == pytest.approx(1e-4)  # the shape of the curve stays
    assert found.critic_schedule == ConstantSchedule(lr=2e-3)
    assert {change.path for change in diff(TABLETOP, found)} == {
        *(values.keys() - {"pi0_lr", "critic_lr"}),
        *("policy_schedule.peak_lr", "policy_schedule.decay_lr", "critic_schedule.lr"),
    }
    assert recipes.cli(["acrlpd_tabletop", *flags(TABLETOP, values)]) == found
    assert {path: current(found, path) for path in values} == values
    assert recipes.cli(["acrlpd_tabletop", *flags(found, {"agent.augment": False})]) == TABLETOP


@pytest.mark.parametrize("recipe", recipes.list_configs())
def test_the_default_space(recipe: str) -> None:
    config = recipes.get_config(recipe)
    space = default_space(config)
    assert 4 <= len(space) <= 5
    check_space(config, space)
    # The recipe itself is in it, so a search can begin there; and a copy of what is printed is the same space.
    assert all(current(config, path) in item for path, item in space.items())
    assert parse_space(config, parse_yaml(space_yaml(config, space))) == space


@pytest.mark.parametrize(
    ("config", "changes", "paths"),
    [
        (TABLETOP, {"actor": "distill"}, {"agent.num_action_samples", "agent.bc_loss_weight", "pi0_lr"}),
        (TABLETOP, {"actor": "best_of_n"}, {"agent.num_action_samples", "agent.q_aggregation", "critic_lr"}),
        (TABLETOP, {"discount": 0.4}, {"agent.discount"}),
        (RIPT, {"loss": "awr"}, {"agent.awr_beta", "agent.epochs"}),
        (RIPT, {"loss": "filter", "drift_limit": None}, {"agent.drift_limit"}),
        (RIPT, {"nft_beta": 9.0}, {"agent.nft_beta"}),
    ],
)
def test_the_default_space_follows_the_algorithm(
    config: RLTrainConfig, changes: dict[str, Any], paths: set[str]
) -> None:
    assert isinstance(config.agent, ACRLPDConfig | RIPTConfig)
    own = replace(config, agent=replace(config.agent, **changes))
    space = default_space(own)
    assert paths <= space.keys()
    check_space(own, space)
    assert all(current(own, path) in item for path, item in space.items())


def test_the_page_shows_the_default_spaces() -> None:
    """The table in docs/tuning.md is what the code has, for the tabletop's recipes."""
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    expected = [
        (name, path, f"`{item}`")
        for name in ("bc_tabletop", "acrlpd_tabletop", "ript_tabletop")
        for path, item in default_space(recipes.get_config(name)).items()
    ]
    assert rows == expected


def test_settings_of_parts_that_are_set_and_that_are_not() -> None:
    found = settings(TABLETOP)
    assert found["agent.target_ess"].value == 0.3
    assert "effective sample size" in found["agent.target_ess"].help
    assert found["early_stop.patience"].value == 10
    assert found["env.level"].choices == ("easy", "colours", "two_blocks", "stitch")
    assert (found["agent.augment"].flag, found["agent.augment"].off) == ("--agent.augment", "--agent.no-augment")
    assert found["model.discrete_state_input"].off is None  # true, false or left out
    assert found["model.discrete_state_input"].choices == ("True", "False", "None")
    assert found["sinks"].many
    assert found["sinks"].choices == ("wandb", "trackio", "tensorboard")
    assert "agent.epochs" not in found
    ours = [kind for kind in part_kinds(TABLETOP)["agent.type"] if ":" not in kind]
    assert {"BC", "ACRLPD", "RIPT", "Filtered", "RECAP"} <= set(ours)
    assert not [path for path in settings(recipes.get_config("debug")) if path.startswith("env.")]  # of which kind?
