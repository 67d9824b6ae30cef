"""Training of a group of weights: optimizer, mask of trainable leaves, EMA, gradient accumulation."""

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
from pirl.models.params import Params, flatten


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Trains one group. The optimizer is made once and passed in, so that its state always has the same structure."""

    tx: optax.GradientTransformation
    """The optimizer, including schedule and clipping."""
    mask: Params | None = None
    """True for trainable leaves; None trains all. Frozen leaves have neither gradients nor optimizer state."""
    ema_decay: float | None = None
    """Decay of the EMA; None: no EMA."""

    def split(self, params: Params) -> tuple[Params, Params]:
        """(trainable, frozen)."""
        return (params, {}) if self.mask is None else split(params, self.mask)

    def join(self, trainable: Params, frozen: Params) -> Params:
        """The inverse of `split`."""
        return join(trainable, frozen) if frozen else trainable

    def init(self, params: Params) -> tuple[Params, Any]:
        """(parameters with frozen leaves cast to bfloat16, optimizer state).

        Trainable leaves must be float32: small steps vanish in bfloat16, and models treat bfloat16 leaves as frozen.
        """
        params = params if self.mask is None else cast_frozen(params, self.mask)
        trainable = self.split(params)[0]
        for path, leaf in flatten(trainable).items():
            if leaf.dtype != jnp.float32:
                raise ConfigError(
                    f"{path} trains and is {leaf.dtype}, expected float32", hint="cast it, or freeze it by the mask"
                )
        return params, self.tx.init(trainable)

    def frozen(self, params: Params, group: str = "policy") -> frozenset[str]:
        """Paths of the frozen leaves, as in `TrainState.frozen`."""
        return frozenset(f"{group}/{path}" for path in flatten(self.split(params)[1]))

    @jax.named_scope("optimizer")
    def step(self, params: Params, grads: Params, opt: Any) -> tuple[Params, Any]:
        """One optimizer step: (new parameters, new optimizer state). `grads` covers the trainable leaves."""
        trainable, frozen = self.split(params)
        updates, opt = self.tx.update(grads, opt, trainable)
        return self.join(optax.apply_updates(trainable, updates), frozen), opt

    @jax.named_scope("optimizer")
    def average(self, ema: Params, params: Params) -> Params:
        """The EMA after one more step."""
        return ema if self.ema_decay is None else ema_update(ema, params, self.ema_decay)


def accumulated(
    loss: Callable[[Params, Any], tuple[Float[Array, ""], Any]], params: Params, batch: Any, parts: int
) -> tuple[Float[Array, ""], Any, Params]:
    """(loss, aux, gradient) over the batch, accumulated over `parts` sequential parts.

    The loss must be a plain mean over samples; `aux` is batch-first and returned for the whole batch.
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
    (value, grads), aux = _scanned(add, zero, batch, parts)
    return value / parts, aux, jax.tree.map(lambda g: g / parts, grads)


def in_parts(function: Callable[[Any], Any], batch: Any, parts: int) -> Any:
    """Apply a function to a batch in sequential parts; only its results are held for the whole batch."""
    return function(batch) if parts == 1 else _scanned(lambda carry, part: (carry, function(part)), (), batch, parts)[1]


def _scanned(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, batch: Any, parts: int) -> tuple[Any, Any]:
    """`jax.lax.scan` over the parts of a batch; the outputs of `body` are joined to one batch.

    Trees cross the scan as lists of leaves: with the extra axis of parts they would violate their types' shapes.
    """
    leaves, structure = jax.tree.flatten(batch)
    returned: list[Any] = []

    def step(carry: Any, part: list[Array]) -> tuple[Any, list[Array]]:
        carry, out = body(carry, jax.tree.unflatten(structure, part))
        out_leaves, out_structure = jax.tree.flatten(out)
        returned.append(out_structure)
        return carry, out_leaves

    carry, stacked = jax.lax.scan(step, carry, [divided(x, parts) for x in leaves])
    return carry, jax.tree.unflatten(returned[-1], [_whole(x) for x in stacked])


def divided(x: Array, parts: int) -> Array:
    """Split the batch axis into (parts, rest). Part m takes every `parts`-th sample, so no sample changes devices."""
    if len(x) % parts:
        raise ConfigError(
            f"a batch of {len(x)} does not split into {parts} equal parts",
            hint="choose an `accumulate` that divides the batch size",
        )
    return jnp.swapaxes(x.reshape(len(x) // parts, parts, *x.shape[1:]), 0, 1)


def _whole(divided: Array) -> Array:
    """The inverse of `divided`."""
    return jnp.swapaxes(divided, 0, 1).reshape(-1, *divided.shape[2:])
