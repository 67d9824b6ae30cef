"""Will it fit? The memory of a training step per device, from shapes alone, before anything is allocated.

Resident from step to step, each leaf sharded by OpenPI's rule: the weights (float32; frozen ones bfloat16), the
optimizer state, the average of all weights, a critic with its target and moments, and for `distill` a bfloat16 copy of
the policy it started from.

On top of that comes what one step needs for a while. What the three scans (SigLIP, VLM, action expert) keep between
their forward and their backward passes is read off jax's trace of them (`activations.py`). Per block and token it is,
in the type of the activations:

    full    the block's input
    names   also what `remat.SAVED_NAMES` names: queries, keys, values, attention output, gate and up of the
            feed-forward; in SigLIP queries, keys, values and the feed-forward's inner layer
    dots    also the outputs of matrix products without a batch dimension: as above, but in place of the attention's
            output that of its output projection, in SigLIP as well
    none    everything the backward pass reads: elementwise intermediates, attention probabilities, cast weights

The backward pass of a scan works on one block at a time. There it holds the outputs of all matrix products of that
block (the attention logits among them, in float32) as far as they were not kept and had to be recomputed, and a
cotangent for each; elementwise work in between is fused and not counted. The block's weights are cast to the
activations' type, and so is their gradient before it is stored; with FSDP they are also gathered first.

Gradients are float32 and appear part by part, while what the passed parts had kept is given back. So the peak is the
largest of these moments: the forward pass of SigLIP or the VLM, the backward pass of expert, VLM or SigLIP, the
optimizer's update. Gradient accumulation holds one more set of gradients throughout.

Peaks measured on one H200 (π₀ whole, AdamW, average, 3 cameras) against what this gives, in GiB; no factor was fitted:

    prototype, batch 32, names, XLA attention         107.0   107.1   +0.1 %
    prototype, batch 32, names, fused attention       106.0   107.1   +1.1 %
    prototype, batch 32, names, fused, 2 cameras       91.0    91.0    0.0 %
    prototype, batch 32, full, fused attention         66.0    66.6   +1.0 %
    OpenPI's own step, batch 32, full                  71.6    66.6   -6.9 %
    OpenPI's own step, batch 64, full                  77.3    76.1   -1.6 %

The prototype had this model's structure. OpenPI's step is another program (both experts in one scan, attention over
prefix and suffix together); how far it is off says how much to trust this for code that differs.

Not counted: sampling candidates in reinforcement learning (measured: at most 1 GiB more at batch 32, best of 4) and
the batch itself. A tenth of the device is left free by default, for fragments and for what this does not see.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pirl.errors import ConfigError, did_you_mean
from pirl.models.config import FreezeRule, Pi0Config, Remat
from pirl.models.freeze import default_rule, split
from pirl.models.params import count, flatten
from pirl.training.activations import SCANS, Load, activations, part_of, stored_shapes
from pirl.training.config import SGD, AdamW, Optimizer
from pirl.training.memory import GIB, gib, leaf_bytes, shard_bytes, text_table
from pirl.training.optim import make_optimizer

OPTIMIZERS: Mapping[str, Optimizer] = {"adamw": AdamW(), "sgd": SGD()}
"""Optimizers by name."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One moment of a step."""

    name: str
    """What is going on."""
    gradients: int
    """Bytes of gradients that exist by then."""
    activations: Load
    """What the batch needs."""
    workspace: int
    """Weights of the block at work, cast and gathered, and their gradient."""

    def at(self, batch: int) -> int | float:
        """Bytes on top of what is resident."""
        return self.gradients + self.activations.at(batch) + self.workspace


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one device needs, and what fits on it."""

    parts: Mapping[str, int]
    """Bytes on one device at the peak: params, optimizer, ema, copy, critic, gradients, activations, workspace."""
    phase: str
    """The moment of the step at which the peak is reached."""
    usable: int
    """Bytes of a device that may be used."""
    batch_size: int
    """The batch that was asked for, over all devices."""
    accumulate: int | None
    """Parts the batch must be split into; None if not even one sample per device fits."""
    largest_batch: int
    """Largest batch over all devices without accumulation; 0 if none fits."""
    devices: int
    """Number of devices."""
    fsdp: int
    """Devices that share one copy of the weights."""
    parameters: int
    """Of the policy."""
    trainable: int
    """Of the policy, those that train."""
    suggestions: tuple[str, ...] = ()
    """What would help, where the batch does not fit at once; each was computed."""

    @property
    def peak(self) -> int:
        """Bytes on one device."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Does the batch fit, if need be in parts?"""
        return self.accumulate is not None

    def __str__(self) -> str:
        rows = [("per device", "bytes"), *((name, gib(size)) for name, size in self.parts.items() if size)]
        rows.append(("peak", gib(self.peak)))
        head = (
            f"{self.trainable / 1e6:,.0f} M of {self.parameters / 1e6:,.0f} M parameters train; "
            f"batch {self.batch_size} on {self.devices} device(s), fsdp {self.fsdp}"
        )
        if self.accumulate is None:
            verdict = f"does not fit, not even in parts of one sample per device: {gib(self.usable)} may be used"
            verdict += f"; largest batch at once: {self.largest_batch}" if self.largest_batch else ""
        else:
            parts = f"in {self.accumulate} parts " if self.accumulate > 1 else ""
            verdict = f"fits {parts}({gib(self.usable)} may be used); largest batch at once: {self.largest_batch}"
        lines = [head, *text_table(rows, "<>"), f"the peak is in the {self.phase}", verdict]
        return "\n".join([*lines, *(f"  or: {suggestion}" for suggestion in self.suggestions)])


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """One way to train: what `plan` was asked, and every variation it tries."""

    model: Pi0Config
    rule: FreezeRule
    ema: bool
    copy: bool
    critic: int
    optimizer: Optimizer
    devices: int
    fsdp: int
    cameras: int
    draws: int


