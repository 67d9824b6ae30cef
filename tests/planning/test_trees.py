"""Checks of pytrees name what is wrong by its path."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from pirl.agents.agent import TrainState
from pirl.errors import ConfigError
from pirl.planning.trees import (
    check_optimizer_consistency,
    check_pytree_leaf_dtypes,
    compare_pytree_structures,
    diagnose_pytree_structure,
    flat_leaves,
    validate_fsdp_compatibility,
)

Shape = jax.ShapeDtypeStruct


def params() -> dict[str, Any]:
    return {"dense": {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}, "head": {"w": jnp.ones((4, 2))}}


def state() -> TrainState:
    policy = params()
    return TrainState(
        step=jnp.zeros((), jnp.int32), params={"policy": policy}, opt={"policy": optax.adamw(1e-3).init(policy)}
    )


def test_every_difference_is_named_by_its_path() -> None:
    left, right = params(), params()
    del right["dense"]["b"]
    right["head"] = {"w": jnp.ones((4, 3), jnp.bfloat16), "scale": jnp.ones(1)}
    found = compare_pytree_structures(left, right)
    assert [(d.path, d.kind, d.left, d.right) for d in found.differences] == [
        ("dense/b", "missing", "float32[4]", ""),
        ("head/scale", "unexpected", "", "float32[1]"),
        ("head/w", "shape", "(4, 2)", "(4, 3)"),
        ("head/w", "dtype", "float32", "bfloat16"),
    ]
    assert found.of("dtype") == ("head/w",)
    assert "head/w: shape (4, 2) against (4, 3)" in str(found)
    same = compare_pytree_structures(left, jax.eval_shape(params))
    assert same.ok
    assert str(same) == "the trees agree in all 3 leaves"


def test_states_are_compared_leaf_by_leaf_with_their_shardings() -> None:
    assert compare_pytree_structures(state(), jax.eval_shape(state)).compared == len(jax.tree.leaves(state()))
    assert "opt/policy/0/mu/dense/w" in flat_leaves(state())
    mesh = AbstractMesh((2, 4), ("batch", "fsdp"))
    split, whole, spelled = (
        {"w": Shape((8, 8), jnp.float32, sharding=NamedSharding(mesh, spec))}
        for spec in (PartitionSpec("fsdp"), PartitionSpec(), PartitionSpec("fsdp", None))
    )
    (difference,) = compare_pytree_structures(split, whole).differences
    assert (difference.path, difference.kind) == ("w", "sharding")
    assert "fsdp" in difference.left
    assert compare_pytree_structures(split, spelled).ok


def test_a_diagnosis_counts_and_finds_what_breaks_a_step() -> None:
    healthy = diagnose_pytree_structure(state())
    assert healthy.ok
    values = 3 * (12 + 4 + 8) + 2
    assert healthy.numbers == {"leaves": 11, "values": values, "bytes": 4 * values}
    assert "params/policy: 3 leaves, 96 B, 3 float32" in healthy.details
    shared, gone = jnp.ones(3), jnp.ones(2)
    gone.delete()
    sick = {"a": shared, "b": {"c": shared, "name": "policy"}, "x/y": jnp.ones(1), "gone": gone}
    report = diagnose_pytree_structure(sick)
    assert set(report.problems) == {
        "a and b/c: one and the same array",
        "b/name: str, not an array",
        "gone: was donated and deleted",
        "the key 'x/y' has a slash in it",
    }
    assert "4 problems" in str(report)


def test_an_optimizer_fits_its_parameters() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    good = check_optimizer_consistency(params(), tx.init(params()))
    assert good.ok
    assert good.details == ("1/0/mu", "1/0/nu")
    assert check_optimizer_consistency(jax.eval_shape(params), jax.eval_shape(tx.init, params())).ok
    larger = {**params(), "extra": jnp.ones(1)}
    larger["head"] = {"w": jnp.ones((4, 5))}
    report = check_optimizer_consistency(larger, tx.init(params()))
    assert set(report.problems) == {
        *(f"1/0/{m}/extra: missing, though the parameter trains" for m in ("mu", "nu")),
        *(f"1/0/{m}/head/w: shape (4, 2), but the parameter's is (4, 5)" for m in ("mu", "nu")),
    }
    frozen = {"dense": params()["dense"]}
    report = check_optimizer_consistency(frozen, tx.init(params()))
    assert report.problems[0] == "1/0/mu/head/w: there is no such trainable parameter"
    assert len(report.problems) == 2


@pytest.mark.parametrize(
    "tx",
    [
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        optax.masked(optax.adam(1e-3), {"dense": True, "head": False}),
        optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(1e-3, 0.9)}, {"dense": "a", "head": "b"}),
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.adafactor(1e-3, min_dim_size_to_factor=2),
    ],
    ids=["hyperparams", "masked", "multi_transform", "multi_steps", "adafactor"],
)
def test_wrapped_optimizers_are_understood(tx: Any) -> None:
    report = check_optimizer_consistency(params(), tx.init(params()))
    assert report.ok, str(report)
    assert report.numbers["trees"] >= 2
    assert not check_optimizer_consistency({"other": jnp.ones(3)}, tx.init(params())).ok


def test_leaves_that_cannot_be_sharded_are_named() -> None:
    tree = {
        "good": Shape((1024, 2048), jnp.float32),
        "odd": Shape((1023, 2047), jnp.float32),
        "small": Shape((3, 5), jnp.float32),
        "vector": Shape((4_000_001,), jnp.float32),
        "step": Shape((), jnp.int32),
    }
    report = validate_fsdp_compatibility(tree, 8)
    assert report.problems == ("odd: 7.99 MiB whole on every device, no axis of (1023, 2047) is divisible by 8",)
    whole = 1023 * 2047 * 4 + 60 + 4 * 4_000_001 + 4
    assert report.numbers["per_device"] == whole + 2**23 // 8
    assert report.numbers["bytes"] == whole + 2**23
    assert report.numbers["sharded"] == 1
    assert validate_fsdp_compatibility(tree, 1).ok
    mesh = jax.make_mesh((1, 1), ("batch", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert validate_fsdp_compatibility(tree, mesh).numbers["fsdp"] == 1
    with pytest.raises(ConfigError, match="none of them is 'fsdp'"):
        validate_fsdp_compatibility(tree, jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,)))
    with pytest.raises(ConfigError, match="FSDP size of 0"):
        validate_fsdp_compatibility(tree, 0)


def test_dtypes_are_counted_and_strays_named() -> None:
    tree = {"w": jnp.ones(2), "frozen": jnp.ones(2, jnp.bfloat16), "key": jax.random.key(0)}
    fine = check_pytree_leaf_dtypes(tree, expected={"w": jnp.float32, "frozen": jnp.bfloat16})
    assert fine.ok
    assert fine.numbers == {"float32": 1, "bfloat16": 1, "key<fry>": 1}
    stray = tree | {"wide": np.ones(2), "number": 3.0, "weak": jnp.asarray(1.0), "frozen": jnp.ones(2)}
    assert set(check_pytree_leaf_dtypes(stray, expected={"fro.*": jnp.bfloat16}).problems) == {
        "wide: float64, expected one of float32, bfloat16, int32, uint32, bool",
        "number: float, expected one of float32, bfloat16, int32, uint32, bool",
        "weak: weakly typed float32, which changes its type in the first step",
        "frozen: float32, expected bfloat16",
    }
