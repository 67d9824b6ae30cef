"""Q-chunking's published curves on OGBench, with pirl's agent: play data, training, evaluation and report.

    PYTHONPATH=src python benchmarks/results/qc.py all --run RUN --domains puzzle-3x3 scene --minutes 17

Stages (`data`, `speed`, `train`, `eval`, `report`) can run separately, resume, and share only the run's folder. `all`
makes the first domain's data while it measures the device's speed, then trains while the next domain's data are made
and saved weights are evaluated. Needs `ogbench` and, for training, a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import qc_report
from qc_play import DOMAINS, TASKS, Amount, generate, load, log

CORES = os.cpu_count() or 1
TYPES = ("float32", "mixed", "bfloat16")
"""Precisions, from the most exact: float32 (TF32 in matrix products), only the policy in bfloat16, all in bfloat16."""
FLAGS = ("--xla_gpu_enable_cublaslt=true", "")
"""Compiler flags to try: with GELU fused into matrix products, and without."""


def amount_of(args: argparse.Namespace) -> Amount:
    """The amount of data given by the flags."""
    return Amount(episodes=args.episodes, rows=args.rows, shard=args.shard)


def data_stage(args: argparse.Namespace) -> None:
    """Make play data."""
    for name in args.domains:
        generate(name, args.run / "data" / name, amount_of(args), args.processes)


def speed_stage(args: argparse.Namespace) -> None:
    """Measure and print updates per second on random data."""
    import qc_train

    state_dim = DOMAINS[args.domains[0]].state
    data = qc_train.random_data(state_dim, args.tasks, args.episodes * (args.rows - 1))
    agent = qc_train.make_agent(state_dim, args.dtype, args.width, args.samples)
    rate = qc_train.speed(agent, data, args.batch, max(1, args.per_program // args.together), args.together)
    setting = {"dtype": args.dtype, "flags": os.environ.get("XLA_FLAGS", ""), "together": args.together}
    print(json.dumps(setting | {"rate": round(rate, 1)}), flush=True)


def train_stage(args: argparse.Namespace) -> None:
    """Train the seeds, `--together` at a time, on all tasks; saves weights to evaluate in the run's folder."""
    import jax
    import jax.numpy as jnp
    import qc_train

    log(f"train: {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}")
    for name in args.domains:
        folder = args.run / "data" / name
        while amount_of(args).missing(folder):
            log(f"train {name}: {len(amount_of(args).missing(folder))} files of data are missing, waiting")
            time.sleep(10)
            if time.time() > args.deadline:
                return
        data = {key: jnp.asarray(value) for key, value in load(name, folder, amount_of(args)).items()}
        solved = " ".join(f"{1 - mask:.4f}" for mask in data["masks"].mean(1))
        log(f"train {name}: {len(data['actions'])} transitions; share in which task 1 to {TASKS} is solved: {solved}")
        agent = qc_train.make_agent(DOMAINS[name].state, args.dtype, args.width, args.samples)
        many = qc_train.make_updates(agent, args.batch)
        schedule = qc_train.Schedule(
            steps=args.steps,
            evaluate_every=args.evaluate_every,
            save_every=args.save_every,
            per_program=args.per_program,
            deadline=args.deadline,
        )
        for i in range(0, len(args.seeds), args.together):
            seeds = args.seeds[i : i + args.together]
            states = qc_train.init_seeds(agent, seeds, TASKS)
            if not qc_train.train_seeds(many, states, data, seeds, run=args.run, name=name, schedule=schedule):
                return


def eval_stage(args: argparse.Namespace) -> None:
    """Evaluate weights that have no result yet; with `--watch`, until training is over."""
    import jax
    import numpy as np
    import qc_eval
    import qc_train

    fleet: Any = None
    while True:
        over = not args.watch or (args.run / "trained").exists()
        found = sorted((args.run / "weights").glob("*[0-9].npz"), key=lambda path: path.stat().st_mtime)
        for path in found:
            name, seed, step = path.stem.rsplit("_", 2)
            state_dim = DOMAINS[name].state
            if fleet is None or fleet.name != name:
                if fleet is not None:
                    fleet.close()
                fleet = qc_eval.Fleet(name, args.processes, args.per_worker)
                agent = qc_train.make_agent(state_dim, args.dtype, args.width, args.samples)
                like, act = jax.eval_shape(lambda agent=agent: qc_train.init(agent, 0, TASKS)), qc_train.make_act(agent)
            params, numbers = qc_train.restore(path, like["params"]), [int(seed), int(step)]
            key = jax.random.fold_in(jax.random.key(int(seed)), int(step))

            def decide(states: Any, tasks: Any, turn: int, params: Any = params, key: Any = key, act: Any = act) -> Any:
                keys = jax.random.split(jax.random.fold_in(key, turn), len(states))
                return np.asarray(act(params, states, keys, tasks))

            solved, seconds = qc_eval.timed(
                fleet, decide, episodes=args.eval_episodes, seed=numbers, state_dim=state_dim
            )
            qc_report.append(args.run / "results.jsonl", name, int(seed), int(step), solved, args.dtype, seconds)
            path.unlink()
        if over and not found:
            break
        time.sleep(0 if found else 2)
    if fleet is not None:
        fleet.close()


def report_stage(args: argparse.Namespace) -> None:
    """Write table and figure of all results into the page."""
    qc_report.report([args.run / "results.jsonl"], args.docs)


