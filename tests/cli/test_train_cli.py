"""`pirl train` and `pirl plan`: flags and files become one configuration, and mistakes a usage error."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pirl import recipes
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.cli import app
from pirl.config import EarlyStop, RLTrainConfig
from pirl.errors import ConfigError
from pirl.models.config import Pi0Config
from pirl.training.config import ConstantSchedule, CosineSchedule, KeepBest

DEBUG = recipes.get_config("debug")
LIBERO = recipes.get_config("acrlpd_libero")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RLTrainConfig, dict[str, bool]]]:
    """What `pirl.training.recovery.train` was called with; it answers 7."""
    made: list[tuple[RLTrainConfig, dict[str, bool]]] = []

    def train(config: RLTrainConfig, **modes: bool) -> int:
        made.append((config, modes))
        return 7

    recovery = ModuleType("pirl.training.recovery")
    vars(recovery).update(train=train)
    monkeypatch.setitem(sys.modules, "pirl.training.recovery", recovery)
    return made


def usage_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command line that is refused is answered with, in one line of text."""
    capsys.readouterr()
    assert app.main(list(words)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return " ".join(shown.err.replace("│", " ").split())


def test_a_recipe_is_trained_as_it_is(calls: list) -> None:
    assert app.main(["train", "debug"]) == 7
    assert calls == [(DEBUG, {"resume": False, "overwrite": False, "dry_run": False})]


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        (["debug", "--resume"], {"resume"}),
        (["--resume", "debug"], {"resume"}),
        (["debug", "--overwrite", "--exp-name", "x"], {"overwrite"}),
        (["debug", "--exp-name", "x", "--dry-run", "--resume"], {"resume", "dry_run"}),
        (["--dry-run", "debug", "--overwrite"], {"dry_run", "overwrite"}),
        (["debug", "--dry_run"], {"dry_run"}),
    ],
)
def test_modes(words: list[str], modes: set[str], calls: list) -> None:
    assert app.main(["train", *words]) == 7
    ((config, given),) = calls
    assert {name for name, on in given.items() if on} == modes
    assert config.exp_name == ("x" if "x" in words else "run")


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "libero", "--exp_name", "x", "--enable_fsdp", "--dry_run"],
        ["--exp_name", "x", "--config=libero", "--dry_run"],
    ],
)
def test_a_recipe_may_be_named_as_other_trainers_name_it(words: list[str], calls: list) -> None:
    assert app.main(["train", *words]) == 7
    ((config, modes),) = calls
    assert (config.name, config.exp_name, modes["dry_run"]) == ("acrlpd_libero", "x", True)


