"""Critics: ensembles of Q(s, a_0 … a_{h-1}) on the features of a policy's `encode`.

    embed   state (and prefix features) -> their part of the first layer's input   once per observation
    score   N chunks -> their values                                               cheap, sharing the embedding

A critic may have further heads on the same embedding: Q_P(s, a_0 … a_{k-1}), which scores only the first k steps, and
V(s), the head with k = 0.

`PrefixCritic` reads π₀'s prefix, `MLPCritic` the state alone; from the first hidden layer on they are the same. Every
parameter has the ensemble's members on axis 0. Everything is float32, except hidden layers' matmuls where `dtype` says
otherwise. No gradient flows into the policy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pirl.errors import ConfigError
from pirl.models.critic_config import CriticConfig
from pirl.models.params import (
    Initializer,
    Leaf,
    Params,
    initialize,
    lecun_normal,
    normal,
    ones,
    prefixed,
    shapes_of,
    xavier_uniform,
    zeros,
)
from pirl.models.pi0 import Encoded


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CriticInputs:
    """Inputs of a critic."""

    state: Float[Array, "B S"]
    """Proprioception, normalised; may be padded on the right."""
    features: Float[Array, "B P W"] | None = None
    """Hidden states of the policy's prefix, of any scale and float type."""
    mask: Bool[Array, "B P"] | None = None
    """Which prefix tokens are real."""

    @classmethod
    def of(cls, context: Any) -> "CriticInputs":
        """From any policy's context: π₀'s `Encoded`, or the bare state that `MLPFlow` encodes to."""
        if isinstance(context, Encoded):
            return cls(state=context.state, features=context.features, mask=context.mask)
        return cls(state=context)


@dataclass(frozen=True, kw_only=True)
class Critic(ABC):
    """The contract of critics, and everything that does not depend on how they embed observations."""

    config: CriticConfig
    """Sizes."""
    state_dim: int
    """Number of real (leading) dimensions of the state."""
    real_action_dim: int
    """Number of real (leading) dimensions of an action. Padding carries no information and would cost parameters."""
    critic_horizon: int
    """Number of (leading) steps of a chunk that are scored."""
    heads: tuple[int, ...] = ()
    """Extra heads: the number of steps each scores. 0 is V(s)."""

    @abstractmethod
    def declare_embedding(self) -> dict[str, Leaf]:
        """Parameters of one member's embedding."""

    @abstractmethod
    def declare_layers(self, actions: int) -> dict[str, Leaf]:
        """One member's hidden layers and head, for a flattened chunk of `actions` numbers."""

    def declare_member(self) -> dict[str, Leaf]:
        """Every parameter of one member, without the ensemble axis."""
        leaves = self.declare_embedding() | self.declare_layers(self.critic_horizon * self.real_action_dim)
        for steps in self.heads:
            own = self.declare_layers(steps * self.real_action_dim)
            del own["layer_0/state"]  # part of the embedding, which all heads share
            leaves |= prefixed(_head_name(steps), own)
        return leaves

    @abstractmethod
    def embed_member(self, params: Params, inputs: CriticInputs) -> Float[Array, "B D"]:
        """One member's embedding."""

    def declare(self) -> dict[str, Leaf]:
        """Every parameter, members on axis 0."""
        size = self.config.num_critics
        return {path: Leaf((size, *leaf.shape), leaf.init) for path, leaf in self.declare_member().items()}

    def param_shapes(self) -> Params:
        """The tree of shapes; nothing is allocated."""
        return shapes_of(self.declare())

    def init(self, key: Array) -> Params:
        """Fresh parameters, different for each member."""
        return initialize(self.declare(), key)

    @jax.named_scope("critic")
    def embed(self, params: Params, inputs: CriticInputs) -> Float[Array, "E B D"]:
        """Compute everything that does not depend on actions, once per observation. Gradients stop at the inputs."""
        inputs = jax.lax.stop_gradient(inputs)
        return jax.vmap(lambda member: self.embed_member(member, inputs))(params)

    @jax.named_scope("critic")
    def score(
        self,
        params: Params,
        embedding: Float[Array, "E B D"],
        actions: Float[Array, "B N H A"],
        *,
        steps: int | None = None,
        key: Array | None = None,
    ) -> Float[Array, "E B N *bins"]:
        """Values of N chunks per observation: one number each, or logits over bins. A key turns dropout on.

        `steps` selects the head that scores that many steps. Chunks may be longer and wider than the head's input: only
        this method crops and clips, so data and sampled chunks are treated alike.
        """
        horizon, dim = self.critic_horizon if steps is None else steps, self.real_action_dim
        if actions.shape[2] < horizon or actions.shape[3] < dim:
            raise ConfigError(
                f"chunks of {actions.shape[2]} steps of {actions.shape[3]} dimensions came to the critic",
                hint=f"it scores {horizon} steps of {dim} dimensions; longer and wider chunks are cut, shorter are not",
            )
        actions = actions[:, :, :horizon, :dim].astype(jnp.float32)
        clipped = jnp.clip(actions, -self.config.action_clip, self.config.action_clip)
        flat = clipped.reshape(*actions.shape[:2], horizon * dim)

        dtype = jnp.dtype(self.config.dtype)
        params = params if steps is None else params[_head_name(steps)]
        params = jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 2 else x, params)

        def member(params: Params, embedding: Array, key: Array | None) -> Array:
            return _score(params, embedding, flat, key, self.config.dropout)

        # vmap over `None` works: it is an empty pytree.
        keys = None if key is None or self.config.dropout == 0 else jax.random.split(key, self.config.num_critics)
        out = jax.vmap(member)(params, embedding, keys)
        return out if self.config.loss == "hl_gauss" else out[..., 0]