def all_stage(args: argparse.Namespace) -> None:
    """Run everything, each stage as a process with a log in the run's folder."""
    begin = time.time()
    args.run.mkdir(parents=True, exist_ok=True)
    (args.run / "trained").unlink(missing_ok=True)
    deadline = begin + 60 * args.minutes
    first, *others = args.domains
    making = _start(args, "data", [first], processes=args.processes)
    chosen: dict[str, Any] = {"dtype": args.dtype, "flags": args.flags, "together": args.together}
    if args.dtype == "auto":
        # Leave time for compiling, saving and evaluating.
        rates = measure(args, making)
        chosen = choose(rates, args.steps * len(args.seeds), 0.85 * (deadline - time.time()))
    making.wait()
    log(f"all: data of {first} after {time.time() - begin:.0f} s; training with {chosen}")
    if others:
        making = _start(args, "data", others, processes=max(1, args.processes - 4))
    options = ["--dtype", chosen["dtype"], "--together", str(chosen["together"])]
    watching = _start(args, "eval", args.domains, [*options, "--watch"], processes=max(1, args.processes - 2))
    _start(args, "train", args.domains, [*options, "--deadline", str(deadline)], flags=chosen["flags"]).wait()
    (args.run / "trained").touch()
    making.terminate()
    if watching.wait() != 0:
        log("all: the evaluation broke off (eval.log), once more")
        _start(args, "eval", args.domains, options, processes=max(1, args.processes - 2)).wait()
    report_stage(args)
    log(f"all: done after {time.time() - begin:.0f} s")


def measure(args: argparse.Namespace, making: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Measure precisions, flags and seeds per program while the data are made; failures are left out."""
    path = args.run / "speed.log"
    path.unlink(missing_ok=True)

    def found() -> list[dict[str, Any]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def try_out(dtype: str, flags: str, together: int) -> None:
        if making.poll() is None:
            options = ["--dtype", dtype, "--together", str(together)]
            _start(args, "speed", args.domains[:1], options, flags=flags).wait()

    # The fastest precision determines flags and seeds per program; the others are only tried with these.
    for flags, together in product(FLAGS, (1, len(args.seeds))):
        try_out(TYPES[-1], flags, together)
    fastest = max(found(), key=lambda row: row["rate"], default={"flags": "", "together": 1})
    for dtype in reversed(TYPES[:-1]):
        try_out(dtype, fastest["flags"], fastest["together"])
    for row in found():
        log(f"all: {row}")
    return found()


def choose(rates: list[dict[str, Any]], updates: int, seconds: float) -> dict[str, Any]:
    """The most exact precision that makes `updates` updates in `seconds`, with its fastest settings; if none does, the
    fastest of all with one seed at a time, so that the first seeds finish.
    """
    best = {row["dtype"]: row for row in sorted(rates, key=lambda row: row["rate"])}
    for dtype in TYPES:
        if dtype in best and best[dtype]["rate"] * seconds >= updates:
            return best[dtype]
    single = [row for row in rates if row["together"] == 1]
    return max(single, key=lambda row: row["rate"], default={"dtype": TYPES[-1], "flags": "", "together": 1})


def _start(
    args: argparse.Namespace,
    stage: str,
    domains: list[str],
    more: list[str] | None = None,
    *,
    processes: int = CORES,
    flags: str = "",
) -> subprocess.Popen[bytes]:
    """Start a stage of this run in a separate process that appends to its log."""
    names = ("episodes", "rows", "shard", "steps", "width", "samples", "batch", "per_program", "evaluate_every")
    names += ("save_every", "eval_episodes", "per_worker")
    command = [sys.executable, __file__, stage, "--run", str(args.run), "--domains", *domains]
    command += [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    command += ["--seeds", *map(str, args.seeds), "--processes", str(processes), *(more or [])]
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(args.run / "programs")}
    if flags:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flags}".strip()
    with (args.run / f"{stage}.log").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)


STAGES = {
    "data": data_stage,
    "speed": speed_stage,
    "train": train_stage,
    "eval": eval_stage,
    "report": report_stage,
    "all": all_stage,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("stage", choices=STAGES)
    add("--run", type=Path, required=True, help="folder of the run: data, states, weights, logs, results.jsonl")
    add("--domains", nargs="+", choices=DOMAINS, default=["puzzle-3x3", "scene"])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    add("--steps", type=int, default=100_000, help="updates of each seed")
    add("--minutes", type=float, default=17.0, help="all: training stops after so many minutes")
    add("--deadline", type=float, default=float("inf"), help="train: stop at this time (seconds since the epoch)")
    add("--dtype", choices=("auto", *TYPES), default="auto", help="auto (all only): as fast as needed")
    add("--flags", default="", help="all: XLA's flags for training, with a --dtype other than auto")
    add("--episodes", type=int, default=1000, help="episodes of play data")
    add("--rows", type=int, default=1001, help="rows of an episode, one more than its transitions")
    add("--shard", type=int, default=5, help="episodes in a file")
    add("--processes", type=int, default=CORES, help="simulating processes")
    add("--per-worker", type=int, default=6, help="eval: environments of a process")
    add("--eval-episodes", type=int, default=50, help="of each task and seed")
    add("--evaluate-every", type=int, default=50_000)
    add("--save-every", type=int, default=25_000)
    add("--per-program", type=int, default=1000, help="updates in one program")
    add("--batch", type=int, default=256)
    add("--width", type=int, default=512)
    add("--samples", type=int, default=32, help="N: candidates")
    add("--tasks", type=int, default=TASKS, help="speed: critics that share a policy")
    add("--together", type=int, default=1, help="seeds in one program")
    add("--watch", action="store_true", help="eval: wait for weights until training is over")
    add("--docs", type=Path, default=qc_report.DOCS, help="report: folder of the page")
    args = parser.parse_args(argv)
    args.run = args.run.absolute()
    if args.stage != "all" and args.dtype == "auto":
        args.dtype = "float32"
    return args


if __name__ == "__main__":
    arguments = parse()
    STAGES[arguments.stage](arguments)
