"""Metrics: means without waiting, files that survive a resume, sinks that cannot fail a run, progress."""

import io
import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from pirl.errors import ConfigError, PirlWarning
from pirl.progress import Progress
from pirl.rollout.films import Film, write_filmstrip, write_video
from pirl.training import metrics
from pirl.training.console import grouped
from pirl.training.metrics import DivergedError, MetricLog, Timers, check_finite, peak_flops
from pirl.training.shown import InitialState, Shown
from pirl.training.sinks import ConsoleSink, Record, RunInfo, TensorBoardSink, wandb_id


class Clock:
    """Time that goes by as told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Broken:
    """A sink that fails from its second record on."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, record: Record) -> None:
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError("offline")

    def close(self) -> None:
        raise AssertionError("a sink that failed is not called again")


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's size differs from run to run."""
    monkeypatch.setattr(metrics, "memory_values", dict)


def entries(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def log_constant(directory: Path, sink: Any, *, steps: int) -> None:
    with MetricLog(directory, (sink,), interval=1) as log:
        for step in range(1, steps + 1):
            log.log(step, {"loss": 1.0})


def test_an_interval_is_one_transfer_and_its_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    fetch = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(jax.tree.leaves(tree)) or fetch(tree))
    with MetricLog(tmp_path, (), interval=4, clock=lambda: 7.0) as log:
        written = []
        for step in range(1, 9):
            values = {"policy/loss": jnp.float32(step), "policy/learning_rate": jnp.float32(step), "host": 0.5 * step}
            written.append(log.log(step, values))
            assert len(fetched) == step // 4, "nothing is fetched within an interval"
        log.write(8, {"eval/success": 0.25})
    assert [len(leaves) for leaves in fetched] == [12, 12]
    assert [value is None for value in written] == [True, True, True, False] * 2
    assert written[3] == {"policy/loss": 2.5, "policy/learning_rate": 4.0, "host": 1.25}
    assert entries(tmp_path) == [
        {"step": 4, "time": 7.0, "values": written[3]},
        {"step": 8, "time": 7.0, "values": {"policy/loss": 6.5, "policy/learning_rate": 8.0, "host": 3.25}},
        {"step": 8, "time": 7.0, "values": {"eval/success": 0.25}},
    ]
    assert (tmp_path / "metrics.csv").read_text() == (
        "step,time,policy/loss,policy/learning_rate,host,eval/success\n"
        "4,7.0,2.5,4.0,1.25,\n"
        "8,7.0,6.5,8.0,3.25,\n"
        "8,7.0,,,,0.25\n"
    )
    assert not list(tmp_path.glob("*.partial"))


def test_what_is_not_finite_is_null_named_and_raised(tmp_path: Path) -> None:
    with MetricLog(tmp_path, (), interval=2) as log:
        log.log(1, {"loss": jnp.float32(1), "q": jnp.float32(jnp.inf), "fine": 1})
        values = log.log(2, {"loss": jnp.float32(jnp.nan), "q": jnp.float32(1), "fine": 2})
    assert values is not None
    (entry,) = entries(tmp_path)
    assert entry["values"] == {"loss": None, "q": None, "fine": 1.5}
    assert entry["non_finite"] == ["loss", "q"]
    with pytest.raises(DivergedError, match=r"at step 2 loss = nan, q = inf") as raised:
        check_finite(values, step=2)
    assert "fine" not in raised.value.message
    check_finite({"fine": 1.5}, step=2)


def values_at(step: int) -> dict[str, Any]:
    """Metrics of a deterministic run; one of them appears late."""
    values = {"loss": jnp.float32(1 / step), "learning_rate": jnp.float32(step * 1e-3)}
    return values | ({"late": jnp.float32(step)} if step > 21 else {})


