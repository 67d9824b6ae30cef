"""The state of a search: its trials in Optuna's journal. Needs the extra `tune`.

The journal is a file of JSON lines in the study's folder. A trial's settings depend only on the seed, its number and
the finished trials, so a resumed search equals an uninterrupted one.
"""

import json
import math
import statistics
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from pirl.checkpoints.run_directory import LOCK_FILE, lock_run
from pirl.config import RLTrainConfig
from pirl.config_io import diff, from_dict, to_dict
from pirl.errors import ConfigError, listing
from pirl.search import Choice, Range
from pirl.training.sinks import JSONL_FILE
from pirl.tune.space import Space, changed, current

JOURNAL_FILE = "study.jsonl"
METRICS = ("eval/success_rate", "eval/return")
"""Metrics to maximise: evaluation results, comparable across settings."""
INTERVALS = {"eval/success_rate": ("eval/success_low", "eval/success_high")}
"""Names of a metric's 95 % interval."""
RANDOM_TRIALS = 6
"""Random trials before TPE leads; the very first is the unchanged recipe."""
COMPARED = 4
"""Trials that must have reached a step before others are pruned there."""

State = Literal["done", "pruned", "failed", "open"]
_STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "open",
}


@dataclass(frozen=True, kw_only=True)
class Search:
    """The definition of a search."""

    config: RLTrainConfig
    """The base configuration; its seed also seeds the search."""
    space: Space
    """The search space."""
    study: str = "tune"
    """Its name; its folder is <checkpoint.base_dir>/<recipe>/<study>."""
    metric: str = METRICS[0]
    """Metric to maximise, from a trial's last evaluation."""

    @property
    def folder(self) -> Path:
        """The study's folder; its runs are next to it."""
        return replace(self.config, exp_name=self.study).run_dir

    def trial(self, number: int, values: dict[str, Any]) -> RLTrainConfig:
        """The configuration of a trial; invalid combinations raise ConfigError."""
        return replace(changed(self.config, values), exp_name=f"{self.study}-trial-{number:03d}")


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One evaluation during a trial."""

    step: int
    value: float
    low: float | None = None
    """Ends of the 95 % interval, if known."""
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (f" ({self.low:.3f} to {self.high:.3f})" if self.low is not None else "")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a trial."""

    number: int
    state: State
    settings: dict[str, Any]
    """The sampled values."""
    evaluations: tuple[Evaluated, ...] = ()
    """Ordered by step; the last one is the result of a finished trial."""
    seconds: float | None = None
    """Seconds over all attempts."""
    reason: str = ""
    """Why it was pruned, or failed."""
    run: str = ""
    """Folder of its run."""

    @property
    def last(self) -> Evaluated | None:
        """The last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"evaluations": [asdict(one) for one in self.evaluations]}


def read_evaluations(run: Path, metric: str) -> tuple[list[Evaluated], int]:
    """A run's evaluations, without the initial one, and its last logged step."""
    file = run / JSONL_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], 0
    found: dict[int, Evaluated] = {}
    latest = 0
    for line in text[: text.rfind("\n") + 1].splitlines():  # the last line may be incomplete
        record = json.loads(line)
        step, values = int(record["step"]), record["values"]
        latest = max(latest, step)
        value = values.get(metric)
        if step > 0 and isinstance(value, int | float) and math.isfinite(value):
            ends = [values.get(name) for name in INTERVALS.get(metric, ())]
            low, high = map(float, ends) if ends and None not in ends else (None, None)
            found[step] = Evaluated(step=step, value=float(value), low=low, high=high)
    return [found[step] for step in sorted(found)], latest


