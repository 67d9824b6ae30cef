"""gym-aloha: imitation, filters, offline RL and rollouts, from the same imperfect demonstrations.

    PYTHONPATH=src python benchmarks/results/aloha.py state --run runs/aloha --seeds 0 1 2        one CPU core
    PYTHONPATH=src python benchmarks/results/aloha.py pictures --run runs/aloha --seeds 0 1 2     GPU, 16 cores: hours
    PYTHONPATH=src python benchmarks/results/aloha.py state --run runs/aloha --minutes 9          for a while
    PYTHONPATH=src python benchmarks/results/aloha.py state --run runs/aloha --report             fill the page

Records, computes statistics, trains and evaluates; finished stages are skipped. The page is docs/results/aloha.md, with
every evaluation in aloha.jsonl beside it. Needs the extra `aloha`. `pictures` trains a π₀ of ten million parameters
from scratch, which takes a GPU; `state` trains an MLP on joints and the cube's pose.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from ladder import DOCS, Ladder, Row, Task, rows_from_state, say, write

DIALS = ("--dials", "grasp_error=0.006", "waypoint_noise=0.01", "action_noise=0.005")
TRANSFER = Task(
    name="aloha_transfer",
    record=("bc_aloha_transfer_small", *DIALS, "time_scale=0.7", "miss=0.35", "let_go=0.35"),
    robot="aloha_sim",
    horizon=20,
    rows=(
        Row("bc", "BC", "bc_aloha_transfer_small"),
        Row(
            "bc_more",
            "BC, continued for as many updates as RL",
            "acrlpd_aloha_transfer_small",
            "bc",
            ("--agent.actor", "best_of_n"),
        ),
        Row(
            "successes",
            "BC, then successes only",
            "bc_aloha_transfer_small",
            "bc",
            (
                "--data.successes-only",
                "--freeze",
                "vlm_frozen",
                "--pi0-lr",
                "3e-4",
                "--policy-schedule.decay-steps",
                "3000",
                "--max-steps",
                "3000",
            ),
        ),
        Row("filtered", "BC, then the best 30 % by discounted return", "filtered_aloha_transfer_small", "bc"),
        Row("acrlpd", "**ACRLPD, offline**", "acrlpd_aloha_transfer_small", "bc"),
        Row(
            "acrlpd_best",
            "– best of 8 by its critic",
            "acrlpd_aloha_transfer_small",
            of="acrlpd",
            acting=("--best-of", "8"),
        ),
        Row(
            "bc_best",
            "BC, continued, best of 8 by its critic",
            "acrlpd_aloha_transfer_small",
            of="bc_more",
            acting=("--best-of", "8"),
        ),
        Row("recap", "RECAP, offline", "recap_aloha_transfer_small", "bc"),
        Row("dsrl", "DSRL, offline", "dsrl_aloha_transfer_small", "bc"),
        Row("ript", "BC, then RIPT", "ript_aloha_transfer_small", "bc"),
        Row("acrlpd_ript", "ACRLPD, then RIPT", "ript_aloha_transfer_small", "acrlpd"),
    ),
)


def state_rows() -> tuple[Row, ...]:
    """The rows for joints and the cube's pose; all offline rows after BC make the same number of updates."""
    ript = "ript_aloha_transfer_state"
    return (
        *rows_from_state("aloha_transfer_state", "30 %"),
        Row("dsrl", "DSRL, offline", "dsrl_aloha_transfer_state", "bc", ("--max-steps", "1000")),
        Row("ript", "**BC, then RIPT**", ript, "bc"),
        Row(
            "filtered_ript",
            "**BC, then the best 30 %, then RIPT**",
            ript,
            "filtered",
            ("--policy-schedule.decay-steps", "1500"),
        ),
        Row("acrlpd_ript", "**ACRLPD, then RIPT**", ript, "acrlpd"),
    )


STATE = Task(
    name="aloha_transfer_state",
    record=(
        *("bc_aloha_transfer_state", "--dials", "time_scale=0.5", "action_noise=0.02"),
        *("miss=0.3", "let_go=0.3", "retry=0.2"),
    ),
    robot="aloha_sim_full",
    horizon=10,
    rows=state_rows(),
)
TASKS = {"state": STATE, "pictures": TRANSFER}
TITLES = {STATE.name: "TransferCube from state", TRANSFER.name: "TransferCube from pictures"}


def main() -> int:
    """Run the ladder, or write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("task", choices=list(TASKS))
    add("--run", type=Path, required=True, help="folder of data, runs, evaluations, logs and results.jsonl")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--demos", type=int, default=300)
    add("--episodes", type=int, default=200, help="test episodes of each row")
    add("--share", type=float, default=1.0, help="of each recipe's steps")
    add("--rows", nargs="+", metavar="NAME", help="only these rows; name those that they start from as well")
    add("--films", type=int, default=2, help="successes and failures to film of each row, from pictures")
    add("--processes", type=int, default=os.cpu_count() or 1, help="processes that record")
    add("--jobs", type=int, default=3, help="rows at a time")
    add("--minutes", type=float, default=float("inf"))
    add("--report", action="store_true", help="only write the page")
    args, extra = parser.parse_known_args()
    if args.report:
        rows = {task.name: task.rows for task in TASKS.values()}
        write(DOCS / "aloha.md", DOCS / "aloha.jsonl", args.run / "results.jsonl", rows, TITLES)
        return 0
    args.run.mkdir(parents=True, exist_ok=True)
    done, deadline = True, time.time() + 60 * args.minutes
    task = TASKS[args.task]
    task = replace(task, rows=tuple(row for row in task.rows if args.rows is None or row.name in args.rows))
    for seed in args.seeds:
        ladder = Ladder(
            task=task,
            run=args.run.absolute(),
            seed=seed,
            demos=args.demos,
            episodes=args.episodes,
            share=args.share,
            films=0 if args.task == "state" else args.films,
            processes=args.processes,
            deadline=deadline,
            extra=tuple(extra),
        )
        done &= ladder.climb(args.jobs)
    say("done" if done else "not complete: the same command goes on")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
