"""The runs of a comparison: one per task, algorithm and seed, identical except for the algorithm."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pirl.config import RLTrainConfig
from pirl.config_io import diff, from_dict
from pirl.errors import ConfigError
from pirl.recipes import is_known, load

EQUAL = (
    *("name", "model", "init_weights", "env", "evaluation", "held_out", "eval_fn", "mesh", "checkpoint", "batch_size"),
    *("num_train_steps", "log_interval", "sinks", "tracking", "watchdog", "debug_nans", "log_memory"),
)
"""Settings that a contender takes from the task's recipe, even if the contender is a recipe itself."""
EQUAL_DATA = ("repo_ids", "weights", "robot", "cameras", "tokenizer", "held_out")
EQUAL_ROLLOUT = ("flow_steps", "execute")
ENDLESS = 10_000_000
"""Configured steps of a run that ends by training time."""
OFTEN = 5
"""Most iterations between checkpoints and between evaluations for algorithms with rollout groups."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender with one seed."""

    task: str
    """The recipe's name."""
    agent: str
    """The algorithm, as the user named it."""
    seed: int
    config: RLTrainConfig
    updates: int
    """Policy updates to make; with `seconds`, ignored."""
    seconds: float | None = None
    """Training time instead of updates."""

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.config.run_dir

    def file(self, suffix: str) -> Path:
        """A file of this run beside its folder."""
        return self.folder.with_name(self.folder.name + suffix)

    def __str__(self) -> str:
        return f"{self.task} {self.agent} seed {self.seed}"


def runs_of(
    tasks: Sequence[RLTrainConfig],
    agents: Sequence[str],
    seeds: Sequence[int],
    *,
    folder: Path,
    seconds: float | None = None,
) -> list[Run]:
    """All runs, ordered by seed within a task, so that early results include every algorithm."""
    for what, given in (("--agents", agents), ("--seeds", seeds), ("recipes", [task.name for task in tasks])):
        if len(set(given)) < len(given):
            raise ConfigError(f"{what} {' '.join(map(str, given))}", hint="name each one once")
    found = []
    for task in tasks:
        contenders = {agent: contender(task, agent) for agent in agents}
        for seed in seeds:
            for agent, config in contenders.items():
                label = re.sub(r"[^A-Za-z0-9._=+]+", "-", agent).strip("-.")
                config = replace(
                    config,
                    exp_name=f"{label}-seed-{seed}",
                    seed=seed,
                    data=replace(config.data, seed=seed),
                    checkpoint=replace(config.checkpoint, base_dir=str(folder)),
                    num_train_steps=config.num_train_steps if seconds is None else ENDLESS,
                )
                updates = task.num_train_steps
                found.append(
                    Run(task=task.name, agent=agent, seed=seed, config=config, updates=updates, seconds=seconds)
                )
    if len({run.folder for run in found}) < len(found):
        raise ConfigError("two of --agents would share a folder", hint="give them names that differ in letters")
    return found


def contender(task: RLTrainConfig, agent: str, read: Callable[[str], RLTrainConfig] = load) -> RLTrainConfig:
    """The task's configuration with another algorithm: a kind (`--agent.type`), or the algorithm of a recipe."""
    if is_known(agent):
        own = read(agent)
        equal = {name: getattr(task, name) for name in EQUAL}
        of_data = {name: getattr(task.data, name) for name in EQUAL_DATA}
        if not task.data.held_out and getattr(own.agent, "gate", None) is not None:
            # A gate needs some; they are the contender's own to give up.
            equal, of_data = equal | {"held_out": own.held_out}, of_data | {"held_out": own.data.held_out}
        data = replace(own.data, **of_data)
        acting = [name for name in EQUAL_ROLLOUT if name != "flow_steps" or not own.agent.one_step]
        rollout = replace(own.rollout, **{name: getattr(task.rollout, name) for name in acting})
        changed = replace(own, **equal, data=data, rollout=rollout)
    else:
        changed = from_dict(RLTrainConfig, {"agent": {"type": agent}}, base=task)
        if type(changed.agent) is not type(task.agent):  # keep the settings that all algorithms share
            augment = changed.agent.augment and task.agent.augment
            changed = replace(changed, agent=replace(changed.agent, augment=augment, accumulate=task.agent.accumulate))
    return changed if changed.agent.groups is None else _in_iterations(changed)


def _in_iterations(config: RLTrainConfig) -> RLTrainConfig:
    """Log every iteration of algorithms with many updates per step, so that the run ends close to its budget."""
    evaluation = config.evaluation and replace(config.evaluation, interval=min(OFTEN, config.evaluation.interval))
    save_interval = min(OFTEN, config.checkpoint.save_interval)
    checkpoint = replace(config.checkpoint, save_interval=save_interval)
    return replace(config, log_interval=1, evaluation=evaluation, checkpoint=checkpoint)


def differences(runs: Sequence[Run]) -> Iterator[tuple[str, list[str]]]:
    """(name, differences) of each algorithm from the task's first one, except for `agent` settings."""
    first: dict[str, RLTrainConfig] = {}
    for run in runs:
        base = first.setdefault(run.task, run.config)
        if run.seed == runs[0].seed and run.config is not base:
            changes = diff(replace(base, exp_name=run.config.exp_name), run.config)
            found = [f"{path} {new} instead of {old}" for path, old, new in changes if not path.startswith("agent.")]
            if found:
                yield str(run).removesuffix(f" seed {run.seed}"), found