@dataclass(frozen=True, kw_only=True)
class PrefixCritic(Critic):
    """Q on π₀'s prefix: learned queries pool its tokens, and the chunk enters every layer (D2RL, arXiv 2010.09163).

    Averaging all tokens would lose spatial information. A chunk that entered only the first layer would be dominated by
    the features, so that Q could not rank candidates.
    """

    feature_width: int
    """Size of a prefix token."""

    def declare_embedding(self) -> dict[str, Leaf]:
        """Pool and trunk."""
        c = self.config
        head_dim = c.pool_width // c.pool_heads
        project = Leaf((self.feature_width, c.pool_heads, head_dim), lecun_normal(self.feature_width))
        leaves = {
            "pool/query": Leaf((c.num_queries, c.pool_heads, head_dim), normal(1.0)),
            "pool/key": project,
            "pool/value": project,
        }
        sources = {"pooled": c.num_queries * c.pool_width, "state": self.state_dim}
        return leaves | prefixed("trunk", dense(sources, c.embedding_width))

    def declare_layers(self, actions: int) -> dict[str, Leaf]:
        """Hidden layers that all read the chunk, and the head."""
        c, chunk = self.config, {"action": actions} if actions else {}
        leaves: dict[str, Leaf] = {}
        name, width = "state", c.embedding_width
        for i, out in enumerate(c.hidden):
            leaves |= prefixed(f"layer_{i}", dense({name: width} | chunk, out))
            name, width = "hidden", out
        return leaves | _head(lecun_normal(width), width, c.outputs)

    def embed_member(self, params: Params, inputs: CriticInputs) -> Float[Array, "B D"]:
        """Pool the prefix, join the proprioception, and apply the state part of the first layer."""
        if inputs.features is None or inputs.mask is None:
            raise ConfigError(
                "a critic on the prefix was given no prefix features",
                hint="this policy has none to give: use the critic on the state (feature_width=None)",
            )
        pooled = pool(params["pool"], inputs.features, inputs.mask)
        sources = {"pooled": pooled, "state": inputs.state[:, : self.state_dim].astype(jnp.float32)}
        return activate(params["trunk"], mix(params["trunk"], sources)) @ params["layer_0"]["state"]


@dataclass(frozen=True, kw_only=True)
class MLPCritic(Critic):
    """Q-chunking's critic: an MLP over [s, a_0 … a_{h-1}] with LayerNorm after each activation."""

    def declare_embedding(self) -> dict[str, Leaf]:
        """Nothing: the first layer reads the state itself."""
        return {}

    def declare_layers(self, actions: int) -> dict[str, Leaf]:
        """Q-chunking's initialisation: uniform of variance 1/mean(fan_in, fan_out)."""
        sources = {"state": self.state_dim} | ({"action": actions} if actions else {})
        leaves: dict[str, Leaf] = {}
        for i, width in enumerate(self.config.hidden):
            # One matrix over the concatenated input, stored in two parts: its fan-in is the sum.
            init = xavier_uniform(sum(sources.values()), width)
            leaves |= prefixed(f"layer_{i}", dense(sources, width, init))
            sources = {"hidden": width}
        width, outputs = self.config.hidden[-1], self.config.outputs
        return leaves | _head(xavier_uniform(width, outputs), width, outputs)

    def embed_member(self, params: Params, inputs: CriticInputs) -> Float[Array, "B D"]:
        """The state part of the first layer."""
        return inputs.state[:, : self.state_dim].astype(jnp.float32) @ params["layer_0"]["state"]


