"""The contents of a checkpoint, from metadata alone; reads no array."""

import io
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from pirl.checkpoints.export_folder import norm_stats_dims
from pirl.checkpoints.ocdbt import check_files, read_json
from pirl.checkpoints.restore import stored_tree
from pirl.checkpoints.torch_names import EXPERT_LM_HEAD
from pirl.checkpoints.weights import find_params, kind_of, npz_headers, open_safetensors, openpi_leaves
from pirl.files import size_of
from pirl.names import ASSETS_ITEM, NORM_STATS_FILE, PARAMS_ITEM, SAFETENSORS_FILE, TRAIN_STATE_ITEM
from pirl.text import size

_COMPONENTS = (
    ("LoRA", r".*lora.*"),
    ("unused", re.escape(EXPERT_LM_HEAD)),
    ("SigLIP", r"PaliGemma/img/.*|.*\.vision_tower\..*|.*\.multi_modal_projector\..*"),
    ("embedder", r"PaliGemma/llm/embedder/.*|.*\.embed_tokens\..*|.*\.paligemma\.lm_head\..*"),
    ("Gemma expert", r"PaliGemma/llm/.*_1/.*|.*\.gemma_expert\..*"),
    ("Gemma VLM", r"PaliGemma/llm/.*|.*\.language_model\..*"),
    ("heads", r"(state_proj|action_|time_mlp_).*"),
    ("other", r".*"),
)
_SHOWN = ("SigLIP", "embedder", "Gemma VLM", "Gemma expert", "heads", "LoRA", "other", "unused")
_TORCH_DTYPES = {
    **{"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "BOOL": "bool"},
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}
"""Types of safetensors by NumPy's and ml_dtypes' names."""


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """One stored array."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its stored dtype."""

    @property
    def parameters(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.parameters * np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)).itemsize


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of the model."""

    name: str
    """SigLIP, embedder, Gemma VLM, Gemma expert, heads, LoRA, other or unused."""
    leaves: int
    """Number of arrays."""
    parameters: int
    """Number of values."""
    bytes: int
    """Size in memory."""
    dtypes: tuple[str, ...]
    """Stored dtypes."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Contents of a checkpoint."""

    path: Path
    """The described folder or file; for a folder of steps, the latest."""
    kind: str
    """"openpi", "pytorch" or "npz"."""
    model: str
    """π₀, π₀.₅ or PaliGemma, inferred from parameter names."""
    step: int | None
    """Training step, if the folder is named after one."""
    steps: tuple[int, ...]
    """All steps in the same run."""
    leaves: Mapping[str, StoredLeaf]
    """Name -> stored array."""
    components: tuple[Component, ...]
    """Totals by part of the model."""
    disk_bytes: int
    """Size of the weights on disk."""
    norm_stats: Mapping[str, Mapping[str, int]]
    """Asset id -> key -> dimension."""
    train_state: tuple[str, ...]
    """The items for resuming; empty if the checkpoint is for inference only."""
    ema: bool | None
    """Whether the weights are a moving average (the raw ones are then in the train state). None: not recorded."""
    written_by: str
    """The program that wrote it, if recorded."""
    written_at: datetime | None
    """Time of writing, in UTC, if recorded."""

    @property
    def parameters(self) -> int:
        """Number of values."""
        return sum(component.parameters for component in self.components)

    @property
    def bytes(self) -> int:
        """Size in memory with the stored dtypes."""
        return sum(component.bytes for component in self.components)


def describe(path: str | os.PathLike[str]) -> Description:
    """Describe the weights at a local path, in any format that can be loaded."""
    path = Path(path).expanduser()
    kind = kind_of(path)
    folder, written_by, written_at, ema = path, "unknown", None, None
    train_state: tuple[str, ...] = ()
    if kind == "openpi":
        params = find_params(path)
        stored, _ = openpi_leaves(params)
        leaves = {
            name: StoredLeaf(shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype).name) for name, leaf in stored.items()
        }
        folder, files = params.parent if params.name == PARAMS_ITEM else params, params
        written_by, written_at = _origin(folder)
        train_state, ema = _train_state(folder / TRAIN_STATE_ITEM)
    elif kind == "pytorch":
        files = path / SAFETENSORS_FILE if path.is_dir() else path
        folder = files.parent
        leaves, metadata = _safetensors_leaves(files)
        written_by = metadata.get("written_by", "PyTorch" if metadata.get("format") == "pt" else "unknown")
    else:
        files = path
        leaves = {name: StoredLeaf(shape=shape, dtype=dtype) for name, (shape, dtype) in npz_headers(path).items()}
        leaves = {re.sub(r"^params/", "PaliGemma/", name): leaf for name, leaf in leaves.items()}
    return Description(
        path=files if kind == "npz" else folder,
        kind=kind,
        model=_model(leaves),
        step=int(folder.name) if kind == "openpi" and folder.name.isdigit() else None,
        steps=_steps(folder) if kind == "openpi" else (),
        leaves=leaves,
        components=_components(leaves),
        disk_bytes=size_of(files),
        norm_stats={} if kind == "npz" else _norm_stats(folder / ASSETS_ITEM),
        train_state=train_state,
        ema=ema,
        written_by=written_by,
        written_at=written_at,
    )


