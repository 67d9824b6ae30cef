"""FLOPs of a traced function: its matrix products and convolutions, counted from their shapes.

XLA's own count takes a loop body once, but pirl's transformers are loops over layers; this one multiplies by the trip
count. Elementwise work is left out: it is under one per cent, and limited by memory bandwidth.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from pirl.agents.agent import Agent
from pirl.kernels.gated import IN_ONE
from pirl.models.policy import plain


def update_flops(agent: Agent, state: Any, batch: Any) -> int:
    """FLOPs of one update over all devices, without rematerialisation ("model FLOPs").

    MFU computed from them is comparable between remat settings: recomputing less raises it. Arguments are arrays or
    ShapeDtypeStructs; tracing the full-size model takes a few seconds.
    """
    # Plain policy: the products inside fused kernels are invisible to the count.
    counted: Any = replace(agent, policy=plain(agent.policy))  # type: ignore[type-var]
    return count_flops(counted.update, state, batch, jax.random.key(0))


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """FLOPs of the program that jax traces for these arguments (arrays or ShapeDtypeStructs); a multiply-add is 2.

    A `cond` counts its most expensive branch, a `while` of data-dependent length one iteration, loops of fixed length
    (`scan`, `fori_loop` between Python integers) all iterations. Of the kernels only the gated product is counted, not
    attention.
    """
    return flops_by_part(function, (), *args).total()


def flops_by_part(function: Callable[..., Any], parts: Sequence[str], *args: Any) -> Counter[str]:
    """`count_flops` split by the `jax.named_scope`s in `parts` (the innermost one wins); the rest is under ""."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), args)
    return _count(jax.make_jaxpr(function)(*shapes), parts, "")


def part_of(path: str, parts: Sequence[str], otherwise: str = "") -> str:
    """The innermost of `parts` in a scope path, also inside a derivative's transpose(jvp(scope))."""
    return next((word for word in reversed(re.findall(r"\w+", path)) if word in parts), otherwise)


def _count(jaxpr: Jaxpr | ClosedJaxpr, parts: Sequence[str], inside: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        # An inner jaxpr's equations only know the scopes entered inside it.
        part = part_of(str(equation.source_info.name_stack), parts, inside) if parts else ""
        found += _operations(equation, parts, part)
    return found


def _operations(equation: Any, parts: Sequence[str], part: str) -> Counter[str]:
    match equation.primitive.name:
        case "dot_general":
            return Counter({part: _dot(equation)})
        case "conv_general_dilated":
            return Counter({part: _convolution(equation)})
        case "cond":
            return max((_count(branch, parts, part) for branch in equation.params["branches"]), key=Counter.total)
        case "scan":
            once = _count(equation.params["jaxpr"], parts, part)
            return Counter({name: equation.params["length"] * number for name, number in once.items()})
    if equation.params.get("name") in IN_ONE:
        return Counter({part: 2 * _product(equation.invars[0].aval, equation.outvars[0].aval)})
    # Calls of all kinds (jit, checkpoint, custom derivatives, while) hold their jaxprs among their parameters.
    inner = (value for value in equation.params.values() if isinstance(value, Jaxpr | ClosedJaxpr))
    return sum((_count(value, parts, part) for value in inner), start=Counter())


def _dot(equation: Any) -> int:
    """2 · (elements of the result) · (contracted elements)."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[axis] for axis in contracted)


def _product(left: Any, out: Any) -> int:
    """2 · (elements of the result) · (last axis of the left operand)."""
    return 2 * math.prod(out.shape) * left.shape[-1]


def _convolution(equation: Any) -> int:
    """2 · samples · channels in · channels out · (output, tap) pairs that read an input element, not padding."""
    params = equation.params
    left, right = (variable.aval.shape for variable in equation.invars)
    numbers = params["dimension_numbers"]
    samples = left[numbers.lhs_spec[0]] // params["batch_group_count"]
    channels_out, channels_in = (right[axis] for axis in numbers.rhs_spec[:2])
    out = equation.outvars[0].aval.shape
    sizes = zip(
        *([shape[axis] for axis in spec[2:]] for shape, spec in zip((left, right, out), numbers, strict=True)),
        params["padding"],
        params["window_strides"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    return 2 * samples * channels_in * channels_out * math.prod(_pairs(*size) for size in sizes)


def _pairs(size: int, taps: int, out: int, padding: tuple[int, int], stride: int, spread: int, dilation: int) -> int:
    """Number of (output, tap) pairs along one axis that read an element, not padding or a gap of a dilated input."""
    place = np.arange(out)[:, None] * stride + np.arange(taps) * dilation - padding[0]
    return int(((place >= 0) & (place <= (size - 1) * spread) & (place % spread == 0)).sum())
