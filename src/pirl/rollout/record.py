"""Writes rollouts of a policy or expert as a LeRobot dataset for training.

Columns are those that `data.robots` and `data.outcomes` read: reading the dataset back gives the same states, actions,
rewards, ends and success. Small images are stored as PNG, larger ones as video, because SVT-AV1 takes no side below 64
pixels.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import is_dataclass, replace
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import yaml

from pirl.config_io import from_dict, tag
from pirl.data import journal
from pirl.data.reading import read_json
from pirl.data.robots import Robot, get_robot
from pirl.data.schema import INFO_FILE
from pirl.data.writer import LeRobotWriter
from pirl.envs.config import EnvConfig
from pirl.errors import ConfigError, DataError
from pirl.names import (
    LEROBOT_ACTION,
    LEROBOT_IMAGES,
    LEROBOT_STATE,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_SUCCESS,
    NEXT_TRUNCATED,
)
from pirl.processes import end_with_parent
from pirl.records import Array, Context, Rollout
from pirl.rollout.contexts import Split, fixed_contexts
from pirl.rollout.pool import EnvInfo

SMALLEST_VIDEO = 64
"""Images with a shorter or an odd side are stored as PNG."""
BLOCK = 16
"""Episodes per expert batch; a batch is in memory at once."""
_SAVE_SECONDS = 30.0
"""Seconds between saves; saving several short episodes together is cheaper."""

Existing = Literal["append", "refuse", "overwrite"]


class RolloutRecorder:
    """Adds rollouts to a new or existing dataset. Use as a context manager: its exit saves pending episodes.

    Success ends the task: an episode that succeeds without being terminated is read back as terminated.
    """

    def __init__(
        self, root: Path | str, *, info: EnvInfo, robot: Robot | None = None, existing: Existing = "refuse"
    ) -> None:
        """`info` gives the frame rate and the robot's name; pass `robot` for a robot that is not registered."""
        self.root = Path(root).expanduser()
        self.robot = get_robot(info.robot) if robot is None else robot
        self.saved = 0
        """Episodes saved so far."""
        self._fps, self._existing = info.fps, existing
        self._writer: LeRobotWriter | None = None
        self._waiting, self._since = 0, 0.0
        if existing == "refuse" and journal.exists(
            self.root, self.root / INFO_FILE
        ):  # now, not after the first episode
            raise DataError(
                f"{self.root} already holds a dataset", hint="choose another name, or add to it with --append"
            )

    def add(self, rollout: Rollout) -> None:
        """Add an episode; it is saved with later ones, at the latest on close."""
        columns = columns_of(rollout, self.robot)
        if self._writer is None:
            self._writer = LeRobotWriter(
                self.root,
                fps=self._fps,
                features=features_of(columns),
                robot_type=self.robot.name,
                existing=self._existing,
            )
        if not self._waiting:
            self._since = time.monotonic()
        self._writer.add_episode(columns, task=rollout.episode.task, save=False)
        self._waiting += 1
        if time.monotonic() - self._since > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write all pending episodes atomically: all or none."""
        waiting, self._waiting = self._waiting, 0
        if self._writer is not None:
            self._writer.save()
            self.saved += waiting

    def close(self) -> None:
        """Save pending episodes and close."""
        try:
            self.save()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> "RolloutRecorder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()  # also after an error: all added episodes are complete


def num_recorded(root: Path | str) -> int:
    """Number of episodes in a dataset folder; 0 if it does not exist."""
    folder = Path(root).expanduser()
    file = folder / INFO_FILE
    try:
        return int(read_json(folder, file)["total_episodes"]) if journal.exists(folder, file) else 0
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({error})", hint="restore it, or write to another folder") from error


def columns_of(rollout: Rollout, robot: Robot) -> dict[str, Array]:
    """The dataset's columns for one rollout, one row per step."""
    episode, where = rollout.episode, f"episode {rollout.number} ({rollout.context.task!r})"
    if episode.success is None:
        raise DataError(f"{where} does not say whether it succeeded", hint="set its success to True or False")
    steps = np.arange(len(episode))
    if rollout.frames and not np.array_equal(rollout.frame_steps, steps):
        raise DataError(
            f"{where} has pictures of {len(rollout.frame_steps)} of its {len(episode)} steps",
            hint="collect with every_picture=True to record",
        )
    return {
        LEROBOT_STATE: episode.state.astype(np.float32),
        LEROBOT_ACTION: episode.actions.astype(np.float32),
        **{feature_name(robot, key): pictures for key, pictures in rollout.frames.items()},
        NEXT_REWARD: episode.rewards.astype(np.float32),
        NEXT_SUCCESS: (steps == len(episode) - 1) & episode.success,
        NEXT_DONE: episode.terminated | episode.truncated,
        NEXT_TRUNCATED: episode.truncated,
    }


