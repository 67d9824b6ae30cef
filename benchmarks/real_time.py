"""Success and smoothness with and without real-time chunking, at injected latency, on the simulated tabletop.

    python benchmarks/real_time.py checkpoints/bc_tabletop/first --episodes 200

The robot never waits: it asks for the next chunk after `--execute` steps of its chunk, goes on with the rest while the
server plans, and takes the new chunk up where the world is by then. Time is counted in control steps (`--hz` of them a
second), so the numbers do not depend on this machine. Both ways meet the same initial states and the same noise.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pirl.envs.config import TabletopConfig
from pirl.envs.make import make_env
from pirl.records import Context
from pirl.rollout.evaluate import Rate
from pirl.serve.planner import Planner
from pirl.training.acting import open_checkpoint

MOVES = slice(0, 2)
"""Of the tabletop's action; the third number is the gripper."""


class Row(NamedTuple):
    """One latency, one way."""

    latency_ms: int
    steps: int
    real_time: bool
    success: Rate
    jump: float
    """Mean distance between a new chunk's first move and what the old one had planned for then; both are at most √2."""
    change: float
    """Mean distance between successive moves."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="a run or step of a policy for the tabletop")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--execute", type=int, default=1, help="steps of a chunk before the next is asked for")
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 100, 200, 300], metavar="MS")
    parser.add_argument("--hz", type=float, default=10.0, help="control steps per second")
    parser.add_argument("--out", type=Path, help="JSON file with the table")
    args = parser.parse_args()
    planner = Planner(open_checkpoint(args.checkpoint), real_time=True).compile()
    rows = list(table(planner, args))
    print("| latency | steps late | real-time chunking | success (95 %) | jump to a new chunk | change per step |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        low, high = row.success.interval
        rate = f"{row.success.value:.2f} ({low:.2f}–{high:.2f})"
        way = "with" if row.real_time else "without"
        print(f"| {row.latency_ms} ms | {row.steps} | {way} | {rate} | {row.jump:.3f} | {row.change:.3f} |")
    if args.out is not None:
        args.out.write_text(
            json.dumps([row._asdict() | {"success": asdict(row.success)} for row in rows], indent=2) + "\n"
        )
    return 0


def table(planner: Planner, args: argparse.Namespace) -> Iterator[Row]:
    horizon = planner.config.horizon
    for latency in args.latencies:
        late = math.ceil(latency / 1000 * args.hz)
        if args.execute + 2 * late >= horizon:
            raise SystemExit(f"{latency} ms are {late} steps: a chunk of {horizon} runs out before the next is there")
        for real_time in (False, True):
            wins, jumps, changes = [], [], []
            for number in range(args.episodes):
                success, moves, jumped = episode(planner, number, args.execute, late, real_time=real_time)
                wins.append(success)
                changes.extend(np.linalg.norm(np.diff(moves, axis=0), axis=1))
                jumps.extend(jumped)
            rate = Rate(successes=sum(wins), trials=len(wins))
            yield Row(latency, late, real_time, rate, float(np.mean(jumps)), float(np.mean(changes)))


def episode(
    planner: Planner, number: int, execute: int, late: int, *, real_time: bool
) -> tuple[bool, Any, list[float]]:
    """Whether it succeeded, its moves, and how far each new chunk began from where the old one would have gone on."""
    env = make_env(TabletopConfig())
    env.begin(Context(env.tasks[number % len(env.tasks)], number))
    chunk, at = plan(planner, env.observe(), (number, 0), None, 0), 0
    ask, coming, moves, jumps = execute, None, [], []
    for step in range(env.max_steps):
        if at >= ask and coming is None:
            rest = chunk[at:] if real_time else None
            coming = step, plan(planner, env.observe(), (number, step + 1), rest, late)
        if coming is not None and step - coming[0] >= late:
            (asked, new), coming = coming, None
            jumps.append(float(np.linalg.norm(move(new[step - asked]) - move(chunk[at]))))
            chunk, at, ask = new, step - asked, step - asked + execute
        action, at = chunk[at], at + 1
        outcome = env.act(env.check_action(np.asarray(action, np.float32)[: env.action_dim]))
        moves.append(move(action))
        if outcome.success or outcome.terminated or outcome.truncated:
            break
    return bool(outcome.success), np.array(moves), jumps


def move(action: Any) -> Any:
    """As the table clips it."""
    return np.clip(action[MOVES], -1, 1)


def plan(planner: Planner, seen: Any, number: tuple[int, int], rest: Any, late: int) -> Any:
    row = planner.row(seen, number=number, before=rest, delay=late)
    (planned,) = planner.plan([row])
    if isinstance(planned, Exception):
        raise planned
    return planned.chunk


if __name__ == "__main__":
    raise SystemExit(main())
