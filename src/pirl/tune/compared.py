"""State of a comparison's runs, from their files: progress, results, and the table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pirl.checkpoints.run_directory import io_errors
from pirl.config import RLTrainConfig
from pirl.config_io import diff, from_dict, read_yaml
from pirl.errors import ConfigError, did_you_mean
from pirl.files import json_text, write_text
from pirl.training.sinks import JSONL_FILE
from pirl.tune.contenders import Run, differences
from pirl.tune.intervals import t_interval

RESULTS_FILE, TABLE_FILE = "results.json", "table.md"
SUCCESS = "success rate"
"""Name of the success rate that `pirl eval` measures on test states."""
NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Resources that a run has used, from its log."""

    updates: int = 0
    """Policy updates."""
    seconds: float = 0.0
    """Training time: collection and updates, without compilation, evaluation and checkpoints."""
    episodes: int = 0
    """Episodes collected for training."""
    values: Mapping[str, float]
    """The last finite value of each metric."""

    def of(self, run: Run) -> float:
        """The quantity that the run's budget limits: updates or seconds."""
        return float(self.updates) if run.seconds is None else self.seconds


def read_log(run: Run, *, until: int | None = None, since: float = math.inf) -> Spent:
    """Sum up a run's log; with `until`, records up to that step and those written after the time `since`."""
    file = run.folder / JSONL_FILE
    if not file.is_file():
        return Spent(values={})
    values: dict[str, float] = {}
    updates, seconds, episodes, at = 0.0, 0.0, 0.0, 0
    text = file.read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():  # the last line may be incomplete
        record = json.loads(line)
        step, found = int(record["step"]), record["values"]
        if until is not None and step > until and float(record["time"]) < since:
            continue
        steps, at = max(step - at, 0), max(step, at)
        updates += steps * next((found[name] for name in found if name.endswith("/updates")), 1)
        seconds += found.get("time/seconds", 0.0) if steps else 0.0
        if run.config.agent.groups is not None:
            groups = next((found[name] for name in found if name.endswith("/attempted_groups")), 0)
            episodes += steps * groups * run.config.agent.groups.size
        episodes = found.get("online/episodes", episodes)
        values |= {name: value for name, value in found.items() if _number(value)}
    return Spent(updates=round(updates), seconds=seconds, episodes=round(episodes), values=values)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_state(run: Run) -> dict[str, Any]:
    """A run's recorded state: `trained`, `result`, `failed`, `wall_seconds`."""
    file = run.file(".json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def note(run: Run, **changes: Any) -> None:
    """Update a run's recorded state."""
    with io_errors(f"{run.file('.json')} cannot be written"):
        write_text(run.file(".json"), json_text(read_state(run) | changes))


def metric_result(run: Run, metric: str) -> dict[str, Any]:
    """The result of a run without an environment: the last value of a metric of its log."""
    values = read_log(run).values
    if metric not in values:
        raise did_you_mean(metric, values, kind="metric")
    return {"value": values[metric]}


def eval_result(file: Path) -> dict[str, Any]:
    """The result of a run with an environment, from the file of `pirl eval`."""
    success = json.loads(file.read_text(encoding="utf-8"))["result"]["success"]
    return {"value": success["rate"], "low": success["low"], "high": success["high"], "trials": success["trials"]}


def results_json(runs: Sequence[Run], asked: Mapping[str, Any]) -> dict[str, Any]:
    """All results as plain data, in the order of the runs."""
    found = []
    for run in runs:
        spent, state = read_log(run), read_state(run)
        found.append(
            {
                "recipe": run.task,
                "agent": run.agent,
                "seed": run.seed,
                "result": state.get("result"),
                "failed": state.get("failed"),
                "updates": spent.updates,
                "episodes": spent.episodes,
                "training_seconds": spent.seconds,
                "wall_seconds": state.get("wall_seconds", 0.0),
                "run": str(run.folder),
            }
        )
    return {"asked": dict(asked), "runs": found, "differences": dict(differences(runs))}


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Write results.json and table.md."""
    with io_errors(f"{folder} cannot be written to"):
        write_text(folder / RESULTS_FILE, json_text(results))
        write_text(folder / TABLE_FILE, table(results))


def check_asked(folder: Path, asked: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Raise if the folder holds something else or another comparison. Agents and seeds may be added."""
    file = folder / RESULTS_FILE
    hint = "choose another --name"
    if not file.is_file():
        if folder.is_dir() and any(one.name != ".lock" for one in folder.iterdir()):
            raise ConfigError(f"{folder} exists and holds no comparison", hint=hint)
        return
    there = json.loads(file.read_text(encoding="utf-8"))
    if there["asked"] != asked and any(run["result"] for run in there["runs"]):
        changes = [f"{key}: {there['asked'].get(key)} there, {asked[key]} now" for key in asked]
        changed = [text for text, key in zip(changes, asked, strict=True) if there["asked"].get(key) != asked[key]]
        raise ConfigError(f"{folder} is another comparison: {'; '.join(changed)}", hint=hint)
    for run in runs:
        _check_same(run, hint)


def _check_same(run: Run, hint: str) -> None:
    file = run.file(".yaml")
    if file.is_file():
        changes = diff(from_dict(RLTrainConfig, read_yaml(file)), run.config)
        if changes:
            said = "; ".join(f"{path}: {old} there, {new} now" for path, old, new in changes[:5])
            raise ConfigError(f"{run.folder} was begun with other settings: {said}", hint=hint)


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown, one table per recipe."""
    runs, asked = results["runs"], results["asked"]
    seeds = list(dict.fromkeys(run["seed"] for run in runs))
    budget = f"{asked['seconds']:g} s of training" if asked["seconds"] else "the same number of updates"
    measured = f"{asked['episodes']} test states" if asked["metric"] == SUCCESS else "the last value logged"
    parts = [f"{asked['metric']}, {measured}; {budget} for each run; 95 % intervals over seeds (Student's t)."]
    for task in dict.fromkeys(run["recipe"] for run in runs):
        rows = [run for run in runs if run["recipe"] == task]
        agents = list(dict.fromkeys(run["agent"] for run in rows))
        head = ["agent", "mean", "95 % interval", *(f"seed {seed}" for seed in seeds), f"minus {agents[0]}"]
        lines = [[*head, "updates", "episodes", "training", "wall"], ["---"] * (len(head) + 4)]
        lines += [_row([run for run in rows if run["agent"] == agent], rows, agents[0], asked) for agent in agents]
        parts.append("\n".join([f"## {task}\n", *(f"| {' | '.join(line)} |" for line in lines)]))
    parts += [
        f"{run['recipe']} {run['agent']} seed {run['seed']} failed: {run['failed']}" for run in runs if run["failed"]
    ]
    for who, found in results["differences"].items():
        parts.append(f"{who} also differs in: {'; '.join(found)}.")
    return "\n\n".join(parts) + "\n"


def _row(own: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], first: str, asked: Any) -> list[str]:
    """One algorithm's row. Differences are paired by seed, because a seed determines the batches."""
    share = asked["metric"] == SUCCESS
    values = {run["seed"]: run["result"]["value"] for run in own if run["result"]}
    base = {run["seed"]: run["result"]["value"] for run in rows if run["agent"] == first and run["result"]}
    both = [values[seed] - base[seed] for seed in values if seed in base]
    cells = [_value(run) for run in own]
    mean, interval = NOTHING, NOTHING
    if values:
        middle, low, high = t_interval(list(values.values()))
        mean = f"{middle:.4g}" if len(values) == len(own) else f"{middle:.4g} ({len(values)} of {len(own)} seeds)"
        interval = _ends(max(low, 0.0), min(high, 1.0)) if share and not math.isnan(low) else _ends(low, high)
    difference = NOTHING
    if both and own[0]["agent"] != first:
        middle, low, high = t_interval(both)
        difference = f"{middle:+.3g}" + ("" if math.isnan(low) else f" ({low:+.3g} to {high:+.3g})")
    spent = [_mean(own, name) for name in ("updates", "episodes", "training_seconds", "wall_seconds")]
    name = own[0]["agent"]
    return [
        name,
        mean,
        interval,
        *cells,
        difference,
        *(f"{x:,.0f}" for x in spent[:2]),
        *(f"{x:,.0f} s" for x in spent[2:]),
    ]


def _value(run: Mapping[str, Any]) -> str:
    return "failed" if run["failed"] else f"{run['result']['value']:.4g}" if run["result"] else NOTHING


def _ends(low: float, high: float) -> str:
    return NOTHING if math.isnan(low) else f"{low:.4g} to {high:.4g}"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows)) / len(rows)
