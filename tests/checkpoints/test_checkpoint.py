"""A run goes on exactly where it stopped: however it stopped, on however many devices, or not at all and says why."""

import gc
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden_data import FAMILIES
from pirl.agents.agent import TrainState
from pirl.agents.optim import make_optimizer, make_schedule
from pirl.checkpoints.inspect import describe
from pirl.checkpoints.run import Checkpoints, steps_to_keep
from pirl.checkpoints.run_directory import prepare_directory
from pirl.checkpoints.run_metadata import check_compatible, config_changes, run_metadata
from pirl.checkpoints.weights import load_openpi
from pirl.data.normalize import load_norm_stats
from pirl.errors import CheckpointError, ConfigError, PirlWarning
from pirl.models.params import flatten
from pirl.parallel.sharding import make_mesh, sharded_shapes
from pirl.training.config import AdamW, CheckpointConfig, CosineSchedule, KeepBest

TX = make_optimizer(AdamW(), make_schedule(CosineSchedule()))
KEEP_ALL = CheckpointConfig(keep_last=1000, keep_period=None)
SYNC = replace(KEEP_ALL, async_save=False)


def make_state(*, ema: bool = True, seed: int = 0, width: int = 8) -> TrainState:
    """Everything a state may hold: frozen bfloat16 leaves, optimizer tuples, empty dicts, scalars."""
    rng = np.random.default_rng(seed)

    def array(*shape: int, dtype=jnp.float32) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    policy = {
        "PaliGemma": {"llm": {"w": array(3, width, dtype=jnp.bfloat16)}},
        "head": {"kernel": array(width, 4), "bias": array(4)},
    }
    critic = {"layer": {"kernel": array(width, 2)}}
    average = jax.tree.map(lambda x: (x * 0.9).astype(x.dtype), policy)
    moments = jax.tree.map(lambda x: x + 1, TX.init({"head": policy["head"]}))
    return TrainState(
        step=jnp.int32(seed + 3),
        params={"policy": policy, "critic": critic},
        target={"critic": jax.tree.map(lambda x: x / 3, critic)},
        ema={"policy": average, "critic": critic} if ema else {},
        opt={"policy": moments, "critic": TX.init(critic)},
        scalars={"beta": jnp.float32(0.1 + seed), "nothing": {}},
    )


def listing(run: Path) -> list[str]:
    return sorted(child.name for child in run.iterdir() if child.name != ".lock")


def shapes(state: TrainState) -> TrainState:
    return sharded_shapes(make_mesh(), state)


def assert_same(found: TrainState, expected: TrainState) -> None:
    """Same structure, types and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = jax.tree.leaves_with_path(expected)
    for (path, left), right in zip(leaves, jax.tree.leaves(found), strict=True):
        assert right.dtype == left.dtype, path
        assert np.asarray(right).tobytes() == np.asarray(left).tobytes(), path


@pytest.mark.parametrize("ema", [True, False])
def test_round_trip_is_exact(tmp_path: Path, ema: bool) -> None:
    state = make_state(ema=ema)
    extra = {"loader": {"position": 41, "seed": 7}, "curriculum": [0.5, None]}
    with Checkpoints(tmp_path / "run", KEEP_ALL, run=run_metadata({"seed": 1, "sizes": (1, 2)})) as checkpoints:
        assert checkpoints.latest_step() is None
        assert checkpoints.save(3, state, extra=extra, metrics={"loss": jnp.float32(0.5), "q": float("nan")})
        assert checkpoints.save(3, state) is False  # the last step of a run may fall on the interval
    with Checkpoints(tmp_path / "run", KEEP_ALL) as checkpoints:
        assert checkpoints.all_steps() == [3]
        assert_same(checkpoints.restore(shapes(state)), state)
        assert checkpoints.extra() == extra
        metadata = checkpoints.metadata()
        assert metadata["metrics"] == {"loss": 0.5, "q": None}
        assert metadata["config"] == {"seed": 1, "sizes": [1, 2]}
        assert metadata["versions"]["jax"] == jax.__version__
    # The weights to act with are stored once, where OpenPI looks for them.
    weights = flatten(load_openpi(tmp_path / "run" / "3"))
    assert {k: v.tobytes() for k, v in weights.items()} == {
        k: np.asarray(v).tobytes() for k, v in flatten(state.policy).items()
    }
    found = describe(tmp_path / "run")
    assert (found.step, found.ema) == (3, ema)
    assert found.written_by.startswith("pirl ")
    stored = json.loads((tmp_path / "run" / "3" / "train_state" / "_METADATA").read_text())["tree_metadata"]
    assert sum("kernel" in key for key in stored) == (8 if ema else 6)


def test_saving_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """Without `stop_leaks` each save leaves metrics and three strings an array: more than 1,300 objects here."""
    state, held = make_state(), []
    with Checkpoints(tmp_path / "run", replace(SYNC, keep_last=1)) as checkpoints:
        for step in range(1, 31):
            checkpoints.save(step, state)
            if step in (10, 30):
                gc.collect()
                held.append(sys.getallocatedblocks())
    assert held[1] - held[0] < 2 * 20 * len(jax.tree.leaves(state))


def test_a_donated_state_is_saved_as_it_was(tmp_path: Path) -> None:
    """Training goes on in the same memory while the checkpoint is still being written."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    state = jax.tree.map(jnp.copy, replace(make_state(width=200_000), opt={}))
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    with Checkpoints(tmp_path / "run", KEEP_ALL) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, state)
            state = step(state)
            jax.block_until_ready(step(jax.tree.map(jnp.copy, state)))
        reference = shapes(state)
        assert_same(checkpoints.restore(reference, 1), expected)
        assert_same(checkpoints.restore(reference, 2), jax.tree.map(lambda x: np.full_like(x, -1), expected))


@pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if f.after3_dir])
def test_the_folder_is_openpis(family: str, tmp_path: Path) -> None:
    """Files, leaf names and types of `params`, and the statistics, as in a checkpoint OpenPI's trainer wrote."""
    golden = FAMILIES[family].after3_dir
    params = jax.tree.map(jnp.asarray, load_openpi(golden))
    stats = {file.parent.name: load_norm_stats(file) for file in golden.glob("assets/*/norm_stats.json")}
    state = TrainState(step=jnp.int32(3), params={"policy": params}, opt={"policy": params})
    with Checkpoints(tmp_path / "run", KEEP_ALL, norm_stats=stats) as checkpoints:
        checkpoints.save(2, state)
    ours = tmp_path / "run" / "2"

    def layout(step: Path) -> set[str]:
        files = (str(file.relative_to(step)) for file in step.rglob("*") if file.is_file())
        return {re.sub(r"/d/[0-9a-f]{32}$", "/d/*", file) for file in files}

    own = {f"extra/{name}" for name in ("metadata.json", "extra.json", "checksums.sha256")}
    assert layout(ours) == layout(golden) | own
    trees = [json.loads((step / "params" / "_METADATA").read_text())["tree_metadata"] for step in (ours, golden)]
    assert trees[0] == trees[1]
    for asset in stats:
        texts = [(step / "assets" / asset / "norm_stats.json").read_text() for step in (ours, golden)]
        assert json.loads(texts[0]) == json.loads(texts[1])
    assert {k: v.tobytes() for k, v in flatten(load_openpi(ours)).items()} == {
        k: np.asarray(v).tobytes() for k, v in flatten(params).items()
    }


def test_which_steps_stay() -> None:
    steps = [1000, 2000, 5000, 6000, 7000, 8000]
    scores = {1000: 0.2, 2000: 0.9, 5000: 0.1, 6000: 0.9, 9000: 1.0}
    keep = partial(steps_to_keep, steps, scores)
    assert keep(CheckpointConfig()) == {5000, 8000}
    assert keep(CheckpointConfig(keep_last=2, keep_period=None)) == {7000, 8000}
    assert keep(CheckpointConfig(keep_period=None, keep_best=KeepBest(metric="r"))) == {6000, 8000}
    best = KeepBest(metric="r", mode="min", count=2)
    assert keep(CheckpointConfig(keep_period=2000, keep_best=best)) == {2000, 6000, 8000, 1000, 5000}


