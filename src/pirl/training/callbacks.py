"""Work around a run's updates: metrics, evaluation, early stopping, stop requests, checkpoints."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
from rich.console import Console

from pirl.agents.agent import Agent, TrainState
from pirl.build import schedules
from pirl.checkpoints.run import Checkpoints
from pirl.config import RLTrainConfig
from pirl.config_io import to_dict, write_yaml
from pirl.errors import EnvError
from pirl.names import CONFIG_FILE
from pirl.parallel import distributed
from pirl.planning.flops import update_flops
from pirl.planning.memory import GPUMemoryMonitor
from pirl.progress import Progress
from pirl.training import recovered
from pirl.training.early_stop import Patience
from pirl.training.ending import summary
from pirl.training.evaluator import Evaluations
from pirl.training.interrupt import StopRequest, stop_on_signal
from pirl.training.metrics import MetricLog, Timers, check_finite, peak_flops
from pirl.training.pictures import save_camera_grid
from pirl.training.recovered import Recovery
from pirl.training.saving import Saver
from pirl.training.sinks import RunInfo
from pirl.training.streams import Stream
from pirl.training.watchdog import Watchdog


@dataclass(kw_only=True)
class Callbacks:
    """State and hooks of one run; opened by `callbacks`."""

    config: RLTrainConfig
    agent: Agent
    stream: Stream
    checkpoints: Checkpoints
    evaluator: Evaluations | None
    extra: Mapping[str, Any]
    """The `extra` item of the checkpoint resumed from; empty for a new run."""
    recoveries: Sequence[Recovery]
    log: MetricLog
    progress: Progress
    stop: StopRequest
    watchdog: Watchdog
    patience: Patience
    saver: Saver
    memory: GPUMemoryMonitor = field(default_factory=GPUMemoryMonitor)
    updates: int = 0
    """Updates since the run began, across resumes."""
    step: int = 0
    """The last complete step."""
    _compiled: bool = field(default=False, init=False)
    over: bool = False
    """The run ends here: last step, early stopping or an interrupt."""
    stopped: bool = False
    """Interrupted before its last step."""
    ending: str = ""
    """Why the run ends before its last step."""
    verdict: str | None = None
    """What the algorithm says of its result, by the latest held-out metrics."""

    @property
    def start(self) -> int:
        """The step resumed from; 0 for a new run."""
        return int(self.extra.get("step", 0))

    @property
    def total(self) -> int:
        """The run's last step."""
        return self.config.num_train_steps

    def say(self, text: str) -> None:
        """Show what the run is doing."""
        self.progress.say(text)

    def begin(self, state: TrainState) -> TrainState:
        """Before the first step: write the configuration and, in a new run, evaluate at step 0."""
        self.updates, self.step = int(state.step), self.start
        self._mark("weights loaded")
        if self.start >= self.total:
            self.ending = f"step {self.start} of {self.total} is done already; --max-steps N trains on"
        if distributed.is_main():
            write_yaml(self.config.run_dir / CONFIG_FILE, self.config, overwrite=True)
        if self.extra:
            return state
        if self.evaluator is None or not self.evaluator.hold_out:
            state = self.agent.heard(state, {}, self.say)
        return self._evaluated(state, 0)[0]

    def batches(self, step: int, state: TrainState) -> Iterator[Any]:
        """The batches of one step; collects rollouts where the algorithm acts. The first one is saved as an image."""
        with self._saving_if_environments_break(state, step - 1):
            for batch in self.stream.round(step, state, lambda: bool(self.stop), self.say):
                if self.updates == 0 and distributed.is_main():
                    save_camera_grid(batch["observations"], self.config.run_dir / "first_batch.png")
                yield batch

    def updated(self, state: TrainState, batch: Any, metrics: Mapping[str, Any]) -> None:
        """After each update is dispatched; does not wait for the device."""
        if self.config.log_memory and not self._compiled:
            jax.block_until_ready(metrics)
            self._mark(f"step {self.step + 1}, compiled")
        self._compiled = True
        self.log.count_flops(partial(update_flops, self.agent, state, batch))
        self.updates += 1
        self.stream.notice(metrics)
        self.log.gather(metrics)

    def after(self, state: TrainState, step: int) -> TrainState:
        """After each step: log, evaluate, decide whether the run ends, save."""
        self.step = step
        values = self._logged(step)
        state, results = self._evaluated(state, step, values)
        values = (values or {}) | results if results is not None else values
        self.watchdog.beat()
        if values and (alarms := self.watchdog.look(values)):
            self.log.write(step, alarms)
        if self.patience.exhausted(values if values and self.log.closing is None else {}) and step < self.total:
            self.ending = f"stopped early at step {step}: {self.patience}"
        elif step < self.total and self.stop.agreed(step):
            self.stopped, self.ending = True, f"interrupted after step {step}; --resume continues"
        self.over = step == self.total or bool(self.ending)
        if self.stopped:
            self.ending += self.saver.leave(state, step, values)
        elif self.over or self.checkpoints.due(step):
            jax.block_until_ready(state.step)  # dispatched updates count as training time, saving does not
            with self._paused():
                self.saver.save(state, step, values)
            self.stop.warn(self.config.checkpoint.grace, self.checkpoints.seconds, self.say)
        self.progress.advance()
        return state

    def interrupted(self, state: TrainState, step: int) -> None:
        """Handle a stop request during collection, before any update of this step: save if time allows."""
        self.stopped, self.ending = True, f"interrupted while collecting for step {step}; --resume continues"
        self.ending += self.saver.leave(state, step - 1, None)

    def report(self, seconds: float) -> None:
        """Print the final summary: saved steps, next commands, recoveries, and why the run ended."""
        if not distributed.is_main():
            return
        console = Console(stderr=True)
        if said := summary(self.config, self.checkpoints, start=self.start, step=self.step, seconds=seconds):
            print("\n".join([said, *map(str, self.recoveries)]))
        if self.config.log_memory:
            console.print(self.memory.report(), markup=False)
        if self.verdict and not self.stopped:
            console.print(f"{self.config.name}/{self.config.exp_name}: {self.verdict}", markup=False, soft_wrap=True)
        if self.ending:
            console.print(f"{self.config.name}/{self.config.exp_name}: {self.ending}", markup=False, soft_wrap=True)

    @contextmanager
    def _saving_if_environments_break(self, state: TrainState, step: int, values: Any = None) -> Iterator[None]:
        """Save on a fatal EnvError before it ends the run: the weights are intact."""
        try:
            yield
        except EnvError:
            self.saver.save(state, step, values)
            raise

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Exclude the time inside the context from step times and hang detection."""
        with self.log.paused(), self.watchdog.paused():
            yield

    def _mark(self, label: str) -> None:
        if self.config.log_memory:
            self.memory.mark(label)

    def _logged(self, step: int) -> dict[str, float] | None:
        """The interval's means if it ends with this step, else None; raises DivergedError on NaN."""
        own = self.stream.metrics() | ({recovered.METRIC: len(self.recoveries)} if self.recoveries else {})
        values = self.log.log(step, own, updates=self.updates, last=step == self.total)
        if values is not None:
            check_finite(values, step=step)
            self._mark(f"step {step}")
        return values

    def _evaluated(
        self, state: TrainState, step: int, values: Any = None
    ) -> tuple[TrainState, dict[str, float] | None]:
        """Evaluate and log if due; returns the state after `agent.heard` saw the results, and the results or None."""
        if self.evaluator is None or not self.evaluator.due(step, self.total):
            return state, None
        with self._saving_if_environments_break(state, step, values) if step else nullcontext(), self._paused():
            results = self.evaluator(state, step, self.total, self.say)
            self.log.write(step, results)
            self.log.show(step, self.evaluator.shown)
            if any(name.startswith("held_out/") for name in results):
                self.verdict = self.agent.verdict(state, results) if step else None
            return self.agent.heard(state, results, self.say), results


