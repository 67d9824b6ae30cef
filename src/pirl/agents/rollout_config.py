"""Settings of the algorithms that train on groups of their own rollouts. Does not import jax."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pirl.agents.agent_config import AgentConfig, GroupPlan
from pirl.errors import ConfigError, PirlWarning
from pirl.ranges import Bounds, Count, Decay, Inside, NotNegative, Positive
from pirl.search import Choice, Item, Range, around

GroupLoss = Literal["nft", "awr", "filter", "cfg", "fpo", "raw"]
"""How advantages of rollouts enter the policy loss. `nft`: towards good rollouts and away from bad ones, regularised
towards the rollout policy. `awr`: imitation weighted by advantage. `filter`: imitation of the better rollouts. `cfg`: a
condition that means "better than its group". `fpo`: clipped ratios, as in PPO. `raw`: the flow loss times the
advantage, for ablations."""

GroupAdvantage = Literal["rloo", "std"]
"""Baseline of a rollout. `rloo`: the mean of the other rollouts of its group. `std`: the mean of the group, in standard
deviations."""

Accept = Literal["mixed", "all"]
"""Which groups to train on."""

Weigh = Literal["rows", "rollouts"]
"""Unit of equal weight. `rows`: every chunk. `rollouts`: every rollout, so that a failure three times as long as a
success does not have three times its weight."""

NFTScale = Literal["clip", "largest"]
"""How advantages are scaled to [-1, 1], as `nft` requires. `clip`: clip them. `largest`: divide all by the largest
possible advantage of a group, as DiffusionNFT does: 1 with rloo, √(K-1) with std."""


@dataclass(frozen=True, kw_only=True)
class OwnRolloutsConfig(AgentConfig):
    """The settings shared by algorithms that train on groups of their own rollouts."""

    group_size: Count = 8
    """K: rollouts of one initial state. FlowPPO's `ppo` compares none with another and works with 1."""
    groups_per_iteration: Count = 16
    """Groups to train on per iteration; where rollouts are compared, groups with equal rewards do not count."""
    max_attempts: Annotated[float, Bounds(low=1)] = 4.0
    """Limit on the groups rolled out to find those, as a multiple of `groups_per_iteration`; the iteration then
    continues with the groups it has."""
    advantage: GroupAdvantage = "rloo"
    """Baseline of a rollout, where rollouts are compared."""
    weigh: Weigh = "rows"
    """Whether all chunks or all rollouts have equal weight."""
    bc_weight: NotNegative = 0.0
    """Weight of an imitation loss on demonstrations; 0 needs no demonstrations."""
    flow_draws: Count = 1
    """Flow-matching samples (t, noise) per chunk in flow losses. Extra samples are cheap: they share the prefix."""
    augment: bool = False
    """Augment images. Rollouts use unaugmented images."""

    @property
    def uses_dataset(self) -> bool:
        """Whether there is an imitation loss on demonstrations."""
        return self.bc_weight > 0

    def small(self) -> "OwnRolloutsConfig":
        """Two groups of two."""
        few = replace(self, group_size=2, groups_per_iteration=2, max_attempts=1.0)
        return replace(few, accumulate=min(self.parts, 2), bc_weight=0.0)

    def quick(self) -> "OwnRolloutsConfig":
        """At most four groups."""
        return replace(self, groups_per_iteration=min(self.groups_per_iteration, 4), max_attempts=1.0)

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Missing demonstrations."""
        if self.bc_weight > 0 and not run.data.repo_ids:
            yield f"agent.bc_weight is {self.bc_weight} without demonstrations", "name data.repo_ids"


@dataclass(frozen=True, kw_only=True)
class RIPTConfig(OwnRolloutsConfig):
    """Groups of rollouts from the same initial state, compared with each other: no critic, no reward model."""

    agent: ClassVar[str] = "pirl.agents.ript:RIPT"

    loss: GroupLoss = "nft"
    """How advantages enter the policy loss."""
    group_size: Annotated[int, Bounds(low=2)] = 8
    """K: rollouts of one initial state. Their mean is the baseline."""
    accept: Accept = "mixed"
    """Groups to train on. mixed: those with unequal rewards. all: also the others, whose advantages are zero; for tests
    with policies that never succeed, as in `--debug`."""
    epochs: Count = 2
    """Passes over the rollouts of an iteration."""
    drift_limit: Positive | None = 0.02
    """End the iteration once `ript/drift`, the mean squared distance of the velocities to the rollout policy's, exceeds
    this; None makes all passes."""
    nft_scale: NFTScale = "clip"
    """How `nft` handles advantages beyond ±1: clip them, or divide all by the largest possible. With rloo none are
    beyond. With std and K = 8, a single success of a group has 2.65: clipped, it has the same weight as one of four."""
    nft_beta: Positive = 1.0
    """β of `nft`: the optimal velocity is v_old + A (u - v_old) / β, so larger values take smaller steps."""
    awr_beta: Positive = 0.5
    """Temperature of `awr`: smaller is greedier."""
    weight_cap: Annotated[float, Bounds(low=1)] = 20.0
    """Largest weight of `awr`, before normalisation by the mean."""
    fpo_clip: Inside = 0.05
    """Clip range of `fpo`'s ratio around 1; 0.05 is FPO's own."""
    condition_dropout: Decay = 0.2
    """Share of the unconditional branch in the loss of `cfg`; 0.1 to 0.3 works."""
    guidance: NotNegative = 1.0
    """Guidance scale of `cfg` at inference: 1 is the conditional policy; larger values extrapolate."""
    flow_draws: Count = 4
    """Flow-matching samples (t, noise) per chunk and step. Extra samples are cheap: they share the prefix."""
    ema_decay: Decay | None = None
    """EMA decay of the weights, for acting and checkpoints; None turns it off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance != 1 and not self.guided:
            raise ConfigError(
                f"guidance is {self.guidance} and the loss is {self.loss!r}", hint="only `cfg` has two branches to mix"
            )
        if self.loss == "raw":
            self._raw()

    @property
    def guided(self) -> bool:
        """True for the loss `cfg`."""
        return self.loss == "cfg"

    @property
    def groups(self) -> GroupPlan:
        """The rollouts of one iteration."""
        count = self.groups_per_iteration
        return GroupPlan(
            size=self.group_size,
            groups=count,
            max_groups=int(self.max_attempts * count),
            epochs=self.epochs,
            even=self.weigh == "rollouts",
        )

    @property
    def policy_ema(self) -> float | None:
        """EMA decay of the policy's weights, or None."""
        return self.ema_decay

    def without_ema(self) -> "RIPTConfig":
        """The same settings without EMA."""
        return replace(self, ema_decay=None)

    def small(self) -> OwnRolloutsConfig:
        """Accepts groups even if all rollouts fail: an untrained policy still tests the update."""
        few = super().small()
        assert isinstance(few, RIPTConfig)
        return replace(few, accept="all")

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, passes, and the loss's own setting."""
        yield "pi0_lr", around(run.policy_schedule)
        if self.loss != "raw":  # valid for the first pass only
            yield "agent.epochs", Choice(values=(1, 2, 4))
        yield "agent.drift_limit", Choice(values=(0.005, 0.01, 0.02, 0.05))
        yield "agent.advantage", Choice(values=("rloo", "std"))
        own: dict[str, tuple[str, Range]] = {
            "nft": ("agent.nft_beta", Range(low=0.5, high=4.0, log=True)),
            "awr": ("agent.awr_beta", Range(low=0.2, high=1.0, log=True)),
            "fpo": ("agent.fpo_clip", Range(low=0.02, high=0.2, log=True)),
            "cfg": ("agent.condition_dropout", Range(low=0.1, high=0.3)),
        }
        if self.loss in own:
            yield own[self.loss]

    def _raw(self) -> None:
        """Check `raw`, whose loss is unbounded below for bad rollouts."""
        if self.epochs > 1:
            raise ConfigError(
                f"loss 'raw' with {self.epochs} epochs: the loss of bad rollouts is unbounded below",
                hint="it is a policy gradient for the first step only: use epochs 1, or a bounded loss (nft)",
            )
        warnings.warn(
            "loss 'raw' pushes velocities away from bad rollouts without a bound: with large steps the policy "
            "diverges, all rollouts fail, and there is no learning signal. `nft` is the bounded version.",
            PirlWarning,
            stacklevel=4,
        )
