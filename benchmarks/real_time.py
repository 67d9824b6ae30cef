"""Success and smoothness with and without real-time chunking, at injected latency, on the simulated tabletop.

    python benchmarks/real_time.py checkpoints/bc_tabletop/first --episodes 200 --trained checkpoints/bc_tabletop/late

Ways to bridge the latency:

    waits      executes half a chunk, then stands still until the next one arrives, like a stock client
    takes up   requests a chunk after `--execute` steps, continues with the old one, and joins the new one at its
               current step
    guided     the same with real-time chunking by guidance
    trained    the same with the checkpoint of `--trained`, trained to continue given steps; "not told": the same
               weights without given steps

Time is counted in control steps (`--hz` per second), so the numbers do not depend on the machine. All ways have the
same initial states and the same noise.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
"""The movement in the tabletop's action; the third element is the gripper."""


class Row(NamedTuple):
    """Results of one latency and way."""

    latency_ms: int
    steps: int
    way: str
    success: Rate
    jump: float
    """Mean distance between a new chunk's first move and the old chunk's move for that step; each is at most √2."""
    change: float
    """Mean distance between successive moves."""
    length: float
    """Mean control steps of successful episodes."""
    jerk: float
    """Mean third difference of the gripper's path, in full moves."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="a run or step of a policy for the tabletop")
    parser.add_argument("--trained", help="a policy trained with agent.real_time_delay")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--execute", type=int, default=1, help="steps of a chunk before the next is asked for")
    parser.add_argument("--max-steps", type=int, help="control steps of an episode (default: the level's)")
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 100, 200, 300], metavar="MS")
    parser.add_argument("--hz", type=float, default=10.0, help="control steps per second")
    parser.add_argument("--out", type=Path, help="JSON file with the table")
    args = parser.parse_args()
    planner = Planner(open_checkpoint(args.checkpoint), real_time=True).compile()
    ways: dict[str, tuple[Planner, bool]] = {"waits": (planner, False), "takes up": (planner, False)}
    ways["guided"] = (planner, True)
    if args.trained:
        late = Planner(open_checkpoint(args.trained), real_time=True).compile()
        ways |= {"trained": (late, True), "trained, not told": (late, False)}
    print("| latency | way | success (95 %) | steps to success | jump to a new chunk | change per step | jerk |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for row in table(ways, args):
        rows.append(row)
        low, high = row.success.interval
        rate = f"{row.success.value:.2f} ({low:.2f}–{high:.2f})"
        measured = f"{row.length:.1f} | {row.jump:.3f} | {row.change:.3f} | {row.jerk:.3f}"
        print(f"| {row.latency_ms} ms | {row.way} | {rate} | {measured} |", flush=True)
    if args.out is not None:
        args.out.write_text(
            json.dumps([row._asdict() | {"success": asdict(row.success)} for row in rows], indent=2) + "\n"
        )
    return 0


def table(ways: Mapping[str, tuple[Planner, bool]], args: argparse.Namespace) -> Iterator[Row]:
    for latency in args.latencies:
        late = math.ceil(latency / 1000 * args.hz)
        for way, (planner, real_time) in ways.items():
            horizon = planner.config.horizon
            if args.execute + 2 * late >= horizon:
                raise SystemExit(
                    f"{latency} ms are {late} steps: a chunk of {horizon} runs out before the next is there"
                )
            done = [
                waiting(planner, number, horizon // 2, late, args.max_steps)
                if way == "waits"
                else episode(planner, number, args.execute, late, args.max_steps, real_time=real_time)
                for number in range(args.episodes)
            ]
            wins, moves, jumps = zip(*done, strict=True)
            yield Row(
                latency_ms=latency,
                steps=late,
                way=way,
                length=float(
                    np.mean([float(len(path)) for won, path in zip(wins, moves, strict=True) if won] or [math.nan])
                ),
                success=Rate(successes=sum(wins), trials=len(wins)),
                jump=float(np.mean([jump for each in jumps for jump in each])),
                change=differences(moves, 1),
                jerk=differences(moves, 2),
            )


def differences(moves: Sequence[Any], order: int) -> float:
    """Mean norm of the moves' differences of this order; moves are themselves first differences of the path."""
    return float(np.mean(np.concatenate([np.linalg.norm(np.diff(one, n=order, axis=0), axis=1) for one in moves])))


def waiting(planner: Planner, number: int, execute: int, late: int, limit: int | None) -> tuple[bool, Any, list[float]]:
    """Like `episode`, for a robot that stands still for `late` steps between two chunks."""
    env = make_env(TabletopConfig(max_steps=limit))
    env.begin(Context(env.tasks[number % len(env.tasks)], number))
    chunk: Any = None
    moves: list[Any] = []
    jumps: list[float] = []
    grip, step = -1.0, 0
    while True:
        before, chunk = chunk, plan(planner, env.observe(), (number, step), None, 0)
        if before is not None and late == 0:
            jumps.append(float(np.linalg.norm(move(chunk[0]) - move(before[execute]))))
        elif before is not None:
            jumps.append(float(np.linalg.norm(move(chunk[0]))))
        still = np.tile([0.0, 0.0, grip], (0 if before is None else late, 1))
        for action in [*still, *chunk[:execute]]:
            outcome = env.act(env.check_action(np.asarray(action, np.float32)[: env.action_dim]))
            moves.append(move(action))
            grip, step = float(action[2]), step + 1
            if outcome.success or outcome.terminated or outcome.truncated:
                return bool(outcome.success), np.array(moves), jumps


def episode(
    planner: Planner, number: int, execute: int, late: int, limit: int | None, *, real_time: bool
) -> tuple[bool, Any, list[float]]:
    """(success, moves, distance of each new chunk's first move from the old chunk's move for that step)."""
    env = make_env(TabletopConfig(max_steps=limit))
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
    """The action's movement, clipped as by the tabletop."""
    return np.clip(action[MOVES], -1, 1)


def plan(planner: Planner, seen: Any, number: tuple[int, int], rest: Any, late: int) -> Any:
    row = planner.row(seen, number=number, before=rest, delay=late)
    (planned,) = planner.plan([row])
    if isinstance(planned, Exception):
        raise planned
    return planned.chunk


if __name__ == "__main__":
    raise SystemExit(main())
