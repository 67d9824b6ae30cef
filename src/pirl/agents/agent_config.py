"""What every algorithm's settings say to the rest of pirl. No jax here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

from pirl.ranges import Auto, Checked, Count, Natural
from pirl.search import Item


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The rollouts of one iteration, for algorithms that learn from groups of their own rollouts."""

    size: int
    """Rollouts of one initial state."""
    groups: int
    """Groups to learn from."""
    max_groups: int
    """Groups to roll out at most, to find those."""
    epochs: int
    """Passes over the rollouts."""
    even: bool = False
    """Whether all rollouts count the same, however many rows they have."""
    last_look: bool = False
    """Whether the policy also notes something of the observation that an episode ended with that was cut off, such as
    its value."""


class RewardRange(NamedTuple):
    """The rewards that bound an algorithm's values; targets beyond them are clipped."""

    low: float
    """Smallest reward of a step."""
    high: float
    """Largest reward of a step."""
    once: bool
    """Whether at most one step of an episode pays anything."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Checked):
    """The settings of an algorithm. Subclass it, name the algorithm in `agent`, and it is complete."""

    agent: ClassVar[str] = ""
    """The algorithm's class, as `module:Class`. A name, so that settings are read without jax."""
    replays: ClassVar[bool] = False
    """Whether it also learns from episodes that it collects (the `online` settings)."""
    freezes_policy: ClassVar[bool] = False
    """Whether no weight of the policy trains, whatever `freeze` says."""
    delays: ClassVar[bool] = False
    """Whether its flow loss heeds `real_time_delay`."""

    augment: bool = True
    """Augment pictures (crop, rotate, colour jitter); all observations of a chunk alike."""
    accumulate: Count | Auto = "auto"
    """Split each batch into this many parts to save memory; the gradient is that of the whole batch. auto: the fewest
    that fit."""
    real_time_delay: Natural = 0
    """Train for real-time chunking: the first d steps of each chunk are given without noise, and the loss is on the
    others; d is 0 to this. The most steps that a robot executes while it waits for a chunk. 0: off. π₀ only."""

    @classmethod
    def kinds(cls) -> tuple[type["AgentConfig"], ...]:
        """Every algorithm's settings by name: pirl's own, then those of imported modules."""
        import_module("pirl.agents.config")
        found = [kind for kind in _descendants(cls) if kind.agent]
        return tuple(sorted(found, key=lambda kind: (not kind.__module__.startswith("pirl."), kind.__name__)))

    @property
    def parts(self) -> int:
        """Parts of each batch; 1 as long as `auto` is not decided."""
        return 1 if self.accumulate == "auto" else self.accumulate

    @property
    def learns_values(self) -> bool:
        """Whether it learns values: its batches then carry next observations, and a run has a critic."""
        return False

    @property
    def heeds_corrections(self) -> bool:
        """Whether it asks who chose each action, a policy or a person: its batches then carry `acted_by`."""
        return False

    @property
    def chooses(self) -> bool:
        """Whether it can choose among several candidate chunks when acting (best of N)."""
        return False

    @property
    def only_chooses(self) -> bool:
        """Whether what it learns shows only in its choice among candidates: plain samples act as before training."""
        return False

    @property
    def one_step(self) -> bool:
        """Whether its policy takes one Euler step from noise to chunk: with more it does not act as trained."""
        return False

    @property
    def only_beside(self) -> bool:
        """Whether what it learns stays beside the policy's weights: exported, they act as before training."""
        return self.only_chooses

    @property
    def guided(self) -> bool:
        """Whether its policy has a condition that acting may weigh, by the setting `guidance`."""
        return False

    @property
    def uses_dataset(self) -> bool:
        """Whether it learns from recorded chunks."""
        return True

    @property
    def groups(self) -> GroupPlan | None:
        """The rollouts of one iteration; None for algorithms that do not need any."""
        return None

    @property
    def explores(self) -> bool:
        """Whether it acts differently while it collects: by `Agent.explore`."""
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
        """The rewards it can learn from; None if it clips nothing to what they allow."""
        return None

    @property
    def debug_steps(self) -> int:
        """Steps of a debug run."""
        return 10 if self.groups is None else 2

    def without_ema(self) -> "AgentConfig":
        """The same settings without EMA, to save memory."""
        return self

    def small(self) -> "AgentConfig":
        """The same settings for a debug run: same code paths, least work."""
        return replace(self, accumulate=min(self.parts, 2))

    def quick(self) -> "AgentConfig":
        """The same settings for a run of a few steps with the real model."""
        return self

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Conflicts with the rest of a run's configuration, as (what is wrong, what to do)."""
        return iter(())

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """The most important settings to tune, by dotted path."""
        return iter(())


def _descendants(cls: type[AgentConfig]) -> Iterator[type[AgentConfig]]:
    for kind in cls.__subclasses__():
        yield kind
        yield from _descendants(kind)
