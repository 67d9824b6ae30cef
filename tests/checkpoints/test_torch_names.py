"""Names, shapes and types of OpenPI's PyTorch model, and that its layers compute what ours do."""

import json
from pathlib import Path

import numpy as np
import pytest

from pirl.checkpoints.pytorch import state_dict_layout
from pirl.checkpoints.torch_names import torch_tensors
from pirl.errors import CheckpointError

STATIC = Path(__file__).parents[1] / "golden" / "static"


def static_shapes(variant: str) -> dict[str, tuple[int, ...]]:
    tree = json.loads((STATIC / f"param_tree_{variant}.json").read_text())
    return {path: tuple(leaf["shape"]) for path, leaf in tree.items()}


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_state_dict_of_the_full_model(variant: str) -> None:
    recorded = json.loads((STATIC / f"torch_state_dict_{variant}.json").read_text())
    expected = {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in recorded.items()}
    layout = state_dict_layout(static_shapes(variant))
    assert {name: (dtype.name, shape) for name, (dtype, shape) in layout.items()} == expected


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_every_value_of_a_leaf_goes_to_exactly_one_tensor(variant: str) -> None:
    shapes = static_shapes(variant)
    tensors = torch_tensors(shapes)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    for path, shape in shapes.items():
        parts = [t for t in tensors if t.path == path]
        assert len({t.index for t in parts}) == len(parts)
        assert sum(np.prod(t.shape, dtype=np.int64) for t in parts) == np.prod(shape, dtype=np.int64)


def torch_layer(path: str, leaf: np.ndarray) -> dict[str, np.ndarray]:
    """Last two parts of the name -> tensor, of layer 1 of a leaf; checks that the way back is exact."""
    back = np.full_like(leaf, np.nan)
    layer = {}
    for tensor in torch_tensors({path: leaf.shape}):
        value = tensor.to_torch(leaf[tensor.index])
        assert value.shape == tensor.shape
        back[tensor.index] = tensor.from_torch(value, leaf.shape[len(tensor.index) :])
        if tensor.index[0] == 1:
            layer[".".join(tensor.name.split(".")[-2:])] = value
    np.testing.assert_array_equal(back, leaf)
    return layer


def test_attention_projections_compute_the_same() -> None:
    random = np.random.default_rng(0)
    heads, kv_heads, width, head_dim = 4, 2, 6, 3
    x = random.normal(size=(5, width))
    attn = "PaliGemma/llm/layers/attn"

    q = random.normal(size=(2, heads, width, head_dim))
    ours = np.einsum("td,ndh->tnh", x, q[1])
    weight = torch_layer(f"{attn}/q_einsum/w", q)["q_proj.weight"]
    np.testing.assert_allclose((x @ weight.T).reshape(5, heads, head_dim), ours)

    kv = random.normal(size=(2, 2, kv_heads, width, head_dim))
    layer = torch_layer(f"{attn}/kv_einsum_1/w", kv)
    keys, values = np.einsum("sd,ckdh->cskh", x, kv[1])
    np.testing.assert_allclose((x @ layer["k_proj.weight"].T).reshape(5, kv_heads, head_dim), keys)
    np.testing.assert_allclose((x @ layer["v_proj.weight"].T).reshape(5, kv_heads, head_dim), values)

    out = random.normal(size=(2, heads, head_dim, width))
    mixed = random.normal(size=(5, heads, head_dim))
    weight = torch_layer(f"{attn}/attn_vec_einsum/w", out)["o_proj.weight"]
    np.testing.assert_allclose(mixed.reshape(5, -1) @ weight.T, np.einsum("tnh,nhd->td", mixed, out[1]))


def test_vision_attention_and_feed_forward_compute_the_same() -> None:
    random = np.random.default_rng(1)
    heads, width, head_dim, inner = 2, 6, 3, 5
    x = random.normal(size=(4, width))
    attention = "PaliGemma/img/Transformer/encoderblock/MultiHeadDotProductAttention_0"

    kernel, bias = random.normal(size=(2, width, heads, head_dim)), random.normal(size=(2, heads, head_dim))
    weight = torch_layer(f"{attention}/value/kernel", kernel)["v_proj.weight"]
    offset = torch_layer(f"{attention}/value/bias", bias)["v_proj.bias"]
    ours = np.einsum("td,dnh->tnh", x, kernel[1]) + bias[1]
    np.testing.assert_allclose((x @ weight.T + offset).reshape(4, heads, head_dim), ours)

    gating = random.normal(size=(2, 2, width, inner))
    layer = torch_layer("PaliGemma/llm/layers/mlp_1/gating_einsum", gating)
    np.testing.assert_allclose(x @ layer["gate_proj.weight"].T, x @ gating[1, 0])
    np.testing.assert_allclose(x @ layer["up_proj.weight"].T, x @ gating[1, 1])


def test_the_patch_embedding_is_a_convolution_in_torch_order() -> None:
    kernel = np.random.default_rng(2).normal(size=(3, 2, 4, 5))  # height, width, in, out
    (tensor,) = torch_tensors({"PaliGemma/img/embedding/kernel": kernel.shape})
    weight = tensor.to_torch(kernel)
    assert weight.shape == (5, 4, 3, 2)
    assert weight[4, 3, 2, 1] == kernel[2, 1, 3, 4]


def test_adapters_and_foreign_leaves_are_refused() -> None:
    with pytest.raises(CheckpointError, match="merge_lora"):
        torch_tensors(static_shapes("pi0_lora_both"))
    with pytest.raises(CheckpointError, match="critic/kernel"):
        torch_tensors({"critic/kernel": (2, 2)})
    with pytest.raises(CheckpointError, match=r"found a parameter of shape \[3\]"):
        torch_tensors({"PaliGemma/img/head/kernel": (3,)})
