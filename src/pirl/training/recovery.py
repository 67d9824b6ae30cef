"""Automatic recovery from divergence and out-of-memory errors: restart from the last checkpoint with changed settings.

Divergence (a metric or weight is not finite) lowers the learning rates and skips the batches between that checkpoint
and the failing step; a checkpoint that diverges twice is set aside for the one before it. Out of memory: more
accumulation, then more rematerialisation. At most `recovery.attempts` times per run, each with a warning, recorded in
`recoveries.json`, the metric `recovery/times`, later checkpoints' metadata and the final summary. Runs that never
recover are unaffected.
"""

import gc
import os
import warnings
from dataclasses import replace
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from pirl.checkpoints.checksums import read_extra
from pirl.checkpoints.lighten import can_be_resumed
from pirl.checkpoints.run_directory import complete_steps
from pirl.config import RLTrainConfig
from pirl.errors import PirlError, PirlWarning
from pirl.models.config import Pi0Config
from pirl.planning.choices import with_choices
from pirl.training import loop, recovered
from pirl.training.config import slower
from pirl.training.eval_fn import EvalFn
from pirl.training.metrics import DivergedError
from pirl.training.recovered import Recovery


class OutOfMemoryError(PirlError):
    """Out of device memory, and no setting is left that would need less."""


def train(
    config: RLTrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    fresh_if_missing: bool = False,
    dry_run: bool = False,
    eval_fn: EvalFn | None = None,
) -> int:
    """`loop.train` with recovery from divergence and out-of-memory errors; the same arguments."""
    if resume:
        config = _as_it_was(config)
    modes = {"resume": resume, "overwrite": overwrite, "fresh_if_missing": fresh_if_missing}
    while True:
        try:
            return loop.train(config, dry_run=dry_run, eval_fn=eval_fn, **modes)
        except DivergedError as error:
            if not _may_go_back(config):
                raise
            config = _go_back(config, _slower(config, error))
        except JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = _lighter(config, error) if _may_go_back(config) and not dry_run else None
            if found is None:
                raise OutOfMemoryError(
                    f"out of memory: {_first_line(error)}",
                    hint=f"`pirl plan {config.name}` shows what fits: a smaller batch, more devices (--mesh.fsdp), "
                    "--agent.accumulate N, --model.remat full, fewer trainable weights (--freeze)",
                ) from error
            config = _go_back(config, found)
        modes = {"resume": True, "fresh_if_missing": True}
        gc.collect()  # the arrays of the attempt that failed


def _as_it_was(config: RLTrainConfig) -> RLTrainConfig:
    """The configuration with the changes of earlier recoveries, with a warning."""
    known = recovered.read(config.run_dir)
    again = recovered.remembered(config, known)
    if changes := recovered.changes_between(config, again):
        told = ", ".join(f"{path} {old} -> {new}" for path, (old, new) in changes.items())
        message = f"{config.run_dir} recovered {len(known)} time(s) and keeps the changed settings: {told}"
        warnings.warn(f"{message} (reasons in {recovered.FILE})", PirlWarning, stacklevel=3)
    return again


def _may_go_back(config: RLTrainConfig) -> bool:
    """Whether another attempt is allowed. Never with several processes: the others may not know of the failure."""
    return jax.process_count() == 1 and len(recovered.read(config.run_dir)) < config.recovery.attempts


def _slower(config: RLTrainConfig, error: DivergedError) -> tuple[RLTrainConfig, Recovery]:
    """Lower the learning rates and skip the batches since the last checkpoint."""
    factor = config.recovery.learning_rate
    changed = replace(config, policy_schedule=slower(config.policy_schedule, factor))
    if config.has_critic:
        changed = replace(changed, critic_schedule=slower(config.critic_schedule, factor))
    _set_suspect_aside(config)
    step, skipped = _last_step(config), (0, 0)
    if config.agent.groups is None:  # others learn from rollouts of their own, which other weights will change
        first = _next_batch(config)
        skipped = first, first + error.step - step
    return changed, Recovery(
        kind="diverged",
        reason=error.message.splitlines()[0],
        back_to=step,
        changes=recovered.changes_between(config, changed),
        skipped=skipped,
    )


def _lighter(config: RLTrainConfig, error: JaxRuntimeError) -> tuple[RLTrainConfig, Recovery] | None:
    """Accumulate more; at 2 or more parts, full rematerialisation; then accumulate more again."""
    chosen, share = with_choices(config), config.batch_size // jax.device_count()
    model, agent = chosen.model, chosen.agent
    parts = next((n for n in range(agent.parts + 1, share + 1) if share % n == 0), None)
    if isinstance(model, Pi0Config) and model.remat != "full" and (agent.parts > 1 or parts is None):
        model = replace(model, remat="full")
    elif parts is not None:
        agent = replace(agent, accumulate=parts)
    else:
        return None
    # Keep the mesh on several devices: since smaller parts need less memory, a new choice could lower fsdp.
    mesh = chosen.mesh if jax.device_count() > 1 else config.mesh
    changed = replace(config, model=model, agent=agent, mesh=mesh)
    return changed, Recovery(
        kind="memory",
        reason=f"out of memory: {_first_line(error)}",
        back_to=_last_step(config),
        changes=recovered.changes_between(config, changed),
    )


def _go_back(config: RLTrainConfig, found: tuple[RLTrainConfig, Recovery]) -> RLTrainConfig:
    """Record the recovery, warn, and return the changed configuration."""
    changed, new = found
    known = (*recovered.read(config.run_dir), new)
    recovered.write(config.run_dir, known)
    warnings.warn(
        f"{config.name}/{config.exp_name} goes {new}. Time {len(known)} of at most {config.recovery.attempts} "
        "(--recovery.attempts; 0 stops instead)",
        PirlWarning,
        stacklevel=3,
    )
    return changed


def _set_suspect_aside(config: RLTrainConfig) -> None:
    """Set a checkpoint aside that training diverged from twice: its weights are finite but unusable."""
    known = recovered.read(config.run_dir)
    steps = [step for step in complete_steps(config.run_dir) if can_be_resumed(config.run_dir / str(step))]
    if len(steps) > 1 and known and (known[-1].kind, known[-1].back_to) == ("diverged", steps[-1]):
        os.rename(config.run_dir / str(steps[-1]), config.run_dir / f"{steps[-1]}.diverged-{len(known)}")


def _last_step(config: RLTrainConfig) -> int:
    return max(complete_steps(config.run_dir), default=0)


def _next_batch(config: RLTrainConfig) -> int:
    """The number of the first batch after the last checkpoint."""
    step = _last_step(config)
    position: Any = read_extra(config.run_dir / str(step))["stream"] if step else {"data": {"step": 0}}
    return int(recovered.beyond(position, recovered.read(config.run_dir))["data"]["step"])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