def test_old_steps_are_deleted_once_the_next_is_complete(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=1, keep_period=4, keep_best=KeepBest(metric="success"))
    scores = {1: 0.1, 2: 0.8, 3: 0.3, 4: 0.2, 5: None, 6: 0.5}
    with Checkpoints(tmp_path / "run", config) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(), metrics={"success": scores[step]})
    with Checkpoints(tmp_path / "run", config) as checkpoints:  # scores of before are remembered
        for step in (4, 5, 6):
            checkpoints.save(step, make_state(), metrics={} if scores[step] is None else {"success": scores[step]})
        checkpoints.wait()
        assert checkpoints.all_steps() == [2, 4, 6]
        assert [step for step in range(1, 13) if checkpoints.due(step)] == []
    assert listing(tmp_path / "run") == ["2", "4", "6", "metadata.json"]


KILLS = 20
KILLED = """
import os, random, signal, sys, time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from pirl.agents.agent import TrainState
from pirl.checkpoints.run import Checkpoints
from pirl.training.config import CheckpointConfig

run, kills, moments = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)


def state(step):
    return TrainState(
        step=np.int32(step),
        params={"policy": {"w": np.full((500, 1000), step, np.float32)}},
        opt={"policy": {f"m{i}": np.full((100, 200), step, np.float32) for i in range(8)}},
    )


def train(said):
    # A whole run of the program from here on: look what is there, check it, go on from it.
    with Checkpoints(run, CheckpointConfig(keep_last=2, keep_period=None)) as checkpoints:
        latest = checkpoints.latest_step() or 0
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state(0))
        for step in checkpoints.all_steps():
            found = checkpoints.restore(shapes, step)
            assert all((np.asarray(leaf) == step).all() for leaf in jax.tree.leaves(found)), step
            assert checkpoints.extra(step) == {"position": step}, step
        assert all(name.isdecimal() or name in (".lock", "metadata.json") for name in os.listdir(run)), os.listdir(run)
        for step in range(latest + 1, latest + 1000):
            checkpoints.save(step, state(step), extra={"position": step})
            if step == latest + 2:
                os.write(said, b"!")  # the first is there, the second on its way


# Importing takes seconds, so it is done once: each run is a copy of this process, made before jax has any threads.
assert len(os.listdir("/proc/self/task")) == 1
for number in range(kills):
    listening, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(said)
        finally:
            os._exit(1)
    os.close(said)
    heard = os.read(listening, 1)
    os.close(listening)
    time.sleep(moments.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    ended = os.waitpid(child, 0)[1]
    assert heard and os.WTERMSIG(ended) == signal.SIGKILL, f"run {number} ended by itself"
    print("in the middle" if list(run.glob("*.orbax-checkpoint-tmp*")) else "between", flush=True)
"""


def test_killed_while_saving_the_run_resumes_from_a_complete_step(tmp_path: Path) -> None:
    """Twenty times in a row, at random moments; each time what is found is whole and what was interrupted is gone."""
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(run), str(KILLS)],
        check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # NumPy's threads do not survive a fork
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    moments = done.stdout.split("\n")[:-1]
    assert len(moments) == KILLS
    assert moments.count("in the middle") >= KILLS / 4, moments
    assert prepare_directory(run, resume=True)
    with Checkpoints(run, KEEP_ALL) as checkpoints:
        assert KILLS <= checkpoints.latest_step() < 100 * KILLS
        assert 1 <= len(checkpoints.all_steps()) <= 3


ON_EIGHT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from pirl.agents.agent import TrainState
from pirl.checkpoints.run import Checkpoints
from pirl.training.config import CheckpointConfig
from pirl.parallel.sharding import make_mesh, sharded_shapes, validate_fsdp_sharding

config = CheckpointConfig(keep_last=9)
reference = TrainState(
    step=jax.ShapeDtypeStruct((), jnp.int32),
    params={"policy": {"w": jax.ShapeDtypeStruct((2048, 640), jnp.float32)}},
    ema={"policy": {"w": jax.ShapeDtypeStruct((2048, 640), jnp.float32)}},
)
with Checkpoints(sys.argv[1], config) as checkpoints:
    for step, fsdp in ((2, 8), (3, 2), (4, 1)):
        mesh = make_mesh(fsdp)
        state = checkpoints.restore(sharded_shapes(mesh, reference))  # what the other mesh wrote before
        report = validate_fsdp_sharding(state, mesh)
        assert abs(report.largest_share * fsdp - 1) < 0.05, report
        checkpoints.save(step, jax.tree.map(lambda x: x + 1, state))
