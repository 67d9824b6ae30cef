"""Results of `pirl eval`: success by task, with videos of some episodes."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE, STRIP, FOLDER = "eval.json", "filmstrip.png", "evaluations"
COMPARED = "compared_with"
"""Key of the other policy's results in an evaluation's file, and folder of its films."""
_FILM = re.compile(r"(success|failure)-(\d+)\.mp4")


@dataclass(frozen=True, kw_only=True)
class RateShown:
    """A success rate with its interval."""

    value: float
    low: float
    """Lower end of the 95 % interval; NaN if unknown."""
    high: float
    successes: int | None = None
    trials: int | None = None


@dataclass(frozen=True, kw_only=True)
class FilmFile:
    """A video of one episode."""

    file: Path
    size: int
    """Size in bytes."""
    success: bool
    number: int
    """Number of the episode in the evaluation."""
    state: tuple[str, str, int]
    """(environment, task, initial state): films that share it start identically."""
    length: int
    """Number of steps of the episode."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation of one policy."""

    asked: Mapping[str, Any]
    """The settings that determine the result: checkpoint, environment, states, seed, ..."""
    success: RateShown
    tasks: Mapping[str, RateShown]
    films: tuple[FilmFile, ...] = ()
    strip: Path | None = None
    """The filmstrip image."""
    comparison: Mapping[str, float] | None = None
    """Paired comparison with `other`, state by state."""
    other: "Evaluation | None" = None
    """The policy it was compared with."""

    @property
    def step(self) -> str:
        """Step of the checkpoint: the name of its folder."""
        return Path(str(self.asked.get("checkpoint", ""))).name

    @property
    def owner(self) -> tuple[str, str]:
        """(recipe, experiment name) of the evaluated run."""
        return str(self.asked.get("recipe", "?")), str(self.asked.get("exp_name", "?"))

    @property
    def policy(self) -> str:
        """The policy within its run: step and best-of-N."""
        best_of = self.asked.get("best_of", 1)
        return f"step {self.step or '?'}" + (f", best of {best_of}" if best_of != 1 else "")

    @property
    def question(self) -> tuple[str, ...]:
        """Environment, split and number of episodes; evaluations that share them are comparable."""
        return tuple(json.dumps(self.asked.get(key), sort_keys=True) for key in ("env", "split", "episodes"))


def find_evaluations(folder: Path) -> list[Path]:
    """The result files in a run's folder or in an evaluation's folder."""
    found = [folder / FILE, *sorted((folder / FOLDER).glob(f"*/{FILE}"))]
    return [file for file in found if file.is_file()]


def read_evaluation(file: Path) -> tuple[Evaluation, list[str]]:
    """(evaluation, notes on oddities). Raises ValueError if `pirl eval` did not write the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        asked, result = dict(content["evaluation"]), content["result"]
        notes: list[str] = []
        films = tuple(_films(file.parent, asked, result["episodes"], notes))
        strip = file.parent / STRIP
        compared = content.get(COMPARED)
        evaluation = Evaluation(
            asked=asked,
            success=_rate(result["success"]),
            tasks=_tasks(result),
            films=films,
            strip=strip if strip.is_file() else None,
            comparison=None if compared is None else {k: float(v) for k, v in compared["comparison"].items()},
            other=None
            if compared is None
            else Evaluation(
                asked=dict(compared["evaluation"]),
                success=_rate(compared["result"]["success"]),
                tasks=_tasks(compared["result"]),
                films=tuple(
                    _films(file.parent / COMPARED, compared["evaluation"], compared["result"]["episodes"], notes)
                ),
            ),
        )
    except (OSError, KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return evaluation, notes


def _tasks(result: Mapping[str, Any]) -> dict[str, RateShown]:
    return {str(task): _rate(rate) for task, rate in result["tasks"].items()}


def _rate(data: Mapping[str, Any]) -> RateShown:
    numbers = {key: math.nan if data[key] is None else float(data[key]) for key in ("rate", "low", "high")}
    counts = {key: int(data[key]) for key in ("successes", "trials")}
    return RateShown(value=numbers["rate"], low=numbers["low"], high=numbers["high"], **counts)


def _films(folder: Path, asked: Mapping[str, Any], episodes: Any, notes: list[str]) -> Iterator[FilmFile]:
    """The videos beside the results, each with its initial state."""
    env = json.dumps(asked.get("env"), sort_keys=True)
    for file in sorted(folder.glob("*.mp4")):
        match = _FILM.fullmatch(file.name)
        if match is None:
            continue
        success, number = match[1] == "success", int(match[2])
        episode = episodes[number] if number < len(episodes) else None
        if episode is None or bool(episode["success"]) != success:
            notes.append(f"{file.name} is not of this evaluation and was left out")
            continue
        yield FilmFile(
            file=file,
            size=file.stat().st_size,
            success=success,
            number=number,
            state=(env, str(episode["task"]), int(episode["init"])),
            length=int(episode["length"]),
        )
