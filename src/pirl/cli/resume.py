"""Resume a run with its saved settings, changed by this command line's flags."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pirl.config import RLTrainConfig
from pirl.config_io import Change, diff, from_dict, read_yaml
from pirl.errors import ConfigError
from pirl.names import CONFIG_FILE, PARAMS_ITEM

_NEW_RUNS_ONLY = ("--debug", "--variant")
"""Flags that rewrite the whole configuration; saved settings already include their effect."""


def is_run(source: str) -> bool:
    """Whether a path is a run folder; a step folder is an error whose hint has the right command."""
    folder = Path(source).expanduser()
    if (folder / PARAMS_ITEM).is_dir() and (folder.parent / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{source} is a step of a run",
            hint=f"resume the run: pirl train {folder.parent}; or start a new one from these weights: "
            f"pirl train RECIPE --exp-name NAME --init-weights {source}",
        )
    if folder.is_dir() and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{source} is a folder without {CONFIG_FILE}", hint="name a recipe, a YAML file or a run")
    if "/" in source and not folder.exists():
        raise ConfigError(f"there is no {source}", hint="name a recipe (`pirl recipes ls`), a YAML file or a run")
    return folder.is_dir()


def saved_settings(folder: Path) -> RLTrainConfig:
    """The settings a run was last started with, adapted if its folder was moved."""
    file = folder.expanduser() / CONFIG_FILE
    place = file.parent.absolute()
    try:
        config = from_dict(RLTrainConfig, read_yaml(file))
        rule = replace(config.checkpoint, base_dir=str(place.parent.parent))
        moved = config.run_dir.absolute() != place
        return replace(config, name=place.parent.name, exp_name=place.name, checkpoint=rule) if moved else config
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", hint=error.hint) from error


def with_changes(saved: RLTrainConfig, flags: Sequence[str], *, prog: str, about: str = "") -> RLTrainConfig:
    """The saved settings, changed by flags."""
    from pirl.recipes.flags import apply_flags

    return apply_flags(saved, _without_new_runs_only(flags), prog=prog, about=about)


def describe(saved: RLTrainConfig, config: RLTrainConfig, step: int | None) -> str:
    """Text for the user: the step it resumes from and the changed settings."""
    changes: list[Change] = diff(saved, config)
    where = f"from step {step}" if step is not None else "without a checkpoint yet"
    head = f"resuming {config.run_dir} {where}, with its own settings"
    if not changes:
        return head
    return "\n".join([f"{head} except", *(f"  {path}: {old} -> {new}" for path, old, new in changes)])


def _without_new_runs_only(flags: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in flags:
        name = word.partition("=")[0]
        if skip and not word.startswith("--"):
            skip = False
            continue
        skip = name == "--variant" and "=" not in word
        if name not in _NEW_RUNS_ONLY:
            kept.append(word)
    return kept
