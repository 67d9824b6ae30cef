"""`pirl eval CHECKPOINT --data`: a checkpoint on held-out episodes, without an environment."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pirl.cli.app import console

FILE, SAMPLES = "held_out.json", "samples.csv"
WORST = 5
"""Number of samples with the largest losses to print."""


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from pirl.cli.eval import FOLDER, changed_by_flags, check_target, write_result
    from pirl.recipes import load
    from pirl.training.acting import find_checkpoint
    from pirl.training.judging import check_comparable, comparison, judge, judged_data

    if args.video is not None:
        args.usage_error("--data simulates nothing, so there is nothing to film: leave out --video")
    recipe = load(args.recipe) if args.recipe else None
    found = find_checkpoint(args.checkpoint, best=args.best, config=recipe)
    found = replace(found, config=changed_by_flags(found.config, args))
    if args.seed is not None:
        found = replace(found, config=replace(found.config, seed=args.seed))
    checkpoints = {"": found}
    if args.compare:
        other = find_checkpoint(args.compare, best=args.best, config=recipe)
        # Same rows and same noise for both.
        config = replace(other.config, held_out=found.config.held_out, seed=found.config.seed)
        checkpoints["compared_with"] = replace(other, config=config)
    data, trained = judged_data(found.config, args.data)
    asked = {name: _asked(one, data, trained) for name, one in checkpoints.items()}
    name = f"{found.folder.name}-" + ("held-out" if trained else "-".join(Path(one).name for one in data.repo_ids))
    if args.compare:
        name += f"-vs-{checkpoints['compared_with'].config.name}-{checkpoints['compared_with'].folder.name}"
    file = (args.out or (found.run or Path()) / FOLDER / name) / FILE
    check_target(file, asked, overwrite=args.overwrite)
    if args.compare:
        check_comparable(*checkpoints.values())
    measured = {name: judge(one, data, trained=trained) for name, one in checkpoints.items()}
    result: dict[str, Any] = {"evaluation": asked[""], "result": measured[""].to_json()}
    if args.compare:
        result["compared_with"] = {
            "evaluation": asked["compared_with"],
            "result": measured["compared_with"].to_json(),
            "comparison": comparison(*measured.values()),
        }
    text = write_result(file, result)
    samples = measured[""].samples()
    _write_samples(file.with_name(SAMPLES), samples)
    if args.json:
        print(text, end="")
    else:
        _show(result, file, samples)
    return 0


def _write_samples(file: Path, samples: Mapping[str, Sequence[float]]) -> None:
    """Write a CSV with one line per row: its losses and values, to find outliers."""
    import csv
    import io

    from pirl.files import write_text

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(samples)
    writer.writerows(zip(*samples.values(), strict=True))
    write_text(file, out.getvalue())


def _asked(found: Any, data: Any, trained: bool) -> dict[str, Any]:
    """The settings that determine the result."""
    from pirl.config_io import to_dict

    config = found.config
    return {
        "checkpoint": str(found.folder),
        "trained_at": found.metadata.get("started_at"),
        "recipe": config.name,
        "exp_name": config.exp_name,
        "datasets": list(data.repo_ids),
        "episodes": "held out" if trained and data.held_out else "all",
        "data": {key: value for key, value in to_dict(data).items() if key not in ("cache", "cache_dir", "prefetch")},
        "held_out": to_dict(config.held_out),
        "seed": config.seed,
        "flow_steps": config.rollout.flow_steps,
    }


def _show(result: Mapping[str, Any], file: Path, samples: Mapping[str, Sequence[float]]) -> None:
    """Print tables and the file's path."""
    shown = console()
    told = [result, *([result["compared_with"]] if "compared_with" in result else [])]
    shown.print(_measured_on(told[0]), highlight=False)
    shown.print(_metrics(told))
    shown.print("mean error of each action dimension, in the robot's units", highlight=False)
    shown.print(_dimensions(told))
    for line in _differences(told[-1].get("comparison", {})):
        shown.print(line, highlight=False)
    if line := _worst(samples):
        shown.print(line, highlight=False)
    shown.print(f"{file}, {SAMPLES}: every sample", highlight=False, soft_wrap=True)


def _worst(samples: Mapping[str, Sequence[float]]) -> str:
    """A line with the samples of largest flow loss."""
    if "flow_loss" not in samples:
        return ""
    rows = sorted(zip(samples["flow_loss"], samples["episode"], samples["step"], strict=True), reverse=True)[:WORST]
    told = ", ".join(f"{loss:.3g} (episode {episode:.0f}, step {step:.0f})" for loss, episode, step in rows)
    return f"largest flow losses: {told}"


def _measured_on(one: Mapping[str, Any]) -> str:
    outcomes = [episode["success"] for episode in one["result"]["episodes"]]
    counts = ", ".join(
        f"{outcomes.count(kind)} {word}"
        for kind, word in ((True, "successes"), (False, "failures"), (None, "unlabelled"))
        if kind in outcomes
    )
    which, where = one["evaluation"]["episodes"], ", ".join(one["evaluation"]["datasets"])
    return f"{one['result']['rows']} rows of {len(outcomes)} episodes of {where} ({which}): {counts}"


def _metrics(told: Sequence[Mapping[str, Any]]) -> Any:
    """A table of all metrics, one column per checkpoint."""
    from rich.table import Table

    table = Table("metric", *(_name(one) for one in told))
    names = dict.fromkeys(name for one in told for name in one["result"]["metrics"])
    for name in names:
        values = (one["result"]["metrics"].get(name) for one in told)
        table.add_row(name.removeprefix("held_out/"), *("–" if x is None else f"{x:.4g}" for x in values))
    return table


def _dimensions(told: Sequence[Mapping[str, Any]]) -> Any:
    """A table of action errors by dimension, in robot units."""
    from rich.table import Table

    kinds = [(one, kind) for one in told for kind in one["result"]["action_error"]]
    several = len(told) > 1
    heads = [f"{_name(one)}, {_KINDS[kind]}" if several else _KINDS[kind] for one, kind in kinds]
    table = Table("action", *heads)
    columns = [one["result"]["action_error"][kind]["robot_units"] for one, kind in kinds]
    for dimension, values in enumerate(zip(*columns, strict=True)):
        table.add_row(str(dimension), *("–" if x is None else f"{x:.4g}" for x in values))
    return table


_KINDS = {"not_failed": "not failed", "failures": "failures"}


def _differences(found: Mapping[str, Any]) -> Iterator[str]:
    for name, one in found.items():
        what = name.replace("_not_failed", ", not failed").replace("_failures", ", failures").replace("_", " ")
        known = one["low"] is not None
        interval = f"95 % interval {one['low']:+.4g} to {one['high']:+.4g}" if known else "no interval: one episode"
        yield f"difference of {what}: {one['mean']:+.4g} ({interval}, paired, {one['episodes']} episodes)"


def _name(one: Mapping[str, Any]) -> str:
    asked = one["evaluation"]
    return f"{asked['recipe']}/{asked['exp_name']} {Path(asked['checkpoint']).name}"