def make_critic(
    config: CriticConfig, *, feature_width: int | None, state_dim: int, real_action_dim: int, critic_horizon: int
) -> Critic:
    """The critic for a policy: on its prefix features if it has any (`feature_width`), else on the state."""
    if feature_width is None:
        return MLPCritic(
            config=config, state_dim=state_dim, real_action_dim=real_action_dim, critic_horizon=critic_horizon
        )
    return PrefixCritic(
        config=config,
        feature_width=feature_width,
        state_dim=state_dim,
        real_action_dim=real_action_dim,
        critic_horizon=critic_horizon,
    )


def pool(params: Params, features: Float[Array, "B P W"], mask: Bool[Array, "B P"]) -> Float[Array, "B D"]:
    """Multi-head attention of learned queries over the real tokens; zeros for observations without any.

    Queries do not depend on the input, so per-token keys and values are unnecessary: project the query back through the
    key matrix, and average tokens before the value projection. The result is the same, with queries × heads instead of
    `pool_width` products per token and no stored keys or values.
    """
    # The scale of tokens depends on the VLM. No learned affine: the projections would absorb it.
    tokens = standardize(features.astype(jnp.float32), epsilon=1e-12)
    tokens = jnp.where(mask[..., None], tokens, 0.0)
    query = jnp.einsum("qkd,wkd->qkw", params["query"], params["key"]) * params["query"].shape[-1] ** -0.5
    scores = jnp.einsum("qkw,bpw->bqkp", query, tokens)
    real = mask[:, None, None]
    attention = jax.nn.softmax(jnp.where(real, scores, -1e30), axis=-1) * real
    summary = jnp.einsum("bqkp,bpw->bqkw", attention, tokens)
    values = jnp.einsum("bqkw,wkd->bqkd", summary, params["value"])
    batch, queries = values.shape[:2]
    # An average over many tokens is small; bring it to the scale of the proprioception.
    return standardize(values.reshape(batch, queries, -1)).reshape(batch, -1)


def _score(
    params: Params, embedding: Float[Array, "B D"], actions: Float[Array, "B N K"], key: Array | None, dropout: float
) -> Float[Array, "B N O"]:
    """Hidden layers and head of one member; `embedding` is the state part of the first layer's input."""

    def finish(i: int, z: Array) -> Array:
        if key is not None:
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - dropout, z.shape)
            z = jnp.where(kept, z / (1 - dropout), 0.0)
        return activate(params[f"layer_{i}"], z)

    first = params["layer_0"]
    x = embedding[:, None] + (_dot(actions, first["action"]) if "action" in first else 0.0) + first["bias"]
    x = finish(0, x)
    for i in range(1, sum(name.startswith("layer_") for name in params)):
        layer = params[f"layer_{i}"]
        x = finish(i, mix(layer, {"hidden": x} | ({"action": actions} if "action" in layer else {})))
    # Candidates are ranked by these values, so keep them in float32.
    return _dot(x, params["head"]["kernel"], exact=True) + params["head"]["bias"]


def _head_name(steps: int) -> str:
    return f"first_{steps}"


def dense(sources: Mapping[str, int], out: int, init: Initializer | None = None) -> dict[str, Leaf]:
    """A dense layer over several sources, and its LayerNorm. By default all sources start with equal variance."""
    leaves = {name: Leaf((fan, out), init or lecun_normal(fan * len(sources))) for name, fan in sources.items()}
    return leaves | {"bias": Leaf((out,), zeros), "scale": Leaf((out,), ones), "offset": Leaf((out,), zeros)}


def _head(init: Initializer, width: int, outputs: int) -> dict[str, Leaf]:
    return {"head/kernel": Leaf((width, outputs), init), "head/bias": Leaf((outputs,), zeros)}


def mix(layer: Params, sources: Mapping[str, Array]) -> Array:
    """The dense layer applied to the concatenation of its sources, without concatenating."""
    return sum((_dot(x, layer[name]) for name, x in sources.items()), start=layer["bias"])


def _dot(x: Float[Array, "... I"], kernel: Float[Array, "I O"], *, exact: bool = False) -> Float[Array, "... O"]:
    """x @ kernel in the kernel's dtype; `exact` returns float32."""
    return jnp.matmul(x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32 if exact else None)


def activate(layer: Params, z: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """GELU, then LayerNorm (Q-chunking's order)."""
    return standardize(jax.nn.gelu(z)) * layer["scale"] + layer["offset"]


def standardize(x: Float[Array, "... D"], epsilon: float = 1e-6) -> Float[Array, "... D"]:
    """Shift and scale to mean 0 and variance 1 over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
