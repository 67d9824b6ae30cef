"""Faster programs are the same model: fused attention, the prepared expert, layers apart, the last layer left out."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.errors import ConfigError
from pirl.kernels import attention, gated
from pirl.kernels.remat import FUSED_FORWARD
from pirl.models import flow, gemma
from pirl.models.config import Pi0Config
from pirl.models.observation import Observation
from pirl.models.params import flatten
from pirl.models.pi0 import Pi0, param_shapes
from pirl.models.policy import Preparing
from small_pi0 import BATCH, CONFIGS, EXPERT, HALF, NUM, SMALL, VLM, observation, points, weights


@pytest.mark.parametrize("name", CONFIGS)
def test_every_program_gives_the_same_velocity(name: str) -> None:
    """The plain velocity against the prepared one: plain and fused, one candidate and several, stacked and apart."""
    config = CONFIGS[name]
    assert isinstance(Pi0(config), Preparing)

    @jax.jit
    def velocities(params: Any, seen: Observation) -> tuple[list, list]:
        expected, found = [], []
        for num in (1, NUM):
            plain, fused = (Pi0(replace(config, attention=how)) for how in ("plain", "xla"))
            x_t, t = points(config, num)
            context = plain.encode(params, seen)
            expected.append(plain.velocity(params, context, x_t, t))
            found += [plain.field(params, context)(x_t, t), fused.velocity(params, fused.encode(params, seen), x_t, t)]
            served = fused.for_inference(params)
            found.append(fused.field(served, fused.encode(served, seen))(x_t, t))
        return expected, found

    expected, found = velocities(weights(config), observation(config))
    assert np.abs(expected[1]).max() > 0.5
    for index, values in enumerate(found):
        np.testing.assert_allclose(values, expected[index // 3], rtol=0, atol=2e-5, err_msg=str(index))


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_one_observation_is_answered_as_one_of_several(name: str) -> None:
    """Alone, the state's token or the condition is a single row, multiplied as several that are the same."""
    config = CONFIGS[name]
    policy = Pi0(config)
    x_t, t = points(config, 1)

    @jax.jit
    def velocity(params: Any, seen: Observation, x_t: Any, t: Any) -> jax.Array:
        served = policy.for_inference(params)
        return policy.field(served, policy.encode(served, seen))(x_t, t)

    params, seen = weights(config), observation(config)
    expected = velocity(params, seen, x_t, t)
    for row in range(BATCH):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], (seen, x_t, t))
        np.testing.assert_allclose(velocity(params, *one), expected[row : row + 1], rtol=0, atol=2e-5)


def gradient(config: Pi0Config) -> dict[str, jax.Array]:
    policy, seen = Pi0(config), observation(config)
    actions = points(config, 1)[0][:, 0]
    draws = flow.draw(jax.random.key(0), jax.random.key(1), actions, 2)

    def loss(params: Any) -> jax.Array:
        return flow.chunk_loss(flow.squared_error(policy, params, policy.encode(params, seen), actions, draws)).mean()

    return flatten(jax.jit(jax.grad(loss))(weights(config)))


