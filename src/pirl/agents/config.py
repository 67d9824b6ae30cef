"""The settings of every algorithm. No jax here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pirl.agents.advantage_config import FilteredConfig, RECAPConfig
from pirl.agents.agent_config import AgentConfig
from pirl.agents.q_chunking_config import ACRLPDConfig, QChunkingConfig
from pirl.agents.rollout_config import RIPTConfig
from pirl.ranges import Count, Decay
from pirl.search import Choice, Item, around
from pirl.training.config import AdamW

__all__ = ["ACRLPDConfig", "BCConfig", "FilteredConfig", "QChunkingConfig", "RECAPConfig", "RIPTConfig"]


@dataclass(frozen=True, kw_only=True)
class BCConfig(AgentConfig):
    """Behaviour cloning: OpenPI's training objective."""

    agent: ClassVar[str] = "pirl.agents.bc:BC"
    delays: ClassVar[bool] = True

    flow_draws: Count = 1
    """Points of the flow per chunk and step. More cost little: the prefix is shared."""
    mask_padding: bool = False
    """Leave steps behind the end of an episode and padded action dimensions out of the loss. OpenPI averages over
    them; masking changes the numbers, not the optimum."""
    ema_decay: Decay | None = 0.99
    """Average the weights for acting and for checkpoints; None acts with the weights themselves."""

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
