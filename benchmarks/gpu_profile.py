"""Profile of a full-size step: the time of its parts, compared with their FLOPs at the matmul rate.

    PYTHONPATH=src python benchmarks/gpu_profile.py --rows bc,awr --augment

Rows are those of `gpu.py`. A part is a `jax.named_scope` in the models and agents. Times are those of GPU kernels, from
jax's profiler; time without a kernel is shown as idle. FLOPs are the model's, without recomputation, which therefore
shows as distance from the floor.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

# Recorded into command buffers, kernels lose the names of their operations. A step takes about 1 % longer without.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import gpu
import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from pirl.models.config import get_preset
from pirl.models.pi0 import Pi0
from pirl.planning.flops import flops_by_part, part_of
from pirl.training import compiler

PARTS = ("pictures", "siglip", "vlm", "expert", "candidates", "critic", "optimizer")
STEPS = 3


def kind(kernel: str) -> str:
    """A kernel's category, from its name."""
    patterns = {
        "attention": r"fmha|flash|attention|sdpa|cudnn",
        "product": r"gemm|nvjet|cutlass|cublas|xmma",
        "copy": r"memcpy|memset|copy|transpose|dynamic_slice|dynamic_update",
    }
    return next((name for name, pattern in patterns.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def traced(run: Any) -> list[tuple[str, str, float, float]]:
    """(operation, kernel, start, milliseconds) of every GPU kernel executed by `run`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        file = next(Path(folder).rglob("*.xplane.pb"))
        planes = [plane for plane in ProfileData.from_file(str(file)).planes if plane.name.startswith("/device:GPU")]
        found = []
        for line in (line for plane in planes for line in plane.lines):
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {name: value for name, value in event.stats if name in ("hlo_op", "name")}
                op = str(stats.get("hlo_op") or "")
                found.append((op, event.name, event.start_ns / 1e6, event.duration_ns / 1e6))
        return found


def program(row: gpu.Row, args: argparse.Namespace) -> tuple[Any, Any, dict[str, int]]:
    """(compiled program, a function that calls it, FLOPs by part)."""
    config = gpu.sized(replace(get_preset(args.preset), remat=args.remat, attention=args.attention), row)
    counted = replace(config, remat="none", attention="plain")
    cameras, key = min(row.cameras, len(config.cameras)), jax.random.key(2)
    data = jax.jit(lambda key: gpu.batch(config, row.size, cameras, key))(jax.random.key(1))
    if row.what == "sample":
        data = data["observations"]
        half = jax.jit(lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), Pi0(config).init(key)))(key)
        flops = flops_by_part(gpu.sampler(counted, row), PARTS, half, data, key)
        state: Any = jax.jit(Pi0(config).for_inference)(half)
        sample = jax.jit(gpu.sampler(config, row), compiler_options=compiler.for_acting() or None)
        compiled = sample.lower(state, data, key).compile()

        def call() -> None:
            jax.block_until_ready(compiled(state, data, key))
    else:
        agent = gpu.make_agent(config, row, augment=args.augment)
        held = [jax.jit(agent.init)(jax.random.key(0))]
        flops = flops_by_part(gpu.make_agent(counted, row, augment=args.augment).update, PARTS, held[0], data, key)
        options = compiler.for_training(transformer=True) or None
        step = jax.jit(agent.update, donate_argnums=0, compiler_options=options)
        compiled = step.lower(held[0], data, key).compile()

        def call() -> None:
            state, metrics = compiled(held.pop(), data, key)
            held.append(jax.block_until_ready(state))
            jax.block_until_ready(metrics)

    return compiled, call, flops


def show(row: gpu.Row, args: argparse.Namespace, rate: float) -> None:
    """Profile one row and print its tables."""
    compiled, call, flops = program(row, args)
    text = compiled.as_text()
    origin = dict(re.findall(r"%?([\w.\-]+) = .*?metadata=\{.*?op_name=\"([^\"]*)\"", text))
    result = dict(re.findall(r"^ *(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ", text, re.MULTILINE))
    call()
    call()
    events = traced(lambda: [call() for _ in range(STEPS)])
    if not events:
        print(f"{row}: the profiler saw no kernels")
        return
    busy = sum(ms for *_, ms in events) / STEPS
    span = (max(start + ms for *_, start, ms in events) - min(start for *_, start, _ in events)) / STEPS
    times: dict[str, Counter[str]] = defaultdict(Counter)
    hot: Counter[tuple[str, ...]] = Counter()
    for op, kernel, _, ms in events:
        path = origin.get(op, "")
        part = part_of(path, PARTS)
        way = "backward" if "transpose" in path else "forward"
        times[part][way] += ms / STEPS
        times[part][kind(kernel)] += ms / STEPS
        shapes = re.sub(r"\{[\d,]*\}|/\*.*?\*/", "", result.get(op, ""))
        hot[part, way, f"{op}: {shapes[:60]} {'/'.join(path.split('/')[-3:])[-60:]}", kernel[:40]] += ms / STEPS
    print(f"\n{row}: {span:.1f} ms, kernels {busy:.1f} ms, idle {span - busy:.1f} ms")
    print("| part | ms | forward | backward | products | attention | copies | other | TFLOP | floor ms | of floor |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for part in (*PARTS, ""):
        t, floor = times[part], 1e3 * flops.get(part, 0) / rate
        total = t["forward"] + t["backward"]
        cells = [total, *(t[name] for name in ("forward", "backward", "product", "attention", "copy", "other"))]
        numbers = " | ".join(f"{x:.1f}" for x in cells)
        share = f"{floor / total:.0%}" if floor and total else ""
        print(f"| {part or 'rest'} | {numbers} | {flops.get(part, 0) / 1e12:.1f} | {floor:.1f} | {share} |")
    for (part, way, op, kernel), ms in hot.most_common(args.top):
        print(f"  {ms:8.2f} ms  {part or 'rest':10} {way:8} {kernel:40} {op}")
    sys.stdout.flush()


def main() -> int:
    """Profile the chosen rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="pi0")
    parser.add_argument("--rows", default="bc,awr", help="names of rows of gpu.py, separated by commas")
    parser.add_argument("--remat", default="names", choices=("none", "names", "dots", "full"))
    parser.add_argument("--attention", default="auto", choices=("auto", "plain", "xla", "cudnn"))
    parser.add_argument("--augment", action="store_true", help="augment pictures (needs augmax)")
    parser.add_argument("--top", type=int, default=25, help="how many of the dearest operations to list")
    parser.add_argument("--cache", type=Path, help="keep compiled programs in this folder, for a second run")
    args = parser.parse_args()
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache))
    rate = gpu.matmul_rate()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, matmul {rate / 1e12:.0f} TFLOP/s")
    rows = {row.name: row for row in gpu.ROWS}
    for name in args.rows.split(","):
        show(rows[name], args, rate)
        jax.clear_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main())
