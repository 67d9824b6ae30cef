"""Other trainers' vocabulary: aliases of recipes and settings, and YAML files in other trainers' style.

A file in pirl's style has pirl's settings as keys. Any other file is translated leaf by leaf: a known word becomes the
equivalent flag, and fields without a counterpart are errors that list the nearest settings.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pirl.config import RLTrainConfig
from pirl.config_io import field_docs
from pirl.errors import ConfigError, numbered
from pirl.nested import flatten
from pirl.recipes.settings import settings

ALIASES: Mapping[str, str] = {
    "rl_fold_box": "acrlpd_aloha_fold",
    "aloha_fold": "acrlpd_aloha_fold",
    "acrlpd_pi0": "acrlpd_aloha_fold",
    "droid": "acrlpd_droid",
    "libero": "acrlpd_libero",
    "rl_training": "ript_libero_goal",
    "pi0_ript": "ript_libero_goal",
}
"""Aliases of recipes."""
COMMANDS: Mapping[str, str] = {
    "quick_test": "pirl train ript_libero_goal --variant quick",
    "full_test": "pirl train ript_libero_goal --variant full",
    "benchmark": "pirl train ript_libero_goal --variant benchmark",
    "distributed": "srun pirl train acrlpd_libero --mesh.fsdp 8 --resume auto",
}
"""Names that stand for a command, not for a recipe."""

FLAGS: Mapping[str, str] = {
    "exp_name": "--exp-name",
    "seed": "--seed",
    "num_action_samples": "--agent.num-action-samples",
    "best_of_n": "--agent.num-action-samples",
    "horizon_length": "--model.horizon",
    "action_horizon": "--model.horizon",
    "discount": "--agent.discount",
    "gamma": "--agent.discount",
    "target_update_rate": "--agent.target-update-rate",
    "tau": "--agent.target-update-rate",
    "bc_loss_weight": "--agent.bc-loss-weight",
    "bc_weight": "--agent.bc-weight",
    "pi0_ema_decay": "--agent.policy-ema-decay",
    "ema_decay": "--agent.policy-ema-decay",
    "critic_ema_decay": "--agent.critic-ema-decay",
    "num_critics": "--critic.num-critics",
    "critic_dropout": "--critic.dropout",
    "pi0_lr": "--pi0-lr",
    "learning_rate": "--pi0-lr",
    "lr": "--pi0-lr",
    "critic_lr": "--critic-lr",
    "weight_decay": "--policy-optimizer.weight-decay",
    "max_grad_norm": "--policy-optimizer.clip-gradient-norm",
    "gradient_clip": "--policy-optimizer.clip-gradient-norm",
    "warmup_steps": "--policy-schedule.warmup-steps",
    "batch_size": "--batch-size",
    "gradient_accumulation_steps": "--agent.accumulate",
    "num_train_steps": "--max-steps",
    "max_steps": "--max-steps",
    "num_steps": "--max-steps",
    "num_iterations": "--max-steps",
    "save_interval": "--save-interval",
    "log_interval": "--log-interval",
    "checkpoint_dir": "--checkpoint.base-dir",
    "output_dir": "--checkpoint.base-dir",
    "data_path": "--data-path",
    "repo_id": "--data-path",
    "dataset": "--data-path",
    "asset_id": "--data.asset-id",
    "assets_dir": "--data.assets-dir",
    "episodes_per_memory_pool": "--data.episodes-per-memory-pool",
    "fsdp_devices": "--mesh.fsdp",
    "checkpoint_path": "--init-weights",
    "pretrained_path": "--init-weights",
    "pretrained_checkpoint": "--init-weights",
    "rloo_batch_size": "--agent.group-size",
    "group_size": "--agent.group-size",
    "rollouts_per_env": "--agent.group-size",
    "ppo_epochs": "--agent.epochs",
    "num_parallel_envs": "--rollout.num-envs",
    "task_suite": "--env.suite",
    "benchmark_name": "--env.suite",
    "patience": "--early-stop.patience",
    "min_delta": "--early-stop.min-delta",
    "wandb_project": "--tracking.project",
    "wandb_entity": "--tracking.entity",
}
"""Other trainers' words -> the equivalent flag."""
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "enable_fsdp": ("--enable-fsdp",),
    "no_wandb": ("--no-wandb",),
    "use_wandb": ("--sinks", "wandb"),
    "wandb_enabled": ("--sinks", "wandb"),
    "debug": ("--debug",),
}
"""Boolean words -> the flags for true; false is the default."""
ANSWERS: Mapping[str, str] = {
    "real_action_dim": "follows from data.robot: a name in `pirl recipes show`, or module:NAME for your own",
    "action_dim": "is the model's (32 in released weights); the robot's own follows from data.robot",
    "state_dim": "follows from data.robot",
    "skip_norm_stats": "statistics are always needed: pirl norm-stats DATASET --robot NAME",
    "mixed_precision": "model.dtype bfloat16, the default of π₀",
    "num_workers": "data.prefetch, or rollout.num_workers for environments",
    "monitor": "early_stop.metric, such as eval/success_rate",
    "success_rate_target": "the curriculum prefers states solved about half of the time by itself",
    "scheduler": "policy_schedule.type: CosineSchedule, RsqrtSchedule or ConstantSchedule",
    "optimizer": "policy_optimizer.type: AdamW or SGD",
    "epochs": "training is counted in steps: num_train_steps (RIPT: agent.epochs passes per iteration)",
}
"""Words without an equivalent setting -> what to do instead."""
_RECIPE = ("recipe", "config", "config_name", "name")


