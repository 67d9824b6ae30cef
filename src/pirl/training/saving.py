"""Saves a run's checkpoints: weights, stream position, pending metrics; skips a save that `grace` has no time for."""

from dataclasses import dataclass
from itertools import chain

from pirl.agents.agent import Agent, TrainState
from pirl.checkpoints.run import Checkpoints
from pirl.parallel.distributed import barrier, is_main
from pirl.processes import return_freed_memory
from pirl.training.early_stop import Patience
from pirl.training.interrupt import StopRequest
from pirl.training.metrics import MetricLog, check_finite, check_state
from pirl.training.streams import Stream


@dataclass(frozen=True, kw_only=True)
class Saver:
    """Writes the checkpoints of one run."""

    agent: Agent
    checkpoints: Checkpoints
    stream: Stream
    log: MetricLog
    patience: Patience
    stop: StopRequest
    grace: float | None
    """Seconds between SIGTERM and SIGKILL."""

    def save(self, state: TrainState, step: int, values: dict[str, float] | None) -> None:
        """Save everything needed to resume bit-exactly; raises if the state is not finite."""
        pending = self.log.pending()
        check_finite(pending, step=step)
        check_state(state, step=step)
        stream = self.stream.state() if is_main() else {}  # writes episode files, so only on one process
        position = {"step": step, "stream": stream, "pending": pending, "patience": self.patience.state()}
        position["closing"] = self.log.closing
        served = self.agent.served(state)
        if not self.checkpoints.save(step, state, extra=position, metrics=values, weights=served):
            self.checkpoints.amend(step, position)  # this step is saved already; more was collected since
        if is_main():
            self.stream.prune(kept["stream"] for kept in chain([position], self.checkpoints.extras()))
        barrier("pruned")  # no process writes episodes while files are deleted
        return_freed_memory()

    def leave(self, state: TrainState, step: int, values: dict[str, float] | None) -> str:
        """Save before a requested stop if time allows; returns "" or the reason why nothing was saved."""
        self.checkpoints.wait()  # a pending save comes first, and its duration is the estimate
        took, latest = self.checkpoints.seconds, self.checkpoints.latest_step()
        if self.stop.time_to_save(self.grace, took) or latest is None:
            self.save(state, step, values)
            return ""
        return (
            f"; not saved: the last checkpoint took {took or 0:.0f} s, longer than the rest of "
            f"checkpoint.grace {self.grace:g} s; the last complete step is {latest}"
        )

    def finish(self) -> None:
        """Wait for pending saves, then delete stream files that no checkpoint refers to."""
        self.checkpoints.wait()
        if is_main():
            self.stream.prune(kept["stream"] for kept in self.checkpoints.extras())
