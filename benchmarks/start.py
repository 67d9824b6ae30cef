"""Start-up time of `pirl train`, from the command to its first step: cold, with a warm compile cache, and resumed.

    PYTHONPATH=src python benchmarks/start.py                                full-size π₀: a GPU, 40 GB of disk
    PYTHONPATH=src python benchmarks/start.py --preset pi0_tiny --batch 4    the same, small

First makes an OpenPI checkpoint of random weights and a dataset of noisy images. Each run is then a process that reads
both as a user's would (from the page cache): ACRLPD with the policy settings of `gpu.py`. A run of all weights is
killed at its end, because its checkpoint would take 52 GB; the run with the VLM frozen finishes, is resumed once, and
is repeated without the interruption. Equal runs must log bit-identical losses. Times are seconds from the process's
start; `step` is the logged step time, from the second step on.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu
import jax
import stall

from pirl.agents.config import ACRLPDConfig
from pirl.checkpoints.openpi import save_openpi
from pirl.config import RLTrainConfig
from pirl.config_io import write_yaml
from pirl.data.config import DataConfig
from pirl.data.create import create_source
from pirl.data.normalize import save_norm_stats
from pirl.data.robots import get_robot
from pirl.data.schema import INFO_FILE
from pirl.data.stats import compute_norm_stats
from pirl.models.config import FreezeRule, Pi0Config, get_preset
from pirl.models.critic_config import CriticConfig
from pirl.models.pi0 import Pi0
from pirl.names import CAMERAS, LEROBOT_IMAGES
from pirl.recipes import get_config
from pirl.training.config import CheckpointConfig

MORE = 5
"""Further steps of a resumed run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One start of the command."""

    name: str
    """Name for `--only`."""
    what: str
    """Name in the table."""
    rule: FreezeRule
    """Freeze rule."""
    kept: bool
    """Whether its programs are in the compile cache."""
    resume: bool = False
    """Whether it resumes the previous run."""
    more: bool = False
    """Whether it also makes the resumed run's further steps."""
    again: str = ""
    """Name of the run that it repeats, wholly or in part."""


RUNS = (
    Run(name="cold", what="all weights, cold", rule="full", kept=False),
    Run(name="kept", what="all weights, programs kept", rule="full", kept=True, again="cold"),
    Run(name="frozen", what="VLM frozen, cold", rule="vlm_frozen", kept=False),
    Run(name="resumed", what="VLM frozen, resumed", rule="vlm_frozen", kept=True, resume=True, more=True),
    Run(name="whole", what="VLM frozen, in one go", rule="vlm_frozen", kept=True, more=True, again="resumed"),
)


def model_of(preset: str) -> Pi0Config:
    """The preset with the sizes of ALOHA's data."""
    return replace(get_preset(preset), action_dim=32, cameras=CAMERAS)


def make_weights(folder: Path, preset: str) -> None:
    """Write an OpenPI checkpoint of random weights."""
    policy = Pi0(model_of(preset))
    save_openpi(jax.jit(policy.init)(jax.random.key(0)), folder, norm_stats={}, value_suffix=False)