def test_a_resumed_run_leaves_the_same_files_as_an_uninterrupted_one(tmp_path: Path) -> None:
    def go(directory: Path, first: int, last: int, **resume: Any) -> dict[str, list[float]]:
        pending = {}
        with MetricLog(directory, (), interval=10, clock=lambda: 1.0, **resume) as log:
            for step in range(first, last + 1):
                log.log(step, values_at(step))
                if step == 15:  # a checkpoint in the middle of an interval
                    pending = log.pending()
        return pending

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    go(whole, 1, 40)
    pending = json.loads(json.dumps(go(broken, 1, 37)))
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "ti')  # the crash came while a line was written
    with (broken / "metrics.csv").open("a") as file:
        file.write("40,1.")
    go(broken, 16, 40, resume_step=15, pending=pending)
    for name in ("metrics.jsonl", "metrics.csv"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name
    assert [entry["step"] for entry in entries(broken)] == [10, 20, 30, 40]


def test_a_new_run_does_not_write_into_an_old_one(tmp_path: Path) -> None:
    with MetricLog(tmp_path, (), interval=1) as log:
        log.log(1, {"loss": 1.0})
    with pytest.raises(ConfigError, match=r"already holds the metrics of a run"):
        MetricLog(tmp_path, ())
    assert len(entries(tmp_path)) == 1


def test_only_the_main_process_writes_but_all_know_the_values(tmp_path: Path) -> None:
    with MetricLog(tmp_path / "run", interval=1, is_main=False) as log:
        assert log.log(1, {"loss": jnp.float32(3)}) == {"loss": 3.0}
    assert not (tmp_path / "run").exists()


def test_a_metric_that_is_no_scalar_is_refused_by_name(tmp_path: Path) -> None:
    with MetricLog(tmp_path, ()) as log, pytest.raises(ConfigError, match=r"'q' has shape \(3,\)"):
        log.log(1, {"q": jnp.zeros(3)})


def test_a_failing_sink_is_switched_off_with_one_warning(tmp_path: Path) -> None:
    sink = Broken()
    with pytest.warns(PirlWarning) as caught:
        log_constant(tmp_path, sink, steps=5)
    assert [str(w.message) for w in caught] == [
        "the Broken sink failed to write and is off for the rest of this run: ConnectionError: offline"
    ]
    assert sink.calls == 2
    assert len(entries(tmp_path)) == 5


@pytest.mark.parametrize(
    ("name", "package"), [("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "tensorboardX")]
)
def test_a_missing_service_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.warns(PirlWarning, match=rf"pip install 'pirl\[{name}\]'") as caught:
        log_constant(tmp_path, name, steps=2)
    assert len(caught) == 1
    assert len(entries(tmp_path)) == 2


def evaluated(folder: Path) -> Shown:
    """A film, its strip and one initial state."""
    film = Film(frames=np.zeros((3, 32, 32, 3), np.uint8), fps=5, success=True, number=3, caption="3: open")
    return Shown(
        films=(write_video(film, folder),),
        strip=write_filmstrip([film], folder / "filmstrip.png"),
        states=(InitialState(task="open", init=3, before=False, now=True),),
    )


def test_wandb_logs_a_run_and_its_resumption_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, offline: a run named as the loop names them, interrupted and resumed."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = RunInfo(project="robots", name="rl_fold_box/seed 3", config={"seed": 3})
    shown = evaluated(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PirlWarning)  # a sink that fails only warns
        for steps, resumed in (((1, 2), None), ((3, 4), 2)):
            with MetricLog(tmp_path, ("wandb",), interval=2, run=run, resume_step=resumed) as log:
                for step in steps:
                    log.log(step, {"policy/loss": jnp.float32(step)})
                log.show(steps[-1], shown)
            wandb.teardown()  # wandb 0.31 loses a run that is resumed within a second by the process that finished it
    (film, *_) = (tmp_path / "wandb").glob("offline-run-*/files/media/videos/eval/films/*.mp4")
    assert film.read_bytes() == shown.films[0].read_bytes()
    assert len(list((tmp_path / "wandb").glob("offline-run-*/files/media/images/eval/filmstrip*.png"))) == 2
    (table, *_) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/eval/states*.table.json")
    assert json.loads(table.read_text())["data"] == [["open", 3, False, True]]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [file.stem.removeprefix("run-") for file in files] == [wandb_id(run.name)] * 2
    assert all(b"policy/loss" in file.read_bytes() for file in files)


def test_trackio_logs_a_run_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, into a folder of its own; it is not among the developer tools, as it brings a web framework."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs trackio: pip install 'pirl[trackio]'")
    run, shown = RunInfo(project="robots", name="fold/seed 3", group="seeds"), evaluated(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PirlWarning)
        for steps, resumed in (((1, 2), None), ((3, 4), 2)):
            with MetricLog(tmp_path, ("trackio",), interval=2, run=run, resume_step=resumed) as log:
                for step in steps:
                    log.log(step, {"policy/loss": jnp.float32(step)})
                log.show(steps[-1], shown)
    films = list((tmp_path / "trackio").glob("media/**/*.mp4"))
    assert {film.parent.name for film in films} == {"2", "4"}
    assert all(film.read_bytes() == shown.films[0].read_bytes() for film in films)


def test_project_team_group_and_tags_reach_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    fake = ModuleType("wandb")
    vars(fake).update(init=lambda **options: asked.update(options), log=lambda *_, **__: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = RunInfo(project="fold", entity="lab", group="seeds", tags=("box", "v2"))
    with MetricLog(tmp_path, ("wandb",), run=run):
        pass
    assert (asked["project"], asked["entity"], asked["group"], asked["tags"]) == ("fold", "lab", "seeds", ("box", "v2"))


def test_wandb_ids_are_valid_stable_and_distinct() -> None:
    assert wandb_id("fold") == "fold"
    found = [wandb_id(name) for name in ("a/b", "a-b", "a b", "a:b", "折叠/一", "x" * 300)]
    assert len(set(found)) == len(found)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name) for name in found)
    assert wandb_id("a/b") == found[0]


def test_tensorboard_event_files_hold_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PirlWarning)
        log_constant(tmp_path / "run", "tensorboard", steps=2)
        sink = TensorBoardSink(tmp_path)
        sink.show(2, evaluated(tmp_path))
        sink.close()
    (pictured,) = (tmp_path / "tensorboard").glob("events.*")
    assert b"eval/filmstrip" in pictured.read_bytes()
    (file,) = (tmp_path / "run" / "tensorboard").glob("events.*")
    assert b"loss" in file.read_bytes()


