"""`pirl demo --robot`: the improvement loop, with a simulated robot in a separate process."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pirl.cli.demo import Stage, plan
from pirl.files import json_text, write_text

ROBOT = "-m pirl.robot.simulated --server {server} --record {dataset} --inits {inits} --seed {seed} --purpose {purpose}"
GENERATIONS = 2


def plan_loop(folder: Path, *, quick: bool, seed: int) -> list[Stage]:
    """The stages: demonstrations, statistics and imitation as in the demo, then the loop."""
    stages = plan(folder, quick=quick, seed=seed)[0][:3]
    file, state = folder / "loop.yaml", folder / "loop" / "state.json"
    over = state.is_file() and len(_finished(state)) >= GENERATIONS
    command, took = ("improve", str(file)), 120 if quick else 600
    return [*stages, Stage("generations at the simulated robot", command, state, over, took)]


def write_loop(folder: Path, stages: list[Stage], *, quick: bool, seed: int) -> None:
    """Write the loop's settings. A scripted supervisor watches half of the collected episodes, but no comparisons."""
    steps = "80" if quick else "1600"
    settings: dict[str, Any] = {
        "folder": str(folder / "loop"),
        "recipe": "acrlpd_tabletop",
        "start": str(stages[2].product),
        "demonstrations": [str(stages[0].product)],
        "robot": f"{shlex.quote(sys.executable)} {ROBOT} --supervise 0.5",
        "generations": GENERATIONS,
        "episodes": 12 if quick else 60,
        "train": [
            *("--max-steps", steps, "--policy-schedule.decay-steps", steps),
            *("--evaluation.interval", steps, "--evaluation.episodes", "8"),
            *("--agent.actor-warmup", "hold"),
            *("--data.assets-dir", str(folder / "assets")),
        ],
        "serve": ["--max-rate", "10000", "--max-batch", "1"],
        "port": 0,
        "held_out": 40 if quick else 200,
        "comparison": 24 if quick else 96,
        "look_every": 24,
        "seed": seed,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "loop.yaml", json_text(settings))  # JSON is YAML


def told(folder: Path) -> Iterator[str]:
    """Lines with the result of each generation and the path of the loop's page."""
    for one in _finished(folder / "loop" / "state.json"):
        held, compared = one["held_out"], one["comparison"]
        success = f"{held['rate']:.1%} of held-out episodes succeed ({held['low']:.1%} to {held['high']:.1%})"
        corrected = f"{one['collected']['corrected']} of {one['collected']['episodes']} collected episodes corrected"
        yield f"generation {one['number']}: {one['decision']}; {success}; {corrected}"
        if compared is not None:
            yield f"  blind comparison: {compared['text']}"
    yield f"page: {folder / 'loop' / 'loop.html'}"


def _finished(state: Path) -> list[dict[str, Any]]:
    return list(json.loads(state.read_text("utf-8"))["finished"])
