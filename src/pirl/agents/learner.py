"""How a group of weights is trained: optimizer, mask of trainable leaves, EMA. Shared by all algorithms."""

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
        """The parameters as they are kept (frozen leaves in bfloat16) and the optimizer's state.

        Everything that trains is float32: small steps vanish in bfloat16, and models take bfloat16 for frozen.
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
        """The paths of what does not train, as `TrainState.frozen` names them."""
        return frozenset(f"{group}/{path}" for path in flatten(self.split(params)[1]))

    @jax.named_scope("optimizer")
    def step(self, params: Params, grads: Params, opt: Any) -> tuple[Params, Any]:
        """One optimizer step; gradients are those of the trainable leaves."""
        trainable, frozen = self.split(params)
        updates, opt = self.tx.update(grads, opt, trainable)
        return self.join(optax.apply_updates(trainable, updates), frozen), opt

    @jax.named_scope("optimizer")
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
    (value, grads), aux = _scanned(add, zero, batch, parts)
    return value / parts, aux, jax.tree.map(lambda g: g / parts, grads)


def in_parts(function: Callable[[Any], Any], batch: Any, parts: int) -> Any:
    """The function of a batch, computed part by part; only what it returns is ever held whole."""
    return function(batch) if parts == 1 else _scanned(lambda carry, part: (carry, function(part)), (), batch, parts)[1]


def _scanned(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, batch: Any, parts: int) -> tuple[Any, Any]:
    """`jax.lax.scan` over the parts of a batch; what `body` returns for each part comes back as one batch.

    Trees cross the scan as bare leaves: with an axis of parts in front they would not be what their types say.
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
    """Part m takes every `parts`-th sample, so that on several devices no sample has to move."""
    if len(x) % parts:
        raise ConfigError(
            f"a batch of {len(x)} does not split into {parts} equal parts",
            hint="choose an `accumulate` that divides the batch size",
        )
    return jnp.swapaxes(x.reshape(len(x) // parts, parts, *x.shape[1:]), 0, 1)


def _whole(divided: Array) -> Array:
    """The inverse of `divided`."""
    return jnp.swapaxes(divided, 0, 1).reshape(-1, *divided.shape[2:])
