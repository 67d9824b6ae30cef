"""The mapping between our parameters and OpenPI's PyTorch tensors, in both directions and at any size.

One leaf of ours is many tensors of theirs: layers are stacked here and numbered there, and PyTorch separates key and
value (gate and up). So every tensor is an index into one of our leaves plus a rearrangement of axes, written as
`"n d h -> (n h) d"`, which suffices for both directions, for arrays and for shapes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pirl.errors import CheckpointError, listing

_PALIGEMMA = "paligemma_with_expert.paligemma."
_EXPERT = "paligemma_with_expert.gemma_expert."
_VISION = _PALIGEMMA + "model.vision_tower.vision_model."
_LANGUAGE = _PALIGEMMA + "model.language_model."

LM_HEAD = _PALIGEMMA + "lm_head.weight"
"""Tied to the token embedding. A file has only one of the two names (this one if PyTorch wrote it); OpenPI's strict
loader rejects a file with both."""
EMBED_TOKENS = _LANGUAGE + "embed_tokens.weight"
"""The token embedding's other name."""
EXPERT_LM_HEAD = _EXPERT + "lm_head.weight"
"""Unused part of the PyTorch module: the action expert predicts no words. We have no such parameter."""

_KEPT_FLOAT32 = (
    "embeddings.patch_embedding",
    "embeddings.position_embedding",
    "input_layernorm",
    "post_attention_layernorm",
    "model.norm",
)


@dataclass(frozen=True)
class _Rule:
    """PyTorch name of one of our leaves. `{}` is the layer; several names split the next axis between them."""

    names: tuple[str, ...]
    pattern: str
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class TorchTensor:
    """One tensor of the PyTorch state dict, as a part of one of our leaves."""

    name: str
    """Its name in the state dict."""
    shape: tuple[int, ...]
    """Its shape in the state dict."""
    path: str
    """Path of our leaf, "/"-joined."""
    index: tuple[int, ...]
    """Index into our leaf: (), (layer,) or (layer, part)."""
    pattern: str
    """Rearrangement of the part's axes to the tensor's."""

    def to_torch(self, part: np.ndarray) -> np.ndarray:
        """Rearrange our part of the leaf to PyTorch's layout."""
        return part.transpose(_order(self.pattern)).reshape(self.shape)

    def from_torch(self, tensor: np.ndarray, part_shape: tuple[int, ...]) -> np.ndarray:
        """Inverse of `to_torch`; `part_shape` gives the sizes of merged axes (heads)."""
        order = _order(self.pattern)
        return tensor.reshape([part_shape[axis] for axis in order]).transpose(np.argsort(order))


def model_dtype(name: str) -> str:
    """A tensor's dtype in OpenPI's PyTorch model.

    bfloat16, except for what is summed or squared in float32 anyway (patch and position embedding, RMS norms) and for
    the state and action heads, which are outside the transformer.
    """
    inside = name.startswith("paligemma_with_expert.")
    return "bfloat16" if inside and not any(kept in name for kept in _KEPT_FLOAT32) else "float32"


def torch_tensors(shapes: Mapping[str, tuple[int, ...]]) -> list[TorchTensor]:
    """Every PyTorch tensor of a tree given as path -> shape."""
    unknown = sorted(set(shapes) - set(_RULES))
    if unknown:
        lora = any("lora" in path for path in unknown)
        raise CheckpointError(
            f"{len(unknown)} parameters have no place in OpenPI's PyTorch model:\n{listing(unknown)}",
            hint="merge the adapters into the weights first: pirl.checkpoints.pytorch.merge_lora"
            if lora
            else "only π₀ and π₀.₅ trees can be written as PyTorch weights",
        )
    return [tensor for path, shape in shapes.items() for tensor in _tensors_of(path, shape)]


def expert_lm_head_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Shape of the expert's unused output head: vocabulary × expert width."""
    vocabulary = shapes["PaliGemma/llm/embedder/input_embedding"][0]
    return vocabulary, shapes["PaliGemma/llm/layers/attn/q_einsum_1/w"][-2]


def _tensors_of(path: str, shape: tuple[int, ...]) -> Iterator[TorchTensor]:
    rule = _RULES[path]
    for layer in range(shape[0]) if rule.stacked else (None,):
        for part, name in enumerate(rule.names):
            index = (() if layer is None else (layer,)) + ((part,) if len(rule.names) > 1 else ())
            yield TorchTensor(
                name=name.format(layer),
                shape=_merged(rule.pattern, shape[len(index) :]),
                path=path,
                index=index,
                pattern=rule.pattern,
            )


def _groups(pattern: str) -> list[list[str]]:
    """The right side of a pattern: "(n h) d" -> [[n, h], [d]]."""
    groups: list[list[str]] = []
    inside = False
    for token in pattern.split("->")[1].replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            groups.append([])
            inside = True
        elif token == ")":
            inside = False
        elif inside:
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


def _order(pattern: str) -> list[int]:
    """The permutation of our axes that a pattern makes."""
    ours = pattern.split("->")[0].split()
    return [ours.index(axis) for group in _groups(pattern) for axis in group]


