"""Settings of the improvement loop, read from YAML. Does not import jax."""

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pirl.errors import ConfigError
from pirl.ranges import Bounds, Checked, Count, Natural, NotNegative

PLACEHOLDERS = ("server", "dataset", "episodes", "inits", "seed", "purpose")
"""Placeholders allowed in a robot's command."""
Start = Literal["candidate", "current"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Checked):
    """One improvement loop: a robot, a recipe, an initial policy."""

    folder: str
    """Folder for everything: state, recordings, runs, comparisons, its page."""
    recipe: str
    """Recipe or YAML file to train each candidate with."""
    start: str
    """Checkpoint of the first policy: a step folder, a run, or an OpenPI checkpoint."""
    demonstrations: tuple[str, ...] = ()
    """LeRobot datasets to train on, in addition to the loop's own episodes."""
    robot: str | None = None
    """Command that runs episodes on the robot and records them. {server} is the policy's address, {dataset} the folder
    to record to, {episodes} their number, {inits} their initial states as comma-separated numbers, {seed} a random
    seed, {purpose} collect or compare. None: an operator starts the robot, and the loop waits for the recordings."""
    generations: Count = 2
    """Generations to run; raise it to continue a finished loop."""
    episodes: Count = 50
    """Episodes to collect per generation."""
    classifier: Annotated[float, Bounds(low=0.5, high=1)] | None = None
    """Let a success classifier on the policy's features label collected episodes without an outcome, if this share of
    its labels is correct on held-out episodes (such as 0.95). It trains on the demonstrations and all earlier episodes;
    people label the policy's first 20 episodes, those it leaves, and every comparison. None: people label all."""
    train: tuple[str, ...] = ()
    """Additional arguments for `pirl train`, such as [--max-steps, "800"]."""
    serve: tuple[str, ...] = ()
    """Additional arguments for `pirl serve`."""
    host: str = "127.0.0.1"
    """Address the robot connects to. 0.0.0.0: all network interfaces."""
    port: int = 8000
    """Port the robot connects to; 0 picks a free one."""
    held_out: Natural = 0
    """Episodes of `pirl eval` on each candidate, in the recipe's environment. 0: none (a robot has no simulator)."""
    held_out_drop: NotNegative = 0.1
    """Roll back without a comparison if the candidate's held-out success is lower than the best one's by more than
    this."""
    comparison: Annotated[int, Bounds(low=2)] = 100
    """Most episodes of a comparison, over both policies; fixed when it begins. It stops as soon as one is better."""
    look_every: Count = 8
    """Episodes between checks of the comparison; a multiple of `block`."""
    block: Annotated[int, Bounds(low=2)] = 4
    """Episodes per block, in which both policies run equally often."""
    alpha: Annotated[float, Bounds(low=0, high=0.5, open_low=True, open_high=True)] = 0.05
    """Error rate: share of comparisons of equal policies that may end in a decision."""
    train_next_from: Start = "candidate"
    """Initial weights after an undecided comparison: the candidate, or the robot's current policy."""
    seed: Natural = 0
    """Seed of the training, of initial states and of the robot's command."""

    def __post_init__(self) -> None:
        super().__post_init__()

        def refuse(problem: str, hint: str) -> None:
            raise ConfigError(f"the loop: {problem}", hint=hint)

        if self.block % 2 or self.look_every % self.block:
            refuse(
                f"blocks of {self.block} episodes, looked at every {self.look_every}", "an even block, and whole ones"
            )
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
