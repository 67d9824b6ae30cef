"""Runs several JAX processes together on this machine, with simulated devices."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType


def start_together(
    command: Sequence[str],
    processes: int,
    *,
    devices: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    logs: Path | None = None,
) -> list[subprocess.Popen[str]]:
    """Start Python with these arguments in several connected processes, or in a single one.

    Each has `devices` devices. Output goes to `logs`/PROCESS.log; without `logs`, stderr goes to a pipe.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    own = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    if devices is not None:
        own["XLA_FLAGS"] = f"{own.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    children = []
    for index in range(processes):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(index)}
        log = None if logs is None else (logs / f"{index}.log").open("w")
        children.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=own | (place if processes > 1 else {}),
                stdout=log or subprocess.DEVNULL,
                stderr=log or subprocess.PIPE,
                text=True,
            )
        )
    return children
