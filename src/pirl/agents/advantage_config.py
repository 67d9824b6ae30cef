"""Settings of advantage- and return-based imitation: filtered imitation and RECAP. Does not import jax."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pirl.agents.agent_config import AgentConfig, RewardRange, Rewards
from pirl.agents.imitation_config import BCConfig
from pirl.ranges import Count, Decay, Inside, Natural, NotNegative, Positive
from pirl.search import Choice, Item, around


@dataclass(frozen=True, kw_only=True)
class FilteredConfig(BCConfig):
    """Filtered behaviour cloning: imitate the chunks with the highest returns. The baseline for all other methods."""

    agent: ClassVar[str] = "pirl.agents.filtered:Filtered"

    discount: Inside = 0.99
    """Discount per environment step of the compared returns. Below 1, faster successes rank higher."""
    share: Inside = 0.5
    """Share of the chunks to imitate."""

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, share, flow draws and EMA."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.share", Choice(values=(0.1, 0.25, 0.5, 0.75))
        yield "agent.flow_draws", Choice(values=(1, 2, 4))
        yield "agent.ema_decay", Choice(values=(0.98, 0.99, 0.999))


ConditionKind = Literal["vector", "text"]
"""How the label "better than usual" enters the policy."""
SUFFIXES = (", Advantage: positive", ", Advantage: negative")
"""The label as text after the instruction (π*0.6)."""


@dataclass(frozen=True, kw_only=True)
class RECAPConfig(AgentConfig, Rewards):
    """RECAP (π*0.6): a value labels chunks by advantage, and the policy trains conditioned on the label."""

    agent: ClassVar[str] = "pirl.agents.recap:RECAP"
    delays: ClassVar[bool] = True

    discount: Inside = 0.99
    """Discount per environment step."""
    failure_reward: float = 0.0
    """What a failure adds to its last reward, as `data.failure_reward`. Widens the bounds of the values by it once."""
    folds: Count = 2
    """Folds of the episodes for cross-fitting: each critic of the ensemble leaves one fold out, and an episode's
    advantages come from the critics that left it out, so that no label depends on an outcome its critic was trained on.
    2: halves. 1: every critic trains on all episodes."""
    per_task: bool = True
    """Judge each task (instruction) by itself: its own quantile of advantages, its own scale of values. Off: one for
    all, such as for data in which nearly every episode has its own instruction."""
    positive_share: Inside = 0.3
    """Share of the chunks labelled better than usual; with `per_task`, of each task."""
    condition: ConditionKind = "vector"
    """How the policy is told the label. `vector`: a learned vector, folded into the weights that are served. `text`:
    words after the instruction ("…, Advantage: positive"), which pirl adds at inference and other servers do not."""
    condition_dropout: Decay = 0.1
    """Share of the unconditional branch in the loss."""
    guidance: NotNegative = 1.0
    """Guidance scale at inference: 1 conditions the policy on "better than usual"; larger values extrapolate. OpenPI
    serves 1."""
    condition_rate: Positive = 20.0
    """Learning rate of the vector, as a multiple of the policy's. It starts at zero: at a low rate the policy ignores
    it."""
    heed_corrections: bool = True
    """Always label an operator's chunks better, and never those in the `data.takeover_window` steps before a takeover.
    Has no effect without LeRobot's column `intervention`."""
    value_warmup_steps: Natural = 0
    """Train the policy without the condition for this many steps, while the value trains."""
    flow_draws: Count = 1
    """Flow-matching samples (t, noise) per chunk and step."""
    policy_ema_decay: Decay | None = 0.999
    """EMA decay of the policy and its condition, for acting and checkpoints; None turns it off."""

    @property
    def learns_values(self) -> bool:
        """True: a state value."""
        return True

    @property
    def heeds_corrections(self) -> bool:
        """Whether corrections set the label."""
        return self.heed_corrections

    @property
    def knows_tasks(self) -> bool:
        """With `per_task`, for the quantiles and the scale of values."""
        return self.per_task

    @property
    def prompt_suffixes(self) -> tuple[str, ...]:
        """With `condition text`, the texts for "better than usual" and "not better"."""
        return SUFFIXES if self.condition == "text" else ()

    @property
    def guided(self) -> bool:
        """True for the vector condition; guidance with text would need two prefixes when acting."""
        return self.condition == "vector"

    @property
    def policy_ema(self) -> float | None:
        """EMA decay of the policy's weights, or None."""
        return self.policy_ema_decay

    def without_ema(self) -> "RECAPConfig":
        """The same settings without EMA."""
        return replace(self, policy_ema_decay=None)

    def small(self) -> "RECAPConfig":
        """Almost no value warm-up."""
        return replace(self, accumulate=min(self.parts, 2), value_warmup_steps=min(self.value_warmup_steps, 2))

    def reward_range(self, run: Any) -> RewardRange | None:
        """The configured rewards, widened by `failure_reward`; they bound the histogram."""
        low, high = min(self.failure_reward, 0.0), max(self.failure_reward, 0.0)
        return RewardRange(self.reward_low + low, self.reward_high + high, self.reward_once)

    def problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Too few critics for the folds, and settings that contradict `condition text`."""
        if run.critic.num_critics < self.folds:
            yield (
                f"agent.folds is {self.folds} and there is {run.critic.num_critics} critic(s): some episodes would "
                "have no critic that left them out",
                f"--critic.num-critics {self.folds}; or --agent.folds 1",
            )
        if self.condition != "text":
            return
        if not run.token_len or run.data.tokenizer == "none":
            yield "agent.condition is 'text', and the policy reads no instruction", "--agent.condition vector"
        if self.guidance != 1:
            yield (
                f"agent.guidance is {self.guidance:g} and agent.condition 'text': the policy acts with one "
                "prompt, guidance compares two",
                "--agent.guidance 1, or train with --agent.condition vector",
            )

    def search(self, run: Any) -> Iterator[tuple[str, Item]]:
        """Learning rate, share of positives, guidance, dropout."""
        yield "pi0_lr", around(run.policy_schedule)
        yield "agent.positive_share", Choice(values=(0.2, 0.3, 0.5))
        yield "agent.guidance", Choice(values=(1.0, 1.5, 2.0))
        yield "agent.condition_dropout", Choice(values=(0.1, 0.2, 0.3))
