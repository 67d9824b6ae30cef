"""Settings of collection, curriculum and evaluation. Does not import jax."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pirl.errors import ConfigError
from pirl.ranges import Bounds, Checked, Count, Inside, Natural, Positive, Share


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Checked):
    """How episodes are collected."""

    backend: Literal["local", "process", "ray"] = "local"
    """Where environments run: in this process, in worker processes, or on a Ray cluster."""
    num_envs: Count = 16
    """Parallel environments of each process: the policy's batch size."""
    num_workers: Count = 2
    """Worker processes or Ray actors."""
    worker_timeout: Positive = 120.0
    """Restart a worker that takes longer than this for one chunk, in seconds."""
    worker_start_timeout: Positive = 180.0
    """Restart a worker that takes longer than this to import its simulator and create its environments, in seconds."""
    retries: Natural = 2
    """How often to repeat an episode lost with its worker before giving up."""
    execute: Count | None = None
    """Steps of each chunk to execute before replanning. None: `data.critic_horizon`."""
    best_of: Count = 1
    """Candidates per chunk, from which the critic picks the best. 1: plain sampling."""
    flow_steps: Count = 10
    """Euler steps per chunk."""
    record: str | None = None
    """Also write collected episodes to this LeRobot dataset: a folder, or a name in HF_LEROBOT_HOME."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend != "local" and self.num_envs < self.num_workers:
            raise ConfigError(
                f"rollout: {self.num_envs} environments for {self.num_workers} workers",
                hint="give every worker at least one",
            )


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig(Checked):
    """How to draw contexts (initial states) for training."""

    contexts: Count | None = None
    """Train on this many contexts, drawn once. None: fresh ones every time, with one posterior per task."""
    held_out: Natural = 0
    """If a benchmark lists its initial states (LIBERO: 50 per task): never train on the last so many of each task.
    Validation starts with them. In other environments the splits are disjoint anyway."""
    target: Inside = 0.5
    """Success rate at which a context is drawn most often."""
    floor: Annotated[float, Bounds(low=0, high=1, open_low=True)] = 0.1
    """Smallest sampling weight, relative to the largest."""
    fade: Share = 0.9
    """Share of the evidence kept from one iteration to the next."""
    enabled: bool = True
    """Use the curriculum; otherwise draw uniformly."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Checked):
    """Evaluation during training, on held-out states."""

    interval: Count = 1000
    """Steps (RIPT: iterations) between evaluations; the first is before training."""
    episodes: Count = 50
    """Episodes per evaluation, cycling over tasks, always from the same initial states."""
    split: Literal["validation", "test"] = "validation"
    """Choose checkpoints on validation states; report results on test states (`pirl eval`)."""
    best_of: Count = 1
    """Candidates per chunk, from which the critic picks the best. 1: plain sampling, as in OpenPI's server."""
    films: Natural = 1
    """Save videos of the first so many successes and failures of each evaluation, in the run's films/STEP; wandb and
    trackio get them too. 0: none."""
    films_kept: Count = 50
    """Number of evaluations to keep videos of: the first and the latest ones, at least two."""


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(Checked):
    """ACRLPD online: collect with the current policy, add to the replay buffer, train on both."""

    start_step: Natural = 0
    """Offline training steps before the first collection."""
    episodes: Count = 16
    """Episodes per collection."""
    updates_per_step: Positive = 0.25
    """Update-to-data ratio: training steps per collected environment step. Determines when the next collection is
    due."""
    curriculum: CurriculumConfig = field(default_factory=lambda: CurriculumConfig(enabled=False))
    """How to choose initial states."""
