"""Fast programs against the plain one on a GPU: π₀ at full width with few layers, in a minute or two.

    PYTHONPATH=src python benchmarks/gpu_parity.py

bfloat16 rounds, so no two programs agree exactly. The reference is the plain program in float32: a fast program in
bfloat16 may be at most `SLACK` times as far from it as the plain program in bfloat16. Prints both relative distances,
then times each attention kernel at training sizes.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

# Choosing the fastest algorithm of each product takes most of the compile time, and says nothing about results.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np

from pirl.kernels import attention
from pirl.models import flow
from pirl.models.config import Attention, Pi0Config, Remat, get_preset
from pirl.models.observation import Observation
from pirl.models.params import flatten, nest
from pirl.models.pi0 import Encoded, Pi0
from pirl.training import compiler

SLACK = 1.5
FLOOR = 2e-3
"""Distances below this are rounding errors of single numbers and always pass."""
LAYERS = 4
Values = dict[str, Any]


def small(config: Pi0Config) -> Pi0Config:
    """The model with the same widths, but few layers and a small vocabulary."""
    return replace(
        config,
        vlm=replace(config.vlm, depth=LAYERS),
        expert=replace(config.expert, depth=LAYERS),
        vision=replace(config.vision, depth=LAYERS),
        vocab_size=min(config.vocab_size, 1024),
    )


def weights(policy: Pi0) -> Any:
    """Initial weights without zeros; a fresh π₀ would ignore its images."""
    flat = flatten(policy.init(jax.random.key(0)))
    rng = jax.random.key(1)
    for index, (path, leaf) in enumerate(sorted(flat.items())):
        noise = 0.02 * jax.random.normal(jax.random.fold_in(rng, index), leaf.shape)
        flat[path] = leaf + noise if leaf.ndim < 3 or "head" in path else leaf
    return nest(flat)


def observation(config: Pi0Config, size: int) -> Observation:
    """A batch in which one sample lacks its first camera and prompts differ in length, so valid tokens do not come
    first.
    """
    rng = np.random.default_rng(0)
    shape, room = (size, config.image_size, config.image_size, 3), config.token_len
    masks = {name: np.ones(size, bool) for name in config.cameras}
    masks[config.cameras[0]][size // 2] = False
    lengths = rng.integers(1, room + 1, (size, 1))
    return Observation(
        images={name: jnp.asarray(rng.integers(0, 256, shape), jnp.uint8) for name in config.cameras},
        image_masks={name: jnp.asarray(mask) for name, mask in masks.items()},
        state=jnp.asarray(rng.normal(size=(size, config.action_dim)), jnp.float32),
        tokenized_prompt=jnp.asarray(rng.integers(0, config.vocab_size, (size, room)), jnp.int32),
        tokenized_prompt_mask=jnp.asarray(np.arange(room)[None] < lengths),
    )


def training(config: Pi0Config, params: Any, seen: Observation) -> Values:
    """Losses and gradients of behaviour cloning at fixed flow draws."""
    policy, size = Pi0(config), len(seen.state)
    actions = jax.random.normal(jax.random.key(3), (size, config.horizon, config.action_dim))
    draws = flow.draw(jax.random.key(4), jax.random.key(5), actions, 1)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        error = flow.squared_error(policy, params, policy.encode(params, seen), actions, draws)
        return error.mean(), error.mean((1, 3))

    options = None if config.attention == "plain" else compiler.for_training(transformer=True) or None
    grads, steps = jax.jit(jax.grad(loss, has_aux=True), compiler_options=options)(params)
    grouped: dict[str, list[np.ndarray]] = {}
    for path, leaf in flatten(grads).items():
        part = next((p for p in ("img", "_1", "llm") if p in path), "heads")
        grouped.setdefault(f"gradient {part}", []).append(np.asarray(leaf, np.float32).ravel())
    # Of each step of each chunk: a single number could agree by chance.
    return {"losses": np.asarray(steps)} | {name: np.concatenate(parts) for name, parts in grouped.items()}


def pooled(context: Encoded) -> jax.Array:
    """The mean feature of valid tokens, independent of their order."""
    real = context.mask[..., None]
    return jnp.where(real, context.features.astype(jnp.float32), 0).sum(1) / real.sum(1)


def sampling(config: Pi0Config, params: Any, seen: Observation, *, way: str) -> Values:
    """Features, and chunks of one and of many candidates.

    Ways: `velocity` calls the policy in every step; `stacked` prepares weights in the same call; `served` takes weights
    prepared before it.
    """
    policy, size = Pi0(config), len(seen.state)

    options = None if config.attention == "plain" else compiler.for_acting() or None

    @partial(jax.jit, compiler_options=options)
    def chunks(params: Any, noise: dict[str, jax.Array]) -> Values:
        context = policy.encode(params, seen)

        def velocity(x: jax.Array, t: jax.Array) -> jax.Array:
            return policy.velocity(params, context, x, t)

        field = velocity if way == "velocity" else flow.field(policy, params, context)
        return {"features": pooled(context)} | {name: flow.euler(field, x) for name, x in noise.items()}

    counts = (1, 4, 32)
    keys = jax.random.split(jax.random.key(6), len(counts))
    noise = {
        f"best of {n}": jax.random.normal(key, (size, n, config.horizon, config.action_dim))
        for n, key in zip(counts, keys, strict=True)
    }
    params = jax.jit(policy.for_inference)(params) if way == "served" else params
    return {name: np.asarray(x, np.float32) for name, x in chunks(params, noise).items()}


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square of the difference, relative to that of the second."""
    return float(np.sqrt(np.square(a - b).mean() / max(np.square(b).mean(), 1e-30)))


