"""How a group of weights learns: its optimizer, which leaves train, and its average. Shared by all algorithms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from pirl.agents.objectives import ema_update
from pirl.errors import ConfigError
from pirl.models.freeze import cast_frozen, join, split
from pirl.models.params import Params


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One group. The optimizer is made once and passed in, so that its state always has the same structure."""

    tx: optax.GradientTransformation
    """The optimizer, schedule and clipping included."""
    mask: Params | None = None
    """True where a leaf trains; None trains everything. Frozen leaves have neither gradients nor optimizer state."""
    ema_decay: float | None = None
    """Decay of the average; None keeps none."""

    def split(self, params: Params) -> tuple[Params, Params]:
        """(trainable, frozen)."""
        return (params, {}) if self.mask is None else split(params, self.mask)

    def join(self, trainable: Params, frozen: Params) -> Params:
        """The whole tree again."""
        return join(trainable, frozen) if frozen else trainable

    def init(self, params: Params) -> tuple[Params, Any]:
        """The parameters as they are kept (frozen leaves in bfloat16) and the optimizer's state."""
        params = params if self.mask is None else cast_frozen(params, self.mask)
        return params, self.tx.init(self.split(params)[0])

    def step(self, params: Params, grads: Params, opt: Any) -> tuple[Params, Any]:
        """One optimizer step; gradients are those of the trainable leaves."""
        trainable, frozen = self.split(params)
        updates, opt = self.tx.update(grads, opt, trainable)
        return self.join(optax.apply_updates(trainable, updates), frozen), opt

    def average(self, ema: Params, params: Params) -> Params:
        """The average after one more step."""
        return ema if self.ema_decay is None else ema_update(ema, params, self.ema_decay)


def accumulated(
    loss: Callable[[Params, Any], tuple[Float[Array, ""], Any]], params: Params, batch: Any, parts: int
) -> tuple[Float[Array, ""], Any, Params]:
    """(loss, aux, gradient) of a mean over the batch, computed in `parts` parts of it, one after the other.

    The loss must be a plain mean over samples; `aux` has the batch in front and comes back whole.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)
    if parts == 1:
        (value, aux), grads = gradient(params, batch)
        return value, aux, grads

    def add(carry: tuple[Array, Params], part: Any) -> tuple[tuple[Array, Params], Any]:
        total, grads = carry
        (value, aux), more = gradient(params, part)
        return (total + value, jax.tree.map(jnp.add, grads, more)), aux

    zero = (jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params))
    (value, grads), aux = jax.lax.scan(add, zero, _divided(batch, parts))
    return value / parts, _whole(aux), jax.tree.map(lambda g: g / parts, grads)


def in_parts(function: Callable[[Any], Any], batch: Any, parts: int) -> Any:
    """The function of a batch, computed part by part; only what it returns is ever held whole."""
    return function(batch) if parts == 1 else _whole(jax.lax.map(function, _divided(batch, parts)))


def _divided(batch: Any, parts: int) -> Any:
    """Part m takes every `parts`-th sample, so that on several devices no sample has to move."""
    size = jax.tree.leaves(batch)[0].shape[0]
    if size % parts:
        raise ConfigError(
            f"a batch of {size} does not split into {parts} equal parts",
            hint="choose an `accumulate` that divides the batch size",
        )
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(size // parts, parts, *x.shape[1:]), 0, 1), batch)


def _whole(divided: Any) -> Any:
    """The inverse of `_divided`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), divided)
