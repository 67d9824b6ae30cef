"""π₀ and π₀.₅: from pixels to the velocity of an action chunk, over OpenPI's parameter tree.

    encode    images -> SigLIP   ┐
              prompt -> embedder ┴-> VLM (Gemma, expert 0) -> per-layer keys and values     once per observation
    velocity  state, x_t, t -> action expert (Gemma, expert 1), attending to those -> dx/dt  once per Euler step

π₀ feeds the state as a token and mixes the time into the action tokens; π₀.₅ has the state in its prompt and feeds the
time through adaptive norms. Everything else is shared. `flow.py` builds the loss and the sampler from these two calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pirl.errors import ConfigError
from pirl.kernels import attention
from pirl.models import expert, gemma, preprocess, siglip
from pirl.models.config import Pi0Config
from pirl.models.observation import Observation
from pirl.models.params import Leaf, Params, initialize, lecun_normal, prefixed, shapes_of, zeros
from pirl.parallel.placement import by_sample

MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
"""Shortest and longest period of the flow time's embedding."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The encoded observation: what `velocity` and the critic read."""

    keys: Float[Array, "layers B P K h"]
    """Keys of the prefix in each layer, after RoPE."""
    values: Float[Array, "layers B P K h"]
    """Values of the prefix in each layer."""
    mask: Bool[Array, "B P"]
    """Which prefix tokens are real. With fused attention the real ones come first."""
    positions: Int[Array, "B P"]
    """Positions of the prefix tokens; padding does not advance them."""
    features: Float[Array, "B P W"]
    """Hidden states at `config.feature_layer`, with no gradient into the VLM."""
    state: Float[Array, "B S"]
    """Proprioception."""


@dataclass(frozen=True)
class Pi0:
    """The policy: a configuration and pure functions over a parameter tree."""

    config: Pi0Config

    def plain(self) -> "Pi0":
        """The same policy without rematerialisation and fused kernels."""
        return Pi0(replace(self.config, remat="none", attention="plain"))

    @property
    def horizon(self) -> int:
        """Actions per chunk."""
        return self.config.horizon

    @property
    def action_dim(self) -> int:
        """Size of a padded action."""
        return self.config.action_dim

    @property
    def condition_path(self) -> str:
        """The bias of the projection from noisy actions to tokens."""
        return "action_in_proj/bias"

    def init(self, key: Array) -> Params:
        """Fresh parameters, initialised as OpenPI does."""
        return initialize(declare(self.config), key)

    def prepare(self, observation: Observation, key: Array | None = None) -> Observation:
        """Scale and letterbox images; augment them if a key is given."""
        return preprocess.prepare(observation, size=self.config.image_size, cameras=self.config.cameras, key=key)

    def encode(self, params: Params, observation: Observation) -> Encoded:
        """Run SigLIP and the VLM once. Images may be raw (uint8, any size) or prepared."""
        config = self.config
        x, mask = embed_prefix(params, config, self.prepare(observation))
        if attention.kernel(config, config.vlm.head_dim) is not None:
            x, mask = attention.real_first(x, mask)
        # Padding does not advance positions, so a prefix without padding gives the same result.
        positions = jnp.cumsum(mask, axis=1) - 1
        prefix = gemma.encode_prefix(params["PaliGemma"]["llm"], config, x, mask, positions)
        return Encoded(
            keys=prefix.keys,
            values=prefix.values,
            mask=mask,
            positions=positions,
            features=prefix.features,
            state=jnp.asarray(observation.state),
        )

    def velocity(
        self, params: Params, context: Encoded, x_t: Float[Array, "B N H A"], t: Float[Array, "B N *H"]
    ) -> Float[Array, "B N H A"]:
        """dx/dt at N noisy chunks per observation; one `t` per chunk, or per step of a chunk."""
        suffix = run_expert(params, self.config, context, x_t, t)
        return _linear(params["action_out_proj"], suffix.out[:, :, -x_t.shape[2] :])

    def field(self, params: Params, context: Encoded) -> Callable[[Array, Array], Array]:
        """`velocity` at this context, for repeated evaluation: shared work runs once, here. Gradients are stopped."""
        config = self.config
        params, context = jax.lax.stop_gradient((params, context))
        llm = params["PaliGemma"]["llm"]
        layers = llm["expert"] if "expert" in llm else expert.pack(llm["layers"], config)
        prefix, first = (context.keys, context.values, context.mask), None
        if not config.pi05:
            token = _linear(params["state_proj"], context.state)[:, None, None]
            if "expert" in llm:
                first = expert.first_token(layers, config, token, *prefix)
            else:
                alone = gemma.run_suffix(llm, config, token.astype(config.dtype), *prefix, jnp.ones((1, 1), bool), None)
                first = alone.keys[:, :, 0], alone.values[:, :, 0]
        run = expert.prepared(layers, llm["final_norm_1"], config, *prefix, first)
        heads = params if config.pi05 else fold_heads(params)

        def velocity(x_t: Float[Array, "B N H A"], t: Float[Array, "B N *H"]) -> Float[Array, "B N H A"]:
            actions, cond = embed_actions(heads, config, x_t, t)
            return _linear(params["action_out_proj"], run(actions, cond))

        return velocity

    def for_inference(self, params: Params) -> Params:
        """The weights for `encode` and `field` only: one tree per layer, the expert's packed, cast to `dtype`.

        With stacked weights every call slices and casts each layer, which takes most of the time at small batches.
        """
        dtype, vision = jnp.dtype(self.config.dtype), params["PaliGemma"]["img"]
        llm = params["PaliGemma"]["llm"]
        blocks = vision["Transformer"] | {"encoderblock": expert.cut(vision["Transformer"]["encoderblock"], dtype)}
        llm = llm | {
            "layers": expert.cut(gemma.expert_layers(llm["layers"], 0), dtype),
            "expert": expert.pack(llm["layers"], self.config),
        }
        return params | {"PaliGemma": {"img": vision | {"Transformer": blocks}, "llm": llm}}


