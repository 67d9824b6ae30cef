"""Settings of the algorithms with a critic over action chunks. Does not import jax."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pirl.agents.agent_config import AgentConfig, RewardRange, Rewards
from pirl.models.config import FlowTimes
from pirl.models.critic_config import Aggregation
from pirl.ranges import Bounds, Count, Decay, Inside, Natural, NotNegative, Positive, Share
from pirl.search import Choice, Item, Range, around

Actor = Literal["awr", "distill", "best_of_n"]
"""How the critic improves the actor. `awr`: data chunks, weighted by their advantage. `distill`: the best of N
candidates of the initial policy. `best_of_n`: not at all; the critic selects at inference (Q-chunking itself)."""

CriticRows = Literal["all", "shares"]
Members = Literal["all", "halves"]
Value = Literal["best_of_n", "expectile"]
Waiting = Literal["imitate", "hold"]


@dataclass(frozen=True, kw_only=True)
class ChunkCriticConfig(AgentConfig, Rewards):
    """A critic over action chunks, trained by temporal differences, and when the actor starts to use it."""

    replays: ClassVar[bool] = True

    discount: Inside = 0.99
    """Discount per environment step. A good start is 1 - 1/(steps of a long episode)."""
    num_action_samples: Count = 4
    """N: candidates per observation, for targets, for the baseline of the advantage, and for best-of-N at inference."""
    flow_steps: Count = 10
    """Euler steps per candidate."""
    value: Value = "best_of_n"
    """State value in targets and as the baseline of advantages. `best_of_n`: from the policy's candidates, their
    maximum in targets and their mean in advantages. `expectile`: V(s), learned from the data's chunks alone (IQL), so
    targets need no samples and never use actions outside the data."""
    expectile: Inside = 0.7
    """τ of V and of the partial critic. 0.5: the mean value of chunks in the data; towards 1: their maximum."""
    partial_horizon: Count | None = None
    """Select and weight chunks by their first so many steps (those that are executed), with a partial critic distilled
    from the one over `data.critic_horizon` steps (DQC): values propagate over long chunks, while decisions use short
    ones. None: one critic does both."""
    q_aggregation: Aggregation = "mean"
    """How to aggregate the target critics' values."""
    target_update_rate: Share = 0.005
    """τ: how far the target critic moves towards the critic in each update."""
    critic_updates: Count = 1
    """Critic updates per actor update (update-to-data ratio), on features computed once."""
    critic_rows: CriticRows = "all"
    """Rows of each critic update. `all`: the whole batch every time. `shares`: disjoint shares, so that no row is used
    twice; `batch_size` is then the critic's batch size times the number of updates."""
    members: Members = "all"
    """Episodes that each critic of the ensemble trains on. `halves`: half of them, each critic with its own bootstrap
    targets, so that their errors are independent. With `all` critics agree even on noise."""
    mc_steps: Natural = 0
    """For this many steps the critic regresses observed (Monte Carlo) returns, then bootstrapped targets, so that its
    values start at the data's. Chunks with unknown returns always bootstrap."""
    actor_warmup_steps: Natural = 0
    """For this many steps only the critic trains on RL targets. The actor imitates the data; on a frozen policy it
    stays at its initialisation."""
    gate: Share | None = None
    """The actor uses the critic only while the rank correlation of values and returns on held-out episodes is above
    this and above chance; otherwise it behaves as during `actor_warmup_steps`. None: no gate, only the warm-up."""
    calql_weight: NotNegative = 0.0
    """Cal-QL: push the values of the policy's candidates down, but not below the observed return. 0: off."""
    clip_targets: bool = True
    """Clip targets to the possible returns. Q-chunking does not; `hl_gauss` always clips."""
    critic_ema_decay: Decay | None = 0.99
    """EMA decay of the critic, for best-of-N at inference; None turns it off."""

    @property
    def heads(self) -> tuple[int, ...]:
        """Extra value heads of the critic, with the number of steps each scores."""
        partial = () if self.partial_horizon is None else (self.partial_horizon,)
        return partial + ((0,) if self.value == "expectile" else ())

    @property
    def halved(self) -> bool:
        """Whether each critic trains on half of the episodes."""
        return self.members == "halves"

    @property
    def learns_values(self) -> bool:
        """True: chunk values."""
        return True

    @property
    def chooses(self) -> bool:
        """True: by its critic."""
        return True

    @property
    def critic_ema(self) -> float | None:
        """EMA decay of the critic's weights, or None."""
        return self.critic_ema_decay

    def small(self) -> "ChunkCriticConfig":
        """Almost no warm-up, and no gate."""
        small = replace(self, accumulate=min(self.parts, 2), gate=None, mc_steps=min(self.mc_steps, 2))
        return replace(small, actor_warmup_steps=min(self.actor_warmup_steps, 2))

    def reward_range(self, run: Any) -> RewardRange | None:
        """The configured rewards; None if targets are not clipped (regression without `clip_targets`)."""
        clips = self.clip_targets or run.critic.loss == "hl_gauss"
        return RewardRange(self.reward_low, self.reward_high, self.reward_once) if clips else None

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Shares that do not divide the batch, an invalid partial critic, a gate without held-out episodes, rewards out
        of range, failures with a positive reward.
        """
        if self.partial_horizon is not None and self.partial_horizon >= run.critic_horizon:
            yield (
                f"agent.partial_horizon is {self.partial_horizon}, and the critic scores {run.critic_horizon} steps",
                "the partial critic looks at fewer: choose a longer --data.critic-horizon, or None",
            )
        if self.critic_rows == "shares" and run.batch_size % self.critic_updates:
            yield (
                f"a batch of {run.batch_size} does not split into the shares of {self.critic_updates} critic updates",
                f"choose a multiple: --batch-size {run.batch_size // self.critic_updates * self.critic_updates}",
            )
        if self.halved and run.critic.num_critics < 2:
            yield (
                f"agent.members is 'halves' with {run.critic.num_critics} critic: it would train on half of the data",
                "--agent.members all; or more critics: --critic.num-critics 2",
            )
        if self.gate is not None and not run.data.held_out:
            yield (
                f"agent.gate is {self.gate:g}, and no episodes are held out to measure the critic on",
                "hold some out: --data.held-out 0.1; or start the actor by steps: --agent.gate None",
            )
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
        if outcome == "step_penalty" and run.data.failure in ("terminal", "always") and not run.data.failure_reward:
            yield (
                "data.outcome 'step_penalty' with failures that end the task at no cost: failing early would pay",
                "make a failure cost more than continuing, such as --data.failure-reward -100, or a time-out: "
                "--data.failure timeout",
            )
        if outcome == "step_penalty" and run.data.takeover == "failure" and not run.data.takeover_cost:
            yield (
                "data.outcome 'step_penalty' with takeovers that end the task at no cost: being taken over would pay",
                "make it cost more than continuing, such as --data.takeover-reward -100, or --data.takeover ignore",
            )
        if self.reward_once and outcome == "step_penalty":
            yield (
                "data.outcome 'step_penalty' has a reward at every step, but agent.reward_once allows only one",
                "it bounds the values: --agent.no-reward-once",
            )


@dataclass(frozen=True, kw_only=True)
class QChunkingConfig(ChunkCriticConfig):
    """A chunk critic with a flow-matching policy: the settings that ACRLPD and its relatives share."""

    flow_draws: Count = 1
    """Flow-matching samples (t, noise) per chunk and step."""
    flow_times: FlowTimes = "beta"
    """Distribution of flow times: OpenPI's (beta) or Q-chunking's (uniform)."""
    policy_ema_decay: Decay | None = 0.999
    """EMA decay of the policy, for acting, targets and checkpoints; None turns it off."""
    correction_weight: NotNegative | None = None
    """Lower bound on the imitation weight of chunks that an operator chose in place of the policy; the mean weight is
    1. None: corrections are ordinary data."""

    @property
    def heeds_corrections(self) -> bool:
        """Whether `correction_weight` is set."""
        return self.correction_weight is not None

    @property
    def policy_ema(self) -> float | None:
        """EMA decay of the policy's weights, or None."""
        return self.policy_ema_decay

    def without_ema(self) -> "QChunkingConfig":
        """The same settings without the policy's EMA."""
        return replace(self, policy_ema_decay=None)


