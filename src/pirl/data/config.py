"""What the data layer can be told. No jax here."""

import math
from dataclasses import dataclass
from typing import Literal

from pirl.errors import ConfigError

Boundary = Literal["pad", "drop"]
"""What the critic learns where an episode ends inside a chunk: from the part that happened, or nothing."""
Tier = Literal["auto", "ram", "disk", "pool"]
"""`ram`: everything decoded into memory. `disk`: memory-mapped files, kept for the next run. `pool`: decoded when asked
for, the most recent kept. `auto`: chosen by the size of the frames, the memory and the disk."""
Rule = Literal["auto", "columns", "sparse_success", "step_penalty"]
"""`columns`: what the dataset recorded. `sparse_success`: reward 1 at success, else 0. `step_penalty`: reward -1 for
every step, 0 at success. `auto`: the columns where there are some, else an error: nobody can guess an outcome."""
Failure = Literal["auto", "terminal", "timeout"]
"""What a labelled failure means where `next.truncated` does not say. `terminal`: the task is lost, and the last actions
are worth the failure reward alone. `timeout`: the recording stopped, something might still have been won. `auto`:
terminal, unless steps cost something and failing does not, where failing early would pay."""
Imitated = Literal["successes", "plans", "all"]
"""Of the policy's own episodes. `all`: chunks from any step on, also of two plans' parts. `plans`: only what was
planned as one chunk. `successes`: plans of episodes that did not fail. The rest teaches a policy to fail as it does."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which datasets, how they are held in memory, and how Q-chunks are cut from them."""

    repo_ids: tuple[str, ...] = ()
    """LeRobot datasets: names on the hub, or local folders."""
    weights: tuple[float, ...] | None = None
    """Share of the samples each dataset gives, relative to the others; None: equal shares."""
    robot: str = "aloha"
    """Whose joints, grippers and cameras these are: picks the transforms between its units and the model's. A name of
    `data.robots`, or `module:NAME` for one of one's own."""
    cameras: tuple[str, ...] | None = None
    """OpenPI camera slots to read; None: all the robot has. Cameras left out cost nothing, not even masked tokens."""
    assets_dir: str = "assets"
    """Folder of normalisation statistics, as OpenPI lays it out: <assets_dir>/<asset_id>/norm_stats.json."""
    asset_id: str | None = None
    """Whose statistics to use; None: the first dataset's repo id, or the name of its folder."""
    tokenizer: str = "paligemma"
    """paligemma (π₀'s own), byte or word (a token for each; need no file, for models trained from nothing), none (no
    instruction), or a path."""
    cache: Tier = "auto"
    """Where decoded frames live: all in memory, all on disk (mapped), or a rotating memory pool; auto: what fits."""
    cache_dir: str | None = None
    """Folder of the frames on disk; None: below pirl's home."""
    exact_resize: bool = False
    """Resize with Pillow, bit for bit as OpenPI does, instead of the decoder (twice as fast, 0.2 grey levels off)."""
    outcome: Rule = "auto"
    """Rewards and ends: as recorded (columns), 1 at success (sparse_success), or -1 a step and 0 at success
    (step_penalty); auto: as recorded, else an error."""
    success_file: str | None = None
    """JSON that says which episodes of the one dataset succeeded, for sparse_success and step_penalty."""
    failure: Failure = "auto"
    """What a labelled failure means: the task is lost (terminal), or the recording stopped (timeout). `auto`: terminal,
    but timeout where steps cost something and `failure_reward` is 0. Unlabelled episodes are never failures."""
    failure_reward: float = 0.0
    """Added to the last reward of a failure that is terminal: 0, or a negative number."""
    successes_only: bool = False
    """Leave out episodes that did not succeed: filtered imitation, the baseline that RL has to beat."""
    boundary: Boundary = "pad"
    """What the critic learns where an episode ends in a chunk: from the part that happened (pad), or nothing (drop)."""
    critic_horizon: int | None = None
    """Steps the critic scores, the number that is executed before looking again; None: the whole chunk."""
    episodes_per_memory_pool: int | None = 64
    """Episodes decoded at a time where frames are not all at hand (`cache = pool`); twice as many are in memory."""
    steps_per_memory_pool: int = 500
    """Batches drawn from one memory pool before the next takes over."""
    balance: bool = False
    """Draw successes and failures equally often. Biases the critic: an even chance is not the policy's chance."""
    online_fraction: float = 0.5
    """Share of a batch that comes from the replay buffer, once it holds something (RLPD: half)."""
    online_imitated: Imitated = "successes"
    """Which chunks of the replay buffer the actor imitates; the critic learns from all."""
    replay_episodes: int = 1000
    """The replay buffer forgets the oldest episodes beyond this many."""
    replay_gb: float = 16.0
    """The replay buffer forgets the oldest episodes beyond this many gigabytes (10⁹ bytes)."""
    prefetch: int = 2
    """Batches ready and waiting, prepared by a thread; 0 prepares each when it is asked for."""
    seed: int = 0
    """Decides every draw: batch k depends on the seed and k alone."""

    def __post_init__(self) -> None:
        def refuse(problem: str, hint: str) -> None:
            raise ConfigError(f"data: {problem}", hint=hint)

        if self.weights is not None and len(self.weights) != len(self.repo_ids):
            refuse(f"{len(self.weights)} weights for {len(self.repo_ids)} datasets", "give each dataset one weight")
        if self.weights is not None and not (min(self.weights) >= 0 and sum(self.weights) > 0):
            refuse(f"weights are {self.weights}", "weights are >= 0, and one of them is positive")
        if self.success_file is not None and len(self.repo_ids) > 1:
            refuse(
                f"one success_file for {len(self.repo_ids)} datasets, which all number their episodes from 0",
                "store the outcomes as a column next.success, or train on one dataset",
            )
        if not -math.inf < self.failure_reward <= 0:
            refuse(f"failure_reward is {self.failure_reward}", "0, or a negative number: failures are not to be sought")
        if self.failure == "timeout" and self.failure_reward:
            refuse(
                f"failure_reward is {self.failure_reward} and failures are time-outs",
                "nothing is paid where the task goes on: failure terminal, or failure_reward 0",
            )
        if self.critic_horizon is not None and self.critic_horizon < 1:
            refuse(f"critic_horizon is {self.critic_horizon}", "the critic scores at least one step")
        if self.episodes_per_memory_pool is not None and self.episodes_per_memory_pool < 1:
            refuse(f"episodes_per_memory_pool is {self.episodes_per_memory_pool}", "at least 1, or none for all")
        if self.cache == "pool" and self.episodes_per_memory_pool is None:
            refuse("cache is 'pool' without episodes_per_memory_pool", "say how many episodes a pool has")
        if self.steps_per_memory_pool < 1:
            refuse(f"steps_per_memory_pool is {self.steps_per_memory_pool}", "a pool serves at least one batch")
        if not 0 <= self.online_fraction <= 1:
            refuse(f"online_fraction is {self.online_fraction}", "it is a share between 0 and 1")
        if self.replay_episodes < 1 or not self.replay_gb > 0:
            refuse(f"replay of {self.replay_episodes} episodes, {self.replay_gb} GB", "both must be positive")
        if self.prefetch < 0:
            refuse(f"prefetch is {self.prefetch}", "0 or more batches")
        if self.seed < 0:
            refuse(f"seed is {self.seed}", "seeds are not negative")

    @property
    def replay_bytes(self) -> int:
        """The replay buffer's limit in bytes."""
        return int(self.replay_gb * 1e9)
