"""A small actor on a frozen policy: from a critic's embedding to outputs for every action of a chunk.

    token   the critics' concatenated embeddings of π₀'s prefix, or of the state
    actor   token, proprioception (and a chunk) -> len(start) numbers for each step and dimension of a chunk

Only the critic's loss trains the embedding (as in DrQ, arXiv 2004.13649): the actor's gradient stops at the token.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pirl.models.critic import Critic, CriticInputs, activate, dense, mix, standardize
from pirl.models.params import Initializer, Leaf, Params, initialize, prefixed, shapes_of, zeros


def read_token(critic: Critic, params: Params, inputs: CriticInputs) -> Float[Array, "B T"]:
    """All members' embeddings, concatenated and standardized; gradients are stopped."""
    embedding = jax.lax.stop_gradient(critic.embed(params, inputs))
    return standardize(embedding.swapaxes(0, 1).reshape(embedding.shape[1], -1))


@dataclass(frozen=True, kw_only=True)
class ChunkActor:
    """An MLP whose head starts as a constant, so an untrained actor outputs `start` for every observation."""

    hidden: tuple[int, ...]
    """Widths of the hidden layers."""
    token_dim: int
    """Size of the token."""
    state_dim: int
    """Number of real (leading) dimensions of the state."""
    horizon: int
    """Number of (leading) steps of the chunk it outputs and reads."""
    action_dim: int
    """Number of (leading) action dimensions it outputs and reads."""
    start: tuple[float, ...] = (0.0,)
    """Outputs for every action before training; its length is the number of outputs."""
    reads_chunk: bool = False
    """Whether a chunk enters every layer."""

    @classmethod
    def reading(cls, critic: Critic, **sizes: Any) -> "ChunkActor":
        """An actor sized for this critic's token."""
        token = critic.config.num_critics * critic.config.hidden[0]
        return cls(token_dim=token, state_dim=critic.state_dim, **sizes)

    def declare(self) -> dict[str, Leaf]:
        """Every parameter."""
        chunk = {"action": self.horizon * self.action_dim} if self.reads_chunk else {}
        sources = {"token": self.token_dim, "state": self.state_dim}
        leaves: dict[str, Leaf] = {}
        for i, width in enumerate(self.hidden):
            leaves |= prefixed(f"layer_{i}", dense(sources | chunk, width))
            sources = {"hidden": width}
        outputs = self.horizon * self.action_dim * len(self.start)
        return leaves | {
            "head/kernel": Leaf((self.hidden[-1], outputs), zeros),
            "head/bias": Leaf((outputs,), _repeated(self.start)),
        }

    def param_shapes(self) -> Params:
        """The tree of shapes; nothing is allocated."""
        return shapes_of(self.declare())

    def init(self, key: Array) -> Params:
        """Fresh parameters."""
        return initialize(self.declare(), key)

    @jax.named_scope("actor")
    def __call__(
        self,
        params: Params,
        token: Float[Array, "B T"],
        state: Float[Array, "B S"],
        chunks: Float[Array, "B N H A"] | None = None,
    ) -> Float[Array, "B N h a O"]:
        """Outputs for N chunks per observation; N = 1 without chunks."""
        batch, count = (len(token), 1) if chunks is None else chunks.shape[:2]
        known = {"token": token, "state": state[:, : self.state_dim].astype(jnp.float32)}
        sources = {name: jnp.broadcast_to(x[:, None], (batch, count, x.shape[-1])) for name, x in known.items()}
        chunk: dict[str, Array] = {}
        if chunks is not None:
            chunk = {"action": chunks[:, :, : self.horizon, : self.action_dim].reshape(batch, count, -1)}
        for i in range(len(self.hidden)):
            layer = params[f"layer_{i}"]
            sources = {"hidden": activate(layer, mix(layer, sources | chunk))}
        out = sources["hidden"] @ params["head"]["kernel"] + params["head"]["bias"]
        return out.reshape(batch, count, self.horizon, self.action_dim, len(self.start))


def _repeated(values: tuple[float, ...]) -> Initializer:
    """An initializer that repeats `values` for every action."""
    return lambda key, shape: jnp.tile(jnp.float32(values), shape[0] // len(values))
