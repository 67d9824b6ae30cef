"""Flow matching for any `FlowPolicy`, in OpenPI's convention: t = 1 is noise, t = 0 is data.

    x_t = t·ε + (1 - t)·a      u = dx_t/dt = ε - a      loss = ‖v(x_t, t) - u‖²      sample: integrate t from 1 to 0

(FQL and Q-chunking write it the other way round; mixing the two is the easiest way to a silently broken actor.)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from pirl.models.config import FlowTimes
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy, Preparing

Velocity = Callable[[Array, Array], Array]
"""(x_t [B, N, H, A], t [B, N]) -> dx/dt [B, N, H, A]."""
Steer = Callable[[Velocity], Velocity]
"""Transforms the velocity field before sampling (guidance, real-time chunking)."""


class Draws(NamedTuple):
    """N draws of flow noise and time per sample."""

    noise: Float[Array, "B N H A"]
    time: Float[Array, "B N"]
    counts: Float[Array, "B N H"] | None = None
    """Loss weight of each step, 1 on average; steps of weight 0 are given without noise."""

    @property
    def times(self) -> Float[Array, "B N *H"]:
        """One time per draw; with `counts` one per step, 0 (data) for given steps."""
        return self.time if self.counts is None else jnp.where(self.counts > 0, self.time[..., None], 0.0)


def draw(
    noise_key: Array,
    time_key: Array,
    actions: Float[Array, "B H A"],
    num: int = 1,
    times: FlowTimes = "beta",
    delay: int = 0,
) -> Draws:
    """`num` draws of noise and time per chunk; with `beta` times are denser near the noise end.

    `delay` > 0 trains for real-time chunking (arXiv 2512.05964): the first d steps of a chunk are given, with d uniform
    in 0, ..., `delay`.

    Beta(α, 1) is U^(1/α). jax.random.beta samples by rejection, in loops that make a GPU wait for its host.
    """
    batch, horizon, dim = actions.shape
    time = jax.random.uniform(time_key, (batch, num))
    if times == "beta":
        time = time ** (1 / 1.5) * 0.999 + 0.001
    noise = jax.random.normal(noise_key, (batch, num, horizon, dim))
    if not delay:
        return Draws(noise, time)
    given = jax.random.randint(jax.random.fold_in(time_key, 1), (batch, num, 1), 0, delay + 1)
    return Draws(noise, time, (jnp.arange(horizon) >= given) / (1 - delay / 2 / horizon))


def noise(keys: Key[Array, "B"], num: int, horizon: int, dim: int) -> Float[Array, "B N H A"]:
    """Initial noise for sampling. One key per row, so a row's chunks do not depend on the rest of the batch."""
    return jax.vmap(lambda key: jax.random.normal(key, (num, horizon, dim)))(keys)


def interpolate(
    actions: Float[Array, "B H A"], draws: Draws
) -> tuple[Float[Array, "B N H A"], Float[Array, "B N H A"]]:
    """The points x_t on the straight paths from noise to data, and their velocities u."""
    t = draws.times[..., None] if draws.counts is not None else draws.time[..., None, None]
    actions = actions[:, None]
    return t * draws.noise + (1 - t) * actions, draws.noise - actions


def squared_error(
    policy: FlowPolicy, params: Params, context: Any, actions: Float[Array, "B H A"], draws: Draws
) -> Float[Array, "B N H A"]:
    """(v - u)² for every draw, step and dimension: the flow-matching loss before any averaging."""
    x_t, u = interpolate(actions, draws)
    v = policy.velocity(params, context, x_t, draws.times)
    error = jnp.square(v.astype(jnp.float32) - u)
    return error if draws.counts is None else error * draws.counts[..., None]


def chunk_loss(
    error: Float[Array, "B N H A"],
    *,
    valid: Float[Array, "B H"] | None = None,
    dims: int | None = None,
) -> Float[Array, "B"]:
    """One loss per sample: the mean over draws, over steps inside the episode, and over the first `dims` dimensions.

    Without `valid` and `dims` this is OpenPI's loss, which averages over padding as well. A chunk without valid steps
    has loss 0.
    """
    error = error if dims is None else error[..., :dims]
    per_step = error.mean((1, 3))
    if valid is None:
        return per_step.mean(-1)
    return (per_step * valid).sum(-1) / jnp.maximum(valid.sum(-1), 1)