@contextmanager
def callbacks(
    config: RLTrainConfig,
    agent: Agent,
    stream: Stream,
    checkpoints: Checkpoints,
    extra: Mapping[str, Any],
    evaluator: Evaluations | None,
    recoveries: Sequence[Recovery],
) -> Iterator[Callbacks]:
    """Open log, progress bar, signal handlers and watchdog; on exit wait for checkpoints and print the summary."""
    began, patience = time.monotonic(), Patience(config.early_stop, extra.get("patience"))
    start, total = int(extra.get("step", 0)), config.num_train_steps
    with ExitStack() as parts:
        log = parts.enter_context(metric_log(config, extra))
        bar = Progress(config.name, total, start=start, interval=None, is_main=distributed.is_main())
        progress, stop = parts.enter_context(bar), parts.enter_context(stop_on_signal())
        watchdog = parts.enter_context(Watchdog(config.watchdog, config.run_dir))
        grace = config.checkpoint.grace
        saver = Saver(
            agent=agent, checkpoints=checkpoints, stream=stream, log=log, patience=patience, stop=stop, grace=grace
        )
        around = Callbacks(
            config=config,
            agent=agent,
            stream=stream,
            checkpoints=checkpoints,
            evaluator=evaluator,
            extra=extra,
            recoveries=recoveries,
            log=log,
            progress=progress,
            stop=stop,
            watchdog=watchdog,
            patience=patience,
            saver=saver,
        )
        yield around
        saver.finish()
    around.report(time.monotonic() - began)


def metric_log(config: RLTrainConfig, extra: Mapping[str, Any]) -> MetricLog:
    """The run's metric log, continued from `extra` (that of the checkpoint resumed from)."""
    resumes = extra.get("step", 0) < config.num_train_steps
    named = f"{config.name}/{config.exp_name}"
    peak = peak_flops(jax.devices()[0].device_kind)
    return MetricLog(
        config.run_dir,
        ("console", *config.sinks),
        interval=config.log_interval,
        is_main=distributed.is_main(),
        timers=Timers(batch_size=config.batch_size, peak_flops=peak and peak * jax.device_count()),
        schedules=schedules(config),
        run=RunInfo(name=named, steps=config.num_train_steps, config=to_dict(config), **asdict(config.tracking)),
        resume_step=int(extra["step"]) if extra else None,
        pending=extra.get("pending"),
        closing=extra.get("closing") if resumes else None,
    )
