"""The summary at the end of a run: its folder, the best step, the next commands."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from pirl import text
from pirl.checkpoints.run import Checkpoints
from pirl.config import RLTrainConfig
from pirl.training.config import KeepBest
from pirl.training.console import HEADLINES, number
from pirl.training.shown import FOLDER


def summary(config: RLTrainConfig, checkpoints: Checkpoints, *, start: int, step: int, seconds: float) -> str:
    """Folder, time, a table of saved steps, and the next commands; "" if nothing was saved."""
    metrics = {saved: checkpoints.metadata(saved).get("metrics") or {} for saved in checkpoints.all_steps()}
    if not metrics:
        return ""
    best = best_step(metrics, config.checkpoint.keep_best or KeepBest())
    chosen, done, films = step if best is None else best, step - start, config.run_dir / FOLDER
    return "\n".join(
        [
            f"{config.name}/{config.exp_name}: {done:,} step{'s' if done != 1 else ''} in "
            f"{timedelta(seconds=round(seconds))}, now at step {step:,}; {config.run_dir}",
            *([f"films of evaluations: {films}"] if films.is_dir() else []),
            *table(metrics, best),
            "next:",
            *(f"  {command}" for command in next_commands(config, config.run_dir, chosen)),
        ]
    )


def best_step(metrics: Mapping[int, Mapping[str, float | None]], rule: KeepBest) -> int | None:
    """The saved step with the best value of `rule.metric`; ties go to the later step. Values that were NaN are None."""
    sign = 1 if rule.mode == "max" else -1
    measured = {step: values.get(rule.metric) for step, values in metrics.items()}
    scores = {step: sign * value for step, value in measured.items() if value is not None}
    return max(scores, key=lambda step: (scores[step], step), default=None)


def table(metrics: Mapping[int, Mapping[str, float | None]], best: int | None) -> list[str]:
    """A table of saved steps with up to six headline metrics each."""
    names = [name for name in HEADLINES if any(name in values for values in metrics.values())][:6]
    rows = [("step", *names)]
    for step, values in metrics.items():
        found = [values.get(name) for name in names]
        shown = ("–" if value is None else number(value) for value in found)
        rows.append((f"{step:,}{' (best)' if step == best else ''}", *shown))
    return text.table(rows, "<" + ">" * len(names))


def next_commands(config: RLTrainConfig, folder: Path, step: int) -> list[str]:
    """Commands to report, evaluate, continue and export the run."""
    commands = [f"pirl report {folder}"]
    if config.env is not None:
        commands.append(f"pirl eval {folder}/{step} --episodes 100")
    elif config.data.held_out:
        commands.append(f"pirl eval {folder}/{step} --data")
    commands.append(f"pirl train {folder} --max-steps {2 * config.num_train_steps}")
    commands.append(f"pirl export openpi {folder}/{step} --out to_robot")
    return commands
