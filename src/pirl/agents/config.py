"""The settings of each algorithm. No jax here."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pirl.agents.advantage_config import FilteredConfig, RECAPConfig
from pirl.agents.agent_config import AgentConfig, GroupPlan
from pirl.errors import ConfigError, PirlWarning
from pirl.models.config import FlowTimes
from pirl.models.critic_config import Aggregation
from pirl.ranges import Bounds, Count, Decay, Inside, Natural, NotNegative, Positive, Share
from pirl.search import Choice, Item, Range, around
from pirl.training.config import AdamW

__all__ = ["ACRLPDConfig", "BCConfig", "FilteredConfig", "RECAPConfig", "RIPTConfig"]

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
class BCConfig(AgentConfig):
    """Behaviour cloning: OpenPI's training objective."""

    agent: ClassVar[str] = "pirl.agents.bc:BC"

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


@dataclass(frozen=True, kw_only=True)
class ACRLPDConfig(AgentConfig):
    """Q-chunking on a flow policy: a critic over action chunks, and an actor that takes its advice into the weights."""

    agent: ClassVar[str] = "pirl.agents.acrlpd:ACRLPD"
    replays: ClassVar[bool] = True

    discount: Inside = 0.99
    """Per environment step. A good start is 1 - 1/(steps of a long episode)."""
    reward_low: float = 0.0
    """Smallest reward of a step; with `reward_high` and the discount it bounds the values."""
    reward_high: float = 1.0
    """Largest reward of a step."""
    reward_once: bool = True
    """Sparse rewards: at most one step of an episode pays anything. Bounds the values more tightly."""
    actor: Actor = "awr"
    """How the critic reaches the actor."""
    num_action_samples: Count = 4
    """N: candidates per observation, for targets, for the baseline of the advantage, and for best-of-N acting."""
    flow_steps: Count = 10
    """Euler steps per candidate."""
    q_aggregation: Aggregation = "mean"
    """How the target critics' values become one."""
    target_update_rate: Share = 0.005
    """τ: how far the target critic moves towards the critic in each update."""
    critic_updates: Count = 1
    """Critic updates per actor update (update-to-data ratio), on features that are computed once."""
    target_ess: Inside = 0.4
    """Effective sample size of the advantage weights, as a share of the batch; the temperature β is adapted to it.
    0.3 to 0.5 works."""
    beta_init: float = 0.1
    """Temperature to start with, as a share of the value range."""
    weight_cap: float = 20.0
    """Largest advantage weight."""
    bc_loss_weight: Share = 0.1
    """Share of the actor's loss that imitates the data whatever the critic thinks."""
    actor_warmup_steps: Natural = 0
    """For so many steps the actor imitates the data alone while the critic learns."""
    calql_weight: float = 0.0
    """Cal-QL: push the values of the policy's candidates down, but not below the observed return. 0 is off."""
    flow_draws: Count = 1
    """Points of the flow per chunk and step."""
    flow_times: FlowTimes = "beta"
    """How flow times are drawn: OpenPI's way (beta) or Q-chunking's (uniform)."""
    clip_targets: bool = True
    """Clip targets to the returns that the rewards allow. Q-chunking does not; `hl_gauss` clips in any case."""
    policy_ema_decay: Decay | None = 0.999
    """Average of the policy, for acting, targets and checkpoints; None turns it off."""
    critic_ema_decay: Decay | None = 0.99
    """Average of the critic, for choosing among candidates when acting; None turns it off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward_low < self.reward_high:
            raise ConfigError(f"rewards lie between {self.reward_low} and {self.reward_high}", hint="low before high")

    @property
    def learns_values(self) -> bool:
        """A critic."""
        return True

    @property
    def chooses(self) -> bool:
        """By its critic."""
        return True

    @property
    def policy_ema(self) -> float | None:
        """EMA decay of the policy's weights, or None."""
        return self.policy_ema_decay

    @property
    def critic_ema(self) -> float | None:
        """EMA decay of the critic's weights, or None."""
        return self.critic_ema_decay

    def without_ema(self) -> "ACRLPDConfig":
        """The same settings without the policy's EMA."""
        return replace(self, policy_ema_decay=None)

    def small(self) -> "ACRLPDConfig":
        """The actor starts at once."""
        return replace(self, accumulate=min(self.accumulate, 2), actor_warmup_steps=min(self.actor_warmup_steps, 2))

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Rewards that the value range does not hold, and failures that would pay."""
        declared = run.data.reward_range
        if declared is None:
            return
        (low, high), outcome = declared, run.data.outcome
        if not self.reward_low <= low <= high <= self.reward_high:
            yield (
                f"data.outcome {outcome!r} gives rewards from {low:g} to {high:g}, the agent expects them from "
                f"{self.reward_low:g} to {self.reward_high:g}",
                f"they bound the values: --agent.reward-low {low:g} --agent.reward-high {high:g}",
            )
        if outcome == "step_penalty" and run.data.failure == "terminal" and not run.data.failure_reward:
            yield (
                "data.outcome 'step_penalty' with failures that end the task at no cost: failing early would pay",
                "make a failure cost more than going on, such as --data.failure-reward -100, or a time-out: "
                "--data.failure timeout",
            )
        if self.reward_once and outcome == "step_penalty":
            yield (
                "data.outcome 'step_penalty' pays at every step, and agent.reward_once says that one step does",
                "it bounds the values: --agent.no-reward-once",
            )

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, discount, update-to-data ratio, and what steers the actor."""
        learns = self.actor != "best_of_n"  # there the actor does not listen to the critic
        yield ("pi0_lr", around(run.policy_schedule)) if learns else ("critic_lr", around(run.critic_schedule))
        # A discount is felt by its distance to 1: half and twice the time it looks ahead.
        discounts = (round(1 - share * (1 - self.discount), 4) for share in (2.0, 1.0, 0.5))
        yield "agent.discount", Choice(values=tuple(discount for discount in discounts if discount > 0))
        yield "agent.critic_updates", Choice(values=(1, 2, 4))
        if self.actor == "awr":
            yield "agent.target_ess", Range(low=0.15, high=0.6)
        else:
            yield "agent.num_action_samples", Choice(values=(4, 8, 16))
        if learns:
            yield "agent.bc_loss_weight", Choice(values=(0.0, 0.1, 0.3))
        else:
            yield "agent.q_aggregation", Choice(values=("mean", "min"))


