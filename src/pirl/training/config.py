"""Settings of training: optimizer, schedule, devices, checkpoints, recovery. Does not import jax.

To add an optimizer or schedule, add a dataclass here and register a function for it in `agents/optim.py`.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pirl.errors import ConfigError
from pirl.ranges import Auto, Bounds, Checked, Count, Decay, Inside, Natural, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(Checked):
    """Linear warm-up, then half a cosine down to a floor. The defaults are OpenPI's."""

    warmup_steps: Natural = 1000
    """Steps until the peak; step 0 has peak_lr / (warmup_steps + 1)."""
    peak_lr: NotNegative = 2.5e-5
    """Largest learning rate."""
    decay_steps: int = 30_000
    """Step at which the floor is reached, warm-up included."""
    decay_lr: NotNegative = 2.5e-6
    """The floor; constant from there on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"CosineSchedule: decay_steps is {self.decay_steps}, warmup_steps is {self.warmup_steps}",
                hint="decay_steps counts from the start and includes the warm-up, so it must be the larger one",
            )


@dataclass(frozen=True, kw_only=True)
class RsqrtSchedule(Checked):
    """Linear warm-up, then peak_lr / sqrt(1 + t / timescale). The defaults are OpenPI's."""

    warmup_steps: Natural = 1000
    """Steps until the peak; step 0 has peak_lr / (warmup_steps + 1)."""
    peak_lr: NotNegative = 5e-5
    """Largest learning rate."""
    timescale: Count = 10_000
    """Steps after the warm-up until the rate has fallen to 71 % of the peak."""


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule(Checked):
    """One learning rate, after an optional linear warm-up."""

    lr: NotNegative = 3e-4
    """The learning rate."""
    warmup_steps: Natural = 0
    """Steps until lr is reached; step 0 has lr / (warmup_steps + 1)."""


Schedule = CosineSchedule | RsqrtSchedule | ConstantSchedule
"""The learning rate as a function of the step."""


def slower(schedule: Schedule, factor: float) -> Schedule:
    """The same schedule with all its learning rates times a factor."""
    rates = {name: getattr(schedule, name) for name in ("lr", "peak_lr", "decay_lr") if hasattr(schedule, name)}
    return replace(schedule, **{name: factor * rate for name, rate in rates.items()})


@dataclass(frozen=True, kw_only=True)
class AdamW(Checked):
    """Adam with decoupled weight decay, after clipping. The defaults are OpenPI's."""

    b1: Decay = 0.9
    """Decay of the first moment."""
    b2: Decay = 0.95
    """Decay of the second moment."""
    eps: NotNegative = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 1e-10
    """Decoupled weight decay, per unit of learning rate."""
    clip_gradient_norm: Positive | None = 1.0
    """Clip the gradient (all leaves of the group together) to this norm; None does not clip."""


@dataclass(frozen=True, kw_only=True)
class SGD(Checked):
    """Stochastic gradient descent with momentum. The defaults are OpenPI's."""

    momentum: Decay = 0.9
    """Decay of the running sum of gradients."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    clip_gradient_norm: Positive | None = None
    """Clip the gradient to this norm; None does not clip."""


Optimizer = AdamW | SGD
"""How gradients become updates."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Checked):
    """How the devices share the work. Every batch is split over all of them."""

    fsdp: Count | Auto = "auto"
    """Devices that share one copy of the weights and of the optimizer state; there are devices / fsdp copies. 1: a
    whole copy on every device. The number of devices: least memory. Best at most the number of devices of one node.
    auto: the fewest with which the unsplit batch fits."""

    @property
    def size(self) -> int:
        """`fsdp` as a number; 1 until `auto` is resolved."""
        return 1 if self.fsdp == "auto" else self.fsdp


@dataclass(frozen=True, kw_only=True)
class KeepBest(Checked):
    """Metric that ranks checkpoints."""

    metric: str = "eval/success_rate"
    """Metric logged at the saved step; a checkpoint without it, or with NaN, is never the best."""
    mode: Literal["max", "min"] = "max"
    """Whether to maximise or minimise the metric."""
    count: Count = 1
    """How many of the best to keep; ties go to the later step."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
    """Checkpoints: where, how often, and which ones to keep."""

    base_dir: str = "./checkpoints"
    """A run is in <base_dir>/<recipe>/<exp_name>, its steps below that, as in OpenPI."""
    save_interval: Count = 1000
    """Steps between checkpoints."""
    save: Literal["full", "params"] = "full"
    """Contents of the kept steps. full: everything needed to resume. params: only the newest step can be resumed; older
    ones keep the policy's weights for evaluation and serving, without critic and optimizer."""
    keep_last: Count = 1
    """Keep this many of the newest."""
    keep_period: Count | None = 5000
    """Keep steps divisible by this permanently. None: no such steps."""
    keep_best: KeepBest | None = None
    """Also keep the best ones by a metric."""
    async_save: bool = True
    """Save asynchronously: training waits only until the arrays are copied to host memory."""
    grace: Positive | None = None
    """Seconds between the scheduler's SIGTERM and SIGKILL. If too little is left to write a checkpoint, none is started
    and the last complete one remains. None: always write one."""


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig(Checked):
    """Automatic restart from the last checkpoint after divergence (lower learning rate) or out of memory."""

    attempts: Natural = 3
    """Most restarts from a checkpoint. 0: never; the run ends with the error."""
    learning_rate: Inside = 0.5
    """Factor on the learning rates after divergence."""


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(Checked):
    """Offline metrics on held-out episodes during training, if `data.held_out` is set."""

    interval: Count = 1000
    """Steps between measurements; the first is before training, the last at its end."""
    rows: Annotated[int, Bounds(low=8)] = 512
    """Approximate number of rows to measure on; always the same ones, spread evenly over the episodes, at least eight
    per episode."""
    candidates: Annotated[int, Bounds(low=2)] = 8
    """Policy samples per row that the critic compares."""


@dataclass(frozen=True, kw_only=True)
class ResumeMode:
    """How to treat an existing run of this name. Without either flag it is an error."""

    resume: bool = False
    """Resume from its latest checkpoint; an error if there is none."""
    overwrite: bool = False
    """Delete it and start over."""
    fresh_if_missing: bool = False
    """With `resume`: start from scratch if there is no checkpoint, so one command line serves the first start and every
    restart."""

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ConfigError(
                "resume and overwrite are both set",
                hint="--resume continues the existing run, --overwrite deletes it: choose one",
            )