def declare(config: Pi0Config) -> dict[str, Leaf]:
    """Every parameter with OpenPI's name, shape and initialisation."""
    width, dim = config.expert.width, config.action_dim
    heads = {"action_in_proj": (dim, width), "action_out_proj": (width, dim)}
    if config.pi05:
        heads |= {"time_mlp_in": (width, width), "time_mlp_out": (width, width)}
    else:
        heads |= {
            "state_proj": (dim, width),
            "action_time_mlp_in": (2 * width, width),
            "action_time_mlp_out": (width, width),
        }
    leaves = prefixed(
        "PaliGemma/img",
        siglip.declare(config.vision, num_patches=config.tokens_per_image, out_width=config.vlm.width),
    )
    leaves |= prefixed("PaliGemma/llm", gemma.declare(config))
    for name, (fan_in, fan_out) in heads.items():
        leaves[f"{name}/kernel"] = Leaf((fan_in, fan_out), lecun_normal(fan_in))
        leaves[f"{name}/bias"] = Leaf((fan_out,), zeros)
    return leaves


def param_shapes(config: Pi0Config) -> Params:
    """The tree of shapes; nothing is allocated."""
    return shapes_of(declare(config))


def embed_prefix(
    params: Params, config: Pi0Config, observation: Observation
) -> tuple[Float[Array, "B P W"], Bool[Array, "B P"]]:
    """Prefix tokens (cameras in order, then the prompt) and the mask of real ones, from a prepared observation."""
    if not observation.images and observation.tokenized_prompt is None:
        raise ConfigError("an observation with neither pictures nor a prompt has no prefix to encode")
    dtype = jnp.dtype(config.dtype)
    tokens, masks = [], []
    if observation.images:
        # SigLIP sees each image alone, so all cameras go through it in one batch.
        stacked = jnp.stack(list(observation.images.values()), axis=1)
        batch, cameras = stacked.shape[:2]
        x = siglip.encode_images(params["PaliGemma"]["img"], config, stacked.reshape(-1, *stacked.shape[2:]))
        tokens.append(x.reshape(batch, -1, x.shape[-1]))
        present = jnp.stack([observation.image_masks[name] for name in observation.images], axis=1)
        masks.append(jnp.repeat(present, tokens[0].shape[1] // cameras, axis=1))
    if observation.tokenized_prompt is not None:
        tokens.append(gemma.embed_tokens(params["PaliGemma"]["llm"], jnp.asarray(observation.tokenized_prompt), dtype))
        masks.append(jnp.asarray(observation.tokenized_prompt_mask))
    return jnp.concatenate(tokens, axis=1).astype(dtype), jnp.concatenate(masks, axis=1)


def embed_suffix(
    params: Params,
    config: Pi0Config,
    state: Float[Array, "B S"],
    x_t: Float[Array, "B N H A"],
    t: Float[Array, "B N *H"],
) -> tuple[Float[Array, "B N T W"], Bool[Array, "T T"], Float[Array, "B N *H W"] | None]:
    """Suffix tokens, their attention mask, and the condition of the adaptive norms (π₀.₅ only)."""
    actions, cond = embed_actions(params, config, x_t, t)
    horizon = x_t.shape[2]
    if config.pi05:
        return actions, jnp.ones((horizon, horizon), bool), cond
    token = _linear(params["state_proj"], state)[:, None, None]
    x = jnp.concatenate([jnp.broadcast_to(token, (*actions.shape[:2], 1, token.shape[-1])), actions], axis=2)
    # The state's token attends only to itself (and the prefix), actions to everything.
    mask = jnp.ones((horizon + 1, horizon + 1), bool).at[0, 1:].set(False)
    return x, mask, None


def embed_actions(
    params: Params, config: Pi0Config, x_t: Float[Array, "B N H A"], t: Float[Array, "B N *H"]
) -> tuple[Float[Array, "B N H W"], Float[Array, "B N *H W"] | None]:
    """Tokens of the noisy actions, and the condition of the adaptive norms (π₀.₅ only)."""
    time = embed_time(t, config.expert.width)
    if config.pi05:
        cond = jax.nn.silu(_linear(params["time_mlp_in"], time))
        return _linear(params["action_in_proj"], x_t), jax.nn.silu(_linear(params["time_mlp_out"], cond))
    # OpenPI multiplies [actions, time] by one matrix. With one time per chunk its time half is the same at all steps.
    first, width = params["action_time_mlp_in"], config.expert.width
    hidden = _linear(params["action_in_proj"], x_t)
    if len(first["kernel"]) > width:
        hidden = by_sample(hidden @ first["kernel"][:-width])
    of_time = time @ first["kernel"][-width:] + first["bias"]
    hidden += of_time[:, :, None] if t.ndim == 2 else of_time
    return _linear(params["action_time_mlp_out"], jax.nn.silu(hidden)), None


def fold_heads(params: Params) -> Params:
    """Parameters for `embed_actions` with π₀'s first two matrices multiplied into one: both layers are linear.

    The second matrix keeps only its rows for the time.
    """
    into, first = params["action_in_proj"], params["action_time_mlp_in"]
    of_actions, of_time = jnp.split(first["kernel"], 2)
    rows = jnp.concatenate([into["kernel"], into["bias"][None]]).astype(jnp.float32)
    folded = jnp.dot(rows, of_actions.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return params | {
        "action_in_proj": {"kernel": folded[:-1], "bias": folded[-1]},
        "action_time_mlp_in": first | {"kernel": of_time},
    }


def run_expert(
    params: Params, config: Pi0Config, context: Encoded, x_t: Float[Array, "B N H A"], t: Float[Array, "B N *H"]
) -> gemma.Suffix:
    """The action expert's hidden states for N noisy chunks per observation."""
    x, mask, cond = embed_suffix(params, config, context.state, x_t, t)
    return gemma.run_suffix(
        params["PaliGemma"]["llm"],
        config,
        x.astype(jnp.dtype(config.dtype)),
        context.keys,
        context.values,
        context.mask,
        mask,
        cond,
    )


def embed_time(t: Float[Array, "B N *H"], width: int) -> Float[Array, "B N *H W"]:
    """Sines and cosines of the flow time. In float32, because at the shortest period one ulp of t matters."""
    fraction = jnp.linspace(0.0, 1.0, width // 2)
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
    angle = t.astype(jnp.float32)[..., None] * (1.0 / period * 2 * jnp.pi)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def _linear(params: Params, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
    """A dense layer with the usual type promotion, as in OpenPI: float32 weights or inputs give a float32 result."""
    return by_sample(x @ params["kernel"] + params["bias"])