"""


def test_restored_on_other_numbers_of_devices(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 2048, 640)).astype(np.float32)
    state = TrainState(
        step=jnp.int32(0),
        params={"policy": {"w": jnp.asarray(values[0])}},
        ema={"policy": {"w": jnp.asarray(values[1])}},
    )
    with Checkpoints(tmp_path / "run", KEEP_ALL) as checkpoints:
        checkpoints.save(1, state)
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with Checkpoints(tmp_path / "run", KEEP_ALL) as checkpoints:
        for step in (2, 3, 4):
            expected = jax.tree.map(lambda x: x + 0, state)
            for _ in range(step - 1):
                expected = jax.tree.map(lambda x: x + 1, expected)
            assert_same(checkpoints.restore(shapes(state), step), expected)


@pytest.mark.parametrize("config", [KEEP_ALL, SYNC])
def test_a_full_disk_is_an_error_and_costs_nothing_but_that_step(
    tmp_path: Path, config: CheckpointConfig, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(width=50_000)
    with Checkpoints(tmp_path / "run", replace(config, keep_last=1)) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # no file may grow beyond this
        try:
            with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*File too large") as caught:
                _ = checkpoints.save(2, state) and checkpoints.save(3, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "Complete steps are untouched: 1" in caught.value.hint
        assert not [record for record in caplog.records if record.levelname == "ERROR"], "said once, by the error"
        assert listing(tmp_path / "run") == ["1", "metadata.json"]
        assert_same(checkpoints.restore(shapes(state)), state)
        assert checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.all_steps() == [2]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        prepare_directory(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="is a file"):
        prepare_directory(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints"):
        Checkpoints(tmp_path / "file" / "run", KEEP_ALL)
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(CheckpointError, match="Permission denied"):
            prepare_directory(tmp_path / "locked" / "run")


def test_a_damaged_step_is_named_with_the_last_good_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = make_state(width=20_000)
    with Checkpoints(run, SYNC) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state)
        largest = max((run / "4" / "train_state").rglob("d/*"), key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        (run / "3" / "params" / "manifest.ocdbt").unlink()
        with pytest.raises(CheckpointError, match="step 4 is damaged") as caught:
            checkpoints.restore(shapes(state))
        assert largest.name in caught.value.message
        assert f"step 2 is intact: move {run / '4'} away" in caught.value.hint
        assert_same(checkpoints.restore(shapes(state), 2), state)
        with pytest.raises(CheckpointError, match="holds no checkpoint of step 7") as caught:
            checkpoints.restore(shapes(state), 7)
        assert "1, 2, 3, 4" in caught.value.hint
        # Going on from step 2 would one day write over step 4.
        checkpoints.save(9, state)
    with Checkpoints(run, SYNC) as checkpoints, pytest.raises(CheckpointError, match="not of this run's making"):
        checkpoints.save(4, state)


def test_another_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    state = make_state()
    with Checkpoints(tmp_path / "run", SYNC) as checkpoints:
        checkpoints.save(1, state)
        wider = shapes(make_state(width=16))
        with pytest.raises(CheckpointError, match=r"head/kernel: found \[8, 4\], expected \[16, 4\]"):
            checkpoints.restore(wider)
        head = state.params["policy"]["head"]
        thawed = {"PaliGemma": {"llm": {"w": jnp.zeros((3, 8), jnp.float32)}}, "head": head}
        with pytest.raises(CheckpointError, match="PaliGemma/llm/w: found bfloat16, expected float32"):
            checkpoints.restore(shapes(replace(state, ema={"policy": thawed, "critic": {}})))
        critic = {"layer": {"kernel": jnp.zeros((8, 3))}}
        with pytest.raises(CheckpointError, match=r"groups/critic/layer/kernel: found \[8, 2\], expected \[8, 3\]"):
            checkpoints.restore(shapes(replace(state, params={**state.params, "critic": critic})))
        with pytest.raises(CheckpointError, match="1 missing"):
            checkpoints.restore(shapes(replace(state, scalars={**state.scalars, "temperature": jnp.float32(0)})))
        with pytest.raises(CheckpointError, match="params/head/kernel"):  # the average was switched off
            checkpoints.restore(shapes(replace(state, ema={})))


def test_bad_arguments_of_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot name an asset"):
        Checkpoints(tmp_path / "run", SYNC, norm_stats={"../robot": {}})
    with Checkpoints(tmp_path / "run", SYNC) as checkpoints:
        with pytest.raises(CheckpointError, match="not a tree of JSON values"):
            checkpoints.save(1, make_state(), extra={"key": object()})
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            checkpoints.extra()
        assert checkpoints.save(1, make_state())


def test_what_happens_to_a_run_that_exists(tmp_path: Path) -> None:
    run = tmp_path / "recipe" / "exp"
    with pytest.raises(CheckpointError, match="no complete checkpoint to resume from"):
        prepare_directory(run, resume=True)
    assert prepare_directory(run, resume=True, fresh_if_missing=True) is False
    assert prepare_directory(run) is False  # nothing has happened there yet
    with Checkpoints(run, SYNC) as checkpoints:
        checkpoints.save(5, make_state())
    (run / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match="existing run with checkpoints of steps 5") as caught:
        prepare_directory(run)
    assert "--resume" in caught.value.hint
    with pytest.raises(ConfigError, match="resume and overwrite are both set"):
        prepare_directory(run, resume=True, overwrite=True)
    assert prepare_directory(run, resume=True) is True
    assert (run / "metrics.jsonl").exists()
    assert prepare_directory(run, overwrite=True) is False
    assert listing(run) == ["metadata.json"]
    assert [child.name for child in run.parent.iterdir()] == ["exp"]

    other = tmp_path / "home"
    (other / "photos").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="does not look like a run"):
        prepare_directory(other, overwrite=True)
    assert (other / "photos").is_dir()


def test_one_trainer_at_a_time_and_readers_any_time(tmp_path: Path) -> None:
    run, state = tmp_path / "run", make_state()
    with Checkpoints(run, SYNC, run={"config": {"seed": 4}}) as trainer:
        trainer.save(1, state)
        with pytest.raises(CheckpointError, match="another process is training"):
            Checkpoints(run, SYNC)
        with pytest.raises(CheckpointError, match="another process is training"):
            prepare_directory(run, overwrite=True)
        (run / "2.orbax-checkpoint-tmp").mkdir()  # the trainer is at it
        with Checkpoints(run, SYNC, read_only=True) as reader:
            assert_same(reader.restore(shapes(state)), state)
            assert reader.metadata()["config"] == {"seed": 4}
            with pytest.raises(CheckpointError, match="opened for reading"):
                reader.save(2, state)
        assert listing(run) == ["1", "2.orbax-checkpoint-tmp", "metadata.json"]
        assert trainer.save(2, state)
    assert listing(run) == ["1", "2", "metadata.json"]
    with Checkpoints(tmp_path / "nowhere", SYNC, read_only=True) as reader:
        assert reader.latest_step() is None
    assert not (tmp_path / "nowhere").exists()


def test_a_changed_configuration_is_told_or_refused() -> None:
    saved = {"model": {"vlm": {"width": 64}, "remat": "full"}, "lr": 1e-3, "cameras": ["base"], "agent": {"tau": 1}}
    assert check_compatible(saved, {**saved, "cameras": ("base",)}) == {}
    new = {"model": {"vlm": {"width": 64}, "remat": "none"}, "lr": 1e-4, "cameras": ["base", "wrist"], "agent": {}}
    with pytest.warns(PirlWarning, match="resuming with 4 changed settings") as caught:
        changes = check_compatible(saved, new)
    assert changes == {
        "agent.tau": "1 -> (not set)",
        "cameras": '["base"] -> ["base", "wrist"]',
        "lr": "0.001 -> 0.0001",
        "model.remat": '"full" -> "none"',
    }
    assert config_changes(saved, new) == changes
    assert "lr: 0.001 -> 0.0001" in str(caught[0].message)
    assert check_compatible(saved, {**saved, "lr": 1.0}, ignore=("lr",)) == {}
    for shaped, line in (
        ({"vlm": {"width": 128}, "remat": "full"}, "model.vlm.width: 64 -> 128"),
        ({"vlm": None, "remat": "full"}, "model.vlm: (not set) -> null"),
    ):
        with pytest.raises(CheckpointError, match="shape its state") as refused:
            check_compatible(saved, {**saved, "model": shaped})
        assert line in refused.value.message
    with pytest.raises(CheckpointError, match=r"agent\.tau: 1 -> 2"):
        check_compatible(saved, {**saved, "agent": {"tau": 2}}, shaping=("agent",))
