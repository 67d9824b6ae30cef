"""Output of a search: results as JSON and CSV, the best configuration, and which checkpoints to keep."""

import csv
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from pirl.checkpoints.ownership import foreign_in_step
from pirl.checkpoints.run_directory import METADATA_FILE, complete_steps, io_errors
from pirl.config_io import write_yaml
from pirl.files import json_text, write_text
from pirl.names import EPISODE_FILE
from pirl.tune.study import Result, Study

RESULTS_FILE, TABLE_FILE, BEST_FILE = "results.json", "results.csv", "best.yaml"


def drop_checkpoints(run: Path) -> None:
    """Delete a run's steps and collected episodes; keep metrics, images, configuration and foreign files."""
    if not (run / METADATA_FILE).is_file():
        return
    steps = [run / str(step) for step in complete_steps(run) if not foreign_in_step(run / str(step))]
    episodes = [run / name for name in ("replay", "rollouts") if (run / name).is_dir()]
    kept = [folder for folder in episodes if any(not EPISODE_FILE.fullmatch(file.name) for file in folder.iterdir())]
    for folder in [one for one in (*steps, *episodes) if one not in kept]:
        aside = folder.with_name(f".{folder.name}.deleted")
        with io_errors(f"{folder} cannot be removed"):
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)  # so that a half-deleted step does not look like a checkpoint
            shutil.rmtree(aside)


def described(result: Result) -> str:
    """The result as a short text."""
    if result.state == "done" and result.last is not None:
        return str(result.last)
    return f"{result.state}: {result.reason}" if result.reason else result.state


def results_json(study: Study) -> dict[str, Any]:
    """All results as plain data."""
    search, best = study.search, study.best()
    return {
        "recipe": search.config.name,
        "study": search.study,
        "metric": search.metric,
        "steps": search.config.num_train_steps,
        "episodes": None if search.config.evaluation is None else search.config.evaluation.episodes,
        "seed": search.config.seed,
        "space": {path: item.to_json() for path, item in search.space.items()},
        "best": None if best is None else best.number,
        "trials": [result.to_json() for result in study.results()],
    }


def write_results(study: Study) -> None:
    """Write results.json, results.csv, and the best trial's configuration as best.yaml."""
    search, best, folder = study.search, study.best(), study.search.folder
    columns = ["trial", "state", search.metric, "low", "high", "step", "seconds", *search.space, "reason"]
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    for result in study.results():
        last = result.last
        measured = [None] * 4 if last is None else [last.value, last.low, last.high, last.step]
        tried = [result.settings.get(path) for path in search.space]
        writer.writerow([result.number, result.state, *measured, result.seconds, *tried, result.reason])
    with io_errors(f"{folder} cannot be written to"):
        write_text(folder / RESULTS_FILE, json_text(results_json(study)))
        write_text(folder / TABLE_FILE, table.getvalue())
        if best is not None:
            config = replace(search.trial(best.number, best.settings), exp_name=f"{search.study}-best")
            header = f"The best of {len(study.results())} trials of {search.study}: trial {best.number}, {best.last}."
            write_yaml(folder / BEST_FILE, config, header=header, overwrite=True)
