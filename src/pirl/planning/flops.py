"""Floating-point operations of a traced function: its matrix products and convolutions, counted from their shapes.

XLA's own count takes the body of a loop once, and a transformer here is a loop over its layers. This one multiplies by
the number of turns. Elementwise work is left out: it is under one per cent, and limited by memory, not by arithmetic.
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
    """Operations of one update over all devices, without those that rematerialisation repeats ("model FLOPs").

    So the share of the peak (MFU) that goes by them compares settings: one that recomputes less is nearer to 1, not
    further from it. Arguments are arrays or ShapeDtypeStructs; tracing the full-size model takes a few seconds.
    """
    # A fused kernel's products would not be seen, and of a layer that is left out only if it is out of the loop.
    counted: Any = replace(agent, policy=plain(agent.policy))  # type: ignore[type-var]
    return count_flops(counted.update, state, batch, jax.random.key(0))


def count_flops(function: Callable[..., Any], *args: Any) -> int:
    """Operations of the program that jax traces for these arguments (arrays, or ShapeDtypeStructs), 2 per product.

    Of the branches of a `cond` the dearest counts. A `while` whose length the data decide counts once; loops of a
    fixed length (`scan`, `fori_loop` between Python integers) count in full. Of kernels only that for gated products is
    seen, not those for attention.
    """
    return flops_by_part(function, (), *args).total()


def flops_by_part(function: Callable[..., Any], parts: Sequence[str], *args: Any) -> Counter[str]:
    """`count_flops` apart by the `jax.named_scope`s in `parts`; the innermost one counts, the rest is under ""."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), args)
    return _count(jax.make_jaxpr(function)(*shapes), parts, "")


def part_of(path: str, parts: Sequence[str], otherwise: str = "") -> str:
    """The innermost of `parts` in a path of scopes, in which a derivative's look like transpose(jvp(scope))."""
    return next((word for word in reversed(re.findall(r"\w+", path)) if word in parts), otherwise)


def _count(jaxpr: Jaxpr | ClosedJaxpr, parts: Sequence[str], inside: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        # Equations of an inner program know only the scopes that were entered in it.
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
    # Calls of all kinds (jit, checkpoint, custom derivatives, while) hold the programs they run among their parameters.
    inner = (value for value in equation.params.values() if isinstance(value, Jaxpr | ClosedJaxpr))
    return sum((_count(value, parts, part) for value in inner), start=Counter())


def _dot(equation: Any) -> int:
    """2 · batch · rows · columns · contracted: every element of the result is a sum over what is contracted."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[axis] for axis in contracted)


def _product(left: Any, out: Any) -> int:
    """2 · elements of the result · the last axis of what is multiplied."""
    return 2 * math.prod(out.shape) * left.shape[-1]


def _convolution(equation: Any) -> int:
    """2 · samples · channels in · channels out · pairs of an output and a tap that meet an element of the input."""
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
    """How often, along one axis, a tap of the kernel meets an element, not padding or a gap of a spread input."""
    place = np.arange(out)[:, None] * stride + np.arange(taps) * dilation - padding[0]
    return int(((place >= 0) & (place <= (size - 1) * spread) & (place % spread == 0)).sum())
