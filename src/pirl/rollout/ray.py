"""Environments on a Ray cluster (extra `ray`): one actor per worker, on whatever machine has a free CPU.

Install pirl and the simulator on every machine. If Ray is not running, this connects to the cluster in `RAY_ADDRESS` or
on this machine, or starts Ray locally.
"""

import contextlib
import logging
import os
import sys
import warnings
from typing import Any

from pirl.errors import MissingExtraError, PirlWarning
from pirl.rollout.pool import Build
from pirl.rollout.remote import ONE_THREAD, START_TIMEOUT, Host, RemotePool, WorkerLostError

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, Ray would install packages on every machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # GPUs stay visible, as simulators may render on them
}
"""Defaults for environment variables that Ray reads at import; the user's own win."""


class RayPool(RemotePool):
    """Environments in `num_workers` actors. An actor that dies (with or without its machine), hangs longer than
    `timeout` seconds or does not start within `start_timeout` is replaced; its slots answer `Lost`.
    """

    def __init__(
        self, build: Build, *, size: int, num_workers: int, timeout: float, start_timeout: float = START_TIMEOUT
    ) -> None:
        self._ray = _running_ray()
        if (cpus := self._ray.cluster_resources().get("CPU", 0)) < num_workers:
            warnings.warn(
                f"the Ray cluster has {cpus:g} CPUs for {num_workers} workers, which take one each; "
                f"the others wait up to {start_timeout:g} s for more machines",
                PirlWarning,
                stacklevel=2,
            )
        super().__init__(build, size=size, num_workers=num_workers, timeout=timeout, start_timeout=start_timeout)

    def _launch(self) -> "RayWorker":
        return RayWorker(self._ray)


def _running_ray() -> Any:
    """The module `ray`, initialised. It keeps running, because others may use it, and ends with this process."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray", "rollout.backend=ray") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level=logging.WARNING)
    return ray


class ActorHost(Host):
    """A `Host` as an actor."""

    def __init__(self, paths: list[str]) -> None:
        os.environ.update(ONE_THREAD)
        sys.path.extend(path for path in paths if path not in sys.path)  # find modules where the driver does


class RayWorker:
    """A worker that is a Ray actor."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        # One CPU each, spread over the machines. Ray must not restart an actor itself: the pool would not notice that
        # its episodes are lost.
        options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        self._actor = ray.remote(**options)(ActorHost).remote(sys.path)

    def send(self, request: bytes) -> None:
        """Send a request without waiting."""
        self._pending = self._actor.answer.remote(request)

    def receive(self, timeout: float) -> bytes:
        """The answer; raises WorkerLostError with the cause if the actor is gone."""
        try:
            answer: bytes = self._ray.get(self._pending, timeout=timeout)
            return answer
        except self._ray.exceptions.GetTimeoutError:
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            cpus = f"{total.get('CPU', 0):g} CPUs, of which {free.get('CPU', 0):g} are free"
            raise TimeoutError(f"(the Ray cluster has {cpus})") from None
        except self._ray.exceptions.RayError as error:  # the actor, its machine or the connection is gone
            # Drop Ray's indented address list and its page of possible causes.
            lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
            reason = " ".join(lines).split(" Some common causes")[0]
            raise WorkerLostError(f"its Ray actor is gone: {type(error).__name__}: {reason}") from None

    def kill(self) -> None:
        """Kill the actor, even if it hangs."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # if Ray has ended, so has the actor
            self._ray.kill(self._actor, no_restart=True)
