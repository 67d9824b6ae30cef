"""Settings of behaviour cloning and of DAgger. Does not import jax."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pirl.agents.agent_config import AgentConfig
from pirl.ranges import Count, Decay, NotNegative
from pirl.search import Choice, Item, around
from pirl.training.config import AdamW


@dataclass(frozen=True, kw_only=True)
class BCConfig(AgentConfig):
    """Behaviour cloning: OpenPI's training objective."""

    agent: ClassVar[str] = "pirl.agents.bc:BC"
    delays: ClassVar[bool] = True

    flow_draws: Count = 1
    """Flow-matching samples (t, noise) per chunk and step. Extra samples are cheap: they share the prefix."""
    mask_padding: bool = False
    """Mask steps after the end of an episode and padded action dimensions in the loss. OpenPI averages over them;
    masking changes the numbers, not the optimum."""
    ema_decay: Decay | None = 0.99
    """EMA decay of the weights, for acting and checkpoints; None turns it off."""

    @property
    def policy_ema(self) -> float | None:
        """EMA decay of the policy's weights, or None."""
        return self.ema_decay

    def without_ema(self) -> "BCConfig":
        """The same settings without EMA."""
        return replace(self, ema_decay=None)

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, flow draws, EMA, weight decay and augmentation."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.flow_draws", Choice(values=(1, 2, 4))
        yield "agent.ema_decay", Choice(values=(0.98, 0.99, 0.999))
        if isinstance(run.policy_optimizer, AdamW):
            yield "policy_optimizer.weight_decay", Choice(values=(1e-10, 1e-4, 1e-2))
        if run.cameras:
            yield "agent.augment", Choice(values=(False, True))


@dataclass(frozen=True, kw_only=True)
class DAggerConfig(BCConfig):
    """HG-DAgger: imitate demonstrations and an operator's corrections, but not the policy's own actions."""

    agent: ClassVar[str] = "pirl.agents.dagger:DAgger"

    correction_weight: NotNegative = 3.0
    """Loss weight of chunks that an operator chose in place of the policy; demonstrations have 1. Corrections are rare
    and cover states that demonstrations do not."""
    policy_weight: NotNegative = 0.0
    """Loss weight of the policy's own chunks. Those in the `data.takeover_window` steps before a takeover always have
    0. 0: pure HG-DAgger."""

    @property
    def heeds_corrections(self) -> bool:
        """True: a chunk's loss weight depends on who chose it."""
        return True

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Both weights 0."""
        if not self.correction_weight and not self.policy_weight:
            yield (
                "agent.correction_weight and agent.policy_weight are 0: of what the robot recorded nothing is learned",
                "give corrections a weight (--agent.correction-weight 1), or train BC on the demonstrations",
            )

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, flow draws, EMA and the weights."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.flow_draws", Choice(values=(1, 2, 4))
        yield "agent.ema_decay", Choice(values=(0.98, 0.99, 0.999))
        yield "agent.correction_weight", Choice(values=(1.0, 3.0, 10.0))
        yield "agent.policy_weight", Choice(values=(0.0, 0.3, 1.0))
