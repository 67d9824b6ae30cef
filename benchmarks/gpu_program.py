"""The GPU program of a full-size step, compiled on a machine without a GPU: its memory, and what each loop does.

    pip install --no-deps "jax-cuda13-plugin==VERSION" "jax-cuda13-pjrt==VERSION" nvidia-cuda-nvcc nvidia-nvvm
    PYTHONPATH=src python benchmarks/gpu_program.py --rows bc,awr --loops
    PYTHONPATH=src python benchmarks/gpu_program.py --rows bc-8 --devices 8 --fsdp 8

VERSION is jax's, 0.11 or later. Rows are those of `gpu.py`. Nothing runs and no weights are made; the GPU is only a
description of an H200. Attention is plain, because cuDNN's kernels need a device. GEMMs are not autotuned, so times are
unknown; but in-place writes, copies and memory are as on the device. `untuned` marks GEMMs that would not be tuned on a
device either: they read or write a slice of a stack in place and use cuBLAS's default algorithm.
"""

import argparse
import math
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] += f" --xla_gpu_cuda_data_dir={sysconfig.get_paths()['purelib']}/nvidia/cu13"

import gpu
import jax
from jax.experimental import topologies

from pirl.models.config import get_preset
from pirl.parallel.sharding import data_sharding, make_mesh, replicated, sharded_shapes
from pirl.training import compiler
from pirl.training.step import Step

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4814272000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version { major: 13 } platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
KERNELS = "fusion|custom-call|copy|fusion-start|dynamic-slice|dynamic-update-slice"


def program(row: gpu.Row, remat: Any, mesh: jax.sharding.Mesh) -> Any:
    """The row's step, compiled for the mesh; each device gets the row's batch."""
    config = gpu.sized(replace(get_preset("pi0"), remat=remat, attention="plain"), row)
    agent, key = gpu.make_agent(config, row, augment=False), jax.random.key(0)
    state = jax.eval_shape(agent.init, key)
    data = jax.eval_shape(lambda: gpu.batch(config, row.size * mesh.size, row.cameras, jax.random.key(1)))

    def placed(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    batch = jax.tree.map(lambda x: placed(x, data_sharding(mesh)), data)
    step = Step(agent, mesh, state).lower(sharded_shapes(mesh, state), batch, placed(key, replicated(mesh)))
    # cuBLAS only: Triton's GEMMs are chosen by timing, which needs a device.
    return step.compile(compiler_options=compiler.TRAINING | compiler.TRANSFORMER)


def loops(text: str, least: int) -> Iterator[str]:
    """Instructions with results of at least `least` bytes, per loop and for the program around the loops."""
    bodies = set(re.findall(r"body=%([\w.\-]+)", text))
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        head = re.match(r"(ENTRY )?%([\w.\-]+)", computation)
        if not head or not (head[1] or head[2] in bodies):
            continue
        yield f"\n{'around the loops' if head[1] else head[2]}"
        for line in computation.splitlines()[1:]:
            found = re.match(rf" *(?:ROOT )?%([\w.\-]+) = (.*?) ({KERNELS})\(", line)
            if not found:
                continue
            name, result, kind = found.groups()
            sizes = [math.prod(map(int, filter(None, x.split(",")))) for x in re.findall(r"\[([\d,]*)\]", result)]
            target = re.search(r'custom_call_target="([^"]*)"', line)
            if 2 * max(sizes, default=0) < least or (target and target[1] == "AllocateBuffer"):
                continue
            note = "untuned" if name.startswith("dynamic_slice_fusion") else target[1] if target else ""
            yield f"  {name:44} {re.sub(r'{[0-9,]*}', '', result)[:110]:112} {kind} {note}"


def main() -> int:
    """Compile the chosen rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="bc", help="names of rows of gpu.py, separated by commas")
    parser.add_argument("--remat", default="names", choices=("none", "names", "dots", "full"))
    parser.add_argument("--devices", type=int, default=1, help="GPUs; each takes the row's batch")
    parser.add_argument("--fsdp", type=int, default=1, help="GPUs that share the weights")
    parser.add_argument("--loops", action="store_true", help="list what each loop does")
    parser.add_argument(
        "--least", type=int, default=20_000_000, help="bytes of what is listed, at least, at two per number"
    )
    parser.add_argument("--hlo", type=Path, help="write each program into this folder")
    args = parser.parse_args()
    rows = {row.name: row for row in gpu.ROWS if row.what != "sample"}
    if unknown := set(args.rows.split(",")) - set(rows):
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    try:
        shape = f"1x1x{args.devices}"
        devices = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology=shape).devices
    except (NotImplementedError, RuntimeError) as error:
        print(f"no compiler for GPUs here: {error}. The lines above the code say what to install.", file=sys.stderr)
        return 1
    mesh = make_mesh(args.fsdp, devices)
    for name in args.rows.split(","):
        begin = time.perf_counter()
        compiled = program(rows[name], rows[name].remat or args.remat, mesh)
        seconds, memory = time.perf_counter() - begin, gpu.program_gib(compiled)
        print(f"{rows[name]}: {memory:.1f} GiB per device, compiled in {seconds:.0f} s without tuning", flush=True)
        text = compiled.as_text()
        if args.loops:
            print("\n".join(loops(text, args.least)), flush=True)
        if args.hlo:
            args.hlo.mkdir(parents=True, exist_ok=True)
            (args.hlo / f"{name}.hlo").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
