"""Settings of PPO and GRPO over the denoising path of a flow policy. Does not import jax."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pirl.agents.agent_config import GroupPlan, RewardRange, Rewards
from pirl.agents.rollout_config import OwnRolloutsConfig
from pirl.errors import ConfigError
from pirl.ranges import Count, Inside, Natural, NotNegative, Positive, Share
from pirl.search import Choice, Item, Range, around

FlowPPOAlgorithm = Literal["ppo", "grpo"]
"""Source of advantages. `ppo`: a learned value and GAE, per plan. `grpo`: the other rollouts of the same initial state,
one advantage per rollout; no value."""

Exploration = Literal["flow_sde", "flow_noise"]
"""How sampling becomes stochastic beyond the initial noise. `flow_sde`: one randomly drawn step of each plan follows an
SDE with the same marginals. `flow_noise`: noise of learned scale at every step."""

Reduce = Literal["sum", "mean"]
"""How to combine the log-ratios of a plan. `sum`: the ratio of the whole plan. `mean`: the geometric mean over its
dimensions, which varies less and tolerates large chunks."""


@dataclass(frozen=True, kw_only=True)
class FlowPPOConfig(OwnRolloutsConfig, Rewards):
    """PPO or GRPO on a flow policy, with exact likelihood ratios of the denoising path (πRL)."""

    agent: ClassVar[str] = "pirl.agents.flow_ppo:FlowPPO"

    algorithm: FlowPPOAlgorithm = "ppo"
    """Source of advantages: a value (ppo), or the other rollouts of a group (grpo)."""
    exploration: Exploration = "flow_sde"
    """How plans become stochastic during collection. Evaluation and the served policy follow the ODE."""
    noise_level: Positive = 0.5
    """Scale of the noise of `flow_sde`: σ = noise_level √(t/(1-t))."""
    noise_low: Positive = 0.08
    """Smallest standard deviation of a step of `flow_noise`, in normalised actions."""
    noise_high: Positive = 0.16
    """Largest standard deviation of a step of `flow_noise`."""
    entropy_weight: NotNegative = 0.005
    """Weight of the entropy bonus of `flow_noise`; the noise of `flow_sde` is fixed."""
    epochs: Count = 4
    """Passes over the rollouts of an iteration."""
    clip: Inside = 0.2
    """Clip range of the ratio around 1."""
    reduce: Reduce = "sum"
    """How to combine the log-ratios of a plan's executed steps and real dimensions."""
    kl_limit: Positive | None = 0.05
    """Stop updating the policy until the next iteration once `ppo/kl`, its divergence from the rollout policy, exceeds
    this; the value keeps training. None: no limit."""
    discount: Inside = 0.99
    """Discount per environment step (ppo)."""
    gae_lambda: Share = 0.95
    """λ of GAE, per plan: 0 trusts the value, 1 the returns."""
    standardise: bool = True
    """Standardise the advantages of an iteration to mean 0 and standard deviation 1 (ppo)."""
    bootstrap_timeouts: bool = True
    """Bootstrap truncated episodes from the value of their last observation. False treats them as failures, for tasks
    whose time limit is part of the task."""
    value_clip: Positive | None = 0.2
    """Clip range of a value around the rollout's, for critics that regress (huber, mse); None turns clipping off."""
    value_warmup_steps: Natural = 0
    """Updates that train only the value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm == "grpo" and self.group_size < 2:
            raise ConfigError(
                "algorithm 'grpo' with groups of 1 rollout", hint="it compares rollouts: group_size 2 or more, or ppo"
            )
        if self.noise_low >= self.noise_high:
            raise ConfigError(
                f"noise_low is {self.noise_low}, noise_high is {self.noise_high}", hint="the first is the smaller one"
            )

    @property
    def learns_values(self) -> bool:
        """True for `ppo`, which learns a state value."""
        return self.algorithm == "ppo"

    @property
    def explores(self) -> bool:
        """Always, by noise on the denoising path."""
        return True

    @property
    def groups(self) -> GroupPlan:
        """The rollouts of one iteration; `ppo` trains on all of them."""
        count, ppo = self.groups_per_iteration, self.algorithm == "ppo"
        return GroupPlan(
            size=self.group_size,
            groups=count,
            max_groups=count if ppo else int(self.max_attempts * count),
            epochs=self.epochs,
            even=self.weigh == "rollouts",
            last_look=ppo and self.bootstrap_timeouts,
        )

    def reward_range(self, run: Any) -> RewardRange | None:
        """The configured rewards, which bound the histogram; None without a value."""
        return RewardRange(self.reward_low, self.reward_high, self.reward_once) if self.learns_values else None

    def small(self) -> OwnRolloutsConfig:
        """Small groups, at most two passes, and almost no value warm-up."""
        few = super().small()
        assert isinstance(few, FlowPPOConfig)
        return replace(few, epochs=min(self.epochs, 2), value_warmup_steps=min(self.value_warmup_steps, 2))

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, passes, clip, noise, and the algorithm's own setting."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.epochs", Choice(values=(1, 2, 4))
        yield "agent.clip", Range(low=0.05, high=0.3, log=True)
        if self.exploration == "flow_sde":
            yield "agent.noise_level", Choice(values=(0.2, 0.35, 0.5, 0.7))
        else:
            yield "agent.entropy_weight", Choice(values=(0.0, 0.005, 0.02))
        if self.algorithm == "ppo":
            yield "agent.gae_lambda", Choice(values=(0.8, 0.95, 1.0))
        else:
            yield "agent.advantage", Choice(values=("rloo", "std"))