def feature_name(robot: Robot, key: str) -> str:
    """The dataset column for an environment's image: a name under which the robot looks for that camera."""
    usual = f"{LEROBOT_IMAGES}.{key.rpartition('/')[2]}"
    names = next((names for names in robot.cameras.values() if key in names), (usual,))
    stored = [name for name in names if name.startswith(f"{LEROBOT_IMAGES}.")]
    stored = stored or [name for name in names if "/" not in name]
    if not stored:
        raise ConfigError(
            f"robot {robot.name!r} looks for the picture {key!r} only under names that no dataset can have",
            hint=f"add {usual} to the names of that camera",
        )
    return usual if usual in stored else stored[0]


def features_of(columns: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """LeRobot's description of the columns."""
    return {key: _feature(column) for key, column in columns.items()}


def _feature(column: Array) -> dict[str, Any]:
    shape = list(column.shape[1:])
    if len(shape) != 3:
        return {"dtype": column.dtype.name, "shape": shape or [1], "names": None}
    small = min(shape[:2]) < SMALLEST_VIDEO or shape[0] % 2 or shape[1] % 2
    return {"dtype": "image" if small else "video", "shape": shape, "names": ["height", "width", "channels"]}


def recording_contexts(info: EnvInfo, count: int, split: Split, *, first: int = 0) -> list[Context]:
    """Contexts of episodes `first`, `first` + 1, ...: tasks in turn, and new initial states while there are any."""
    fixed = fixed_contexts(info, first + count, split)
    if info.num_inits is None:  # evaluations share initial states among tasks; data gain from more states
        inits = [context.init for context in fixed_contexts(info, first + count, split, tasks=info.tasks[:1])]
        fixed = [Context(context.task, init) for context, init in zip(fixed, inits, strict=True)]
    return fixed[first:]


def expert_rollouts(
    env: EnvConfig, contexts: Sequence[Context], *, dials: Any, seed: int, processes: int = 1
) -> Iterator[Rollout]:
    """Rollouts of the environment's scripted expert from each context; deterministic, on any number of processes."""
    _expert(env)  # raise for an unknown expert here, not in a worker
    firsts = range(0, len(contexts), BLOCK)
    blocks = ((env, contexts[first : first + BLOCK], dials, seed, first) for first in firsts)
    if processes == 1:
        for block in blocks:
            yield from _block(*block)
        return
    pool = ProcessPoolExecutor(min(processes, len(firsts)), get_context("spawn"), initializer=_end_with_parent)
    running: deque[Future[list[Rollout]]] = deque()
    try:
        for block in blocks:
            running.append(pool.submit(_block, *block))
            if len(running) > processes:  # one block queued beyond those running, to bound memory
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _block(env: EnvConfig, contexts: Sequence[Context], dials: Any, seed: int, first: int) -> list[Rollout]:
    """One expert batch, numbered from `first`."""
    # The expert numbers its episodes from 0, so each block needs its own seed or all would make the same choices.
    own = int(np.random.SeedSequence((seed, first)).generate_state(1)[0])
    rollouts = _expert(env).demonstrate(env, contexts, dials=dials, seed=own)
    return [replace(rollout, number=first + rollout.number) for rollout in rollouts]


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    end_with_parent(parent.sentinel)


def parse_dials(env: EnvConfig, words: Sequence[str]) -> Any:
    """Parse `KEY=VALUE` words into the settings of the environment's expert; the rest keep their defaults.

    Without words None: the expert's own choice.
    """
    hint = get_type_hints(_expert(env).demonstrate)["dials"]
    kind = next(option for option in get_args(hint) if isinstance(option, type) and is_dataclass(option))
    values = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign:
            raise ConfigError(f"--dials {word}", hint="give KEY=VALUE, such as wrong=0.25")
        values[key.replace("-", "_")] = yaml.safe_load(text)
    return from_dict(kind, values) if words else None


def _expert(env: EnvConfig) -> ModuleType:
    name = f"pirl.envs.{tag(type(env)).lower()}_expert"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(
            f"there is no scripted expert for {tag(type(env))} environments", hint="record a policy: --checkpoint PATH"
        ) from None
