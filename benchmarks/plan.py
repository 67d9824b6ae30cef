"""Training on up to 8 GPUs, predicted on a CPU: memory per device, and traffic between devices.

    PYTHONPATH=src python benchmarks/plan.py --table                        largest batches of π₀ by mode and GPU
    PYTHONPATH=src python benchmarks/plan.py --traffic bc --size full       collectives of one step (minutes to compile)
    PYTHONPATH=src python benchmarks/plan.py --traffic awr --size small --fsdp 4
    PYTHONPATH=src python benchmarks/plan.py --formula                      what the formula says of full-size π₀

Nothing runs and no weights are made. The table is `pirl.planning.plan`. Traffic is counted in XLA's program of the real
training step for 8 simulated devices right after SPMD partitioning, where it is still the same for every backend. Later
passes for CPUs convert bfloat16 to float32 and have no reduce-scatter; GPUs make one from an all-reduce of which each
device keeps its part, and this count does the same.

The formula: every forward pass over a part of the model gathers its matrices, in the compute dtype, and the backward
pass once more; gradients are reduced once, in that dtype. Of the embedding only the prompts' rows travel. Critic and
heads are left out. `--traffic` prints the formula's error, which shows whether to trust it for sizes that take too long
to compile here.
"""

import argparse
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before jax is imported, which reads them once. No code is optimised: none is run.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp

from pirl.agents.config import ACRLPDConfig, RIPTConfig
from pirl.build import build_agent
from pirl.config import RLTrainConfig
from pirl.config_io import from_dict
from pirl.models.config import PRESETS, GemmaConfig, Pi0Config, Remat, SigLIPConfig
from pirl.models.freeze import trainable_mask
from pirl.models.params import flatten
from pirl.models.pi0 import param_shapes
from pirl.parallel.sharding import data_sharding, make_mesh, sharded_shapes
from pirl.planning.memory import GIB, leaf_bytes, shard_bytes
from pirl.planning.plan import batch_shapes, plan
from pirl.recipes import get_config
from pirl.training.step import Step

DEVICES = 8
GPUS = {"24 GB": 24, "40 GB": 40, "80 GB": 80, "141 GB": 139}
"""GPUs -> GiB as reported by nvidia-smi."""
BANDWIDTH = {"NVLink (H100, H200)": 350e9, "PCIe 4.0 x16": 20e9}
"""Bytes per second that each device receives while all do: assumed (450 and 32 GB/s nominal), not measured."""

MODES: dict[str, tuple[str, dict[str, Any], str]] = {
    "BC, all weights, EMA": ("bc_aloha_fold", {}, "pi0"),
    "ACRLPD, all weights, EMA": ("acrlpd_aloha_fold", {}, "pi0"),
    "ACRLPD, VLM frozen, EMA": ("acrlpd_aloha_fold", {"freeze": "vlm_frozen"}, "pi0"),
    "ACRLPD, LoRA": ("acrlpd_aloha_fold_lora", {}, "pi0_lora"),
    "RIPT, all weights": ("ript_aloha_transfer", {"freeze": "full"}, "pi0"),
    "RIPT, LoRA": ("ript_aloha_transfer", {"freeze": "lora"}, "pi0_lora"),
}
"""Mode -> (recipe, changed settings, model preset)."""
SHORT = {"bc": "BC, all weights, EMA", "awr": "ACRLPD, all weights, EMA", "ript": "RIPT, all weights"}

SIZES = {
    "small": Pi0Config(
        vlm=GemmaConfig(width=1024, depth=4, mlp_dim=4096, num_heads=8, head_dim=128),
        expert=GemmaConfig(width=512, depth=4, mlp_dim=2048, num_heads=8, head_dim=128),
        vision=SigLIPConfig(width=576, depth=4, mlp_dim=2152, num_heads=8),
    ),
    "medium": Pi0Config(
        vlm=GemmaConfig(width=1536, depth=6, mlp_dim=8192, num_heads=8, head_dim=192),
        expert=GemmaConfig(width=768, depth=6, mlp_dim=3072, num_heads=8, head_dim=192),
        vision=SigLIPConfig(width=864, depth=9, mlp_dim=3232, num_heads=12),
    ),
    "full": Pi0Config(),
}
"""π₀, and two smaller models of similar shape: matrices sharded in π₀ have at least about 4 MiB here too."""


def mode_config(mode: str, *, size: Pi0Config | None = None, **model: Any) -> RLTrainConfig:
    """The configuration of a mode, with three cameras and chunks of 50 steps."""
    recipe, change, preset = MODES[mode]
    config = replace(get_config(recipe), model=PRESETS[preset] if size is None else size)
    agent = {"accumulate": 1}
    return from_dict(
        RLTrainConfig,
        {"data": {"robot": "aloha", "cameras": None}, "agent": agent, "model": {"horizon": 50, **model}} | change,
        base=config,
    )


# What fits


