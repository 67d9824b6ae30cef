"""Meta-World's MT10: imitation, filters, offline RL and rollouts, ten tasks in one policy.

    PYTHONPATH=src python benchmarks/results/metaworld_mt10.py state --run runs/metaworld --seeds 0 1 2   two CPU cores
    PYTHONPATH=src python benchmarks/results/metaworld_mt10.py pictures --run runs/metaworld --seeds 0 1   GPU, 16 cores
    PYTHONPATH=src python benchmarks/results/metaworld_mt10.py state --run runs/metaworld --minutes 9     for a while
    PYTHONPATH=src python benchmarks/results/metaworld_mt10.py state --run runs/metaworld --report         fill the page

Records, computes statistics, trains and evaluates; finished stages are skipped. The page is docs/results/metaworld.md,
with every evaluation in metaworld.jsonl beside it. Needs the extra `metaworld`. `pictures` trains a π₀ with language,
which takes a GPU; `state` trains an MLP on Meta-World's observations. (A file named `metaworld.py` would shadow the
simulator's package.)
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder import DOCS, Ladder, Row, Task, read, rows_from_state, say, write

from pirl.envs.metaworld_tasks import INSTRUCTIONS, MT10
from pirl.rollout.evaluate import Rate

PAGE, RAW = DOCS / "metaworld.md", DOCS / "metaworld.jsonl"
TASKS_BEGIN, TASKS_END = "<!-- tasks: begin -->", "<!-- tasks: end -->"
DIALS = ("--dials", "wrong=0.5", "detour=0.25", "action_noise=0.1")
_STEPS = "4000"
SUCCESSES = (
    *("--data.successes-only", "--freeze", "vlm_frozen", "--max-steps", _STEPS),
    *("--pi0-lr", "3e-4", "--policy-schedule.decay-steps", _STEPS),
)
"""Imitation of successes, with the learning rate and steps of the algorithms it is compared with."""
CURVE = ("--evaluation.episodes", "50")
"""Success on validation states against environment steps, in the run's metrics."""
ACRLPD = "acrlpd_metaworld_mt10"
MT10_TASK = Task(
    name="metaworld_mt10",
    demos=1000,
    record=("bc_metaworld_mt10", *DIALS, "--env.max-steps", "200"),
    robot="metaworld",
    horizon=10,
    rows=(
        Row("bc", "BC", "bc_metaworld_mt10"),
        Row("bc_more", "BC, continued for as many updates as RL", ACRLPD, "bc", ("--agent.actor", "best_of_n")),
        Row("successes", "BC, then successes only", "bc_metaworld_mt10", "bc", SUCCESSES),
        Row("filtered", "BC, then the best quarter by discounted return", "filtered_metaworld_mt10", "bc"),
        Row("acrlpd", "**ACRLPD, offline**", ACRLPD, "bc"),
        Row("acrlpd_best", "– best of 8 by its critic", ACRLPD, of="acrlpd", acting=("--best-of", "8")),
        Row("recap", "RECAP, offline", "recap_metaworld_mt10", "bc"),
        Row("dsrl", "DSRL, offline", "dsrl_metaworld_mt10", "bc"),
        Row("ript", "BC, then RIPT", "ript_metaworld_mt10", "bc"),
        Row("acrlpd_ript", "**ACRLPD, then RIPT**", "ript_metaworld_mt10", "acrlpd"),
    ),
)


def state_rows() -> tuple[Row, ...]:
    """The rows for Meta-World's observations; all rows after BC make the same number of updates."""
    rl, ript = "acrlpd_metaworld_mt10_state", "ript_metaworld_mt10_state"
    return (
        *rows_from_state("metaworld_mt10_state", "15 %"),
        Row("recap", "RECAP, offline", "recap_metaworld_mt10_state", "bc"),
        Row("dsrl", "DSRL, offline", "dsrl_metaworld_mt10_state", "bc"),
        Row("successes_acrlpd", "**successes only, then ACRLPD, offline**", rl, "successes"),
        Row("successes_acrlpd_best", "– best of 8 by its critic", rl, of="successes_acrlpd", acting=("--best-of", "8")),
        Row("successes_dsrl", "successes only, then DSRL, offline", "dsrl_metaworld_mt10_state", "successes"),
        Row("ript", "BC, then RIPT (iterations)", ript, "bc", CURVE),
        Row("successes_ript", "**successes only, then RIPT** (iterations)", ript, "successes", CURVE),
    )


