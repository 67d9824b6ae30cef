"""Memory of a training step per device, estimated from shapes before anything is allocated.

An estimate is the sum of three parts:

    state        weights (float32; frozen ones bfloat16), optimizer, EMA, critic, targets: the shapes of the state that
                 the agent's `init` makes, each leaf sharded by OpenPI's rule
    batch        the input batch, with next observations if the algorithm reads them
    step         peak of live arrays during the update, which `activations.py` computes from jax's trace. The part that
                 does not grow with the batch is gradients and the current layer's weights; the part that does is
                 activations: what remat keeps, what it recomputes of one layer, keys and values, candidates

Nothing is fitted. A batch that does not fit at once is split (`accumulate`), which holds one more set of gradients. A
test compares the plan with peaks measured on a GPU (`tests/golden/measured_memory.json`).

Not modelled: how XLA packs arrays, and what it recomputes to save memory. So a tenth of the device is left free. Acting
and evaluation need less than a step and are not counted.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax

from pirl.agents.agent import Agent
from pirl.config import RLTrainConfig
from pirl.errors import ConfigError
from pirl.kernels import gated
from pirl.models.config import Attention, Pi0Config, Remat
from pirl.models.freeze import split, trainable_mask
from pirl.models.params import count, flatten
from pirl.models.pi0 import param_shapes
from pirl.parallel.sharding import shards
from pirl.planning.activations import PROBE, Load, largest, traced_loads
from pirl.planning.memory import GIB, breakdown, gib, leaf_bytes, shard_bytes
from pirl.records import BatchSizes, BatchSpec, Spec
from pirl.text import table

BY_SPEED: tuple[Remat, ...] = ("none", "names", "dots", "full")
"""Remat settings, from least to most recomputation."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory of one device: needed, available, and the largest batch."""

    parts: Mapping[str, int]
    """Bytes on one device at the peak: the state's groups, `batch`, `gradients, weights at work` and `activations`."""
    usable: int
    """Usable bytes of a device."""
    batch_size: int
    """The configured batch, over all devices."""
    accumulate: int | None
    """Parts the batch must be split into; None if not even one sample per device fits."""
    largest_batch: int
    """Largest batch over all devices without accumulation; 0 if none fits."""
    devices: int
    """Number of devices."""
    fsdp: int
    """Devices that share one copy of the weights."""
    parameters: int
    """The policy's parameters."""
    trainable: int
    """The policy's trainable parameters."""
    remat: Remat
    """The remat setting of this plan."""
    chosen: Remat | None = None
    """With `choose`: the remat setting with least recomputation that fits."""
    suggestions: tuple[str, ...] = ()
    """If the batch does not fit at once: changes that help, each of them planned."""

    @property
    def peak(self) -> int:
        """Peak bytes on one device."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the batch fits, whole or in parts."""
        return self.accumulate is not None

    def __str__(self) -> str:
        rows = [("per device", "bytes"), *((name, gib(size)) for name, size in self.parts.items() if size >= 2**10)]
        rows.append(("peak", gib(self.peak)))
        head = (
            f"{self.trainable / 1e6:,.0f} M of {self.parameters / 1e6:,.0f} M parameters train; "
            f"batch {self.batch_size} on {self.devices} device(s), fsdp {self.fsdp}, remat {self.remat}"
        )
        if self.accumulate is None:
            verdict = f"does not fit, not even in parts of one sample per device: {gib(self.usable)} may be used"
            verdict += f"; largest batch at once: {self.largest_batch}" if self.largest_batch else ""
        else:
            parts = f"in {self.accumulate} parts " if self.accumulate > 1 else ""
            verdict = f"fits {parts}({gib(self.usable)} may be used); largest batch at once: {self.largest_batch}"
        lines = [head, *table(rows, "<>"), verdict]
        if self.chosen is not None and self.chosen != self.remat:
            lines.append(f"  or: --model.remat {self.chosen}, the setting that computes least again and fits")
        return "\n".join([*lines, *(f"  or: {suggestion}" for suggestion in self.suggestions)])


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """One way to train: the one `plan` was called with, or a variation."""

    config: RLTrainConfig
    devices: int
    fsdp: int
    say: Callable[[str], None] = lambda _: None
    """Called with each variation before it is planned."""

    @property
    def model(self) -> Pi0Config:
        assert isinstance(self.config.model, Pi0Config)
        return self.config.model


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """Shapes and traces of an algorithm with a model, independent of devices."""

    state: Any
    """Shapes of the training state."""
    batch: Any
    """Shapes of a batch of PROBE samples."""
    programs: tuple[tuple[Any, frozenset[int]], ...]
    """Traces of the update, each with the token counts whose attention logits are fused, so never in memory."""


