"""Settings of the data layer. No jax here."""

import math
from dataclasses import dataclass
from typing import Literal

from pirl.errors import ConfigError
from pirl.ranges import Checked, Count, Decay, Natural, Positive, Share

Boundary = Literal["pad", "drop"]
"""If an episode ends inside a chunk, the critic trains on the executed part (`pad`) or skips the chunk (`drop`)."""
Tier = Literal["auto", "ram", "disk", "pool"]
"""`ram`: decode everything into memory. `disk`: memory-mapped files, reused by the next run. `pool`: decode on demand,
keep the most recent. `auto`: choose by frame size, memory and disk."""
Rule = Literal["auto", "columns", "sparse_success", "step_penalty"]
"""`columns`: as recorded. `sparse_success`: reward 1 at success, else 0. `step_penalty`: reward -1 per step, 0 at
success. `auto`: the recorded columns; an error if there are none, because outcomes cannot be guessed."""
Failure = Literal["auto", "terminal", "timeout", "always"]
"""Meaning of a labelled failure without `next.truncated`. `terminal`: the task is lost, and the value after the last
action is the failure reward alone. `timeout`: the recording stopped, the task could still have succeeded. `auto`:
terminal, unless steps have a cost and failing has none, because failing early would then pay. `always`: terminal, with
`next.truncated` as well, for tasks whose only failure is to run out of time."""
Takeover = Literal["ignore", "failure"]
"""How a critic treats an operator's takeover. `ignore`: every step is an ordinary transition. `failure`: the task was
lost at the first of the policy's last `takeover_window` steps, each of which is terminal with `takeover_reward`; the
operator's steps are ordinary transitions."""
Imitated = Literal["successes", "plans", "all"]
"""Which chunks of the policy's own episodes to imitate. `all`: from any step, also across two plans. `plans`: only
chunks planned as one. `successes`: plans from episodes that did not fail. The others would teach the policy to repeat
failures."""

