"""Takeovers: who acted at each step, which steps to blame, and what the critic learns from them.

A person takes over at row k (`intervention` is false at k-1 and true at k) because of what the policy did before. The
policy's last `window` rows before k are blamed, back to where the person handed over, the task ended, or the recording
began. Algorithms that use corrections see who acted (`acted_by`). For critics a takeover is one of:

`ignore` (default). Every row is an ordinary transition of the executed action, whoever chose it.

`failure`. The task was lost at the first blamed row f: it terminates there, and `reward` is added. The blamed rows
after f are lost states, so each terminates as well, with the same reward. For chunks that start before k the recording
ends at k-1: a chunk that reaches a blamed row counts its rewards up to there and does not bootstrap, and beyond k-1 the
critic scores the policy's plan, not the person's actions. From k on rows are ordinary transitions, up to the outcome or
the next takeover.

So V(f-1) = γ · (r_f + reward): value propagates to the steps before the window as after any failure.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int

from pirl.data.config import DataConfig, Takeover
from pirl.records import AUTONOMOUS, BLAMED, CORRECTED, DEMONSTRATED, Array, Episode


@dataclass(frozen=True, kw_only=True)
class TakeoverRule:
    """The settings `data.takeover`, `data.takeover_window` and `data.takeover_reward`."""

    meaning: Takeover = "ignore"
    """Meaning of a takeover for a critic."""
    window: int = 0
    """Number of the policy's steps to blame before a takeover."""
    reward: float = 0.0
    """Added to the reward of blamed steps (`failure`)."""

    @classmethod
    def of(cls, config: DataConfig) -> "TakeoverRule":
        """The rule of the settings."""
        return cls(meaning=config.takeover, window=config.takeover_window, reward=config.takeover_cost)


NO_MEANING = TakeoverRule()
"""Takeovers are ordinary transitions, and no step is blamed."""


def takeovers(intervention: Bool[Array, "T"]) -> Int[Array, "k"]:
    """The rows at which a person takes over from the policy (never row 0)."""
    return np.flatnonzero(intervention[1:] & ~intervention[:-1]) + 1


def acted_by(episode: Episode, window: int) -> Int[Array, "T"]:
    """Who chose each action; the policy's last `window` steps before a takeover are `BLAMED`."""
    if episode.intervention is None:
        return np.full(len(episode), DEMONSTRATED, np.int8)
    return actors(episode.intervention, episode.terminated | episode.truncated, window)


def actors(intervention: Bool[Array, "T"], ended: Bool[Array, "T"], window: int) -> Int[Array, "T"]:
    """`acted_by` from the column `intervention` and the rows at which a task or a recording ended."""
    actors = np.where(intervention, CORRECTED, AUTONOMOUS).astype(np.int8)
    free = ~(intervention | ended)
    for row in takeovers(intervention):
        rows = np.arange(row - 1, max(row - window, 0) - 1, -1)
        actors[rows[np.logical_and.accumulate(free[rows])]] = BLAMED
    return actors


def as_learned(episode: Episode, rule: TakeoverRule) -> Episode:
    """The episode as critics learn from it; unchanged if no step is blamed."""
    if rule.meaning == "ignore" or episode.intervention is None:
        return episode
    lost = acted_by(episode, rule.window) == BLAMED
    if not lost.any():
        return episode
    return replace(
        episode,
        rewards=episode.rewards + lost * np.asarray(rule.reward, episode.rewards.dtype),
        terminated=episode.terminated | lost,
        truncated=episode.truncated | (lost & np.append(episode.intervention[1:], False)),
    )
