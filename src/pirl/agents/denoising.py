"""Sampling a flow as a chain of Gaussian steps with exact densities (πRL, arXiv 2510.25889).

    Flow-SDE     x' = x - δ v - σ² δ/(2t) x̂₁ + σ √δ ε,   σ = a √(t / (1-t)),   x̂₁ = x + (1-t) v
    Flow-Noise   x' = x - δ v + σ_θ(x, t, s) ε
    density      log p(x'|x) = Σ -(x' - μ)²/(2σ²) - log σ - ½ log 2π

Time runs from t = 1 (noise) to t = 0 (the chunk) in steps of δ. Flow-SDE compensates its noise by a drift: -x̂₁/t is
the score of the marginal at t, so for small δ the distribution of chunks does not depend on the level a. It is used at
one random step of a plan; the others follow the ODE. Flow-Noise adds noise of learned scale at every step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from pirl.models import flow
from pirl.models.critic import CriticInputs
from pirl.models.noise_head import NoiseHead
from pirl.models.params import Params
from pirl.models.policy import FlowPolicy

LOG_2PI = math.log(2 * math.pi)


def times(steps: int) -> Float[np.ndarray, "F"]:
    """Start times of the steps, accumulated in float32 exactly as in `flow.euler`."""
    found, delta = np.ones(steps, np.float32), np.float32(-1 / steps)
    for i in range(1, steps):
        found[i] = found[i - 1] + delta
    return found


def sigma(t: Float[Array, "*B"], delta: float, level: float) -> Float[Array, "*B"]:
    """a √(t / (1-t)). Infinite at t = 1, so the first step uses 1 - t of the second one.

    The first step therefore has σ²δ = a² for any δ and increases the variance by a⁴/4: keep a below 1.
    """
    return level * jnp.sqrt(t / (1 - jnp.minimum(t, 1 - delta)))


def ode_mean(x: Float[Array, "B N H A"], v: Float[Array, "B N H A"], delta: float) -> Float[Array, "B N H A"]:
    """x - δ v: the result of an ODE step, and the mean of a Flow-Noise step."""
    return x - delta * v


def sde_step(
    x: Float[Array, "B N H A"], v: Float[Array, "B N H A"], t: Float[Array, "B N"], delta: float, level: float
) -> tuple[Float[Array, "B N H A"], Float[Array, "B N 1 1"]]:
    """(mean, standard deviation) of a Flow-SDE step."""
    time = t[..., None, None]
    noise = sigma(time, delta, level)
    end = x + (1 - time) * v
    return ode_mean(x, v, delta) - jnp.square(noise) * delta / (2 * time) * end, noise * math.sqrt(delta)


def log_density(x: Float[Array, "*B"], mean: Float[Array, "*B"], std: Float[Array, "*S"]) -> Float[Array, "*B"]:
    """Elementwise log density of a Gaussian."""
    return -0.5 * jnp.square((x - mean) / std) - jnp.log(std) - 0.5 * LOG_2PI


def divergence(
    mean: Float[Array, "*B"], std: Float[Array, "*S"], mean_old: Float[Array, "*B"], std_old: Float[Array, "*S"]
) -> Float[Array, "*B"]:
    """Elementwise KL(old ‖ new) of two Gaussians."""
    spread = jnp.square(std_old / std)
    return 0.5 * (spread - 1 - jnp.log(spread) + jnp.square((mean - mean_old) / std))


def entropy(std: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Elementwise entropy of a Gaussian."""
    return jnp.log(std) + 0.5 * (1 + LOG_2PI)


# Paths


class Gaussians(NamedTuple):
    """The random steps of a batch of paths, S per path."""

    mean: Float[Array, "B S H A"]
    std: Float[Array, "B S *chunk"]


class Path(NamedTuple):
    """The random part of a denoising path."""

    points: Float[Array, "B M H A"]
    """Start and end points of its steps: M = S + 1."""
    first: Int[Array, "B"]
    """Index of its first step."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples chunks along random paths, and evaluates the densities of given paths."""

    policy: FlowPolicy
    flow_steps: int
    """F: steps from noise to a chunk."""
    level: float
    """a of Flow-SDE."""
    head: NoiseHead | None
    """The noise scale of Flow-Noise; None selects Flow-SDE."""

    @property
    def random_steps(self) -> int:
        """S: number of random steps per path."""
        return 1 if self.head is None else self.flow_steps

    def sample(
        self, params: Mapping[str, Params], context: Any, keys: Key[Array, "B"]
    ) -> tuple[Float[Array, "B H A"], Path]:
        """(chunks, paths), each row from its own key."""
        inputs = CriticInputs.of(context)
        velocity = flow.field(self.policy, params["policy"], context)
        starts, walks, picks = jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, 3))(keys), 1, 0)
        begin = flow.noise(starts, 1, self.policy.horizon, self.policy.action_dim)
        first = jax.vmap(lambda key: jax.random.randint(key, (), 0, self.flow_steps))(picks)

        def advance(x: Array, number: Array) -> tuple[Array, Array]:
            t = jnp.broadcast_to(jnp.asarray(times(self.flow_steps))[number], x.shape[:2])
            v = velocity(x, t).astype(x.dtype)
            drawn = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, number), x.shape[1:]))(walks)
            step = self._step(params, inputs, x, t, v)
            after = step.mean + step.std * drawn
            if self.head is None:
                here = (first == number)[:, None, None, None]
                after = jnp.where(here, after, ode_mean(x, v, 1 / self.flow_steps))
            return after, after

        chunks, rest = jax.lax.scan(advance, begin, jnp.arange(self.flow_steps))
        points = jnp.moveaxis(jnp.concatenate([begin[None], rest])[:, :, 0], 0, 1)
        if self.head is not None:
            return chunks[:, 0], Path(points, jnp.zeros_like(first))
        around = first[:, None] + jnp.arange(2)
        return chunks[:, 0], Path(jnp.take_along_axis(points, around[:, :, None, None], 1), first)

    def steps(self, params: Mapping[str, Params], context: Any, path: Path) -> Gaussians:
        """Distributions of the random steps of given paths, under these weights."""
        x, numbers = path.points[:, :-1], path.first[:, None] + jnp.arange(self.random_steps)
        t = jnp.asarray(times(self.flow_steps))[numbers]
        v = self.policy.velocity(params["policy"], context, x, t).astype(jnp.float32)
        return self._step(params, CriticInputs.of(context), x, t, v)

    def _step(
        self,
        params: Mapping[str, Params],
        inputs: CriticInputs,
        x: Float[Array, "B N H A"],
        t: Float[Array, "B N"],
        v: Float[Array, "B N H A"],
    ) -> Gaussians:
        delta = 1 / self.flow_steps
        if self.head is None:
            return Gaussians(*sde_step(x, v, t, delta, self.level))
        return Gaussians(ode_mean(x, v, delta), self.head.std(params["noise"], inputs, x, t))
