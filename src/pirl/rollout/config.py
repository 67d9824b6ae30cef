"""How episodes are collected, practised and evaluated. No jax here."""

from dataclasses import dataclass, field
from typing import Literal

from pirl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How episodes are collected."""

    backend: Literal["local", "process", "ray"] = "local"
    """Where environments run: in this process, in processes of this machine, or on a Ray cluster."""
    num_envs: int = 16
    """Environments stepped together: the batch the policy sees."""
    num_workers: int = 2
    """Processes or Ray actors they are spread over."""
    worker_timeout: float = 120.0
    """Seconds a worker may take for one chunk before it counts as hanging and is restarted."""
    retries: int = 2
    """How often an episode is repeated that was lost with its worker, before it is given up."""
    execute: int | None = None
    """Steps of each chunk that are executed before the policy looks again; None: `data.critic_horizon`."""
    best_of: int = 1
    """Candidates of which the critic picks one; 1 is plain sampling."""
    flow_steps: int = 10
    """Euler steps per chunk."""
    record: str | None = None
    """Also write every episode that is collected to this LeRobot dataset: a folder, or a name in LeRobot's home."""

    def __post_init__(self) -> None:
        for name in ("num_envs", "num_workers", "best_of", "flow_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name} is {getattr(self, name)}", hint="it is at least 1")
        if self.backend != "local" and self.num_envs < self.num_workers:
            raise ConfigError(
                f"rollout: {self.num_envs} environments for {self.num_workers} workers",
                hint="give every worker at least one",
            )
        if not self.worker_timeout > 0 or self.retries < 0 or (self.execute is not None and self.execute < 1):
            raise ConfigError(
                f"rollout: worker_timeout {self.worker_timeout}, retries {self.retries}, execute {self.execute}",
                hint="a positive time, no negative number of retries, at least one executed step",
            )


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """How contexts are drawn for training."""

    contexts: int | None = None
    """Practise on so many contexts, drawn once; None: on fresh ones every time, with one posterior per task."""
    target: float = 0.5
    """Success rate of the contexts that are drawn most."""
    floor: float = 0.1
    """Smallest weight, as a share of the largest."""
    fade: float = 0.9
    """What is left of the evidence of one iteration in the next."""
    enabled: bool = True
    """False draws all alike."""

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
    """Evaluation during training, on states that are not trained on."""

    interval: int = 1000
    """Steps between evaluations (iterations, for RIPT); the first is before the first step."""
    episodes: int = 50
    """Episodes each time, over the tasks in turn, always the same initial states."""
    split: Literal["validation", "test"] = "validation"
    """Checkpoints are chosen on validation states, results reported on test states (`pirl eval`)."""
    best_of: int = 1
    """Candidates of which the critic picks one; 1 is plain sampling, which is what OpenPI's server does."""

    def __post_init__(self) -> None:
        for name in ("interval", "episodes", "best_of"):
            if getattr(self, name) < 1:
                raise ConfigError(f"evaluation.{name} is {getattr(self, name)}", hint="it is at least 1")


@dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """ACRLPD online: collect with the current policy, add to the replay buffer, train on both."""

    start_step: int = 0
    """Steps of offline training before the first episode is collected."""
    episodes: int = 16
    """Episodes per collection."""
    updates_per_step: float = 0.25
    """Update-to-data ratio: training steps per collected environment step. The next collection is due when the episodes
    so far have been trained on that much."""
    curriculum: CurriculumConfig = field(default_factory=lambda: CurriculumConfig(enabled=False))
    """Where the episodes start."""

    def __post_init__(self) -> None:
        if self.start_step < 0 or self.episodes < 1 or not self.updates_per_step > 0:
            raise ConfigError(
                f"online: start_step {self.start_step}, episodes {self.episodes}, "
                f"updates_per_step {self.updates_per_step}",
                hint="no negative step, at least one episode, a positive ratio",
            )