def _merged(pattern: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The tensor's shape for a part of shape `shape`."""
    ours = pattern.split("->")[0].split()
    if len(ours) != len(shape):
        raise CheckpointError(f"found a parameter of shape {list(shape)}, expected axes ({', '.join(ours)})")
    size = dict(zip(ours, shape, strict=True))
    return tuple(math.prod(size[axis] for axis in group) for group in _groups(pattern))


def _linear(prefix: str, name: str, *, stacked: bool = False) -> dict[str, _Rule]:
    """A dense layer: kernels are (in, out) here and (out, in) there."""
    return {
        f"{prefix}/kernel": _Rule((f"{name}.weight",), "i o -> o i", stacked),
        f"{prefix}/bias": _Rule((f"{name}.bias",), "o -> o", stacked),
    }


def _norm(prefix: str, name: str, *, stacked: bool = False) -> dict[str, _Rule]:
    """A layer norm."""
    return {
        f"{prefix}/scale": _Rule((f"{name}.weight",), "d -> d", stacked),
        f"{prefix}/bias": _Rule((f"{name}.bias",), "d -> d", stacked),
    }


def _vision() -> dict[str, _Rule]:
    block, layer = "PaliGemma/img/Transformer/encoderblock", _VISION + "encoder.layers.{}."
    attention = f"{block}/MultiHeadDotProductAttention_0"
    rules = {
        "PaliGemma/img/embedding/kernel": _Rule((_VISION + "embeddings.patch_embedding.weight",), "h w i o -> o i h w"),
        "PaliGemma/img/embedding/bias": _Rule((_VISION + "embeddings.patch_embedding.bias",), "o -> o"),
        "PaliGemma/img/pos_embedding": _Rule((_VISION + "embeddings.position_embedding.weight",), "b p d -> (b p) d"),
        f"{attention}/out/kernel": _Rule((layer + "self_attn.out_proj.weight",), "n h d -> d (n h)", True),
        f"{attention}/out/bias": _Rule((layer + "self_attn.out_proj.bias",), "d -> d", True),
    }
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        rules[f"{attention}/{ours}/kernel"] = _Rule((f"{layer}self_attn.{theirs}.weight",), "d n h -> (n h) d", True)
        rules[f"{attention}/{ours}/bias"] = _Rule((f"{layer}self_attn.{theirs}.bias",), "n h -> (n h)", True)
    for i in (0, 1):
        rules |= _norm(f"{block}/LayerNorm_{i}", f"{layer}layer_norm{i + 1}", stacked=True)
        rules |= _linear(f"{block}/MlpBlock_0/Dense_{i}", f"{layer}mlp.fc{i + 1}", stacked=True)
    rules |= _norm("PaliGemma/img/Transformer/encoder_norm", _VISION + "post_layernorm")
    return rules | _linear("PaliGemma/img/head", _PALIGEMMA + "model.multi_modal_projector.linear")


def _gemma(suffix: str, model: str) -> dict[str, _Rule]:
    """One Gemma; modules of our second one have the suffix "_1". Norms are plain (π₀) or adaptive (π₀.₅)."""
    block, layer = "PaliGemma/llm/layers", model + "layers.{}."
    attention, mlp = f"{block}/attn", f"{block}/mlp{suffix}"
    key_value = (layer + "self_attn.k_proj.weight", layer + "self_attn.v_proj.weight")
    gate_up = (layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight")
    rules = {
        f"{attention}/q_einsum{suffix}/w": _Rule((layer + "self_attn.q_proj.weight",), "n d h -> (n h) d", True),
        f"{attention}/kv_einsum{suffix}/w": _Rule(key_value, "k d h -> (k h) d", True),
        f"{attention}/attn_vec_einsum{suffix}/w": _Rule((layer + "self_attn.o_proj.weight",), "n h d -> d (n h)", True),
        f"{mlp}/gating_einsum": _Rule(gate_up, "d f -> f d", True),
        f"{mlp}/linear": _Rule((layer + "mlp.down_proj.weight",), "f d -> d f", True),
    }
    for ours, theirs, stacked in (
        (f"{block}/pre_attention_norm{suffix}", layer + "input_layernorm", True),
        (f"{block}/pre_ffw_norm{suffix}", layer + "post_attention_layernorm", True),
        (f"PaliGemma/llm/final_norm{suffix}", model + "norm", False),
    ):
        rules[f"{ours}/scale"] = _Rule((f"{theirs}.weight",), "d -> d", stacked)
        rules |= _linear(f"{ours}/Dense_0", f"{theirs}.dense", stacked=stacked)
    return rules


_HEADS = (
    "state_proj",
    "action_in_proj",
    "action_out_proj",
    "action_time_mlp_in",
    "action_time_mlp_out",
    "time_mlp_in",
    "time_mlp_out",
)

_RULES: dict[str, _Rule] = {
    **_vision(),
    "PaliGemma/llm/embedder/input_embedding": _Rule((EMBED_TOKENS,), "v d -> v d"),
    **_gemma("", _LANGUAGE),
    **_gemma("_1", _EXPERT + "model."),
    **{path: rule for head in _HEADS for path, rule in _linear(head, head).items()},
}
