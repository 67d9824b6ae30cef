"""The settings that all algorithms share, and the properties by which the rest of pirl adapts to an algorithm.

Does not import jax.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

from pirl.errors import ConfigError
from pirl.ranges import Auto, Checked, Count, Natural
from pirl.search import Item


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The rollouts of one iteration, for algorithms that learn from groups of their own rollouts."""

    size: int
    """Rollouts per initial state."""
    groups: int
    """Groups to learn from."""
    max_groups: int
    """Most groups to roll out to find them."""
    epochs: int
    """Passes over the rollouts."""
    even: bool = False
    """Whether all rollouts have the same total weight, regardless of their number of rows."""
    last_look: bool = False
    """Whether the policy also makes notes, such as a value, at the last observation of a truncated episode."""


class RewardRange(NamedTuple):
    """The rewards that bound an algorithm's values; targets outside are clipped."""

    low: float
    """Smallest reward of a step."""
    high: float
    """Largest reward of a step."""
    once: bool
    """Whether at most one step of an episode has a non-zero reward."""


@dataclass(frozen=True, kw_only=True)
class Rewards(Checked):
    """The rewards of an environment, which bound an algorithm's values."""

    reward_low: float = 0.0
    """Smallest reward of a step; with `reward_high` and the discount it bounds the values."""
    reward_high: float = 1.0
    """Largest reward of a step."""
    reward_once: bool = True
    """Sparse rewards: at most one step of an episode has a non-zero reward. Bounds the values more tightly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward_low < self.reward_high:
            raise ConfigError(f"rewards lie between {self.reward_low} and {self.reward_high}", hint="low before high")


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Checked):
    """The settings of an algorithm. To add one, subclass it and name the algorithm in `agent`."""

    agent: ClassVar[str] = ""
    """The algorithm's class, as `module:Class`: a name, so that settings load without jax."""
    replays: ClassVar[bool] = False
    """Whether it also learns from episodes that it collects (the `online` settings)."""
    freezes_policy: ClassVar[bool] = False
    """Whether the policy is frozen, whatever `freeze` is."""
    delays: ClassVar[bool] = False
    """Whether its flow loss supports `real_time_delay`."""

    augment: bool = True
    """Augment images (crop, rotation, colour jitter), identically for all observations of a chunk."""
    accumulate: Count | Auto = "auto"
    """Split each batch into this many parts to save memory; the gradient is that of the whole batch. auto: the fewest
    parts that fit."""
    real_time_delay: Natural = 0
    """Train for real-time chunking: the first d steps of each chunk are given without noise and the loss covers the
    others, with d uniform from 0 to this. Set it to the most steps a robot executes while it waits for a chunk. 0: off.
    π₀ only."""

    @classmethod
    def kinds(cls) -> tuple[type["AgentConfig"], ...]:
        """Settings of all algorithms: pirl's own by name, then those of imported modules."""
        import_module("pirl.agents.config")
        found = [kind for kind in _descendants(cls) if kind.agent]
        return tuple(sorted(found, key=lambda kind: (not kind.__module__.startswith("pirl."), kind.__name__)))

    @property
    def parts(self) -> int:
        """Parts of each batch; 1 until `auto` is resolved."""
        return 1 if self.accumulate == "auto" else self.accumulate

    @property
    def learns_values(self) -> bool:
        """Whether it learns values: its batches then contain next observations, and the run has a critic."""
        return False

    @property
    def heeds_corrections(self) -> bool:
        """Whether it needs to know who chose each action, policy or operator: its batches then contain `acted_by`."""
        return False

    @property
    def knows_tasks(self) -> bool:
        """Whether it judges each task by itself: its batches then carry `task` and `task_steps`."""
        return False

    @property
    def prompt_suffixes(self) -> tuple[str, ...]:
        """Texts after the instruction that its policy is conditioned on, first the one it acts with. Its batches then
        carry `suffixed_prompts`.
        """
        return ()

    @property
    def chooses(self) -> bool:
        """Whether it supports best-of-N: selecting among candidate chunks when acting."""
        return False

    @property
    def only_chooses(self) -> bool:
        """Whether it improves only best-of-N selection: plain samples act as before training."""
        return False

    @property
    def one_step(self) -> bool:
        """Whether its policy needs exactly one Euler step from noise to chunk."""
        return False

    @property
    def only_beside(self) -> bool:
        """Whether its improvement is not in the policy's weights: exported, they act as before training."""
        return self.only_chooses

    @property
    def guided(self) -> bool:
        """Whether its policy has a condition with an inference-time scale, the setting `guidance`."""
        return False

    @property
    def uses_dataset(self) -> bool:
        """Whether it trains on recorded chunks."""
        return True

    @property
    def groups(self) -> GroupPlan | None:
        """The rollouts of one iteration; None for algorithms without rollout groups."""
        return None

    @property
    def explores(self) -> bool:
        """Whether it uses `Agent.explore` instead of `act` during collection."""
        return False

    @property
    def discount(self) -> float:
        """Discount per environment step; unused by algorithms without values."""
        return 0.99

    @property
    def policy_ema(self) -> float | None:
        """EMA decay of the policy's weights, or None."""
        return None

    @property
    def critic_ema(self) -> float | None:
        """EMA decay of the critic's weights, or None."""
        return None

    def reward_range(self, run: Any) -> RewardRange | None:
        """The rewards it supports; None if its targets are not clipped."""
        return None

    @property
    def debug_steps(self) -> int:
        """Steps of a debug run."""
        return 10 if self.groups is None else 2

    def without_ema(self) -> "AgentConfig":
        """The same settings without EMA, to save memory."""
        return self

    def small(self) -> "AgentConfig":
        """The same settings for a debug run: same code paths, minimal work."""
        return replace(self, accumulate=min(self.parts, 2))

    def quick(self) -> "AgentConfig":
        """The same settings for a run of a few steps with the real model."""
        return self

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Conflicts with the rest of a run's configuration, as pairs of problem and fix."""
        return iter(())

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """The most important settings to tune, by dotted path."""
        return iter(())


def _descendants(cls: type[AgentConfig]) -> Iterator[type[AgentConfig]]:
    for kind in cls.__subclasses__():
        yield kind
        yield from _descendants(kind)
