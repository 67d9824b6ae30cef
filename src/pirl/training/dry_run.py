"""`--dry-run`: shapes, memory and disk of one compiled step. Reads no frames, writes nothing."""

from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from pirl.agents.agent import Agent, TrainState
from pirl.config import RLTrainConfig
from pirl.parallel.sharding import FSDP_AXIS, data_sharding, replicated, validate_fsdp_sharding
from pirl.planning.flops import count_flops, update_flops
from pirl.planning.memory import breakdown
from pirl.planning.plan import batch_shapes
from pirl.training.preflight import checkpoint_bytes

GIB = 2**30


def describe_run(config: RLTrainConfig, agent: Agent, mesh: jax.sharding.Mesh, shapes: TrainState, update: Any) -> None:
    """Print the state's size by part, its placement, and the compiled step's memory, FLOPs and disk needs."""
    console = Console(markup=False, emoji=False)
    console.print(str(breakdown(shapes, fsdp=mesh.shape[FSDP_AXIS])), markup=False)
    placed = validate_fsdp_sharding(shapes, mesh)
    rows = data_sharding(mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch_shapes(agent, config.batch_sizes)
    )
    key = jax.random.key(0)
    compiled = update.lower(shapes, batch, jax.device_put(key, replicated(mesh))).compile()
    table = Table(title=f"{config.name}: one step, compiled", show_header=False)
    table.add_row("devices", f"{mesh.size} ({jax.devices()[0].device_kind}), fsdp {mesh.shape[FSDP_AXIS]}")
    table.add_row("largest share of the state on one device", f"{placed.largest_share:.1%}")
    if memory := compiled.memory_analysis():
        table.add_row("arguments per device", f"{memory.argument_size_in_bytes / GIB:.2f} GiB")
        table.add_row("temporaries per device", f"{memory.temp_size_in_bytes / GIB:.2f} GiB")
    needed, run = update_flops(agent, shapes, batch), count_flops(update, shapes, batch, key)
    again = f", and {(run - needed) / 1e12:.4g} again to save memory" if run > needed else ""
    table.add_row("arithmetic, all devices", f"{needed / 1e12:.4g} TFLOP{again}")
    needed_disk, steps = checkpoint_bytes(config, shapes)
    table.add_row("disk, at most", f"{needed_disk / 1e9:.2f} GB for {steps} step(s) in {config.run_dir}")
    console.print(table)
    console.print(
        "batch:", *(f"  {name} {tuple(x.shape)} {x.dtype}" for name, x in _named(batch)), sep="\n", soft_wrap=True
    )
    console.print("dry run: nothing was written")


def _named(batch: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    ]