def plan(
    model: Pi0Config,
    *,
    batch_size: int,
    device_gb: int | float,
    devices: int = 1,
    fsdp: int = 1,
    rule: FreezeRule | None = None,
    ema: bool = True,
    copy: bool = False,
    critic_parameters: int | None = None,
    optimizer: str | Optimizer = "adamw",
    cameras: int | None = None,
    draws: int = 1,
    remat: Remat | None = None,
    usable_fraction: float = 0.9,
) -> Plan:
    """Bytes per device of training `model`, the largest batch that fits, and what to do where it does not.

    `device_gb` is in GiB, as nvidia-smi counts; `usable_fraction` of it is XLA's. `cameras` and `remat` default to the
    model's own, `rule` to what OpenPI does. `copy`: the policy that training began with is kept (`distill`). A batch
    that does not fit at once is split; where nothing fits, variations are tried and those that do are suggested.
    """
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise did_you_mean(optimizer, OPTIMIZERS, kind="optimizer")
    setup = _Setup(
        model=model if remat is None else replace(model, remat=remat),
        rule=default_rule(model) if rule is None else rule,
        ema=ema,
        copy=copy,
        critic=critic_parameters or 0,
        optimizer=OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        devices=devices,
        fsdp=fsdp,
        cameras=len(model.cameras) if cameras is None else cameras,
        draws=draws,
    )
    _check(setup, batch_size)
    usable = int(device_gb * GIB * usable_fraction)
    found = _plan(setup, batch_size, usable)
    return replace(found, suggestions=tuple(_suggest(setup, batch_size, usable, found)))


def _check(setup: _Setup, batch_size: int) -> None:
    if setup.fsdp < 1 or setup.devices < 1 or setup.devices % setup.fsdp:
        raise ConfigError(
            f"fsdp is {setup.fsdp} and there are {setup.devices} devices", hint="fsdp divides the number of devices"
        )
    if batch_size < 1 or batch_size % setup.devices:
        raise ConfigError(
            f"a batch of {batch_size} over {setup.devices} devices", hint="the batch is a multiple of the devices"
        )
    if setup.cameras < 1 or setup.draws < 1:
        raise ConfigError(f"{setup.cameras} cameras, {setup.draws} draws of the flow", hint="at least one of each")


