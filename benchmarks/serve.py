"""Latency of `pirl serve` over loopback: one robot, best-of-N, real-time chunking, and a fleet.

    python benchmarks/serve.py --preset none                                 what all but the model costs
    python benchmarks/serve.py --preset pi0_tiny                             small, on a CPU
    python benchmarks/serve.py --preset pi0 --robots 16 --hz 2 --best-of 8   full-size, on a GPU

The server runs in this process, with random weights and three cameras of 224 px; robots are threads of another process
with pirl's client. A single robot sends its next request as soon as it has a reply. A fleet sends at a fixed rate, with
staggered phases; a robot whose reply is late skips its turn. Times are from sending a request to having read the reply,
without the first five. With `--preset none` every plan is a stored answer of 50 actions, without a model.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

PUBLISHED = (
    ("OpenPI, JAX, π₀, H200 (model alone)", 35.6),
    ("SGLang #34256, π₀.₅, H200 (over HTTP)", 47.7),
    ("vLLM-Omni #6524, π₀.₅, RTX PRO 5000 (end to end)", 45.6),
)
"""Others' published figures in ms, with 3 cameras and ten flow steps, on their machines."""
LEFT_OUT = 5
NONE = "none"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", default="pi0", help="model preset (default pi0)")
    add("--requests", type=int, default=100, help="requests of one robot (default 100)")
    add("--best-of", type=int, default=8, help="candidates of the second row (default 8; 1: leave it out)")
    add("--robots", type=int, default=16, help="robots of the fleet (default 16)")
    add("--hz", type=float, default=2.0, help="requests per second of each (default 2)")
    add("--seconds", type=float, default=20.0, help="length of the fleet's row (default 20)")
    add("--max-batch", type=int, default=8, help="the fleet's largest batch (default 8)")
    add("--no-real-time", action="store_true", help="leave out real-time chunking")
    add("--robot-process", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.robot_process:
        print(json.dumps(robots(**json.loads(args.robot_process))))
        return 0
    import jax

    device = jax.devices()[0]
    print(f"{args.preset}, {device.device_kind}, jax {jax.__version__}, compiling...", flush=True)
    print(f"\n| what | p50 ms | p99 ms | of it the model, p50 | requests | compiled in |\n|{'---|' * 6}")
    one = {"robots": 1, "hz": None, "requests": args.requests}
    row("one robot", args, one)
    if args.preset == NONE:
        return 0
    if args.best_of > 1:
        row(f"one robot, best of {args.best_of}", args, one, best_of=args.best_of)
    if not args.no_real_time:
        row("one robot, real-time chunking", args, one | {"continues": True}, real_time=True)
    fleet = {"robots": args.robots, "hz": args.hz, "seconds": args.seconds}
    row(f"{args.robots} robots at {args.hz:g} Hz", args, fleet, max_batch=args.max_batch)
    for name, milliseconds in PUBLISHED if args.preset in ("pi0", "pi05") else ():
        print(f"| published: {name} | {milliseconds:.1f} | | | | |")
    return 0


def row(
    name: str, args: argparse.Namespace, load: dict[str, Any], *, best_of: int = 1, real_time: bool = False,
    max_batch: int = 1,
) -> None:  # fmt: skip
    """One line of the table."""
    begin = time.perf_counter()
    with serving(args.preset, best_of=best_of, real_time=real_time, max_batch=max_batch) as server:
        compiled = time.perf_counter() - begin
        asked = json.dumps({"port": server.port} | load)
        command = [sys.executable, str(Path(__file__).resolve()), "--robot-process", asked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout)
        times, model = (1e3 * np.array(found["times"]), server.metrics.percentiles()["plan"][0])
        half, most = np.quantile(times, [0.5, 0.99])
        more = f", {found['skipped']} skipped" if found["skipped"] else ""
        print(f"| {name} | {half:.1f} | {most:.1f} | {1e3 * model:.1f} | {len(times)}{more} | {compiled:.0f} s |")
        if args.preset == NONE:
            print(server.metrics.table())
        sys.stdout.flush()


@contextmanager
def serving(preset: str, *, best_of: int, real_time: bool, max_batch: int) -> Iterator[Any]:
    """Run a server with random weights in a thread of this process."""
    import jax

    from pirl.agents.acrlpd import ACRLPD
    from pirl.agents.agent import Choice, TrainState
    from pirl.build import build_agent
    from pirl.models.config import get_preset
    from pirl.models.policy import Preparing
    from pirl.names import CAMERAS
    from pirl.recipes import get_config
    from pirl.serve.config import ServeConfig
    from pirl.serve.planner import Planner
    from pirl.serve.server import PolicyServer, in_background
    from pirl.training.acting import Acting, Found
    from pirl.training.build import build_chunk_policy, create_transform

    recipe = get_config("acrlpd_aloha_fold")
    model = get_preset("pi0_tiny" if preset == NONE else preset)
    model = replace(model, cameras=CAMERAS, horizon=recipe.model.horizon, action_dim=32)
    if preset == NONE:  # messages of realistic size
        model = replace(model, image_size=224, vision=replace(model.vision, patch_size=112), horizon=50)
    rollout = replace(recipe.rollout, best_of=best_of)
    data = replace(recipe.data, cameras=CAMERAS, tokenizer="byte")
    config = replace(recipe, model=model, data=data, rollout=rollout, init_weights=None, freeze=None)
    transform = create_transform(
        config.data,
        horizon=config.horizon,
        norm_stats=unit_stats(config.robot.state_dim, config.robot.action_dim),
        action_dim=model.action_dim,
        token_len=config.token_len,
        quantile=config.quantile_norm,
        discrete_state=config.discrete_state,
        image_size=model.image_size,
    )
    agent = build_agent(config)
    assert isinstance(agent, ACRLPD)
    assert isinstance(agent.policy, Preparing)
    weights = jax.jit(lambda key: agent.policy.for_inference(agent.policy.init(key)))(jax.random.key(0))
    params = {"policy": weights} | ({"critic": agent.critic.init(jax.random.key(1))} if best_of > 1 else {})
    policy = build_chunk_policy(config, agent, transform, best_of=best_of)
    acting = Acting(
        found=Found(folder=Path("random"), config=config, metadata={}),
        state=TrainState(step=np.int32(0), params=params),
        policy=policy,
    )
    settings = ServeConfig(port=0, max_batch=max_batch, real_time=real_time, max_rate=1e6)
    planner = Planner(acting, batch_sizes=settings.batch_sizes, real_time=real_time).compile()
    if preset == NONE:
        answer = Choice(jax.numpy.zeros((1, model.horizon, model.action_dim))), None
        planner._programs = dict.fromkeys(planner._programs, lambda *_: answer)
    with in_background(PolicyServer(lambda _: planner, settings)) as server:
        yield server


def unit_stats(state_dim: int, action_dim: int) -> Any:
    """Identity normalisation statistics."""
    from pirl.data.normalize import NormStats

    return {
        name: NormStats(mean=np.zeros(dim), std=np.ones(dim), q01=-np.ones(dim), q99=np.ones(dim))
        for name, dim in (("state", state_dim), ("actions", action_dim))
    }


def robots(
    *,
    port: int,
    robots: int,
    hz: float | None,
    requests: int = 10**9,
    seconds: float = 1e9,
    continues: bool = False,
) -> dict[str, Any]:
    """Request times of several robots, in seconds; each waits for its reply before the next request."""
    from pirl.robot.client import PolicyClient
    from pirl.robot.keys import DELAY, EXECUTED

    rng = np.random.default_rng(0)
    seen: dict[str, Any] = {"state": np.zeros(14, np.float32), "prompt": "fold"}
    seen["images"] = {
        name: rng.integers(0, 256, (3, 224, 224), np.uint8)
        for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")
    }
    begin, times, skipped = time.perf_counter() + 0.5, [], []

    def robot(number: int) -> None:
        with PolicyClient("127.0.0.1", port) as client:
            for turn in range(requests):
                due = begin if hz is None else begin + (turn + number / robots) / hz
                if due > begin + seconds:
                    return
                now = time.perf_counter()
                if hz is not None and now > due + 1 / hz:
                    skipped.append(turn)
                    continue
                time.sleep(max(0.0, due - now))
                start = time.perf_counter()
                client.infer(seen | ({EXECUTED: 5, DELAY: 2} if continues and turn else {}))
                if turn >= LEFT_OUT:
                    times.append(time.perf_counter() - start)

    threads = [threading.Thread(target=robot, args=(number,)) for number in range(robots)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"times": times, "skipped": len(skipped)}


if __name__ == "__main__":
    sys.exit(main())
