"""Compare two checkpoints: the same initial states, a paired test, and a report page about the run.

    python examples/06_ript.py && python examples/09_compare_checkpoints.py
    python examples/09_compare_checkpoints.py checkpoints/bc_tabletop/first checkpoints/acrlpd_tabletop/first

The first line compares the first and the last checkpoint of example 06. `pirl eval SECOND --compare FIRST` does the
same and keeps the result; `pirl report` makes the same page.
"""

import argparse
from pathlib import Path

import pirl

RUN = Path("example_runs/checkpoints/ript_reach/first")
parser = argparse.ArgumentParser()
parser.add_argument("first", nargs="?", type=Path, default=RUN / "1", help="a step's folder, or a run's (its latest)")
parser.add_argument("second", nargs="?", type=Path, default=RUN)
parser.add_argument("--episodes", type=int, default=200)
parser.add_argument("--report", type=Path, default=Path("example_runs/report.html"))
args = parser.parse_args()

checkpoints = [pirl.open_checkpoint(path) for path in (args.first, args.second)]  # they know model, robot and simulator
with pirl.build_pool(checkpoints[0].found.config) as pool:
    contexts = pirl.fixed_contexts(pool.info, args.episodes, "test")  # test: for results; validation: for choosing
    first, second = (pirl.evaluate(pool, one.use(seed=0), contexts) for one in checkpoints)

for one, result in zip(checkpoints, (first, second), strict=True):
    print(f"{one.found.folder}: success {result.success} (Wilson, 95 %)")
    for task, rate in result.by_task.items():
        print(f"    {task}: {rate}")

# A difference may be significant although intervals overlap: the paired test uses the states where the two differ.
pairs = pirl.compare(first, second)
print(f"only the first succeeds {pairs.only_first} times, only the second {pairs.only_second} times, ", end="")
print(f"both {pairs.both}, neither {pairs.neither}: difference {pairs.difference:+.3f}, p = {pairs.p_value:.2g}")

runs = dict.fromkeys(one.found.run for one in checkpoints if one.found.run is not None)
print("report:", pirl.write_report(list(runs), args.report))
