"""Optimizers and learning-rate schedules from their configs.

Each is made once per run and passed to the agent, so that the optimizer state has the same structure when it is
initialised, sharded, updated, saved and restored.
"""

from functools import singledispatch
from typing import Any

import jax.numpy as jnp
import optax

from pirl.training.config import SGD, AdamW, ConstantSchedule, CosineSchedule, RsqrtSchedule


@singledispatch
def make_schedule(config: Any) -> optax.Schedule:
    """The schedule (step -> learning rate) for a config; dispatches on the config's type."""
    raise TypeError(f"{type(config).__name__} has no schedule: register one with make_schedule.register")


@make_schedule.register
def _(config: CosineSchedule) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        init_value=_first(config.peak_lr, config.warmup_steps),
        peak_value=config.peak_lr,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.decay_lr,
    )


@make_schedule.register
def _(config: RsqrtSchedule) -> optax.Schedule:
    return _warmed_up(
        lambda step: config.peak_lr / jnp.sqrt((config.timescale + step) / config.timescale),
        config.peak_lr,
        config.warmup_steps,
    )


@make_schedule.register
def _(config: ConstantSchedule) -> optax.Schedule:
    return _warmed_up(optax.constant_schedule(config.lr), config.lr, config.warmup_steps)


@singledispatch
def make_optimizer(config: Any, schedule: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """The optimizer with clipping and learning rate; dispatches on the config's type."""
    raise TypeError(f"{type(config).__name__} has no optimizer: register one with make_optimizer.register")


@make_optimizer.register
def _(config: AdamW, schedule: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    adamw = optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)
    return optax.chain(_clip(config.clip_gradient_norm), adamw)


@make_optimizer.register
def _(config: SGD, schedule: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    sgd = optax.sgd(schedule, momentum=config.momentum, nesterov=config.nesterov)
    return optax.chain(_clip(config.clip_gradient_norm), sgd)


def _first(peak: float, warmup_steps: int) -> float:
    """The learning rate of step 0: not zero, as in OpenPI, so that the step is not wasted."""
    return peak / (warmup_steps + 1)


def _warmed_up(schedule: optax.Schedule, peak: float, warmup_steps: int) -> optax.Schedule:
    """A linear warm-up, then the schedule from its step 0 on."""
    if warmup_steps == 0:
        return schedule
    warmup = optax.linear_schedule(_first(peak, warmup_steps), peak, warmup_steps)
    return optax.join_schedules([warmup, schedule], [warmup_steps])


def _clip(norm: float | None) -> optax.GradientTransformation:
    """Clipping, or an identity with the same (empty) state, so that switching it off keeps checkpoints loadable."""
    return optax.identity() if norm is None else optax.clip_by_global_norm(norm)
