"""One device, eight devices, two processes of four: the same run, the same weights, and a fair share for each."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import pytest

from pirl.agents.config import ACRLPDConfig, BCConfig, CriticNFTConfig, DSRLConfig, QCFQLConfig
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml
from pirl.training.config import SGD, ConstantSchedule, MeshConfig
from pirl.training.loop import train
from several_processes import start_together
from small_runs import assert_close, compiled_once, records, restored, small_run, steps_of

PROCESS = """
import json, os, signal, sys
from dataclasses import replace
from pathlib import Path

from pirl import recipes
from pirl.data import loader
from pirl.errors import ConfigError
from pirl.training import loop
from pirl.parallel import sharding

folder = Path(sys.argv[1])
rows, kill = [], []
put_on_devices, save, large = loader.put_on_devices, loop.Checkpoints.save, sharding.MIN_SHARDED_BYTES

def counted(batch, where):
    rows.append(len(batch["actions"]))
    if kill and len(rows) > 3:
        os.kill(os.getpid(), kill.pop())
    return put_on_devices(batch, where)

def measured(self, step, state, **settings):
    mesh = state.step.sharding.mesh
    placed = sharding.validate_fsdp_sharding(state, mesh)
    report["share"] = placed.largest_share
    report["bytes"] = sorted(placed.device_bytes.values())
    return save(self, step, state, **settings)

loader.put_on_devices, loop.Checkpoints.save = counted, measured
out = {}
for name in sys.argv[2:]:
    config = recipes.load(str(folder / f"{name}.yaml"))
    # What is small here stands for what is large elsewhere.
    sharding.MIN_SHARDED_BYTES = 512 if name.startswith("rl") else large
    report = out[name] = {}
    rows.clear()
    report["code"] = loop.train(config)
    report["rows"] = sorted(set(rows))

import jax

config = recipes.load(str(folder / "small.yaml"))
try:
    loop.train(replace(config, batch_size=12))
except ConfigError as error:
    out["odd"] = [str(error), config.run_dir.exists()]
report = {}
rows.clear()
if jax.process_index() == jax.process_count() - 1:
    kill.append(signal.SIGTERM)
