"""Metadata of a run: configuration, code, libraries. Stored with every checkpoint and compared on resume."""

import json
import math
import platform
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pirl import __version__
from pirl.config_io import ABSENT, diff
from pirl.errors import CheckpointError, PirlWarning, listing
from pirl.nested import flatten

_LIBRARIES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")

SHAPING = (
    *("model", "critic", "agent.type", "freeze", "policy_optimizer.type", "critic_optimizer.type"),
    *("agent.value", "agent.partial_horizon"),
    *("data.robot", "data.cameras", "data.tokenizer", "data.critic_horizon"),
)
"""Key prefixes that determine the state's structure or meaning; a run cannot be resumed with other values."""
HARMLESS = ("model.dtype", "model.remat", "model.attention", "critic.dtype", "critic.dropout")
"""Exceptions: they change how the model computes, not what is stored."""


def run_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration (a tree of JSON values), code revision, library versions, platform and time."""
    versions = {"python": platform.python_version(), "pirl": __version__}
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    return {
        "config": as_json(config),
        "revision": git_revision(Path(__file__).parent),
        "versions": versions,
        "platform": platform.platform(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def git_revision(folder: Path) -> str | None:
    """The commit checked out in a folder, with `-dirty` for uncommitted changes; None outside a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def as_json(value: Any) -> Any:
    """The value after a JSON round trip (tuples become lists), so that saved and new configurations compare equal."""
    try:
        return json.loads(json.dumps(value, default=lambda x: x.item()))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"not a tree of JSON values: {error}", hint="numbers, text, true/false, none, lists and dicts of them"
        ) from error


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Metrics as JSON values: NaN and infinity become null."""
    values = {name: float(value) for name, value in metrics.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def config_changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> "old -> new" for everything that differs."""
    return {
        path: f"{_shown(before)} -> {_shown(after)}"
        for path, before, after in sorted(diff(as_json(saved), as_json(new)))
    }


def refused_changes(
    saved: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    shaping: Sequence[str] = SHAPING,
    harmless: Sequence[str] = HARMLESS,
) -> dict[str, str]:
    """Dotted key -> "key: old -> new" for changes that prevent resuming.

    A setting missing from the saved configuration is new in pirl and does not count.
    """
    old = flatten(as_json(saved), ".")
    return {
        key: f"{key}: {change}"
        for key, change in config_changes(saved, new).items()
        if _below(key, shaping) and not _below(key, harmless)
        if any(_below(known, [key]) or _below(key, [known]) for known in old)
    }


def check_compatible(
    saved: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    shaping: Sequence[str] = SHAPING,
    harmless: Sequence[str] = HARMLESS,
    ignore: Sequence[str] = (),
) -> dict[str, str]:
    """Raise if a key in `shaping` changed; warn about all other changes. Returns the changes.

    Keys are dotted prefixes. Keys in `ignore` may change silently.
    """
    changes = {key: change for key, change in config_changes(saved, new).items() if not _below(key, ignore)}
    lines = {key: f"{key}: {change}" for key, change in changes.items()}
    if refused := refused_changes(saved, new, shaping=shaping, harmless=harmless):
        raise CheckpointError(
            f"the checkpoint was made with other settings that shape its state\n{listing(list(refused.values()))}",
            hint="resume with the saved configuration, or start a new run from the checkpoint's weights",
        )
    if changes:
        warnings.warn(
            f"resuming with {len(changes)} changed settings\n{listing(list(lines.values()), limit=30)}",
            PirlWarning,
            stacklevel=2,
        )
    return changes


def _below(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _shown(value: Any) -> str:
    return ABSENT if value == ABSENT else json.dumps(value)
