"""The configuration of a whole run: model, algorithm, data, output. Does not import jax.

Each package defines its own settings in its `config.py`; this module combines them and checks them against each other.
Derived values are properties, so overrides (`--model.pi05`) propagate. `config_io` reads and writes files, `recipes`
holds named configurations.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pirl.agents.agent_config import AgentConfig
from pirl.config_io import tag
from pirl.data.config import DataConfig
from pirl.data.robots import Robot, get_robot
from pirl.envs.config import EnvConfig
from pirl.errors import ConfigError, did_you_mean, numbered
from pirl.models.config import FreezeRule, MLPFlowConfig, Pi0Config
from pirl.models.critic_config import CriticConfig
from pirl.ranges import Checked, Count, Natural, NotNegative, Positive
from pirl.records import BatchSizes
from pirl.rollout.config import CurriculumConfig, EvalConfig, OnlineConfig, RolloutConfig
from pirl.training.config import (
    AdamW,
    CheckpointConfig,
    ConstantSchedule,
    CosineSchedule,
    HeldOutConfig,
    MeshConfig,
    Optimizer,
    RecoveryConfig,
    Schedule,
)

SinkName = Literal["wandb", "trackio", "tensorboard"]
"""Services that receive metrics, in addition to the console and the files in the run folder."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
_VOCABULARY = {"paligemma": 257_152, "byte": 259, "word": 512}
"""Vocabulary sizes of the named tokenizers; that of a tokenizer file is unknown here."""


def check_name(what: str, name: str) -> None:
    """Raise if a name is not valid as a folder name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} is {name!r}", hint="it names a folder: letters, digits and . _ - + =, no slash")


@dataclass(frozen=True, kw_only=True)
class EarlyStop(Checked):
    """Early stopping."""

    metric: str = "eval/success_rate"
    """Metric to watch."""
    patience: Count = 10
    """Measurements without improvement before the run stops."""
    min_delta: NotNegative = 0.001
    """Smallest change that counts as an improvement."""
    mode: Literal["max", "min"] = "max"
    """Whether to maximise or minimise the metric."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig(Checked):
    """Health checks during training; each alarm is raised once."""

    enabled: bool = True
    """Run the checks."""
    stop: bool = False
    """Stop the run at an alarm instead of only warning. The last checkpoint stays."""
    patience: Count = 5
    """Consecutive bad records before an alarm."""
    hang_seconds: Positive = 300.0
    """Report a hang when a step takes longer than this and twenty times longer than usual."""
    disk_gib: NotNegative = 2.0
    """Warn below this much free disk, in GiB."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """How wandb and trackio organise runs."""

    project: str = "pirl"
    """Project name."""
    entity: str | None = None
    """wandb: team or user. None: the account's default."""
    group: str | None = None
    """Group of runs that belong together, such as the seeds of one experiment."""
    tags: tuple[str, ...] = ()
    """wandb: tags."""