def test_gradients_of_fused_attention_and_of_a_layer_left_out() -> None:
    """The last layer's dead half is taken out of the loop (remat none) or skipped in it (names): the same numbers."""
    plain = gradient(replace(SMALL, attention="plain"))
    for path in ("attn/q_einsum/w", "attn/attn_vec_einsum/w", "mlp/linear", "pre_ffw_norm/scale"):
        leaf = plain[f"PaliGemma/llm/layers/{path}"]
        assert not np.any(leaf[-1])
        assert np.any(leaf[-2])
    assert np.any(plain["PaliGemma/llm/layers/attn/kv_einsum/w"][-1])
    for path, value in gradient(replace(SMALL, attention="xla", remat="names")).items():
        np.testing.assert_allclose(value, plain[path], rtol=2e-4, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("tile", [1, 16])
def test_a_single_sequence_attends_as_one_of_several(tile: int) -> None:
    """Its keys lie in one array with the shared ones, padded: by hand, and as the first of two."""
    rng = np.random.default_rng(3)
    batch, own, shared, heads, kv_heads, dim = 2, 3, 5, 4, 2, 8

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, k, v = draw(batch, 2, own, heads, dim), draw(batch, 2, own, kv_heads, dim), draw(batch, 2, own, kv_heads, dim)
    shared_k, shared_v = draw(batch, shared, kv_heads, dim), draw(batch, shared, kv_heads, dim)
    real = jnp.asarray([[True] * 5, [True, True, False, True, False]])
    allowed = jnp.asarray([[True, False, False], [True, True, True], [True, True, True]])
    both = gemma.joint_attention(q, k, v, shared_k, shared_v, real, allowed, tile)
    first = gemma.joint_attention(q[:, :1], k[:, :1], v[:, :1], shared_k, shared_v, real, allowed, tile)
    np.testing.assert_allclose(first, both[:, :1], rtol=1e-5, atol=1e-6)
    for sample, query, head in np.ndindex(batch, own, heads):
        group = head // (heads // kv_heads)
        keys = np.concatenate([shared_k[sample, :, group], k[sample, 0, :, group]])
        values = np.concatenate([shared_v[sample, :, group], v[sample, 0, :, group]])
        seen = np.concatenate([real[sample], allowed[query]])
        weight = np.where(seen, np.exp(keys @ np.asarray(q[sample, 0, query, head])), 0)
        np.testing.assert_allclose(first[sample, 0, query, head], weight @ values / weight.sum(), rtol=1e-4, atol=1e-5)


def test_real_tokens_come_first_and_lose_nothing() -> None:
    mask = jnp.asarray([[False, True, True, False, True], [True] * 5, [False] * 5])
    x = jnp.arange(15.0).reshape(3, 5, 1)
    moved, real = attention.real_first(x, mask)
    np.testing.assert_array_equal(moved[0, :, 0], [1, 2, 4, 0, 3])
    np.testing.assert_array_equal(moved[1:], x[1:])
    np.testing.assert_array_equal(real[0], [True, True, True, False, False])
    np.testing.assert_array_equal(attention.lengths(mask), [3, 5, 1])
    back = jax.grad(lambda x: (attention.real_first(x, mask)[0] * jnp.arange(5.0)[:, None]).sum())(x)
    np.testing.assert_array_equal(back[0, :, 0], [3, 0, 1, 4, 2])


@pytest.mark.parametrize(
    ("setting", "dtype", "head_dim", "capability", "expected"),
    [
        ("auto", "bfloat16", 256, None, None),
        ("auto", "bfloat16", 256, (9, 0), "cudnn"),
        ("auto", "bfloat16", 256, (8, 9), None),
        ("auto", "bfloat16", 72, (8, 0), "cudnn"),
        ("auto", "bfloat16", 72, (7, 5), None),
        ("auto", "bfloat16", 12, (9, 0), None),
        ("auto", "float32", 72, (9, 0), None),
        ("plain", "bfloat16", 72, (9, 0), None),
        ("xla", "float32", 12, None, "xla"),
        ("cudnn", "bfloat16", 72, (9, 0), "cudnn"),
        ("cudnn", "float32", 72, (9, 0), "the model's dtype is float32"),
        ("cudnn", "bfloat16", 256, (8, 0), "multiples of 8 up to 128"),
        ("cudnn", "bfloat16", 72, None, "needs an NVIDIA GPU"),
    ],
)
def test_the_kernel_is_chosen_by_device_and_shape(
    monkeypatch: pytest.MonkeyPatch, setting: Any, dtype: Any, head_dim: int, capability: Any, expected: str | None
) -> None:
    monkeypatch.setattr(attention, "cuda_capability", lambda: capability)
    config = replace(SMALL, attention=setting, dtype=dtype)
    if expected in (None, "cudnn", "xla"):
        assert attention.kernel(config, head_dim) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            attention.kernel(config, head_dim)


def test_an_odd_number_of_tokens_is_left_to_the_plain_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "cuda_capability", lambda: (9, 0))
    config = replace(SMALL, dtype="bfloat16")
    assert [attention.kernel(config, 72, tokens=n) for n in (255, 256)] == [None, "cudnn"]


def test_there_is_no_gpu_here() -> None:
    assert attention.cuda_capability() is None


# What cannot run here can be traced, and lowered for a GPU


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(attention, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(gated, "compiles", lambda: False)
    monkeypatch.setattr(inside, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(inside, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(inside, "is_cuda_compute_capability_equal", lambda capability: False)


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations(value)


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize(("head_dim", "backward"), [(16, 3), (attention.LARGE + 8, 1)])
@pytest.mark.parametrize(("remat", "forward"), [("names", 3), ("full", 6)])
def test_fused_attention_is_lowered_for_a_gpu_and_not_recomputed(
    remat: Any, forward: int, head_dim: int, backward: int
) -> None:
    """`names` keeps what the kernels of SigLIP, VLM and expert leave; `full` runs them again in the backward pass,
    which for the large heads of VLM and expert is not cuDNN's.
    """
    vlm, expert = (replace(expert, head_dim=head_dim) for expert in (VLM, EXPERT))
    config = replace(HALF, remat=remat, vlm=vlm, expert=expert)
    policy = Pi0(config)

    seen = observation(config)

    def loss(params: Any) -> jax.Array:
        x_t, t = points(config, 1)
        return policy.velocity(params, policy.encode(params, seen), x_t, t).sum()

    traced = jax.jit(jax.grad(loss)).trace(param_shapes(config))
    names = [equation.primitive.name for equation in equations(traced.jaxpr)]
    assert names.count(FUSED_FORWARD) == forward
    assert names.count("dot_product_attention_bwd_wrapper") == backward
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize(("num", "kernels"), [(1, 0), (NUM, 2 * HALF.expert.depth)])
def test_the_sampling_loop_only_reads_weights(num: int, kernels: int) -> None:
    """Inside the Euler loop no weight is cast, cut or laid out anew, and few candidates do without the
    kernels: one over the keys they share and one over their own, per layer.
    """
    config = HALF
    policy, seen = Pi0(config), observation(config)

    def sample(params: Any) -> jax.Array:
        return flow.sample(policy, params, policy.encode(params, seen), points(config, num)[0])

    program = jax.make_jaxpr(sample)(param_shapes(config))
    (loop,) = (
        equation.params["jaxpr"]
        for equation in equations(program.jaxpr)
        if equation.primitive.name == "scan" and equation.params["length"] == 10
    )
    inside = list(equations(loop.jaxpr))
    assert sum(equation.primitive.name == FUSED_FORWARD for equation in inside) == kernels
    matrices = {leaf.shape[1:] for leaf in jax.tree.leaves(param_shapes(config)["PaliGemma"]["llm"]["layers"])}
    matrices |= {(16, 8 * 16), (4 * 16, 16), (16, 40), (20, 16)}  # side by side
    for equation in inside:
        if equation.primitive.name in ("convert_element_type", "slice", "dynamic_slice", "transpose", "squeeze"):
            assert equation.invars[0].aval.shape not in matrices, equation
