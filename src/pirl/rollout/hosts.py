"""Several hosts collect together: each acts in its share of the episodes, then every one has them all.

An episode depends on its context, its number and the policy alone, so who runs it changes nothing. Finished episodes
travel as files through the run's folder, which all hosts see anyway: they are too large for the devices beside a
training state. Processes stop together, whatever the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from pirl.agents.agent import TrainState
from pirl.errors import CheckpointError, EnvError, PirlError
from pirl.parallel.distributed import Meeting, barrier
from pirl.parallel.failures import DistributedError
from pirl.parallel.sharding import on_this_host
from pirl.records import Rollout
from pirl.rollout.collect import CollectionStoppedError, CollectStats, Job, collect
from pirl.rollout.files import load_rollouts, save_rollouts
from pirl.rollout.policy import ChunkPolicy
from pirl.rollout.pool import EnvPool


def my_share(jobs: Sequence[Job]) -> list[Job]:
    """The jobs of this process; neighbours, such as the rollouts of a group, go to different ones."""
    return list(jobs[jax.process_index() :: jax.process_count()])


def weights_to_act(state: Any) -> Any:
    """The weights on the devices of this process, without what acting never reads. With one process, the state."""
    if jax.process_count() == 1:
        return state
    barrier("weights")  # a first collective waits for other processes only briefly
    return on_this_host(replace(state, opt={}, target={}) if isinstance(state, TrainState) else state)


def collect_together(
    pool: EnvPool,
    policy: ChunkPolicy,
    jobs: Sequence[Job],
    *,
    folder: Path | None,
    stop: Callable[[], bool] = lambda: False,
    stats: CollectStats,
    **settings: Any,
) -> Iterator[Rollout]:
    """`collect`, with each process in its share: all yield every episode, and `stats` knows all that are lost.

    What ends one share early ends all: the episodes that are finished are yielded before the error.
    """
    if jax.process_count() == 1:
        yield from collect(pool, policy, jobs, stop=stop, stats=stats, **settings)
        return
    assert folder is not None  # runs of several processes have one
    if not jobs:
        return
    meeting, failure, mine, given_up = Meeting("collect"), None, [], len(stats.lost)
    try:
        share = my_share(jobs)
        for rollout in collect(pool, policy, share, stop=lambda: meeting.stop(stop()), stats=stats, **settings):
            mine.append(rollout)
            yield rollout
    except Exception as error:
        failure = error
    names: list[str] = []
    try:
        names = save_rollouts(folder, mine)
    except OSError as error:  # a full disk
        failure = error
    lost = [(job.number, reason) for job, reason in stats.lost[given_up:]]
    word = {"episodes": names, "lost": lost, "failure": _in_words(failure)}
    words = meeting.gather(word, meanwhile=lambda: meeting.stop(stop()))
    by_number = {job.number: job for job in jobs}
    for process, theirs in enumerate(words):
        if process == jax.process_index():
            continue
        for rollout in _read(folder, theirs["episodes"], process):
            stats.episodes += 1
            stats.env_steps += len(rollout.episode)
            yield rollout
        stats.lost += [(by_number[number], reason) for number, reason in theirs["lost"]]
    barrier("episodes read")
    _end_together(failure, [theirs["failure"] for theirs in words])
    for name in names:
        (folder / name).unlink()


def _read(folder: Path, names: Sequence[str], process: int) -> Iterator[Rollout]:
    """The episodes of another process."""
    try:
        yield from load_rollouts(folder, names)
    except CheckpointError as error:
        raise DistributedError(
            f"process {jax.process_index()} cannot read what process {process} collected: {error.message}",
            hint="all hosts need the same folder for the run, on a shared file system: checkpoint.base_dir",
        ) from error


_STOP, _ENV, _OTHER = range(3)
"""Why a process stopped collecting, the worst last."""


def _in_words(failure: Exception | None) -> tuple[int, str, str] | None:
    if failure is None:
        return None
    kind = {CollectionStoppedError: _STOP, EnvError: _ENV}.get(type(failure), _OTHER)
    return (kind, failure.message, failure.hint) if isinstance(failure, PirlError) else (kind, repr(failure), "")


def _end_together(own: Exception | None, failures: Sequence[Sequence[Any] | None]) -> None:
    """Raise the worst of the failures on every process, so that all of them go the same way."""
    told = [(process, *failure) for process, failure in enumerate(failures) if failure is not None]
    if not told:
        return
    process, kind, message, hint = max(told, key=lambda one: one[1])
    if own is not None and process == jax.process_index():
        raise own
    if kind == _STOP:
        raise CollectionStoppedError
    if kind == _ENV:
        raise EnvError(f"process {process}: {message}", hint=hint)
    raise DistributedError(f"process {process} failed while collecting: {message}", hint=hint or "its own log says why")
