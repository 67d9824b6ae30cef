"""Writes synthetic folders of runs and evaluations, file by file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MP4 = b"\x00\x00\x00\x18ftypisom" + bytes(range(40))
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
ENV = {"type": "Tabletop", "level": "easy"}


def write_records(file: Path, records: Sequence[tuple[int, Mapping[str, float | None]]]) -> None:
    lines = [json.dumps({"step": step, "time": 1_700_000_000.0 + step, "values": values}) for step, values in records]
    file.write_text("".join(f"{line}\n" for line in lines))


def rate(successes: int, trials: int, low: float = 0.25, high: float = 0.75) -> dict[str, Any]:
    return {"rate": successes / trials, "low": low, "high": high, "successes": successes, "trials": trials}


def write_evaluation(
    run: Path, outcomes: Sequence[bool], *, films: Mapping[int, bytes], name: str = "60-test", **asked: Any
) -> Path:
    """Write results of episodes that alternate between two tasks, with videos of some."""
    folder = run / "evaluations" / name
    folder.mkdir(parents=True)
    tasks = [("red", "blue")[i % 2] for i in range(len(outcomes))]
    result = {
        "success": rate(sum(outcomes), len(outcomes)),
        "tasks": {"red": rate(sum(outcomes[::2]), len(outcomes[::2])), "blue": rate(1, 2)},
        "metrics": {},
        "episodes": [
            {"task": task, "init": 100 + i // 2, "success": won, "return": float(won), "length": 7 + i}
            for i, (task, won) in enumerate(zip(tasks, outcomes, strict=True))
        ],
    }
    asked = {
        "checkpoint": str(run / "60"),
        "recipe": run.parent.name,
        "exp_name": run.name,
        "env": ENV,
        "split": "test",
        "episodes": len(outcomes),
        "best_of": 1,
        **asked,
    }
    (folder / "eval.json").write_text(json.dumps({"evaluation": asked, "result": result}))
    for number, content in films.items():
        (folder / f"{'success' if outcomes[number] else 'failure'}-{number:04d}.mp4").write_bytes(content)
    return folder


def write_run(
    base: Path, name: str = "debug/first", steps: int = 60, *, success: bool = True, config: str = ""
) -> Path:
    """Write a run with a falling loss, a rising success rate and one checkpoint."""
    folder = base / name
    folder.mkdir(parents=True)
    records: list[tuple[int, dict[str, float | None]]] = []
    for step in range(0, steps + 1, steps // 6):
        if success:
            p = 0.2 + 0.7 * step / steps
            records.append((step, {"eval/success_rate": p, "eval/success_low": p - 0.1, "eval/success_high": p + 0.05}))
        if step:
            records.append((step, {"critic/loss": 3.0 - step / steps, "memory/host_gib": 1.5}))
    write_records(folder / "metrics.jsonl", records)
    recipe, exp_name = name.split("/")
    (folder / "config.yaml").write_text(
        config or f"name: {recipe}\nexp_name: {exp_name}\nnum_train_steps: {steps}\nagent:\n  type: ACRLPD\n"
    )
    extra = folder / str(steps) / "extra"
    extra.mkdir(parents=True)
    metadata = {
        "revision": "0123456789abcdef-dirty",
        "versions": {"jax": "0.10.2"},
        "started_at": "2023-11-14T22:13:00+00:00",
    }
    (extra / "metadata.json").write_text(json.dumps(metadata))
    (extra / "extra.json").write_text(json.dumps({"stream": {"episodes": 384}}))
    return folder
