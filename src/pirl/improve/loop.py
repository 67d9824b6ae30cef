"""The improvement loop. Each part of a generation writes a file when it is done, so the same call resumes after any
interruption.

    generation k:  collect -> label -> train -> held-out check -> blind comparison -> promote, keep or roll back

Recording resumes within a part: a dataset holds only complete episodes, and the loop requests the missing ones.
"""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pirl.data.dataset import LeRobotSource
from pirl.data.inspection import inspect_dataset
from pirl.errors import ConfigError, DataError, PirlError
from pirl.improve import page, processes, state
from pirl.improve.config import LoopConfig
from pirl.improve.state import Decision, Generation, State
from pirl.robot.compare import Assignment, compare
from pirl.robot.router import BlindRouter
from pirl.rollout.record import num_recorded

Say = Callable[[str], None]
_POLL_SECONDS = 1.0
"""Seconds between checks for an operator's recordings."""
API_KEY = "PIRL_API_KEY"
"""Environment variable with the key that robots must send, as for `pirl serve`."""
_APART = 10_000
"""Initial states reserved for each collection and each comparison."""


class WaitingForLabelsError(PirlError):
    """Episodes are recorded but have no outcome yet."""


def improve(config: LoopConfig, say: Say = print) -> State:
    """Run all unfinished generations; returns the final state."""
    config.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(config.path / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(f"{config.path}: another `pirl improve` runs this loop", hint="wait, or stop it") from error
    with lock:
        now = state.read(config.path, start=config.start)
        page.write(config, now, doing="")
        while now.number <= config.generations:
            now = _generation(config, now, say)
            state.write(config.path, now)
            page.write(config, now, doing="")
        say(f"robot's policy: {now.policy}\npage: {config.path / page.FILE}")
        return now


def _generation(config: LoopConfig, now: State, say: Say) -> State:
    folder = config.path / "generations" / f"{now.number:03d}"
    folder.mkdir(parents=True, exist_ok=True)

    def doing(what: str) -> None:
        say(f"[generation {now.number} of {config.generations}] {what}")
        page.write(config, now, doing=f"generation {now.number}: {what}")

    collected = _collect(config, now, folder, doing)
    candidate = _train(config, now, folder, doing)
    held_out = _held_out(config, candidate, folder, doing)
    best = max((one.held_out["rate"] for one in now.finished if one.held_out and one.decision == "promote"), default=0)
    found: dict[str, Any] | None = None
    if held_out is not None and held_out["rate"] < best - config.held_out_drop:
        decision: Decision = "roll back"
    else:
        found = _compare(config, now, candidate, folder, doing)
        decisions: dict[str, Decision] = {"better": "promote", "worse": "roll back", "undecided": "keep"}
        decision = decisions[found["verdict"]]
    doing(f"{decision}: {found['text'] if found else 'the held-out success dropped'}")
    done = Generation(
        number=now.number,
        policy=now.policy,
        candidate=candidate,
        collected=collected,
        held_out=held_out,
        comparison=found,
        decision=decision,
    )
    stay = decision == "roll back" or (decision == "keep" and config.train_next_from == "current")
    return State(
        policy=candidate if decision == "promote" else now.policy,
        base=now.policy if stay else candidate,
        finished=(*now.finished, done),
    )


def _collect(config: LoopConfig, now: State, folder: Path, doing: Say) -> dict[str, Any]:
    """Collect and label episodes of the current policy; returns counts of episodes, successes and corrections."""
    if (done := state.read_part(folder, "collected")) is not None:
        return dict(done)
    dataset, first = folder / "episodes", 2 * now.number * _APART
    if (have := num_recorded(dataset)) < config.episodes:
        doing(f"collect {config.episodes - have} episodes with {now.policy}")
        with processes.serving(
            now.policy, config.serve, host=config.host, port=config.port, log=folder / "serve.log"
        ) as address:
            numbers = range(first + have, first + config.episodes)
            _operate(config, dataset, list(numbers), address, folder, purpose="collect", say=doing)
    _classify(config, now, folder, dataset, doing)
    successes = read_outcomes(dataset)
    flags = [LeRobotSource(dataset, cameras={}).episode(index).intervention for index in range(len(successes))]
    corrected = [flag is not None and bool(flag.any()) for flag in flags]
    alone = [success for success, other in zip(successes, corrected, strict=True) if not other]
    known = {
        "episodes": len(successes),
        "successes": sum(successes),
        "corrected": sum(corrected),
        "successes_alone": sum(alone),
    }
    return dict(state.write_part(folder, "collected", known))


def _operate(
    config: LoopConfig, dataset: Path, inits: list[int], address: str, folder: Path, *, purpose: str, say: Say
) -> None:
    """Run and record one episode from each initial state: by the robot's command, or by waiting for an operator."""
    wanted = num_recorded(dataset) + len(inits)
    if config.robot is None:
        say(f"start the robot: policy server {address}, record {len(inits)} episodes to {dataset}")
        while num_recorded(dataset) < wanted:
            time.sleep(_POLL_SECONDS)
        return
    values = {
        "server": address,
        "dataset": str(dataset),
        "episodes": str(len(inits)),
        "inits": ",".join(map(str, inits)),
        "seed": str(config.seed),
        "purpose": purpose,
    }
    processes.run(processes.fill(config.robot, values), folder / "robot.log")
    if (found := num_recorded(dataset)) < wanted:
        raise DataError(
            f"{dataset}: {found} episodes after the robot's command, expected {wanted}",
            hint=f"does it record to {{dataset}}? Its output is in {folder / 'robot.log'}",
        )


def _classify(config: LoopConfig, now: State, folder: Path, dataset: Path, doing: Say) -> None:
    """Let the classifier label episodes without an outcome, if configured."""
    if config.classifier is None or None not in inspect_dataset(dataset).success:
        return
    learn = [*config.demonstrations, *map(str, recordings(config.path, now.number - 1))]
    more = ["--learn", *learn] if learn else []
    doing("classify the episodes without an outcome")
    words = ("--classify", now.policy, "--precision", str(config.classifier), *more)
    processes.run(processes.pirl("label", str(dataset), *words), folder / "label.log")


def read_outcomes(dataset: Path) -> list[bool]:
    """Success of every episode, recorded or labelled; raises WaitingForLabelsError if any is missing."""
    success = inspect_dataset(dataset).success
    missing = [index for index, known in enumerate(success) if known is None]
    if missing:
        raise WaitingForLabelsError(
            f"{dataset}: {len(missing)} of {len(success)} episodes have no outcome (the first is {missing[0]})",
            hint=f"run `pirl label {dataset}`, then the same `pirl improve` again",
        )
    return [bool(known) for known in success]


def _train(config: LoopConfig, now: State, folder: Path, doing: Say) -> str:
    """Train the candidate from `now.base` on demonstrations and all recorded episodes; returns its checkpoint."""
    if (done := state.read_part(folder, "trained")) is not None:
        return str(done["checkpoint"])
    datasets = [*config.demonstrations, *map(str, recordings(config.path, now.number))]
    name, runs = f"generation-{now.number:03d}", config.path / "runs"
    command = processes.pirl(
        "train",
        config.recipe,
        *("--exp-name", name, "--init-weights", now.base, "--seed", str(config.seed + now.number)),
        *("--checkpoint.base-dir", str(runs), "--data-path", *datasets),
        *config.train,
        *("--resume", "auto"),  # a run that ended before its first checkpoint starts again
    )
    doing(f"train from {now.base} on {len(datasets)} datasets")
    processes.run(command, folder / "train.log")
    return str(state.write_part(folder, "trained", {"checkpoint": str(newest_step(runs, name))})["checkpoint"])


def recordings(folder: Path, number: int) -> list[Path]:
    """Datasets with episodes from generations 1 to `number`: collections and comparisons."""
    found = []
    for generation in range(1, number + 1):
        place = folder / "generations" / f"{generation:03d}"
        found += [place / name for name in ("episodes", "comparison") if num_recorded(place / name)]
    return found


def newest_step(runs: Path, name: str) -> Path:
    """The last step folder of a run."""
    steps = [path for path in runs.glob(f"*/{name}/*") if path.is_dir() and path.name.isdigit()]
    if not steps:
        raise DataError(f"{runs}: run {name} left no checkpoint", hint="see its log")
    return max(steps, key=lambda path: int(path.name))


def _held_out(config: LoopConfig, candidate: str, folder: Path, doing: Say) -> dict[str, Any] | None:
    if not config.held_out:
        return None
    if (done := state.read_part(folder, "held_out")) is not None:
        return dict(done)
    out = folder / "evaluation"
    if not (out / "eval.json").exists():
        doing(f"evaluate the candidate in {config.held_out} held-out episodes")
        command = processes.pirl("eval", candidate, "--episodes", str(config.held_out), "--out", str(out))
        processes.run(command, folder / "eval.log")
    success = state.read_part(out, "eval")["result"]["success"]
    return dict(state.write_part(folder, "held_out", {key: success[key] for key in ("rate", "low", "high")}))


def _compare(config: LoopConfig, now: State, candidate: str, folder: Path, doing: Say) -> dict[str, Any]:
    """Run both policies blindly until one is better or episodes run out. Does not reveal the leader."""
    if (done := state.read_part(folder, "compared")) is not None:
        return dict(done)
    dataset, first = folder / "comparison", (2 * now.number + 1) * _APART
    secret = state.read_part(folder, "assignment")
    if secret is None:
        plan = {"block": config.block, "episodes": config.comparison}  # fixed for this comparison
        secret = state.write_part(folder, "assignment", {"seed": secrets.randbits(32), **plan})
    assignment = Assignment(**secret)
    outcomes = read_outcomes(dataset) if num_recorded(dataset) else []
    found = compare(outcomes, assignment, alpha=config.alpha)
    if found.verdict == "undecided" and len(outcomes) < assignment.episodes:
        doing(f"compare the candidate with {now.policy}, blindly, in at most {assignment.episodes} episodes")
        local = {"host": "127.0.0.1", "port": 0}
        logs = [folder / f"serve-{name}.log" for name in ("current", "candidate")]
        with (
            processes.serving(now.policy, config.serve, **local, log=logs[0]) as a,  # type: ignore[arg-type]
            processes.serving(candidate, config.serve, **local, log=logs[1]) as b,  # type: ignore[arg-type]
            BlindRouter(
                (a, b),
                lambda: assignment.arm(num_recorded(dataset)),
                host=config.host,
                port=config.port,
                api_key=os.environ.get(API_KEY),
            ) as router,
        ):
            while found.verdict == "undecided" and (have := len(outcomes)) < assignment.episodes:
                count = min(config.look_every - have % config.look_every, assignment.episodes - have)
                inits = [first + assignment.pair(episode) for episode in range(have, have + count)]
                address = f"ws://127.0.0.1:{router.port}"
                _operate(config, dataset, inits, address, folder, purpose="compare", say=doing)
                outcomes = read_outcomes(dataset)
                found = compare(outcomes, assignment, alpha=config.alpha)
    return dict(state.write_part(folder, "compared", {**asdict(found), "text": str(found)}))
