"""Search spaces: a range or list for each dotted setting, from YAML or by default for an algorithm.

    pi0_lr: {low: 1e-4, high: 1e-3, log: true}
    agent.discount: [0.9, 0.95, 0.98]

`pi0_lr` and `critic_lr` are peak learning rates, like the flags of `pirl train`; they work with every schedule.
Settings that define the measurement or the length of a run cannot be searched, because trials would not be comparable.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from typing import Any

from pirl.config import RLTrainConfig
from pirl.config_io import tag, with_settings
from pirl.errors import ConfigError, did_you_mean
from pirl.recipes.flags import with_peak
from pirl.recipes.settings import Setting, settings
from pirl.search import Choice, Range, Scalar, peak

RATES = {"pi0_lr": "policy_schedule", "critic_lr": "critic_schedule"}
"""Short names of peak learning rates -> their schedules."""
FIXED = (
    *("name", "exp_name", "seed", "num_train_steps", "log_interval", "sinks"),
    *("evaluation", "env", "early_stop", "checkpoint", "mesh", "watchdog"),
)
"""Settings and parts that must be the same in all trials."""
MOST_COMBINATIONS = 256
"""Combinations to try before a value counts as invalid."""

Space = Mapping[str, Choice | Range]
"""A search space by dotted path."""


def default_space(config: RLTrainConfig) -> dict[str, Choice | Range]:
    """The algorithm's most important settings, around the configuration's values."""
    return {path: _holding(item, current(config, path)) for path, item in config.agent.search(config)}


def _holding(item: Choice | Range, value: Scalar) -> Choice | Range:
    """Extend a range or choice to include the configuration's value, because a search begins with it."""
    if value in item:
        return item
    if isinstance(item, Range) and isinstance(value, int | float):
        return replace(item, low=min(item.low, value), high=max(item.high, value))
    values = (*item.extremes, value)
    numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    return Choice(values=tuple(sorted(numbers)) if len(numbers) == len(values) else values)


def current(config: RLTrainConfig, path: str) -> Any:
    """A setting's current value."""
    return peak(getattr(config, RATES[path])) if path in RATES else settings(config)[path].value


def changed(config: RLTrainConfig, values: Mapping[str, Any]) -> RLTrainConfig:
    """The configuration with other values; an invalid combination raises ConfigError."""
    rates: dict[str, Any] = {
        part: with_peak(getattr(config, part), values[name]) for name, part in RATES.items() if name in values
    }
    return with_settings(replace(config, **rates), {path: value for path, value in values.items() if path not in RATES})


def flags(config: RLTrainConfig, values: Mapping[str, Any]) -> list[str]:
    """Command-line words for these changes."""
    known = settings(config)
    return [
        word
        for path, value in values.items()
        for word in ([f"--{path.replace('_', '-')}", str(value)] if path in RATES else known[path].words(value))
    ]


def parse_space(config: RLTrainConfig, data: Mapping[str, Any]) -> dict[str, Choice | Range]:
    """Parse a space and check every name and value against the configuration."""
    known = settings(config)
    free = [path for path in known if not _is_fixed(path)]
    space: dict[str, Choice | Range] = {}
    for path, item in data.items():
        if path in known and _is_fixed(path):
            raise ConfigError(f"space: {path} is the same in all trials", hint="set it for the search, by its flag")
        if path not in RATES and path not in free:
            raise did_you_mean(path, [*free, *RATES], kind="setting in the space:")
        space[path] = _parse_item(path, item, known.get(path))
    if not space:
        raise ConfigError("the space is empty", hint="name a setting and what to try: agent.discount: [0.9, 0.95]")
    check_space(config, space)
    return space


def check_space(config: RLTrainConfig, space: Space) -> None:
    """Check that every listed value and range end is valid with some values of the others."""
    for path, item in space.items():
        others = {name: other.extremes for name, other in space.items() if name != path}
        for value in item.extremes:
            combinations = (dict(zip(others, chosen, strict=True)) for chosen in product(*others.values()))
            tried = chain([{}], islice(combinations, MOST_COMBINATIONS))
            _first_possible(config, path, value, tried)


def _first_possible(config: RLTrainConfig, path: str, value: Scalar, others: Iterator[dict[str, Any]]) -> None:
    problem: ConfigError | None = None
    for other in others:
        try:
            changed(config, {**other, path: value})
        except ConfigError as error:
            problem = problem or error
        else:
            return
    if problem is not None:
        raise ConfigError(f"space: {path} cannot be {value!r}: {problem.message}", hint=problem.hint)


def _is_fixed(path: str) -> bool:
    return path.partition(".")[0] in FIXED


def _parse_item(path: str, item: Any, setting: Setting | None) -> Choice | Range:
    kinds = set() if setting is None else set(setting.kinds)
    real = setting is None or float in kinds
    if isinstance(item, list):
        return _parse_choice(path, [float(one) if real and type(one) is int else one for one in item])
    if isinstance(item, Mapping) and (real or int in kinds):
        return _parse_range(path, item, whole=not real)
    if isinstance(item, Mapping):
        raise ConfigError(f"space: {path} is not a number", hint="list what to try: [a, b]")
    raise ConfigError(
        f"space: {path} is {item!r}", hint="a list of values, [1, 2, 4], or a range, {low: 0.1, high: 10, log: true}"
    )


def _parse_choice(path: str, values: Sequence[Any]) -> Choice:
    if wrong := [value for value in values if not isinstance(value, Scalar)]:
        raise ConfigError(f"space: {path} lists {wrong[0]!r}", hint="numbers, text, true, false and null can be tried")
    if len(values) < 2 or len({(type(value), value) for value in values}) < len(values):
        raise ConfigError(f"space: {path} lists {values!r}", hint="name two values or more, each once")
    return Choice(values=tuple(values))


def _parse_range(path: str, item: Mapping[str, Any], *, whole: bool) -> Range:
    for key in item:
        if key not in ("low", "high", "log"):
            raise did_you_mean(key, ("low", "high", "log"), kind=f"word in the space of {path}:")
    low, high, log = item.get("low"), item.get("high"), item.get("log", False)
    kinds = (int,) if whole else (int, float)
    for name, end in (("low", low), ("high", high)):
        if type(end) not in kinds:
            wanted = "a whole number" if whole else "a number"
            raise ConfigError(f"space: {name} of {path} is {end!r}, expected {wanted}", hint="{low: 1, high: 8}")
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    if not isinstance(log, bool) or not low < high or (log and not low > 0):
        raise ConfigError(
            f"space: {path} goes from {low} to {high}, log {log!r}",
            hint="low is below high, and above 0 where log is true",
        )
    return Range(low=low, high=high, log=log, whole=True) if whole else Range(low=float(low), high=float(high), log=log)


def space_yaml(config: RLTrainConfig, space: Space) -> str:
    """The space as YAML, each setting explained; `parse_space` reads it."""
    known = settings(config)
    rates = {"pi0_lr": "The policy's peak learning rate; a floor moves with it.", "critic_lr": "The critic's, alike."}
    lines = [f"# What to try of {config.name} ({tag(type(config.agent))}). Lists are choices; ranges have ends."]
    for path, item in space.items():
        lines += [f"# {rates[path] if path in rates else known[path].help}", f"{path}: {item}"]
    return "\n".join(lines) + "\n"