def test_without_a_terminal_a_record_is_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"data/valid_fraction": 1.0, "policy/loss": 0.0123456, "time/stall_fraction": 0.2, "q": math.nan}
    sink = ConsoleSink(3000)
    sink.write(Record(step=1000, time=100.0, values=values))
    sink.write(Record(step=1200, time=140.0, values=values | {"time/step_seconds": 0.2}))
    sink.write(Record(step=3000, time=500.0, values={"mine/score": 0.5, "time/step_seconds": 0.2}))
    assert capsys.readouterr().out.splitlines() == [
        "step 1,000/3,000  policy/loss 0.0123  waits for data 20%",
        "step 1,200/3,000 (0:06:00 left)  policy/loss 0.0123  0.2 s/step  waits for data 20%",
        "step 3,000/3,000  mine/score 0.5  0.2 s/step",
    ]


def test_on_a_terminal_metrics_are_grouped_by_meaning() -> None:
    values = {"policy/loss": 0.0123456, "policy/grad_norm": 12.0, "critic/loss": 3.0, "q": math.nan}
    assert grouped("step 3", values, 80).splitlines() == [
        "step 3",
        "  policy  loss 0.0123  grad_norm 12",
        "  critic  loss 3",
        "          q nan",
    ]
    narrow = grouped("step 3", {f"policy/metric_{i}": 1.5 for i in range(5)}, 40)
    assert max(map(len, narrow.splitlines())) <= 40
    assert narrow.count("metric_") == 5


