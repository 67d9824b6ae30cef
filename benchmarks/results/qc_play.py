"""Play data by OGBench's oracles, made as OGBench makes its datasets, and labelled for its five tasks.

As in `data_gen_scripts/generate_manipspace.py --dataset_type=play`: episodes of 1,001 rows, a plan oracle with noise
0.1 smoothed over 0.5 steps that gets a new target whenever it is done; scene episodes in which the cube leaves the
image are repeated. Rewards and masks are `ogbench.relabel_utils`'. Does not import jax: these processes only simulate.
"""

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TASKS = 5
ACTION_CLIP = 1 - 1e-5
"""Q-chunking clips the dataset's actions to ± this."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One of OGBench's scenes with its five tasks."""

    sparse: bool
    """Reward -1 until all parts are solved, instead of -(number of unsolved parts)."""
    state: int
    """Size of an observation."""
    stack: tuple[float, float] = (0.5, 0.5)
    """Range of an episode's probability that a cube is stacked."""


DOMAINS = {
    "puzzle-3x3": Domain(sparse=True, state=55),
    "scene": Domain(sparse=True, state=40),
    "cube-double": Domain(sparse=False, state=37, stack=(0.0, 0.25)),
    "cube-single": Domain(sparse=False, state=28, stack=(0.0, 0.0)),
}
"""The three domains of the comparison, and a quick one for tests."""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Amount of data, and its shards."""

    episodes: int = 1000
    rows: int = 1001
    """Rows per episode: one more than transitions."""
    shard: int = 5
    """Episodes per file."""
    seed: int = 0

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.episodes // self.shard)

    def path(self, folder: Path, index: int) -> Path:
        """File of a shard."""
        return folder / f"seed{self.seed}_{self.rows}x{self.shard}_{index:04d}.npz"

    def missing(self, folder: Path) -> list[int]:
        """Shards that do not exist yet."""
        return [i for i in range(self.shards) if not self.path(folder, i).exists()]


def log(message: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S ") + message, flush=True)


def transitions(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Transitions of complete episodes; an episode's last row is only a next observation."""
    ends = rows["terminals"].astype(bool)
    kept = ~ends
    after = np.concatenate([[False], kept[:-1]])
    last = np.concatenate([ends[1:], [True]])
    return {
        "observations": rows["observations"][kept],
        "next_observations": rows["observations"][after],
        "actions": np.clip(rows["actions"][kept], -ACTION_CLIP, ACTION_CLIP),
        "terminals": last[kept].astype(np.float32),
        "rewards": rows["rewards"][:, kept],
        "masks": rows["masks"][:, kept],
    }


def load(name: str, folder: Path, amount: Amount) -> dict[str, np.ndarray]:
    """Load the whole dataset; rewards and masks have tasks on axis 0."""
    shards = [dict(np.load(amount.path(folder, i))) for i in range(amount.shards)]
    rows = {
        key: np.concatenate([shard[key] for shard in shards], axis=1 if key in ("rewards", "masks") else 0)
        for key in shards[0]
    }
    data = transitions(rows)
    if DOMAINS[name].sparse:
        data["rewards"] = (data["rewards"] != 0) * np.float32(-1)
    return data


def generate(name: str, folder: Path, amount: Amount, processes: int) -> None:
    """Make missing shards in parallel processes."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = amount.missing(folder)
    log(f"data {name}: {len(todo)} of {amount.shards} files to make, {processes} processes")
    begin, per_shard = time.monotonic(), amount.shard * (amount.rows - 1)
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _start, (name, amount.rows)) as pool:
        work = ((name, folder, amount, index) for index in todo)
        for count, retries in enumerate(pool.imap_unordered(_make_shard, work), 1):
            if count % 10 == 0 or count == len(todo):
                seconds = time.monotonic() - begin
                left = seconds / count * (len(todo) - count)
                rate = count * per_shard / seconds
                log(f"data {name}: {count}/{len(todo)} files, {rate:.0f} steps/s, {left:.0f} s left, {retries} retries")


_worker: dict[str, Any] = {}
"""State of a process: the environment that plays, the one that defines the tasks, and the oracles."""


def _start(name: str, rows: int) -> None:
    import gymnasium

    os.nice(10)
    warnings.filterwarnings("ignore")
    import ogbench.manipspace  # noqa: F401

    play = gymnasium.make(f"{name}-v0", terminate_at_goal=False, mode="data_collection", max_episode_steps=rows)
    _worker["env"], _worker["oracles"] = play, make_oracles(name, play)
    _worker["tasks"] = gymnasium.make(f"{name}-singletask-v0")


def make_oracles(name: str, env: Any) -> dict[str, Any]:
    """OGBench's plan oracle for each kind of target."""
    from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle
    from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
    from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle
    from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle

    noise: dict[str, Any] = {"env": env, "noise": 0.1, "noise_smoothing": 0.5}
    if name.startswith("cube"):
        return {"cube": CubePlanOracle(**noise)}
    if name.startswith("puzzle"):
        return {"button": ButtonPlanOracle(**noise, gripper_always_closed=True)}
    kinds = {"cube": CubePlanOracle, "button": ButtonPlanOracle, "drawer": DrawerPlanOracle, "window": WindowPlanOracle}
    return {key: kind(**noise) for key, kind in kinds.items()}