_REWARDS = {"sparse_success": (0.0, 1.0), "step_penalty": (-1.0, 0.0)}


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """Datasets, frame cache, Q-chunks and replay buffer."""

    repo_ids: tuple[str, ...] = ()
    """LeRobot datasets: hub names or local folders."""
    weights: tuple[float, ...] | None = None
    """Relative sampling weight of each dataset. None: equal."""
    robot: str = "aloha"
    """The robot, which defines the transforms between its units and the model's: a name in `data.robots`, or
    `module:NAME` for your own."""
    cameras: tuple[str, ...] | None = None
    """OpenPI camera slots to read. None: all of the robot's. Omitted cameras cost nothing, not even masked tokens."""
    assets_dir: str = "assets"
    """Folder of normalisation statistics in OpenPI's layout: <assets_dir>/<asset_id>/norm_stats.json."""
    asset_id: str | None = None
    """Which statistics to use. None: the first dataset's repo id or folder name."""
    tokenizer: str = "paligemma"
    """paligemma (π₀'s), byte or word (no file needed, for models trained from scratch), none (no instruction), or a
    path."""
    cache: Tier = "auto"
    """Where to keep decoded frames: in memory, memory-mapped on disk, or in a rotating memory pool. auto: what fits."""
    cache_dir: str | None = None
    """Folder of the disk cache. None: inside PIRL_HOME."""
    exact_resize: bool = False
    """Resize with Pillow, bit-identical to OpenPI, instead of the decoder (twice as fast, 0.2 grey levels off)."""
    outcome: Rule = "auto"
    """Rewards and terminations: as recorded (columns), 1 at success (sparse_success), or -1 per step and 0 at success
    (step_penalty). auto: as recorded, otherwise an error."""
    success_file: str | tuple[str, ...] | None = None
    """JSON file of successful episodes, one per dataset (`none`: no file). Default: the labels of `pirl label`, then
    the column next.success."""
    failure: Failure = "auto"
    """Meaning of a labelled failure: the task is lost (terminal) or the recording stopped (timeout). auto: terminal,
    but timeout if steps cost something and `failure_reward` is 0. An end recorded as cut off (next.truncated, as by
    `pirl record`) is a time-out with all of these. always: terminal, too; where failures only ever run out of time, a
    critic sees no other failure. Of datasets: episodes collected online end as they ended. Unlabelled episodes never
    count as failures."""
    failure_reward: float = 0.0
    """Added to the last reward of a terminal failure: 0 or negative."""
    takeover: Takeover = "ignore"
    """How critics treat an operator's takeover (LeRobot's column `intervention`): every step is an ordinary transition
    (ignore), or the steps before it are a failure of the policy (failure)."""
    takeover_window: Natural = 10
    """The policy's steps before a takeover to blame for it: critics treat them as a failure (takeover failure), DAgger
    drops them, RECAP never labels them better. Set it to the operator's reaction time; 0: none."""
    takeover_reward: float | None = None
    """Added to the reward of blamed steps (takeover failure): 0 or negative. None: `failure_reward`."""
    successes_only: bool = False
    """Train only on successful episodes: filtered imitation, the baseline for RL."""
    held_out: float = 0.0
    """Episodes to hold out for validation: a share (0.1), or a number of each outcome (5). Whole episodes of every
    outcome, selected by `seed`; episodes recorded later do not change the selection. 0: none."""
    boundary: Boundary = "pad"
    """If an episode ends inside a chunk, the critic trains on the executed part (pad) or skips the chunk (drop)."""
    critic_horizon: Count | None = None
    """Steps the critic scores, usually the steps executed before replanning. None: the whole chunk."""
    n_step: Count = 1
    """Critic horizons that a target spans before it bootstraps: y = Σ_{l<L} γ^l r_l + γ^L V(s_{t+L}), L up to n_step ·
    critic_horizon. Values propagate n times as far per update, but the steps after the scored chunk follow the data,
    not the policy: above 1 targets are biased towards the behaviour in the data, the more so the further the policy is
    from it."""
    episodes_per_memory_pool: Count | None = 64
    """Episodes per memory pool (cache pool); memory holds twice as many."""
    steps_per_memory_pool: Count = 500
    """Batches drawn from one memory pool before the next takes over."""
    balance: bool = False
    """Sample successes and failures equally often. Biases the critic towards a success rate of one half."""
    online_fraction: Share = 0.5
    """Share of each batch from the replay buffer, once it has data (RLPD: half)."""
    online_imitated: Imitated = "successes"
    """Which replay chunks the actor imitates. The critic trains on all."""
    online_actor_share: Decay = 0.0
    """Share of each batch that only the actor trains on: replay chunks it may imitate. The critic skips them, so that
    it sees the true distribution of outcomes. 0: the actor uses only the imitable rows of the rest of the batch, which
    are few with `plans` or `successes` if many steps are executed per plan."""
    replay_episodes: Count = 1000
    """Capacity of the replay buffer, in episodes."""
    replay_gb: Positive = 16.0
    """Capacity of the replay buffer, in gigabytes (10⁹ bytes)."""
    prefetch: Natural = 2
    """Batches to prepare ahead in a thread. 0: prepare on demand."""
    seed: Natural = 0
    """Seed of all sampling: batch k depends only on the seed and k."""

    def __post_init__(self) -> None:
        super().__post_init__()

        def refuse(problem: str, hint: str) -> None:
            raise ConfigError(f"data: {problem}", hint=hint)

        if self.weights is not None and len(self.weights) != len(self.repo_ids):
            refuse(f"{len(self.weights)} weights for {len(self.repo_ids)} datasets", "give each dataset one weight")
        if self.weights is not None and not (min(self.weights) >= 0 and sum(self.weights) > 0):
            refuse(f"weights are {self.weights}", "weights are >= 0, and one of them is positive")
        files = self.success_file if isinstance(self.success_file, tuple) else (self.success_file,)
        if self.success_file is not None and len(files) != max(len(self.repo_ids), 1):
            refuse(
                f"{len(files)} success_file for {len(self.repo_ids)} datasets",
                "name one per dataset (`none`: no file), or label the datasets with `pirl label`",
            )
        if not -math.inf < self.failure_reward <= 0:
            refuse(
                f"failure_reward is {self.failure_reward}", "0 or negative: a positive reward would make failing a goal"
            )
        if self.failure == "timeout" and self.failure_reward:
            refuse(
                f"failure_reward is {self.failure_reward} and failures are time-outs",
                "a time-out has no failure reward: set failure terminal, or failure_reward 0",
            )
        if not -math.inf < self.takeover_cost <= 0:
            refuse(f"takeover_reward is {self.takeover_cost}", "0, or a negative number")
        if self.takeover == "failure" and not self.takeover_window:
            refuse(
                "takeover is 'failure' and takeover_window is 0",
                "set takeover_window to at least 1, or takeover ignore",
            )
        if self.takeover == "failure" and self.boundary == "drop":
            refuse(
                "takeover is 'failure' and boundary is 'drop'", "drop uses steps after the end of an episode: use pad"
            )
        if not (0 <= self.held_out <= 0.5 or self.held_out >= 1) or (self.held_out % 1 and self.held_out > 1):
            refuse(f"held_out is {self.held_out:g}", "a share up to 0.5, a whole number of episodes per outcome, or 0")
        if self.n_step > 1 and self.boundary == "drop":
            refuse(f"n_step is {self.n_step} and boundary is 'drop'", "drop supports a single chunk: n_step 1")
        if self.cache == "pool" and self.episodes_per_memory_pool is None:
            refuse("cache is 'pool' without episodes_per_memory_pool", "set the number of episodes per pool")

    @property
    def success_files(self) -> tuple[str | None, ...]:
        """The success file of each dataset, or None."""
        if self.success_file is None:
            return (None,) * len(self.repo_ids)
        files = self.success_file if isinstance(self.success_file, tuple) else (self.success_file,)
        return tuple(None if file == "none" else file for file in files)

    @property
    def takeover_cost(self) -> float:
        """Added to the reward of blamed steps (takeover failure): `takeover_reward`, or `failure_reward` if unset."""
        return self.failure_reward if self.takeover_reward is None else self.takeover_reward

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """Smallest and largest reward of a declared outcome rule; None for recorded rewards."""
        if self.outcome not in _REWARDS:
            return None
        low, high = _REWARDS[self.outcome]
        worst = min(self.failure_reward, self.takeover_cost if self.takeover == "failure" else 0.0)
        return low + worst, high

    @property
    def replay_bytes(self) -> int:
        """The replay buffer's limit in bytes."""
        return int(self.replay_gb * 1e9)