STATE_TASK = Task(
    name="metaworld_mt10_state",
    demos=400,
    record=("bc_metaworld_mt10_state", *DIALS, "--env.max-steps", "200"),
    robot="metaworld_mt10",
    horizon=10,
    rows=state_rows(),
    given=("--evaluation.episodes", "10"),  # rows are evaluated on the test states
)
TASKS = {"state": STATE_TASK, "pictures": MT10_TASK}
TITLES = {STATE_TASK.name: "MT10 from the simulator's state", MT10_TASK.name: "MT10 from pictures and language"}


def by_task(results: Sequence[dict[str, Any]], rows: Sequence[Row]) -> str:
    """Each row's success per task, pooled over seeds, with Wilson's 95 % interval."""
    found: dict[tuple[str, str], list[dict[str, int]]] = defaultdict(list)
    for result in results:
        for task, rate in (result["tasks"] or {}).items():
            found[result["method"], task].append(rate)
    done = [row for row in rows if any(method == row.name for method, _ in found)]
    lines = [["task", *(row.title for row in done)], ["---"] * (len(done) + 1)]
    for name in MT10:
        cells = [found[row.name, INSTRUCTIONS[name]] for row in done]
        lines.append([name, *(_percent(rates) for rates in cells)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if done else ""


def _percent(rates: list[dict[str, int]]) -> str:
    rate = Rate(successes=sum(r["successes"] for r in rates), trials=sum(r["trials"] for r in rates))
    low, high = rate.interval
    return f"{100 * rate.value:.0f} [{100 * low:.0f}, {100 * high:.0f}]" if rate.trials else "–"


def report(run: Path) -> None:
    """Write all tables, from all results so far, into the page."""
    write(PAGE, RAW, run / "results.jsonl", {task.name: task.rows for task in TASKS.values()}, TITLES)
    text, results = PAGE.read_text(), read([RAW])
    parts = []
    for task in TASKS.values():
        if tasks := by_task([one for one in results if one["task"] == task.name], task.rows):
            parts.append(f"{TITLES[task.name]}:\n\n{tasks}")
    if parts:
        before, after = text[: text.index(TASKS_BEGIN) + len(TASKS_BEGIN)], text[text.index(TASKS_END) :]
        PAGE.write_text(f"{before}\n" + "\n".join(parts) + after)


def main() -> int:
    """Run the ladder, or write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("task", choices=list(TASKS))
    add("--run", type=Path, required=True, help="folder of data, runs, evaluations, logs and results.jsonl")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--demos", type=int, help="demonstrations, a tenth of each task")
    add("--episodes", type=int, default=500, help="test episodes of each row")
    add("--share", type=float, default=1.0, help="of each recipe's steps")
    add("--rows", nargs="+", metavar="NAME", help="only these rows; name those that they start from as well")
    add("--jobs", type=int, default=2, help="rows at a time")
    add("--films", type=int, default=0, help="successes and failures to film of each row, from pictures")
    add("--processes", type=int, default=os.cpu_count() or 1, help="processes that record")
    add("--minutes", type=float, default=float("inf"))
    add("--report", action="store_true", help="only write the page")
    args, extra = parser.parse_known_args()
    if args.report:
        report(args.run)
        return 0
    args.run.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + 60 * args.minutes
    task = TASKS[args.task]
    demos = args.demos or task.demos
    task = replace(task, rows=tuple(row for row in task.rows if args.rows is None or row.name in args.rows))
    given = dict(run=args.run.absolute(), demos=demos, episodes=args.episodes, share=args.share)
    given |= dict(films=args.films, processes=args.processes)
    done = True
    for seed in args.seeds:
        done &= Ladder(task=task, seed=seed, deadline=deadline, extra=tuple(extra), **given).climb(args.jobs)
    say("done" if done else "not complete: the same command goes on")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
