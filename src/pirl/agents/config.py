"""What an algorithm can be told. No jax here."""

from dataclasses import dataclass
from typing import Literal

from pirl.errors import ConfigError
from pirl.models.critic_config import Aggregation

Actor = Literal["awr", "distill", "best_of_n"]
"""How the critic reaches the actor. `awr`: data chunks, weighted by their advantage. `distill`: the best of N
candidates of the policy that training started from. `best_of_n`: not at all, the choice is made when acting
(Q-chunking itself)."""


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """Behaviour cloning: OpenPI's training objective."""

    flow_draws: int = 1
    """Points of the flow per chunk and step. More cost little: the prefix is shared."""
    augment: bool = True
    """Crop, rotate and colour-jitter the pictures, as OpenPI does."""
    mask_padding: bool = False
    """Leave steps behind the end of an episode and padded action dimensions out of the loss. OpenPI averages over
    them; masking changes the numbers, not the optimum."""
    ema_decay: float | None = 0.99
    """Average the weights for acting and for checkpoints; None acts with the weights themselves."""
    accumulate: int = 1
    """Split each batch into this many parts to save memory; the gradient is that of the whole batch."""

    def __post_init__(self) -> None:
        _at_least_one(flow_draws=self.flow_draws, accumulate=self.accumulate)


@dataclass(frozen=True, kw_only=True)
class ACRLPDConfig:
    """Q-chunking on a flow policy: a critic over action chunks, and an actor that takes its advice into the weights."""

    discount: float = 0.99
    """Per environment step. A good start is 1 - 1/(steps of a long episode)."""
    reward_low: float = 0.0
    """Smallest reward of a step; with `reward_high` and the discount it bounds the values."""
    reward_high: float = 1.0
    """Largest reward of a step."""
    reward_once: bool = True
    """Sparse rewards: at most one step of an episode pays anything. Bounds the values more tightly."""
    actor: Actor = "awr"
    """How the critic reaches the actor."""
    num_action_samples: int = 4
    """N: candidates per observation, for targets, for the baseline of the advantage, and for best-of-N acting."""
    flow_steps: int = 10
    """Euler steps per candidate."""
    q_aggregation: Aggregation = "mean"
    """How the target critics' values become one."""
    target_update_rate: float = 0.005
    """τ: how far the target critic moves towards the critic in each update."""
    critic_updates: int = 1
    """Critic updates per actor update (update-to-data ratio), on features that are computed once."""
    target_ess: float = 0.4
    """Effective sample size of the advantage weights, as a share of the batch; the temperature β is adapted to it."""
    beta_init: float = 0.1
    """Temperature to start with, as a share of the value range."""
    weight_cap: float = 20.0
    """Largest advantage weight."""
    bc_loss_weight: float = 0.1
    """Share of the actor's loss that imitates the data whatever the critic thinks."""
    actor_warmup_steps: int = 0
    """For so many steps the actor imitates the data alone while the critic learns."""
    calql_weight: float = 0.0
    """Cal-QL: push the values of the policy's candidates down, but not below the observed return. 0 is off."""
    flow_draws: int = 1
    """Points of the flow per chunk and step."""
    augment: bool = True
    """Augment pictures; both observations of a chunk alike."""
    policy_ema_decay: float | None = 0.999
    """Average of the policy, for acting, targets and checkpoints; None turns it off."""
    critic_ema_decay: float | None = 0.99
    """Average of the critic, for choosing among candidates when acting; None turns it off."""
    accumulate: int = 1
    """Split each batch into this many parts to save memory; the gradient is that of the whole batch."""

    def __post_init__(self) -> None:
        _at_least_one(
            num_action_samples=self.num_action_samples,
            flow_steps=self.flow_steps,
            critic_updates=self.critic_updates,
            flow_draws=self.flow_draws,
            accumulate=self.accumulate,
        )
        if not 0 < self.discount < 1:
            raise ConfigError(f"discount is {self.discount}", hint="it lies between 0 and 1, both excluded")
        if not self.reward_low < self.reward_high:
            raise ConfigError(f"rewards lie between {self.reward_low} and {self.reward_high}", hint="low before high")
        if not 0 <= self.bc_loss_weight <= 1:
            raise ConfigError(f"bc_loss_weight is {self.bc_loss_weight}", hint="it is a share between 0 and 1")
        if not 0 < self.target_ess < 1:
            raise ConfigError(f"target_ess is {self.target_ess}", hint="a share between 0 and 1; 0.3 to 0.5 works")


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}", hint="it is at least 1")
