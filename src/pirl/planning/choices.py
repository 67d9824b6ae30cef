"""Resolve settings that are `auto` for this machine's devices, and print one line for each."""

import warnings
from dataclasses import replace

import jax
import numpy as np
from jax.experimental import multihost_utils

from pirl.config import RLTrainConfig
from pirl.errors import PirlWarning
from pirl.kernels import attention, gated
from pirl.models.config import Pi0Config
from pirl.parallel.distributed import is_main
from pirl.planning.memory import GIB
from pirl.planning.plan import decide


def with_choices(config: RLTrainConfig) -> RLTrainConfig:
    """The configuration with `auto` resolved in `mesh.fsdp`, `agent.accumulate` and `model.remat`.

    Prints each choice, and the attention kernel that `auto` uses.
    """
    model = config.model
    if not isinstance(model, Pi0Config):
        return decide(config, device_gb=None, devices=jax.device_count())[0]
    fused = attention.kernel(model, model.vlm.head_dim) is not None
    said = [f"model.attention auto: {'cudnn' if fused else 'plain'}"] if model.attention == "auto" else []
    if said and gated.possible(model):
        said[0] += ", and a kernel for gated products"
    room, devices = _room(), jax.device_count()
    # Plan only for the attention that will be used. `room` is XLA's share of the device already.
    known = replace(config, model=replace(model, attention="cudnn" if fused else "plain"))
    if room is not None and "auto" not in (model.remat, config.mesh.fsdp, config.agent.accumulate):
        found, fits = config, True
    else:
        found, fits = decide(known, device_gb=room, devices=devices, usable_fraction=0.95)
    why = "memory is no concern on a CPU" if room is None else f"what fits into {room:.0f} GiB"
    if model.remat == "auto":
        said.append(f"model.remat auto: {found.model.remat} ({why})")  # type: ignore[union-attr]
    if config.mesh.fsdp == "auto" and devices > 1:
        said.append(f"mesh.fsdp auto: {found.mesh.fsdp} of {devices} devices share one copy of the weights ({why})")
    if config.agent.accumulate == "auto" and found.agent.parts > 1:
        said.append(f"agent.accumulate auto: each batch in {found.agent.parts} parts ({why})")
    if is_main() and said:
        print("\n".join(said))
    if is_main() and not fits:
        message = f"by estimate a batch of {config.batch_size} does not fit into {room:.0f} GiB per device"
        warnings.warn(PirlWarning(f"{message}: `pirl plan {config.name}` shows what would"), stacklevel=3)
    return replace(found, model=replace(found.model, attention=model.attention))  # type: ignore[arg-type]


def _room() -> float | None:
    """GiB that XLA may use per device: the minimum over hosts; None without a known limit, as on a CPU."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if jax.process_count() > 1:
        limits = multihost_utils.process_allgather(np.float32((limit or 0) / GIB))
        return float(limits.min()) or None
    return limit / GIB if limit else None