def compare(name: str, fast: Values, plain: Values, exact: Values) -> bool:
    """Print both distances to float32; returns whether the fast one is close enough."""
    good = True
    for what, values in fast.items():
        ours, theirs = distance(values, exact[what]), distance(plain[what], exact[what])
        fine = bool(np.isfinite(values).all()) and ours <= max(SLACK * theirs, FLOOR)
        good &= fine
        print(f"{'ok  ' if fine else 'FAIL'} {name:34} {what:28} {ours:.2e} (plain bfloat16 {theirs:.2e})", flush=True)
    return good


def attempted(name: str, check: Callable[[], bool]) -> bool:
    """Run a check; an exception is printed as a failure, so that other checks still run."""
    begin = time.perf_counter()
    try:
        good = check()
    except Exception as error:
        print(f"FAIL {name}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
        good = False
    print(f"     {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return good


def models(preset: str, kernel: Attention, size: int, parts: list[str]) -> bool:
    """Check every fast path of one model."""
    half = small(replace(get_preset(preset), dtype="bfloat16", attention="plain", remat="full"))
    single, fast = replace(half, dtype="float32"), replace(half, attention=kernel)
    seen, params = observation(half, size), jax.jit(lambda: weights(Pi0(half)))()
    remats: tuple[Remat, ...] = ("names", "full")
    learned = {f"remat {r}": lambda c, r=r: training(replace(c, remat=r), params, seen) for r in remats}
    chunks = {w: lambda c, w=w: sampling(c, params, seen, way=w) for w in ("velocity", "stacked", "served")}
    good = True
    for part, ways in {"training": learned, "sampling": chunks}.items():
        if part not in parts:
            continue
        begin, reference = time.perf_counter(), ways["remat full" if part == "training" else "velocity"]
        with jax.default_matmul_precision("highest"):
            exact = reference(single)
        plain = reference(half)
        print(f"     {preset} {part}, plain: {time.perf_counter() - begin:.0f} s", flush=True)
        for way, run in ways.items():
            name = f"{preset} {kernel}, {way}"
            good &= attempted(name, lambda n=name, r=run, p=plain, e=exact: compare(n, r(fast), p, e))
    return good


SHAPES = {
    "SigLIP, 96 pictures": ((96, 256, 16, 72), (96, 256, 16, 72), False),
    "prefix, 32 x 816": ((32, 816, 8, 256), (32, 816, 1, 256), True),
    "128 candidates, heads folded": ((128, 400, 1, 256), (128, 872, 1, 256), True),
    "128 candidates, heads apart": ((128, 50, 8, 256), (128, 872, 1, 256), True),
    "1024 candidates, heads folded": ((1024, 400, 1, 256), (1024, 872, 1, 256), True),
}
"""Shapes of queries and keys in a training step at batch 32, and whether keys have a length."""


def timings(repeats: int = 5) -> None:
    """Milliseconds of each attention kernel: forward and, where training has one, forward plus backward."""
    for name, (of_queries, of_keys, has_length) in SHAPES.items():
        q, k, v = (
            jax.random.normal(jax.random.fold_in(jax.random.key(7), i), shape, jnp.bfloat16)
            for i, shape in enumerate((of_queries, of_keys, of_keys))
        )
        lengths = jnp.full(len(k), k.shape[1] - 20, jnp.int32) if has_length else None
        kernels: tuple[attention.Kernel, ...] = ("xla", "cudnn")
        for how in kernels:

            def forward(q: Any, k: Any, v: Any, how: attention.Kernel = how, lengths: Any = lengths) -> jax.Array:
                return attention.fused(how, q, k, v, scale=q.shape[-1] ** -0.5, lengths=lengths)

            backward = jax.grad(lambda *a, f=forward: f(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))
            line = []
            for program in (forward, *(() if "candidates" in name else (backward,))):
                try:
                    run = jax.jit(program)
                    jax.block_until_ready(run(q, k, v))
                    begin = time.perf_counter()
                    outs = [run(q, k, v) for _ in range(repeats)]
                    jax.block_until_ready(outs)
                    line.append(f"{1e3 * (time.perf_counter() - begin) / repeats:.2f} ms")
                except Exception as error:
                    line.append(f"{type(error).__name__}: {str(error)[:200]}")
            print(f"     {name:32} {how:6} {' / '.join(line)}", flush=True)


def main() -> int:
    """Compare and time; returns 0 if all checks pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", default="pi0", help="separated by commas")
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "xla"))
    parser.add_argument("--batch", type=int, default=16, help="π₀.₅ has whole tiles from 16 on")
    parser.add_argument("--parts", default="training,sampling", help="one of these, or both")
    parser.add_argument("--no-timings", action="store_true")
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}; distances are relative, at most {SLACK} x plain bfloat16's")
    found = [models(preset, args.attention, args.batch, args.parts.split(",")) for preset in args.presets.split(",")]
    good = all(found)
    if not args.no_timings:
        timings()
    print("all fast paths agree" if good else "some fast paths do not agree: see FAIL above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
