"""One update, compiled for the mesh. Mutable state is donated.

Frozen weights are not donated: XLA may not read donated memory inside a loop and would copy them. They are separate
arguments, and the new state refers to the same arrays. Their EMA and target copies alias them too.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from pirl.agents.agent import Agent, TrainState
from pirl.models.params import flatten
from pirl.models.policy import Optimised
from pirl.parallel.distributed import barrier
from pirl.parallel.placement import batch_on
from pirl.parallel.sharding import data_sharding, replicated, state_shardings
from pirl.processes import return_freed_memory
from pirl.training import compiler

COMPILE_SECONDS = 3600
"""Largest difference between processes' compile times in seconds; some hit the compile cache."""


class Step:
    """`agent.update`, jitted: the state keeps its sharding, metrics are replicated.

    Leaving the context skips ahead-of-time compilation that has not begun, and never waits for it.
    """

    def __init__(self, agent: Agent, mesh: jax.sharding.Mesh, shapes: TrainState) -> None:
        """`shapes`: the state's shapes, as from `jax.eval_shape`."""
        self._structure, self._count = jax.tree.structure(shapes), len(jax.tree.leaves(shapes))
        self._origin = shared_leaves(shapes)
        self._read = sorted(set(self._origin.values()))
        changing, frozen = self._split(state_shardings(mesh, shapes))
        self._batches, everywhere = data_sharding(mesh), replicated(mesh)
        transformer = isinstance(agent.policy, Optimised)

        def update(changing: list[Any], frozen: list[Any], batch: Any, key: jax.Array) -> tuple[list[Any], Any]:
            leaves = self._joined(changing, frozen)
            state, metrics = agent.update(jax.tree.unflatten(self._structure, leaves), batch, key)
            new = jax.tree.leaves(state)
            changed = [leaf for leaf, origin in self._origin.items() if new[leaf] is not leaves[origin]]
            assert not changed, f"{type(agent).__name__}.update changed what is frozen: leaves {changed}"
            return self._split(state)[0], metrics

        self._program = jax.jit(
            batch_on(self._batches)(update),
            in_shardings=(changing, frozen, self._batches, everywhere),
            out_shardings=(changing, everywhere),
            donate_argnums=0,
            compiler_options=compiler.for_training(transformer=transformer) or None,
        )
        self._ahead: Future[float] | None = None
        self._compiled = self._left = False

    def __enter__(self) -> "Step":
        self._left = False
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True

    def __call__(
        self, state: TrainState, batch: Any, key: jax.Array, program: Any = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """(new state, metrics). The given state is donated, except frozen leaves.

        `program`: the compiled result of `lower`, used instead of the jitted function.
        """
        changing, frozen = self._split(state)
        if not (program or self._compiled):
            self._say(self._ahead.result() if self._ahead else 0.0, self._compile(changing, frozen, batch, key))
            barrier("compiled", timeout=COMPILE_SECONDS)  # the first collective has a short timeout
            return_freed_memory()
        changing, metrics = (program or self._program)(changing, frozen, batch, key)
        return jax.tree.unflatten(self._structure, self._joined(changing, frozen)), metrics

    def shared(self, state: TrainState) -> TrainState:
        """The same state with aliased frozen weights, as after every step: they are in memory once."""
        return jax.tree.unflatten(self._structure, self._joined(*self._split(state)))

    def lower(self, state: TrainState, batch: Any, key: jax.Array) -> jax.stages.Lowered:
        """The lowered program for these shapes, for inspection or ahead-of-time compilation."""
        return self._program.lower(*self._split(state), batch, key)

    def prepare(self, state: TrainState, batch: Any, key: jax.Array) -> None:
        """Start compiling for these shapes in a thread, while data and weights are read.

        The first call waits for it. A call with other shapes compiles again.
        """
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._batches), batch)
        self._ahead = ThreadPoolExecutor(1, "compile").submit(self._compile, *self._split(state), batch, key)

    def _compile(self, *args: Any) -> float:
        """Compile for these arguments; returns the seconds. jax caches the program, so a call does not recompile."""
        begin = time.perf_counter()
        lowered = self._program.lower(*args)
        if not self._left:
            lowered.compile()
        return time.perf_counter() - begin

    def _say(self, *seconds: float) -> None:
        keeps = getattr(jax.config, "jax_enable_compilation_cache", True)
        kept, self._compiled = getattr(jax.config, "jax_compilation_cache_dir", None) if keeps else None, True
        if jax.process_index() == 0:
            print(f"step compiled in {sum(seconds):.0f} s{f', kept in {kept}' if kept else ''}")

    @property
    def programs(self) -> int:
        """Number of compiled programs: 1 unless shapes have changed."""
        return int(getattr(self._program, "_cache_size")())  # noqa: B009

    def _split(self, state: Any) -> tuple[list[Any], list[Any]]:
        leaves = jax.tree.leaves(state)
        changing = [leaf for number, leaf in enumerate(leaves) if number not in self._origin]
        return changing, [leaves[number] for number in self._read]

    def _joined(self, changing: list[Any], frozen: list[Any]) -> list[Any]:
        rest, read = iter(changing), dict(zip(self._read, frozen, strict=True))
        return [read[self._origin[n]] if n in self._origin else next(rest) for n in range(self._count)]


def shared_leaves(shapes: TrainState) -> dict[int, int]:
    """{leaf index in the state: leaf index of the weight it aliases}, for frozen `params`, `ema` and `target`."""
    numbered = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))
    weights, like = flatten(numbered.params), flatten(shapes.params)
    return {
        leaf: weights[path]
        for tree, shape in zip(
            (numbered.params, numbered.ema, numbered.target), (shapes.params, shapes.ema, shapes.target), strict=True
        )
        for (path, leaf), own in zip(flatten(tree).items(), flatten(shape).values(), strict=True)
        if path in shapes.frozen and own.dtype == like[path].dtype
    }