def table() -> Iterator[str]:
    """Markdown table: GiB at 8 samples per device, and the largest batch per device on each GPU."""
    yield f"| mode | devices | GiB, `full` / `names` | {' | '.join(GPUS)} |"
    yield f"|---|---|---|{'---|' * len(GPUS)}"
    for mode in MODES:
        for devices in (1, DEVICES):
            settings: tuple[Remat, ...] = ("names", "full")
            configs = {r: mode_config(mode, remat=r, attention="auto") for r in settings}
            configs = {
                r: replace(c, batch_size=8 * devices, mesh=replace(c.mesh, fsdp=devices)) for r, c in configs.items()
            }
            peaks = {r: plan(c, device_gb=10_000).peak / GIB for r, c in configs.items()}
            cells = [cell(configs, gib) for gib in GPUS.values()]
            row = [mode, str(devices), f"{peaks['full']:.1f} / {peaks['names']:.1f}", *cells]
            yield f"| {' | '.join(row)} |"


def cell(configs: dict[Remat, RLTrainConfig], gib: int) -> str:
    """The largest batch per device: with remat `names` if that fits 8 samples, else with `full`."""
    for remat, least in (("names", 8), ("full", 1)):
        config = configs[remat]
        found = plan(config, device_gb=gib)
        each = found.largest_batch // found.devices
        if each >= least:
            return f"{each}, `{remat}`"
    return "no"