class Study:
    """The trials of a search, on disk. One process at a time; close it."""

    def __init__(self, search: Search) -> None:
        """Open or create the study; refuse one with another definition."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.search, folder = search, search.folder
        self._own = {path: current(search.config, path) for path in search.space}
        journal = folder / JOURNAL_FILE
        if folder.is_dir() and not journal.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise ConfigError(f"{folder} is not a study", hint="choose another name: --study NAME")
        folder.mkdir(parents=True, exist_ok=True)
        hint = "stop it first, or begin another search: --study NAME"
        self._lock = lock_run(folder, ConfigError(f"another process is searching in {folder}", hint=hint))
        try:
            self._study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(journal))),
                study_name=search.study,
                direction="maximize",
                load_if_exists=True,
            )
            self._check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> "Study":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        """Check that the definition matches; a new study starts with the recipe's values."""
        search, there = self.search, self._study.user_attrs.get("search")
        asked = {
            "metric": search.metric,
            "space": {path: str(item) for path, item in search.space.items()},
            "config": to_dict(replace(search.config, exp_name="run")),
        }
        if there is None:
            own = {path: value for path, value in self._own.items() if value in search.space[path]}
            self._study.enqueue_trial(own)
            self._study.set_user_attr("search", asked)
        elif changes := _changes(there, json.loads(json.dumps(asked))):
            raise ConfigError(
                f"{search.folder} was begun as another search\n{listing(changes)}",
                hint="continue with the original settings, or start another study: --study NAME",
            )

    def open_trials(self) -> list[Trial]:
        """Unfinished trials."""
        return [Trial(self._study, found._trial_id) for found in self._found(TrialState.RUNNING)]

    def count(self, *states: State) -> int:
        """Number of trials in these states; without any, of all."""
        wanted = states or tuple(_STATES.values())
        return len(self._found(*(state for state, name in _STATES.items() if name in wanted)))

    def ask(self) -> Trial:
        """Begin a trial."""
        return self._study.ask()

    def values(self, trial: Trial, *, at_once: bool = False) -> dict[str, Any]:
        """A trial's values, sampled on first use; `at_once`: away from those of unfinished parallel trials."""
        self._study.sampler = optuna.samplers.TPESampler(
            seed=zlib.crc32(f"{self.search.config.seed}/{trial.number}".encode()),
            n_startup_trials=RANDOM_TRIALS,
            constant_liar=at_once,
        )
        for path, item in self.search.space.items():
            if isinstance(item, Choice):
                trial.suggest_categorical(path, item.values)
            elif item.whole:
                trial.suggest_int(path, int(item.low), int(item.high), log=item.log)
            else:
                trial.suggest_float(path, item.low, item.high, log=item.log)
        return self._values(self._frozen(trial))

    def report(self, trial: Trial, evaluated: Evaluated) -> None:
        """Record an evaluation; idempotent, because resumed runs repeat evaluations."""
        if evaluated.step not in self._frozen(trial).intermediate_values:
            trial.report(evaluated.value, evaluated.step)
            trial.set_user_attr(f"interval/{evaluated.step}", [evaluated.low, evaluated.high])

    def hopeless(self, trial: Trial, evaluated: Evaluated) -> str:
        """The reason to prune a trial, or "".

        A conservative median rule: the upper end of the trial's interval lies below the others' median at this step.
        """
        others = [
            other.intermediate_values[evaluated.step]
            for other in self._found(TrialState.COMPLETE, TrialState.PRUNED)
            if evaluated.step in other.intermediate_values and other.number != trial.number
        ]
        best = evaluated.value if evaluated.high is None else evaluated.high
        if len(others) < COMPARED or best >= statistics.median(others):
            return ""
        return (
            f"{self.search.metric} {evaluated} at step {evaluated.step}, where the median of {len(others)} trials is "
            f"{statistics.median(others):.3f}"
        )

    def spend(self, trial: Trial, seconds: float) -> None:
        """Add to the time a trial took."""
        trial.set_user_attr("seconds", float(self._frozen(trial).user_attrs.get("seconds", 0.0)) + seconds)

    def finish(self, trial: Trial, state: State, reason: str = "") -> Result:
        """Record how a trial ended; the value of a finished one is its last evaluation."""
        if reason:
            trial.set_user_attr("reason", reason)
        seen = self._frozen(trial).intermediate_values
        value = seen[max(seen)] if state == "done" else None
        self._study.tell(trial, value, state=next(found for found, name in _STATES.items() if name == state))
        return self._result(self._frozen(trial))

    def results(self) -> list[Result]:
        """Every started trial."""
        return [self._result(found) for found in self._found(*_STATES)]

    def best(self) -> Result | None:
        """The finished trial with the largest value; the first if tied."""
        done = [result for result in self.results() if result.state == "done"]
        scored = [(result.last.value, -result.number, result) for result in done if result.last is not None]
        return max(scored)[2] if scored else None

    def _result(self, found: FrozenTrial) -> Result:
        return Result(
            number=found.number,
            state=_STATES[found.state],
            settings=self._values(found),
            evaluations=tuple(
                Evaluated(step=step, value=value, **_ends(found.user_attrs.get(f"interval/{step}")))
                for step, value in sorted(found.intermediate_values.items())
            ),
            seconds=found.user_attrs.get("seconds"),
            reason=found.user_attrs.get("reason", ""),
            run=str(self.search.folder.with_name(f"{self.search.study}-trial-{found.number:03d}")),
        )

    def _values(self, found: FrozenTrial) -> dict[str, Any]:
        """Sampled values as used: rounded, except the recipe's own."""
        values = {path: found.params[path] for path in self.search.space if path in found.params}
        for path, value in values.items():
            item = self.search.space[path]
            if isinstance(item, Range) and value != self._own[path]:
                values[path] = item.tidy(value)
        return values

    def _frozen(self, trial: Trial) -> FrozenTrial:
        return next(found for found in self._study.get_trials(deepcopy=False) if found.number == trial.number)

    def _found(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)


def _ends(interval: list[float | None] | None) -> dict[str, Any]:
    return {} if interval is None else {"low": interval[0], "high": interval[1]}


def _changes(there: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """The differences between two definitions of a search, as text."""
    found = []
    if there["metric"] != asked["metric"]:
        found.append(f"metric: {there['metric']} there, {asked['metric']} now")
    for path in {**there["space"], **asked["space"]}:
        old, new = (space.get(path, "not searched") for space in (there["space"], asked["space"]))
        if old != new:
            found.append(f"space of {path}: {old} there, {new} now")
    if there["config"] != asked["config"]:
        try:
            configs = [from_dict(RLTrainConfig, one["config"]) for one in (there, asked)]
        except ConfigError:
            return [*found, "the configuration: that of another version of pirl there"]
        found += [f"{path}: {old} there, {new} now" for path, old, new in diff(*configs)]
    return found