def plan(
    config: RLTrainConfig,
    *,
    device_gb: int | float,
    devices: int | None = None,
    usable_fraction: float = 0.9,
    choose: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Bytes per device of a training run, the largest batch that fits, and suggestions if the batch does not.

    `device_gb` is in GiB, as in nvidia-smi; XLA may use `usable_fraction` of it. `devices` defaults to `mesh.fsdp`. A
    batch that does not fit at once is split, and variations that need fewer parts are suggested. `choose` also finds
    the remat setting with least recomputation that fits. `say` is called with each variation.
    """
    setup = _Setup(config=config, devices=devices or config.mesh.size, fsdp=config.mesh.size, say=say)
    _check(setup)
    usable = int(device_gb * GIB * usable_fraction)
    if "auto" in (setup.model.remat, config.mesh.fsdp):
        decided, _ = _decide(setup, usable)  # keep the configured accumulation: the plan computes it
        setup = replace(decided, config=replace(decided.config, agent=config.agent))
    found = _plan(setup, usable)
    return replace(
        found,
        chosen=_choose(setup, usable) if choose else None,
        suggestions=tuple(_suggest(setup, usable, found)),
    )


def decide(
    config: RLTrainConfig, *, device_gb: int | float | None, devices: int, usable_fraction: float = 0.9
) -> tuple[RLTrainConfig, bool]:
    """(configuration with `auto` resolved in `mesh.fsdp`, `agent.accumulate` and `model.remat`; whether it fits).

    Chooses the smallest fsdp with which the batch fits at once (or in the configured parts), then the least
    rematerialisation. If none does: the largest fsdp and the fewest parts. `device_gb` None: memory is unlimited, as on
    a CPU.
    """
    model, mesh = config.model, replace(config.mesh, fsdp=config.mesh.size)
    if device_gb is None or not isinstance(model, Pi0Config):
        if isinstance(model, Pi0Config) and model.remat == "auto":
            model = replace(model, remat="none")
        return replace(config, model=model, mesh=mesh, agent=replace(config.agent, accumulate=config.agent.parts)), True
    setup = _Setup(config=config, devices=devices, fsdp=config.mesh.size)
    _check(setup)
    found, fits = _decide(setup, int(device_gb * GIB * usable_fraction))
    return replace(found.config, mesh=replace(config.mesh, fsdp=found.fsdp)), fits


def _decide(setup: _Setup, usable: int) -> tuple[_Setup, bool]:
    config, remat = setup.config, setup.model.remat
    remats = BY_SPEED if remat == "auto" else (remat,)
    sizes = [setup.fsdp] if config.mesh.fsdp != "auto" else _shareable(_with_model(setup, remat=remats[0]))
    tried = (_with_model(replace(setup, fsdp=fsdp), remat=remat) for fsdp in sizes for remat in remats)
    parts = config.agent.parts
    if found := next((one for one in tried if _plan(one, usable).accumulate == parts), None):
        return _in_parts(found, parts), True
    ladder = [_with_model(replace(setup, fsdp=sizes[-1]), remat=remat) for remat in remats]
    fewest = _plan(ladder[-1], usable).accumulate
    if fewest is None or config.agent.accumulate != "auto":
        return _in_parts(ladder[-1], parts), False
    return _in_parts(next(one for one in ladder if _plan(one, usable).accumulate == fewest), fewest), True


def _shareable(setup: _Setup) -> list[int]:
    """Possible fsdp sizes: divisors of the number of devices that divide an axis of every large matrix."""
    leaves = jax.tree.leaves(_trace(_essence(setup.config), _whole(setup)).state)
    divisors = (n for n in range(1, setup.devices + 1) if setup.devices % n == 0)
    return [n for n in divisors if n == 1 or all(shards(x.shape, x.dtype, n) for x in leaves)]


def _whole(setup: _Setup) -> bool:
    """Whether to plan for the gated-product kernel, which is used on a single device only."""
    return gated.possible(setup.model) and setup.devices == 1


def _choose(setup: _Setup, usable: int) -> Remat | None:
    parts = setup.config.agent.parts
    return next((r for r in BY_SPEED if _plan(_with_model(setup, remat=r), usable).accumulate == parts), None)


def _check(setup: _Setup) -> None:
    if not isinstance(setup.config.model, Pi0Config):
        raise ConfigError("the policy is an MLP over the state", hint="it fits everywhere; `plan` is for π₀")
    if setup.devices % setup.fsdp:
        raise ConfigError(
            f"fsdp is {setup.fsdp} and there are {setup.devices} devices", hint="fsdp divides the number of devices"
        )
    if setup.config.batch_size % setup.devices:
        raise ConfigError(
            f"a batch of {setup.config.batch_size} over {setup.devices} devices",
            hint="the batch is a multiple of the devices",
        )


def _plan(setup: _Setup, usable: int) -> Plan:
    config, model, fsdp = setup.config, setup.model, setup.fsdp
    essence = _essence(config)
    whole = _whole(setup)
    setup.say(f"freeze {config.freeze_rule}, remat {model.remat}, fsdp {fsdp}")
    traced = _trace(essence, whole)
    shapes = param_shapes(model)
    trainable = split(shapes, trainable_mask(shapes, model, config.freeze_rule))[0]
    learning = [
        leaf
        for path, leaf in flatten(traced.state.params).items()
        if path not in traced.state.frozen and not path.startswith("critic/")
    ]
    state = {part.name: part.per_device for part in breakdown(traced.state, fsdp=fsdp).parts}
    for kind in ("ema", "target"):  # frozen weights are in memory once (`Step.shared`)
        for path, leaf in flatten(getattr(traced.state, kind)).items():
            if path in traced.state.frozen:
                state[f"{kind}/{path.partition('/')[0]}"] -= shard_bytes(leaf, fsdp=fsdp)
    batch = sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(traced.batch)) / PROBE
    gradients = sum(shard_bytes(leaf, fsdp=fsdp) for leaf in learning)
    at_once = _loads(essence, fsdp, whole)
    in_parts = tuple(load.plus(Load(gradients)) for load in at_once)
    share = config.batch_size // setup.devices
    room = usable - sum(state.values())
    splits = [n for n in range(config.agent.parts, share + 1) if share % n == 0]

    def peak(parts: int) -> Load:
        return max(at_once if parts == 1 else in_parts, key=lambda load: load.at(share // parts))

    fitting = (n for n in splits if peak(n).at(share // n) + batch * share <= room)
    accumulate = next(fitting, None)
    parts = accumulate or splits[-1]
    step = {
        "batch": batch * share,
        "gradients, weights at work": peak(parts).fixed,
        "activations": peak(parts).per_sample * (share // parts),
    }
    return Plan(
        parts={name: int(size) for name, size in (state | step).items()},
        usable=usable,
        batch_size=config.batch_size,
        accumulate=accumulate,
        largest_batch=_largest_batch(at_once, batch, room) * setup.devices,
        devices=setup.devices,
        fsdp=fsdp,
        parameters=count(flatten(shapes).values()),
        trainable=count(flatten(trainable).values()),
        remat=model.remat,
    )


def _largest_batch(loads: tuple[Load, ...], batch: float, room: int) -> int:
    """Largest number of samples per device at which every load fits; 0 if none."""
    return max(0, min(int((room - load.fixed) / (load.per_sample + batch)) for load in loads))


def _essence(config: RLTrainConfig) -> RLTrainConfig:
    """The configuration without settings that do not affect the trace, so that variations share one."""
    # Image augmentation is over long before the peak, and takes a quarter of the tracing time.
    agent = replace(config.agent, accumulate=1, augment=False)
    return replace(config, agent=agent, batch_size=1, mesh=replace(config.mesh, fsdp=1))


@lru_cache(maxsize=32)
def _trace(config: RLTrainConfig, whole: bool) -> _Trace:
    from pirl.build import build_agent

    model = config.model
    assert isinstance(model, Pi0Config)
    batch = batch_shapes(build_agent(config), replace(config.batch_sizes, batch=PROBE))
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(build_agent(config).init, key)

    def traced(how: Attention) -> Any:
        agent = build_agent(replace(config, model=replace(model, attention=how)))
        with gated.standing_in() if whole and how != "plain" else nullcontext():
            return jax.make_jaxpr(agent.update)(state, batch, key)

    programs: list[tuple[Any, frozenset[int]]] = []
    if model.attention in ("plain", "auto"):
        programs.append((traced("plain"), frozenset()))
    if model.attention != "plain":
        # jax's XLA attention stands in for cuDNN's, which cannot be traced without a GPU; only its logits differ.
        prefix = len(config.cameras) * model.tokens_per_image + model.token_len
        programs.append((traced("xla"), frozenset({prefix, model.tokens_per_image})))
    return _Trace(state=state, batch=batch, programs=tuple(programs))


@lru_cache(maxsize=64)
def _loads(config: RLTrainConfig, fsdp: int, whole: bool) -> tuple[Load, ...]:
    programs = _trace(config, whole).programs
    return largest(load for p, tokens in programs for load in traced_loads(p, fsdp=fsdp, fused_tokens=tokens))


def batch_shapes(agent: Agent, sizes: BatchSizes) -> Any:
    """The agent's batch as a tree of ShapeDtypeStructs."""

    def shapes(spec: BatchSpec) -> dict[str, Any]:
        return {
            name: jax.ShapeDtypeStruct(one.shape, one.dtype) if isinstance(one, Spec) else shapes(one)
            for name, one in spec.items()
        }

    return shapes(agent.batch_spec(sizes))


def _suggest(setup: _Setup, usable: int, found: Plan) -> Iterator[str]:
    """Variations that need less memory, ordered by how little they change the result."""
    if found.accumulate == setup.config.agent.parts:
        return
    tried = {name: _plan(changed, usable) for name, changed in _variations(setup)}
    if not found.fits and not any(other.fits for other in tried.values()):
        # No single change suffices: combine those that keep the trained weights, then add each other one.
        base = replace(_without_ema(_with_model(setup, remat="full")), fsdp=setup.devices)
        together = f"fsdp {setup.devices}, no EMA, remat full" if setup.devices > 1 else "no EMA, remat full"
        tried[together] = _plan(base, usable)
        tried |= {f"{name}, {together}": _plan(changed, usable) for name, changed in _variations(base)}
    fewest = found.accumulate or math.inf
    better = {name: other for name, other in tried.items() if (other.accumulate or math.inf) < fewest}
    for name, other in better.items():
        parts = f" in {other.accumulate} parts" if other.accumulate != 1 else ""
        yield f"{name}: {gib(other.peak)} per device, fits{parts}"
    if not better and not found.fits:
        least = min(other.peak for other in tried.values())
        yield f"larger or more devices, or a smaller model: the least of all that was tried is {gib(least)} per device"


def _variations(setup: _Setup) -> Iterator[tuple[str, _Setup]]:
    config, model = setup.config, setup.model
    if model.remat != "full":
        yield "remat full", _with_model(setup, remat="full")
    for fsdp in range(setup.fsdp + 1, setup.devices + 1):
        if setup.devices % fsdp == 0:
            yield f"fsdp {fsdp}", replace(setup, fsdp=fsdp)
    if config.policy_ema_decay is not None:
        yield "no EMA", _without_ema(setup)
    if len(config.cameras) > 1:
        fewer = replace(config, data=replace(config.data, cameras=config.cameras[:-1]))
        yield f"{len(config.cameras) - 1} camera(s)", replace(setup, config=fewer)
    if config.freeze_rule == "frozen":
        return
    if config.freeze_rule in ("full", "lora"):
        yield "VLM frozen (expert and heads train)", _frozen(setup, "vlm_frozen")
    if config.freeze_rule != "expert_only":
        yield "expert only", _frozen(setup, "expert_only")
    if config.freeze_rule == "full" and not model.has_lora:
        adapted = _with_model(setup, vlm=model.vlm.with_lora(16), expert=model.expert.with_lora(32))
        yield "LoRA", _frozen(adapted, "lora")


def _with_model(setup: _Setup, **changes: Any) -> _Setup:
    return replace(setup, config=replace(setup.config, model=replace(setup.model, **changes)))


def _in_parts(setup: _Setup, parts: int) -> _Setup:
    return replace(setup, config=replace(setup.config, agent=replace(setup.config.agent, accumulate=parts)))


def _frozen(setup: _Setup, rule: Any) -> _Setup:
    return replace(setup, config=replace(setup.config, freeze=rule))


def _without_ema(setup: _Setup) -> _Setup:
    return replace(setup, config=replace(setup.config, agent=setup.config.agent.without_ema()))