# Traffic


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One instruction that moves data between devices."""

    kind: str
    """all-gather, reduce-scatter, all-reduce, all-to-all, collective-permute."""
    size: int
    """Bytes of the whole array."""
    group: int
    """Number of participating devices."""
    times: int
    """Executions per step."""
    scope: str
    """Its `jax.named_scope` path."""

    @property
    def received(self) -> float:
        """Bytes that one device receives per step, with bandwidth-optimal (ring) algorithms."""
        share = (self.group - 1) / self.group if self.kind != "collective-permute" else 1
        return self.times * self.size * share * (2 if self.kind == "all-reduce" else 1)


ITEM = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
CALLED = re.compile(r"(?:body|to_apply|calls)=(%[\w.\-]+)|branch_computations=\{([^}]*)\}")
MOVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(text: str) -> list[Collective]:
    """All collectives in a program's HLO text, with the trip counts of the loops around them."""
    programs: dict[str, list[tuple[str, str, str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := HEADER.match(line):
            name = header[1]
            programs[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif found := INSTRUCTION.match(line):
            programs[name].append((found[1], found[2], found[3], found[4]))

    def turns(condition: str) -> int:
        """A loop's trip count, from the constant in its condition; 1 for data-dependent loops."""
        bounds = [rest for _, kind, op, rest in programs[condition] if op == "constant" and kind.startswith("s32[]")]
        return int(bounds[0].split(")")[0]) if len(bounds) == 1 else 1

    found: list[Collective] = []

    def visit(program: str, times: int) -> None:
        lines = programs[program]
        for label, kind, op, rest in lines:
            if op in MOVES:
                found.append(_collective(lines, label, kind, op, rest, times))
            condition = re.search(r"condition=%([\w.\-]+)", rest)
            inner = times * (turns(condition[1]) if condition else 1)
            for called in CALLED.finditer(rest):
                for other in re.findall(r"%([\w.\-]+)", called[0]):
                    visit(other, inner)

    visit(entry, 1)
    return found


def _collective(lines: list[Any], label: str, kind: str, op: str, rest: str, times: int) -> Collective:
    size, group = _bytes(kind), _group(rest)
    if op == "all-reduce" and size == group * _kept(lines, label):
        op = "reduce-scatter"
    scope = re.search(r'op_name="([^"]*)"', rest)
    return Collective(kind=op, size=size, group=group, times=times, scope=scope[1] if scope else "")


def _bytes(kind: str) -> int:
    return sum(
        ITEM[dtype] * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", kind)
    )


def _group(rest: str) -> int:
    """Number of devices per replica group, in any of XLA's notations."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(iota[1])
    return DEVICES


def _kept(lines: list[Any], label: str) -> int:
    """Bytes of the slice that each device takes of a result; 0 if anything else reads the result."""
    for _ in range(4):
        readers = [line for line in lines if re.search(rf"%{re.escape(label)}\b", line[3])]
        if len(readers) != 1:
            return 0
        label, kind, op, _ = readers[0]
        if op == "dynamic-slice":
            return _bytes(kind)
        if op not in ("bitcast", "convert", "copy", "reshape", "transpose"):
            return 0
    return 0


def partitioned(config: RLTrainConfig, fsdp: int) -> str:
    """HLO text of the training step after SPMD partitioning."""
    mesh = make_mesh(fsdp)
    agent, key = build_agent(config), jax.random.key(0)
    shapes = jax.eval_shape(agent.init, key)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=data_sharding(mesh)),
        batch_shapes(agent, config.batch_sizes),
    )
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
        lowered = Step(agent, mesh, shapes).lower(sharded_shapes(mesh, shapes), batch, key)
        lowered.compile(compiler_options=options)
        (path,) = Path(folder).glob("*update*after_spmd-partitioning*.txt")
        return path.read_text()


def formula(config: RLTrainConfig, fsdp: int) -> dict[str, float]:
    """Bytes that one device receives per step, by cause."""
    model, agent = config.model, config.agent
    assert isinstance(model, Pi0Config)
    encodes, flows, sampled = 1, 1, 0
    if isinstance(agent, ACRLPDConfig):
        # Two encodings (s and s'); candidates at both, from weights gathered before the loop in float32 (as seen in the
        # compiled program), preceded by π₀'s state token.
        encodes, flows = 2, 1 if model.pi05 else 3
        sampled = 2 * 2
    elif isinstance(agent, RIPTConfig):
        encodes, flows = 2, 2
    shapes = param_shapes(model)
    trains = flatten(trainable_mask(shapes, model, config.freeze_rule))
    received: Counter[str] = Counter()
    width = jnp.dtype(model.dtype).itemsize
    across = 2 * (DEVICES - 1) / DEVICES if fsdp < DEVICES else (fsdp - 1) / fsdp
    for path, leaf in flatten(shapes).items():
        if shard_bytes(leaf, fsdp=fsdp) == leaf_bytes(leaf):
            continue
        size = width * math.prod(leaf.shape)
        if path.startswith("PaliGemma/llm/embedder/"):
            # Rows are looked up on the shard's owner. The gradient is float32, summed over devices with the same shard.
            copies = DEVICES // fsdp
            received["gradients"] += trains[path] * leaf_bytes(leaf) / fsdp * 2 * (copies - 1) / copies
            found = leaf_bytes(leaf) / leaf.shape[0] * config.batch_size * model.token_len
            received["prompts"] += (encodes + trains[path]) * found * (DEVICES - 1) / DEVICES
        if not ("/layers/" in path or "encoderblock" in path):
            continue
        expert, vision = "_1/" in path, path.startswith("PaliGemma/img/")
        if not (expert or vision or "kv_einsum" in path):
            # Only keys and values of the VLM's last layer are used.
            size = size * (model.vlm.depth - 1) // model.vlm.depth
        share = (fsdp - 1) / fsdp * size
        passes = flows if expert and not vision else encodes
        received["forward"] += share * passes
        received["candidates"] += share * (sampled if expert and not vision else 0)
        received["backward"] += share
        # If fsdp is smaller than the number of devices, gradients are summed over all devices, then sliced.
        received["gradients"] += trains[path] * size * across
    return dict(received)


def traffic(config: RLTrainConfig, fsdp: int) -> None:
    """Print a step's traffic by kind and by part, and the formula's prediction."""
    found = collectives(partitioned(config, fsdp))
    total = sum(c.received for c in found)
    by_kind: Counter[str] = Counter()
    for c in found:
        by_kind[c.kind] += c.received
    for kind, size in by_kind.most_common():
        print(f"  {kind:20} {size / 1e9:8.3f} GB")
    print("  the largest:")
    places: Counter[tuple[str, str]] = Counter()
    for c in found:
        places[c.kind, place(c.scope)] += c.received
    for (kind, where), size in places.most_common(12):
        print(f"    {size / 1e9:8.3f} GB  {kind:18} {where}")
    predicted = formula(config, fsdp)
    said = sum(predicted.values())
    print(
        f"  received per device and step: {total / 1e9:.3f} GB; formula {said / 1e9:.3f} GB ({said / total - 1:+.1%})"
    )
    times(total)


def place(scope: str) -> str:
    """The part of the step that an instruction's scope belongs to."""
    part = next(
        (p for p in ("candidates", "siglip", "vlm", "expert", "critic", "optimizer") if p in scope), "elsewhere"
    )
    return f"{part}, backward" if "transpose" in scope else part


def times(received: float) -> None:
    """Print the transfer times without overlap."""
    for name, rate in BANDWIDTH.items():
        print(f"    {1e3 * received / rate:7.0f} ms over {name}, at {rate / 1e9:.0f} GB/s (assumed)")


def main() -> int:
    """Print the chosen tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="what fits on which GPU")
    parser.add_argument("--traffic", choices=SHORT, help="compile this step and count its collectives")
    parser.add_argument("--formula", action="store_true", help="the formula's bytes for every mode, full size")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--fsdp", type=int, default=DEVICES, help=f"devices that share the weights, of {DEVICES}")
    parser.add_argument("--batch", type=int, default=64, help="over all devices")
    parser.add_argument("--remat", default="names", choices=("none", "names", "dots", "full"))
    args = parser.parse_args()
    if args.table:
        print(*table(), sep="\n")
    if args.traffic:
        config = mode_config(SHORT[args.traffic], size=SIZES[args.size], remat=args.remat)
        print(f"{args.traffic}, {args.size}, batch {args.batch}, fsdp {args.fsdp} of {DEVICES}, remat {args.remat}")
        traffic(replace(config, batch_size=args.batch), args.fsdp)
    if args.formula:
        for mode in MODES:
            parts = formula(replace(mode_config(mode), batch_size=args.batch), args.fsdp)
            listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
            print(f"{mode}, fsdp {args.fsdp} of {DEVICES}: {sum(parts.values()) / 1e9:.1f} GB ({listed})")
            times(sum(parts.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