def render(description: Description) -> str:
    """The description as text for a terminal."""
    d = description
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_row("path", str(d.path))
    facts.add_row("kind", f"{d.kind} ({d.model})")
    if d.step is not None:
        facts.add_row("step", f"{d.step} of {', '.join(map(str, d.steps))}" if len(d.steps) > 1 else str(d.step))
    facts.add_row("weights", f"{d.parameters:,} parameters in {len(d.leaves)} arrays, {size(d.bytes)}")
    facts.add_row("on disk", size(d.disk_bytes))
    if d.kind == "openpi":
        facts.add_row("resumable", f"yes: {', '.join(d.train_state)}" if d.train_state else "no: weights only")
        facts.add_row("average", {True: "moving average (EMA)", False: "raw weights", None: "not recorded"}[d.ema])
    written = f" at {d.written_at:%Y-%m-%d %H:%M} UTC" if d.written_at else ""
    facts.add_row("written by", d.written_by + written)
    for asset, dims in d.norm_stats.items():
        facts.add_row("norm stats", f"{asset}: {', '.join(f'{key} {n}' for key, n in dims.items())}")
    if not d.norm_stats and d.kind != "npz":
        facts.add_row("norm stats", "none: OpenPI cannot serve it without")
    parts = Table("component", "arrays", "parameters", "size", "types")
    for c in d.components:
        parts.add_row(c.name, str(c.leaves), f"{c.parameters:,}", size(c.bytes), ", ".join(c.dtypes))
    text = io.StringIO()
    Console(file=text, width=120, color_system=None, markup=False, emoji=False).print(facts, parts)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _components(leaves: Mapping[str, StoredLeaf]) -> tuple[Component, ...]:
    groups: dict[str, list[StoredLeaf]] = {name: [] for name in _SHOWN}
    for path, leaf in leaves.items():
        groups[next(name for name, pattern in _COMPONENTS if re.fullmatch(pattern, path))].append(leaf)
    return tuple(
        Component(
            name=name,
            leaves=len(group),
            parameters=sum(leaf.parameters for leaf in group),
            bytes=sum(leaf.bytes for leaf in group),
            dtypes=tuple(sorted({leaf.dtype for leaf in group})),
        )
        for name, group in groups.items()
        if group
    )


def _model(leaves: Mapping[str, StoredLeaf]) -> str:
    if any(re.match(r"(model\.)?time_mlp_in", name) for name in leaves):
        return "π₀.₅"
    if any(re.match(r"(model\.)?(state_proj|action_time_mlp)", name) for name in leaves):
        return "π₀"
    return "PaliGemma" if any(name.startswith("PaliGemma/") for name in leaves) else "unknown"


def _safetensors_leaves(file: Path) -> tuple[dict[str, StoredLeaf], dict[str, str]]:
    with open_safetensors(file) as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
        leaves = {
            name: StoredLeaf(shape=tuple(s.get_shape()), dtype=_TORCH_DTYPES.get(s.get_dtype(), s.get_dtype().lower()))
            for name, s in slices.items()
        }
        return leaves, dict(stored.metadata() or {})


def _train_state(folder: Path) -> tuple[tuple[str, ...], bool | None]:
    """The resumable items, and whether they include raw weights because the served ones are an EMA."""
    if not (folder / "_METADATA").is_file():
        return (), None
    check_files(folder)
    kept = {str(key): value for key, value in stored_tree(folder).items() if value is not None and value != {}}
    return tuple(kept), "params" in kept


def _origin(folder: Path) -> tuple[str, datetime | None]:
    file = folder / "_CHECKPOINT_METADATA"
    if not file.is_file():
        return "unknown", None
    content = read_json(file)
    nanoseconds = content.get("commit_timestamp_nsecs")
    at = datetime.fromtimestamp(nanoseconds / 1e9, UTC) if nanoseconds else None
    if written_by := (content.get("custom_metadata") or {}).get("written_by"):
        return str(written_by), at
    handlers = content.get("item_handlers") or {}
    openpi = isinstance(handlers, dict) and any(str(handler).startswith("openpi.") for handler in handlers.values())
    return "OpenPI" if openpi else "Orbax", at


def _norm_stats(assets: Path) -> dict[str, dict[str, int]]:
    return {
        file.parent.relative_to(assets).as_posix(): norm_stats_dims(file.read_text(), name=str(file))
        for file in sorted(assets.rglob(NORM_STATS_FILE))
    }


def _steps(folder: Path) -> tuple[int, ...]:
    if not folder.name.isdigit():
        return ()
    siblings = folder.absolute().parent.iterdir()
    return tuple(sorted(int(s.name) for s in siblings if s.name.isdigit() and (s / PARAMS_ITEM).is_dir()))