def _make_shard(work: tuple[str, Path, Amount, int]) -> int:
    """Play and label a shard; returns the number of episodes that had to be repeated."""
    name, folder, amount, index = work
    episodes, retries = [], 0
    for number in range(index * amount.shard, min((index + 1) * amount.shard, amount.episodes)):
        attempt = 0
        while not healthy(name, rows := play_episode(name, amount.seed, number, attempt)):
            attempt += 1
        episodes.append(rows)
        retries += attempt
    shard = {key: np.concatenate([rows[key] for rows in episodes]) for key in episodes[0]}
    shard |= label(name, shard)
    for key in ("qpos", "button_states"):
        shard.pop(key, None)
    path = amount.path(folder, index)
    partial = path.with_name(f"{path.stem}.part.npz")
    np.savez(partial, **shard)
    partial.rename(path)
    return retries


def play_episode(name: str, seed: int, number: int, attempt: int) -> dict[str, np.ndarray]:
    """One episode, deterministic given its numbers: simulator and oracles are reseeded."""
    env, oracles = _worker["env"], _worker["oracles"]
    of_env, of_oracle = np.random.SeedSequence([seed, number, attempt]).generate_state(2)
    np.random.seed(of_oracle)
    observation, info = env.reset(seed=int(of_env))
    stack = np.random.uniform(*DOMAINS[name].stack)
    oracle = oracles[info["privileged/target_task"]]
    oracle.reset(observation, info)
    rows = list(_steps(env, oracles, oracle, observation, info, stack))
    types = {"terminals": bool, "button_states": np.int64}
    return {key: np.array([row[key] for row in rows], types.get(key, np.float32)) for key in rows[0]}


def _steps(env: Any, oracles: Any, oracle: Any, observation: Any, info: Any, stack: float) -> Iterator[dict[str, Any]]:
    """Rows of an episode played by the oracles, one target after another."""
    done = False
    while not done:
        action = np.clip(np.array(oracle.select_action(observation, info)), -1, 1)
        after, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated
        if oracle.done:
            seen, about = env.unwrapped.set_new_target(p_stack=stack)
            oracle = oracles[about["privileged/target_task"]]
            oracle.reset(seen, about)
        row = {"observations": observation, "actions": action, "terminals": done, "qpos": info["prev_qpos"]}
        if "prev_button_states" in info:
            row["button_states"] = info["prev_button_states"]
        yield row
        observation = after


def healthy(name: str, rows: dict[str, np.ndarray]) -> bool:
    """OGBench's check for scene episodes: the cube stays in the image, unless it is in the drawer."""
    if name != "scene":
        return True
    _, y, z = rows["qpos"][:, 14:17].T
    too_far_right = y >= 0.29
    too_far_left = (y <= -0.3) & ((z < 0.06) | (z > 0.08))
    return not (too_far_right | too_far_left).any()


def label(name: str, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """OGBench's rewards and masks for each of the five tasks, tasks on axis 0."""
    from ogbench.relabel_utils import relabel_dataset

    found: list[dict[str, np.ndarray]] = []
    for task in range(1, TASKS + 1):
        env = _worker["tasks"]
        env.unwrapped._reward_task_id = task
        labelled = dict(rows)
        relabel_dataset(f"{name}-singletask-v0", env, labelled)
        found.append(labelled)
    return {key: np.stack([labelled[key] for labelled in found]) for key in ("rewards", "masks")}
