"""Words of other trainers: aliases, commands to type, and YAML files in their style."""

from pathlib import Path

import pytest

from pirl import recipes
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.errors import ConfigError
from pirl.recipes.flags import short_names
from pirl.recipes.foreign import ALIASES, ANSWERS, COMMANDS, FLAGS, SWITCHES
from pirl.recipes.settings import settings
from pirl.training.config import CosineSchedule


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("aloha_fold", "acrlpd_aloha_fold"), ("droid", "acrlpd_droid"), ("libero", "acrlpd_libero")],
)
def test_names_of_the_plans_are_recipes(name: str, recipe: str) -> None:
    assert recipes.get_config(name) is recipes.get_config(recipe)


def test_names_that_are_commands_are_answered() -> None:
    with pytest.raises(ConfigError) as found:
        recipes.get_config("quick_test")
    assert found.value.hint == "type: pirl train ript_libero_goal --variant quick"


def test_every_alias_and_command_is_there() -> None:
    assert set(ALIASES.values()) <= set(recipes.list_configs())
    assert not {*ALIASES, *COMMANDS} & set(recipes.list_configs())
    for command in COMMANDS.values():
        words = command.removeprefix("srun ").split()
        assert words[2] in recipes.list_configs()


def test_every_word_leads_to_a_flag_that_exists() -> None:
    everywhere = {
        setting.flag for name in recipes.list_configs() for setting in settings(recipes.get_config(name)).values()
    }
    known = everywhere | {flag for action in short_names("")._actions for flag in action.option_strings}
    assert {*FLAGS.values(), *(words[0] for words in SWITCHES.values())} <= known
    assert not set(FLAGS) & set(ANSWERS)


def written(folder: Path, text: str) -> str:
    file = folder / "theirs.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_in_another_style_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
config_name: rl_fold_box
exp_name: box1
data_path: [recordings/a, recordings/b]
acrlpd: {num_action_samples: 8, discount: 0.995, bc_loss_weight: 0.1, pi0_ema_decay: 0.999}
qchunking: {horizon_length: 10}
training: {batch_size: 64, pi0_lr: 3.0e-5, save_interval: 500, gradient_accumulation_steps: 2}
use_wandb: true
enable_fsdp: true
"""
    config = recipes.load(written(tmp_path, text))
    assert isinstance(config.agent, ACRLPDConfig)
    assert (config.name, config.exp_name, config.batch_size) == ("acrlpd_aloha_fold", "box1", 64)
    assert (config.agent.num_action_samples, config.agent.discount, config.agent.bc_loss_weight) == (8, 0.995, 0.1)
    assert (config.agent.policy_ema_decay, config.agent.accumulate, config.horizon) == (0.999, 2, 10)
    assert isinstance(config.policy_schedule, CosineSchedule)
    assert config.policy_schedule.peak_lr == 3e-5
    assert config.data.repo_ids == ("recordings/a", "recordings/b")
    assert (config.checkpoint.save_interval, config.sinks) == (500, ("wandb",))
    said = capsys.readouterr().out
    assert "says, in pirl's words: pirl train acrlpd_aloha_fold --exp-name box1 --data-path recordings/a" in said


def test_the_average_of_imitation_has_its_own_name(tmp_path: Path) -> None:
    config = recipes.load(written(tmp_path, "config: bc_libero\nema_decay: 0.9\n"))
    assert isinstance(config.agent, BCConfig)
    assert config.agent.ema_decay == 0.9


def test_what_has_no_counterpart_is_said_field_by_field(tmp_path: Path) -> None:
    text = "training: {real_action_dim: 14, critic_learning_rat: 1.0e-3, barrier_timeout: 30, discount: 0.99}\n"
    with pytest.raises(ConfigError) as found:
        recipes.load(written(tmp_path, text))
    said = str(found.value)
    assert "theirs.yaml: 4 entries have no counterpart here" in said
    assert "1. no recipe is named\n   hint: add a line `recipe: NAME`" in said
    assert "2. training.real_action_dim: 14\n   hint: follows from data.robot" in said
    assert "training.critic_learning_rat: 0.001" in said
    assert "training.barrier_timeout: 30" in said


def test_a_misspelt_setting_of_ours_is_still_that(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'batchsize'"):
        recipes.load(written(tmp_path, "recipe: debug\nbatchsize: 3\n"))
