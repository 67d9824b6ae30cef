"""The range of a setting stands in its type, and every settings dataclass checks it."""

import math
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Annotated, get_type_hints

import pytest

from pirl.agents.agent_config import AgentConfig
from pirl.agents.config import ACRLPDConfig, FlowPPOConfig, RECAPConfig
from pirl.config import RLTrainConfig
from pirl.config_io import from_dict
from pirl.errors import ConfigError
from pirl.ranges import Bounds, Checked, Count, Decay, Inside, NotNegative, Positive, bounds_of
from pirl.recipes import get_config


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """One of each kind."""

    count: Count = 1
    decay: Decay | None = None
    share: Inside = 0.5
    sizes: tuple[Count, ...] = (1, 2)
    warm: Annotated[float, Bounds(low=0, high=2, open_low=True)] = 1.0
    rate: Positive = math.inf
    weight: NotNegative = 0.0
    free: int = -7


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("count", 0, "Settings: count is 0\n  hint: it is at least 1"),
        ("decay", 1.0, "Settings: decay is 1.0\n  hint: it is at least 0 and below 1"),
        ("share", 0.0, "Settings: share is 0.0\n  hint: it is between 0 and 1, both excluded"),
        ("sizes", (3, 0), "Settings: sizes is (3, 0)\n  hint: it is at least 1"),
        ("warm", 0.0, "Settings: warm is 0.0\n  hint: it is above 0 and at most 2"),
        ("rate", 0.0, "Settings: rate is 0.0\n  hint: it is above 0"),
        ("weight", math.nan, "Settings: weight is nan\n  hint: it is at least 0"),
    ],
)
def test_a_value_outside_its_range_is_refused(name: str, value: object, said: str) -> None:
    Settings()
    with pytest.raises(ConfigError) as caught:
        Settings(**{name: value})
    assert str(caught.value) == said


def test_edges_are_inside_or_outside_as_said() -> None:
    Settings(decay=0.0, warm=2.0, weight=0.0, sizes=())
    assert "free" not in bounds_of(Settings)


def test_read_from_a_file_the_error_names_the_path() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.num_envs is 0\n.*it is at least 1"):
        from_dict(RLTrainConfig, {"rollout": {"num_envs": 0}}, base=get_config("debug"))


@pytest.mark.parametrize(
    "module",
    ["agents.config", "data.config", "envs.config", "models.critic_config", "rollout.config", "training.config"],
)
def test_settings_with_ranges_check_them(module: str) -> None:
    """A range without the check would be a comment."""
    found = [value for value in vars(import_module(f"pirl.{module}")).values() if isinstance(value, type)]
    found = [value for value in found if is_dataclass(value)]
    tried = 0
    for cls in found:
        needed = {"id": "x", "robot": "x"} if cls.__name__ == "GymConfig" else {}
        for name, bounds in bounds_of(cls).items():
            default = getattr(cls(**needed), name)
            bad = bounds.low - 1 if "int" in str(get_type_hints(cls)[name]) else float(bounds.low - 1)
            with pytest.raises(ConfigError, match=f"{cls.__name__}: {name} is"):
                cls(**needed, **{name: (bad,) * len(default) if isinstance(default, tuple) else bad})
            tried += 1
    assert tried > 5


@pytest.mark.parametrize("kind", [ACRLPDConfig, RECAPConfig, FlowPPOConfig])
def test_values_need_rewards_that_differ(kind: type[AgentConfig]) -> None:
    with pytest.raises(ConfigError, match="rewards lie between"):
        kind(**{"reward_low": 1.0, "reward_high": 1.0})