@pytest.mark.parametrize("words", [["debug", "--resume", "--overwrite"], ["--resume", "debug", "--overwrite"]])
def test_resume_and_overwrite_exclude_each_other(
    words: list[str], calls: list, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "choose one" in usage_error(capsys, "train", *words)
    assert calls == []


def test_settings_by_dotted_flags(calls: list) -> None:
    flags = "--agent.discount 0.995 --mesh.fsdp 8 --batch-size 64 --model.no-pi05 --data.repo-ids a b"
    more = "--sinks wandb trackio --data.critic_horizon=3 --freeze vlm_frozen --agent.policy-ema-decay None"
    assert app.main(["train", "acrlpd_libero", *flags.split(), *more.split()]) == 7
    ((config, _),) = calls
    assert isinstance(config.agent, ACRLPDConfig)
    assert isinstance(config.model, Pi0Config)
    assert (config.agent.discount, config.agent.policy_ema_decay) == (0.995, None)
    assert (config.mesh.fsdp, config.batch_size, config.freeze) == (8, 64, "vlm_frozen")
    assert (config.data.repo_ids, config.data.critic_horizon) == (("a", "b"), 3)
    assert config.sinks == ("wandb", "trackio")
    assert (LIBERO.token_len, config.model.pi05, config.token_len) == (200, False, 48)


def test_flags_go_over_a_file(tmp_path: Path, calls: list) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: debug\nbatch_size: 16\nagent: {discount: 0.8, num_action_samples: 2}\n")
    assert app.main(["train", str(file), "--agent.discount", "0.7"]) == 7
    ((config, _),) = calls
    assert isinstance(DEBUG.agent, ACRLPDConfig)
    assert config == replace(DEBUG, batch_size=16, agent=replace(DEBUG.agent, discount=0.7, num_action_samples=2))


def parsed(*flags: str, recipe: str = "acrlpd_libero") -> RLTrainConfig:
    return recipes.cli([recipe, *flags])


@pytest.mark.parametrize("flag", ["--max-steps", "--num-steps", "--max_steps", "--num-train-steps"])
def test_steps_have_several_names(flag: str) -> None:
    assert parsed(flag, "12") == replace(LIBERO, num_train_steps=12)


def test_short_names() -> None:
    found = parsed("--pi0_lr", "2e-5", "--critic-lr=1e-3", "--save-interval", "7", "--data-path", "a", "b/c")
    assert found.policy_schedule == replace(LIBERO.policy_schedule, peak_lr=2e-5, decay_lr=1e-6 * 2e-5 / 1e-5)
    assert found.critic_schedule == ConstantSchedule(lr=1e-3)
    assert found.checkpoint == replace(LIBERO.checkpoint, save_interval=7)
    assert found.data == replace(LIBERO.data, repo_ids=("a", "b/c"))


def test_no_wandb_leaves_other_sinks(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: debug\nsinks: [wandb, tensorboard]\n")
    assert recipes.cli([str(file), "--no_wandb"]).sinks == ("tensorboard",)
    assert recipes.cli([str(file)]).sinks == ("wandb", "tensorboard")


def test_debug_is_small_and_gives_way_to_other_flags() -> None:
    found = parsed("--debug", "--batch-size", "4", "--max-steps", "3", "--mesh.fsdp", "2")
    assert (found.batch_size, found.num_train_steps, found.mesh.fsdp) == (4, 3, 2)
    assert isinstance(found.model, Pi0Config)
    assert (found.model.vlm.width, found.model.pi05, found.horizon, found.critic_horizon) == (64, True, 10, 5)
    assert (found.init_weights, found.data.tokenizer, found.name) == (None, "byte", "acrlpd_libero")


def test_parts_of_another_kind_and_parts_that_are_not_set() -> None:
    found = parsed("--agent.type", "BC", "--agent.flow-draws", "2", "--early-stop.patience", "5")
    assert (found.agent, found.early_stop) == (BCConfig(flow_draws=2), EarlyStop(patience=5))
    found = parsed("--critic_schedule.type=CosineSchedule", "--checkpoint.keep-best.mode=min")
    assert (found.critic_schedule, found.checkpoint.keep_best) == (CosineSchedule(), KeepBest(mode="min"))
    with pytest.raises(ConfigError, match=r"unknown agent\.type 'PPO'"):
        parsed("--agent.type", "PPO")
    with pytest.raises(ConfigError, match=r"unknown setting 'agnet'"):
        parsed("--agnet.type", "BC")
    with pytest.raises(ConfigError, match=r"unknown agent\.type ''"):
        parsed("--agent.type")


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["--agent.discout", "0.9"], "--agent.discount"),
        (["--agent.discount", "x"], "could not convert string to float: 'x'"),
        (["--max-steps", "x"], "argument --max-steps/--num-steps: invalid int value: 'x'"),
        (["--freeze", "vlm"], "vlm_frozen"),
        (["--data-path"], "expected at least one argument"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(
    flags: list[str], answer: str, calls: list, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in usage_error(capsys, "train", "debug", *flags)
    assert calls == []


def test_values_that_cannot_be_are_our_error(calls: list, capsys: pytest.CaptureFixture[str]) -> None:
    for words, answer in (
        (["debug", "--agent.discount", "3"], "discount is 3.0"),
        (["debug", "--mesh.fsdp", "5"], "batch_size 32 cannot be split over 5 device(s)"),
        (["acrlpd_libro"], "did you mean: acrlpd_libero"),
        (["no.yaml"], "no.yaml cannot be read"),
    ):
        assert app.main(["train", *words]) == 1
        assert answer in capsys.readouterr().err
    assert calls == []


def test_without_a_recipe_there_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: pirl train RECIPE" in usage_error(capsys, "train")
    with pytest.raises(ConfigError, match="no recipe is named"):
        recipes.cli([])


def test_the_help_of_a_recipe_has_every_setting_and_needs_no_jax() -> None:
    program = "import sys; sys.modules['jax'] = None\nfrom pirl.cli.app import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "train", "debug", "--help"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.replace("│", " ").split())
    for flag in ("--resume", "--pi0-lr", "--exp-name", "--model.pi05", "--agent.discount", "--mesh.fsdp", "--sinks"):
        assert flag in text
    assert "Discount per environment step. A good start is 1 - 1/(steps of a long episode). (default: 0.9)" in text


def plan_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert app.main(["plan", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("where", ["before", "after"])
def test_plan_passes_the_recipe_on(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pirl.planning import plan as module

    asked: dict[str, Any] = {}
    computed = module.plan

    def plan(config: RLTrainConfig, **settings: Any) -> Any:
        asked.update(settings, config=config)
        return computed(config, **settings)

    monkeypatch.setattr(module, "plan", plan)
    devices = ["--devices", "4", "--device-gb", "24"]
    settings = [
        "acrlpd_libero_lora",
        "--debug",
        "--mesh.fsdp",
        "2",
        "--agent.flow-draws",
        "3",
        "--agent.actor",
        "distill",
    ]
    shown = plan_of(capsys, *(devices + settings if where == "before" else settings + devices))
    config = asked.pop("config")
    assert callable(asked.pop("say"))
    assert asked == {"device_gb": 24.0, "devices": 4, "choose": True}
    assert config.model.vlm.width == 64
    assert (config.batch_size, config.mesh.fsdp, config.freeze_rule, len(config.cameras)) == (8, 2, "lora", 2)
    assert (config.agent.actor, config.agent.flow_draws, config.policy_ema_decay) == ("distill", 3, None)
    assert shown.startswith("acrlpd_libero_lora: freeze rule lora, 2 camera(s)\n")
    assert "batch 8 on 4 device(s), fsdp 2" in shown


def test_plan_says_how_to_split_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    shown = plan_of(capsys, "debug_bc", "--device-gb", "0.05", "--batch-size", "4096")
    parts = int(shown.rsplit("--agent.accumulate ", 1)[1].removesuffix(", which `auto` chooses\n"))
    assert parts > 1
    again = plan_of(capsys, "debug_bc", "--device-gb", "0.05", "--batch-size", "4096", "--agent.accumulate", str(parts))
    assert "--agent.accumulate" not in again


def test_plan_needs_to_know_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device-gb is required" in usage_error(capsys, "plan", "debug")
    assert "not a positive whole number" in usage_error(capsys, "plan", "debug", "--devices", "0")
