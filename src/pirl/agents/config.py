"""What an algorithm can be told. No jax here."""

import warnings
from dataclasses import dataclass
from typing import Literal

from pirl.errors import ConfigError, PirlWarning
from pirl.models.config import FlowTimes
from pirl.models.critic_config import Aggregation

Actor = Literal["awr", "distill", "best_of_n"]
"""How the critic reaches the actor. `awr`: data chunks, weighted by their advantage. `distill`: the best of N
candidates of the policy that training started from. `best_of_n`: not at all, the choice is made when acting
(Q-chunking itself)."""

GroupLoss = Literal["nft", "awr", "filter", "cfg", "fpo", "raw"]
"""How advantages of rollouts reach the policy. `nft`: towards what did well, away from what did badly, held near the
policy that rolled out. `awr`: imitation of rollouts, weighted by their advantage. `filter`: imitation of the better
ones alone. `cfg`: a condition that means "better than its group". `fpo`: clipped ratios, as PPO. `raw`: the flow loss
times the advantage, for ablations."""

GroupAdvantage = Literal["rloo", "std"]
"""What a rollout is compared with: `rloo`, the mean of the others of its group. `std`: the mean of its group, in
standard deviations."""


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
    flow_times: FlowTimes = "beta"
    """How flow times are drawn: OpenPI's way (beta) or Q-chunking's (uniform)."""
    clip_targets: bool = True
    """Clip targets to the returns that the rewards allow. Q-chunking does not; `hl_gauss` clips in any case."""
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


@dataclass(frozen=True, kw_only=True)
class RIPTConfig:
    """Groups of rollouts from the same initial state, compared with each other: no critic, no reward model."""

    loss: GroupLoss = "nft"
    """How advantages reach the policy."""
    group_size: int = 8
    """K: rollouts of one initial state. Their mean is the baseline."""
    groups_per_iteration: int = 16
    """Groups to learn from in each iteration; groups in which all rollouts are worth the same do not count."""
    max_attempts: float = 4.0
    """Groups that may be rolled out to find those, as a multiple of `groups_per_iteration`; then the iteration goes on
    with what it has."""
    epochs: int = 2
    """Passes over the rollouts of an iteration."""
    drift_limit: float | None = 0.02
    """Go on to the next iteration once `ript/drift`, the mean squared distance of the velocities to those of the policy
    that rolled out, is above this; None makes all passes."""
    advantage: GroupAdvantage = "rloo"
    """What a rollout is compared with."""
    nft_beta: float = 1.0
    """β of `nft`: the best velocity is v_old + A (u - v_old) / β, so a larger one moves less."""
    awr_beta: float = 0.5
    """Temperature of `awr`: smaller is greedier."""
    weight_cap: float = 20.0
    """Largest weight of `awr`, before weights are divided by their mean."""
    fpo_clip: float = 0.05
    """How far the ratio of `fpo` may leave 1 before it stops counting."""
    condition_dropout: float = 0.2
    """Share of the unconditional branch in the loss of `cfg`."""
    guidance: float = 1.0
    """Guidance scale of `cfg` when acting: 1 is the conditional policy, more extrapolates."""
    bc_weight: float = 0.0
    """Weight of imitation of demonstrations beside the rollouts; 0 needs no demonstrations."""
    flow_draws: int = 4
    """Points of the flow per chunk and step. More cost little: the prefix is shared."""
    ema_decay: float | None = None
    """Average the weights for acting and for checkpoints; None acts with the weights themselves."""
    augment: bool = False
    """Augment pictures. The policy rolled out on pictures as they are."""
    accumulate: int = 1
    """Split each batch into this many parts to save memory; the gradient is that of the whole batch."""

    def __post_init__(self) -> None:
        _at_least_one(
            groups_per_iteration=self.groups_per_iteration,
            epochs=self.epochs,
            flow_draws=self.flow_draws,
            accumulate=self.accumulate,
        )
        for name in ("nft_beta", "awr_beta") + (() if self.drift_limit is None else ("drift_limit",)):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="it is above 0")
        for name, low in (("group_size", 2), ("max_attempts", 1), ("weight_cap", 1), ("guidance", 0), ("bc_weight", 0)):
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint=f"it is at least {low}")
        if not 0 < self.fpo_clip < 1:
            raise ConfigError(f"fpo_clip is {self.fpo_clip}", hint="it lies between 0 and 1; 0.05 is FPO's own")
        if not 0 <= self.condition_dropout < 1:
            raise ConfigError(
                f"condition_dropout is {self.condition_dropout}", hint="a share below 1; 0.1 to 0.3 works"
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay is {self.ema_decay}", hint="it lies between 0 and 1, or there is none")
        if self.guidance != 1 and self.loss != "cfg":
            raise ConfigError(
                f"guidance is {self.guidance} and the loss is {self.loss!r}", hint="only `cfg` has two branches to mix"
            )
        if self.loss == "raw":
            self._raw()

    def _raw(self) -> None:
        """The flow loss of a bad rollout, times a negative number, has no minimum."""
        if self.epochs > 1:
            raise ConfigError(
                f"loss 'raw' with {self.epochs} epochs: the loss of bad rollouts is unbounded below",
                hint="it is a policy gradient for the first step only: epochs 1, or a loss that may be minimised (nft)",
            )
        warnings.warn(
            "loss 'raw' pushes velocities away from bad rollouts without a bound: with large steps the policy leaves "
            "the task, all rollouts fail alike, and nothing is left to learn from. `nft` does the same with a bound.",
            PirlWarning,
            stacklevel=4,
        )


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}", hint="it is at least 1")
