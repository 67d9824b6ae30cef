"""Peak device memory of one step, from jax's trace of the update.

The trace lists every array of the step in order; this module adds up the arrays that are alive at the same time. So it
follows the code: an algorithm's second forward pass, N candidates, a kept copy, a branch, whatever remat keeps. XLA's
fusion and buffer reuse are not in the trace; three rules model which arrays are in memory:

    stored      results of matrix products, reductions, loops and branches
    fused       results of elementwise work, slices and casts: recomputed inside their readers, so their sources stay
                alive instead. But matrix products, loops and branches read only from memory: what they read is stored
                from then on. Also stored is what would be computed from more than three arrays of its size, such as the
                residual stream through all layers
    in place    results of a loop iteration, of a branch and of the step itself are written to their destination

A loop holds its results from the beginning, plus the needs of one iteration. Stacked weights that a loop gathers over
another axis than a layer's first are in memory twice, because XLA transposes them before the loop. A branch is a fusion
boundary: everything that crosses it is stored.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from pirl.kernels.gated import IN_ONE
from pirl.parallel.sharding import fsdp_spec
from pirl.planning.memory import leaf_bytes, shard_bytes

PROBE = 1009
"""Batch size of a trace: a prime that divides no model dimension, so that batch-dependent axes are recognisable."""

_VIEWS = frozenset({"copy", "expand_dims", "name", "optimization_barrier", "reshape", "sharding_constraint", "squeeze"})
_VIEWS |= {"stop_gradient", "transpose"}
_STORED = frozenset({"argmax", "argmin", "conv_general_dilated", "cumsum", "dot_general", "gather", "scatter"})
_STORED |= {"custom_partitioning", "ffi_call", "pallas_call", "reduce", "scatter-add", "sort", "top_k"}
_READS_FUSED = frozenset({"argmax", "argmin", "cumsum", "gather", "reduce", "scatter", "scatter-add"})
"""Stored primitives that can fuse their operands."""
_OPAQUE = frozenset({"custom_partitioning", "reduce", "scatter", "scatter-add", "sort"})
"""Primitives with a jaxpr among their parameters that is not called on their operands."""
_MERGED = frozenset({"convert_element_type", "slice"})
_FUSED = 3
"""A fused array with more sources of about its own size than this is stored."""
_USUAL = 32
"""Batch size at which array sizes are compared."""


class Load(NamedTuple):
    """Bytes as a function of the batch: fixed + per_sample · batch."""

    fixed: int | float = 0
    per_sample: int | float = 0

    def at(self, batch: int) -> int | float:
        """Bytes at this batch."""
        return self.fixed + self.per_sample * batch

    def plus(self, *others: "Load") -> "Load":
        """The sum."""
        return Load(*(sum(column) for column in zip(self, *others, strict=True)))


def step_loads(
    update: Callable[..., Any], *args: Any, fsdp: int = 1, fused_tokens: Collection[int] = ()
) -> tuple[Load, ...]:
    """Memory of a step on one device beyond its arguments, at every moment that is the peak for some batch size.

    `args` are shapes for a batch of PROBE samples; loads are per sample of one device. Arrays that do not grow with the
    batch are sharded like the state, except inside loops, where a layer's weights are gathered. Arrays with two axes of
    one of the `fused_tokens` are logits of fused attention, which are never in memory.
    """
    return traced_loads(jax.make_jaxpr(update)(*args), fsdp=fsdp, fused_tokens=fused_tokens)


def traced_loads(jaxpr: ClosedJaxpr, *, fsdp: int = 1, fused_tokens: Collection[int] = ()) -> tuple[Load, ...]:
    """`step_loads` of a traced update."""

    @cache
    def size(aval: Any, inside: bool) -> Load:
        shape = getattr(aval, "shape", ())
        if any(shape.count(tokens) > 1 for tokens in fused_tokens):
            return Load()
        if any(axis and axis % PROBE == 0 for axis in shape):
            return Load(0, leaf_bytes(aval) / PROBE)
        return Load(leaf_bytes(aval) if inside else shard_bytes(aval, fsdp=fsdp))

    def turned(aval: Any) -> bool:
        """Whether these stacked weights are sharded, hence gathered, over another axis than a layer's first."""
        shape = getattr(aval, "shape", ())
        grows = any(axis and axis % PROBE == 0 for axis in shape)
        return len(shape) > 2 and not grows and any(fsdp_spec(shape, aval.dtype, fsdp)[2:])

    return _Walk(size=size, turned=turned, inside=False).of(jaxpr.jaxpr, [_given(var) for var in jaxpr.jaxpr.invars])


@dataclass(kw_only=True, eq=False)
class _Buffer:
    """An array in memory, from its first to its last use."""

    size: Load
    begin: int
    end: int