def _plan(setup: _Setup, batch_size: int, usable: int) -> Plan:
    shapes, mask = stored_shapes(setup.model, setup.rule)
    resident = _resident(setup)
    room = usable - sum(resident.values())
    at_once, in_parts = (list(_phases(setup, accumulated=accumulated)) for accumulated in (False, True))
    share = batch_size // setup.devices
    splits = (parts for parts in range(1, share + 1) if share % parts == 0)
    accumulate = next((n for n in splits if _fits(in_parts if n > 1 else at_once, share // n, room)), None)
    micro_batch = share // (accumulate or share)
    peak = max(at_once if micro_batch == share else in_parts, key=lambda phase: phase.at(micro_batch))
    on_top = {"gradients": peak.gradients, "activations": peak.activations.at(micro_batch), "workspace": peak.workspace}
    return Plan(
        parts={name: int(size) for name, size in (resident | on_top).items()},
        phase=peak.name,
        usable=usable,
        batch_size=batch_size,
        accumulate=accumulate,
        largest_batch=_largest(at_once, room) * setup.devices,
        devices=setup.devices,
        fsdp=setup.fsdp,
        parameters=count(flatten(shapes).values()),
        trainable=count(flatten(split(shapes, mask)[0]).values()),
    )


def _fits(phases: list[Phase], batch: int, room: int) -> bool:
    return all(phase.at(batch) <= room for phase in phases)


def _largest(phases: list[Phase], room: int) -> int:
    """Largest batch at which every phase fits; 0 if none."""
    if not _fits(phases, 1, room):
        return 0
    growing = (phase for phase in phases if phase.activations.per_sample > 0)
    return min(int((room - phase.at(0)) / phase.activations.per_sample) for phase in growing)


def _resident(setup: _Setup) -> dict[str, int]:
    """Bytes on one device that stay from step to step."""
    shapes, mask = stored_shapes(setup.model, setup.rule)
    optimizer = make_optimizer(setup.optimizer, 0.0)
    params = _on_device(shapes, setup.fsdp)
    # A critic is made of small arrays, which are on every device: weights, their target, and the moments.
    weights = jax.ShapeDtypeStruct((setup.critic,), jnp.float32)
    critic = (weights, weights, jax.eval_shape(optimizer.init, weights)) if setup.critic else ()
    return {
        "params": params,
        "optimizer": _on_device(jax.eval_shape(optimizer.init, split(shapes, mask)[0]), setup.fsdp),
        "ema": params if setup.ema else 0,
        "copy": _on_device(jax.tree.map(_in_bfloat16, shapes), setup.fsdp) if setup.copy else 0,
        "critic": _on_device(critic, 1),
    }


def _in_bfloat16(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)


def _on_device(tree: Any, fsdp: int) -> int:
    return sum(shard_bytes(leaf, fsdp=fsdp) for leaf in jax.tree.leaves(tree))


def _phases(setup: _Setup, *, accumulated: bool) -> Iterator[Phase]:
    """The moments of a step that can be its peak, in their order."""
    shapes, mask = stored_shapes(setup.model, setup.rule)
    grads: dict[str, int] = dict.fromkeys((*SCANS, "embedder"), 0)
    for path, leaf in flatten(split(shapes, mask)[0]).items():
        grads[part_of(path)] += shard_bytes(leaf, fsdp=setup.fsdp)
    needs = activations(setup.model, setup.rule, setup.cameras, setup.draws)
    saved, products = needs.saved, needs.products
    block = {part: _workspace(setup, part) for part in SCANS}
    begin = sum(grads.values()) if accumulated else 0

    def phase(name: str, gradients: int, workspace: int, *loads: Load) -> Phase:
        return Phase(name=name, gradients=begin + gradients, activations=Load().plus(*loads), workspace=workspace)

    yield phase("forward pass of SigLIP", 0, block["vision"], saved["vision"], products["vision"])
    yield phase("forward pass of the VLM", 0, block["vlm"], saved["vision"], saved["vlm"], products["vlm"], needs.cache)
    gradients = grads["expert"]
    loads = (*saved.values(), needs.backward("expert"), needs.cache)
    yield phase("backward pass of the action expert", gradients, block["expert"], *loads)
    if saved["vlm"] != Load():
        gradients += grads["vlm"]
        loads = (saved["vision"], saved["vlm"], needs.backward("vlm"), needs.cache)
        yield phase("backward pass of the VLM", gradients, block["vlm"], *loads)
    if saved["vision"] != Load():
        loads = (saved["vision"], needs.backward("vision"))
        yield phase("backward pass of SigLIP", sum(grads.values()), block["vision"], *loads)
    yield phase("optimizer's update", sum(grads.values()), 0)


def _workspace(setup: _Setup, part: str) -> int:
    """One block's weights and their gradient in the type of the activations; gathered first where they are sharded."""
    shapes, _ = stored_shapes(setup.model, setup.rule)
    layers = [
        x for path, x in flatten(shapes).items() if part_of(path) == part and ("/layers/" in path or "block" in path)
    ]
    depth = setup.model.vision.depth if part == "vision" else setup.model.vlm.depth
    cast = 2 * count(layers) * jnp.dtype(setup.model.dtype).itemsize
    gathered = sum(map(leaf_bytes, layers)) if setup.fsdp > 1 else 0
    return (cast + gathered) // depth


def _suggest(setup: _Setup, batch_size: int, usable: int, found: Plan) -> Iterator[str]:
    """Variations that need less, those first that change the result least."""
    if found.accumulate == 1:
        return
    tried = {name: _plan(changed, batch_size, usable) for name, changed in _variations(setup)}
    if not found.fits and not any(other.fits for other in tried.values()):
        # None is enough alone: all that keeps the trained weights the same, and then each of the others on top of it.
        base = replace(setup, fsdp=setup.devices, ema=False, model=replace(setup.model, remat="full"))
        together = f"fsdp {setup.devices}, no EMA, remat full" if setup.devices > 1 else "no EMA, remat full"
        tried[together] = _plan(base, batch_size, usable)
        tried |= {f"{name}, {together}": _plan(changed, batch_size, usable) for name, changed in _variations(base)}
    fewest = found.accumulate or math.inf
    better = {name: other for name, other in tried.items() if (other.accumulate or math.inf) < fewest}
    for name, other in better.items():
        parts = f" in {other.accumulate} parts" if other.accumulate != 1 else ""
        yield f"{name}: {gib(other.peak)} per device, fits{parts}"
    if not better and not found.fits:
        least = min(other.peak for other in tried.values())
        yield f"larger or more devices, or a smaller model: the least of all that was tried is {gib(least)} per device"


def _variations(setup: _Setup) -> Iterator[tuple[str, _Setup]]:
    model = setup.model
    if model.remat != "full":
        yield "remat full", replace(setup, model=replace(model, remat="full"))
    for fsdp in range(setup.fsdp + 1, setup.devices + 1):
        if setup.devices % fsdp == 0:
            yield f"fsdp {fsdp}", replace(setup, fsdp=fsdp)
    if setup.ema:
        yield "no EMA", replace(setup, ema=False)
    if setup.cameras > 1:
        yield f"{setup.cameras - 1} camera(s)", replace(setup, cameras=setup.cameras - 1)
    if setup.rule in ("full", "lora"):
        yield "VLM frozen (expert and heads train)", replace(setup, rule="vlm_frozen")
    if setup.rule != "expert_only":
        yield "expert only", replace(setup, rule="expert_only")
    if setup.rule == "full" and not model.has_lora:
        adapted = replace(model, vlm=model.vlm.with_lora(16), expert=model.expert.with_lora(32))
        yield "LoRA", replace(setup, model=adapted, rule="lora")