out["stopped"] = loop.train(replace(config, num_train_steps=1000))
out["devices"] = [len(jax.devices()), len(jax.local_devices())]
(folder / f"{jax.process_index()}.json").write_text(json.dumps(out))
"""
RUNS = ("rl_copies", "rl_shared", "bc_shared", "rl_nft", "rl_fql", "rl_frozen")
STEPS = 3


def configurations(folder: Path) -> dict[str, RLTrainConfig]:
    """ACRLPD with all it has, weights copied or shared; behaviour cloning with matrices of 4 MiB, shared; DSRL.

    Plain gradient descent: Adam would blow the last bits of a vanishing gradient up to a whole step.
    """
    common: dict[str, Any] = dict(
        batch_size=16,
        num_train_steps=STEPS,
        log_interval=1,
        policy_optimizer=SGD(),
        critic_optimizer=SGD(),
        policy_schedule=ConstantSchedule(lr=0.02),
        critic_schedule=ConstantSchedule(lr=0.02),
    )
    agent = ACRLPDConfig(discount=0.9, actor="distill", num_action_samples=2, flow_steps=2, accumulate=2)
    rl = small_run(folder, agent, **common)
    small = replace(rl, agent=BCConfig())
    wide = replace(small, model=replace(small.model, hidden=(1024, 1024, 1024, 1024)))
    shared = MeshConfig(fsdp=8)
    made = {"rl_copies": rl, "rl_shared": replace(rl, mesh=shared), "bc_shared": replace(wide, mesh=shared)}
    nft = CriticNFTConfig(discount=0.9, num_action_samples=2, flow_steps=2)
    fql = QCFQLConfig(discount=0.9, num_action_samples=2, flow_steps=2)
    one_step = replace(rl.rollout, flow_steps=1)
    made |= {"rl_nft": replace(rl, agent=nft, mesh=shared)}
    made |= {"rl_fql": replace(rl, agent=fql, rollout=one_step, mesh=shared)}
    frozen = DSRLConfig(discount=0.9, num_action_samples=2, flow_steps=2, actor_hidden=(16,), accumulate=2)
    made["rl_frozen"] = replace(small_run(folder, frozen, **common), mesh=shared)
    return {name: replace(config, exp_name=name) for name, config in (made | {"small": small}).items()}


@dataclass(frozen=True)
class Group:
    """The processes of a run, and then what they left."""

    folder: Path
    configs: dict[str, RLTrainConfig]
    children: list[subprocess.Popen[str]]
    reports: list[dict] = field(default_factory=list)

    def finish(self) -> "Group":
        """Wait for all of them."""
        try:
            errors = [child.communicate(timeout=300)[1] for child in self.children]
        finally:
            for child in self.children:
                child.kill()
        codes = [child.returncode for child in self.children]
        assert codes == [0] * len(codes), "\n".join(error[-3000:] for error in errors)
        files = [self.folder / f"{index}.json" for index in range(len(codes))]
        return replace(self, reports=[json.loads(file.read_text()) for file in files])


def start(folder: Path, processes: int, runs: tuple[str, ...]) -> Group:
    """Train on eight simulated devices, over so many processes."""
    configs = configurations(folder / "runs")
    for name, config in configs.items():
        write_yaml(folder / f"{name}.yaml", config)
    command = ["-c", PROCESS, str(folder), *runs]
    children = start_together(command, processes, devices=8 // processes)
    return Group(folder, configs, children)


@dataclass(frozen=True)
class Runs:
    """The same runs on one device, on eight, and on two times four."""

    one: dict[str, RLTrainConfig]
    eight: Group
    two: Group


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    assert len(jax.devices()) == 1
    eight = start(tmp_path_factory.mktemp("eight"), 1, RUNS)
    try:
        with compiled_once(tmp_path_factory.mktemp("programs")):
            configs = configurations(tmp_path_factory.mktemp("one"))
            rl, bc = configs["rl_copies"], replace(configs["bc_shared"], mesh=MeshConfig())
            others = {name: replace(configs[name], mesh=MeshConfig()) for name in ("rl_nft", "rl_fql", "rl_frozen")}
            assert [train(config) for config in (rl, bc, *others.values())] == [0] * 5
            eight = eight.finish()
            two = start(tmp_path_factory.mktemp("two"), 2, ("rl_copies", "bc_shared")).finish()
            yield Runs({"rl_copies": rl, "rl_shared": rl, "bc_shared": bc, **others}, eight, two)
    finally:
        for child in eight.children:
            child.kill()


def assert_same_run(found: RLTrainConfig, expected: RLTrainConfig, *, tolerance: float) -> None:
    """Same records, and the same states, read onto this one device."""
    lines = records(expected.run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for left, right in zip(records(found.run_dir), lines, strict=True):
        assert left["values"] == pytest.approx(right["values"], rel=tolerance, abs=tolerance)
    assert_close(restored(found), restored(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", RUNS)
def test_eight_devices_train_as_one(name: str, runs: Runs) -> None:
    (report,) = runs.eight.reports
    assert report["devices"] == [8, 8]
    assert report[name]["code"] == 0
    assert_same_run(runs.eight.configs[name], runs.one[name], tolerance=1e-5)


def test_shared_weights_take_an_eighth(runs: Runs) -> None:
    """Of a state of large matrices; where they are small ones, vectors and odd sizes keep their weight."""
    (report,) = runs.eight.reports
    copied, few, most = (report[name]["share"] for name in ("rl_copies", "rl_shared", "bc_shared"))
    assert copied == 1
    assert few < 0.3
    assert most <= 1.05 / 8
    held = report["bc_shared"]["bytes"]
    assert len(held) == 8
    assert min(held) == max(held) > 4_000_000


def test_a_checkpoint_of_eight_devices_goes_on_on_one(runs: Runs) -> None:
    more = replace(runs.eight.configs["rl_shared"], mesh=MeshConfig(), num_train_steps=STEPS + 2)
    alone = replace(runs.one["rl_shared"], num_train_steps=STEPS + 2)
    assert train(more, resume=True) == train(alone, resume=True) == 0
    assert_close(restored(more), restored(alone), rtol=1e-5, atol=1e-5)
    assert [line["step"] for line in records(more.run_dir)] == list(range(1, STEPS + 3))


@pytest.mark.parametrize("name", ["rl_copies", "bc_shared"])
def test_two_processes_train_as_one(name: str, runs: Runs) -> None:
    for report in runs.two.reports:
        assert report["devices"] == [8, 4]
        assert report[name]["code"] == 0
        assert report[name]["rows"] == [8]  # of sixteen
        assert len(report[name]["bytes"]) == 4
    (report,) = runs.eight.reports
    assert report[name]["rows"] == [16]
    assert runs.two.reports[0][name]["share"] == report[name]["share"]
    assert_same_run(runs.two.configs[name], runs.eight.configs[name], tolerance=1e-5)


def test_two_processes_write_one_checkpoint(runs: Runs) -> None:
    config = runs.two.configs["bc_shared"]
    step = config.run_dir / str(STEPS)
    assert steps_of(config) == [STEPS]
    written = [sum(file.stat().st_size for file in step.rglob(f"ocdbt.process_{i}/d/*")) for i in (0, 1)]
    assert min(written) > 0.4 * sum(written)  # each wrote its half
    assert len(records(config.run_dir)) == STEPS  # and process 0 alone the metrics


def test_all_processes_stop_after_the_same_step(runs: Runs) -> None:
    """A signal to one of them ends the run for all, with one checkpoint."""
    assert [report["stopped"] for report in (*runs.eight.reports, *runs.two.reports)] == [130, 130, 130]
    (step,) = steps_of(runs.two.configs["small"])
    assert 1 <= step < 100  # of a thousand


def test_a_batch_that_cannot_be_shared_is_refused(runs: Runs) -> None:
    for report in (*runs.eight.reports, *runs.two.reports):
        message, something_written = report["odd"]
        assert "the batch size is 12 and there are 8 devices" in message
        assert "take 8 or 16, or fewer devices" in message
        assert not something_written