@dataclass(kw_only=True, eq=False)
class _Value:
    """An array of the trace: stored in a buffer, or fused, that is computed from source buffers."""

    aval: Any
    buffer: _Buffer | None = None
    sources: frozenset[_Buffer] = frozenset()

    @property
    def read_from(self) -> frozenset[_Buffer]:
        """The buffers that reading this array reads."""
        return self.sources if self.buffer is None else frozenset({self.buffer})


def _given(var: Any) -> _Value:
    """An argument: its memory is counted elsewhere."""
    return _Value(aval=var.aval, buffer=_Buffer(size=Load(), begin=0, end=0))


@dataclass(kw_only=True)
class _Walk:
    """Simulates one jaxpr, equation by equation; loop bodies and branches get their own walk."""

    size: Callable[[Any, bool], Load]
    turned: Callable[[Any], bool]
    inside: bool
    time: int = 0
    buffers: list[_Buffer] = field(default_factory=list)
    nested: list[tuple[int, tuple[Load, ...]]] = field(default_factory=list)
    """(time, loads) of each loop body and branch."""
    merged: dict[Any, tuple[list[_Value], list[_Value]]] = field(default_factory=dict)
    """Slices and casts by operation and operand -> (operands, results): common subexpressions, merged as by XLA."""

    def of(
        self, jaxpr: Jaxpr, args: Sequence[_Value], wanted: Sequence[bool] | None = None, *, counted: bool = True
    ) -> tuple[Load, ...]:
        """The program's loads. With `counted=False` its results are written into memory counted elsewhere."""
        results = self._run(jaxpr, args, [True] * len(jaxpr.outvars) if wanted is None else wanted)
        self.time += 1
        for value in results:
            self._read(value)
            if not counted and value.buffer is not None:
                value.buffer.size = Load()
        return self._peaks()

    def _run(self, jaxpr: Jaxpr, args: Sequence[_Value], wanted: Sequence[bool]) -> list[_Value]:
        """Go through the equations, skipping those that no wanted result depends on."""
        known = {var: _given(var) for var in jaxpr.constvars} | dict(zip(jaxpr.invars, args, strict=True))

        def value(atom: Any) -> _Value:
            # Skipped equations have no results, and no computed equation reads them.
            return known[atom] if not isinstance(atom, Literal) and atom in known else _Value(aval=atom.aval)

        needed = _needed(jaxpr, wanted)
        for equation in jaxpr.eqns:
            if any(var in needed for var in equation.outvars):
                flags = [var in needed for var in equation.outvars]
                results = self._equation(equation, [value(atom) for atom in equation.invars], flags)
                known |= dict(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom, flag in zip(jaxpr.outvars, wanted, strict=True) if flag]

    def _equation(self, equation: Any, operands: list[_Value], wanted: list[bool]) -> list[_Value]:
        name, outvars = equation.primitive.name, equation.outvars
        if name in _VIEWS:
            return operands[: len(outvars)]
        if name in ("scan", "while", "cond"):
            return self._nested(equation, operands, wanted)
        in_one = equation.params.get("name") in IN_ONE
        program = None if name in _OPAQUE or in_one else _called(equation)
        if program is not None:
            found = iter(self._run(program, operands[len(operands) - len(program.invars) :], wanted))
            return [next(found) if flag else _Value(aval=var.aval) for var, flag in zip(outvars, wanted, strict=True)]
        if name in _STORED or in_one or name.startswith("reduce_"):
            self.time += 1
            for operand in operands:
                self._read(operand, stored=not (name in _READS_FUSED or name.startswith("reduce_")))
            return [self._store(var.aval) for var in outvars]
        key = (name, str(equation.params), *map(id, operands)) if name in _MERGED else None
        if key in self.merged:
            return self.merged[key][1]
        sources = frozenset[_Buffer]().union(*(operand.read_from for operand in operands))
        results = [_Value(aval=var.aval, sources=sources) for var in outvars]
        for result in results:
            own = self.size(result.aval, self.inside).at(_USUAL)
            if len(sources) > _FUSED and sum(2 * source.size.at(_USUAL) >= own > 0 for source in sources) > _FUSED:
                self.time += 1
                self._read(result, stored=True)
        if key is not None:
            self.merged[key] = operands, results
        return results

    def _nested(self, equation: Any, operands: list[_Value], wanted: list[bool]) -> list[_Value]:
        """A loop or branch: stores its results and records the loads of one iteration or of each branch."""
        self.time += 1
        programs, carried = _programs(equation)
        for index, (operand, read) in enumerate(zip(operands, _reads(equation, wanted), strict=True)):
            if read:
                # A loop's initial carry is computed directly into the carry's buffer.
                self._read(operand, stored=index not in carried)
                if index < carried.start and not self.inside and self.turned(operand.aval):
                    self._read(self._turned(operand), stored=True)
        results = [
            self._store(var.aval) if flag else _Value(aval=var.aval)
            for var, flag in zip(equation.outvars, wanted, strict=True)
        ]
        scan, branch = (equation.primitive.name == name for name in ("scan", "cond"))
        for program in programs:
            # An iteration's slice of a stacked array is fused into its readers.
            args = [
                _Value(aval=var.aval) if scan and index >= carried.stop else _given(var)
                for index, var in enumerate(program.invars)
            ]
            flags = [True] * len(carried) + wanted[len(carried) :]
            needs = _Walk(size=self.size, turned=self.turned, inside=True).of(program, args, flags, counted=not branch)
            self.nested.append((self.time, needs))
        return results

    def _turned(self, value: _Value) -> _Value:
        """The transposed copy of stacked weights, shared by all loops that gather them."""
        found = self.merged.setdefault(("turned", id(value)), ([value], [_Value(aval=value.aval)]))
        return found[1][0]

    def _store(self, aval: Any) -> _Value:
        buffer = _Buffer(size=self.size(aval, self.inside), begin=self.time, end=self.time)
        self.buffers.append(buffer)
        return _Value(aval=aval, buffer=buffer)

    def _read(self, value: _Value, *, stored: bool = False) -> None:
        for buffer in value.read_from:
            buffer.end = self.time
        if stored and value.buffer is None:
            value.buffer = self._store(value.aval).buffer

    def _peaks(self) -> tuple[Load, ...]:
        """Live bytes at each time, reduced to the moments that are the peak for some batch size."""
        change = np.zeros((self.time + 2, len(Load._fields)))
        for buffer in self.buffers:
            change[buffer.begin] += buffer.size
            change[buffer.end + 1] -= buffer.size
        alive = change.cumsum(0)
        inner = [alive[time] + load for time, loads in self.nested for load in loads]
        return largest([Load(*map(float, moment)) for moment in [*alive, *inner]])