def is_foreign(data: Mapping[str, Any]) -> bool:
    """Whether a file's top level has other trainers' words or sections; misspelt pirl settings do not count."""
    strange = set(data) - set(field_docs(RLTrainConfig)) - {"recipe"}
    words = {*FLAGS, *SWITCHES, *ANSWERS, *_RECIPE}
    return any(isinstance(data[key], Mapping) or key in words for key in strange)


def translate(data: Mapping[str, Any], recipes: Mapping[str, RLTrainConfig]) -> tuple[str, list[str]]:
    """The equivalent (recipe, flags); raises one error that lists all fields without a counterpart."""
    leaves = flatten(data, ".")
    named = next((str(leaves.pop(key)) for key in _RECIPE if isinstance(leaves.get(key), str)), None)
    recipe = "" if named is None else ALIASES.get(named, named)
    problems: list[tuple[str, str]] = []
    if recipe not in recipes:
        near = difflib.get_close_matches(named or "", [*recipes, *ALIASES], n=3)
        hint = f"did you mean: {', '.join(near)}" if near else f"add a line `recipe: NAME`: {', '.join(recipes)}"
        problems.append(("no recipe is named" if named is None else f"unknown recipe {named!r}", hint))
    known = settings(recipes[recipe]) if recipe in recipes else {}
    words: list[str] = []
    for path, value in leaves.items():
        word = re.sub(r"\W", "_", path.rpartition(".")[2]).lower()
        if path in known:
            words += known[path].words(_word(value))
        elif word in SWITCHES:
            words += SWITCHES[word] if value else ()
        elif flag := _flag(word, known):
            words += [flag, *_values(value)]
        elif word in ANSWERS:
            problems.append((f"{path}: {_word(value)}", ANSWERS[word]))
        else:
            ends = {name.rpartition(".")[2]: name for name in known}
            near = [ends[end] for end in difflib.get_close_matches(word, ends, n=2, cutoff=0.6)]
            hint = f"nearest settings: {', '.join(near)}" if near else "pirl has no such setting: leave it out"
            problems.append((f"{path}: {_word(value)}", hint))
    if problems:
        raise ConfigError(f"{len(problems)} entries have no counterpart here\n{numbered(problems)}")
    return recipe, words


def _flag(word: str, known: Mapping[str, Any]) -> str | None:
    """The flag for a word, adapted to the name that the recipe's algorithm uses for the setting."""
    flag = FLAGS.get(word)
    if flag == "--agent.policy-ema-decay" and "agent.ema_decay" in known:
        return "--agent.ema-decay"
    return flag


def _values(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _word(value: Any) -> Any:
    return value if isinstance(value, bool) else " ".join(_values(value))