@dataclass(frozen=True, kw_only=True)
class ACRLPDConfig(QChunkingConfig):
    """Q-chunking on a flow policy: a critic over action chunks, and an actor trained towards higher values."""

    agent: ClassVar[str] = "pirl.agents.acrlpd:ACRLPD"
    delays: ClassVar[bool] = True

    actor: Actor = "awr"
    """How the critic improves the actor."""
    target_ess: Inside = 0.4
    """Target effective sample size of the advantage weights, as a share of the batch; the temperature β adapts to it.
    0.3 to 0.5 works."""
    actor_warmup: Waiting = "imitate"
    """What the policy does during `actor_warmup_steps` and while the gate is shut. `imitate`: clones the data. `hold`:
    keeps its weights, for a policy that is better than the data: cloning would undo earlier RL."""
    members: Members = "halves"
    """Episodes that each critic of the ensemble trains on. `halves`: half of them, each critic with its own bootstrap
    targets, so that their errors are independent. `all`: critics agree even on noise. Only `awr` uses agreement: with
    the other actors every critic trains on all episodes."""
    heed_agreement: bool = True
    """Raise `target_ess` towards 1 (uniform weights) as the ensemble disagrees on the advantages. With `members all`
    the ensemble rarely disagrees."""
    scale_by_state: bool = False
    """Divide advantages by the spread of the candidates' values at s, so that one temperature fits both early
    decisions, which change the value little, and late ones."""
    beta_init: Positive = 0.1
    """Initial temperature, as a share of the value range."""
    weight_cap: Annotated[float, Bounds(low=1)] = 20.0
    """Largest advantage weight."""
    bc_loss_weight: Share = 0.1
    """Weight of pure imitation in the actor's loss, independent of the critic."""

    @property
    def halved(self) -> bool:
        """Whether each critic trains on half of the episodes: only if the actor, `awr`, uses agreement."""
        return super().halved and self.actor == "awr"

    @property
    def only_chooses(self) -> bool:
        """Whether the actor ignores the critic."""
        return self.actor == "best_of_n"

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, discount, update-to-data ratio, and the actor's own settings."""
        learns = not self.only_chooses
        yield ("pi0_lr", around(run.policy_schedule)) if learns else ("critic_lr", around(run.critic_schedule))
        # Vary 1 - discount: half and twice the effective horizon.
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
