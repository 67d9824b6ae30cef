"""Memory: marks of devices that report and of those that do not; bytes of a state, part by part."""

import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from pirl.agents.agent import TrainState
from pirl.planning.memory import GIB, GPUMemoryMonitor, breakdown, gib, log_memory_usage, memory_values


class Device:
    """A GPU whose allocator says what the test wants."""

    def __init__(self, number: int) -> None:
        self.id, self.device_kind = number, "GPU"
        self.in_use = self.peak = 0

    def hold(self, in_use: int) -> None:
        self.in_use, self.peak = in_use, max(self.peak, in_use)

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak, "bytes_limit": 80 * GIB}


def test_marks_follow_the_fullest_device_and_find_the_peak() -> None:
    first, second = Device(0), Device(1)
    monitor = GPUMemoryMonitor([first, second])
    assert monitor.report() == "memory: nothing was marked"
    for label, sizes in (("loaded", (10, 12)), ("step", (70, 30)), ("saved", (11, 12))):
        first.hold(sizes[0] * GIB)
        second.hold(sizes[1] * GIB)
        monitor.mark(label)
    assert [mark.in_use // GIB for mark in monitor.marks] == [12, 70, 12]
    assert [mark.peak // GIB for mark in monitor.marks] == [12, 70, 70]
    assert monitor.peak is not None
    assert monitor.peak.label == "step"
    header, loaded, step, saved, *by_device, summary = monitor.report().splitlines()
    assert header.split() == ["mark", "time", "in", "use", "change", "peak", "process"]
    assert "12.00 GiB" in loaded
    assert "+0.00 GiB" in loaded
    assert "+58.00 GiB" in step
    assert "-58.00 GiB" in saved
    assert [line.split() for line in by_device] == [
        ["in", "use", "by", "device", "GPU", "0", "GPU", "1"],
        ["loaded", "10.00", "GiB", "12.00", "GiB"],
        ["step", "70.00", "GiB", "30.00", "GiB"],
        ["saved", "11.00", "GiB", "12.00", "GiB"],
    ]
    assert summary == "highest by 'step': GPU 0 70.00 GiB of 80.00 GiB, GPU 1 30.00 GiB of 80.00 GiB"


def test_without_counters_the_process_is_what_there_is_to_see(caplog: pytest.LogCaptureFixture) -> None:
    silent = SimpleNamespace(id=0, device_kind="cpu", memory_stats=lambda: None)
    mark = GPUMemoryMonitor([silent]).mark("start")
    assert mark.devices == ()
    assert mark.in_use == mark.peak == mark.host > 10 * 2**20
    with caplog.at_level(logging.INFO):
        logged = log_memory_usage("after init")
    assert f"memory after init: {gib(logged.in_use)}" in caplog.text
    assert memory_values()["memory/host_gib"] == pytest.approx(mark.host / GIB, rel=0.5)


@pytest.fixture(scope="module")
def state() -> TrainState:
    policy = {"layer": {"w": jnp.ones((1024, 2048)), "b": jnp.ones(7, jnp.bfloat16)}}
    critic = {"w": jnp.ones((5, 3))}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params={"policy": policy, "critic": critic},
        target={"critic": critic},
        ema={"policy": policy},
        opt={"policy": optax.adamw(1e-3).init(policy), "critic": optax.sgd(1e-3, momentum=0.9).init(critic)},
        scalars={"beta": jnp.float32(0.1), "key": jax.random.key(0)},
    )


def test_the_parts_of_a_state_are_its_real_bytes(state: TrainState) -> None:
    found = breakdown(state)
    weights = 1024 * 2048 * 4 + 7 * 2
    assert {part.name: part.total for part in found.parts} == {
        "step": 4,
        "params/policy": weights,
        "params/critic": 60,
        "target/critic": 60,
        "ema/policy": weights,
        "opt/policy": 2 * weights + 4,  # two moments and a count
        "opt/critic": 60,
        "scalars/beta": 4,
        "scalars/key": 8,
    }
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype != state.scalars["key"].dtype]
    assert found.total == found.per_device == sum(leaf.nbytes for leaf in arrays) + 8
    shapes = jax.eval_shape(lambda: state)
    assert breakdown(shapes) == found, "shapes are enough"
    assert str(found).splitlines()[-1].split()[0] == "total"


def test_a_device_holds_its_share(state: TrainState) -> None:
    whole, parted = breakdown(state), breakdown(state, fsdp=4)
    saved = 3 * (1024 * 2048 * 4) // 4  # of the one large leaf, by four devices; the rest is on each
    assert parted["params/policy"].per_device == whole["params/policy"].total - saved
    assert parted["opt/policy"].per_device == whole["opt/policy"].total - 2 * saved
    assert parted["params/critic"].per_device == 60
    assert parted.total == whole.total
    mesh = AbstractMesh((2, 4), ("batch", "fsdp"))

    def place(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(None, "fsdp") if leaf.shape == (1024, 2048) else PartitionSpec())

    shardings = jax.tree.map(place, jax.eval_shape(lambda: state))
    assert breakdown(state, shardings=shardings) == parted
