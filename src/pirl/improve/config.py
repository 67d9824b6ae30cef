"""Settings of the loop, a YAML file. No jax here."""

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pirl.errors import ConfigError

PLACEHOLDERS = ("server", "dataset", "episodes", "inits", "seed", "purpose")
"""What a robot's command may ask for."""
Start = Literal["candidate", "current"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """One loop: a robot, a recipe, a first policy."""

    folder: str
    """Where the loop keeps everything: state, recordings, runs, comparisons, its page."""
    recipe: str
    """Recipe or YAML file that trains each candidate."""
    start: str
    """Checkpoint of the first policy: a step folder, a run, or an OpenPI checkpoint."""
    demonstrations: tuple[str, ...] = ()
    """LeRobot datasets to train on beside the loop's own episodes."""
    robot: str | None = None
    """Command that runs episodes on the robot and records them. {server} is the policy's address, {dataset} the folder
    to record to, {episodes} their number, {inits} their initial states as numbers with commas, {seed} a number for
    chance, {purpose} collect or compare. None: an operator starts the robot, and the loop waits for the recordings."""
    generations: int = 2
    """Generations to run; a finished loop goes on when this is raised."""
    episodes: int = 50
    """Episodes to collect per generation."""
    classifier: float | None = None
    """Let a success classifier on the robot's policy's features label collected episodes without an outcome, where so
    large a share of its labels is right on episodes it has not seen (such as 0.95). It learns from the demonstrations
    and all earlier episodes; people label 20 of the policy's first, what it leaves, and every comparison. None: all."""
    train: tuple[str, ...] = ()
    """Further words for `pirl train`, such as [--max-steps, "800"]."""
    serve: tuple[str, ...] = ()
    """Further words for `pirl serve`."""
    host: str = "127.0.0.1"
    """Address the robot connects to. 0.0.0.0: every network of this machine."""
    port: int = 8000
    """Port the robot connects to; 0 takes a free one."""
    held_out: int = 0
    """Episodes of `pirl eval` on each candidate, in the recipe's environment. 0: none (a robot has no simulator)."""
    held_out_drop: float = 0.1
    """Roll back without a comparison when the candidate's held-out success is lower than the best one's by more."""
    comparison: int = 100
    """Most episodes of a comparison, of both policies together. It stops as soon as the interval leaves out 0."""
    look_every: int = 8
    """Episodes between two looks at the comparison; a multiple of `block`."""
    block: int = 4
    """Episodes per block, in which both policies run equally often."""
    alpha: float = 0.05
    """Share of comparisons of equal policies that may end in a decision."""
    train_next_from: Start = "candidate"
    """Where training goes on after an undecided comparison: the candidate, or the robot's current policy."""
    seed: int = 0
    """Seed of the training, of initial states and of the robot's command."""

    def __post_init__(self) -> None:
        def refuse(problem: str, hint: str) -> None:
            raise ConfigError(f"the loop: {problem}", hint=hint)

        for name in ("generations", "episodes", "comparison", "look_every"):
            if getattr(self, name) < 1:
                refuse(f"{name} is {getattr(self, name)}", "at least 1")
        if self.block < 2 or self.block % 2 or self.look_every % self.block:
            refuse(
                f"blocks of {self.block} episodes, looked at every {self.look_every}", "an even block, and whole ones"
            )
        if self.classifier is not None and not 0.5 <= self.classifier <= 1:
            refuse(f"classifier is {self.classifier}", "the wanted share of right labels, 0.5 to 1")
        if not 0 < self.alpha < 1 or self.held_out < 0 or not self.held_out_drop >= 0 or self.seed < 0:
            refuse("alpha, held_out, held_out_drop or seed is out of range", "0 < alpha < 1, the others 0 or more")
        if self.robot is not None:
            try:
                asked = {name for _, name, _, _ in string.Formatter().parse(self.robot) if name is not None}
            except ValueError as error:
                raise ConfigError(f"the loop: robot command {self.robot!r}: {error}") from error
            if unknown := asked - set(PLACEHOLDERS):
                refuse(f"the robot's command asks for {sorted(unknown)}", f"it may ask for {', '.join(PLACEHOLDERS)}")
            if not {"server", "dataset"} <= asked:
                refuse("the robot's command lacks {server} or {dataset}", "it must know both")

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder).expanduser()