def make_config(folder: Path, args: argparse.Namespace) -> RLTrainConfig:
    """The ALOHA recipe with `gpu.py`'s model and critic, on a dataset that is written here."""
    model = model_of(args.preset)
    robot, root = get_robot("aloha"), folder / "data"
    keys = [f"{LEROBOT_IMAGES}.{name}" for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")]
    args.size, args.decode = model.image_size, True
    if not (root / INFO_FILE).exists():
        stall.write_dataset(root, keys, robot.action_dim, args)
    data = DataConfig(
        repo_ids=(str(root),),
        robot="aloha",
        cameras=CAMERAS,
        tokenizer="word",
        assets_dir=str(folder / "assets"),
        asset_id="arm",
        critic_horizon=gpu.critic_horizon(model),
    )
    source = create_source(data, robot, image_size=model.image_size)
    save_norm_stats(folder / "assets/arm", compute_norm_stats(source, robot, model.horizon), overwrite=True)
    return replace(
        get_config("acrlpd_aloha_fold"),
        model=model,
        agent=ACRLPDConfig(),
        critic=CriticConfig(),
        data=data,
        init_weights=str(folder / "weights"),
        batch_size=args.batch,
        num_train_steps=args.updates,
        log_interval=1,
        checkpoint=CheckpointConfig(base_dir=str(folder / "runs"), keep_period=None),
    )


def start(run: Run, config: RLTrainConfig, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the command; returns the times of its events and its losses."""
    config = replace(config, name=run.rule, freeze=run.rule, exp_name="run")
    steps = args.updates + (MORE if run.more else 0)
    file = write_yaml(folder / f"{run.rule}.yaml", replace(config, num_train_steps=steps), overwrite=True)
    how = "--resume" if run.resume else "--overwrite"
    environment = os.environ | {"PIRL_HOME": str(folder / "home" / run.rule), "PYTHONUNBUFFERED": "1"}
    environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION")  # `gpu.py`'s
    if not run.kept:
        shutil.rmtree(environment["PIRL_HOME"], ignore_errors=True)
    command = [sys.executable, "-m", "pirl", "train", str(file), how]
    began, log = time.time(), folder / "log.txt"
    metrics, found = config.run_dir / "metrics.jsonl", dict[str, Any](what=run.what)
    with (
        log.open("w+") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(0.05)
                said = output_so_far(log)
                if "decided_s" not in found and " auto: " in said:
                    found["decided_s"] = time.time() - began
                if "compiled_s" not in found and "step compiled" in said:
                    found["compiled_s"] = time.time() - began
                if run.rule == "full" and any(record["step"] == steps for record in records(metrics, began)):
                    break
        finally:
            process.kill()
    said, done = log.read_text(), records(metrics, began)
    if not done or done[-1]["step"] != steps:
        raise SystemExit(f"{run.name}: ended with {process.returncode} after {len(done)} records\n{said[-4000:]}")
    last = done[-1]["values"]
    found |= {
        "said": [line for line in said.splitlines() if " auto: " in line or "compiled in" in line],
        "first_s": done[0]["time"] - began,
        "step_s": sorted(record["values"]["time/step_seconds"] for record in done[1:])[(len(done) - 1) // 2],
        "ended_s": time.time() - began,
        "values": {name: value for name, value in last.items() if name.startswith(("time/", "memory/"))},
        "loss": {record["step"]: record["values"]["actor/loss"] for record in done},
    }
    return found


def output_so_far(log: Path) -> str:
    """The log so far, without an incomplete last line."""
    return log.read_text(errors="replace").rpartition("\n")[0]


def records(file: Path, since: float) -> list[dict[str, Any]]:
    """Training records logged since the time `since`."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if record["time"] >= since and "actor/loss" in record["values"]]


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The results as Markdown."""
    yield "| `pirl train` | settings decided after | step compiled | first step done | step | ended |"
    yield "|---|---|---|---|---|---|"
    for found in results.values():
        times = (f"{found[name]:.1f} s" for name in ("decided_s", "compiled_s", "first_s"))
        yield f"| {found['what']} | {' | '.join(times)} | {found['step_s']:.3f} s | {found['ended_s']:.1f} s |"


def compared(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Lines on whether repeated runs logged the same losses."""
    for run in (run for run in RUNS if {run.name, run.again} <= results.keys()):
        here, there = (results[name]["loss"] for name in (run.name, run.again))
        both = sorted(here.keys() & there.keys())
        same = sum(here[step] == there[step] for step in both)
        yield f"losses of {run.name} and {run.again}: {same} of {len(both)} are the same"


def main() -> int:
    """Make weights and data, start the runs, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="pi0", help="model preset (pi0, pi0_tiny, ...)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--updates", type=int, default=12, help="steps of a run")
    parser.add_argument("--episodes", type=int, default=8, help="of the dataset")
    parser.add_argument("--steps", type=int, default=100, help="of an episode")
    parser.add_argument("--only", default=",".join(run.name for run in RUNS), help="runs, separated by commas")
    parser.add_argument("--dir", type=Path, help="work in this folder, and use its weights and data the next time")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--weights-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - {run.name for run in RUNS}:
        parser.error(f"no run is called {', '.join(sorted(unknown))}; there are {', '.join(r.name for r in RUNS)}")
    if args.weights_only:  # in a separate process, which frees the GPU when it ends
        make_weights(args.dir, args.preset)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = args.dir or Path(scratch), time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        words = ["--weights-only", "--preset", args.preset, "--dir", str(folder / "weights")]
        if not (folder / "weights").exists():
            subprocess.run([sys.executable, __file__, *words], check=True)
        jax.config.update("jax_platforms", "cpu")  # leave the GPU to the runs
        config = make_config(folder, args)
        print(f"weights and data made in {time.perf_counter() - began:.0f} s", flush=True)
        results: dict[str, dict[str, Any]] = {}
        for run in (run for run in RUNS if run.name in args.only.split(",")):
            results[run.name] = start(run, config, folder, args)
            print(json.dumps(results[run.name]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    print("\n".join((*table(results), "", *compared(results))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