def largest(loads: Iterable[Load]) -> tuple[Load, ...]:
    """The Pareto front of (fixed, per_sample): one of these loads is the largest at any batch size."""
    found: list[Load] = []
    for load in sorted(set(loads), reverse=True):
        if not found or load.per_sample > found[-1].per_sample:
            found.append(load)
    return tuple(found)


def _needed(jaxpr: Jaxpr, wanted: Sequence[bool]) -> set[Any]:
    """Variables that the wanted results depend on."""
    needed = {atom for atom, flag in zip(jaxpr.outvars, wanted, strict=True) if flag and not isinstance(atom, Literal)}
    for equation in reversed(jaxpr.eqns):
        flags = [var in needed for var in equation.outvars]
        if any(flags):
            read = zip(equation.invars, _reads(equation, flags), strict=True)
            needed |= {atom for atom, flag in read if flag and not isinstance(atom, Literal)}
    return needed


def _reads(equation: Any, wanted: Sequence[bool]) -> list[bool]:
    """Which operands of an equation the wanted results depend on."""
    name, program = equation.primitive.name, None
    if name == "scan":
        (program,), carried = _programs(equation)
        wanted = [True] * len(carried) + list(wanted[len(carried) :])
    elif name not in _OPAQUE and name not in ("while", "cond"):
        program = _called(equation)
    if program is None:
        return [True] * len(equation.invars)
    needed = _needed(program, wanted)
    inner = [var in needed for var in program.invars]
    return [True] * (len(equation.invars) - len(inner)) + inner


def _called(equation: Any) -> Jaxpr | None:
    """The jaxpr that an equation calls on its operands, or None."""
    for value in equation.params.values():
        if isinstance(value, Jaxpr | ClosedJaxpr):
            return value.jaxpr if isinstance(value, ClosedJaxpr) else value
    return None


def _programs(equation: Any) -> tuple[list[Jaxpr], range]:
    """(jaxprs of a loop or branch, range of its operands that are carried between iterations)."""
    params = equation.params
    match equation.primitive.name:
        case "cond":
            return [branch.jaxpr for branch in params["branches"]], range(0)
        case "scan":
            # Versions of jax name the counts differently, so compare ranks: stacked operands have one more axis here.
            body = params["jaxpr"].jaxpr

            def stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
                return sum(a.aval.ndim > b.aval.ndim for a, b in zip(outside, inside, strict=True))

            stop = len(body.invars) - stacked(equation.invars, body.invars)
            return [body], range(stop - len(body.outvars) + stacked(equation.outvars, body.outvars), stop)
    first = params["cond_nconsts"] + params["body_nconsts"]
    return [params["body_jaxpr"].jaxpr], range(first, len(equation.invars))
