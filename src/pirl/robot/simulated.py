"""A simulated robot in a separate process that speaks only OpenPI's protocol.

    python -m pirl.robot.simulated --server ws://127.0.0.1:8000 --episodes 20 --record recordings/first

It stands for a robot's own control loop: observe, ask for actions, execute, record every step. `--supervise SHARE` lets
a scripted supervisor watch that share of the episodes. It takes over when the block moves away from its zone, as a
person with a leader arm would, and the recording marks its steps. `--outcomes random` is a control: a coin decides;
`none` records none.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from pirl.envs.config import AlohaConfig, EnvConfig, TabletopConfig
from pirl.envs.env import Outcome, RobotEnv
from pirl.envs.make import make_env
from pirl.envs.tabletop import SPEED, TabletopEnv
from pirl.errors import EnvError, PirlError
from pirl.names import ACTIONS
from pirl.records import Context
from pirl.robot.broker import ChunkBroker
from pirl.robot.client import PolicyClient
from pirl.robot.keys import INTERVENTION, POLICY
from pirl.robot.recorder import Recorder
from pirl.robot.takeover import Takeover

_ENVS: dict[str, EnvConfig] = {"tabletop": TabletopConfig(), "aloha": AlohaConfig()}
_CLOSE, _OPEN = 1.0, -1.0
_ARRIVED = 0.03
OUTCOMES = ("true", "random", "none")
PATIENCE = 2
"""Consecutive steps of carrying a block away from its zone before the supervisor takes over."""


class Supervisor:
    """Watches one table; takes over for the rest of the episode when the block is carried the wrong way."""

    def __init__(self, env: TabletopEnv) -> None:
        self._state = env.table.state
        self.begin(watching=False)

    def begin(self, *, watching: bool) -> None:
        """Begin an episode, watched or not."""
        self._watching, self._acting = watching, False
        self._nearest, self._away = np.inf, 0

    def __call__(self, observation: Any) -> Float32[np.ndarray, "3"] | None:
        """The supervisor's action, or None while the policy acts."""
        state = self._state
        offset = state.zones[0, state.zone[0]] - state.gripper[0]
        distance = float(np.linalg.norm(offset))
        if not self._watching or state.held[0] < 0:
            return None
        self._away = self._away + 1 if distance > self._nearest else 0
        self._nearest = min(self._nearest, distance)
        self._acting = self._acting or self._away >= PATIENCE
        if not self._acting:
            return None
        there = distance < _ARRIVED
        move = np.zeros(2) if there else offset / max(distance, SPEED)
        return np.array([*move, _OPEN if there else _CLOSE], np.float32)


def run_episode(env: RobotEnv, policy: Takeover, context: Context, recorder: Recorder | None, *, hz: float) -> Outcome:
    """Run one episode; returns its last outcome."""
    env.begin(context)
    policy.reset()
    if recorder is not None:
        recorder.start(task=context.task)
    due = time.monotonic()
    for _ in range(env.max_steps):
        observation = env.observe()
        reply = policy.infer(observation)
        action = np.asarray(reply[ACTIONS], np.float32)[: env.action_dim]
        outcome = env.act(env.check_action(action))
        if recorder is not None:
            recorder.step(
                observation,
                action,
                intended=policy.intended,
                intervention=reply[INTERVENTION],
                policy=str(reply.get(POLICY, "")),
            )
        if hz:
            due += 1 / hz
            time.sleep(max(0.0, due - time.monotonic()))
        if outcome.terminated or outcome.truncated or outcome.success:
            break
    return outcome


def contexts(env: RobotEnv, numbers: Sequence[int]) -> list[Context]:
    """One context per number: tasks in turn, the number as initial state."""
    return [
        Context(env.tasks[number % len(env.tasks)], number if env.num_inits is None else number % env.num_inits)
        for number in numbers
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="address of the policy server, ws://HOST:PORT")
    parser.add_argument("--api-key", default=os.environ.get("PIRL_API_KEY"), help="its key (default: PIRL_API_KEY)")
    parser.add_argument("--env", choices=_ENVS, default="tabletop", help="what is simulated")
    parser.add_argument("--episodes", type=int, default=1, help="how many to run")
    parser.add_argument("--inits", help="initial states, as numbers with commas (default 0, 1, ...)")
    parser.add_argument("--record", type=Path, help="dataset to write")
    parser.add_argument("--execute", type=int, help="steps of a chunk before the next (default: the server's)")
    parser.add_argument("--prefetch", action="store_true", help="ask for the next chunk early")
    parser.add_argument("--supervise", type=float, default=0.0, help="share of episodes with a supervisor")
    parser.add_argument("--purpose", choices=("collect", "compare"), default="collect", help="compare: no supervisor")
    parser.add_argument("--outcomes", choices=OUTCOMES, default="true", help="what is recorded as success")
    parser.add_argument("--hz", type=float, default=0.0, help="control steps per second (0: as fast as it goes)")
    parser.add_argument("--seed", type=int, default=0, help="seed of supervision and of random outcomes")
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except PirlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    env = make_env(_ENVS[args.env])
    numbers = [int(word) for word in args.inits.split(",")] if args.inits else list(range(args.episodes))
    if args.supervise and not isinstance(env, TabletopEnv):
        raise EnvError(f"no scripted supervisor for {args.env}", hint="leave out --supervise")
    supervisor = Supervisor(env) if isinstance(env, TabletopEnv) else None
    solved = 0
    with PolicyClient(args.server, api_key=args.api_key, session=f"sim{args.seed}.{numbers[0]}") as client:
        told = client.get_server_metadata()
        execute, horizon = args.execute or int(told["pirl/execute"]), told.get("pirl/horizon")
        broker = ChunkBroker(client, execute, prefetch=args.prefetch)
        policy = Takeover(broker, (lambda _: None) if supervisor is None else supervisor)
        recorder = None
        if args.record is not None:
            told_by = {"outcomes": args.outcomes != "none"}
            recorder = Recorder(args.record, fps=env.fps, robot_type=env.robot, horizon=horizon, **told_by)
        try:
            for context, number in zip(contexts(env, numbers), numbers, strict=True):
                rng = np.random.default_rng((args.seed, number, 0 if recorder is None else 1))
                if supervisor is not None:
                    supervisor.begin(watching=bool(rng.random() < args.supervise) and args.purpose == "collect")
                outcome = run_episode(env, policy, context, recorder, hz=args.hz)
                solved += outcome.success
                if recorder is not None:
                    said = {"random": bool(rng.random() < 0.5), "none": None}.get(args.outcomes, outcome.success)
                    recorder.end(said, truncated=outcome.truncated)
        finally:
            if recorder is not None:
                recorder.close()
    print(f"{solved} of {len(numbers)} episodes succeeded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