def test_the_last_step_is_always_logged_and_its_interval_goes_on(tmp_path: Path) -> None:
    """Going on, the record that closed the run is dropped, so that nothing tells an extended run from a whole one."""

    def trained(folder: Path, ends: Sequence[int]) -> list[dict[str, Any]]:
        folder.mkdir()
        start, pending, closing = 0, None, None
        for end in ends:
            with MetricLog(folder, (), interval=4, resume_step=start or None, pending=pending, closing=closing) as log:
                for step in range(start + 1, end + 1):
                    log.log(step, {"policy/loss": float(step)}, last=step == end)
                start, pending, closing = end, log.pending(), log.closing
        return [{"step": entry["step"], "loss": entry["values"]["policy/loss"]} for entry in entries(folder)]

    whole, extended = trained(tmp_path / "whole", [10]), trained(tmp_path / "extended", [3, 6, 10])
    assert whole == extended == [{"step": 4, "loss": 2.5}, {"step": 8, "loss": 6.5}, {"step": 10, "loss": 9.5}]
    rows = [(tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("whole", "extended")]
    assert [[line.split(",")[0] for line in table] for table in rows] == [["step", "4", "8", "10"]] * 2


def test_timers_leave_out_compilation_and_pauses() -> None:
    clock = Clock()
    timers = Timers(batch_size=32, flops_per_step=300e12, peak_flops=1000e12, clock=clock)
    clock.now = 60.0  # the first step compiles
    timers.tick()
    for _ in range(4):
        clock.now += 0.5
        timers.tick()
    with timers.paused():
        clock.now += 100.0
    speed = {"time/step_seconds": 0.5, "time/samples_per_second": 64.0, "time/mfu": 0.6}
    assert timers.read() == pytest.approx(speed | {"time/seconds": 2.0})
    clock.now += 3.0
    timers.tick()
    assert timers.read()["time/step_seconds"] == pytest.approx(3.0)
    assert timers.read() == {}
    clock.now += 7.0  # an iteration whose rollouts teach nothing
    assert timers.read() == {"time/seconds": 7.0}


def test_timers_count_iterations_without_a_step_from_the_first_record_on() -> None:
    clock = Clock()
    timers = Timers(batch_size=32, clock=clock)
    clock.now = 60.0
    assert timers.read() == {}
    clock.now = 65.0
    assert timers.read() == {"time/seconds": 5.0}
    clock.now = 90.0  # the first step compiles
    timers.tick()
    clock.now = 91.0
    timers.tick()
    assert timers.read()["time/step_seconds"] == 1.0


def test_peaks_are_known_by_device_kind() -> None:
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("cpu") is None


def test_off_a_terminal_progress_is_one_line_per_interval_and_one_at_the_end() -> None:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=False, width=20)
    with Progress("train", 140, start=100, interval=10.0, console=console, clock=clock) as progress:
        for _ in range(40):
            clock.now += 1.0
            progress.advance(status="[loss 0.1]")
    assert out.getvalue().splitlines() == [
        "train: 110/140 steps (79%), 1 steps/s, 0:00:30 left  [loss 0.1]",
        "train: 120/140 steps (86%), 1 steps/s, 0:00:20 left  [loss 0.1]",
        "train: 130/140 steps (93%), 1 steps/s, 0:00:10 left  [loss 0.1]",
        "train: 140/140 steps (100%), 1 steps/s, took 0:00:40  [loss 0.1]",
    ]
    for silent in ({"interval": None}, {"is_main": False}):
        out = io.StringIO()
        with Progress("read", 3, console=Console(file=out), **silent) as progress:  # type: ignore[arg-type]
            progress.advance(3)
        assert out.getvalue() == ""


def test_on_a_terminal_prints_and_logs_go_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out, error = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", error)
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    handler, logger = logging.StreamHandler(), logging.getLogger("pirl")
    logger.addHandler(handler)
    try:
        with suppress(KeyError), Progress("evaluate", 3, unit="episodes", console=console) as progress:
            progress.advance(status="success 1/1")
            logger.warning("robot stopped")
            print("printed")
            raise KeyError
        assert handler.stream is error, "the handler has its own stream again, also after an error"
        logger.warning("after the bar")
    finally:
        logger.removeHandler(handler)
    shown = out.getvalue()
    assert "robot stopped\n" in shown
    assert "printed\n" in shown
    assert "1/3" in shown
    assert "success 1/1" in shown
    assert error.getvalue() == "after the bar\n"