@dataclass(frozen=True, kw_only=True)
class RLTrainConfig(Checked):
    """A training run."""

    name: str
    """Recipe name, the first part of the run folder."""
    exp_name: str = "run"
    """Run name; the run folder is <checkpoint.base_dir>/<name>/<exp_name>."""
    model: Pi0Config | MLPFlowConfig
    """The policy."""
    agent: AgentConfig
    """The algorithm."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic, for algorithms that use one."""
    freeze: FreezeRule | None = None
    """Which weights train. full: all. lora: adapters, vision tower and heads. vlm_frozen: action expert and heads.
    expert_only: the expert's transformer. None: lora for models with adapters, otherwise full (as in OpenPI)."""
    init_weights: str | None = None
    """Initial weights: an OpenPI checkpoint, its PyTorch port or PaliGemma's .npz; a path, gs:// or hf:// address.
    For an MLP, a checkpoint of pirl. None: random initialisation."""
    data: DataConfig
    """Datasets and how to cut chunks from them."""
    env: EnvConfig | None = None
    """The environment for rollouts and evaluation."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How episodes are collected."""
    online: OnlineConfig | None = None
    """Off-policy algorithms (ACRLPD): also collect episodes with the current policy. None: offline training."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Algorithms with rollout groups (RIPT): how to choose initial states."""
    evaluation: EvalConfig | None = None
    """Periodic evaluation in the environment. None: no evaluation."""
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    """Offline metrics on the episodes that `data.held_out` reserves; needs no environment."""
    eval_fn: str | None = None
    """`module:function` to call at evaluation intervals with a `Snapshot`; the metrics it returns are logged. The
    module must be listed in --trust."""
    policy_optimizer: Optimizer = field(default_factory=AdamW)
    """The policy's optimizer."""
    policy_schedule: Schedule = field(default_factory=CosineSchedule)
    """The policy's learning-rate schedule."""
    critic_optimizer: Optimizer = field(default_factory=lambda: AdamW(b2=0.999, weight_decay=1e-4))
    """The critic's optimizer."""
    critic_schedule: Schedule = field(default_factory=ConstantSchedule)
    """The critic's learning-rate schedule."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The device mesh."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Where and how often to save, and which steps to keep."""
    batch_size: Count = 32
    """Chunks per step, across all devices and hosts."""
    num_train_steps: Count = 30_000
    """Policy updates; for algorithms with rollout groups (RIPT), iterations of collecting and training."""
    log_interval: Count = 100
    """Steps between log lines."""
    seed: Natural = 42
    """Seed of initial weights, noise, augmentation and dropout. `data.seed` determines the batches."""
    sinks: tuple[SinkName, ...] = ()
    """Services that also receive the metrics. A missing or offline service never fails a run."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Project, team, group and tags in wandb and trackio."""
    early_stop: EarlyStop | None = None
    """Early stopping. None: train all steps."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """Warns about stalls, dead gradients, collapsing success, growing memory and a full disk."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """Automatic restart from the last checkpoint after divergence or out of memory."""
    debug_nans: bool = False
    """Stop at the operation that produces the first NaN (jax_debug_nans). Slow."""
    log_memory: bool = False
    """Log device memory after loading, compilation and the first steps, and the training state's share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, value in (("name", self.name), ("exp_name", self.exp_name)):
            check_name(what, value)
        if self.init_weights is not None and self.init_weights.lower() in ("none", "null"):
            object.__setattr__(self, "init_weights", None)
        if self.eval_fn is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.eval_fn):
            raise ConfigError(f"eval_fn is {self.eval_fn!r}", hint="module:function, such as my_robot:reached")
        if len(set(self.sinks)) < len(self.sinks):
            raise ConfigError(f"sinks are {', '.join(self.sinks)}", hint="name each one once")
        problems = (self._policy_problems, self._data_problems, self._rollout_problems, self._device_problems)
        found = [problem for check in problems for problem in check()]
        if len(found) == 1:
            raise ConfigError(found[0][0], hint=found[0][1])
        if found:
            raise ConfigError(f"{len(found)} settings contradict each other\n{numbered(found)}")

    @property
    def run_dir(self) -> Path:
        """The run folder: checkpoints by step, metrics, configuration."""
        return Path(self.checkpoint.base_dir).expanduser() / self.name / self.exp_name

    @property
    def horizon(self) -> int:
        """Actions per chunk."""
        return self.model.horizon

    @property
    def critic_horizon(self) -> int:
        """Steps the critic scores."""
        return self.horizon if self.data.critic_horizon is None else self.data.critic_horizon

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm learns values; its batches then carry next observations."""
        return self.agent.learns_values

    @property
    def discount(self) -> float:
        """Discount per environment step; unused by algorithms without values."""
        return self.agent.discount

    @property
    def policy_ema_decay(self) -> float | None:
        """Decay of the policy's EMA, or None."""
        return self.agent.policy_ema

    @property
    def acts(self) -> bool:
        """Whether the algorithm collects episodes."""
        return self.agent.groups is not None or self.online is not None

    @property
    def execute(self) -> int:
        """Steps of a chunk to execute before replanning."""
        return self.critic_horizon if self.rollout.execute is None else self.rollout.execute

    @property
    def batch_sizes(self) -> BatchSizes:
        """The sizes that determine a batch's shapes."""
        return BatchSizes(
            batch=self.batch_size,
            horizon=self.horizon,
            critic_horizon=self.critic_horizon,
            action_dim=self.model.action_dim,
            state_dim=self.state_dim,
            cameras=self.cameras,
            image_size=self.model.image_size,
            token_len=self.token_len if self.data.tokenizer != "none" else 0,
        )

    @property
    def freeze_rule(self) -> FreezeRule:
        """Which weights train."""
        if self.agent.freezes_policy:
            return "frozen"
        if self.freeze is not None:
            return self.freeze
        return "lora" if self.model.has_lora else "full"

    @property
    def robot(self) -> Robot:
        """The robot that recorded the data."""
        return get_robot(self.data.robot)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Camera slots to read, in the robot's order."""
        chosen = self.data.cameras
        return tuple(slot for slot in self.robot.cameras if chosen is None or slot in chosen)

    @property
    def real_action_dim(self) -> int:
        """The robot's action dimensions; the model pads the rest."""
        return self.robot.action_dim

    @property
    def state_dim(self) -> int:
        """State size at the model's input."""
        return self.model.state_dim

    @property
    def token_len(self) -> int:
        """Prompt tokens at the model's input; 0 without a prompt."""
        return self.model.token_len

    @property
    def quantile_norm(self) -> bool:
        """Whether to normalise by quantiles (π₀.₅) instead of mean and standard deviation (π₀)."""
        return self.model.pi05

    @property
    def discrete_state(self) -> bool:
        """Whether the prompt contains the state."""
        return self.model.discrete_state

    def _policy_problems(self) -> Iterator[tuple[str, str]]:
        """Conflicts between the model and its weights."""
        model, delay = self.model, self.agent.real_time_delay
        if delay and not self.agent.delays:
            yield (
                f"agent.real_time_delay is {delay}, and agent {tag(type(self.agent))} does not train with given steps",
                "leave it out: `pirl serve --real-time` then guides the flow",
            )
        if delay and isinstance(model, MLPFlowConfig):
            yield f"agent.real_time_delay is {delay}, and the policy is an MLP", "only π₀ supports a flow time per step"
        elif delay >= model.horizon:
            yield (
                f"agent.real_time_delay is {delay}, and a chunk has {model.horizon} steps",
                "at most model.horizon minus the steps executed before the next request",
            )
        if isinstance(model, MLPFlowConfig):
            if self.freeze not in (None, "full"):
                yield (
                    f"freeze is {self.freeze!r}, and the policy is an MLP",
                    "an MLP has no frozen parts: set freeze none or full",
                )
            return
        if self.freeze == "frozen" and not self.agent.freezes_policy:
            learning = ", ".join(tag(kind) for kind in AgentConfig.kinds() if kind.freezes_policy)
            yield (
                f"freeze is 'frozen', and {tag(type(self.agent))} trains the policy",
                f"of pirl's algorithms {learning} train on a frozen one",
            )
        if self.freeze == "lora" and not model.has_lora:
            yield "freeze is 'lora', and the model has no adapters", "take a recipe or preset whose name ends in _lora"
        room = _VOCABULARY.get(self.data.tokenizer, 0)
        if room > model.vocab_size:
            yield (
                f"the tokenizer {self.data.tokenizer!r} has {room:,} tokens, the model embeds {model.vocab_size:,}",
                "a small model reads bytes: --data.tokenizer byte",
            )
        if model.discrete_state and self.data.tokenizer == "none":
            yield "π₀.₅ reads the state in its prompt, and data.tokenizer is 'none'", "name a tokenizer"

    def _data_problems(self) -> Iterator[tuple[str, str]]:
        """Conflicts between robot, data, model and algorithm."""
        robot, model = self.robot, self.model
        for what, size, room in (
            ("state", robot.state_dim, self.state_dim),
            ("action", robot.action_dim, model.action_dim),
        ):
            if size > room:
                yield (
                    f"the {what} of robot {robot.name!r} has {size} dimensions, the model has room for {room}",
                    "enlarge the model's dimensions, or name the right data.robot",
                )
        for slot in self.data.cameras or ():
            if slot not in robot.cameras:
                raise did_you_mean(slot, robot.cameras, kind=f"camera slot of robot {robot.name!r}")
        known = model.cameras
        if unseen := [slot for slot in self.cameras if slot not in known]:
            seen = " ".join(slot for slot in known if slot in robot.cameras)
            yield (
                f"robot {robot.name!r} has the cameras {', '.join(unseen)}, which the model does not see",
                f"read only those it sees: --data.cameras {seen}".rstrip(),
            )
        if self.critic_horizon > self.horizon:
            yield (
                f"data.critic_horizon is {self.critic_horizon}, model.horizon is {self.horizon}",
                "the critic scores at most the whole chunk",
            )
        yield from self.agent.problems(self)

    def _rollout_problems(self) -> Iterator[tuple[str, str]]:
        """Conflicts between the algorithm and its environment."""
        acts = {
            f"agent {tag(type(self.agent))}": self.agent.groups is not None,
            "online": self.online is not None,
            "evaluation": self.evaluation is not None,
        }
        if self.env is None and (needs := [name for name, wanted in acts.items() if wanted]):
            yield (
                f"{' and '.join(needs)} without an environment",
                "name one: --env.type Aloha, or take a recipe that has one",
            )
        if self.online is not None and not self.agent.replays:
            yield (
                f"online is set, and {tag(type(self.agent))} does not learn from a replay buffer",
                f"of pirl's algorithms {', '.join(tag(kind) for kind in AgentConfig.kinds() if kind.replays)} do; "
                "or leave online out",
            )
        if self.online is not None and self.online.start_step > 0 and not self.data.repo_ids:
            yield (
                f"online.start_step is {self.online.start_step} without a dataset",
                "before the first collection there would be nothing to train on: start_step 0, or name data.repo_ids",
            )
        if self.execute > self.horizon:
            yield (
                f"rollout.execute is {self.execute}, model.horizon is {self.horizon}",
                "a policy cannot execute more than it plans",
            )

    def _device_problems(self) -> Iterator[tuple[str, str]]:
        parts, fsdp = self.agent.parts, self.mesh.size
        if self.batch_size % (parts * fsdp):
            yield (
                f"batch_size {self.batch_size} cannot be split over {fsdp} device(s) in {parts} part(s)",
                f"take a multiple of mesh.fsdp × agent.accumulate = {parts * fsdp}",
            )
