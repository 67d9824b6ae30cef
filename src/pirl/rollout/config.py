"""Settings of collection, curriculum and evaluation. No jax here."""

from dataclasses import dataclass, field
from typing import Literal

from pirl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How episodes are collected."""

    backend: Literal["local", "process", "ray"] = "local"
    """Where environments run: in this process, in worker processes, or on a Ray cluster."""
    num_envs: int = 16
    """Parallel environments: the policy's batch size."""
    num_workers: int = 2
    """Worker processes or Ray actors."""
    worker_timeout: float = 120.0
    """Restart a worker that takes longer than this for one chunk, in seconds."""
    worker_start_timeout: float = 180.0
    """Restart a worker that takes longer than this to import its simulator and make its environments, in seconds."""
    retries: int = 2
    """How often to repeat an episode lost with its worker before giving up."""
    execute: int | None = None
    """Steps of each chunk to execute before replanning. None: `data.critic_horizon`."""
    best_of: int = 1
    """Candidates per chunk, of which the critic picks the best. 1: plain sampling."""
    flow_steps: int = 10
    """Euler steps per chunk."""
    record: str | None = None
    """Also write collected episodes to this LeRobot dataset: a folder, or a name in HF_LEROBOT_HOME."""

    def __post_init__(self) -> None:
        for name in ("num_envs", "num_workers", "best_of", "flow_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name} is {getattr(self, name)}", hint="it is at least 1")
        if self.backend != "local" and self.num_envs < self.num_workers:
            raise ConfigError(
                f"rollout: {self.num_envs} environments for {self.num_workers} workers",
                hint="give every worker at least one",
            )
        if (
            not min(self.worker_timeout, self.worker_start_timeout) > 0
            or self.retries < 0
            or (self.execute is not None and self.execute < 1)
        ):
            raise ConfigError(
                f"rollout: worker_timeout {self.worker_timeout}, worker_start_timeout {self.worker_start_timeout}, "
                f"retries {self.retries}, execute {self.execute}",
                hint="a positive time, no negative number of retries, at least one executed step",
            )


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """How to draw contexts (initial states) for training."""

    contexts: int | None = None
    """Train on this many contexts, drawn once. None: fresh ones every time, with one posterior per task."""
    target: float = 0.5
    """Success rate at which a context is drawn most often."""
    floor: float = 0.1
    """Smallest sampling weight, relative to the largest."""
    fade: float = 0.9
    """Share of the evidence kept from one iteration to the next."""
    enabled: bool = True
    """Use the curriculum; otherwise draw uniformly."""

    def __post_init__(self) -> None:
        if self.contexts is not None and self.contexts < 1:
            raise ConfigError(f"curriculum.contexts is {self.contexts}", hint="at least 1, or none for fresh ones")
        if not (0 < self.target < 1 and 0 < self.floor <= 1 and 0 <= self.fade <= 1):
            raise ConfigError(
                f"curriculum: target {self.target}, floor {self.floor}, fade {self.fade}",
                hint="target lies between 0 and 1, floor in (0, 1], fade in [0, 1]",
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during training, on held-out states."""

    interval: int = 1000
    """Steps (RIPT: iterations) between evaluations; the first is before training."""
    episodes: int = 50
    """Episodes per evaluation, cycling over tasks, always from the same initial states."""
    split: Literal["validation", "test"] = "validation"
    """Choose checkpoints on validation states; report results on test states (`pirl eval`)."""
    best_of: int = 1
    """Candidates per chunk, of which the critic picks the best. 1: plain sampling, as OpenPI's server does."""

    def __post_init__(self) -> None:
        for name in ("interval", "episodes", "best_of"):
            if getattr(self, name) < 1:
                raise ConfigError(f"evaluation.{name} is {getattr(self, name)}", hint="it is at least 1")


@dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """ACRLPD online: collect with the current policy, add to the replay buffer, train on both."""

    start_step: int = 0
    """Offline training steps before the first collection."""
    episodes: int = 16
    """Episodes per collection."""
    updates_per_step: float = 0.25
    """Update-to-data ratio: training steps per collected environment step. Determines when the next collection is
    due."""
    curriculum: CurriculumConfig = field(default_factory=lambda: CurriculumConfig(enabled=False))
    """How to choose initial states."""

    def __post_init__(self) -> None:
        if self.start_step < 0 or self.episodes < 1 or not self.updates_per_step > 0:
            raise ConfigError(
                f"online: start_step {self.start_step}, episodes {self.episodes}, "
                f"updates_per_step {self.updates_per_step}",
                hint="no negative step, at least one episode, a positive ratio",
            )
