"""`pirl serve`: a policy server for robots that speak OpenPI's protocol."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pirl.cli.app import Parser, console, positive

NAME = "serve"
HELP = """\
Serves a checkpoint to robots over OpenPI's websocket protocol: a stock openpi-client, DROID's, LIBERO's or ALOHA's
runtime connects as to OpenPI's own server. Compiles everything before it listens, and batches requests of several
robots that arrive together.

CHECKPOINT is a step folder or a run folder (its latest step, or the best with --best). Weights trained by OpenPI need
--recipe. Override any setting with a dotted flag, as in `pirl train`: --rollout.flow-steps 5.

Listens on localhost unless --host is set; then also set a key (PIRL_API_KEY or --api-key-file), and preferably
--tls-cert. GET /healthz and /metrics answer over HTTP. SIGTERM finishes pending requests and exits. SIGHUP (or POST
/reload with the key) reloads the checkpoint for new episodes. SIGUSR1 prints latencies.

--shadow DATASET serves nothing: it runs the policy on a recorded dataset and compares the actions. --fit-novelty
DATASET serves nothing either: it stores features of the training data, for `novelty` in a --safety file."""
EXAMPLES = """\
examples:
  pirl serve checkpoints/acrlpd_tabletop/first
  pirl serve checkpoints/acrlpd_aloha_fold/box1 --host 0.0.0.0 --api-key-file key.txt --best-of 8 --real-time
  pirl serve gs://openpi-assets/checkpoints/pi05_libero --recipe acrlpd_libero --max-batch 16 --latency
  pirl serve checkpoints/acrlpd_aloha_fold/box1 --safety aloha_limits.yaml --metadata aloha.yaml
  pirl serve checkpoints/bc_tabletop/first --shadow demos/tabletop --episodes 20
  pirl serve checkpoints/bc_tabletop/first --fit-novelty demos/tabletop"""
USAGE = "%(prog)s CHECKPOINT [--port N] [--best-of N] [--real-time] [--shadow DATASET] [--SETTING VALUE ...]"
KEY_VARIABLE = "PIRL_API_KEY"


def add_arguments(parser: Parser) -> None:
    """Arguments of `pirl serve`; settings are left to the checkpoint's own configuration."""
    parser.usage, parser.takes_settings = USAGE, True
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="step folder, run folder or gs:// address")
    add("--best", action="store_true", help="use the run's best step, by its evaluations during training")
    add("--recipe", metavar="NAME", help="recipe or YAML file with the checkpoint's model and robot")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="port (default 8000; 0: a free one)")
    add("--api-key-file", type=Path, metavar="FILE", help=f"file with the key clients must send (or {KEY_VARIABLE})")
    add("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM): clients connect with wss://")
    add("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    add("--metadata", type=Path, metavar="FILE", help="YAML map that clients get on connecting, such as reset_pose")
    add("--default-prompt", metavar="TEXT", help="instruction for observations that have none")
    add("--best-of", type=positive, metavar="N", help="best of N candidates by the critic")
    add("--flow-steps", type=positive, metavar="N", help="Euler steps per chunk")
    add("--guidance", type=float, metavar="W", help="guidance scale, if the policy has a condition")
    add("--real-time", action="store_true", help="real-time chunking, for clients that report executed steps")
    add("--seed", type=int, default=0, metavar="S", help="seed of the policy's noise (default 0)")
    add("--max-batch", type=positive, default=4, metavar="N", help="most requests per batch (default 4)")
    add("--batch-window", type=float, default=3.0, metavar="MS", help="wait to fill a batch, in ms (default 3)")
    add("--max-message", type=positive, default=16, metavar="MIB", help="largest request, in MiB (default 16)")
    add("--max-rate", type=float, default=100.0, metavar="N", help="requests per second and connection (default 100)")
    add("--max-connections", type=positive, default=64, metavar="N", help="simultaneous connections (default 64)")
    add("--episode-gap", type=float, default=10.0, metavar="S", help="idle time that ends an episode (s, default 10)")
    add(
        "--drain",
        type=float,
        default=10.0,
        metavar="S",
        help="longest time to finish requests on shutdown, in s (default 10)",
    )
    add("--safety", type=Path, metavar="FILE", help="YAML file with limits on the robot's actions")
    add("--record", type=Path, metavar="DATASET", help="record every request with its chunk, for clients that do not")
    add("--record-fps", type=positive, metavar="N", help="--record: the robot's control steps per second")
    add("--record-execute", type=positive, metavar="N", help="--record: steps executed of each chunk (as in training)")
    add("--latency", action="store_true", help="print the latency of every stage at the end")
    add("--shadow", metavar="DATASET", help="serve nothing: compare with this recorded dataset")
    add("--fit-novelty", metavar="DATASET", help="serve nothing: store the features of this training dataset")
    add("--novelty-file", type=Path, metavar="FILE", help="--fit-novelty: file to write (default: in the checkpoint)")
    add("--episodes", type=positive, metavar="N", help="--shadow, --fit-novelty: only the first N episodes")
    stride = "--shadow, --fit-novelty: look every N steps (default 10; for novelty, to see about 5,000 frames)"
    add("--stride", type=positive, metavar="N", help=stride)
    add("--json", action="store_true", help="--shadow: print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Load, compile and serve until stopped; or compare with a dataset, or fit novelty."""
    _check_extra()
    from pirl.recipes import load
    from pirl.serve.load import loader
    from pirl.serve.safety import read_safety

    recipe = load(args.recipe) if args.recipe else None
    if args.fit_novelty:
        return _fit_novelty(args, recipe)
    settings = _settings(args)
    planners = loader(
        args.checkpoint,
        settings,
        best=args.best,
        recipe=recipe,
        change=lambda config: _changed(config, args),
        default_prompt=args.default_prompt,
        novelty=read_safety(args.safety).novelty if args.safety else None,
    )
    return _shadow(args, planners) if args.shadow else _serve(args, planners, settings)


def _check_extra() -> None:
    from importlib.util import find_spec

    from pirl.errors import MissingExtraError

    for package in ("websockets", "msgpack"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve", "`pirl serve`")


def _settings(args: argparse.Namespace) -> Any:
    from pirl.config_io import read_yaml
    from pirl.serve.config import ServeConfig

    return ServeConfig(
        host=args.host,
        port=args.port,
        api_key=_key(args.api_key_file, os.environ),
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        metadata=read_yaml(args.metadata) if args.metadata else {},
        seed=args.seed,
        max_batch=args.max_batch,
        batch_window=args.batch_window / 1000,
        real_time=args.real_time,
        max_message=args.max_message * 2**20,
        max_rate=args.max_rate,
        max_connections=args.max_connections,
        episode_gap=args.episode_gap,
        drain=args.drain,
    )


def _key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The API key from a file or the environment; not from the command line, which other users can read."""
    from pirl.errors import ConfigError

    if file is None:
        return environment.get(KEY_VARIABLE)
    try:
        return file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {file} cannot be read: {error}", hint="a text file with the key") from error


def _changed(config: Any, args: argparse.Namespace) -> Any:
    """The checkpoint's configuration with this command line's flags; plain samples by default, as in `pirl eval`."""
    import warnings

    from pirl.errors import ConfigError, PirlWarning

    rollout = {"best_of": 1 if config.evaluation is None else config.evaluation.best_of}
    rollout |= {name: value for name in ("best_of", "flow_steps") if (value := getattr(args, name)) is not None}
    config = replace(config, rollout=replace(config.rollout, **rollout))
    if config.agent.only_chooses and rollout["best_of"] == 1:
        message = "this run's improvement is in its critic; plain samples act as before training: --best-of N"
        warnings.warn(message, PirlWarning, stacklevel=2)
    if args.guidance is not None:
        if not config.agent.guided:
            hint = "some algorithms train one (the setting agent.guidance); see docs/which-algorithm.md"
            raise ConfigError("--guidance for a policy without a condition", hint=hint)
        config = replace(config, agent=replace(config.agent, guidance=args.guidance))
    if not args.settings:
        return config
    from pirl.recipes.flags import apply_flags

    return apply_flags(config, args.settings, prog=f"pirl {NAME} {args.checkpoint}")


def _serve(args: argparse.Namespace, planners: Any, settings: Any) -> int:
    import asyncio
    import logging
    import signal
    import sys
    import warnings

    from pirl.errors import PirlWarning
    from pirl.serve.server import PolicyServer

    style = "%(asctime)s %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=style, force=True)  # libraries set their own
    logging.getLogger("pirl.serve").setLevel(logging.INFO)
    logging.getLogger("pirl.serve.websockets").setLevel(logging.WARNING)
    if not settings.is_local and settings.api_key is None:
        message = f"{settings.host} is open to the network and there is no API key: anyone there can use this policy"
        warnings.warn(message, PirlWarning, stacklevel=2)
    sizes = ", ".join(map(str, settings.batch_sizes))
    print(f"loading {args.checkpoint}; compiling batches of {sizes}", flush=True)
    server = PolicyServer(planners, settings)
    recorder = _recorder(args, server)
    if args.safety is not None:
        from pirl.serve.safety import load_safety

        robot = server.robot
        server.safety = load_safety(args.safety, action_dim=robot.action_dim, state_dim=robot.state_dim)

    def ready() -> None:
        loop = asyncio.get_running_loop()
        actions = {"SIGTERM": server.stop, "SIGINT": server.stop, "SIGHUP": server.reload}
        actions["SIGUSR1"] = lambda: print(server.metrics.table(), flush=True)
        for name, action in actions.items():
            loop.add_signal_handler(getattr(signal, name), action)
        scheme = "ws" if settings.tls_cert is None else "wss"
        print(f"serving {server.policy} on {scheme}://{settings.host}:{server.port}", flush=True)

    try:
        asyncio.run(server.run(ready))
    finally:
        if recorder is not None:
            recorder.close()
            told = ", ".join(f"{count} {word}" for word, count in sorted(recorder.episodes.items())) or "none"
            print(f"recorded to {args.record}: episodes: {told}; outcomes: pirl label {args.record}")
    if args.latency:
        print(server.metrics.table())
    print(f"stopped after {server.metrics.counted('requests')} requests", flush=True)
    return 0


def _recorder(args: argparse.Namespace, server: Any) -> Any:
    """The server's recorder; None without --record."""
    if args.record is None:
        return None
    from pirl.errors import ConfigError
    from pirl.serve.recording import ExchangeRecorder

    if args.record_fps is None:
        raise ConfigError("--record without --record-fps", hint="your robot's control steps per second, such as 50")
    execute, robot = args.record_execute or server.execute, server.robot.name
    recorder = ExchangeRecorder(args.record, fps=args.record_fps, execute=execute, robot_type=robot)
    server.on_exchange, server.on_close = recorder.exchange, recorder.closed
    return recorder


def _fit_novelty(args: argparse.Namespace, recipe: Any) -> int:
    """Store features of the training data for the novelty check."""
    from pirl.serve.novelty import FILE, fit_dataset
    from pirl.training.acting import find_checkpoint, load_acting

    found = find_checkpoint(args.checkpoint, best=args.best, config=recipe)
    found = replace(found, config=_changed(found.config, args))
    novelty = fit_dataset(load_acting(found), args.fit_novelty, stride=args.stride, episodes=args.episodes)
    file = args.novelty_file or found.folder / FILE
    novelty.save(file)
    frames, components = novelty.rows.shape
    print(f"{frames} frames of {args.fit_novelty} in {components} components -> {file}")
    return 0


def _shadow(args: argparse.Namespace, planners: Any) -> int:
    """Compare with a recorded dataset and print the result."""
    import json

    from pirl.data import lerobot
    from pirl.progress import Progress
    from pirl.serve.shadow import shadow

    meta = lerobot.read_meta(lerobot.resolve(args.shadow))
    planner = planners(None)
    total = min(len(meta.episodes), args.episodes or len(meta.episodes))
    with Progress("comparing", total, unit="episodes") as progress:
        found = shadow(
            planner,
            meta.root,
            episodes=args.episodes,
            stride=args.stride or 10,
            on_episode=lambda _: progress.advance(),
        )
    if args.json:
        print(json.dumps({"policy": planner.name, "dataset": str(args.shadow), **found.to_json()}))
    else:
        _show(planner.name, found)
    return 0


def _show(name: str, found: Any) -> None:
    """Print errors by action dimension and by step of the chunk."""
    import numpy as np
    from rich.table import Table

    print(f"{name}: {found.chunks} chunks of {found.episodes} episodes, compared with the recorded actions")
    by_dim = Table("dimension", "error", "holding still", "spread of the data", title="mean over the chunk")
    for dim, spread in enumerate(found.spread):
        error, hold = (np.nanmean(x[:, dim]) for x in (found.error, found.hold))
        by_dim.add_row(str(dim), f"{error:.4f}", f"{hold:.4f}", f"{spread:.4f}")
    by_step = Table("step", "error / spread", "holding still / spread", title="mean over dimensions")
    scale = np.maximum(found.spread, 1e-9)
    for step in range(len(found.error)):
        by_step.add_row(str(step), *(f"{(x[step] / scale).mean():.3f}" for x in (found.error, found.hold)))
    console().print(by_dim)
    console().print(by_step)