def euler(
    velocity: Velocity, noise: Float[Array, "B N H A"], num_steps: int | Int[Array, ""] = 10, *, unroll: bool = False
) -> Array:
    """Integrate from noise (t = 1) to chunks (t = 0) in equal steps; without `unroll`, `num_steps` may be traced."""
    dt = -1.0 / num_steps
    batch, num = noise.shape[:2]

    def step(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, t = carry
        v = velocity(x, jnp.broadcast_to(t, (batch, num)))
        return x + dt * v.astype(x.dtype), t + dt

    # Accumulate t as OpenPI does: at the shortest period of the time embedding one ulp of t matters.
    chunks, _ = jax.lax.fori_loop(0, num_steps, step, (noise, jnp.ones((), noise.dtype)), unroll=unroll)
    return chunks


def sample(
    policy: FlowPolicy,
    params: Params,
    context: Any,
    noise: Float[Array, "B N H A"],
    *,
    num_steps: int | Int[Array, ""] = 10,
    steer: Steer | None = None,
) -> Float[Array, "B N H A"]:
    """N chunks per observation from the given noise; deterministic."""
    unroll = isinstance(num_steps, int) and getattr(policy, "quick", False)
    velocity = field(policy, params, context)
    return euler(velocity if steer is None else steer(velocity), noise, num_steps, unroll=unroll)


def field(policy: FlowPolicy, params: Params, context: Any) -> Velocity:
    """The policy's velocity at a context, for repeated evaluation without gradients."""
    if isinstance(policy, Preparing):
        return policy.field(params, context)
    return lambda x, t: policy.velocity(params, context, x, t)


def guided(conditional: Velocity, unconditional: Velocity, scale: float | Float[Array, ""]) -> Velocity:
    """Classifier-free guidance v = v_unc + scale·(v_cond - v_unc): 1 is the conditional flow, more extrapolates."""

    def velocity(x: Array, t: Array) -> Array:
        base = unconditional(x, t)
        return base + scale * (conditional(x, t) - base)

    return velocity


def prefixed(velocity: Velocity, before: Float[Array, "B H A"], given: Int[Array, "B"]) -> Velocity:
    """The field of chunks whose first `given` steps equal those of `before`: training-time real-time chunking.

    For policies trained with `draw(delay=...)`. The policy sees the given steps without noise (t = 0); their own
    velocity leads straight from their noise to `before`.
    """
    target = before[:, None]

    def steered(x: Array, t: Array) -> Array:
        clean = jnp.broadcast_to(jnp.arange(x.shape[2]) < given[:, None, None], x.shape[:3])
        seen = jnp.where(clean[..., None], target, x)
        v = velocity(seen, jnp.where(clean, 0.0, t[..., None])).astype(x.dtype)
        return jnp.where(clean[..., None], (x - target) / t[..., None, None], v)

    return steered


def prefix_weights(frozen: Int[Array, "B"], overlap: Int[Array, "B"], horizon: int) -> Float[Array, "B H"]:
    """Weight of each step's agreement with the previous chunk (arXiv 2506.07339, eq. 5).

    1 for the first `frozen` steps, which will already be executed; then decaying to the end of the overlap; then 0.
    """
    step, end = jnp.arange(horizon), overlap[:, None]
    start = jnp.minimum(frozen[:, None], end)
    share = jnp.clip((end - step) / (end - start + 1), 0.0, 1.0)
    soft = share * jnp.expm1(share) / math.expm1(1)
    return jnp.where(step >= end, 0.0, jnp.where(step < start, 1.0, soft))


def continued(
    velocity: Velocity, before: Float[Array, "B H A"], weights: Float[Array, "B H"], limit: float = 5.0
) -> Velocity:
    """The field pulled towards agreement with the previous chunk `before`: real-time chunking (arXiv 2506.07339).

        v - min(limit, ((1-t)² + t²) / (t (1-t))) · (∂x̂/∂x)ᵀ [w · (before - x̂)],     x̂ = x - t v

    x̂ estimates the final chunk. (The paper's time runs from noise to data; ours from data to noise.)
    """
    target, weight = before[:, None], weights[:, None, :, None]

    def steered(x: Array, t: Array) -> Array:
        time = t[..., None, None]

        def heads_for(x: Array) -> tuple[Array, Array]:
            v = velocity(x, t)
            return x - time * v.astype(x.dtype), v

        estimate, pull_back, v = jax.vjp(heads_for, x, has_aux=True)
        (pull,) = pull_back(weight * (target - estimate))
        scale = jnp.minimum(limit, (jnp.square(1 - time) + jnp.square(time)) / (time * (1 - time)))
        return v.astype(x.dtype) - scale * pull

    return steered