@dataclass(frozen=True, kw_only=True)
class RIPTConfig(AgentConfig):
    """Groups of rollouts from the same initial state, compared with each other: no critic, no reward model."""

    agent: ClassVar[str] = "pirl.agents.ript:RIPT"

    loss: GroupLoss = "nft"
    """How advantages reach the policy."""
    group_size: Annotated[int, Bounds(low=2)] = 8
    """K: rollouts of one initial state. Their mean is the baseline."""
    groups_per_iteration: Count = 16
    """Groups to learn from in each iteration; groups in which all rollouts are worth the same do not count."""
    max_attempts: Annotated[float, Bounds(low=1)] = 4.0
    """Groups that may be rolled out to find those, as a multiple of `groups_per_iteration`; then the iteration goes on
    with what it has."""
    epochs: Count = 2
    """Passes over the rollouts of an iteration."""
    drift_limit: Positive | None = 0.02
    """Go on to the next iteration once `ript/drift`, the mean squared distance of the velocities to those of the policy
    that rolled out, is above this; None makes all passes."""
    advantage: GroupAdvantage = "rloo"
    """What a rollout is compared with."""
    nft_beta: Positive = 1.0
    """β of `nft`: the best velocity is v_old + A (u - v_old) / β, so a larger one moves less."""
    awr_beta: Positive = 0.5
    """Temperature of `awr`: smaller is greedier."""
    weight_cap: Annotated[float, Bounds(low=1)] = 20.0
    """Largest weight of `awr`, before weights are divided by their mean."""
    fpo_clip: Inside = 0.05
    """How far the ratio of `fpo` may leave 1 before it stops counting; 0.05 is FPO's own."""
    condition_dropout: Decay = 0.2
    """Share of the unconditional branch in the loss of `cfg`; 0.1 to 0.3 works."""
    guidance: NotNegative = 1.0
    """Guidance scale of `cfg` when acting: 1 is the conditional policy, more extrapolates."""
    bc_weight: NotNegative = 0.0
    """Weight of imitation of demonstrations beside the rollouts; 0 needs no demonstrations."""
    flow_draws: Count = 4
    """Points of the flow per chunk and step. More cost little: the prefix is shared."""
    ema_decay: Decay | None = None
    """Average the weights for acting and for checkpoints; None acts with the weights themselves."""
    augment: bool = False
    """Augment pictures. The policy rolled out on pictures as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance != 1 and self.loss != "cfg":
            raise ConfigError(
                f"guidance is {self.guidance} and the loss is {self.loss!r}", hint="only `cfg` has two branches to mix"
            )
        if self.loss == "raw":
            self._raw()

    @property
    def uses_dataset(self) -> bool:
        """Only where demonstrations are imitated beside the rollouts."""
        return self.bc_weight > 0

    @property
    def groups(self) -> GroupPlan:
        """The rollouts of one iteration."""
        count = self.groups_per_iteration
        return GroupPlan(
            size=self.group_size, groups=count, max_groups=int(self.max_attempts * count), epochs=self.epochs
        )

    @property
    def policy_ema(self) -> float | None:
        """EMA decay of the policy's weights, or None."""
        return self.ema_decay

    def without_ema(self) -> "RIPTConfig":
        """The same settings without EMA."""
        return replace(self, ema_decay=None)

    def small(self) -> "RIPTConfig":
        """Two groups of two."""
        return replace(
            self,
            accumulate=min(self.accumulate, 2),
            group_size=2,
            groups_per_iteration=2,
            max_attempts=1.0,
            bc_weight=0.0,
        )

    def quick(self) -> "RIPTConfig":
        """At most four groups."""
        return replace(self, groups_per_iteration=min(self.groups_per_iteration, 4), max_attempts=1.0)

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Demonstrations that are not there."""
        if self.bc_weight > 0 and not run.data.repo_ids:
            yield f"agent.bc_weight is {self.bc_weight} without demonstrations", "name data.repo_ids"

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, passes, and the loss's own setting."""
        yield "pi0_lr", around(run.policy_schedule)
        if self.loss != "raw":  # which is a gradient for the first pass only
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
