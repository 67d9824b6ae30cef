"""`pirl doctor`: checks the machine, one line per check, with a fix for each problem.

It must work when everything else is broken: jax runs in a separate process, a crash in a check is a result, and only
the standard library is imported before a check needs more.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pirl
from pirl import paths
from pirl.cli.app import TRAINING_SHARE

NAME = "doctor"
HELP = """\
Checks this machine and suggests fixes. ✓ is fine, ✗ is broken (exit code 1), – is optional or advice. The jax check
comes last: it starts jax in a separate process."""
EXAMPLES = """\
examples:
  pirl doctor                   one line per check
  pirl doctor --json            machine-readable: {"ok": ..., "checks": [...]}
  pirl doctor --timeout 300     give jax longer to start (a cold network disk, many GPUs)"""

GIB = 2**30
# π₀ has 3,238,048,528 parameters: 13 GB in float32, and four times that with the EMA and Adam's two moments.
WEIGHTS_BYTES = 13 * 10**9
CHECKPOINT_BYTES = 4 * WEIGHTS_BYTES
# A requirement in package metadata, such as `jax[cuda13]<0.12,>=0.10; extra == "cuda"`.
REQUIREMENT = r"""^([\w.-]+)(?:\[([\w,-]+)\])?(?:.*extra\s*==\s*['"]([\w.-]+)['"])?"""
APT = "apt-get install -y libosmesa6 libegl1 libgl1-mesa-dri libgles2"

MODES = {
    "act (pirl eval, pirl serve)": (1, 7),
    "LoRA ACRLPD, batch 16 (acrlpd_aloha_fold_lora)": (1, 18),
    "full BC, batch 32 (bc_aloha_fold)": (1, 62),
    "full ACRLPD, batch 128 (acrlpd_aloha_fold, --mesh.fsdp 8)": (8, 12),
}
"""Mode -> (devices, GiB per device), for full-size models with `--model.remat full`; a test compares `pirl plan`."""

# The probe must not reserve GPU memory, nor fail while a training run holds most of it.
PROBE_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
PROBE = """
import json, jax
devices = [{"kind": d.device_kind, "bytes": (d.memory_stats() or {}).get("bytes_limit")} for d in jax.local_devices()]
print(json.dumps({"version": jax.__version__, "backend": jax.default_backend(), "devices": devices}))
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    """Name of the check."""
    ok: bool | None
    """True: fine. False: broken. None: optional and absent, or could be better."""
    detail: str
    """The finding."""
    fix: str = ""
    """How to fix it."""


def check_python() -> Check:
    """Whether Python is new enough."""
    found = ".".join(map(str, sys.version_info[:3]))
    fine = tuple(sys.version_info[:2]) >= (3, 11)
    return Check(name="python", ok=fine, detail=found, fix="" if fine else "use Python 3.11 or later")


def check_pirl() -> Check:
    """Whether the running code is the installed version."""
    installed = _version("pirl")
    if installed == pirl.__version__:
        return Check(name="pirl", ok=True, detail=installed)
    detail = f"{pirl.__version__} runs, {installed or 'nothing'} is installed"
    return Check(name="pirl", ok=None, detail=detail, fix="in the project's folder: pip install -e .")


def check_dependencies() -> Check:
    """Whether all required packages are installed."""
    if _version("pirl") is None:
        return Check(name="dependencies", ok=None, detail="not known: pirl itself is not installed")
    names = _requirements("pirl")
    missing = [name for name in names if _version(name) is None]
    if missing:
        detail = f"missing: {', '.join(missing)}"
        return Check(name="dependencies", ok=False, detail=detail, fix=f"pip install {' '.join(missing)}")
    return Check(name="dependencies", ok=True, detail=f"all {len(names)} are installed")


def check_extra(extra: str) -> Check:
    """Whether the packages of an optional feature are installed."""
    versions = {name: _version(name) for name in _requirements("pirl", extra=extra)}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        detail = f"not installed: {', '.join(missing)}"
        return Check(name=f"extra {extra}", ok=None, detail=detail, fix=f"pip install 'pirl[{extra}]'")
    listed = ", ".join(f"{name} {version}" for name, version in list(versions.items())[:4])
    more = f" and {len(versions) - 4} more" if len(versions) > 4 else ""
    return Check(name=f"extra {extra}", ok=True, detail=listed + more)


def check_video_decoder() -> Check:
    """Whether PyAV decodes AV1, the format of LeRobot's videos."""
    fine = _has_codec("libdav1d", "r")
    fix = "" if fine else "pip install --upgrade --force-reinstall av  (its wheels bring their own FFmpeg)"
    return Check(name="AV1 decoder", ok=fine, detail="libdav1d" if fine else "PyAV has no libdav1d", fix=fix)


def check_video_encoder() -> Check:
    """Whether PyAV encodes AV1; only needed to record datasets."""
    fine = _has_codec("libsvtav1", "w")
    fix = "" if fine else "to record datasets: pip install --upgrade --force-reinstall av"
    return Check(name="AV1 encoder", ok=fine or None, detail="libsvtav1" if fine else "PyAV has no libsvtav1", fix=fix)


def check_gpu_memory_settings() -> Check:
    """XLA's share of GPU memory. jax's default of 0.75 is too small for full fine-tuning of π₀ on an 80 GB GPU."""
    name = "GPU memory"
    new, old = (os.environ.get(f"XLA{infix}_CLIENT_MEM_FRACTION", "") for infix in ("", "_PYTHON"))
    if new and old:
        detail = f"XLA_CLIENT_MEM_FRACTION={new} and XLA_PYTHON_CLIENT_MEM_FRACTION={old}; jax refuses GPUs with both"
        return Check(name=name, ok=False, detail=detail, fix="unset XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not (new or old):
        return Check(name=name, ok=True, detail=f"pirl train takes {TRAINING_SHARE} of it, other commands jax's 0.75")
    variable = "XLA_CLIENT_MEM_FRACTION" if new else "XLA_PYTHON_CLIENT_MEM_FRACTION"
    detail = f"{variable}={new or old}"
    try:
        fraction = float(new or old)
    except ValueError:
        return Check(name=name, ok=False, detail=f"{detail} is not a number", fix=f"export {variable}=0.9")
    if not fraction > 0:
        return Check(name=name, ok=False, detail=f"{detail} is not above 0", fix=f"export {variable}=0.9")
    if not 0.85 <= fraction <= 0.98:
        return Check(name=name, ok=None, detail=detail, fix=f"on a GPU: export {variable}=0.9")
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") in ("false", "False", "0"):
        detail += ", XLA_PYTHON_CLIENT_PREALLOCATE=false (memory fragments)"
        return Check(name=name, ok=None, detail=detail, fix="unset XLA_PYTHON_CLIENT_PREALLOCATE")
    return Check(name=name, ok=True, detail=detail)


def check_ram() -> Check:
    """Whether the weights of a full-size model fit into the memory available to this container."""
    import psutil

    free = psutil.virtual_memory().available
    limit = container_limit()
    detail = f"{free / GIB:.1f} GiB available"
    if limit is not None and limit < free:
        free, detail = limit, f"{limit / GIB:.1f} GiB allowed to this container"
    if free < WEIGHTS_BYTES:
        fix = "use a larger machine for full-size models; this one will do for small ones"
        detail += f"; the weights of π₀ take {WEIGHTS_BYTES / 1e9:.0f} GB in float32"
        return Check(name="RAM", ok=None, detail=detail, fix=fix)
    return Check(name="RAM", ok=True, detail=detail)


def check_place(name: str, folder: Path, *, variable: str = "", size: int = 0, required: bool = False) -> Check:
    """Whether a folder is writable and has room. `required`: problems are errors, because pirl itself writes there."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    source = f" ({variable})" if os.environ.get(variable) else ""
    detail = f"{folder}{source}, {free / GIB:.1f} GiB free"
    elsewhere = f", or use another folder: export {variable}=DIR" if variable else ""
    if not os.access(there, os.W_OK):
        ok, fix = False if required else None, f"{there} is not writable: make it so{elsewhere}"
    elif free < GIB:
        ok, fix = False if required else None, f"make room{elsewhere}"
    elif free < size:
        ok, fix = None, f"make room for a full-size π₀ ({size / 1e9:.0f} GB){elsewhere}"
    else:
        ok, fix = True, ""
    return Check(name=name, ok=ok, detail=detail, fix=fix)


def check_gl() -> Check:
    """Whether MuJoCo can render with OSMesa (CPU) or EGL (GPU); only an error if MuJoCo is installed."""
    libraries = {name.lower(): found for name in ("OSMesa", "EGL") if (found := find_library(name))}
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    detail = f"{', '.join(libraries.values()) or 'neither OSMesa nor EGL'}; MUJOCO_GL={wanted or '(not set)'}"
    usable = wanted in libraries if wanted in ("osmesa", "egl") else bool(libraries)
    if not usable:
        needed = importlib.util.find_spec("mujoco") is not None
        return Check(name="GL libraries", ok=False if needed else None, detail=detail, fix=APT)
    if not wanted:
        fix = f"for MuJoCo without a screen: export MUJOCO_GL={'egl' if 'egl' in libraries else 'osmesa'}"
        return Check(name="GL libraries", ok=None, detail=detail, fix=fix)
    return Check(name="GL libraries", ok=True, detail=detail)


def check_tokenizer() -> Check:
    """Whether PaliGemma's tokenizer, needed for prompts, is cached."""
    path = paths.tokenizer_path()
    if path.is_file():
        return Check(name="tokenizer", ok=True, detail=str(path))
    fix = "pip install 'pirl[gcs]' to have it downloaded, or copy gs://big_vision/paligemma_tokenizer.model there"
    return Check(name="tokenizer", ok=None, detail=f"{path} does not exist", fix=fix)


def start_probe() -> subprocess.Popen[str]:
    """Start a process that asks jax for its devices, so that a broken or hanging jax breaks nothing here."""
    command = [sys.executable, "-c", PROBE]
    environment = os.environ | PROBE_ENVIRONMENT
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_jax(probe: subprocess.Popen[str], timeout: float, devices: list[dict] | None = None) -> Check:
    """jax's version, backend and devices with their usable memory, from the probe; appends the devices to `devices`."""
    try:
        out, err = probe.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        probe.kill()
        probe.communicate()
        fix = "is another process holding the GPU? otherwise: pirl doctor --timeout 300"
        return Check(name="jax", ok=False, detail=f"did not answer within {timeout:g} s", fix=fix)
    reason = (err.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
    if probe.returncode:
        fix = "pip install --upgrade --force-reinstall jax jaxlib"
        return Check(name="jax", ok=False, detail=f"does not start: {reason}", fix=fix)
    answer = json.loads(out.splitlines()[-1])
    if devices is not None:
        devices += answer["devices"]
    detail = f"{answer['version']}, {answer['backend']}: {_describe_devices(answer['devices'])}"
    if answer["backend"] == "cpu" and shutil.which("nvidia-smi") and not os.environ.get("JAX_PLATFORMS"):
        detail += f", but this machine has an NVIDIA GPU ({reason})"
        fix = "pip install 'pirl[cuda]'; to stay on the CPU: export JAX_PLATFORMS=cpu"
        return Check(name="jax", ok=False, detail=detail, fix=fix)
    return Check(name="jax", ok=True, detail=detail)


def check_modes(devices: list[dict]) -> Check:
    """Which full-size modes fit the GPUs that jax found."""
    name, sizes = "full-size modes", [device["bytes"] for device in devices if device["bytes"]]
    if not sizes:
        return Check(name=name, ok=None, detail="no GPU that tells its memory: full-size models need one")
    share = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or "0.75"
    usable = min(sizes) / float(share) * float(TRAINING_SHARE) / GIB
    fit = [mode for mode, (count, needed) in MODES.items() if needed <= usable and count <= len(sizes)]
    rest = [f"{mode} ({needed} GiB x {count})" for mode, (count, needed) in MODES.items() if mode not in fit]
    detail = f"{usable:.0f} GiB to train in fit {'; '.join(fit) or 'none'}" + (
        f"; not {'; '.join(rest)}" if rest else ""
    )
    return Check(name=name, ok=bool(fit) or None, detail=detail, fix="pirl plan RECIPE --device-gb GB" if rest else "")


def local_checks() -> list[tuple[str, Callable[[], Check]]]:
    """All checks except jax's, as (name, check) in the order shown."""
    installed = _version("pirl") is not None
    extras = (importlib.metadata.metadata("pirl").get_all("Provides-Extra") or []) if installed else []
    places: dict[str, dict[str, Any]] = {
        "checkpoints": {"folder": Path("checkpoints").absolute(), "size": CHECKPOINT_BYTES, "required": True},
        "decoded frames": {"folder": paths.pirl_home(), "variable": "PIRL_HOME", "required": True},
        "datasets": {"folder": paths.lerobot_home(), "variable": "HF_LEROBOT_HOME"},
        "OpenPI's cache": {"folder": paths.openpi_home(), "variable": "OPENPI_DATA_HOME", "size": WEIGHTS_BYTES},
    }
    return [
        ("python", check_python),
        ("pirl", check_pirl),
        ("dependencies", check_dependencies),
        *((f"extra {extra}", partial(check_extra, extra)) for extra in extras),
        ("AV1 decoder", check_video_decoder),
        ("AV1 encoder", check_video_encoder),
        ("GL libraries", check_gl),
        *((name, partial(check_place, name, **place)) for name, place in places.items()),
        ("tokenizer", check_tokenizer),
        ("RAM", check_ram),
        ("GPU memory", check_gpu_memory_settings),
    ]


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The result of a check; an exception becomes a failed check."""
    try:
        return check()
    except Exception as error:
        return Check(name=name, ok=False, detail=f"could not be checked: {type(error).__name__}: {error}")


def examine(timeout: float) -> Iterator[Check]:
    """Run every check; jax takes longest, so it starts first and is reported last."""
    probe = start_probe()
    try:
        for name, check in local_checks():
            yield guarded(name, check)
        devices: list[dict] = []
        yield guarded("jax", partial(check_jax, probe, timeout, devices))
        yield guarded("full-size modes", partial(check_modes, devices))
    finally:
        if probe.poll() is None:
            probe.kill()
            probe.communicate()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl doctor`."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for jax (default 60)")


def run(args: argparse.Namespace) -> int:
    """Print each result as it arrives; return 1 if something required is broken."""
    checks = []
    for check in examine(args.timeout):
        checks.append(check)
        if not args.json:
            show(check)
    broken = any(check.ok is False for check in checks)
    if args.json:
        print(json.dumps({"ok": not broken, "checks": [asdict(check) for check in checks]}, indent=2))
    return int(broken)


def show(check: Check) -> None:
    """Print one line: mark, name, finding, fix."""
    signs = "✓✗–" if (sys.stdout.encoding or "").lower().startswith("utf") else "+x-"
    sign, style = {True: (signs[0], "green"), False: (signs[1], "bold red"), None: (signs[2], "yellow")}[check.ok]
    line = f" {check.name:<16} {check.detail}"
    advice = f"  {'fix' if check.ok is False else 'if needed'}: {check.fix}" if check.fix else ""
    # Only use Rich on a terminal: on a closed pipe it would exit the program itself.
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.text import Text

        text = Text.assemble((sign, style), line, (advice, "bold" if check.ok is False else "dim"))
        Console(highlight=False).print(text, soft_wrap=True)
    else:
        print(sign + line + advice, flush=True)


def _requirements(distribution: str, *, extra: str = "") -> list[str]:
    """Packages that a distribution requires, always or for an extra, with those of nested extras like jax[cuda13]."""
    names: list[str] = []
    for requirement in importlib.metadata.requires(distribution) or []:
        name, inner, wanted_by = re.findall(REQUIREMENT, requirement)[0]
        if wanted_by != extra:
            continue
        names += [name] if name != distribution else []  # `sims` is pirl[aloha,ogbench,libero,metaworld]
        if inner and _version(name) is not None:  # the requirements of a missing package are unknown
            names += [found for one in inner.split(",") for found in _requirements(name, extra=one)]
    return list(dict.fromkeys(names))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_codec(name: str, mode: Literal["r", "w"]) -> bool:
    import av

    try:
        av.codec.Codec(name, mode)
    except (ValueError, av.error.FFmpegError):
        return False
    return True


def container_limit() -> int | None:
    """The memory a container may use (cgroup v2), where there is such a limit: psutil tells of the whole machine."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None


def _describe_devices(devices: list[dict]) -> str:
    """Such as `8 x NVIDIA H100 (60.0 GiB each for XLA)`."""
    kinds = Counter((device["kind"], device["bytes"]) for device in devices)
    described = []
    for (kind, size), count in kinds.items():
        memory = f" ({size / GIB:.1f} GiB each for XLA)" if size else ""
        described.append(f"{count} x {kind}{memory}")
    return ", ".join(described)
