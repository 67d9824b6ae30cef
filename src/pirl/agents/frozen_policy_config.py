"""Settings of the algorithms that train a small actor on a frozen policy. Does not import jax."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pirl.agents.q_chunking_config import ChunkCriticConfig
from pirl.ranges import Count, NotNegative, Positive, Share
from pirl.search import Choice, Item, Range, around


@dataclass(frozen=True, kw_only=True)
class FrozenPolicyConfig(ChunkCriticConfig):
    """A critic over action chunks and a small actor, on a frozen policy.

    The actor learns with `policy_optimizer` and `policy_schedule`, everything else with the critic's.
    """

    freezes_policy: ClassVar[bool] = True

    num_action_samples: Count = 1
    """N: chunks per observation for targets and the actor's loss; targets use the best by the critic."""
    actor_hidden: tuple[Count, ...] = (256, 256)
    """Widths of the actor's hidden layers."""

    @property
    def explores(self) -> bool:
        """True: by noise in the actor."""
        return True

    @property
    def only_beside(self) -> bool:
        """True: the policy's weights do not change."""
        return True

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, discount and update-to-data ratio."""
        yield "pi0_lr", around(run.policy_schedule)
        discounts = (round(1 - share * (1 - self.discount), 4) for share in (2.0, 1.0, 0.5))
        yield "agent.discount", Choice(values=tuple(discount for discount in discounts if discount > 0))
        yield "agent.critic_updates", Choice(values=(1, 2, 4))


@dataclass(frozen=True, kw_only=True)
class DSRLConfig(FrozenPolicyConfig):
    """DSRL: a small actor chooses the noise that the frozen flow starts from."""

    agent: ClassVar[str] = "pirl.agents.dsrl:DSRL"

    noise_limit: Positive = 1.0
    """Largest absolute value of the noise. The flow was trained on noise with a root mean square near 1: if all
    dimensions may be large at once, the actor leaves its training distribution."""
    target_entropy: float = 0.0
    """Target entropy of the actor, in nats per dimension of the noise. Uniform noise within a limit of 1 has 0.69,
    normal noise 1.42."""
    temperature_init: Positive = 0.02
    """Initial weight of the entropy, as a share of the value range; it adapts to `target_entropy`."""
    prior_share: Share = 0.5
    """Share of normal noise in the training samples of the critic over noise; the rest comes from the actor."""

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Euler steps that differ between training and acting: the same noise would give other chunks."""
        yield from super().problems(run)
        if run.rollout.flow_steps != self.flow_steps:
            yield (
                f"rollout.flow_steps is {run.rollout.flow_steps}, agent.flow_steps is {self.flow_steps}",
                "make them equal: the noise is specific to the number of Euler steps",
            )

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """The shared settings, and how far the actor may deviate from normal noise."""
        yield from super().search(run)
        yield "agent.noise_limit", Range(low=0.5, high=2.0)
        yield "agent.target_entropy", Range(low=-1.0, high=0.5)


@dataclass(frozen=True, kw_only=True)
class RLTokenConfig(FrozenPolicyConfig):
    """RLT: a small actor edits the frozen policy's chunk, based on a learned readout of its prefix."""

    agent: ClassVar[str] = "pirl.agents.rl_token:RLToken"

    edit_limit: Positive = 0.5
    """Largest edit per dimension, in normalised actions."""
    edit_cost: NotNegative = 1.0
    """β: cost of an edit of 1 in every dimension, as a share of the value range."""
    reference_dropout: Share = 0.5
    """How often the actor sees zeros instead of the policy's chunk, so that it must use the token."""
    exploration: NotNegative = 0.05
    """Standard deviation of the noise on edits during collection and in targets, in normalised actions."""

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """The shared settings, and the edit limits."""
        yield from super().search(run)
        yield "agent.edit_limit", Range(low=0.1, high=1.0)
        yield "agent.edit_cost", Range(low=0.1, high=10.0, log=True)
